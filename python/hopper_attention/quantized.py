"""Q, K and V in e4m3 with their scales, and the options by which they were made: what attention is given.

:mod:`hopper_attention.quantization_rules` says how such tensors are made; nothing here makes one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch.nn.functional import pad

from hopper.forward.fp8.config import FP8_KEYS_PER_STEP
from hopper.forward.fp8.tilings import FP8_TILINGS, select_fp8_forward_config
from hopper.quantize.config import DEFAULT_BLOCK_Q, DEFAULT_SMOOTH_V, E4M3_MAX
from hopper_attention import compiled
from hopper_attention.problem import length_bounds

E4M3 = torch.float8_e4m3fn

TILE = "tile"
"""``block_k`` of as many rows as the attention kernel has keys in a tile."""

BLOCK_K_WITHOUT_KERNEL = 128

FP8_HEAD_DIMS = tuple(sorted({head_dim for head_dim, _ in FP8_TILINGS}))
"""The larger of head_dim and head_dim_v is rounded up to one of these."""

EXCHANGED_DIGITS = (-3, -2)
"""Digits of a key's number that ``hopper.forward.fp8.config.FP8_KEY_ORDER`` exchanges, counted from its last."""

Made = TypeVar("Made")

GRANULARITIES = ("tensor", "head", "block")
FLAGS = ("rotate", "smooth_k", "rotate_v", "smooth_v")
"""Options that are on or off."""


class BlockWidths(NamedTuple):
    """Rows of K and V in a block by seqlen_k: those of the first pair (longest seqlen_k, rows) that is long enough."""

    up_to: tuple[tuple[int, int], ...]
    beyond: int

    def of(self, seqlen_k: int) -> int:
        for longest, rows in self.up_to:
            if seqlen_k <= longest:
                return rows
        return self.beyond

    def narrowest(self) -> int:
        return min((self.beyond, *(rows for _, rows in self.up_to)))


def default_block_k(
    head_dim: int, head_dim_v: int, seqlen_k: int, two_level: bool = False, causal: bool = False
) -> int:
    """Rows of K and V in a block unless told otherwise: the keys of a tile of the attention kernel with one level of
    accumulation or, with ``two_level``, of that with two if its tiles would divide those. ``seqlen_k`` are the keys
    that a query sees at most."""
    return default_block_widths(head_dim, head_dim_v, two_level, causal).of(seqlen_k)


def default_block_widths(head_dim: int, head_dim_v: int, two_level: bool, causal: bool) -> BlockWidths:
    """:func:`default_block_k` for every length."""
    # Sizes are compared and not looked up: torch.compile may have symbols for them, which have no hash.
    for native in FP8_HEAD_DIMS:
        if head_dim <= native and head_dim_v <= native:
            return _tile_widths(native, two_level, causal)
    return BlockWidths((), BLOCK_K_WITHOUT_KERNEL)


@compiled.assume_constant_result
def _tile_widths(native: int, two_level: bool, causal: bool) -> BlockWidths:
    """Of the kernels for one of ``FP8_HEAD_DIMS``. torch.compile calls it, and does not look into it."""
    return _find_tile_widths(native, two_level, causal)


@cache
def _find_tile_widths(native: int, two_level: bool, causal: bool) -> BlockWidths:
    lengths = length_bounds()
    rows = [_tile_keys(native, n, two_level, causal) for n in lengths]
    steps = zip(lengths[:-1], rows[:-1], rows[1:], strict=True)
    return BlockWidths(tuple((longest, n) for longest, n, next_n in steps if n != next_n), rows[-1])


def _tile_keys(native: int, seqlen_k: int, two_level: bool, causal: bool) -> int:
    select = partial(
        select_fp8_forward_config, native, native, causal, "bfloat16", seqlen_k, half_scores=True
    )
    width = select().tile_n
    is_divided = two_level and select(width, two_level=True).tile_n < width
    return select(two_level=True).tile_n if is_divided else width


