"""Order in which a persistent grid works through the output tiles, and how its CTAs share them out.

Tiles are numbered so that neighbours share K and V in L2. Without a causal mask all tiles cost the same and run
m_block fastest. With one, tiles of the most keys come first (longest processing time first), in sections of a few
heads, the last of which has more: its short tiles fill up what the CTAs leave at the end. The shortest tiles of all
heads may come behind all sections. A CTA starts with the tile of its own number and then claims the next free one from
a counter in global memory, so that a slow CTA simply gets fewer tiles.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineState

from cute_kernels.integers import ceil_div, maximum, minimum
from cute_kernels.invariant import LoopInvariant

SECTION_BYTES = 2**20
"""Of K and V of the heads that a causal grid works on together, but for one head at least, in all sections but the
last. So the tiles of a head follow each other and find its keys in L2, and at any time there are long tiles and short
ones, whose begins and ends, when memory is busy, do not come together (``forward_sections.json``)."""

TILES_OF_LAST = 2
"""That the last section has for each CTA, or more: then its short tiles fill up what the long ones leave."""

WORKERS = 132
"""CTAs that share out the tiles of a grid which has one for each of them: about as many as there are SMs."""

SHORT_BYTES = 32 * 2**20
"""Of the keys of all heads that the short tiles at the end of a grid see."""

SHORT_PART = 4
"""Of a head's query tiles under a causal mask, one in so many is short enough for the end of a grid."""

MAILBOX_STAGES = 2
CLAIMED_TILES, FINISHED_CTAS = 0, 1


