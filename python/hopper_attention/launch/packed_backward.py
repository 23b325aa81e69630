"""Runs a backward kernel on packed sequences: a plan of their key tiles, and the three kernels that go by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.backward.step import CLEARING_WORDS, SCHEDULER_WORDS, BackwardStep
from cute_kernels.plan.config import check_packed_size, plan_entries
from hopper.backward.config import BackwardConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel, kept_argument
from hopper_attention.backward_rules import KernelConfig
from hopper_attention.device_memory import make_apart
from hopper_attention.launch import gradient_launchers, gradient_memory
from hopper_attention.launch.base import REMEMBERED_CALLS, Launcher, count_ctas, index_of
from hopper_attention.launch.planners import OF_KEYS, Planner, find_planner
from hopper_attention.layout import make_packed_addressable
from hopper_attention.masks import kernel_sides
from hopper_attention.scores import NO_SCORES, Scores


@dataclass(frozen=True)
class PackedBackwardLauncher(Launcher):
    """The three kernels of a backward pass: one before and one after that of ``config``.

    ``grid`` has the CTAs of a persistent grid, or nothing. ``head_parts`` are those of a config that ``divides_heads``.
    """

    config: KernelConfig
    planner: Planner
    prepare: Kernel
    kernel: Kernel
    finish: Kernel
    grid: tuple[int, ...]
    head_parts: int = 1

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
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
        scores: Scores = NO_SCORES,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        if self.device_index != torch.cuda.current_device():
            bounds, window = (max_seqlen_q, max_seqlen_k), (window_left, window_right, attention_chunk)
            tensors = dout, dlse, q, k, v, out, lse
            dq, dk, dv = self.call_there(*tensors, *lengths, *bounds, softmax_scale, *window, scores=scores)
            return dq, dk, dv
        c, totals = self.config, (q.shape[0], k.shape[0])
        sequences = cu_seqlens_q.shape[0]
        check_packed_size("backward kernel", q.shape[1], sequences - 1, totals, c.tile_m)
        pieces = self.pieces(q.shape, k.shape, sequences - 1)
        work = device_memory.work_memory(q.device, self.device_index, pieces)
        dq, dk, dv = gradient_memory.empty_gradients(q, k, v)
        if seqused_k is not None:
            # The kernel writes the keys of sequences, and those behind the last one.
            dk.zero_()
            dv.zero_()
        dout, out, q, k, v = map(make_packed_addressable, (dout, out, q, k, v))
        plan = self.planner(*lengths, totals, c.tile_n, OF_KEYS)
        dlse_rows = no_rows(lse.shape[0], lse.device) if dlse is None else dlse.contiguous()
        # The last piece, which ``prepare`` makes zero.
        cleared = work.arguments[-1] if c.clears_ahead else None
        self.prepare(out, dout, lse.contiguous(), dlse_rows, *work.arguments[:3], plan, sequences, cleared)
        counter = cleared if c.clears_ahead else gradient_memory.backward_counter(c, work.tensors[2])
        given = (window_left, window_right, attention_chunk) if c.window else ()
        sides = kernel_sides(*given)
        options = gradient_launchers.kernel_options(c, sides, (plan, sequences), scores, q)
        first = () if isinstance(c, BackwardConfig) else (plan, sequences)
        left, of_finish = (dk, dv), ()
        if c.divides_heads:
            left, of_finish = work.arguments[3:5], (*work.arguments[3:5], dk, dv)
        memory = *work.arguments[:3], *left, counter
        self.kernel(q, k, v, dout, *memory, *first, softmax_scale, *options, *self.grid)
        self.finish(work.arguments[2], dq, *of_finish, plan, sequences, softmax_scale)
        return dq, dk, dv

    def pieces(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...], batch: int) -> device_memory.Pieces:
        """The work memory of a pass of ``batch`` sequences in tensors of these shapes."""
        c, (total_q, heads, _), (total_k, kv_heads, _) = self.config, q_shape, k_shape
        left: tuple[int, ...] = ()
        if isinstance(c, BackwardConfig) and c.divides_heads:
            tiles = plan_entries(total_k, batch, c.tile_n)
            left = kv_heads * self.head_parts, tiles, c.dq_parts, c.dk_words
        tiles = plan_entries(total_q, batch, self.dq_tile.tile_m)
        return packed_work_pieces(self.dq_tile, heads, tiles, c.clears_ahead, left)

    @cached_property
    def dq_tile(self) -> gradient_memory.DqTile:
        """That of ``config``, as ``GradientLauncher.dq_tile``."""
        return gradient_memory.DqTile(self.config.tile_m, self.config.dq_parts, self.config.dq_words)


@lru_cache(maxsize=REMEMBERED_CALLS)
def no_rows(heads: int, device: torch.device) -> Any:
    """float32 (heads, 0), as an argument that says that the LSE has no gradient. It has no memory."""
    return kept_argument(make_apart(lambda: torch.empty(heads, 0, dtype=torch.float32, device=device)))


@lru_cache(maxsize=REMEMBERED_CALLS)
def packed_work_pieces(
    tile: gradient_memory.DqTile,
    heads: int,
    tiles: int,
    has_counts: bool = False,
    left: tuple[int, ...] = (),
) -> device_memory.Pieces:
    """LSE in base 2, delta and the sums of dQ; dK and dV of this shape that are ``left`` to be added up, if there are
    some; and if the kernel clears sums itself its counter, with a count for each tile."""
    rows = device_memory.Piece((heads, tiles * tile.tile_m))
    pieces = rows, rows, device_memory.Piece((heads, tiles, tile.dq_parts, tile.dq_words))
    of_keys = (device_memory.Piece(left),) * 2 if left else ()
    words = SCHEDULER_WORDS + CLEARING_WORDS + heads * tiles
    counts = (device_memory.Piece((words,), torch.int32),) if has_counts else ()
    return *pieces, *of_keys, *counts


def make_packed_backward_launcher(
    config: KernelConfig, device: torch.device, head_parts: int = 1
) -> PackedBackwardLauncher:
    """The launcher of the kernels of ``config``, which are compiled or loaded."""
    index = index_of(device)
    prepare, finish = (BackwardStep(step, config) for step in ("prepare", "finish"))
    before, between, after = (compile_cache.get_backward(part) for part in (prepare, config, finish))
    grid = (count_ctas(index),) if config.is_persistent else ()
    kernels = before, between, after
    return PackedBackwardLauncher(index, config, find_planner(config), *kernels, grid, head_parts)
