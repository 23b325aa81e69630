"""Calls the kernel that transposes V of e4m3, ``hopper.transpose``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.problem import DENSE, VARLEN
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP
from hopper.transpose.config import KEYS, TransposeConfig, select_transpose_config
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import make_addressable, make_packed_addressable
from hopper_attention.lengths import Lengths
from hopper_attention.packed_quantization import transpose_packed
from hopper_attention.packed_quantized import count_units
from hopper_attention.quantized import padded_keys, transpose_for_kernel

MAX_TILES = 2**30


@dataclass(frozen=True)
class TransposeLauncher(Launcher):
    """Transposes V of as many columns as a config serves, for all other sizes."""

    config: TransposeConfig
    kernel: Kernel

    def __call__(self, v: Tensor) -> Tensor:
        """As ``transpose_values``."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(v)
        batch, keys, heads, columns = v.shape
        transposed = torch.empty(batch, heads, columns, padded_keys(keys), dtype=v.dtype, device=v.device)
        self.kernel(make_addressable(v), transposed)
        return transposed


@dataclass(frozen=True)
class PackedTransposeLauncher(Launcher):
    """The same of packed sequences."""

    config: TransposeConfig
    kernel: Kernel

    def __call__(self, v: Tensor, lengths: Lengths) -> Tensor:
        """As ``transpose_packed_values``."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(v, lengths)
        (_, heads, columns), keys = v.shape, keys_of_packed(v, lengths)
        transposed = torch.empty(heads, columns, keys, dtype=v.dtype, device=v.device)
        used = lengths.seqused_k
        self.kernel(
            make_packed_addressable(v).unsqueeze(0),
            transposed.unsqueeze(0),
            lengths.cu_seqlens_k,
            device_memory.no_lengths(v.device) if used is None else used,
        )
        return transposed


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(head_dim_v: int, device: torch.device) -> TransposeLauncher:
    """The launcher for values of ``head_dim_v`` columns; compiles or loads its kernel the first time.

    Raises:
        ValueError: there is none.
    """
    config = select_transpose_config(head_dim_v, DENSE)
    return TransposeLauncher(index_of(device), config, compile_cache.get_quantize(config))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_packed(head_dim_v: int, device: torch.device) -> PackedTransposeLauncher:
    """``find`` for packed sequences."""
    config = select_transpose_config(head_dim_v, VARLEN)
    return PackedTransposeLauncher(index_of(device), config, compile_cache.get_quantize(config))


def transpose_values(v: Tensor) -> Tensor:
    """As ``transpose_for_kernel``, on a Hopper GPU and torch's current stream: e4m3 V (b, s, hk, dv), dv a multiple of
    16 and no size 0, to (b, hk, dv, keys). By PyTorch where there are more tiles than the kernel can count."""
    return find(v.shape[3], v.device)(v) if are_counted(v) else transpose_for_kernel(v)


def are_counted(v: Tensor) -> bool:
    """Whether e4m3 V (b, s, hk, dv) has no more tiles than the kernel can count."""
    batch, keys, heads, columns = v.shape
    of_columns = columns // select_transpose_config(columns, DENSE).columns
    return batch * heads * -(-keys // KEYS) * of_columns <= MAX_TILES


def transpose_packed_values(v: Tensor, lengths: Lengths) -> Tensor:
    """As ``transpose_packed``, on a Hopper GPU and torch's current stream: e4m3 V (total, hk, dv), dv a multiple of 16
    and no size 0, to (hk, dv, keys). By PyTorch where there are more tiles than the kernel can count."""
    is_counted = are_packed_counted(v, lengths)
    return find_packed(v.shape[2], v.device)(v, lengths) if is_counted else transpose_packed(v, lengths)


def are_packed_counted(v: Tensor, lengths: Lengths) -> bool:
    """``are_counted`` of packed V (total, hk, dv)."""
    _, heads, columns = v.shape
    of_columns = columns // select_transpose_config(columns, VARLEN).columns
    return heads * -(-keys_of_packed(v, lengths) // KEYS) * of_columns <= MAX_TILES


def keys_of_packed(v: Tensor, lengths: Lengths) -> int:
    """Of packed V transposed, each sequence of which has whole steps to itself."""
    return count_units(v.shape[0], lengths.cu_seqlens_k.shape[0] - 1, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP
