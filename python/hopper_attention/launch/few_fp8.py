"""Runs FP8 attention of few queries: tiles with the query heads of a K/V head as rows, whose keys may be in parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention import device_memory, few_queries
from hopper_attention.backends import target_of, why_not_hopper
from hopper_attention.checks import TensorSpec
from hopper_attention.few_queries import FewQueries
from hopper_attention.fp8_rules import check_size
from hopper_attention.launch.base import Launcher, no_vectors
from hopper_attention.launch.few_queries import NO_DESCALES, Descales, FewQueriesLaunch
from hopper_attention.launch.fp8 import ALL_ROWS, Fp8HopperLauncher, changes_for_fp8, find, find_config
from hopper_attention.layout import make_addressable
from hopper_attention.masks import FULL_SIDES, MaskSpec
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores


@dataclass(frozen=True)
class FewFp8Launcher(Launcher):
    """``attention`` of dense e4m3 tensors with a descale for each K/V head. ``group`` heads are in a tile, which has
    one scale then."""

    attention: Fp8HopperLauncher
    group: int

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        wants_lse: bool,
        *window: int,
        descales: Descales = NO_DESCALES,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted has no elements."""
        if self.device_index != torch.cuda.current_device():
            options = {"descales": descales, "scores": scores}
            return self.call_there(q, k, v, softmax_scale, wants_lse, *window, **options)
        q, k, v = make_addressable(q), make_addressable(k), make_addressable(v)
        (batch, _, heads, _), kv_heads, device = q.shape, k.shape[2], q.device
        ones = device_memory.unit_scales(batch, kv_heads, device)
        of_q, of_k, of_v = (ones if x is None else x.unsqueeze(2) for x in descales)
        of_q = of_q.expand(batch, kv_heads, heads // (self.group * kv_heads))
        result = self.attention.result
        out = result.empty_out(q)
        lse = result.empty_lse(q) if wants_lse else no_vectors(batch, heads, device)
        scales, no_mean = (of_q, of_k, of_v, ones), no_vectors(batch, kv_heads, device)
        left, right, chunk = window or FULL_SIDES
        of_call = scales, no_mean, ALL_ROWS, softmax_scale, (left, right, chunk)
        of_scores = changes_for_fp8(scores) if self.attention.changes_scores else ()
        self.attention.queue((q, k, v, out, lse), *of_call, of_scores=of_scores)
        return out, lse


def find_with_descales(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    backend: str | None,
    sm_margin: int,
    in_e4m3: bool,
    scores: ScoreKind = PLAIN,
) -> FewQueriesLaunch | FewFp8Launcher | None:
    """What serves checked tensors of e4m3 with a descale for each head, if their queries are few; ``in_e4m3`` is that
    of ``few_queries.find_few``.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    if backend not in (None, "hopper") or not few_queries.may_serve(q.shape, k.shape):
        return None
    if why_not_hopper(target_of(q.device)):
        return None
    specs = TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v)
    few = few_queries.find_few(*specs, mask, scores, sm_margin, in_e4m3)
    if few.call is not None:
        return FewQueriesLaunch(few.call)
    return None if few == few_queries.NOT_FEW else find_few_fp8(few, q, k, v, mask, sm_margin, scores)


def find_few_fp8(
    few: FewQueries,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    sm_margin: int,
    scores: ScoreKind = PLAIN,
) -> FewFp8Launcher:
    """The launcher of a call that is served as ``few`` says, whose kernels are compiled or loaded.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
        NotImplementedError: there are more tiles than the kernel can count.
    """
    problem = few.e4m3_problem((q.shape[3], v.shape[3]), mask, is_packed=False, scores=scores)
    config = find_config(problem)
    check_size(config, q.shape, k.shape)
    attention = find(problem, q.device, sm_margin, (), few.splits)
    return FewFp8Launcher(attention.device_index, attention, few.group)
