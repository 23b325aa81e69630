"""Runs packed calls of few queries on the decode kernel."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hopper_attention import device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.device_memory import Facts, Pieces
from hopper_attention.kvcache_checks import CacheCall, CacheTensors
from hopper_attention.launch import at_once
from hopper_attention.launch.at_once import Given, Part, Script, Step
from hopper_attention.launch.base import current_device
from hopper_attention.launch.decode import any_sequence, attend_by, find_short_decode
from hopper_attention.launch.few_queries import NO_DESCALES, Descales, call_with
from hopper_attention.layout import TMA_BYTES, make_packed_addressable
from hopper_attention.lengths import Lengths
from hopper_attention.scores import NO_SCORES, Scores

INT32_BYTES = 4


@dataclass(frozen=True)
class FewPackedLaunch:
    """A ``VarlenLaunch`` of tensors for which ``few_packed_queries.find_few_packed`` gave a call."""

    call: CacheCall

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        wants_lse: bool,
        scores: Scores = NO_SCORES,
        descales: Descales = NO_DESCALES,
    ) -> tuple[Tensor, Tensor]:
        starts = cu_seqlens_k[:-1]
        of_q, of_k, of_v = descales
        tensors = CacheTensors(
            q,
            make_packed_addressable(k).unsqueeze(0),
            make_packed_addressable(v).unsqueeze(0),
            cache_seqlens=cu_seqlens_k[1:] if seqused_k is None else starts + seqused_k,
            cache_batch_idx=any_sequence(self.call.shape.batch, q.device),
            cache_leftpad=starts,
            cu_seqlens_q=cu_seqlens_q,
            q_descale=of_q,
            k_descale=of_k,
            v_descale=of_v,
        )
        call = call_with(self.call, softmax_scale, wants_lse)
        return attend_by(find_short_decode(call), tensors, scores)


@dataclass(frozen=True, slots=True)
class ReadyFewPacked:
    """A ``VarlenLaunch`` with the window of its call, of tensors of the same sizes and strides in every call, all keys
    of which are used, with descales or without. Lengths and left pads are parts of cu_seqlens_k. ``launch`` serves
    where ``script`` cannot."""

    launch: FewPackedLaunch
    device_index: int
    out: Facts
    lse: Facts
    work: Pieces
    script: Script

    @classmethod
    def of(
        cls,
        launch: FewPackedLaunch,
        tensors: tuple[Tensor, Tensor, Tensor],
        lengths: Lengths,
        descales: Descales = NO_DESCALES,
    ) -> ReadyFewPacked | None:
        """That of calls with tensors and descales like these; None where one is to be copied, or not all keys are
        used."""
        if lengths.seqused_k is not None or any(make_packed_addressable(x) is not x for x in tensors):
            return None
        is_widened = tensors[0].dtype == FP8_DTYPE and not find_short_decode(launch.call).takes_e4m3_queries
        if is_widened or any(x.stride(1) != 1 for x in _given(descales)):
            return None
        q, k, v, out, lse, starts_q, starts_k, parts, scale = map(Given, range(9))
        batch, device = launch.call.shape.batch, tensors[0].device
        with_lse, without_lse = (
            find_short_decode(call_with(launch.call, None, wants)) for wants in (True, False)
        )
        of_k, of_v = (
            Part(x.number, 0, _of_one_page(given)) for x, given in zip((k, v), tensors[1:], strict=True)
        )
        ends, pads = (Part(starts_k.number, byte, ((batch,), (1,), torch.int32)) for byte in (INT32_BYTES, 0))
        table = any_sequence(batch, device)[:, None]
        numbers = count(scale.number + 1)
        factors = [_none_of(launch.call) if x is None else Given(next(numbers)) for x in descales]
        # No cap, no sinks.
        behind = with_lse.max_splits, *with_lse.sides, None, None, *factors, with_lse.pieces
        step = Step(
            with_lse.kernel,
            (q, of_k, of_v, out, lse, ends, kept_argument(table), pads, starts_q, parts, scale, *behind),
        )
        results = with_lse.out_facts, with_lse.lse_facts, without_lse.work
        return cls(launch, with_lse.device_index, *results, at_once.make_script([step]))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        wants_lse: bool,
        descales: Descales = NO_DESCALES,
    ) -> tuple[Tensor, Tensor]:
        index, make = self.device_index, device_memory.empty_on_gpu
        if (
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES
            or current_device() != index
            # A graph may outlive the constants of the script.
            or device_memory.records_graph(index)
        ):
            lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
            window = window_left, window_right, attention_chunk
            return self.launch(q, k, v, *lengths, softmax_scale, *window, wants_lse, descales=descales)
        out = make(*self.out)
        parts, no_lse = device_memory.stream_memory(index, self.work).arguments
        lse = make(*self.lse) if wants_lse else no_lse
        starts = cu_seqlens_q, cu_seqlens_k
        self.script.run(q, k, v, out, lse, *starts, parts, softmax_scale, *_given(descales))
        return out, lse


def _none_of(call: CacheCall) -> Any:
    """What the kernel takes for a descale that is not given: ones, where K and V are e4m3."""
    shape = call.shape
    if not shape.is_fp8_cache:
        return None
    return kept_argument(device_memory.unit_scales(shape.batch, shape.kv_heads, shape.device)[:, :, 0])


def _given(descales: Descales) -> list[Tensor]:
    return [x for x in descales if x is not None]


def _of_one_page(x: Tensor) -> Facts:
    """``x`` as a cache of one page."""
    return (1, *x.shape), (x.shape[0] * x.stride(0), *x.stride()), x.dtype