@dataclass(frozen=True)
class Fp8Quantization:
    """How Q, K and V become e4m3.

    Attributes:
        rotate: multiply Q and K by a random-sign Hadamard matrix along head_dim (:func:`rotate_head_dim`).
        granularity: what shares a scale. "tensor": everything; "head": a batch entry's key/value head, or the
            group of query heads that reads it; "block": ``block_q`` rows of a query head, ``block_k`` rows of
            a key/value head.
        block_q: rows of Q in a block. With 1, the largest element of every row becomes +-16 up to head_dim 64 and +-8
            above, so that scores fit float16, in which the attention kernel may then have them. A power of two costs it
            no digits, and no row with outliers decides for its neighbours. Scales of Q are (batch, heads,
            ceil(seqlen_q / block_q)), then (batch, heads, seqlen_q); those of K and V are (batch, kv_heads,
            ceil(seqlen_k / block_k)).
        block_k: rows of K and V in a block, and keys of the FP8 kernel's tile; "tile" for :func:`default_block_k`.
        seed: of the rotation's signs.
        smooth_k: subtract from K its mean over the keys, for each head. The softmax does not notice, because a row
            of scores only shifts by a constant, which goes back into the LSE; the scales of a K whose channels
            have offsets of their own get smaller. (SageAttention's name for it.)
        rotate_v: rotate V along head_dim_v as Q and K are, and the output back.
        smooth_v: subtract from V a mean over the keys, for each head and sequence, and add it to the output. A row of
            P sums to 1, so nothing else changes; but the sums of P V no longer grow with the keys where values have an
            offset, and FP8 tensor cores, which keep fewer bits of a sum than float32 has, lose less of them. The
            scales of such a V get smaller too. The mean is moved a little, so that the first value is exact, which may
            have most of the attention; runs of keys with tokens of huge values contribute nothing to it
            (:func:`mean_worth_subtracting`).
    """

    rotate: bool = True
    granularity: str = "block"
    block_q: int = DEFAULT_BLOCK_Q
    block_k: int | str = TILE
    seed: int = 0
    smooth_k: bool = False
    rotate_v: bool = False
    smooth_v: bool = DEFAULT_SMOOTH_V

    def __post_init__(self) -> None:
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}, allowed: True or False")
        if not (isinstance(self.granularity, str) and self.granularity in GRANULARITIES):
            raise ValueError(f"granularity is {self.granularity!r}, allowed: {', '.join(GRANULARITIES)}")
        _check_int("seed", self.seed, "an int of 64 bits", -(2**63))
        _check_int("block_q", self.block_q, "1 or more")
        if not isinstance(self.block_k, str):
            _check_int("block_k", self.block_k, f"1 or more, or {TILE!r}")
        elif self.block_k != TILE:
            raise ValueError(f"block_k is {self.block_k!r}, allowed: 1 or more, or {TILE!r}")

    @property
    def scales_rows(self) -> bool:
        """Whether each row of Q has a scale of its own."""
        return self.granularity == "block" and self.block_q == 1

    def keys_per_block(self, head_dim: int, head_dim_v: int, seqlen_k: int) -> int:
        """``block_k`` as a number."""
        if isinstance(self.block_k, int):
            return self.block_k
        return default_block_k(head_dim, head_dim_v, seqlen_k)


def _check_int(name: str, value: Any, allowed: str, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} is {value!r}, allowed: {allowed}")
    if not least <= value < 2**63:
        raise ValueError(f"{name} is {value}, allowed: {allowed}, below 2**63")


DEFAULT_QUANTIZATION = Fp8Quantization()


def check_quantization(quantization: Any) -> None:
    if not isinstance(quantization, Fp8Quantization):
        raise TypeError(f"quantization is {quantization!r}, allowed: an Fp8Quantization")


