"""The block attention equals the dense masked reference, in value and gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from train.models.attention import block_attention, context_visible, dense_attention

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
Shape = tuple[int, int, int, int, int, int, int]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

shapes = st.tuples(
    st.integers(1, 2),  # B
    st.integers(1, 3),  # N
    st.integers(1, 4),  # K
    st.integers(1, 2),  # G
    st.integers(1, 3),  # H / G
    st.sampled_from([2, 4]),  # E
    st.integers(1, 6),  # C
)


def inputs(shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    B, N, K, G, repeat, E, C = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(B, N, K, G * repeat, E), (B, C, G, E), (B, C, G, E), (B, N, K, G, E), (B, N, K, G, E)]
    query, context_key, context_value, block_key, block_value = (
        (2 * torch.randn(size, generator=generator, dtype=dtype)).requires_grad_() for size in sizes
    )
    return query, context_key, context_value, block_key, block_value


def compare(tensors: Inputs, visible: Tensor | None) -> None:
    tolerance = TOLERANCE[tensors[0].dtype]
    found = block_attention(*tensors, visible)
    expected = dense_attention(*tensors, visible)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    gradients = torch.autograd.grad(found, tensors, cotangent)
    for mine, reference in zip(
        gradients, torch.autograd.grad(expected, tensors, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(shape=shapes, data=st.data())
def test_equals_dense_attention(dtype: torch.dtype, shape: Shape, data: st.DataObject) -> None:
    B, N, C = shape[0], shape[1], shape[6]
    places = st.lists(st.integers(0, C), min_size=B * N, max_size=B * N)
    anchors = torch.tensor(data.draw(places)).view(B, N)
    seed = data.draw(st.integers(0, 2**31))
    compare(inputs(shape, dtype, seed), context_visible(anchors, C))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_without_a_mask_the_whole_context_is_seen(
    dtype: torch.dtype, shape: Shape, seed: int
) -> None:
    compare(inputs(shape, dtype, seed), None)


def test_query_heads_share_key_heads_in_order() -> None:
    query, key, value, *block = inputs((1, 1, 2, 2, 2, 4, 3), torch.float32, 0)
    other = value.detach().clone()
    other[:, :, 1] += 1  # the second key/value head
    base = block_attention(query, key, value, block[0], block[1], None)
    found = block_attention(query, key, other, block[0], block[1], None)
    changed = (found != base).flatten(0, 2).any(0).any(-1)
    assert changed.tolist() == [False, False, True, True]


def test_a_block_without_context_attends_to_itself_alone() -> None:
    tensors = inputs((1, 2, 3, 1, 2, 4, 5), torch.float32, 0)
    visible = context_visible(torch.tensor([[0, 3]]), 5)
    out = block_attention(*tensors, visible)
    gradients = torch.autograd.grad(out[:, 0].sum(), tensors)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[1].any()
    assert not gradients[2].any()
    assert gradients[4][:, 0].any()


def test_context_is_visible_strictly_before_the_anchor() -> None:
    assert context_visible(torch.tensor([[0, 2]]), 4)[0].tolist() == [
        [False, False, False, False],
        [True, True, False, False],
    ]
