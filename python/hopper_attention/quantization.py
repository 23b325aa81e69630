"""FP8 (e4m3) inputs for attention: scales of rows and blocks, by rules of which the rotation is a part.

Block quantization and incoherent processing of the FlashAttention-3 paper, section 3.3. The rules here are the
definition that the fused kernel follows to the bit, and its twin in PyTorch:

- A block is some rows of a head that share a scale: of Q one row, of K and V the keys of the attention kernel's tile,
  unless told otherwise.
- scale = amax * (1 / largest) of the finite values of a block, and 2^-80 or more. ``largest`` is the code that amax
  becomes: 448 in V; in K 28 up to head_dim 128 and 14 above; in blocks of Q 28 up to head_dim 64 and 14 above, in a
  row of Q by itself 16 and 8 (``hopper.quantize.config.largest_codes``). No code is larger, so the product of a row of
  Q and one of K, a sum of products of codes, fits float16, in which the attention kernel may then have it. Heads wider
  than 256, which the emulation alone attends to, have 448, and a row of Q by itself 256.
- Scales of blocks of V are rounded up to a power of two. e4m3 has as many digits at one power as at another, so this
  costs no accuracy, and neighbouring blocks mostly get the same, which saves the attention kernel work.
- data = value * (1 / scale), rounded to the nearest e4m3, ties to even; value is about data * scale.
- NaN and infinities become NaN, e4m3's only non-finite code. They do not enter the scale, so they spoil no
  other value of their block; but a rotated row is a mixture, and one such element makes NaN of all of its
  Hadamard block. Where each row of Q has a scale, they change nothing of the other rows; a row without finite values
  gets the scale of zeros. They do not enter the mean of V either (:func:`robust_mean_of_keys`). The mean of K is one
  of every key: one such element makes NaN of its column in all rows of its head, and of no other head or batch entry.
- Each of these operations, and each sum and difference of a rotation, is rounded to float32 by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hopper.forward.fp8.config import FP8_KEYS_PER_STEP
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper.quantize.config import (
    DEFAULT_BLOCK_Q,
    DEFAULT_SMOOTH_V,
    E4M3_MAX,
    MIN_SCALE,
    largest_codes,
)
from hopper_attention.rotation import rotate_back, rotate_head_dim
from hopper_attention.shapes import attention_shape

E4M3 = torch.float8_e4m3fn

TILE = "tile"
"""``block_k`` of as many rows as the attention kernel has keys in a tile."""

BLOCK_K_WITHOUT_KERNEL = 128

EXCHANGED_DIGITS = (-3, -2)
"""Digits of a key's number that ``hopper.config.FP8_KEY_ORDER`` exchanges, counted from its last."""

FEWEST_MEAN_GROUPS, MEAN_GROUPS, MEAN_GROUP_KEYS = 3, 31, 32
"""Fewest and most groups of keys in the robust mean of V, and fewest keys of a group where there are more."""

OUTLYING = 16.0
"""Median distances from the median beyond which the mean of a group does not count."""

GRANULARITIES = ("tensor", "head", "block")
QUANTIZERS = ("fused", "torch")
FLAGS = ("rotate", "smooth_k", "rotate_v", "smooth_v")
"""Options that are on or off."""

SOURCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@lru_cache(maxsize=4096)
def default_block_k(
    head_dim: int, head_dim_v: int, seqlen_k: int, two_level: bool = False, causal: bool = False
) -> int:
    """Rows of K and V in a block unless told otherwise: the keys of a tile of the attention kernel with one level of
    accumulation or, with ``two_level``, of that with two if its tiles would divide those."""
    sizes = head_dim, head_dim_v, causal, "bfloat16", seqlen_k
    select = partial(select_fp8_forward_config, *sizes, half_scores=True)
    try:
        width = select().tile_n
        is_divided = two_level and select(width, two_level=True).tile_n < width
        return select(two_level=True).tile_n if is_divided else width
    except ValueError:
        return BLOCK_K_WITHOUT_KERNEL


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
        smooth_v: subtract from V a mean over the keys, for each head, and add it to the output. A row of P sums
            to 1, so nothing else changes; but the sums of P V no longer grow with the keys where values have an
            offset, and FP8 tensor cores, which keep fewer bits of a sum than float32 has, lose less of them. The
            scales of such a V get smaller too. Runs of keys with tokens of huge values contribute nothing to it
            (:func:`robust_mean_of_keys`).
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
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity is {self.granularity!r}, allowed: {', '.join(GRANULARITIES)}")
        if isinstance(self.block_k, str) and self.block_k != TILE:
            raise ValueError(f"block_k is {self.block_k!r}, allowed: 1 or more, or {TILE!r}")
        for name, block in (("block_q", self.block_q), ("block_k", self.block_k)):
            if isinstance(block, int) and block < 1:
                raise ValueError(f"{name} is {block}, allowed: 1 or more")

    def keys_per_block(self, head_dim: int, head_dim_v: int, seqlen_k: int) -> int:
        """``block_k`` as a number."""
        if isinstance(self.block_k, int):
            return self.block_k
        return default_block_k(head_dim, head_dim_v, seqlen_k)


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

    def __post_init__(self) -> None:
        _check_parts(self.data, self.scale, self.block, "(batch, seqlen, heads, head_dim)")
        if not 0 < self.largest <= E4M3_MAX:
            raise ValueError(f"largest is {self.largest}, allowed: above 0, at most {E4M3_MAX:.0f}")
        batch, seqlen, heads, _ = self.data.shape
        _check_scale_shape(self.scale, (batch, heads, math.ceil(seqlen / self.block)))

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
            Each 32 keys come in the order ``hopper.config.FP8_KEY_ORDER``; those past seqlen are zeros.
        scale: float32 (batch, kv_heads, ceil(seqlen / block)), positive; multiplies the data.
        block: keys that share a scale.
        seqlen: keys that are meant.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: int
    seqlen: int

    def __post_init__(self) -> None:
        _check_parts(self.data, self.scale, self.block, "(batch, kv_heads, head_dim_v, keys)")
        batch, heads, _, keys = self.data.shape
        if keys != padded_keys(self.seqlen):
            raise ValueError(
                f"data has {keys} keys, allowed for a seqlen of {self.seqlen}: {padded_keys(self.seqlen)}"
            )
        _check_scale_shape(self.scale, (batch, heads, math.ceil(self.seqlen / self.block)))

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
        return self.row_major().dequantize(dtype)


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
    shift: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    mean_v: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        device = self.q.data.device
        for name, part in (("k", self.k), ("v", self.v)):
            if part.data.device != device:
                raise ValueError(f"{name} is on {part.data.device}, allowed: the device of q, {device}")
        if self.mean_v.numel():
            self._check_mean_v(device)

    def _check_mean_v(self, device: torch.device) -> None:
        mean, (batch, _, kv_heads, head_dim_v) = self.mean_v, self.v.shape
        if mean.dtype != torch.float32:
            raise TypeError(f"mean_v has dtype {mean.dtype}, allowed: torch.float32")
        if mean.shape != (batch, kv_heads, head_dim_v):
            raise ValueError(
                f"mean_v has shape {tuple(mean.shape)}, allowed: no elements or (batch, kv_heads, head_dim_v) = "
                f"({batch}, {kv_heads}, {head_dim_v})"
            )
        if mean.device != device:
            raise ValueError(f"mean_v is on {mean.device}, allowed: the device of q, {device}")


class Means(NamedTuple):
    """Means over the keys, that of V a robust one, which are subtracted from K and V: float32 (batch, kv_heads,
    head_dim), or no elements."""

    k: torch.Tensor
    v: torch.Tensor


Quantizer = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Fp8Quantization, Means],
    tuple[QuantizedTensor, QuantizedTensor, TransposedV],
]
"""(q, k, v, quantization, means) -> the three in e4m3."""


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
    rows = torch.arange(seqlen, device=scale.device) // block
    return scale[:, :, rows].transpose(1, 2).unsqueeze(-1)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x in e4m3: nearest, ties to even; finite values saturate at +-448, the others become NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).masked_fill(~torch.isfinite(x), math.nan).to(E4M3)


