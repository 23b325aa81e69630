"""Plans the tiles of packed sequences, on the GPU (``cute_kernels/plan``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.plan.config import PlanConfig, plan_words
from cute_kernels.problem import MAX_SEQLEN
from hopper.compile import HOPPER_ARCH
from hopper.config import ForwardConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.device_memory import Piece
from hopper_attention.masks import NO_MASK, MaskSpec

OF_QUERIES, OF_KEYS = 0, 1
"""Whose rows the tiles of a plan are."""


@dataclass(frozen=True)
class Planner:
    """Makes the plans of a GPU."""

    kernel: Kernel

    def __call__(
        self,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        totals: tuple[int, int],
        tile: int,
        rows: int = OF_QUERIES,
        heads: int = 1,
    ) -> Tensor:
        """A plan for tiles of ``tile`` rows, of Q or of K, each for so many ``heads``; ``totals`` are rows of Q and of
        K."""
        memory = self.memory(totals[rows], cu_seqlens_q.shape[0] - 1, tile)
        plan = device_memory.empty_on_gpu(*memory.facts)
        used_q = device_memory.no_lengths(plan.device) if seqused_q is None else seqused_q
        used_k = device_memory.no_lengths(plan.device) if seqused_k is None else seqused_k
        options = self.options(tile, heads, rows)
        self.kernel(cu_seqlens_q, cu_seqlens_k, used_q, used_k, plan, *totals, *options)
        return plan

    def memory(self, total: int, batch: int, tile: int) -> Piece:
        """Of the plan of so many sequences; ``total`` are their rows, of which ``tile`` are a tile."""
        return Piece((plan_words(total, batch, tile),), torch.int32)

    def options(self, tile: int, heads: int, rows: int = OF_QUERIES) -> tuple[int, ...]:
        """What the kernel takes behind the rows of Q and of K."""
        return tile, rows


@dataclass(frozen=True)
class PartsPlanner(Planner):
    """``Planner`` of query tiles whose keys are in up to ``most`` parts, of blocks of ``tile_n`` keys, of which a tile
    visits ``seen`` at most; ``slots`` tiles run at a time."""

    tile_n: int
    seen: int
    slots: int
    most: int

    def memory(self, total: int, batch: int, tile: int) -> Piece:
        return Piece((plan_words(total, batch, tile, self.most),), torch.int32)

    def options(self, tile: int, heads: int, rows: int = OF_QUERIES) -> tuple[int, ...]:
        return tile, self.tile_n, self.seen, heads, self.slots, self.most


def find_planner(config: object) -> Planner:
    """That of a GPU for which ``config`` is."""
    return Planner(compile_cache.get_forward(PlanConfig(getattr(config, "arch", HOPPER_ARCH))))


def find_parts_planner(
    config: ForwardConfig, num_ctas: int, splits: int, mask: MaskSpec = NO_MASK
) -> Planner:
    """That of tiles in up to so many parts, of a kernel with so many CTAs and of queries that see what ``mask``
    leaves. One part is none."""
    if splits == 1:
        return find_planner(config)
    kernel = compile_cache.get_forward(PlanConfig(HOPPER_ARCH, in_parts=True))
    # The keys of a tile begin and end within a block, and its queries may be in two chunks.
    seen = mask.most_keys(MAX_SEQLEN) + config.tile_queries + mask.attention_chunk
    return PartsPlanner(kernel, config.tile_n, seen // config.tile_n + 2, num_ctas, splits)
