"""Strips of key tiles, for windows so narrow that dQ of a query tile comes from two key tiles at most."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.query_range import Visit
from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.tile_scheduler import TileScheduler
from cute_kernels.window import Window
from hopper.backward.batch import WrittenBatch
from hopper.backward.parts import QueryHeads
from hopper.backward.work import BackwardWork

MOST_ROUNDS = 8
"""Strips that a CTA has one after another at most, where there are fewer heads than CTAs."""


def length_of_strips(key_tiles: Any, heads: Any, ctas: Any) -> Any:
    """Key tiles of a strip: those with which the CTA that has the most is done first, of ``heads`` in all batches. A
    strip that does not begin a head costs half a key tile more."""
    best, best_cost = key_tiles, _cost(key_tiles, key_tiles, heads, ctas)
    for rounds in range(1, MOST_ROUNDS + 1):
        strips = minimum(maximum(rounds * ctas // heads, 1), key_tiles)
        length = ceil_div(key_tiles, strips)
        cost = _cost(length, key_tiles, heads, ctas)
        # 1 where it is better; as arithmetic and not as a branch.
        is_better = minimum(maximum(best_cost - cost, 0), 1)
        best, best_cost = best + is_better * (length - best), best_cost + is_better * (cost - best_cost)
    return best


def _cost(length: Any, key_tiles: Any, heads: Any, ctas: Any) -> Any:
    """Halves of key tiles of the CTA that has the most."""
    return ceil_div(ceil_div(key_tiles, length) * heads, ctas) * (2 * length + 1)


class Strip(NamedTuple):
    """Key tiles from ``first`` up to ``end`` of a head."""

    first: Any
    end: Any
    head: Any
    batch: Any

    @property
    def first_visited(self) -> Any:
        """The key tile before, of which the strip needs its part of dQ; or its own first one."""
        return self.first - minimum(self.first, 1)


@dataclass(frozen=True)
class StripOrder(LoopInvariant):
    """Strips of ``length`` key tiles of all heads, one behind the other."""

    num_m_blocks: Any
    num_heads: Any
    num_batches: Any
    length: Any

    @property
    def strips(self) -> Any:
        """Of a head."""
        return ceil_div(self.num_m_blocks, self.length)

    def strip(self, tile: Any) -> Strip:
        """That of a number below ``strips`` times all heads."""
        head_batch, strips = tile // self.strips, self.strips
        first = (tile - head_batch * strips) * self.length
        end = minimum(first + self.length, self.num_m_blocks)
        return Strip(first, end, head_batch % self.num_heads, head_batch // self.num_heads)


@dataclass(frozen=True)
class StripVisit(Visit):
    """The query tiles of a key tile: dQ of those before ``carried_end`` has a part from the key tile before, and of
    those before ``final_end`` it gets none from the next. The first half of its keys is seen up to ``first_end``, the
    second from ``second_begin`` on."""

    carried_end: Any
    final_end: Any
    first_end: Any
    second_begin: Any


class StripWork(BackwardWork):
    """Who hands out strips, and what the key tiles of one visit."""

    def strip(self, tile: Int32) -> Strip:
        return self.order.strip(tile)

    def visit_in(self, strip: Strip, n_block: Int32) -> StripVisit:
        """Of the key tile before the strip those query tiles alone that its first one visits too."""
        queries, seqlens = self.queries, self.seqlens.of(strip.batch)
        begin = queries.begin(maximum(n_block, strip.first), seqlens)
        end, next_begin = queries.end(n_block, seqlens), queries.begin(n_block + 1, seqlens)
        is_first = 1 - minimum(n_block - strip.first_visited, 1)
        is_last = 1 - minimum(self.order.num_m_blocks - 1 - n_block, 1)
        carried_end = (1 - is_first) * queries.end(n_block - 1, seqlens)
        final_end = next_begin + is_last * (end - next_begin)
        halves = replace(queries, tile_n=queries.tile_n // 2)
        first_end = maximum(minimum(halves.end(2 * n_block, seqlens), end), begin)
        second_begin = minimum(maximum(halves.begin(2 * n_block + 1, seqlens), begin), first_end)
        return StripVisit(begin, end, end, end, carried_end, final_end, first_end, second_begin)


@dataclass(frozen=True)
class StripBatch(WrittenBatch):
    """The same in strips of key tiles."""

    def sizes(
        self, mQ: cute.Tensor, mK: cute.Tensor, mdQ: cute.Tensor, window: Window, num_ctas: Int32
    ) -> tuple[tuple, tuple]:
        """Of the views of Q and K: what a ``StripOrder`` takes, and (strips of all heads, query tiles of a head)."""
        c = self.config
        num_n_blocks, heads, batches = cute.ceil_div(mK.shape[0], c.tile_n), mK.shape[2], mK.shape[3]
        length = length_of_strips(num_n_blocks, heads * batches, num_ctas)
        tiles = num_n_blocks, heads, batches, length
        totals = StripOrder(*tiles).strips * heads * batches, cute.ceil_div(mQ.shape[0], c.tile_m)
        return tiles, totals

    def work(
        self,
        window: Window,
        scheduler: TileScheduler,
        lengths: tuple,
        heads_per_kv_head: Int32,
        sizes: tuple[tuple, tuple],
    ) -> StripWork:
        tiles, totals = sizes
        seqlens = DenseSeqlens(*lengths)
        return StripWork(
            self.config,
            window,
            scheduler,
            StripOrder(*tiles),
            *totals,
            seqlens,
            QueryHeads(heads_per_kv_head),
        )
