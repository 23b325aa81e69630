"""Runs FP8 attention of packed sequences of few queries: tiles with the query heads of a K/V head as rows, whose keys
may be in parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper_attention import device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.backends import target_of, why_not_hopper
from hopper_attention.checks import FP8_OUT_DTYPE, TensorSpec
from hopper_attention.few_packed_queries import find_few_packed
from hopper_attention.few_queries import NOT_FEW, FewQueries
from hopper_attention.launch.base import Launcher, no_vectors
from hopper_attention.launch.few_packed_queries import FewPackedLaunch
from hopper_attention.launch.few_queries import NO_DESCALES, Descales
from hopper_attention.launch.fp8 import changes_for_fp8
from hopper_attention.launch.packed_fp8 import PackedFp8Launcher, clear_behind, find_packed_fp8
from hopper_attention.launch.planners import find_parts_planner
from hopper_attention.launch.split_forward import SplitSizes, find_combine
from hopper_attention.layout import make_packed_addressable, new_layout
from hopper_attention.lengths import Lengths, specs_of
from hopper_attention.masks import FULL_SIDES, MaskSpec
from hopper_attention.packed_quantized import ONE_PER_SEQUENCE
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores


@dataclass(frozen=True)
class FewPackedFp8Launcher(Launcher):
    """A ``VarlenLaunch`` by ``attention`` of e4m3 tensors with a descale for each K/V head of a
    sequence, whose queries are all used. ``combine`` is empty, or what adds ``splits`` parts up."""

    attention: PackedFp8Launcher
    splits: int
    combine: tuple[Kernel, ...]

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
        *window: int,
        wants_lse: bool,
        descales: Descales = NO_DESCALES,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        if self.device_index != torch.cuda.current_device():
            options = {"wants_lse": wants_lse, "descales": descales, "scores": scores}
            return self.call_there(q, k, v, *lengths, softmax_scale, *window, **options)
        q, k, v = (make_packed_addressable(x) for x in (q, k, v))
        (total_q, heads, _), (total_k, kv_heads, columns) = q.shape, v.shape
        attention, batch, device = self.attention, cu_seqlens_q.shape[0] - 1, q.device
        tile, totals = attention.config.tile_queries, (total_q, total_k)
        check_packed_size("FP8 kernel", heads, batch, totals, tile, self.splits)
        of_heads = heads // attention.config.group
        groups = of_heads // kv_heads
        plan = attention.planner(*lengths[:4], totals, tile, heads=of_heads)
        make = device_memory.empty_on_gpu
        out = make(*new_layout((total_q, heads, columns)), FP8_OUT_DTYPE)
        lse = make(*new_layout((heads, total_q if wants_lse else 0)), torch.float32)
        filled, sizes = (out, lse), self.sizes(q.shape, columns)
        for _ in self.combine:
            parts, part_lse, no_lse = device_memory.stream_memory(self.device_index, sizes.parts).tensors
            filled = parts, part_lse
        left, right, chunk = window or FULL_SIDES
        changes = () if scores is NO_SCORES else changes_for_fp8(scores)
        attention.kernel(
            *(q, k, v, *filled),
            device_memory.tile_counter(self.device_index),
            *scales_of_heads(descales, (batch, kv_heads, groups), device),
            *(ONE_PER_SEQUENCE, ONE_PER_SEQUENCE, softmax_scale),
            *(*attention.sides((left, right, chunk)), plan, batch + 1, *changes, attention.num_ctas),
        )
        for combine in self.combine:
            merged = lse.as_strided(*sizes.lse[:2]) if wants_lse else no_lse
            combine(*filled, out.view(sizes.out[0]), merged)
        if wants_lse and scores.sinks is not None:
            clear_behind(lse, cu_seqlens_q)
        return out, lse

    def sizes(self, q_shape: tuple[int, ...], head_dim_v: int) -> SplitSizes:
        """Of its parts."""
        total_q, heads, _ = q_shape
        return SplitSizes(self.splits, 1, total_q, heads, head_dim_v)


def scales_of_heads(
    descales: Descales, sizes: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, ...]:
    """What the FP8 kernel takes from q_scale to mean_v, where a K/V head of a sequence has a descale each for Q, K and
    V, or none. ``sizes`` are sequences, K/V heads, and tiles of heads of each."""
    batch, kv_heads, _ = sizes
    ones = device_memory.unit_scales(batch, kv_heads, device)
    of_q, of_k, of_v = (ones if x is None else x.unsqueeze(2) for x in descales)
    return of_q.expand(sizes), of_k, ones, of_v, no_vectors(batch, kv_heads, device)


def find_packed_with_descales(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths,
    mask: MaskSpec,
    backend: str | None,
    sm_margin: int,
    in_e4m3: bool,
    scores: ScoreKind = PLAIN,
) -> FewPackedLaunch | FewPackedFp8Launcher | None:
    """What serves checked tensors of e4m3 with a descale for each head of a sequence, if their queries are few;
    ``in_e4m3`` is that of ``few_queries.find_few``.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    q, _, v = tensors
    if backend not in (None, "hopper") or why_not_hopper(target_of(q.device)):
        return None
    of_q, of_k, of_v = (TensorSpec.of(x) for x in tensors)
    options = mask, scores, sm_margin
    few = find_few_packed((of_q, of_k, of_v), specs_of(lengths), lengths[4:], *options, in_e4m3=in_e4m3)
    if few.call is not None:
        return FewPackedLaunch(few.call)
    if few == NOT_FEW:
        return None
    return find_few_packed_fp8(few, (q.shape[2], v.shape[2]), mask, q.device, sm_margin, scores)


def find_few_packed_fp8(
    few: FewQueries,
    head_dims: tuple[int, int],
    mask: MaskSpec,
    device: torch.device,
    sm_margin: int,
    scores: ScoreKind = PLAIN,
) -> FewPackedFp8Launcher:
    """The launcher of calls that are served as ``few`` says, whose kernels are compiled or loaded.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    attention = find_packed_fp8(
        few.e4m3_problem(head_dims, mask, is_packed=True, scores=scores), device, "hopper", sm_margin
    )
    assert isinstance(attention, PackedFp8Launcher)
    combine = find_combine(attention.config, few.splits)
    planner = find_parts_planner(attention.config, attention.num_ctas, few.splits, mask)
    in_parts = replace(attention, planner=planner)
    return FewPackedFp8Launcher(attention.device_index, in_parts, few.splits, combine)