@dataclass(frozen=True)
class QuantizedTensor:
    """An e4m3 tensor and the scales that its blocks of rows were divided by.

    Attributes:
        data: float8_e4m3fn (batch, seqlen, heads, head_dim).
        scale: float32 (batch, heads, ceil(seqlen / block)); multiplies the data.
        block: rows that share a scale.
        largest: no code is larger in magnitude than this; 448 unless the quantizer promises less.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: int
    largest: float = E4M3_MAX

    @classmethod
    def unchecked(
        cls, data: torch.Tensor, scale: torch.Tensor, block: int, largest: float
    ) -> QuantizedTensor:
        """Of tensors that fit together because they were made so; checks take longer than the rest of a short call."""
        return _unchecked(cls, {"data": data, "scale": scale, "block": block, "largest": largest})

    def __post_init__(self) -> None:
        _check_parts(self.data, self.scale, self.block, "(batch, seqlen, heads, head_dim)")
        if not 0 < self.largest <= E4M3_MAX:
            raise ValueError(f"largest is {self.largest}, allowed: above 0, at most {E4M3_MAX:.0f}")
        batch, seqlen, heads, _ = self.data.shape
        _check_scale_shape(self.scale, (batch, heads, -(-seqlen // self.block)))

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, seqlen, heads, head_dim)."""
        return tuple(self.data.shape)

    def row_major(self) -> QuantizedTensor:
        """Itself: its data have a row of head_dim elements for each position."""
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """data * scale, contiguous (batch, seqlen, heads, head_dim). A rotated tensor stays rotated.

        The product is taken in float32 and rounded to ``dtype`` once, whose range it may leave in float16.
        """
        # e4m3 is exact in 16 bits, so nothing of the size of the data is ever in float32.
        exact = self.data.to(dtype, memory_format=torch.contiguous_format)
        return exact.mul_(row_scale(self.scale, self.block, self.data.shape[1]))


@dataclass(frozen=True)
class TransposedV:
    """V in e4m3 as the FP8 attention kernel reads it, contiguous along the keys.

    Attributes:
        data: float8_e4m3fn (batch, kv_heads, head_dim_v, keys), where keys is seqlen rounded up to a multiple of 32.
            Each 32 keys come in the order ``hopper.forward.fp8.config.FP8_KEY_ORDER``; those past seqlen are zeros.
        scale: float32 (batch, kv_heads, ceil(seqlen / block)), positive; multiplies the data.
        block: keys that share a scale.
        seqlen: keys that are meant.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: int
    seqlen: int

    @classmethod
    def unchecked(cls, data: torch.Tensor, scale: torch.Tensor, block: int, seqlen: int) -> TransposedV:
        """As ``QuantizedTensor.unchecked``."""
        return _unchecked(cls, {"data": data, "scale": scale, "block": block, "seqlen": seqlen})

    def __post_init__(self) -> None:
        _check_parts(self.data, self.scale, self.block, "(batch, kv_heads, head_dim_v, keys)")
        batch, heads, _, keys = self.data.shape
        if keys != padded_keys(self.seqlen):
            raise ValueError(
                f"data has {keys} keys, allowed for a seqlen of {self.seqlen}: {padded_keys(self.seqlen)}"
            )
        _check_scale_shape(self.scale, (batch, heads, -(-self.seqlen // self.block)))

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, seqlen, kv_heads, head_dim_v)."""
        batch, heads, head_dim, _ = self.data.shape
        return batch, self.seqlen, heads, head_dim

    def row_major(self) -> QuantizedTensor:
        """The same bytes as (batch, seqlen, kv_heads, head_dim_v)."""
        # The inverse of what ``transpose_for_kernel`` does, and like it no index, for the sake of CUDA graphs.
        halves = self.data.view(torch.uint8).unflatten(-1, (-1, 2, 4, 2, 2))
        keys = halves.transpose(*EXCHANGED_DIGITS).flatten(-5)[..., : self.seqlen]
        rows = keys.permute(0, 3, 1, 2).contiguous().view(self.data.dtype)
        return QuantizedTensor(rows, self.scale, self.block)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """data * scale (batch, seqlen, kv_heads, head_dim_v), as :meth:`QuantizedTensor.dequantize`."""
        # The same order as of ``row_major``, and 16 bits in one pass over the bytes.
        digits = self.data.unflatten(-1, (-1, 2, 4, 2, 2)).transpose(*EXCHANGED_DIGITS)
        keys = digits.permute(0, 3, 4, 5, 6, 7, 1, 2).to(dtype, memory_format=torch.contiguous_format)
        exact = keys.flatten(1, 5)[:, : self.seqlen].contiguous()
        return exact.mul_(row_scale(self.scale, self.block, self.seqlen))


