"""Runs the forward kernels on a cache where it lies, with several query heads in a tile, and keys in parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.cache_tiles import problem_of_tiles, tiles_of
from hopper_attention.kvcache_checks import CacheCall, CacheTensors
from hopper_attention.launch.base import (
    NO_SIDES,
    REMEMBERED_CALLS,
    Launcher,
    count_ctas,
    index_of,
)
from hopper_attention.launch.decode import table_of
from hopper_attention.launch.few_packed_fp8 import scales_of_heads
from hopper_attention.launch.forward import find_config
from hopper_attention.launch.fp8 import changes_for_fp8
from hopper_attention.launch.packed_fp8 import PackedFp8Launcher, find_packed_fp8
from hopper_attention.launch.planners import Planner, find_parts_planner
from hopper_attention.launch.split_forward import SplitSizes, find_combine
from hopper_attention.layout import Repair, make_packed_addressable, new_layout, repair_for
from hopper_attention.masks import kernel_sides
from hopper_attention.packed_quantized import ONE_PER_SEQUENCE
from hopper_attention.problem import Fp8AttentionProblem
from hopper_attention.scores import Scores


@dataclass(frozen=True)
class CacheTilesLauncher(Launcher):
    """The forward kernel of 16 bits, or of e4m3, for one kind of call. ``combine`` is empty, or what adds ``splits``
    parts up."""

    config: ForwardConfig
    kernel: Kernel
    planner: Planner
    num_ctas: int
    splits: int
    combine: tuple[Kernel, ...]
    repairs: tuple[Repair, Repair]

    def __call__(self, call: CacheCall, tensors: CacheTensors, scores: Scores) -> tuple[Tensor, Tensor]:
        """out (total_q, heads, head_dim_v), and lse (heads, total_q), which lacks its rows if it is not wanted."""
        if self.device_index != torch.cuda.current_device():
            there: tuple[Tensor, Tensor] = self.call_there(call, tensors, scores)
            return there
        shape, t = call.shape, tensors
        q = make_packed_addressable(t.q if shape.is_packed_q else t.q.flatten(0, 1))
        caches = [repair.apply(x) for repair, x in zip(self.repairs, (t.k_cache, t.v_cache), strict=True)]
        totals = shape.total_q, shape.batch * shape.capacity
        of_tiles = self.config.tile_queries, self.splits
        check_packed_size("kernel", shape.heads, shape.batch, totals, *of_tiles)
        make = device_memory.empty_on_gpu
        out = make(*new_layout((shape.total_q, shape.heads, shape.head_dim_v)), shape.out_dtype)
        rows_of_lse = shape.total_q if call.wants_lse else 0
        lse = make(*new_layout((shape.heads, rows_of_lse)), torch.float32)
        filled, sizes = (out, lse), SplitSizes(self.splits, 1, shape.total_q, shape.heads, shape.head_dim_v)
        for _ in self.combine:
            parts, part_lse, no_lse = device_memory.stream_memory(self.device_index, sizes.parts).tensors
            filled = parts, part_lse
        plan = self._plan(call, t, totals)
        counter = device_memory.tile_counter(self.device_index)
        is_e4m3 = isinstance(self.config, Fp8ForwardConfig)
        arguments = self._of_codes if is_e4m3 else self._of_16_bits
        if not self.config.page_box:
            caches = [x.flatten(0, 1) for x in caches]
        self.kernel(q, *caches, *filled, counter, *arguments(call, t, plan, scores), self.num_ctas)
        for combine in self.combine:
            merged = lse.as_strided(*sizes.lse[:2]) if call.wants_lse else no_lse
            combine(*filled, out.view(sizes.out[0]), merged)
        return out, lse

    def _plan(self, call: CacheCall, tensors: CacheTensors, totals: tuple[int, int]) -> Tensor:
        shape, device = call.shape, call.shape.device
        starts_q, lengths = tensors.cu_seqlens_q, tensors.cache_seqlens
        if starts_q is None:
            starts_q = device_memory.multiples(shape.batch + 1, shape.seqlen_q, device)
        starts_k = device_memory.multiples(shape.batch + 1, shape.capacity, device)
        tile, heads = self.config.tile_queries, shape.heads // self.config.group
        return self.planner(starts_q, starts_k, None, lengths, totals, tile, heads=heads)

    def _pages(self, call: CacheCall, tensors: CacheTensors) -> tuple[Tensor | None, Tensor | None]:
        """The table and the left pads; None twice where sequences lie end to end."""
        if not self.config.page_box:
            return None, None
        device, table, leftpad = call.shape.device, table_of(tensors), tensors.cache_leftpad
        if table is None:
            table = device_memory.multiples(call.shape.batch, 1, device)[:, None]
        return table, device_memory.no_lengths(device) if leftpad is None else leftpad

    def sides_of(self, call: CacheCall) -> tuple[int | None, ...]:
        """Those of the window, as the kernel takes them."""
        return kernel_sides(*call.mask.sides) if self.config.window else NO_SIDES

    def _of_16_bits(
        self, call: CacheCall, tensors: CacheTensors, plan: Tensor, scores: Scores
    ) -> tuple[Any, ...]:
        """Arguments of the kernel between the counter of tiles and the number of CTAs."""
        shape = call.shape
        changes = scores.for_kernel(shape.batch, shape.heads)
        of_plan = plan, shape.batch + 1
        return call.softmax_scale, *self.sides_of(call), *of_plan, *self._pages(call, tensors), *changes

    def _of_codes(
        self, call: CacheCall, tensors: CacheTensors, plan: Tensor, scores: Scores
    ) -> tuple[Any, ...]:
        """The same."""
        shape, of_plan = call.shape, (plan, call.shape.batch + 1)
        groups = shape.heads // (self.config.group * shape.kv_heads)
        descales = tensors.q_descale, tensors.k_descale, tensors.v_descale
        scales = scales_of_heads(descales, (shape.batch, shape.kv_heads, groups), shape.device)
        sides, changes = self.sides_of(call), changes_for_fp8(scores)
        if self.config.page_box:
            return *scales, call.softmax_scale, *sides, *of_plan, *self._pages(call, tensors), *changes
        blocks = ONE_PER_SEQUENCE, ONE_PER_SEQUENCE
        changes = changes if self.config.softcap or self.config.sinks else ()
        return *scales, *blocks, call.softmax_scale, *sides, *of_plan, *changes


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_tiles(call: CacheCall) -> CacheTilesLauncher:
    """What serves a call that ``why_not_tiles`` has nothing against; compiles or loads its kernels the first time.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    device, few = call.shape.device, tiles_of(call)
    problem = problem_of_tiles(call, few)
    repairs = repair_for(call.shape.caches[0]), repair_for(call.shape.caches[1])
    if isinstance(problem, Fp8AttentionProblem):
        found = find_packed_fp8(problem, device, "hopper", call.sm_margin)
        assert isinstance(found, PackedFp8Launcher)
        config: ForwardConfig = found.config
        kernel, num_ctas = found.kernel, found.num_ctas
    else:
        selected = find_config(problem, device, "hopper")
        assert isinstance(selected, ForwardConfig)
        config, num_ctas = selected, count_ctas(index_of(device), call.sm_margin) * selected.ctas_per_sm
        kernel = compile_cache.get_forward(config)
    combine = find_combine(config, few.splits)
    planner = find_parts_planner(config, num_ctas, few.splits, call.mask)
    return CacheTilesLauncher(
        index_of(device), config, kernel, planner, num_ctas, few.splits, combine, repairs
    )
