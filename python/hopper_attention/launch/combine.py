"""Merges partial results of attention on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.combine.config import COLUMNS, VECTOR, WARPS, CombineConfig, select_combine_config
from cute_kernels.problem import MAX_TILES
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import Target, target_of, why_not_ampere
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import contiguous_copy

VECTOR_BYTES = 16
INSTEAD = "merge in PyTorch: reference.combine.combine_parts"


@dataclass(frozen=True)
class CombineLauncher(Launcher):
    """Merges into one dtype, for all sizes."""

    config: CombineConfig
    kernel: Kernel

    def __call__(self, out_partial: Tensor, lse_partial: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """As ``combine``, of parts of 5 dimensions."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(out_partial, lse_partial, out)
        _, *shape = out_partial.shape
        columns, device = shape[-1], out_partial.device
        dtype = getattr(torch, self.config.dtype)
        padding = -columns % VECTOR
        parts = functional.pad(out_partial, (0, padding)) if padding else out_partial
        merged = out
        if merged is None or padding or not _is_addressable(merged):
            merged = torch.empty(*shape[:-1], columns + padding, dtype=dtype, device=device)
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
        if lse.numel() and columns:
            parts = parts if _is_addressable(parts) else contiguous_copy(parts)
            self.kernel(parts, lse_partial, merged, lse)
        elif lse.numel():
            torch.logsumexp(lse_partial, 0, out=lse)
        result = merged[..., :columns].contiguous() if padding else merged
        if out is None or out is merged:
            return result, lse
        return out.copy_(result), lse


def _is_addressable(x: Tensor) -> bool:
    """Whether its rows can be moved in vectors."""
    *strides, last = x.stride()
    return last == 1 and not x.data_ptr() % VECTOR_BYTES and not any(stride % VECTOR for stride in strides)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def known_target(device: torch.device) -> Target:
    """``target_of``, remembered."""
    return target_of(device)


def why_not_combine(out_partial_shape: tuple[int, ...], dtype: torch.dtype, target: Target) -> str:
    """What keeps the kernel from merging parts of this shape into ``dtype`` on ``target``; empty if nothing does."""
    blocked = why_not_ampere(target)
    if blocked:
        return blocked
    try:
        _config_of(dtype, out_partial_shape[0], target)
    except ValueError as error:
        return str(error)
    rows = torch.Size(out_partial_shape[1:-1]).numel()
    jobs = rows * -(-out_partial_shape[-1] // COLUMNS) * WARPS
    if jobs > MAX_TILES:
        return (
            f"there are {rows} rows, allowed with {out_partial_shape[-1]} columns: {MAX_TILES * rows // jobs}"
        )
    return ""


def _config_of(dtype: torch.dtype, num_splits: int, target: Target) -> CombineConfig:
    major, minor = target.capability
    arch = ARCH_OF_CAPABILITY[major, minor]
    return select_combine_config(str(dtype).removeprefix("torch."), num_splits, arch)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(config: CombineConfig, device: torch.device) -> CombineLauncher:
    """The launcher of a config; compiles or loads its kernel the first time."""
    return CombineLauncher(index_of(device), config, compile_cache.get_serving(config))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _find_for(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> CombineLauncher:
    """The launcher for parts of this shape.

    Raises:
        NotImplementedError: the kernel does not do it.
    """
    target = known_target(device)
    reason = why_not_combine(shape, dtype, target)
    if reason:
        raise NotImplementedError(f"{reason}; {INSTEAD}")
    return find(_config_of(dtype, shape[0], target), device)


def combine(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention to parts of the keys into that to all, on torch's current stream.

    The arguments are checked before (shapes, dtypes, devices). ``reference.combine.combine_parts`` is the same.

    Args:
        out_partial: float32 (num_splits, batch, seqlen, heads, head_dim_v), or (num_splits, total, heads, head_dim_v),
            of up to 256 splits. It is copied where its rows do not lie at multiples of 16 bytes.
        lse_partial: float32, the same without the last dimension, of any strides.
        dtype: float16, bfloat16 or float32.
        out: where the output goes, of ``dtype``; None for a new tensor.

    Returns:
        out (batch, seqlen, heads, head_dim_v) or (total, heads, head_dim_v), and lse, float32, without its last
        dimension; new ones are contiguous. Rows without keys in any part have 0 and -inf.

    Raises:
        NotImplementedError: the kernel does not do it; the message says why, and what does.
    """
    launcher = _find_for(out_partial.shape, dtype, out_partial.device)
    if out_partial.dim() == 5:
        return launcher(out_partial, lse_partial, out)
    batched = None if out is None else out.unsqueeze(0)
    merged, lse = launcher(out_partial.unsqueeze(1), lse_partial.unsqueeze(1), batched)
    return merged[0] if out is None else out, lse[0]