def mean_of_keys(x: torch.Tensor) -> torch.Tensor:
    """The mean of x (b, s, hk, d) over the keys, float32 (b, hk, d)."""
    return x.mean(1, dtype=torch.float32)


def robust_mean_of_keys(x: torch.Tensor) -> torch.Tensor:
    """The mean of x (b, s, hk, d), s > 0, over the keys, without outliers: float32 (b, hk, d), finite.

    The keys are cut into equal segments; fewer keys than segments are left out at the end. Segments whose mean is not
    finite or lies far from the others do not count; without any, the result is 0. Of many normal values none is left
    out: what lies further from their mean than this would bring back some of the sums that it is to keep small.
    """
    groups = min(max(x.shape[1] // MEAN_GROUP_KEYS, FEWEST_MEAN_GROUPS), MEAN_GROUPS, x.shape[1])
    length = x.shape[1] // groups
    means = x[:, : groups * length].unflatten(1, (groups, length)).mean(2, dtype=torch.float32)
    means = torch.where(means.isfinite(), means, math.nan)
    distances = (means - _median_of_numbers(means)).abs()
    counts = distances <= OUTLYING * _median_of_numbers(distances)
    return torch.where(counts, means, 0.0).sum(1) / counts.sum(1).clamp(min=1)


def _median_of_numbers(x: torch.Tensor) -> torch.Tensor:
    """The upper median of x over dimension 1, which stays, without its NaN; NaN if there is nothing else."""
    # torch.nanmedian would do it, but not under torch.use_deterministic_algorithms. NaN is sorted to the end.
    middle = (~x.isnan()).sum(1, keepdim=True) // 2
    return x.sort(1).values.gather(1, middle.clamp(max=x.shape[1] - 1))


def means_of(k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization) -> Means:
    """What ``quantization`` subtracts from k and v; nothing where there are no keys."""

    nothing = torch.empty(0, device=k.device)
    if not k.shape[1]:
        return Means(nothing, nothing)
    return Means(
        mean_of_keys(k) if quantization.smooth_k else nothing,
        robust_mean_of_keys(v) if quantization.smooth_v else nothing,
    )


def add_mean(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Add the mean (b, hk, d) of each key/value head to x (b, s, h, d) in place: in float32, rounded once."""
    x.unflatten(2, (mean.shape[1], -1)).add_(mean[:, None, :, None])
    return x


def restore_values(out: torch.Tensor, parts: QuantizedQKV, causal: bool) -> torch.Tensor:
    """The output (b, sq, h, dv) of attention on ``parts``, with what was done to V undone. ``out`` may be written to.

    Float32 if there was a rotation, else ``out``. A row without keys stays 0: it has no part in the mean.
    """
    values = rotate_back(out, parts.quantization.seed) if parts.quantization.rotate_v else out
    if parts.mean_v.numel():
        without_keys = max(out.shape[1] - parts.v.shape[1], 0) if causal else 0
        add_mean(values[:, without_keys:], parts.mean_v)
    return values


def lost_scores(q: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """What every score of a query loses with the mean of K (b, hk, d): float32 (b, h, sq)."""
    of_query_head = mean.repeat_interleave(q.shape[2] // mean.shape[1], 1).unsqueeze(1)
    return (q.float() * of_query_head).sum(-1).transpose(1, 2).contiguous()


def _finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude of each row: (b, s, h, d) -> (b, h, s)."""
    return x.abs().masked_fill(~torch.isfinite(x), 0.0).amax(-1).transpose(1, 2)


def _shared_amax(rows: torch.Tensor, granularity: str, block: int, kv_heads: int) -> torch.Tensor:
    """Row maxima (b, h, s), s > 0 -> maxima over what shares a scale, (b, h, ceil(s / block))."""
    batch, heads, seqlen = rows.shape
    if granularity == "tensor":
        return rows.amax().expand(batch, heads, 1)
    if granularity == "head":
        group = rows.unflatten(1, (kv_heads, -1)).amax((2, 3))
        return group.repeat_interleave(heads // kv_heads, 1).unsqueeze(-1)
    return pad(rows, (0, -seqlen % block)).unflatten(2, (-1, block)).amax(-1)


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Positive normal float32 scales rounded up to powers of two."""
    mantissa = 2**23 - 1
    return ((scale.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def _quantize(
    x: torch.Tensor,
    granularity: str,
    block: int,
    kv_heads: int,
    final: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous,
    largest: float = E4M3_MAX,
) -> QuantizedTensor:
    """Quantize float32 x (b, s, h, d) with ``final(amax (1 / largest))`` as the scale."""
    batch, seqlen, heads, _ = x.shape
    if granularity != "block":
        block = max(seqlen, 1)
    if x.numel() == 0:
        blocks = math.ceil(seqlen / block)
        return QuantizedTensor(x.to(E4M3), x.new_full((batch, heads, blocks), MIN_SCALE), block, largest)
    amax = _shared_amax(_finite_amax(x), granularity, block, kv_heads)
    scale = final((amax * (1.0 / largest)).clamp_min(MIN_SCALE).contiguous())
    return QuantizedTensor(to_e4m3(x * row_scale(scale.reciprocal(), block, seqlen)), scale, block, largest)


def _quantize_by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, means: Means
) -> tuple[QuantizedTensor, QuantizedTensor, TransposedV]:
    """The twin of the fused kernel, for every device and option."""
    c, kv_heads = quantization, k.shape[2]
    block_k = c.keys_per_block(k.shape[3], v.shape[3], k.shape[1])
    k, v = (
        x.float() - mean.unsqueeze(1) if mean.numel() else x for x, mean in zip((k, v), means, strict=True)
    )
    q32, k32 = (rotate_head_dim(x, c.seed) if c.rotate else x.float() for x in (q, k))
    v32 = rotate_head_dim(v, c.seed) if c.rotate_v else v.float()
    final = power_of_two if c.granularity == "block" else torch.Tensor.contiguous
    rows = _quantize(v32, c.granularity, block_k, kv_heads, final)
    largest_q, largest_k = largest_codes(q.shape[3], c.granularity == "block" and c.block_q == 1)
    return (
        _quantize(q32, c.granularity, c.block_q, kv_heads, largest=largest_q),
        _quantize(k32, c.granularity, block_k, kv_heads, largest=largest_k),
        TransposedV(transpose_for_kernel(rows.data), rows.scale, rows.block, v.shape[1]),
    )


def _choose_quantizer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, quantization: Fp8Quantization, backend: str | None
) -> Quantizer:
    """What does a problem: the kernel where it can, unless PyTorch is asked for.

    Raises:
        ValueError: there is no such ``backend``, or it cannot do the problem.
    """
    # It imports the rules from here.
    from hopper_attention.quantization_launch import quantize_fused, why_not_fused_here

    if backend not in (None, *QUANTIZERS):
        raise ValueError(f"backend is {backend!r}, allowed: {', '.join(map(repr, QUANTIZERS))} or None")
    if backend == "torch":
        return _quantize_by_torch
    reason = why_not_fused_here(q, k, v, quantization)
    if not reason:
        return quantize_fused
    if backend == "fused":
        raise ValueError(f"backend is 'fused', but {reason}; allowed here: 'torch' or None")
    return _quantize_by_torch


@torch.no_grad()
def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    quantization: Fp8Quantization = Fp8Quantization(),
    backend: str | None = None,
) -> QuantizedQKV:
    """Quantize the inputs of attention to e4m3 by the rules at the top of this module.

    What is asked for is done in this order: the means of K and V are subtracted, Q and K are rotated, V is rotated. All
    is computed in float32.

    On a Hopper GPU one kernel does it in one pass, reading float16 or bfloat16 and writing e4m3, where ``granularity``
    is "block" (the other two need a maximum before anything is written) and the sizes suit it
    (:func:`hopper_attention.quantization_launch.why_not_fused`). Elsewhere PyTorch does it, in several passes, with
    the same bits. The means of K and V may differ in their last bit between devices. A CUDA graph can be captured of
    the kernel once a call with the same head_dim, options and device has been made, and of PyTorch's passes not at all.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float32, on any device.
        k: (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, seqlen_k, kv_heads, head_dim_v).
        quantization: rotation, what shares a scale, and the block sizes.
        backend: "fused" for the kernel, "torch" for PyTorch, or None for the kernel where it can do the problem.

    Returns:
        The quantized tensors, V transposed; ``dtype`` is the dtype of q, and ``quantization`` what was asked for with
        ``block_k`` as a number. Not differentiable.

    Raises:
        ValueError: shapes or devices of q, k and v do not fit together, or ``backend`` cannot do the problem.
        TypeError: q, k and v differ in dtype, or it is not one of the three above.
        RuntimeError: a CUDA graph is being captured and the signs of the rotation are not on the GPU yet.
    """
    shape = attention_shape(q, k, v)
    if q.dtype not in SOURCE_DTYPES:
        raise TypeError(f"q has dtype {q.dtype}, allowed: {', '.join(map(str, SOURCE_DTYPES))}")
    c = replace(
        quantization, block_k=quantization.keys_per_block(shape.head_dim, shape.head_dim_v, shape.seqlen_k)
    )
    run = _choose_quantizer(q, k, v, c, backend)
    means = means_of(k, v, c)
    shift = lost_scores(q, means.k) if means.k.numel() else torch.empty(0, device=q.device)
    parts = run(q, k, v, c, means)
    return QuantizedQKV(*parts, quantization=c, dtype=q.dtype, shift=shift, mean_v=means.v)


def from_descales(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> QuantizedQKV:
    """FP8 tensors with descales, as FlashAttention-3 takes them, as quantized inputs of attention.

    Args:
        q: float8_e4m3fn (batch, seqlen_q, heads, head_dim).
        k: float8_e4m3fn (batch, seqlen_k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: float8_e4m3fn (batch, seqlen_k, kv_heads, head_dim_v).
        q_descale, k_descale, v_descale: float32 (batch, kv_heads), any strides; the data times its descale is
            the value, and that of q holds for the group of query heads. None means ones.
        out_dtype: dtype of attention's output.

    Raises:
        ValueError: shapes or devices do not fit together.
        TypeError: a tensor is not e4m3, or a descale is not float32.
    """
    shape = attention_shape(q, k, v)
    if q.dtype != E4M3:
        raise TypeError(f"q has dtype {q.dtype}, allowed: {E4M3}")

    def per_head(name: str, descale: torch.Tensor | None, data: torch.Tensor) -> QuantizedTensor:
        if descale is None:
            descale = torch.ones(shape.batch, shape.kv_heads, device=data.device)
        if descale.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {descale.dtype}, allowed: torch.float32")
        if descale.shape != (shape.batch, shape.kv_heads):
            raise ValueError(
                f"{name} has shape {tuple(descale.shape)}, allowed: (batch, kv_heads) = "
                f"({shape.batch}, {shape.kv_heads})"
            )
        if descale.device != data.device:
            raise ValueError(
                f"{name} is on {descale.device}, allowed: the device of its tensor, {data.device}"
            )
        seqlen, heads = data.shape[1], data.shape[2]
        scale = descale.repeat_interleave(heads // shape.kv_heads, 1).unsqueeze(-1)
        return QuantizedTensor(data, scale[:, :, : min(seqlen, 1)].contiguous(), max(seqlen, 1))

    return QuantizedQKV(
        q=per_head("q_descale", q_descale, q),
        k=per_head("k_descale", k_descale, k),
        v=per_head("v_descale", v_descale, v),
        quantization=Fp8Quantization(rotate=False, granularity="head", smooth_v=False),
        dtype=out_dtype,
    )
