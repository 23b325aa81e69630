"""The rules of :mod:`hopper_attention.quantization_rules` for packed sequences, in PyTorch on any device.

Every sequence becomes what it would be by itself, to the bit. Nothing is read on the host, so that a CUDA graph can be
captured of it, and takes the lengths that the tensors hold when it is replayed. Rows of no sequence become zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_kernels.problem import MAX_HEAD_DIM
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP
from hopper.forward.tilings import PACKED_SEQLEN
from hopper.mean.config import FEWEST_GROUPS, GROUP_KEYS, GROUPS, is_sampled, sample_size
from hopper.quantize.config import CARRY_KEYS, E4M3_MAX, MIN_SCALE, largest_codes
from hopper_attention import checks
from hopper_attention.checks import TensorSpec
from hopper_attention.features import missing
from hopper_attention.lengths import Lengths, check_kinds, check_packed, specs_of
from hopper_attention.masks import MaskSpec
from hopper_attention.packed_quantized import (
    ONE_PER_SEQUENCE,
    PackedQuantizedQKV,
    PackedQuantizedTensor,
    PackedTransposedV,
    RowPlaces,
    count_units,
    first_units,
    key_of_slot,
)
from hopper_attention.quantization_rules import (
    SOURCE_DTYPES,
    fit_of_rows,
    round_runs,
    rounding_of_keys,
    scale_of_values,
    to_e4m3,
)
from hopper_attention.quantized import E4M3, Fp8Quantization, default_block_k
from hopper_attention.rotation import rotate_head_dim
from hopper_attention.value_mean_rules import keys_looked_at, only_numbers, worth_subtracting

NO_MASK = MaskSpec(causal=False)

TOGETHER = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k"


def resolve_lengths(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any,
    seqused_k: Any,
) -> Lengths | None:
    """The lengths of packed sequences; None where nothing is given.

    Raises:
        ValueError: some are given, and some that go with them are not.
        TypeError: they are no tensors and ints.
    """
    named = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    lacking = [name for name, x in named.items() if x is None]
    if len(lacking) == len(named) and seqused_q is None and seqused_k is None:
        return None
    if lacking:
        raise ValueError(
            f"{lacking[0]} is None, allowed for packed sequences: {TOGETHER} together, or none of them"
        )
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    return check_kinds(lengths)


def check_packed_sources(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, quantization: Fp8Quantization
) -> None:
    """Raise unless these packed tensors can be quantized.

    Raises:
        ValueError: shapes or devices do not fit together.
        TypeError: dtypes differ, or are none of ``SOURCE_DTYPES``.
        NotImplementedError: the mean of K is to be subtracted.
    """
    if q.dtype not in SOURCE_DTYPES:
        raise TypeError(f"q has dtype {q.dtype}, allowed: {', '.join(map(str, SOURCE_DTYPES))}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, allowed: the dtype of q, {q.dtype}")
    # Float32, which no kernel attends to, can be quantized.
    q_spec, k_spec, v_spec = (TensorSpec.of(x)._replace(dtype=checks.HALF_DTYPES[0]) for x in (q, k, v))
    check_packed(q_spec, k_spec, v_spec, specs_of(lengths))
    if quantization.smooth_k:
        feature = "quantization of packed sequences without the mean of K"
        raise missing("smooth_k", True, feature, "Fp8Quantization(smooth_k=False)")


def with_packed_blocks(
    quantization: Fp8Quantization,
    head_dims: tuple[int, int],
    two_level: bool = False,
    mask: MaskSpec = NO_MASK,
) -> Fp8Quantization:
    """``quantization`` with ``block_k`` as a number: unless told otherwise of keys in a tile of the kernel that will
    attend, whatever the lengths."""
    if isinstance(quantization.block_k, int):
        return quantization
    kind = two_level, mask.causal
    return replace(quantization, block_k=default_block_k(*head_dims, PACKED_SEQLEN, *kind))


@torch.no_grad()
def quantize_packed_by_torch(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, quantization: Fp8Quantization
) -> PackedQuantizedQKV:
    """What :func:`hopper_attention.quantize_qkv` makes of checked packed tensors; ``block_k`` is a number."""
    c, kv_heads = quantization, k.shape[1]
    block_k = c.keys_per_block(k.shape[2], v.shape[2], PACKED_SEQLEN)
    places_q = RowPlaces.of(lengths.cu_seqlens_q, lengths.seqused_q, q.shape[0])
    places_k = RowPlaces.of(lengths.cu_seqlens_k, lengths.seqused_k, k.shape[0])
    of_q, of_k = (places_q, lengths.cu_seqlens_q), (places_k, lengths.cu_seqlens_k)
    mean_v = torch.empty(0, dtype=torch.float32, device=q.device)
    if c.smooth_v and v.shape[0]:
        mean_v = packed_mean_worth_subtracting(v, lengths)
        v = v.float() - mean_v[places_k.sequence]
    q32, k32 = (rotate_head_dim(x, c.seed) if c.rotate else x.float() for x in (q, k))
    v32 = rotate_head_dim(v, c.seed) if c.rotate_v else v.float()
    final = scale_of_values if c.granularity == "block" else torch.Tensor.contiguous
    largest_q, largest_k = largest_codes(q.shape[2], c.scales_rows)
    rows = _quantize(v32, of_k, c.granularity, block_k, kv_heads, E4M3_MAX, final, _round_values)
    quantized_q = _quantize(q32, of_q, c.granularity, c.block_q, kv_heads, largest_q)
    return PackedQuantizedQKV(
        _fitted(q32, of_q, quantized_q) if c.scales_rows and q.shape[2] <= MAX_HEAD_DIM else quantized_q,
        _quantize(
            k32,
            of_k,
            c.granularity,
            block_k,
            kv_heads,
            largest_k,
            rounded=lambda x, _: rounding_of_keys(k.shape[2], largest_k)(x),
        ),
        PackedTransposedV(transpose_packed(rows.data, lengths), rows.scale, rows.block, v.shape[0]),
        lengths=lengths,
        quantization=c,
        dtype=q.dtype,
        mean_v=mean_v,
    )


def packed_mean_worth_subtracting(v: Tensor, lengths: Lengths) -> Tensor:
    """``mean_worth_subtracting`` of each sequence of v (total, hk, d), total > 0: float32 (batch + 1, hk, d), 0 without
    keys and in the last entry, which is of no sequence."""
    cu_seqlens, used = lengths.cu_seqlens_k, lengths.seqused_k
    places, batch = RowPlaces.of(cu_seqlens, used, v.shape[0]), cu_seqlens.shape[0] - 1
    keys = pad(cu_seqlens[1:] - cu_seqlens[:-1] if used is None else used, (0, 1))
    groups = torch.minimum((keys // GROUP_KEYS).clamp(FEWEST_GROUPS, GROUPS), keys)
    length = keys // groups.clamp(min=1)
    group = places.row // length[places.sequence].clamp(min=1)
    samples = is_sampled(keys)
    looked_at = keys_looked_at(places.row % length[places.sequence].clamp(min=1), length[places.sequence])
    counts = places.is_used & (group < groups[places.sequence]) & (looked_at | ~samples[places.sequence])
    counted = torch.where(samples, sample_size(length), length)
    # What does not count is added to a group that is not there.
    group = torch.where(counts, places.sequence * GROUPS + group, batch * GROUPS).long()
    numbers = torch.arange(GROUPS, device=v.device)
    first_rows = cu_seqlens[:, None] + numbers * length[:, None]
    first = v[first_rows.clamp(0, v.shape[0] - 1).long().flatten()].float()
    differences = v.float() - first[group]
    shape, divisor = (batch + 1, GROUPS, *v.shape[1:]), counted.clamp(min=1)[:, None, None, None]

    def mean_of_groups(x: Tensor) -> Tensor:
        return torch.zeros_like(first).index_add_(0, group, x).view(shape) / divisor

    is_there = (numbers < groups[:, None])[..., None, None]
    shift = mean_of_groups(differences)
    means = torch.where(is_there, first.view(shape) + shift, math.nan)
    variances = mean_of_groups(differences.square()) - shift * shift
    keys_counted = (groups * counted)[:, None, None]
    return worth_subtracting(*only_numbers(means, variances), first.view(shape)[:, 0], keys_counted)


def _quantize(
    x: Tensor,
    where: tuple[RowPlaces, Tensor],
    granularity: str,
    block: int,
    kv_heads: int,
    largest: float,
    final: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    rounded: Callable[[Tensor, tuple[RowPlaces, Tensor]], Tensor] = lambda x, where: to_e4m3(x),
) -> PackedQuantizedTensor:
    """Quantize float32 x (total, heads, d), whose rows are at ``where``: their places and cu_seqlens."""
    places, cu_seqlens = where
    # No sequence is longer than this, and rows are counted in 32 bits.
    block = ONE_PER_SEQUENCE if granularity != "block" else min(block, ONE_PER_SEQUENCE)
    units = places.units(cu_seqlens, block)
    amax = _amax_of_units(x, places, units, count_units(x.shape[0], cu_seqlens.shape[0] - 1, block))
    if granularity == "tensor" and amax.numel():
        amax = amax.amax().expand_as(amax)
    elif granularity == "head":
        group = amax.unflatten(0, (kv_heads, -1)).amax(1)
        amax = group.repeat_interleave(amax.shape[0] // kv_heads, 0)
    scale = final((amax * (1.0 / largest)).clamp_min(MIN_SCALE).contiguous())
    inverse = scale.reciprocal()[:, units].t().unsqueeze(-1)
    scaled = torch.where(places.is_used[:, None, None], x * inverse, 0.0)
    return PackedQuantizedTensor(rounded(scaled, where), scale, block, largest)


def _fitted(
    x: Tensor, where: tuple[RowPlaces, Tensor], quantized: PackedQuantizedTensor
) -> PackedQuantizedTensor:
    """Rows x (total, heads, d) with a scale each, the scales fitted to their codes."""
    places, cu_seqlens = where
    units = places.units(cu_seqlens, 1).long()
    over_scale = x * quantized.scale.reciprocal()[:, units].t().unsqueeze(-1)
    fit = torch.where(places.is_used[:, None], fit_of_rows(over_scale, quantized.data), 1.0).t()
    return replace(quantized, scale=quantized.scale.scatter_reduce(1, units.expand_as(fit), fit, "prod"))


def _round_values(x: Tensor, where: tuple[RowPlaces, Tensor]) -> Tensor:
    """Rows x (total, heads, d) of V over their scales, in e4m3: ``round_runs`` of the runs that each sequence has."""
    places, cu_seqlens = where
    runs = x.new_zeros(count_units(x.shape[0], cu_seqlens.shape[0] - 1, CARRY_KEYS), CARRY_KEYS, *x.shape[1:])
    run_and_key = places.units(cu_seqlens, CARRY_KEYS).long(), (places.row % CARRY_KEYS).long()
    runs[run_and_key] = x
    return round_runs(runs).view(torch.uint8)[run_and_key].view(E4M3)


def _amax_of_units(x: Tensor, places: RowPlaces, units: Tensor, count: int) -> Tensor:
    """The largest finite magnitude of the rows of each unit that are used, at least 0: (heads, units)."""
    finite = x.abs().masked_fill(~torch.isfinite(x), 0.0).amax(-1).t()
    of_rows = torch.where(places.is_used, finite, 0.0)
    largest = x.new_zeros(x.shape[1], count)
    return largest.scatter_reduce_(1, units.long().expand_as(of_rows), of_rows, "amax")


def transpose_packed(v: Tensor, lengths: Lengths) -> Tensor:
    """e4m3 V (total_k, hk, dv) -> (hk, dv, keys), as ``PackedTransposedV`` has its data."""
    (total, kv_heads, head_dim_v), cu_seqlens = v.shape, lengths.cu_seqlens_k
    batch = cu_seqlens.shape[0] - 1
    keys = count_units(total, batch, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP
    if not total or not batch:
        return torch.zeros(kv_heads, head_dim_v, keys, dtype=torch.uint8, device=v.device).view(E4M3)
    starts = first_units(cu_seqlens, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP
    slots = torch.arange(keys, dtype=torch.int32, device=v.device)
    sequence = (torch.searchsorted(starts, slots, right=True) - 1).clamp(0, batch - 1)
    slot = slots - starts[sequence]
    step = slot // FP8_KEYS_PER_STEP * FP8_KEYS_PER_STEP
    key = step + key_of_slot(slot % FP8_KEYS_PER_STEP)
    seqlens = cu_seqlens[1:] - cu_seqlens[:-1] if lengths.seqused_k is None else lengths.seqused_k
    rows = (cu_seqlens[sequence] + key).clamp(0, total - 1)
    found = v.view(torch.uint8)[rows]
    # Zeros, and not what the next sequence has there.
    found = torch.where((key < seqlens[sequence])[:, None, None], found, 0)
    return found.permute(1, 2, 0).contiguous().view(E4M3)


def from_packed_descales(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    lengths: Lengths,
    out_dtype: torch.dtype,
) -> PackedQuantizedQKV:
    """Packed e4m3 tensors with descales, as FlashAttention-3 takes them, as quantized inputs of attention.

    Args:
        q: float8_e4m3fn (total_q, heads, head_dim).
        k, v: float8_e4m3fn (total_k, kv_heads, head_dim) and (..., head_dim_v).
        descales: of q, k and v: float32 (batch, kv_heads), any strides; None means ones. The data of a sequence times
            its descale is the value, and that of q holds for the group of query heads.
        out_dtype: dtype of attention's output.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together.
    """
    batch, kv_heads = lengths.cu_seqlens_q.shape[0] - 1, k.shape[1]

    def per_sequence(name: str, descale: Tensor | None, data: Tensor) -> PackedQuantizedTensor:
        scale = torch.ones(data.shape[1], batch + 1, dtype=torch.float32, device=data.device)
        if descale is not None:
            _check_descale(name, descale, data.device, (batch, kv_heads))
            scale[:, :batch] = descale.t().repeat_interleave(data.shape[1] // kv_heads, 0)
        return PackedQuantizedTensor(data, scale, ONE_PER_SEQUENCE)

    return PackedQuantizedQKV(
        per_sequence("q_descale", descales[0], q),
        per_sequence("k_descale", descales[1], k),
        per_sequence("v_descale", descales[2], v),
        lengths=lengths,
        quantization=Fp8Quantization(rotate=False, granularity="head", smooth_v=False),
        dtype=out_dtype,
    )


def _check_descale(name: str, descale: Tensor, device: torch.device, shape: tuple[int, int]) -> None:
    if descale.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {descale.dtype}, allowed: torch.float32")
    if descale.shape != shape:
        raise ValueError(f"{name} has shape {tuple(descale.shape)}, allowed: (batch, kv_heads) = {shape}")
    if descale.device != device:
        raise ValueError(f"{name} is on {descale.device}, allowed: the device of its tensor, {device}")
