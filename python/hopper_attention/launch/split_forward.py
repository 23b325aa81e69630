"""Runs the forward kernel on tiles in parts (``hopper/forward/split.py``), and what adds the parts up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.combine.config import CombineConfig, select_combine_config
from cute_kernels.plan.config import check_packed_size
from cute_kernels.problem import VARLEN
from hopper.compile import HOPPER_ARCH
from hopper.config import ForwardConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.device_memory import Facts, Piece, Pieces
from hopper_attention.launch import at_once
from hopper_attention.launch.at_once import Given, Part, Script, Step
from hopper_attention.launch.base import (
    NO_PAGES,
    NO_PLAN,
    NO_SIDES,
    REMEMBERED_LAUNCHERS,
    Launcher,
    count_ctas,
    current_device,
    index_of,
)
from hopper_attention.launch.packed_forward import NO_CHANGES
from hopper_attention.launch.planners import Planner, find_parts_planner
from hopper_attention.layout import TMA_BYTES, make_addressable, make_packed_addressable, new_layout
from hopper_attention.lengths import Lengths
from hopper_attention.scores import NO_SCORES, Scores


@dataclass(frozen=True)
class SplitSizes:
    """Of Q and O of a call: ``rows`` are those of each of ``batch`` sequences, or of all packed ones, whose batch is
    1."""

    splits: int
    batch: int
    rows: int
    heads: int
    head_dim_v: int

    @property
    def parts(self) -> Pieces:
        """Memory for partial results, and for an LSE that is not wanted."""
        rows = self.batch, self.rows, self.heads
        return Piece((self.splits, *rows, self.head_dim_v)), Piece((self.splits, *rows)), Piece(rows)

    @property
    def out(self) -> Facts:
        """O as what adds parts up sees it, in the dtype of a piece."""
        return Piece((self.batch, self.rows, self.heads, self.head_dim_v)).facts

    @property
    def lse(self) -> Facts:
        """The same of LSE, which is (batch, heads, rows) in memory."""
        strides = self.heads * self.rows, 1, self.rows
        return (self.batch, self.rows, self.heads), strides, torch.float32


@dataclass(frozen=True)
class SplitLauncher(Launcher):
    """Both kernels; tiles are in ``splits`` parts, those of packed sequences in up to so many."""

    config: ForwardConfig
    kernel: Kernel
    combine: Kernel
    splits: int
    head_dim_v: int
    default_scale: float
    num_ctas: int

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        wants_lse: bool,
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        """A ``forward.Launch`` without a window."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(q, k, v, softmax_scale, wants_lse, scores=scores)
        q, k, v = make_addressable(q), make_addressable(k), make_addressable(v)
        batch, seqlen_q, heads, _ = q.shape
        sizes = SplitSizes(self.splits, batch, seqlen_q, heads, self.head_dim_v)
        out = device_memory.empty_on_gpu(*sizes.out[:2], q.dtype)
        lse = device_memory.empty_on_gpu(
            *new_layout((batch, heads, seqlen_q if wants_lse else 0)), torch.float32
        )
        scale = self.default_scale if softmax_scale is None else softmax_scale
        self.launch((q, k, v), out, lse, sizes, scale, NO_PLAN, scores)
        return out, lse

    def launch(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        sizes: SplitSizes,
        scale: float,
        plan: tuple[Any, Any],
        scores: Scores,
    ) -> None:
        """Queue the kernels on tensors that they can address, on the current GPU; ``lse`` without rows is not
        wanted."""
        parts, part_lse, no_lse = device_memory.stream_memory(self.device_index, sizes.parts).tensors
        counter = device_memory.tile_counter(self.device_index)
        changes = NO_CHANGES if scores is NO_SCORES else scores.for_kernel(sizes.batch, sizes.heads)
        options = *NO_SIDES, *plan, *NO_PAGES, *changes, self.num_ctas
        self.kernel(*tensors, parts, part_lse, counter, scale, *options)
        merged = lse.as_strided(*sizes.lse[:2]) if lse.numel() else no_lse
        self.combine(parts, part_lse, out.view(sizes.out[0]), merged)


