"""A call of the decode kernel that was checked, to be made again with tensors like its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cute_kernels.append.config import BY_PAGE
from hopper_attention import device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import FP8_DTYPE, Result, TensorSpec
from hopper_attention.device_memory import Facts, Pieces
from hopper_attention.kvcache_checks import CacheShape, CacheTensors
from hopper_attention.launch.base import current_device
from hopper_attention.launch.decode import DecodeLauncher, is_aligned
from hopper_attention.layout import repairs_for

Decoded = tuple[Any, ...]
"""q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, k_descale, v_descale and scheduler_metadata, as they
were given, where a call has no other tensors."""


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """What serves calls like one that was checked.

    ``options`` is what the kernel takes behind its work memory, None for the descales of K and V, which come before the
    last; ``lse`` is what to make for an LSE, None where it is not wanted.
    """

    kernel: Kernel
    device_index: int
    out: Facts
    lse: Facts | None
    work: Pieces
    options: tuple[Any, ...]

    @classmethod
    def of(cls, launcher: DecodeLauncher, softcap: float | None) -> DecodeCall:
        """That of a call which ``launcher`` serves."""
        options = launcher.softmax_scale, launcher.max_splits, *launcher.sides, softcap
        lse = launcher.lse_facts if launcher.wants_lse else None
        # No sinks, no descales.
        options = *options, None, None, None, None, launcher.pieces
        where = launcher.kernel, launcher.device_index
        return cls(*where, launcher.out_facts, lse, launcher.work, options)

    def __call__(self, tensors: Decoded) -> Result | None:
        """The results of tensors like those of the call; None if TMA cannot address them, or another GPU is current."""
        q, k_cache, v_cache, lengths, table, cu_seqlens_q, k_descale, v_descale, _ = tensors
        index = self.device_index
        if current_device() != index:
            return None
        out = device_memory.empty_on_gpu(*self.out)
        work = device_memory.stream_memory(index, self.work).arguments
        lse = work[-1] if self.lse is None else device_memory.empty_on_gpu(*self.lse)
        given = q, k_cache, v_cache, out, lse, lengths, table, None, cu_seqlens_q, work[0]
        try:
            if k_descale is not None:
                self.kernel(*(given + self.options[:-3] + (k_descale, v_descale) + self.options[-1:]))
            else:
                self.kernel(*(given + self.options))
        except ValueError:
            # It looks at addresses before it launches anything.
            return None
        return out if self.lse is None else (out, lse)


def is_launched_as_it_is(shape: CacheShape, read: CacheTensors, tensors: Decoded) -> bool:
    """Whether the kernel gets the tensors of a call and no others, and nothing depends on the grad mode. Scales by page
    are made longer before."""
    q, k_cache, v_cache, lengths, table, _, k_descale, v_descale, _ = tensors
    descales = (k_descale, v_descale) if shape.is_fp8_cache else ()
    if (
        read.q is not q
        or q.dtype == FP8_DTYPE
        or shape.scales == BY_PAGE
        or type(lengths) is not Tensor
        or any(x is not None and x.requires_grad for x in tensors)
        or (table is not None and table.stride(1) != 1)
        or any(x is None or (x.dim() == 2 and x.stride(1) != 1) for x in descales)
    ):
        return False
    addressed = (q.unsqueeze(0) if shape.is_packed_q else q), k_cache, v_cache
    return is_aligned(read) and not repairs_for(*map(TensorSpec.of, addressed))
