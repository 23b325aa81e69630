"""Calls the fused quantizer on packed sequences: where it runs, what it is given, what it fills."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.plan.config import MAX_PACKED_ROWS
from cute_kernels.problem import VARLEN
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP
from hopper.forward.tilings import PACKED_SEQLEN
from hopper.quantize.config import QuantizeConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.backends import Target
from hopper_attention.device_memory import Piece, Pieces
from hopper_attention.launch import value_mean
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, count_ctas, index_of
from hopper_attention.launch.quantize import (
    MAX_ITEMS,
    known_target,
    no_words,
    select_quantize_config,
    why_not_of_this_kind,
)
from hopper_attention.launch.varlen import is_empty
from hopper_attention.layout import make_packed_addressable
from hopper_attention.lengths import Lengths
from hopper_attention.packed_quantized import (
    PackedQuantizedQKV,
    PackedQuantizedTensor,
    PackedTransposedV,
    count_units,
)
from hopper_attention.quantized import E4M3, Fp8Quantization
from hopper_attention.rotation import sign_masks


def why_not_fused_packed(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, c: Fp8Quantization) -> str:
    """What keeps the fused quantizer from doing a packed problem; empty if nothing does. ``block_k`` is a number."""
    head_dims = k.shape[2], v.shape[2]
    reason = why_no_packed_kernel(q.dtype, *head_dims, c, known_target(q.device))
    if reason:
        return reason
    if is_empty(q, k, lengths):
        return "the problem is empty"
    config, batch = packed_quantize_config(q.dtype, *head_dims, c), lengths.cu_seqlens_q.shape[0] - 1
    items = q.shape[1] * count_units(q.shape[0], batch, config.q.rows)
    items += 2 * k.shape[1] * count_units(k.shape[0], batch, config.k.rows)
    if items > MAX_ITEMS or max(q.shape[0], k.shape[0]) > MAX_PACKED_ROWS:
        return f"{items} groups of rows of {q.shape[0]} and {k.shape[0]} are too many"
    return value_mean.why_too_many(batch + 1, *v.shape[1:]) if c.smooth_v else ""


def why_no_packed_kernel(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, c: Fp8Quantization, target: Target
) -> str:
    """``why_not_fused_packed`` of problems of any sizes on ``target``."""
    return why_not_of_this_kind(dtype, head_dim, head_dim_v, PACKED_SEQLEN, c, target)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def packed_quantize_config(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, c: Fp8Quantization
) -> QuantizeConfig:
    """The config of the fused quantizer on packed sequences.

    Raises:
        ValueError: there is none.
    """
    return replace(select_quantize_config(dtype, head_dim, head_dim_v, PACKED_SEQLEN, c), layout=VARLEN)


@dataclass(frozen=True)
class PackedQuantizeLauncher(Launcher):
    """A quantizer of packed sequences on a grid of at most ``num_ctas``."""

    config: QuantizeConfig
    kernel: Kernel
    num_ctas: int

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, c: Fp8Quantization
    ) -> PackedQuantizedQKV:
        """As ``quantize_packed_fused``."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(q, k, v, lengths, c)
        parts = empty_packed(self.config, q, k, v, lengths, c)
        sources = tuple(make_packed_addressable(x).unsqueeze(0) for x in (q, k, v))
        mean = no_words(q.device)
        if c.smooth_v:
            mean = parts.mean_v
            value_mean.find_packed(v, parts.batch + 1).fill_packed(sources[2], lengths, mean)
        outputs = (parts.q.data, parts.k.data, parts.v.data, parts.q.scale, parts.k.scale, parts.v.scale)
        starts, no_lengths = lengths[:2], device_memory.no_lengths(q.device)
        used = tuple(no_lengths if x is None else x for x in lengths[2:4])
        given = sources, tuple(x.unsqueeze(0) for x in outputs), self.constants(c, q.device), mean
        self.kernel(*self.arguments(*given, (*starts, *used)))
        return parts

    def constants(self, c: Fp8Quantization, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The signs by which Q and K, and V, are rotated, and what stands for a mean of K."""
        unused = no_words(device)
        of_qk = sign_masks(self.config.head_dim, c.seed, device) if c.rotate else unused
        of_v = sign_masks(self.config.head_dim_v, c.seed, device) if c.rotate_v else unused
        return of_qk, of_v, unused

    def arguments(
        self,
        sources: tuple[Any, ...],
        outputs: tuple[Any, ...],
        constants: tuple[Any, Any, Any],
        mean: Any,
        lengths: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """What the kernel takes, in its order: q, k and v (1, total, ...), ``output_pieces`` as one batch, and the
        first four of ``Lengths``, without None."""
        return (*sources, *outputs, *constants, mean, *lengths, self.num_ctas)


def output_pieces(
    config: QuantizeConfig, q_shape: tuple[int, ...], v_shape: tuple[int, ...], batch: int
) -> Pieces:
    """What a quantizer of ``config`` makes of q (total_q, heads, head_dim) and v (total_k, kv_heads, head_dim_v) of so
    many sequences: codes of q, k and v, and their scales."""
    (total_q, heads, head_dim), (total_k, kv_heads, head_dim_v) = q_shape, v_shape
    blocks_q = count_units(total_q, batch, config.block_q)
    blocks_k = count_units(total_k, batch, config.block_k)
    keys = count_units(total_k, batch, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP
    return (
        Piece((total_q, heads, head_dim), E4M3),
        Piece((total_k, kv_heads, head_dim), E4M3),
        Piece((kv_heads, head_dim_v, keys), E4M3),
        Piece((heads, blocks_q)),
        Piece((kv_heads, blocks_k)),
        Piece((kv_heads, blocks_k)),
    )


def mean_piece(v_shape: tuple[int, ...], batch: int) -> Piece:
    """The mean of V of each sequence, and of the rows behind the last."""
    return Piece((batch + 1, *v_shape[1:]))


def empty_packed(
    config: QuantizeConfig, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, c: Fp8Quantization
) -> PackedQuantizedQKV:
    """Memory for what a quantizer of ``config`` makes."""
    batch, device, (largest_q, largest_k) = lengths.cu_seqlens_q.shape[0] - 1, q.device, config.largest_codes
    pieces = output_pieces(config, q.shape, v.shape, batch)
    q_codes, k_codes, v_codes, of_q, of_k, of_v = (piece.empty(device) for piece in pieces)
    mean = (mean_piece(v.shape, batch) if c.smooth_v else Piece((0,))).empty(device)
    return PackedQuantizedQKV(
        PackedQuantizedTensor(q_codes, of_q, config.block_q, largest_q),
        PackedQuantizedTensor(k_codes, of_k, config.block_k, largest_k),
        PackedTransposedV(v_codes, of_v, config.block_k, v.shape[0]),
        lengths=lengths,
        quantization=c,
        dtype=q.dtype,
        mean_v=mean,
    )


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, c: Fp8Quantization, device: torch.device
) -> PackedQuantizeLauncher:
    """The launcher of a kind of problems; compiles or loads its kernel the first time."""
    config, index = packed_quantize_config(dtype, head_dim, head_dim_v, c), index_of(device)
    kernel = compile_cache.get_quantize(config)
    return PackedQuantizeLauncher(index, config, kernel, count_ctas(index) * config.ctas_per_sm)


def quantize_packed_fused(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, c: Fp8Quantization
) -> PackedQuantizedQKV:
    """Quantize on a Hopper GPU, on torch's current stream. The problem passes ``why_not_fused_packed``.

    What is of no sequence, and scales that none of its blocks has, are left as they are. The first call with a head_dim
    and seed copies the signs of the rotation to the GPU.

    Raises:
        RuntimeError: that first call is made while a CUDA graph is captured.
    """
    return find(q.dtype, k.shape[2], v.shape[2], c, q.device)(q, k, v, lengths, c)