def _unchecked(kind: type[Made], fields: dict[str, Any]) -> Made:
    """A frozen dataclass with these fields, all of them, without its ``__init__``."""
    made = object.__new__(kind)
    made.__dict__.update(fields)
    return made


def _check_parts(data: torch.Tensor, scale: torch.Tensor, block: int, dimensions: str) -> None:
    if data.dtype != E4M3:
        raise TypeError(f"data has dtype {data.dtype}, allowed: {E4M3}")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale has dtype {scale.dtype}, allowed: torch.float32")
    if scale.device != data.device:
        raise ValueError(f"scale is on {scale.device}, allowed: the device of its data, {data.device}")
    if block < 1:
        raise ValueError(f"block is {block}, allowed: 1 or more")
    if data.dim() != 4:
        raise ValueError(f"data has shape {tuple(data.shape)}, allowed: {dimensions}")


def _check_scale_shape(scale: torch.Tensor, expected: tuple[int, ...]) -> None:
    if scale.shape != expected:
        raise ValueError(f"scale has shape {tuple(scale.shape)}, allowed for this data: {expected}")


def no_numbers() -> torch.Tensor:
    """What has no elements where something may have some."""
    return torch.empty(0, dtype=torch.float32, device="cpu")


class MadeOnDemand(Protocol):
    """``parts_memory.PartsLayout``, which makes tensors in the memory of two."""

    def fields(self, codes: torch.Tensor, floats: torch.Tensor) -> dict[str, Any]: ...


PartsMemory = tuple[MadeOnDemand, torch.Tensor, torch.Tensor]
"""How quantized tensors lie in the two, their codes and their scales."""

MEMORY, IN_MEMORY = "_memory", frozenset(("q", "k", "v", "mean_v"))
"""What of a ``QuantizedQKV`` has its ``PartsMemory`` until it has the parts that lie there, and these parts."""