@dataclass(frozen=True)
class PackedSplitLauncher:
    """A ``varlen.VarlenLaunch`` without a window, of sequences whose queries are all used."""

    launcher: SplitLauncher
    planner: Planner

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
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor]:
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        launcher = self.launcher
        if launcher.device_index != torch.cuda.current_device():
            longest, window = (max_seqlen_q, max_seqlen_k), (window_left, window_right, attention_chunk)
            with torch.cuda.device(launcher.device_index):
                return self(q, k, v, *lengths, *longest, softmax_scale, *window, wants_lse, scores)
        (total_q, heads, _), tile = q.shape, launcher.config.tile_queries
        batch, totals = cu_seqlens_q.shape[0] - 1, (total_q, k.shape[0])
        check_packed_size("kernel", heads, batch, totals, tile, launcher.splits)
        sizes = SplitSizes(launcher.splits, 1, total_q, heads, launcher.head_dim_v)
        out = device_memory.empty_on_gpu(*new_layout((total_q, heads, launcher.head_dim_v)), q.dtype)
        lse = device_memory.empty_on_gpu(*new_layout((heads, total_q if wants_lse else 0)), torch.float32)
        q, k, v = make_packed_addressable(q), make_packed_addressable(k), make_packed_addressable(v)
        of_heads = heads // launcher.config.group
        plan = self.planner(*lengths, totals, tile, heads=of_heads), batch + 1
        launcher.launch((q, k, v), out, lse, sizes, softmax_scale, plan, scores)
        return out, lse


def combine_config_of(config: ForwardConfig, splits: int) -> CombineConfig:
    """Of what adds up so many parts of results of the kernel of ``config``. Packed sequences may be in fewer."""
    return select_combine_config(config.out_dtype, splits, HOPPER_ARCH, has_ends=config.layout == VARLEN)


def find_combine(config: ForwardConfig, splits: int) -> tuple[Kernel, ...]:
    """What adds up so many parts of results of the kernel of ``config``; none of one."""
    return () if splits == 1 else (compile_cache.get_serving(combine_config_of(config, splits)),)


def merge_in_script(
    combine: tuple[Kernel, ...],
    sizes: SplitSizes,
    results: tuple[Given, Given],
    dtype: torch.dtype,
    wants_lse: bool,
    first: int,
) -> tuple[tuple[Given, Given], list[Step], Pieces]:
    """What attention fills in a script whose ``results`` are out, of ``dtype``, and lse; the launches behind it; and
    the memory that these two need, from argument ``first`` on. ``combine`` is as ``find_combine`` gives it."""
    if not combine:
        return results, [], ()
    out, lse = results
    parts, part_lse, no_lse = (Given(first + i) for i in range(3))
    whole = Part(out.number, 0, (*sizes.out[:2], dtype))
    merged = Part((lse if wants_lse else no_lse).number, 0, sizes.lse)
    steps = [Step(kernel, (parts, part_lse, whole, merged)) for kernel in combine]
    return (parts, part_lse), steps, sizes.parts


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_split(
    config: ForwardConfig, device: torch.device, head_dims: tuple[int, int], splits: int, sm_margin: int
) -> SplitLauncher:
    """The launcher of the kernel of ``config``, which is compiled or loaded, and of what adds ``splits`` parts up;
    ``head_dims`` are those of a call.

    Raises:
        ValueError: ``sm_margin`` leaves no multiprocessor.
    """
    index, (head_dim, head_dim_v) = index_of(device), head_dims
    num_ctas = count_ctas(index, sm_margin) * config.ctas_per_sm
    (combine,) = find_combine(config, splits)
    kernel = compile_cache.get_forward(config)
    return SplitLauncher(index, config, kernel, combine, splits, head_dim_v, head_dim**-0.5, num_ctas)


def find_packed_split(
    config: ForwardConfig, device: torch.device, head_dims: tuple[int, int], splits: int, sm_margin: int
) -> PackedSplitLauncher:
    """The same of packed sequences."""
    launcher = find_split(config, device, head_dims, splits, sm_margin)
    return PackedSplitLauncher(launcher, find_parts_planner(config, launcher.num_ctas, splits))


