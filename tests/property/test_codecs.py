"""Laws of the codecs, for any width, shape and size of the states."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.cache.codecs import SCHEMES, Component, StateCodec, needs_outliers
from data.config import Codec

GROUP = 64
LOSSY = tuple(SCHEMES)
WITH_OUTLIERS = tuple(k for k in LOSSY if needs_outliers(k))


@dataclass(frozen=True)
class Case:
    codec: StateCodec
    states: Tensor


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[Codec, ...] = tuple(Codec), least: int = 0) -> Case:
    """States of any width and size, with massive channels: bf16, or fp32 as an fp32 target has."""
    kind = draw(st.sampled_from(kinds))
    width = draw(st.integers(1, 200))
    lead = draw(st.sampled_from([(), (1,), (3,)]))
    shape = (draw(st.integers(least, 5)), *lead, width)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    states = torch.randn(shape, generator=generator) * 10.0 ** draw(st.floats(-6, 5))
    if draw(st.booleans()):  # coarse values: ties, groups of equal values, groups of zeros
        states = states.sign() * states.abs().log2().round().clamp(-8, 8).exp2() * (states > 0)
    massive = draw(st.lists(st.integers(0, width - 1), max_size=3))
    states[..., massive] *= draw(st.sampled_from([0.0, 30.0, 1000.0]))
    if draw(st.booleans()):
        states = states.bfloat16()
    count = needs_outliers(kind)
    calibration = torch.randn((9, *lead, width), generator=generator)
    calibration[..., massive] *= 50
    ids = StateCodec.choose_outliers(calibration, count) if count else None
    return Case(StateCodec(kind, width, lead, ids), states)


def grouped(codec: StateCodec, states: Tensor) -> Tensor:
    """[n, *lead, groups, 64] in fp64, padded, with zeros where channels are kept exactly."""
    full = states.double().clone()
    if codec.outlier_ids is not None:
        full.scatter_(-1, codec.outlier_ids.expand(len(full), *codec.outlier_ids.shape), 0.0)
    full = torch.nn.functional.pad(full, (0, -codec.width % GROUP))
    return full.unflatten(-1, (-1, GROUP)) if len(full) else full.new_zeros(0, 1, GROUP)


def scaled_peaks(codec: StateCodec, states: Tensor) -> Tensor:
    """Largest magnitude of each (rotated) group over the outermost level: what fp16 must hold."""
    scheme = SCHEMES[codec.kind]
    y = grouped(codec, states)
    if scheme.rotated:
        y = y @ torch.from_numpy(sylvester(GROUP))
    return y.abs().amax(-1) / max(map(abs, scheme.grid.levels))


def sylvester(size: int) -> np.ndarray:
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return np.array(signs, dtype=np.float64) / float(np.sqrt(size))


@given(case=cases(LOSSY))
def test_every_group_keeps_within_the_error_bound(case: Case) -> None:
    codec, states = case.codec, case.states
    stored = codec.encode(states)
    fine, peaks = codec.finite(stored), scaled_peaks(codec, states)
    before = grouped(codec, states)[fine]
    error = (grouped(codec, codec.decode(stored, torch.float32))[fine] - before).norm(dim=-1)
    # A scale below 2^-14 is a subnormal fp16 number, which errs by 2^-25 at most: each of 64
    # levels then moves by that times its distance from 0, in units of the scale.
    top = max(map(abs, SCHEMES[codec.kind].grid.levels))
    moved = torch.where(peaks[fine] < 2**-14, 8 * top * 2**-25, 0.0)
    allowed = codec.error_bound() * before.norm(dim=-1) + moved
    assert bool((error <= allowed).all())
    # bf16 has 8 significant bits: half a unit in the last place is 2^-9 of a value at most, and of
    # the decoded one, whose norm is the error off the state's.
    rounded = (grouped(codec, codec.decode(stored))[fine] - before).norm(dim=-1)
    assert bool((rounded <= allowed + 2**-9 * (before.norm(dim=-1) + allowed)).all())


@given(
    kind=st.sampled_from([Codec.bf16, Codec.bf16_zstd]),
    bits=st.lists(st.integers(-(2**15), 2**15 - 1), max_size=40),
    lead=st.sampled_from([(), (2,)]),
)
def test_exact_codecs_keep_every_bit(kind: Codec, bits: list[int], lead: tuple[int, ...]) -> None:
    size = 2 * (len(bits) // 2)
    numbers = torch.tensor(bits[:size], dtype=torch.int16).view(-1, *lead, 1 if lead else 2)
    codec = StateCodec(kind, numbers.shape[-1], lead)
    stored = codec.encode(numbers.view(torch.bfloat16))
    assert torch.equal(stored[""], numbers)
    assert torch.equal(codec.decode(stored).view(torch.int16), numbers)
    assert codec.decode(stored, torch.float32).dtype == torch.float32


@given(case=cases(WITH_OUTLIERS))
def test_outliers_are_kept_bit_by_bit(case: Case) -> None:
    codec, states = case.codec, case.states
    assert codec.outlier_ids is not None
    ids = codec.outlier_ids.expand(len(states), *codec.outlier_ids.shape)
    exact = states.bfloat16().gather(-1, ids).view(torch.int16)
    stored = codec.encode(states)
    assert torch.equal(stored["_outliers"], exact)
    assert torch.equal(codec.decode(stored).gather(-1, ids).view(torch.int16), exact)
    spoilt = codec.encode(states.scatter(-1, ids, 1e30))  # the other channels do not see them
    assert torch.equal(spoilt[""], stored[""])
    assert torch.equal(spoilt["_scale"], stored["_scale"])


@given(case=cases(least=1))
def test_tokens_are_encoded_alike_alone_together_and_again(case: Case) -> None:
    codec, states = case.codec, case.states
    before = states.clone()
    stored = codec.encode(states)
    assert torch.equal(states, before)
    alone = [codec.encode(states[i : i + 1]) for i in range(len(states))]
    turned = codec.encode(states.flip(0))
    for suffix, tensor in stored.items():
        assert torch.equal(tensor, torch.cat([one[suffix] for one in alone]))
        assert torch.equal(tensor, turned[suffix].flip(0))
        assert torch.equal(tensor, codec.encode(states)[suffix])
    decoded = codec.decode(stored)
    assert decoded.shape == states.shape
    assert decoded.is_contiguous()
    fine = codec.finite(stored)
    one_by_one = torch.cat([codec.decode(one) for one in alone])
    assert torch.equal(decoded[fine], one_by_one[fine])


@given(case=cases())
def test_stored_tensors_are_what_the_components_say(case: Case) -> None:
    codec, states = case.codec, case.states
    stored = codec.encode(states)
    components = codec.components()
    assert set(stored) == {c.suffix for c in components}
    total = 0
    for component in components:
        found = stored[component.suffix].numpy()
        assert found.shape == (len(states), *component.shape)
        name = "int16" if component.dtype == "uint16" else component.dtype
        assert found.dtype == np.dtype(name)
        total += found.nbytes
    assert total == len(states) * codec.token_bytes


@given(
    case=cases(least=1),
    place=st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 199)),
    value=st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -7e4, 3e6, None]),
)
def test_finite_tells_what_cannot_be_stored_and_nothing_else(
    case: Case, place: tuple[int, int, int], value: float | None
) -> None:
    codec, states = case.codec, case.states
    if value is not None:
        token, layer, channel = place
        layers = states[token % len(states)].reshape(-1, codec.width)
        layers[layer % len(layers), channel % codec.width] = value
    expected = states.isfinite().flatten(1).all(1)
    if codec.lossy:
        peaks = scaled_peaks(codec, states.nan_to_num(0.0, 0.0, 0.0))
        assume(not bool(((peaks > 65400) & (peaks < 65600)).any()))  # fp16 ends at 65,520
        expected &= (peaks < 65520).flatten(1).all(1)
    stored = codec.encode(states)
    assert torch.equal(codec.finite(stored), expected)
    again = codec.encode(states)
    assert all(
        again[suffix].numpy().tobytes() == t.numpy().tobytes() for suffix, t in stored.items()
    )
    assert bool(codec.decode(stored)[expected].isfinite().all())


def codes_of(quant: dict[str, Any], stored: np.ndarray) -> np.ndarray:
    """[n, groups, 64] codes from bytes, as attribute 'packing' says."""
    size = quant["group"] * quant["bits"] // 8
    groups = stored.shape[-1] // size
    data = stored.reshape(*stored.shape[:-1], groups, size).astype(int)
    codes = np.zeros((*data.shape[:-1], quant["group"]), int)
    if quant["bits"] == 8:
        codes[...] = data
    if quant["bits"] == 4:
        for j in range(32):
            codes[..., 2 * j], codes[..., 2 * j + 1] = data[..., j] % 16, data[..., j] // 16
    if quant["bits"] == 6:
        for j in range(48):
            codes[..., j] = data[..., j] % 64
            codes[..., 48 + j % 16] += data[..., j] // 64 * 4 ** (j // 16)
    return codes


def decode_by_attribute(quant: dict[str, Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """fp32 states from arrays of one token axis and one layer axis, as attribute 'decode' says."""
    codes = codes_of(quant, arrays[""])
    y = np.array(quant["levels"])[codes] if "levels" in quant else codes - float(quant["offset"])
    if "hadamard" in quant:
        y = y @ sylvester(quant["hadamard"])
    y = y.astype(np.float32) * arrays["_scale"].astype(np.float32)[..., None]
    states = y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])[..., : quant["width"]]
    for layer, channels in enumerate(quant.get("outliers", [])):
        bits = arrays["_outliers"][:, layer].astype(np.uint16).astype(np.uint32) << 16
        states[:, layer, channels] = bits.view(np.float32)
    return states


def attributes(components: tuple[Component, ...]) -> dict[str, Any]:
    return {c.suffix: c.attributes for c in components}


@settings(max_examples=100)
@given(case=cases(LOSSY, least=1))
def test_attribute_says_all_that_a_decoder_needs(case: Case) -> None:
    codec, states = case.codec, case.states
    stored = codec.encode(states)
    fine = codec.finite(stored)
    stored = {suffix: tensor[fine] for suffix, tensor in stored.items()}
    quant = dict(attributes(codec.components())[""]["quant"])
    arrays = {suffix: t.numpy() for suffix, t in stored.items()}
    if not codec.lead:
        arrays = {suffix: a[:, None] for suffix, a in arrays.items()}
        if "outliers" in quant:
            quant["outliers"] = [quant["outliers"]]
    found = codec.decode(stored, torch.float32).numpy()
    expected = decode_by_attribute(quant, arrays).reshape(found.shape)
    np.testing.assert_array_equal(found, expected)
