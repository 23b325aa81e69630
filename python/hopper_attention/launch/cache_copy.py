"""Copies the keys and values of a call out of a cache of e4m3 to 16 bits on a GPU, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.dequantize.config import VECTOR, DequantizeConfig, validate_dequantize_config
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import Target, target_of, why_not_ampere
from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import no_lengths, unit_scales
from hopper_attention.kvcache_checks import CacheShape, CacheTensors
from hopper_attention.launch.append import no_table
from hopper_attention.launch.base import REMEMBERED_CALLS, Launcher, index_of

MAX_BATCH = 65_535
"""What the second dimension of a CUDA grid can count."""


def select_dequantize(shape: CacheShape, target: Target) -> DequantizeConfig:
    """The config of the kernel that copies a call's keys.

    Raises:
        NotImplementedError: the GPU has no instructions for e4m3.
    """
    config = DequantizeConfig(
        ARCH_OF_CAPABILITY[target.capability[0], target.capability[1]],
        str(shape.out_dtype).removeprefix("torch."),
        shape.has_scales_of_rows,
    )
    validate_dequantize_config(config)
    return config


def why_not_copied(shape: CacheShape, target: Target) -> str:
    """What keeps the kernel from copying a call's keys; empty if nothing does but perhaps where the caches begin."""
    blocked = why_not_ampere(target)
    if blocked:
        return blocked
    if not shape.is_fp8_cache or not shape.has_keys or not shape.kv_heads:
        return "there is no key of e4m3"
    try:
        select_dequantize(shape, target)
    except NotImplementedError as error:
        return str(error)
    if shape.batch > MAX_BATCH:
        return f"the batch is {shape.batch}, and the kernel counts {MAX_BATCH}"
    for name, cache in zip(("k_cache", "v_cache"), shape.caches, strict=True):
        if not _is_addressable(cache):
            return f"{name} has shape {tuple(cache.shape)} and strides {tuple(cache.strides)}, no multiples of {VECTOR}"
    return ""


def _is_addressable(cache: TensorSpec) -> bool:
    *others, last = cache.strides
    return last == 1 and not any(number % VECTOR for number in (*others, cache.shape[-1]))


@dataclass(frozen=True)
class CacheCopyLauncher(Launcher):
    """The kernel that copies the keys of one kind of call."""

    config: DequantizeConfig
    kernel: Kernel
    shape: CacheShape

    def __call__(self, tensors: CacheTensors, lengths: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """As ``copy_in_16_bits``, of caches that begin where the kernel can read them."""
        if self.device_index != torch.cuda.current_device():
            there: tuple[Tensor, Tensor] = self.call_there(tensors, lengths, first)
            return there
        shape, t = self.shape, tensors
        none = no_lengths(shape.device)
        table = no_table(shape.device) if t.page_table is None else t.page_table
        copies = tuple(
            torch.empty(
                (shape.batch, shape.seqlen_k, shape.kv_heads, columns),
                dtype=shape.out_dtype,
                device=shape.device,
            )
            for columns in (shape.head_dim, shape.head_dim_v)
        )
        self.kernel(
            t.k_cache,
            t.v_cache,
            lengths,
            none if first is None else first,
            none if t.cache_batch_idx is None else t.cache_batch_idx.contiguous(),
            table if table.stride(1) == 1 else table.contiguous(),
            *(self._descale(x) for x in (t.k_descale, t.v_descale)),
            *copies,
        )
        return copies[0], copies[1]

    def _descale(self, descale: Tensor | None) -> Tensor:
        """(batch, kv_heads), or (pages, page_size, kv_heads) of scales by page or token."""
        shape = self.shape
        if descale is None:
            return unit_scales(shape.batch, shape.kv_heads, shape.device)[:, :, 0]
        return descale.expand(-1, shape.caches[0].shape[1], -1) if shape.has_scales_of_rows else descale


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_copy(shape: CacheShape) -> CacheCopyLauncher | None:
    """What serves a call; None if there is no kernel for it."""
    target = target_of(shape.device)
    if why_not_copied(shape, target):
        return None
    config = select_dequantize(shape, target)
    return CacheCopyLauncher(index_of(shape.device), config, compile_cache.get_serving(config), shape)


def copy_in_16_bits(
    shape: CacheShape, tensors: CacheTensors, lengths: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """K and V (batch, seqlen_k, kv_heads, columns) of 16 bits, e4m3 times descale rounded once; None where no kernel
    does that.

    Args:
        lengths: int32 (batch,): keys that are copied of each sequence. What lies behind them is not written.
        first: int32 (batch,): the row of each with which its keys begin; None for 0.
    """
    launcher = find_copy(shape)
    if launcher is None or (tensors.k_cache.data_ptr() | tensors.v_cache.data_ptr()) % VECTOR:
        return None
    return launcher(tensors, lengths, first)