@dataclass(frozen=True, slots=True)
class ReadySplit:
    """A ``forward.Launch`` of tensors of the same sizes and strides in every call, but for the number of keys, whose
    scores nothing changes: ``script`` launches both kernels. ``launcher`` serves where it cannot."""

    launcher: SplitLauncher
    out: Facts
    lse: Facts
    parts: Pieces
    script: Script

    @classmethod
    def of(cls, launcher: SplitLauncher, q: Tensor, k: Tensor, v: Tensor) -> ReadySplit | None:
        """That of calls with tensors like these; None where one is to be copied."""
        if any(make_addressable(x) is not x for x in (q, k, v)):
            return None
        batch, seqlen_q, heads, _ = q.shape
        sizes = SplitSizes(launcher.splits, batch, seqlen_q, heads, launcher.head_dim_v)
        of_q, of_k, of_v, out, lse, parts, part_lse, counter, scale = map(Given, range(9))
        options = *NO_SIDES, *NO_PLAN, *NO_PAGES, *NO_CHANGES, launcher.num_ctas
        steps = [
            Step(launcher.kernel, (of_q, of_k, of_v, parts, part_lse, counter, scale, *options)),
            Step(launcher.combine, (parts, part_lse, out, Part(lse.number, 0, sizes.lse))),
        ]
        facts = (*sizes.out[:2], q.dtype), Piece((batch, heads, seqlen_q)).facts
        return cls(launcher, *facts, sizes.parts, at_once.make_script(steps))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        index, make = self.launcher.device_index, device_memory.empty_on_gpu
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES or current_device() != index:
            return self.launcher(q, k, v, softmax_scale, wants_lse)
        out = make(*self.out)
        parts, part_lse, no_lse = device_memory.stream_memory(index, self.parts).arguments
        lse = make(*self.lse) if wants_lse else no_lse
        scale = self.launcher.default_scale if softmax_scale is None else softmax_scale
        counter = device_memory.tile_counter(index)
        self.script.run(q, k, v, out, lse, parts, part_lse, counter, scale)
        return out, lse


@dataclass(frozen=True, slots=True)
class ReadyPackedSplit:
    """The same of a ``varlen.VarlenLaunch``, whose ``script`` plans tiles before."""

    launch: PackedSplitLauncher
    out: Facts
    lse: Facts
    parts: Pieces
    script: Script

    @classmethod
    def of(
        cls, launch: PackedSplitLauncher, tensors: tuple[Tensor, Tensor, Tensor], lengths: Lengths
    ) -> ReadyPackedSplit | None:
        """That of calls with tensors like these; None where one is to be copied."""
        if lengths.seqused_q is not None or any(make_packed_addressable(x) is not x for x in tensors):
            return None
        (q, k, _), launcher = tensors, launch.launcher
        (total_q, heads, _), sequences = q.shape, lengths.cu_seqlens_q.shape[0]
        sizes, tile = (
            SplitSizes(launcher.splits, 1, total_q, heads, launcher.head_dim_v),
            launcher.config.tile_queries,
        )
        of_q, of_k, of_v, out, lse, parts, part_lse, plan, counter, scale, starts_q, starts_k, used_k = map(
            Given, range(13)
        )
        unused = device_memory.no_lengths(q.device)
        used = unused, unused if lengths.seqused_k is None else used_k
        options = *NO_SIDES, plan, sequences, *NO_PAGES, *NO_CHANGES, launcher.num_ctas
        of_out = *sizes.out[:2], q.dtype
        of_plan = launch.planner.options(tile, heads // launcher.config.group)
        steps = [
            Step(
                launch.planner.kernel,
                (starts_q, starts_k, *used, plan, total_q, k.shape[0], *of_plan),
            ),
            Step(launcher.kernel, (of_q, of_k, of_v, parts, part_lse, counter, scale, *options)),
            Step(
                launcher.combine,
                (parts, part_lse, Part(out.number, 0, of_out), Part(lse.number, 0, sizes.lse)),
            ),
        ]
        facts = (*new_layout((total_q, heads, launcher.head_dim_v)), q.dtype), Piece((heads, total_q)).facts
        pieces = *sizes.parts, launch.planner.memory(total_q, sequences - 1, tile)
        return cls(launch, *facts, pieces, at_once.make_script(steps))

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
    ) -> tuple[Tensor, Tensor]:
        index, make = self.launch.launcher.device_index, device_memory.empty_on_gpu
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES or current_device() != index:
            lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
            window = window_left, window_right, attention_chunk
            return self.launch(q, k, v, *lengths, softmax_scale, *window, wants_lse)
        out = make(*self.out)
        parts, part_lse, no_lse, plan = device_memory.stream_memory(index, self.parts).arguments
        lse = make(*self.lse) if wants_lse else no_lse
        counter, starts = device_memory.tile_counter(index), (cu_seqlens_q, cu_seqlens_k)
        self.script.run(q, k, v, out, lse, parts, part_lse, plan, counter, softmax_scale, *starts, seqused_k)
        return out, lse
