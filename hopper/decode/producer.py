"""The producer warps of the decode kernel: bring K or V of the key blocks of their CTA, box by box."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from hopper.decode.config import WARP_THREADS, DecodeConfig
from hopper.decode.operands import RawKeys, Work

EVICT_FIRST = 0x12F0000000000000
"""How L2 keeps what TMA loads: what ``createpolicy.fractional.L2::evict_first`` of PTX makes."""


class Visit(NamedTuple):
    """The blocks that a CTA visits of a tile that counts as ``units``: ``first`` to ``last``, of one K/V head. Key 0 of
    the sequence is ``first_row`` of its cache, and no query sees one before ``first_seen``."""

    sequence: Int32
    seqlens: SeqlenInfo
    head: Int32
    first: Int32
    last: Int32
    units: Any
    first_row: Any
    first_seen: Any


class Guess(NamedTuple):
    """The block with which a CTA may begin: its K/V head, and the page and the row of this lane's box."""

    head: Int32
    page: Int32
    row: Int32


Begin = tuple[Int32, Int32, Int32, Int32]
"""What ``Work.first_tile`` finds."""


@dataclass(frozen=True)
class Producer(LoopInvariant):
    """Loads K, or V, of every block that this CTA visits, the last of a tile first.

    ``table`` has int32 (batch, pages), the page of each ``page_size`` keys, or nothing where sequence b has page b. Its
    entries are looked up by a lane for each box, of as many blocks at once as there are lanes for, while those of the
    blocks before are used. Nothing is done with a number before that: who did so would wait for its load, between two
    loads of keys.
    """

    config: DecodeConfig
    work: Work
    keys: RawKeys
    table: tuple[cute.Tensor, ...]
    page_size: Int32
    lane: Int32

    @property
    def at_once(self) -> int:
        """Blocks whose page numbers are looked up together."""
        return WARP_THREADS // self.config.boxes

    @cute.jit
    def guess(self, begin: Begin) -> Guess:
        """The block with which this CTA begins, by ``work``, by where that ``begin``s and by ``table``, all as they are
        ``Unsettled``. Whatever they say, it lies in the cache; of a CTA without blocks it is the row behind the last,
        where TMA finds zeros."""
        return self._first(begin)[0]

    @cute.jit
    def ask(self, guess: Guess):
        """Load the block of a guess to the first stage. ``keys.ahead`` says when it has come."""
        for ahead in self.keys.ahead:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
            ahead.producer_acquire(state)
            self._fetch(guess, ahead.producer_get_barrier(state), state.index)

    @cute.jit
    def settle(self, guess: Guess, begin: Begin) -> Boolean:
        """Whether the block that was asked for is the one with which the CTA begins. If not, it has come when this
        ends, so that its stage is free."""
        found, has_blocks = self._first(begin)
        is_same = found.head == guess.head and found.page == guess.page and found.row == guess.row
        is_right = cute.arch.vote_all_sync(is_same) and has_blocks
        if not is_right:
            self.keys.wait_ahead()
        return is_right

    @cute.jit
    def run(self, begin: Begin | tuple[()] = (), guesses: tuple[Guess, ...] = ()):
        """All of this CTA's piece of the row of blocks, the last of a tile first, from ``begin`` on, if that was found
        before; ``guesses`` is empty, or has what was asked for."""
        work = self.work
        stages = self.config.raw_stages or self.config.stages
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        is_there = tuple(self.settle(guess, begin) for guess in guesses)
        sequence, tile, start, end = work.begin(begin, self.lane)
        while start < end:
            visit = self._visit(sequence, tile, start)
            block, first_row, keys = visit.last, visit.first_row, visit.seqlens.seqlen_k
            number = self._look_up(visit.sequence, block, first_row)
            while visit.first <= block:
                next_number = self._look_up(visit.sequence, block - self.at_once, first_row)
                count = minimum(block + 1 - visit.first, self.at_once) if self.at_once > 1 else 1
                for i in cutlass.range(count, unroll=1):
                    page, row = self._page(number, i), self._row(block - i, first_row, keys)
                    self._bring((visit.head, page, row), state, is_there)
                    self._load_scales(
                        block - i, (visit.first_seen, keys), visit.head, (self.lane, page, row), state
                    )
                    state.advance()
                block -= count
                number = next_number
            start += visit.units
            sequence, tile = work.batch.following(sequence, tile, work.batch.tiles(visit.seqlens))

    def _visit(self, sequence: Int32, tile: Int32, start: Int32) -> Visit:
        """Of a tile whose blocks begin at ``start``."""
        work = self.work
        seqlens = work.batch.seqlens(sequence)
        blocks = work.batch.blocks(seqlens)
        parts = work.parts(start, blocks.count)
        first = blocks.begin + parts.begin(work.cta)
        last = blocks.begin + parts.begin(work.cta + 1) - 1
        head = work.heads.head(divide(tile, work.batch.row_tiles(seqlens)))
        first_row = work.batch.first_row(sequence)
        return Visit(sequence, seqlens, head, first, last, blocks.units, first_row, blocks.first_seen)

    @cute.jit
    def _first(self, begin: Begin) -> tuple[Guess, Boolean]:
        """The block with which this CTA begins, and whether it has any."""
        sequence, tile, start, end = begin
        sequence = minimum(sequence, self.work.batch.batch - 1)
        visit = self._visit(sequence, tile, start)
        has_blocks = visit.first <= visit.last and start < end
        page = self._page(self._look_up(sequence, visit.last, visit.first_row), 0)
        row = self._row(visit.last, visit.first_row, visit.seqlens.seqlen_k)
        return Guess(Int32(visit.head), Int32(page), row if has_blocks else self.page_size), has_blocks

    def _look_up(self, sequence: Int32, block: Int32, first_row: Int32) -> Int32:
        """What is said to be the page of this lane's box, of key block ``block`` or of one before."""
        c = self.config
        key = maximum(block - self.lane // c.boxes, 0) * c.tile_n + self.lane % c.boxes * c.box_rows
        for table in self.table:
            # A box without keys may lie behind the last page.
            return table[sequence, minimum(divide(first_row + key, self.page_size), table.shape[1] - 1)]
        return sequence

    def _page(self, number: Int32, i: Int32) -> Int32:
        """That of this lane's box of the ``i``-th of the blocks that were looked up."""
        boxes = self.config.boxes
        page = cute.arch.shuffle_sync(number, offset=i * boxes + minimum(self.lane, boxes - 1))
        return minimum(maximum(page, 0), self.keys.cache.shape[3] - 1)

    @cute.jit
    def _row(self, block: Int32, first_row: Int32, keys: Int32) -> Int32:
        """The row of the page with which this lane's box of a key block begins: the one behind the last, where TMA
        finds zeros, for a box that has no key."""
        c = self.config
        key = block * c.tile_n + minimum(self.lane, c.boxes - 1) * c.box_rows
        row = first_row + key
        if const_expr(len(self.table) > 0):
            row -= divide(row, self.page_size) * self.page_size
        return row if key < keys else self.page_size

    def _load_scales(
        self, block: Int32, seen: tuple, head: Int32, place: tuple, state: pipeline.PipelineState
    ):
        for scales in self.keys.scales:
            barrier = self.keys.pipe.producer_get_barrier(state)
            scales.load(block, seen, head, place, barrier, state.index)

    @cute.jit
    def _bring(
        self,
        place: tuple[Int32, Int32, Int32],
        state: pipeline.PipelineState,
        is_there: tuple[Boolean, ...],
    ):
        """A block to its stage, where the first one may be under way. ``place`` is what a ``Guess`` has."""
        if const_expr(len(is_there) == 0):
            self._load(*place, state)
        elif is_there[0] and state.count == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.keys.pipe.producer_get_barrier(state))
        else:
            self._load(*place, state)

    @cute.jit
    def _load(self, head: Int32, page: Int32, row: Int32, state: pipeline.PipelineState):
        """A block, whose boxes lie where the lanes say."""
        pipe = self.keys.pipe
        pipe.producer_acquire(state)
        self._fetch(Guess(head, page, row), pipe.producer_get_barrier(state), state.index)

    @cute.jit
    def _fetch(self, place: Guess, barrier: cute.Pointer, index: Int32):
        """A block to a stage, told to a barrier. A copy for each box in place of a loop is code that a call awaits."""
        if const_expr(self.config.is_compact):
            for i in cutlass.range(self.config.boxes, unroll=1):
                self._fetch_box(place, barrier, index, i)
        else:
            for i in cutlass.range_constexpr(self.config.boxes):
                self._fetch_box(place, barrier, index, i)

    @cute.jit
    def _fetch_box(self, place: Guess, barrier: cute.Pointer, index: Int32, i: Any):
        """Box ``i`` of a block."""
        keys = self.keys
        stage = keys.smem[None, None, index]
        box = (self.config.box_rows, keys.box_columns)
        policy = {"cache_policy": Int64(EVICT_FIRST)} if const_expr(self.config.reads_once) else {}
        of_page = keys.cache[None, None, place.head, cute.arch.shuffle_sync(place.page, offset=i)]
        source = cute.domain_offset((cute.arch.shuffle_sync(place.row, offset=i), 0), of_page)
        for part in cutlass.range_constexpr(cute.size(keys.smem, mode=[1]) // keys.box_columns):
            target, found = cpasync.tma_partition(
                keys.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(cute.local_tile(stage, box, (i, part)), 0, 2),
                cute.group_modes(cute.local_tile(source, box, (0, part)), 0, 2),
            )
            cute.copy(keys.atom, found, target, tma_bar_ptr=barrier, **policy)