class Sections(NamedTuple):
    """Heads that a causal grid works on together: ``heads`` in each of ``count`` sections, and behind these, in the
    last one, all that are left."""

    heads: Any
    count: Any

    @staticmethod
    def even(heads: Any, num_heads: Any) -> "Sections":
        """All of so many of ``num_heads``, but for the last, which may have fewer."""
        return Sections(heads, ceil_div(num_heads, heads) - 1)

    @staticmethod
    def of_keys(bytes_per_key: Any, seqlen_k: Any, kv_heads: Any, group: Any, last: Any) -> "Sections":
        """Those of a causal grid. ``kv_heads`` are the key/value heads of all batches, each of ``group`` heads, and
        ``last`` those of the last section at least."""
        # No more than there are, before anything is multiplied: tile numbers are 32 bits wide.
        each = minimum(maximum(SECTION_BYTES // bytes_per_key // seqlen_k, 1), kv_heads)
        return Sections(each * group, (kv_heads - last) // each)


def heads_of_last(num_m_blocks: Any, kv_heads: Any, group: Any, workers: Any) -> Any:
    """Key/value heads of the last section of a causal grid: those with ``TILES_OF_LAST`` for each of so many CTAs, if
    there are as many. Each has ``group`` heads of so many query tiles."""
    return minimum(ceil_div(TILES_OF_LAST * workers, num_m_blocks * group), kv_heads)


def heads_in_turn(most: Any, kv_heads: Any) -> Any:
    """Key/value heads of a section that has ``most`` at most, but one at least: sections are about as large as each
    other."""
    limit = minimum(maximum(most, 1), kv_heads)
    return ceil_div(kv_heads, ceil_div(kv_heads, limit))


def short_m_blocks(
    bytes_per_key: Any, seqlens: tuple[Any, Any], kv_heads: Any, tile_m: int, least: int = 1
) -> Any:
    """Query tiles of each head, from the first on, that a causal grid leaves for its end, where short tiles of all
    heads fill up what the last section leaves: no more than L2 holds K and V for, of all heads.

    ``seqlens`` are those of Q and K, ``kv_heads`` the key/value heads of all batches, tiles have ``tile_m`` queries.
    None of a head that has fewer than ``least`` tiles.
    """
    seqlen_q, seqlen_k = seqlens
    keys = SHORT_BYTES // bytes_per_key // kv_heads
    queries = maximum(keys - (seqlen_k - seqlen_q), 0)
    m_blocks = ceil_div(seqlen_q, tile_m)
    are_many = minimum(maximum(m_blocks - least + 1, 0), 1)
    return minimum(m_blocks // SHORT_PART, queries // tile_m) * are_many


class ShortTiles(NamedTuple):
    """Tiles that come last, longest first: the first ``m_blocks`` of each of ``heads``, those of all batches, which is
    something to divide by as in ``TileDivisors``."""

    m_blocks: Any
    heads: Any


class TileDivisors(NamedTuple):
    """What the numbers of tiles are divided by, each as something that makes its division cheap: a division by a plain
    number takes some hundred cycles, and those of a tile wait for each other.

    ``tiles`` are those of a head, or with ``longest_first`` of a section; ``section_heads`` and ``last_heads`` are the
    heads of a section and of the last one; ``heads`` are those of a batch, ``group`` those that share K and V.
    """

    tiles: Any
    section_heads: Any
    last_heads: Any
    heads: Any
    group: Any


@dataclass(frozen=True)
class TileOrder:
    """Bijection from tile number to (m_block, head, batch); plain integer arithmetic, traced or not.

    ``divisors`` is empty, or has the ``TileDivisors`` of ``make_divisors``. ``short_tiles`` is empty, or with both
    ``divisors`` and ``longest_first`` has tiles that come behind all sections, which are without them then.
    """

    num_m_blocks: Any
    num_heads: Any
    num_batches: Any
    sections: Sections
    longest_first: bool
    divisors: tuple[TileDivisors, ...] = ()
    short_tiles: tuple[ShortTiles, ...] = ()

    def __post_init__(self) -> None:
        if self.short_tiles and not self.longest_first:
            raise ValueError("short_tiles is given and longest_first is False, allowed: True")

    @property
    def num_tiles(self) -> Any:
        return self.num_m_blocks * self.num_heads * self.num_batches

    @property
    def _section_m_blocks(self) -> Any:
        """Query tiles of each head in its section."""
        for short in self.short_tiles:
            return self.num_m_blocks - short.m_blocks
        return self.num_m_blocks

    def numbers_to_divide_by(self, group: Any) -> TileDivisors:
        """As plain numbers; ``group`` heads share K and V."""
        each, count = self.sections
        last = self.num_heads * self.num_batches - count * each
        tiles = self._section_m_blocks * (each if self.longest_first else 1)
        return TileDivisors(tiles, each, last, self.num_heads, group)

    def make_divisors(self, group: Any) -> TileDivisors:
        """The same so that division is cheap; made on the host."""
        numbers = self.numbers_to_divide_by(group)
        return TileDivisors(*(cute.FastDivmodDivisorV2(Int32(number)) for number in numbers))

    def coordinates(self, tile: Any) -> tuple[Any, Any, Any]:
        """(m_block, head, batch) of a tile number below ``num_tiles``."""
        for divisors in self.divisors:
            return self._coordinates_by(divisors, tile)
        if not self.longest_first:
            head_batch = tile // self.num_m_blocks
            m_block = tile % self.num_m_blocks
        else:
            each = self.sections.heads
            section, rest, is_last = self._section_of(tile, tile // (each * self.num_m_blocks))
            heads = each + (self.num_heads * self.num_batches - (section + 1) * each) * is_last
            step = rest // heads
            m_block, head_batch = self.num_m_blocks - 1 - step, section * each + rest - step * heads
        return m_block, head_batch % self.num_heads, head_batch // self.num_heads

    def _section_of(self, tile: Any, place: Any) -> tuple[Any, Any, Any]:
        """The section of a tile, its number there, and 1 for the last section, else 0. ``place`` is its number over the
        tiles of any other."""
        each, count = self.sections
        section = minimum(place, count)
        return section, tile - section * each * self._section_m_blocks, 1 - minimum(count - section, 1)

    def _coordinates_by(self, divisors: TileDivisors, tile: Any) -> tuple[Any, Any, Any]:
        """``coordinates``. A tile is divided by the heads of a section and by those of the last one."""
        place, rest = divide_with_rest(tile, divisors.tiles)
        m_block, head_batch = rest, place
        if self.longest_first:
            section, rest, is_last = self._section_of(tile, place)
            of_any, of_last = (
                divide_with_rest(rest, by) for by in (divisors.section_heads, divisors.last_heads)
            )
            step, head = (x + (last - x) * is_last for x, last in zip(of_any, of_last, strict=True))
            m_block, head_batch = self.num_m_blocks - 1 - step, section * self.sections.heads + head
        m_block, head_batch = self._unless_short(tile, m_block, head_batch)
        batch, head = divide_with_rest(head_batch, divisors.heads)
        return m_block, head, batch

    def _unless_short(self, tile: Any, m_block: Any, head_batch: Any) -> tuple[Any, Any]:
        """These, or those of one of the tiles that come last."""
        for short in self.short_tiles:
            number = tile - self._section_m_blocks * self.num_heads * self.num_batches
            # 1 where it is one of them; as arithmetic, so that there is no branch.
            is_short = minimum(maximum(number + 1, 0), 1)
            step, head = divide_with_rest(maximum(number, 0), short.heads)
            m_block += (short.m_blocks - 1 - step - m_block) * is_short
            head_batch += (head - head_batch) * is_short
        return m_block, head_batch


@dataclass(frozen=True)
class TailedTileOrder:
    """Bijection from tile number to (n_block, head, batch), where a head's tiles get shorter towards its end.

    Heads come one behind the other, so that neighbours share what they walk over in L2, each from its longest tile on.
    Of the last ``tail_heads`` the first ``full_blocks`` tiles, which are as long as each other, come like that too, and
    then what is left of them, longest first: so no CTA begins a long tile when the others run dry.
    """

    num_m_blocks: Any
    num_heads: Any
    num_batches: Any
    tail_heads: Any
    full_blocks: Any

    @property
    def num_tiles(self) -> Any:
        return self.num_m_blocks * self.num_heads * self.num_batches

    def coordinates(self, tile: Any) -> tuple[Any, Any, Any]:
        """(n_block, head, batch) of a tile number below ``num_tiles``."""
        first_head = self.num_heads * self.num_batches - self.tail_heads
        tail = first_head * self.num_m_blocks
        late = tail + self.tail_heads * self.full_blocks
        # 1 from there on; as arithmetic, so that there is one division and no branch.
        in_tail, is_late = (minimum(maximum(tile - first + 1, 0), 1) for first in (tail, late))
        in_full = in_tail - is_late
        by = self.num_m_blocks + in_full * (self.full_blocks - self.num_m_blocks)
        by += is_late * (self.tail_heads - self.num_m_blocks)
        place = tile - in_full * tail - is_late * late
        # Where there is no full tile, or no tail, nothing is divided by it.
        quotient = place // maximum(by, 1)
        rest = place - quotient * by
        n_block = rest + is_late * (self.full_blocks + quotient - rest)
        head_batch = in_tail * first_head + quotient + is_late * (rest - quotient)
        return n_block, head_batch % self.num_heads, head_batch // self.num_heads


@dataclass(frozen=True)
class TurnedTileOrder:
    """Bijection from tile number to (n_block, head, batch), where a head's tiles get shorter towards its end and take
    turns at what they walk over.

    Heads come in sections of ``heads_per_section``, which have their last tiles one behind the other, then those before
    them: from the shortest on, each of which is the first where its walk begins. Of the last ``tail_heads`` the longest
    come first, and each waits for the one before it: so no CTA begins a long tile when others run dry.
    """

    num_m_blocks: Any
    num_heads: Any
    num_batches: Any
    heads_per_section: Any
    tail_heads: Any

    @property
    def num_tiles(self) -> Any:
        return self.num_m_blocks * self.num_heads * self.num_batches

    @property
    def _first_of_tail(self) -> Any:
        return self.num_heads * self.num_batches - self.tail_heads

    def in_tail(self, head: Any, batch: Any) -> Any:
        """1 for a head of the tail, else 0."""
        return minimum(maximum(batch * self.num_heads + head - self._first_of_tail + 1, 0), 1)

    def coordinates(self, tile: Any) -> tuple[Any, Any, Any]:
        """(n_block, head, batch) of a tile number below ``num_tiles``."""
        number = tile - self._first_of_tail * self.num_m_blocks
        # 1 in the tail; as arithmetic, so that there is one division by heads and no branch.
        is_late = minimum(maximum(number + 1, 0), 1)
        section_tiles = self.heads_per_section * self.num_m_blocks
        section = tile // section_tiles
        first_head = section * self.heads_per_section
        heads = minimum(self.heads_per_section, self._first_of_tail - first_head)
        heads += is_late * (self.tail_heads - heads)
        first_head += is_late * (self._first_of_tail - first_head)
        place = tile - section * section_tiles
        place += is_late * (number - place)
        step = place // heads
        last = self.num_m_blocks - 1 - step
        n_block = last + is_late * (step - last)
        head_batch = first_head + place - step * heads
        return n_block, head_batch % self.num_heads, head_batch // self.num_heads


def divide_with_rest(number: Any, by: Any) -> tuple[Any, Any]:
    """number // by and number % by, of a number from 0 on and a part of ``TileDivisors``."""
    quotient, rest = divmod(number, by)
    return (quotient, rest) if isinstance(by, int) else (Int32(quotient), Int32(rest))


class TileScheduler(LoopInvariant):
    """Hands tiles from the counter to the producer warp, and from it to the consumer warps.

    ``counter`` is int32 (claimed tiles, finished CTAs) in global memory, zero before and again after a launch; no
    other launch that may run at the same time may use it. ``mailbox`` holds MAILBOX_STAGES tile numbers in shared
    memory, guarded by ``pipe``: full after one arrival of the producer, empty after one of each consumer warp.
    """

    def __init__(self, counter: cute.Tensor, mailbox: cute.Tensor, pipe: PipelineAsync, lane: Int32):
        self.counter, self.mailbox, self.pipe, self.lane = counter, mailbox, pipe, lane

    @staticmethod
    def make_pipe(barriers: cute.Pointer, consumer_warps: int) -> PipelineAsync:
        return PipelineAsync.create(
            num_stages=MAILBOX_STAGES,
            producer_group=CooperativeGroup(Agent.Thread, 1),
            consumer_group=CooperativeGroup(Agent.Thread, consumer_warps),
            barrier_storage=barriers,
            defer_sync=True,
        )

    def first(self) -> Int32:
        return cute.arch.block_idx()[0]

    def handed_out(self) -> Int32:
        """Tiles that nobody claims."""
        return cute.arch.grid_dim()[0]

    @cute.jit
    def claim(self, state: PipelineState) -> Int32:
        """Producer warp: claim the next tile and tell the consumers.

        Claimed only when the loads of the tile before are all issued: a tile taken earlier would wait behind a
        long one while other CTAs run dry. The trip to L2 is hidden by the blocks that are still in the pipeline.
        """
        tile = Int32(0)
        if self.lane == 0:
            tile = self._next_number()
            self.pipe.producer_acquire(state)
            self.mailbox[state.index] = tile
            self.pipe.producer_commit(state)
        return cute.arch.make_warp_uniform(tile)

    @cute.jit
    def claim_alone(self) -> Int32:
        """The same, but the consumers are told by the caller."""
        tile = Int32(0)
        if self.lane == 0:
            tile = self._next_number()
        return cute.arch.make_warp_uniform(tile)

    def _next_number(self) -> Int32:
        return self.handed_out() + cute.arch.atomic_add(
            self._word(CLAIMED_TILES), Int32(1), sem="relaxed", scope="gpu"
        )

    @cute.jit
    def receive(self, state: PipelineState) -> Int32:
        """Consumer warps: the tile that the producer published after the one just finished."""
        self.pipe.consumer_wait(state)
        tile = cute.arch.make_warp_uniform(self.mailbox[state.index])
        if self.lane == 0:
            self.pipe.consumer_release(state)
        return tile

    @cute.jit
    def finish(self):
        """Producer warp, once it has run out of tiles: the last CTA to come here zeroes the counter again."""
        if self.lane == 0:
            before = cute.arch.atomic_add(self._word(FINISHED_CTAS), Int32(1), sem="acq_rel", scope="gpu")
            if before == cute.arch.grid_dim()[0] - 1:
                self.counter[CLAIMED_TILES] = Int32(0)
                self.counter[FINISHED_CTAS] = Int32(0)

    def _word(self, index: int) -> cute.Pointer:
        return self.counter.iterator + index


class ResidentTileScheduler(TileScheduler):
    """The same where each tile is claimed, a CTA's first one too: then tiles belong to CTAs that run, and to no other.

    A CTA may so wait for tiles of lower numbers, whatever part of the grid has found an SM. ``first`` is not used.
    """

    def handed_out(self) -> Int32:
        return Int32(0)
