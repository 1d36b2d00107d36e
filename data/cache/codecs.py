"""Hidden states to the arrays that a cache stores, and back.

Lossy codecs pad a state with zeros to groups of 64 channels, rotate each group (Hadamard), round
it to a grid with one fp16 scale a group, and pack the codes; a few channels can be kept exactly
beside that. Compression is no business of this file: the writer of the shards does it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int16
from torch import Tensor, nn

from data.cache.quant import (
    GROUP,
    PACKINGS,
    Grid,
    IntegerGrid,
    NormalGrid,
    hadamard,
    hadamard_matrix,
)
from data.config import Codec

VALUES, SCALE, OUTLIERS = "", "_scale", "_outliers"
_BF16_BITS = {"bits_as": "bfloat16"}
_BF16_EXPONENT = 0x7F80
# Channels that are worked on at once.
_BLOCK_CPU, _BLOCK_GPU = 1 << 19, 1 << 27


@dataclass(frozen=True)
class Scheme:
    """What tells the lossy codecs apart.

    Attributes:
        num_outliers: channels kept exactly, as far as the width has so many.
    """

    grid: Grid
    rotated: bool = True
    num_outliers: int = 0


_INT8 = IntegerGrid(8, -127, 127, offset=0)
SCHEMES = {
    Codec.int8_h64: Scheme(_INT8),
    Codec.int8_h64_out8: Scheme(_INT8, num_outliers=8),
    Codec.int8_out32: Scheme(_INT8, rotated=False, num_outliers=32),
    Codec.int6_h64: Scheme(IntegerGrid(6, -31, 31, offset=32)),
    Codec.int4_h64: Scheme(IntegerGrid(4, -8, 7, offset=8)),
    Codec.nf4_h64: Scheme(NormalGrid()),
}


@dataclass(frozen=True)
class Component:
    """One stored array of a codec.

    Attributes:
        suffix: what its name adds to the name of the states: "", "_scale" or "_outliers".
        dtype: numpy's name. Tensors of "uint16" are int16 with the same bits, for torch computes
            with no uint16; other tensors have the type of that name.
        shape: of one token, leading axes included.
        dims: names of the axes that follow the leading ones.
        attributes: what is stored beside the array, as JSON.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)


