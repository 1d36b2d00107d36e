"""Codecs by hand: a few states byte for byte, and what the codecs say of themselves."""

import json

import pytest
import torch
from torch import Tensor

from data.cache.codecs import SCHEMES, StateCodec, needs_outliers
from data.cache.quant import (
    GROUP,
    PACKINGS,
    IntegerGrid,
    hadamard,
    hadamard_matrix,
    nf4_levels,
)
from data.config import Codec

LOSSY = tuple(SCHEMES)
EXACT = (Codec.bf16, Codec.bf16_zstd)
CPU = torch.device("cpu")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def codec_of(kind: Codec, width: int, lead: tuple[int, ...] = ()) -> StateCodec:
    """A codec that keeps its last channels exactly, if it keeps any."""
    count = min(needs_outliers(kind), width)
    ids = torch.arange(width - count, width).expand(*lead, count) if count else None
    return StateCodec(kind, width, lead, ids)


def impulse(channel: int, value: float) -> Tensor:
    """One token whose rotated group is +-value: all +value for channel 0, signs by turns for 1."""
    return torch.nn.functional.one_hot(torch.tensor([channel]), GROUP) * 8.0 * value


def turns(even: int, odd: int, count: int) -> list[int]:
    return [even, odd] * (count // 2)


@pytest.mark.parametrize(
    ("kind", "channel", "value", "scale", "expected"),
    [
        (Codec.int8_h64, 0, 127.0, 1.0, [127] * 64),
        (Codec.int8_h64, 1, 254.0, 2.0, turns(127, -127, 64)),
        # Codes 63 and 1 for 31 and -31. Value 48+i lies in the high bits: 63 gives 11 11 11, and
        # 1 gives 01 to the first sixteen bytes and nothing to the others.
        (Codec.int6_h64, 0, 31.0, 1.0, [0xFF] * 48),
        (Codec.int6_h64, 1, 31.0, 1.0, turns(0xFF, 0x41, 16) + turns(0xFF, 0x01, 32)),
        # The peak is code 0, whatever its sign: the scale takes the sign.
        (Codec.int4_h64, 0, 8.0, -1.0, [0x00] * 32),
        (Codec.int4_h64, 0, -8.0, 1.0, [0x00] * 32),
        (Codec.int4_h64, 1, 8.0, -1.0, [0xF0] * 32),
        (Codec.nf4_h64, 0, 0.5, 0.5, [0xFF] * 32),
        (Codec.nf4_h64, 1, -0.5, 0.5, [0xF0] * 32),
        (Codec.nf4_h64, 0, 0.0, 0.0, [0x77] * 32),
        (Codec.int4_h64, 0, 0.0, 0.0, [0x88] * 32),
    ],
)
def test_rotated_impulse_is_stored_as_computed_by_hand(
    kind: Codec, channel: int, value: float, scale: float, expected: list[int]
) -> None:
    stored = StateCodec(kind, GROUP).encode(impulse(channel, value))
    assert stored[""].tolist() == [expected]
    assert stored["_scale"].tolist() == [[scale]]


def test_unrotated_codec_rounds_half_to_even_around_its_outliers() -> None:
    states = torch.zeros(1, 70)
    states[0, :6] = torch.tensor([-127.0, 0.5, 1.5, 2.4, -3.6, 1e4])
    states[0, 64:] = torch.tensor([254.0, 1.0, 3.0, 5.2, -1e30, 7.0])
    ids = torch.tensor([5, *range(33, 63), 68])
    stored = StateCodec(Codec.int8_out32, 70, (), ids).encode(states)
    assert stored["_scale"].tolist() == [[1.0, 2.0]]
    assert stored[""][0, :6].tolist() == [-127, 0, 2, 2, -4, 0]
    assert stored[""][0, 64:].tolist() == [127, 0, 2, 3, 0, 4] + [0] * 58
    exact = stored["_outliers"].view(torch.bfloat16)
    assert torch.equal(exact, states[:, ids].bfloat16())


def test_packing_of_single_values() -> None:
    codes = torch.zeros(GROUP, dtype=torch.uint8)
    codes[2], codes[7] = 9, 5
    assert PACKINGS[4].pack(codes).nonzero().flatten().tolist() == [1, 3]
    assert PACKINGS[4].pack(codes)[[1, 3]].tolist() == [0x09, 0x50]
    codes = torch.zeros(GROUP, dtype=torch.uint8)
    codes[20], codes[52] = 0b100110, 0b111001
    packed = PACKINGS[6].pack(codes)
    assert packed.nonzero().flatten().tolist() == [4, 20, 36]
    assert packed[[4, 20, 36]].tolist() == [0b01_000000, 0b10_100110, 0b11_000000]


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_every_code_comes_back_from_every_place(bits: int) -> None:
    places = torch.eye(GROUP, dtype=torch.uint8)
    for code in range(1 << bits):
        codes = places * code
        packed = PACKINGS[bits].pack(codes)
        assert packed.shape == (GROUP, GROUP * bits // 8)
        assert torch.equal(PACKINGS[bits].unpack(packed), codes)


def test_levels_are_the_published_normal_float() -> None:
    levels = nf4_levels()
    below = [-1.0, -0.696193, -0.525073, -0.394917, -0.284441, -0.184773, -0.09105]
    above = [0.07958, 0.16093, 0.246112, 0.337915, 0.44071, 0.562617, 0.722957, 1.0]
    published = [*below, 0.0, *above]
    assert levels == pytest.approx(published, abs=2**-18 + 1e-6)  # rounded to 2^-17, and here
    assert {levels[0], levels[7], levels[15]} == {-1.0, 0.0, 1.0}
    assert sorted(set(levels)) == list(levels)
    assert all((v * 2**17).is_integer() for v in levels)


@pytest.mark.parametrize("device", DEVICES)
def test_rotation_is_the_sylvester_matrix_and_its_own_inverse(device: str) -> None:
    rows = hadamard(torch.eye(GROUP, device=device)).cpu()
    expected = [[(-1) ** (i & j).bit_count() / 8 for j in range(GROUP)] for i in range(GROUP)]
    assert rows.tolist() == expected
    assert torch.equal(hadamard_matrix(torch.device(device)).cpu(), rows)
    assert torch.equal(hadamard(rows), torch.eye(GROUP))


def test_codes_of_a_scale_that_rounds_down_to_subnormal_are_clamped() -> None:
    peak = 1.49 * 2**-24 * 127  # its scale rounds to 2^-24: 189 steps
    stored = StateCodec(Codec.int8_h64, GROUP).encode(impulse(1, peak))
    assert stored["_scale"].item() == 2**-24
    assert stored[""].tolist() == [turns(127, -127, 64)]


@pytest.mark.parametrize(
    ("kind", "taps", "last"),
    [
        (Codec.bf16, 5760, 1152),
        (Codec.bf16_zstd, 5760, 1152),
        (Codec.int8_h64, 2970, 594),
        (Codec.int8_h64_out8, 3050, 610),
        (Codec.int8_out32, 3290, 658),
        (Codec.int6_h64, 2250, 450),
        (Codec.int4_h64, 1530, 306),
        (Codec.nf4_h64, 1530, 306),
    ],
)
def test_bytes_of_a_token_of_width_576(kind: Codec, taps: int, last: int) -> None:
    assert codec_of(kind, 576, (5,)).token_bytes == taps
    assert codec_of(kind, 576).token_bytes == last


@pytest.mark.parametrize("kind", LOSSY)
def test_every_value_goes_to_the_nearest_level(kind: Codec) -> None:
    grid = SCHEMES[kind].grid
    levels = torch.tensor(grid.levels)
    y = torch.linspace(float(levels[0]), float(levels[-1]), 50 * GROUP).view(50, GROUP)
    scale = torch.full((50, 1), 0.25, dtype=torch.float16)
    found = grid.values(grid.codes(y / 4, scale))
    assert torch.equal((found - y).abs(), (levels - y[..., None]).abs().amin(-1))


@pytest.mark.parametrize("kind", LOSSY)
def test_error_bound_is_reached(kind: Codec) -> None:
    grid = SCHEMES[kind].grid
    levels, peak = torch.tensor(grid.levels), max(map(abs, grid.levels))
    midpoints = (levels[1:] + levels[:-1]) / 2
    y = midpoints[:, None].repeat(1, GROUP)
    y[:, 0] = peak
    found = grid.values(grid.codes(y, grid.scales(y))) * grid.scales(y).float()
    worst = float(((found - y).norm(dim=1) / y.norm(dim=1)).max())
    bound = codec_of(kind, 1).error_bound()
    assert worst <= bound <= 1.01 * worst + 2**-10


def test_error_bound_counts_what_lies_beyond_the_last_level() -> None:
    # Levels -1 and 0 only: an entry of +1 beside a peak of -1 is lost entirely.
    grid = IntegerGrid(4, -1, 0, offset=8)
    y = torch.ones(1, GROUP)
    y[0, 0] = -1.0
    stored = grid.values(grid.codes(y, torch.ones(1, 1, dtype=torch.float16)))
    assert float((stored - y).norm() / y.norm()) == pytest.approx((63 / 64) ** 0.5)
    assert grid.error_bound() >= (63 / 64) ** 0.5


@pytest.mark.parametrize("kind", Codec)
def test_what_a_codec_says_of_itself(kind: Codec) -> None:
    codec = codec_of(kind, 100, (2,))
    assert codec.lossy == (kind not in EXACT) == (codec.error_bound() > 0)
    assert codec.compression == ("zstd" if kind is Codec.bf16_zstd else None)
    assert needs_outliers(kind) == {Codec.int8_out32: 32, Codec.int8_h64_out8: 8}.get(kind, 0)
    for component in codec.components():
        assert json.loads(json.dumps(component.attributes)) == component.attributes
        assert len(component.shape) == 1 + len(component.dims)
        exact = kind in EXACT or component.suffix == "_outliers"
        assert component.attributes.get("bits_as") == ("bfloat16" if exact else None)
    quant = codec.components()[0].attributes.get("quant", {})
    assert quant.get("scheme", kind.value) == kind.value
    assert ("quant" in codec.components()[0].attributes) == codec.lossy


def test_outliers_are_the_channels_of_largest_rms() -> None:
    states = torch.tensor([[[1.0, -9.0, 2.0, 4.0], [0.0, 5.0, -5.0, 5.0]],
                           [[8.0, 0.0, 2.0, -4.0], [0.0, 5.0, 5.0, 5.0]]])  # fmt: skip
    assert StateCodec.choose_outliers(states, 2).tolist() == [[0, 1], [1, 2]]
    assert StateCodec.choose_outliers(states, 3).tolist() == [[0, 1, 3], [1, 2, 3]]
    assert StateCodec.choose_outliers(states, 9).tolist() == [[0, 1, 2, 3]] * 2
    assert StateCodec.choose_outliers(torch.ones(2, 500), 3).tolist() == [0, 1, 2]
    assert StateCodec.choose_outliers(torch.ones(0, 5), 2).tolist() == [0, 1]
    large = torch.full((3, 2), 1e30)  # squares beyond fp32
    large[:, 1] *= 2
    assert StateCodec.choose_outliers(large, 1).tolist() == [1]


@pytest.mark.parametrize(
    "ids",
    [None, [[0, 1]], [[1, 0]] * 3, [[1, 1]] * 3, [[0, 2]] * 3, [[-1, 0]] * 3, [[0, 1, 1]] * 3],
)
def test_outliers_that_do_not_fit_are_refused(ids: list[list[int]] | None) -> None:
    with pytest.raises(ValueError, match="outlier_ids must"):
        StateCodec(Codec.int8_out32, 2, (3,), None if ids is None else torch.tensor(ids))


def test_outliers_of_a_codec_that_keeps_none_are_refused() -> None:
    with pytest.raises(ValueError, match="outlier_ids must"):
        StateCodec(Codec.int8_h64, 2, (), torch.tensor([0]))


@pytest.mark.parametrize("kind", LOSSY)
def test_blocks_of_tokens_do_not_show(kind: Codec) -> None:
    states = torch.randn(700, 5, 192, generator=torch.Generator().manual_seed(1))
    assert states.numel() > 1 << 19
    codec = codec_of(kind, 192, (5,))
    whole = codec.encode(states)
    pieces = [codec.encode(piece) for piece in states.split(99)]
    for suffix, tensor in whole.items():
        assert torch.equal(tensor, torch.cat([piece[suffix] for piece in pieces]))
    decoded = torch.cat([codec.decode(piece) for piece in pieces])
    assert torch.equal(codec.decode(whole), decoded)


@pytest.mark.parametrize("kind", Codec)
def test_layout_of_the_states_in_memory_does_not_show(kind: Codec) -> None:
    states = torch.randn(3, 192, 4).transpose(1, 2)
    codec = codec_of(kind, 192, (4,))
    expected = codec.encode(states.contiguous())
    for suffix, tensor in codec.encode(states).items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[suffix])


@pytest.mark.parametrize("kind", LOSSY)
def test_autocast_does_not_coarsen_what_is_decoded(kind: Codec) -> None:
    codec = codec_of(kind, 100)
    stored = codec.encode(torch.randn(3, 100))
    expected = codec.decode(stored, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(codec.decode(stored, torch.float32), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", Codec)
def test_cuda_stores_and_decodes_the_cpus_bits(kind: Codec) -> None:
    codec = codec_of(kind, 200, (5,))
    states = torch.randn(300, 5, 200).bfloat16() * torch.logspace(-6, 4, 300)[:, None, None]
    stored = codec.encode(states)
    moved = codec.encode(states.to("cuda"))
    for suffix, tensor in stored.items():
        assert torch.equal(moved[suffix].cpu(), tensor)
    assert torch.equal(codec.decode(moved).cpu(), codec.decode(stored))
