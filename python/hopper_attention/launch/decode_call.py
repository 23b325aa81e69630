"""A call of the decode kernel that was checked, to be made again with tensors like its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cute_kernels.append.config import BY_PAGE
from hopper_attention.checks import FP8_DTYPE, Result, TensorSpec
from hopper_attention.kvcache_checks import CacheShape, CacheTensors
from hopper_attention.launch.base import current_device
from hopper_attention.launch.decode import DecodeLauncher, is_aligned, scales_of_rows
from hopper_attention.layout import TMA_BYTES, repairs_for

Decoded = tuple[Any, ...]
"""q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, k_descale, v_descale and scheduler_metadata, as they
were given, where a call has no other tensors."""


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """What serves calls like one that was checked."""

    launcher: DecodeLauncher
    softcap: float | None

    def __call__(self, tensors: Decoded) -> Result | None:
        """The results of tensors like those of the call; None if TMA cannot address them, or another GPU is current."""
        q, k_cache, v_cache, lengths, table, cu_seqlens_q, k_descale, v_descale, _ = tensors
        launcher = self.launcher
        if (
            (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % TMA_BYTES
            or current_device() != launcher.device_index
        ):  # fmt: skip
            return None
        if launcher.shape.scales == BY_PAGE:
            k_descale, v_descale = (scales_of_rows(x, launcher.shape) for x in (k_descale, v_descale))
        out, lse = launcher.launch(
            (q,),
            k_cache,
            v_cache,
            lengths,
            table,
            None,
            cu_seqlens_q,
            self.softcap,
            None,
            (None, k_descale, v_descale),
        )
        return (out, lse) if launcher.wants_lse else out


def is_launched_as_it_is(shape: CacheShape, read: CacheTensors, tensors: Decoded) -> bool:
    """Whether the kernel gets the tensors of a call and no others, and nothing depends on the grad mode."""
    q, k_cache, v_cache, lengths, table, _, k_descale, v_descale, _ = tensors
    descales = (k_descale, v_descale) if shape.is_fp8_cache else ()
    if (
        read.q is not q
        or q.dtype == FP8_DTYPE
        or type(lengths) is not Tensor
        or any(x is not None and x.requires_grad for x in tensors)
        or (table is not None and table.stride(1) != 1)
        or any(x is None or (x.dim() == 2 and x.stride(1) != 1) for x in descales)
    ):
        return False
    addressed = (q.unsqueeze(0) if shape.is_packed_q else q), k_cache, v_cache
    return is_aligned(read) and not repairs_for(*map(TensorSpec.of, addressed))