class StateCodec:
    """Encodes states [n, *lead, D] of a fixed width D. Exact codecs are exact for bf16 states.

    Attributes:
        outlier_ids: channels kept exactly, int64 [*lead, num_outliers]; None when there are none.
    """

    def __init__(
        self,
        kind: Codec,
        width: int,
        lead: tuple[int, ...] = (),
        outlier_ids: Int[Tensor, "*lead num_outliers"] | None = None,
    ) -> None:
        """Makes the codec.

        Args:
            kind: which one.
            width: D, at least 1.
            lead: axes between token and channel, e.g. the number of tapped layers.
            outlier_ids: from `choose_outliers`, min(D, `needs_outliers`) for each lead index.

        Raises:
            ValueError: outlier_ids do not fit.
        """
        self.kind, self.width, self.lead = kind, width, lead
        self.num_outliers = min(needs_outliers(kind), width)
        self.outlier_ids = _checked(outlier_ids, (*lead, self.num_outliers), width)
        self._scheme = SCHEMES.get(kind)
        self._groups = math.ceil(width / GROUP)

    @property
    def compression(self) -> str | None:
        """Compressor of the shards' chunks, or None."""
        return "zstd" if self.kind is Codec.bf16_zstd else None

    @property
    def lossy(self) -> bool:
        """Whether decoded bf16 states can differ from those encoded."""
        return self._scheme is not None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all components, before compression."""
        sizes = (math.prod(c.shape) * np.dtype(c.dtype).itemsize for c in self.components())
        return sum(sizes)

    def components(self) -> tuple[Component, ...]:
        """The stored arrays."""
        if self._scheme is None:
            shape = (*self.lead, self.width)
            return (Component(VALUES, "uint16", shape, ("feature",), dict(_BF16_BITS)),)
        bits = self._scheme.grid.bits
        shape = (*self.lead, self._groups * GROUP * bits // 8)
        packing, attributes = PACKINGS[bits], {"quant": self._quant_attribute(self._scheme)}
        values = Component(VALUES, packing.dtype, shape, (packing.axis,), attributes)
        scale = Component(SCALE, "float16", (*self.lead, self._groups), ("group",))
        if not self.num_outliers:
            return values, scale
        shape = (*self.lead, self.num_outliers)
        return values, scale, Component(OUTLIERS, "uint16", shape, ("outlier",), dict(_BF16_BITS))

    @torch.no_grad()
    def encode(self, states: Float[Tensor, "n *lead D"]) -> dict[str, Tensor]:
        """The components' tensors by suffix, on the device of the states, with a token axis first.

        Types are as `Component` says, bytes in the machine's order. States that are not finite give
        some bytes or other, which `finite` tells.
        """
        if self._scheme is None:
            return {VALUES: _bf16_bits(states)}
        blocks = [self._encode_block(self._scheme, b) for b in states.split(self._step(states))]
        return {suffix: torch.cat([b[suffix] for b in blocks]) for suffix in blocks[0]}

    @torch.no_grad()
    def decode(
        self, stored: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> Float[Tensor, "n *lead D"]:
        """The states of encoded tensors, on their device; can share memory with them.

        Up to the last rounding to ``dtype`` the same on every device: see `_decode_groups`.
        """
        if self._scheme is None:
            return stored[VALUES].view(torch.bfloat16).to(dtype)
        values = stored[VALUES]
        shape = (len(values), *self.lead, self.width)
        states = torch.empty(shape, dtype=dtype, device=values.device)
        step = self._step(states)
        for low in range(0, len(values), step):
            block = {suffix: tensor[low : low + step] for suffix, tensor in stored.items()}
            y = self._decode_groups(self._scheme, block)
            states[low : low + step] = y.flatten(-2)[..., : self.width]
        if self.outlier_ids is not None:
            exact = stored[OUTLIERS].view(torch.bfloat16).to(dtype)
            ids = self.outlier_ids.to(exact.device)
            states.scatter_(-1, ids.expand(exact.shape), exact)
        return states

    def finite(self, stored: Mapping[str, Tensor]) -> Bool[Tensor, " n"]:
        """For each token whether its states were finite, and small enough for the fp16 scales."""
        if self._scheme is None:
            return _bf16_finite(stored[VALUES])
        finite = stored[SCALE].isfinite().flatten(1).all(1)
        return finite & _bf16_finite(stored[OUTLIERS]) if self.num_outliers else finite

    def error_bound(self) -> float:
        """Largest relative L2 error of 64 neighbouring channels (0 for exact codecs), in [0, 1].

        Proven in `Grid.error_bound`, which also says what happens below the smallest normal fp16
        scale; the rotation is orthonormal and keeps L2 norms. Groups are counted without their
        exact channels, and before decoded states are rounded to bf16.
        """
        return 0.0 if self._scheme is None else self._scheme.grid.error_bound()

    @staticmethod
    def choose_outliers(
        states: Float[Tensor, "n *lead D"], count: int
    ) -> Int[Tensor, "*lead count"]:
        """The ``count`` channels (or all, when there are fewer) of largest RMS, ascending."""
        energy = states.double().square().sum(0)
        order = energy.argsort(dim=-1, descending=True, stable=True)
        return order[..., :count].sort(dim=-1).values

    def _step(self, states: Tensor) -> int:
        """Tokens that are worked on at once. A large fp32 copy costs a CPU more in page faults than
        in arithmetic (measured: twice the time), and a GPU memory.
        """
        entries = _BLOCK_CPU if states.device.type == "cpu" else _BLOCK_GPU
        return max(entries // math.prod((*self.lead, self.width)), 1)

    def _encode_block(
        self, scheme: Scheme, states: Float[Tensor, "n *lead D"]
    ) -> dict[str, Tensor]:
        stored = {}
        flat = states.float()
        if self.outlier_ids is not None:
            ids = self.outlier_ids.to(states.device).expand(len(states), *self.outlier_ids.shape)
            stored[OUTLIERS] = _bf16_bits(states.gather(-1, ids))
            flat = flat.scatter(-1, ids, 0.0)
        padding = self._groups * GROUP - self.width
        y = nn.functional.pad(flat, (0, padding)) if padding else flat
        y = y.unflatten(-1, (self._groups, GROUP))
        if scheme.rotated:
            y = hadamard(y)
        scale = scheme.grid.scales(y)
        stored[VALUES] = PACKINGS[scheme.grid.bits].pack(scheme.grid.codes(y, scale)).flatten(-2)
        stored[SCALE] = scale.squeeze(-1)
        return stored

    def _decode_groups(
        self, scheme: Scheme, stored: Mapping[str, Tensor]
    ) -> Float[Tensor, "n *lead groups 64"]:
        """Decoded groups in fp32.

        The matrix product comes before the scales. Its sums are exact in fp32 (of 64 levels, which
        are integers or multiples of 2^-17, over 8), so that no library's order of addition shows.
        CUDA's TF32, if somebody allows it for fp32 products, is exact for the integers too, and
        rounds the levels of nf4 by 2^-11.
        """
        grid, values = scheme.grid, stored[VALUES]
        packed = values.unflatten(-1, (self._groups, GROUP * grid.bits // 8))
        y = grid.values(PACKINGS[grid.bits].unpack(packed))
        if scheme.rotated:
            with torch.autocast(y.device.type, enabled=False):  # it would round the sums to bf16
                y = y @ hadamard_matrix(y.device)
        return y.mul_(stored[SCALE].float().unsqueeze(-1))

    def _quant_attribute(self, scheme: Scheme) -> dict[str, Any]:
        """All that is needed to decode the array without this code."""
        grid = scheme.grid
        found: dict[str, Any] = {
            "scheme": self.kind.value,
            "width": self.width,
            "group": GROUP,
            "bits": grid.bits,
            "packing": PACKINGS[grid.bits].words,
        }
        steps = [
            "each group of 'group' channels has its own bytes ('packing') and one number of the "
            "array NAME_scale"
        ]
        if isinstance(grid, IntegerGrid):
            found["offset"] = grid.offset
            steps.append("y = (code - offset) * scale")
        else:
            found["levels"] = list(grid.levels)
            steps.append("y = levels[code] * scale")
        if scheme.rotated:
            found["hadamard"] = GROUP
            steps.append(
                "the group is the row y times H, where H[i, j] = (-1)^(number of ones in the "
                "binary form of i AND j) / sqrt(hadamard)"
            )
        steps.append("only the first 'width' channels count")
        if self.outlier_ids is not None:
            found["outliers"] = self.outlier_ids.tolist()
            steps.append("channel outliers[..., k] is number k of the array NAME_outliers instead")
        return found | {"decode": "; ".join(steps)}


def needs_outliers(kind: Codec) -> int:
    """How many channels a codec keeps exactly."""
    return SCHEMES[kind].num_outliers if kind in SCHEMES else 0


def _checked(ids: Tensor | None, shape: tuple[int, ...], width: int) -> Tensor | None:
    """The outlier channels as int64 on the CPU; None for codecs that keep none.

    Raises:
        ValueError: another shape, or not ascending channels below the width.
    """
    if not shape[-1] and ids is None:
        return None
    if ids is None or ids.shape != shape or not shape[-1]:
        raise ValueError(f"outlier_ids must have the shape {shape}, or be None without outliers")
    ids = ids.to("cpu", torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= width or bool((ids.diff(dim=-1) <= 0).any()):
        raise ValueError(f"outlier_ids must be ascending channels from 0 to {width - 1}")
    return ids


def _bf16_bits(states: Float[Tensor, "*s"]) -> Int16[Tensor, "*s"]:
    return states.to(torch.bfloat16).contiguous().view(torch.int16)


def _bf16_finite(bits: Int16[Tensor, " n *s"]) -> Bool[Tensor, " n"]:
    return (bits & _BF16_EXPONENT).flatten(1).amax(1) != _BF16_EXPONENT
