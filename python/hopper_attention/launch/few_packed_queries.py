"""Runs packed calls of few queries on the decode kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hopper_attention import few_packed_queries
from hopper_attention.backends import target_of, why_not_hopper
from hopper_attention.checks import TensorSpec
from hopper_attention.kvcache_checks import CacheCall, CacheTensors
from hopper_attention.launch.decode import any_sequence, attend_by, find_decode
from hopper_attention.launch.few_queries import NO_DESCALES, Descales, call_with
from hopper_attention.layout import make_packed_addressable
from hopper_attention.lengths import Lengths, specs_of
from hopper_attention.masks import MaskSpec
from hopper_attention.scores import NO_SCORES, PLAIN, Scores


@dataclass(frozen=True)
class FewPackedLaunch:
    """A ``VarlenLaunch`` of tensors for which ``few_packed_queries.find_packed_call`` gave a call."""

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
        return attend_by(find_decode(call), tensors, scores)


def find_packed_with_descales(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    mask: MaskSpec,
    backend: str | None,
    sm_margin: int,
) -> FewPackedLaunch | None:
    """What serves checked tensors of e4m3 with a descale for each head of a sequence, if their queries are few."""
    device = tensors[0].device
    if backend not in (None, "hopper") or why_not_hopper(target_of(device)):
        return None
    q, k, v = (TensorSpec.of(x) for x in tensors)
    call = few_packed_queries.find_packed_call(
        (q, k, v), specs_of(lengths), lengths[4:], mask, PLAIN, sm_margin
    )
    return None if call is None else FewPackedLaunch(call)
