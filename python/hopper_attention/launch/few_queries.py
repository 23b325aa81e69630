"""Runs dense calls of few queries on the decode kernel, for which K and V are a cache of one page a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from hopper_attention import device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.device_memory import Facts, Pieces
from hopper_attention.kvcache_checks import CacheCall, CacheTensors
from hopper_attention.launch.base import REMEMBERED_CALLS, current_device
from hopper_attention.launch.decode import any_lengths, attend_by, find_short_decode
from hopper_attention.layout import make_addressable
from hopper_attention.scores import NO_SCORES, Scores

Descales = tuple["Tensor | None", "Tensor | None", "Tensor | None"]

NO_DESCALES: Descales = (None, None, None)


@dataclass(frozen=True)
class FewQueriesLaunch:
    """A ``Launch`` of dense tensors for which ``few_queries.find_few`` gave a call."""

    call: CacheCall

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        wants_lse: bool,
        *window: int,
        scores: Scores = NO_SCORES,
        descales: Descales = NO_DESCALES,
    ) -> tuple[Tensor, Tensor]:
        k, v = make_addressable(k), make_addressable(v)
        lengths = any_lengths(self.call.shape.batch, self.call.shape.device)
        of_q, of_k, of_v = descales
        tensors = CacheTensors(q, k, v, cache_seqlens=lengths, q_descale=of_q, k_descale=of_k, v_descale=of_v)
        call = call_with(self.call, softmax_scale, wants_lse)
        return attend_by(find_short_decode(call), tensors, scores)

    def ready(self, q: Tensor, k: Tensor, v: Tensor) -> ReadyFewQueries | None:
        """What serves tensors like these, if they are launched as they are."""
        is_widened = q.dtype == FP8_DTYPE and not find_short_decode(self.call).takes_e4m3_queries
        if is_widened or any(make_addressable(x) is not x for x in (q, k, v)):
            return None
        return ReadyFewQueries.of(self)


@lru_cache(maxsize=REMEMBERED_CALLS)
def call_with(call: CacheCall, softmax_scale: float | None, wants_lse: bool) -> CacheCall:
    """The same with these."""
    scale = call.softmax_scale if softmax_scale is None else softmax_scale
    return replace(call, softmax_scale=scale, wants_lse=wants_lse)


@dataclass(frozen=True, slots=True)
class ReadyFewQueries:
    """A ``Launch`` of tensors of the same sizes and strides in every call, but for the number of keys, which the kernel
    can address wherever they are aligned, and whose scores nothing changes. ``options`` are what the kernel takes
    between the scale and descales, ``pieces`` what it takes behind them."""

    launch: FewQueriesLaunch
    kernel: Kernel
    device_index: int
    out: Facts
    lse: Facts
    work: Pieces
    default_scale: float
    options: tuple[Any, ...]
    pieces: int

    @classmethod
    def of(cls, launch: FewQueriesLaunch) -> ReadyFewQueries:
        """That of tensors like those of ``launch``."""
        with_lse = find_short_decode(launch.call)
        without_lse = find_short_decode(call_with(launch.call, None, False))
        return cls(
            launch,
            with_lse.kernel,
            with_lse.device_index,
            out=with_lse.out_facts,
            lse=with_lse.lse_facts,
            work=without_lse.work,
            default_scale=with_lse.softmax_scale,
            # No cap, no sinks.
            options=(with_lse.max_splits, *with_lse.sides, None, None),
            pieces=with_lse.pieces,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        wants_lse: bool,
        *window: int,
        descales: Descales = NO_DESCALES,
    ) -> tuple[Tensor, Tensor]:
        index, make = self.device_index, device_memory.empty_on_gpu
        if current_device() != index:
            return self.launch(q, k, v, softmax_scale, wants_lse, descales=descales)
        out = make(*self.out)
        parts, no_lse = device_memory.stream_memory(index, self.work).arguments
        lse = make(*self.lse) if wants_lse else no_lse
        scale = self.default_scale if softmax_scale is None else softmax_scale
        lists = any_lengths(q.shape[0], q.device), None, None, None
        try:
            self.kernel(q, k, v, out, lse, *lists, parts, scale, *self.options, *descales, self.pieces)
            return out, lse
        except ValueError:
            # It looks at addresses before it launches anything. Copies are to take the place of these.
            del out, lse
        return self.launch(q, k, v, softmax_scale, wants_lse, descales=descales)
