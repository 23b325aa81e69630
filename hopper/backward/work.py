"""The key tiles of a launch of the backward kernel, and the query tiles that each of them visits."""

from dataclasses import dataclass, replace

from cutlass import Boolean, Int32, const_expr
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import pin
from cute_kernels.integers import ceil_div
from cute_kernels.invariant import LoopInvariant
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.query_range import ListedQueries, QueryRange, Visit
from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.tile_scheduler import (
    MAILBOX_STAGES,
    TailedTileOrder,
    TileOrder,
    TileScheduler,
    TurnedTileOrder,
)
from cute_kernels.visible import first_query, queries_end
from cute_kernels.window import Window
from hopper import mail
from hopper.backward.config import BackwardConfig
from hopper.backward.exchange import state_of
from hopper.backward.parts import QueryHeads
from hopper.config import WARPGROUP_ROWS


@dataclass(frozen=True)
class BackwardWork(LoopInvariant):
    """Who hands out the ``num_tiles`` key tiles of a launch, in which order, and what they visit, of ``m_end`` query
    tiles a head. These two could be computed here, but from the launch they need no register.

    Where dQ is summed in a fixed order, a key tile waits at each query tile for some others. It waits for those alone
    that were claimed before it, so there is always one that waits for none. Without a mask they come one behind the
    other, since CTAs that have once waited stay apart. Under a causal mask, or in a window with a right side, each
    starts at its diagonal, and the last key tile is the first at its queries: so that one is claimed first. Key tiles
    that are claimed one behind the other begin almost together, and most would wait for the one before: so heads have
    theirs in turn (``BackwardConfig.has_sections``).

    ``lists`` is empty, or has the int32 tensor (batch, heads, key tiles, 1 + query tiles, 2) from which
    ``ListedQueries`` are read. Where heads are divided each part has key tiles of its own, and ``head_kv`` counts
    parts.
    """

    config: BackwardConfig
    window: Window
    scheduler: TileScheduler
    order: TileOrder | TailedTileOrder | TurnedTileOrder | PackedTileOrder
    num_tiles: Int32
    m_end: Int32
    seqlens: DenseSeqlens | PackedSeqlens
    query_heads: QueryHeads
    lists: tuple = ()

    @property
    def queries(self) -> QueryRange:
        c = self.config
        return QueryRange(c.tile_m, c.tile_n, self.window, c.least_blocks, c.stores_first)

    def coordinates(self, tile: Int32) -> tuple[Int32, Int32, Int32]:
        """(n_block, head_kv, batch) of a tile number."""
        n_block, head_kv, batch = self.order.coordinates(tile)
        if const_expr(self.config.ordered and self.queries.last_keys_first != self.config.has_sections):
            n_block = self._num_n_blocks(batch) - 1 - n_block
        return n_block, head_kv, batch

    mail_words = 1
    """int32 of a message to the consumers."""

    @property
    def end(self) -> Int32:
        """What is below it is a tile to the consumers."""
        return self.num_tiles

    @property
    def tiles_to_load(self) -> Int32:
        """The same to the producer warp."""
        return self.num_tiles

    def tell(self, place: tuple[Int32, Int32, Int32], sent: Int32) -> None:
        """Producer warp: where the tile lies that it is about to load; ``sent`` came before."""

    def state_of_keys(self, kept: PipelineState, sent: Int32) -> PipelineState:
        """Of the pipeline of K and V, ``kept`` or worked out, for the tile that the producer warp is about to load."""
        return kept

    def claim(self, mail_state: PipelineState) -> Int32:
        """Producer warp: the next tile."""
        return self.scheduler.claim(mail_state)

    def finish(self, sent: Int32) -> None:
        """Producer warp, when there are no more tiles."""
        self.scheduler.finish()

    def first(self) -> Int32:
        """Consumer warp: the first tile, unless all are claimed."""
        return self.scheduler.first()

    def place(self, tile: Int32, visited: Int32) -> tuple[Int32, Int32, Int32]:
        """Consumer warp: where the tile lies that it was told of after ``visited`` others."""
        return self.coordinates(tile)

    def next(self, visited: Int32, mails_before: int) -> Int32:
        """Consumer warp: the tile after ``visited`` others and one more."""
        return self.scheduler.receive(state_of(MAILBOX_STAGES, visited + mails_before))

    def visit(self, n_block: Int32, batch: Int32) -> Visit:
        """That of all heads; without lists."""
        queries, seqlens = self.queries, self.seqlens.of(batch)
        begin, unmasked = queries.begin(n_block, seqlens), queries.unmasked_begin(n_block, seqlens)
        if const_expr(self._ends_alike):
            return Visit(begin, unmasked, self.m_end, self.m_end)
        end = queries.end(n_block, seqlens)
        left_masked = queries.unmasked_end(n_block, seqlens) if const_expr(self.window.has_left) else end
        return Visit(begin, unmasked, left_masked, end)

    def visit_of_head(self, of_tile: Visit, place: tuple[Int32, Int32, Int32]) -> Visit:
        """What a key tile visits of a query head: ``of_tile``, or what is listed at ``place``, (batch, head,
        n_block)."""
        for lists in self.lists:
            return ListedQueries.of(lists[(*place, None, None)])
        return of_tile

    def comes_before(self, m_block: Int32, part: Int32, batch: Int32) -> Boolean:
        """Whether a query tile comes before the first query that sees the keys of a warpgroup; ``part`` counts those of
        all key tiles. Computed here and now: what is known of the keys alone would take a register throughout."""
        key = pin(part, Int32) * WARPGROUP_ROWS
        return (m_block + 1) * self.config.tile_m <= first_query(self.window, key, self.seqlens.of(batch))

    def comes_behind(self, m_block: Int32, part: Int32, batch: Int32) -> Boolean:
        """Whether it comes behind the last one."""
        last_key = pin(part, Int32) * WARPGROUP_ROWS + WARPGROUP_ROWS - 1
        return m_block * self.config.tile_m >= queries_end(self.window, last_key, self.seqlens.of(batch))

    def anew(self) -> "BackwardWork":
        """The same, of which nothing is computed before this point; for couriers, which have no registers to keep what
        is known of all tiles."""
        seqlens, window = self.seqlens, self.window
        lengths = (pin(length, Int32) for length in (seqlens.seqlen_q, seqlens.seqlen_k))
        if window.has_chunk:
            # What dividing by it takes is worked out anew, too.
            window = replace(window, chunk=pin(window.chunk, Int32))
        return replace(self, seqlens=DenseSeqlens(*lengths), window=window)

    def in_turn(self, n_block: Int32, head_kv: Int32, batch: Int32) -> Int32:
        """A key tile as ``turn`` takes it: its number, or the complement of it for a head of the tail."""
        if self.config.has_late_heads:
            return n_block ^ -self.order.in_tail(head_kv, batch)
        return n_block

    def turn(self, n_block: Int32, m_block: Int32, batch: Int32) -> Int32:
        """How many key tiles add to the query tile before this one, which is given by ``in_turn``."""
        lengths = self._num_n_blocks(batch), self.seqlens.of(batch)
        if self.config.has_late_heads:
            # There they begin with the first one, which all queries see. -1 in the tail, else 0:
            late = n_block >> 31
            n_block = n_block ^ late
            turn = self.queries.turn(n_block, m_block, *lengths)
            return turn + (turn - n_block) * late
        return self.queries.turn(n_block, m_block, *lengths)

    def first_tile(self, head_kv: Int32, batch: Int32) -> Int32:
        """The number of the first query tile of the first query head of ``head_kv``, among all heads and batches."""
        return self.query_heads.first(batch * self.order.num_heads + head_kv) * self.m_end

    @property
    def _ends_alike(self) -> bool:
        """Whether every key tile visits the last query tile."""
        return not self.window.has_left

    def _num_n_blocks(self, batch: Int32) -> Int32:
        return self.order.num_m_blocks