@dataclass(frozen=True)
class QuantizedQKV:
    """Q, K and V of one attention problem in e4m3, how they were made, and the dtype of its output.

    ``v`` is transposed where :func:`quantize_qkv` made it, and has rows where it came as FP8. ``shift`` float32
    (batch, heads, seqlen_q) is what every score of a query, not yet scaled, lost with the mean of K; it has no
    elements where nothing was subtracted. ``mean_v`` float32 (batch, kv_heads, head_dim_v) is what every row of V lost,
    before it was rotated, and what attention adds to the output of a row that sees a key; it too may have no elements.
    """

    q: QuantizedTensor
    k: QuantizedTensor
    v: QuantizedTensor | TransposedV
    quantization: Fp8Quantization
    dtype: torch.dtype
    shift: torch.Tensor = field(default_factory=no_numbers)
    mean_v: torch.Tensor = field(default_factory=no_numbers)

    @classmethod
    def unchecked(
        cls,
        q: QuantizedTensor,
        k: QuantizedTensor,
        v: TransposedV,
        quantization: Fp8Quantization,
        dtype: torch.dtype,
        means: Means,
    ) -> QuantizedQKV:
        """As ``QuantizedTensor.unchecked``, of tensors that lost the mean of V of ``means`` at most."""
        options = {"quantization": quantization, "dtype": dtype, "shift": means.k, "mean_v": means.v}
        return _unchecked(cls, {"q": q, "k": k, "v": v, **options})

    @classmethod
    def in_memory(
        cls, memory: PartsMemory, quantization: Fp8Quantization, dtype: torch.dtype, no_shift: torch.Tensor
    ) -> QuantizedQKV:
        """The same of tensors that are made when someone asks for one of them."""
        return _unchecked(
            cls, {MEMORY: memory, "quantization": quantization, "dtype": dtype, "shift": no_shift}
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A part that nobody asked for before."""
            memory = self.__dict__.get(MEMORY)
            if memory is None or name not in IN_MEMORY:
                # Another thread may just have made it.
                if name in self.__dict__:
                    return self.__dict__[name]
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            layout, codes, floats = memory
            made = layout.fields(codes, floats)
            if not torch.compiler.is_compiling():
                self.__dict__.update(made)
                self.__dict__.pop(MEMORY, None)
            return made[name]

    def opened(self) -> QuantizedQKV:
        """The same with all its tensors; this stays as it is."""
        memory = self.__dict__.get(MEMORY)
        if memory is None:
            return self
        layout, codes, floats = memory
        rest = self.__dict__.copy()
        rest.pop(MEMORY, None)
        return _unchecked(QuantizedQKV, rest | layout.fields(codes, floats))

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, in this process or another."""
        return dict(self.opened().__dict__)

    def __post_init__(self) -> None:
        device = self.q.data.device
        for name, part in (("k", self.k), ("v", self.v)):
            if part.data.device != device:
                raise ValueError(f"{name} is on {part.data.device}, allowed: the device of q, {device}")
        if self.mean_v.numel():
            batch, _, kv_heads, head_dim_v = self.v.shape
            check_mean_v(self.mean_v, device, (batch, kv_heads, head_dim_v))


def check_mean_v(mean: torch.Tensor, device: torch.device, shape: tuple[int, int, int]) -> None:
    """Raise unless ``mean`` is one of values, of a shape, for queries on ``device``."""
    if mean.dtype != torch.float32:
        raise TypeError(f"mean_v has dtype {mean.dtype}, allowed: torch.float32")
    if mean.shape != shape:
        raise ValueError(
            f"mean_v has shape {tuple(mean.shape)}, allowed: no elements or (batch, kv_heads, head_dim_v) = {shape}"
        )
    if mean.device != device:
        raise ValueError(f"mean_v is on {mean.device}, allowed: the device of q, {device}")


class Means(NamedTuple):
    """Means over the keys, that of V a robust one, which are subtracted from K and V: float32 (batch, kv_heads,
    head_dim), or no elements."""

    k: torch.Tensor
    v: torch.Tensor


def padded_keys(seqlen: int) -> int:
    """Keys of a transposed V: whole steps of 32."""
    return -(-seqlen // FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP


def transpose_for_kernel(v: torch.Tensor) -> torch.Tensor:
    """e4m3 V (b, s, hk, dv) -> (b, hk, dv, keys), each 32 keys in the kernel's order, the last padded with zeros."""
    keys = v.view(torch.uint8).permute(0, 2, 3, 1)
    padded = pad(keys, (0, -v.shape[1] % FP8_KEYS_PER_STEP))
    # An index on the GPU would be a copy from the host, which no CUDA graph can hold.
    halves = padded.unflatten(-1, (-1, 2, 2, 4, 2))
    return halves.transpose(*EXCHANGED_DIGITS).flatten(-5).contiguous().view(v.dtype)


def row_scale(scale: torch.Tensor, block: int, seqlen: int) -> torch.Tensor:
    """Scales (batch, heads, blocks) -> (batch, seqlen, heads, 1): the scale of every row."""
    if block == 1:
        return scale[:, :, :seqlen].transpose(1, 2).unsqueeze(-1)
    rows = torch.arange(seqlen, device=scale.device) // block
    return scale[:, :, rows].transpose(1, 2).unsqueeze(-1)
