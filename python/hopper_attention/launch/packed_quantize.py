"""Calls the fused quantizer on packed sequences: where it runs, what it is given, what it fills."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

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
        unused = no_words(q.device)
        sources = tuple(make_packed_addressable(x).unsqueeze(0) for x in (q, k, v))
        if c.smooth_v:
            value_mean.find_packed(v, parts.batch + 1).fill_packed(sources[2], lengths, parts.mean_v)
        outputs = (parts.q.data, parts.k.data, parts.v.data, parts.q.scale, parts.k.scale, parts.v.scale)
        self.kernel(
            *sources,
            *(x.unsqueeze(0) for x in outputs),
            sign_masks(self.config.head_dim, c.seed, q.device) if c.rotate else unused,
            sign_masks(self.config.head_dim_v, c.seed, q.device) if c.rotate_v else unused,
            unused,
            parts.mean_v if c.smooth_v else unused,
            lengths.cu_seqlens_q,
            lengths.cu_seqlens_k,
            *(
                device_memory.no_lengths(q.device) if used is None else used
                for used in (lengths.seqused_q, lengths.seqused_k)
            ),
            self.num_ctas,
        )
        return parts


def empty_packed(
    config: QuantizeConfig, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, c: Fp8Quantization
) -> PackedQuantizedQKV:
    """Memory for what a quantizer of ``config`` makes."""
    batch, device = lengths.cu_seqlens_q.shape[0] - 1, q.device
    (total_q, heads, _), (total_k, kv_heads, head_dim_v) = q.shape, v.shape
    largest_q, largest_k = config.largest_codes
    blocks_q = count_units(total_q, batch, config.block_q)
    blocks_k = count_units(total_k, batch, config.block_k)
    keys = count_units(total_k, batch, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP

    def codes(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=E4M3, device=device)

    def scales(of_heads: int, blocks: int) -> Tensor:
        return torch.empty(of_heads, blocks, dtype=torch.float32, device=device)

    return PackedQuantizedQKV(
        PackedQuantizedTensor(codes(*q.shape), scales(heads, blocks_q), config.block_q, largest_q),
        PackedQuantizedTensor(codes(*k.shape), scales(kv_heads, blocks_k), config.block_k, largest_k),
        PackedTransposedV(
            codes(kv_heads, head_dim_v, keys), scales(kv_heads, blocks_k), config.block_k, total_k
        ),
        lengths=lengths,
        quantization=c,
        dtype=q.dtype,
        mean_v=torch.empty(
            (batch + 1, kv_heads, head_dim_v) if c.smooth_v else 0, dtype=torch.float32, device=device
        ),
    )


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _find(
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
    return _find(q.dtype, k.shape[2], v.shape[2], c, q.device)(q, k, v, lengths, c)