class PackedBackwardWork(BackwardWork):
    """The same of packed sequences, by a plan of key tiles. ``m_end`` are the query tiles of a head, all sequences'."""

    def anew(self) -> "BackwardWork":
        """What it knows of a sequence is read from memory each time."""
        return self

    def turn(self, n_block: Int32, m_block: Int32, batch: Int32) -> Int32:
        """Pinned, or else what is known of the key tile alone is held in one more register."""
        return super().turn(pin(n_block, Int32), m_block, batch)

    def first_tile(self, head_kv: Int32, batch: Int32) -> Int32:
        before = self.seqlens.of(batch).first_query_tile(self.config.tile_m)
        return self.query_heads.first(head_kv) * self.m_end + before

    @property
    def _ends_alike(self) -> bool:
        return False

    def _num_n_blocks(self, batch: Int32) -> Int32:
        return ceil_div(self.seqlens.of(batch).seqlen_k, self.config.tile_n)


class PlacedBackwardWork(PackedBackwardWork):
    """The same, where the producer tells the consumers where a key tile lies: a consumer would look it up in the plan
    between two tiles. What it takes for a tile's number is its n_block."""

    mail_words = mail.WORDS_OF_A_COPY

    @property
    def end(self) -> Int32:
        return Int32(mail.NO_TILE)

    @property
    def tiles_to_load(self) -> Int32:
        """Read anew: kept, it would take one of few registers."""
        return self.order.count(self.order.plan, self.order.num_heads)

    def tell(self, place: tuple[Int32, Int32, Int32], sent: Int32) -> None:
        mail.send(self.scheduler, (*place, Int32(0)), sent)

    def state_of_keys(self, kept: PipelineState, sent: Int32) -> PipelineState:
        return state_of(1, sent, is_producer=True)

    def claim(self, mail_state: PipelineState) -> Int32:
        return self.scheduler.claim_alone()

    def finish(self, sent: Int32) -> None:
        mail.send_end(self.scheduler, self.mail_words, sent)
        self.scheduler.finish()

    def first(self) -> Int32:
        return self._await(Int32(0))

    def place(self, tile: Int32, visited: Int32) -> tuple[Int32, Int32, Int32]:
        n_block, head_kv, batch, _ = mail.read(
            self.scheduler, self.mail_words, state_of(MAILBOX_STAGES, visited)
        )
        return n_block, head_kv, batch

    def next(self, visited: Int32, mails_before: int) -> Int32:
        return self._await(visited + 1)

    def _await(self, visited: Int32) -> Int32:
        return mail.await_first_word(self.scheduler, self.mail_words, state_of(MAILBOX_STAGES, visited))
