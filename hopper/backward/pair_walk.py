"""The place of a CTA in a launch of the paired backward kernel, and its walk over the query tiles of its key tile."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr

from cute_kernels.integers import minimum
from cute_kernels.key_mask import KeyMask
from cute_kernels.key_score_tile import KeyRules
from cute_kernels.query_range import ListedQueries, QueryRange, Visit
from cute_kernels.seqlen import SeqlenInfo
from hopper.backward.config import CLUSTER_CTAS
from hopper.backward.pair_consumer import PairConsumer
from hopper.backward.pair_producer import PairProducer
from hopper.backward.parts import QueryHeads
from hopper.backward.turn_keeper import TurnKeeper


class Problem(NamedTuple):
    """What all roles know of a launch and of their place in it. ``m_ends`` are the query tiles of a head of all packed
    sequences, or nothing; ``changes`` and ``lists`` those of ``BackwardOptions``. ``head_kv`` counts parts
    where heads are divided."""

    softmax_scale: Float32
    seqlens: SeqlenInfo
    query_heads: QueryHeads
    n_block: Int32
    head_kv: Int32
    rank: Int32
    queries: QueryRange
    m_ends: tuple
    changes: tuple
    lists: tuple

    @property
    def head_of_keys(self) -> Any:
        """The head of K and V."""
        return self.query_heads.head_of_keys(self.head_kv)

    @property
    def pair(self) -> Any:
        """The number of the cluster's key tile."""
        return self.n_block // CLUSTER_CTAS

    @property
    def pairs(self) -> Any:
        """Key tiles of the sequence."""
        return cute.ceil_div(self.seqlens.seqlen_k, self.queries.tile_n)

    @property
    def m_end(self) -> Any:
        """Query tiles of a head in the sums of dQ."""
        return self.m_ends[0] if self.seqlens.is_packed else self.queries.tiles(self.seqlens)

    @property
    def first_tile(self) -> Any:
        """The number of the first query tile of the first query head, among all heads of the batch."""
        first = self.first_head * self.m_end
        return first + self.seqlens.first_query_tile(self.queries.tile_m) if self.seqlens.is_packed else first

    @property
    def first_head(self) -> Int32:
        """The first query head."""
        return self.query_heads.first(self.head_kv)

    @property
    def heads(self) -> Int32:
        """How many there are."""
        return self.query_heads.count(self.head_kv)

    @property
    def visit(self) -> Visit:
        """The query tiles of the key tile, without lists."""
        n_block, seqlens, queries = self.pair, self.seqlens, self.queries
        return Visit(
            queries.begin(n_block, seqlens),
            queries.unmasked_begin(n_block, seqlens),
            queries.unmasked_end(n_block, seqlens),
            queries.end(n_block, seqlens),
        )


# Functions, since a loop would carry a problem whose methods it calls around itself.


def listed_queries(problem: Problem, head: Int32) -> ListedQueries:
    """The query tiles that are listed for a query head."""
    p, (lists,) = problem, problem.lists
    return ListedQueries.of(lists[p.seqlens.batch, head, p.pair, None, None])


def turn_of(problem: Problem, m_block: Int32) -> Int32:
    """How many pairs add to the query tile before this one, where the order is fixed (``BackwardWork``). They have
    lower numbers and so have started: CTAs start in the order of their numbers."""
    p = problem
    return p.queries.turn(p.pair, m_block, p.pairs, p.seqlens)


def sums_of(problem: Problem, m_block: Int32, tile: Int32) -> Int32:
    """Query tile ``tile``, whose number in its head is ``m_block``, as ``PairConsumer`` is told of it: its complement
    where this pair is the first to visit it and stores its part of dQ."""
    if not problem.queries.is_covered:
        return tile
    return tile ^ (minimum(turn_of(problem, m_block), 1) - 1)


@cute.jit
def load_range(producer: PairProducer, problem: Problem):
    """Issue the loads of the keys, and of the query tiles of all heads."""
    p = problem
    begin, end = p.queries.begin(p.pair, p.seqlens), p.queries.end(p.pair, p.seqlens)
    visit = Visit(begin, end, end, end)
    producer.load_keys(p.n_block, p.head_of_keys, p.seqlens)
    for i in cutlass.range(p.heads, unroll=1):
        head, block = p.first_head + i, i * (end - begin)
        producer.load_queries(head, p.seqlens, visit, block)


@cute.jit
def load_listed(producer: PairProducer, problem: Problem):
    """The same of those that are listed."""
    p, block = problem, Int32(0)
    producer.load_keys(p.n_block, p.head_of_keys, p.seqlens)
    for i in cutlass.range(p.heads, unroll=1):
        listed = listed_queries(p, p.first_head + i)
        producer.load_queries(p.first_head + i, p.seqlens, listed, block)
        block += listed.end


@cute.jit
def keep_turns_of_range(keeper: TurnKeeper, problem: Problem):
    """The turns of the query tiles of all heads."""
    p = problem
    begin, end, first_tile = (
        p.queries.begin(p.pair, p.seqlens),
        p.queries.end(p.pair, p.seqlens),
        p.first_tile,
    )
    for i in cutlass.range(p.heads, unroll=1):
        for m_block in cutlass.range(begin, end, unroll=1):
            block, tile = i * (end - begin) + m_block - begin, first_tile + i * p.m_end + m_block
            keeper.keep(block, tile, turn_of(p, m_block))


@cute.jit
def keep_turns_of_list(keeper: TurnKeeper, problem: Problem):
    """The same of those that are listed."""
    p, block = problem, Int32(0)
    for i in cutlass.range(p.heads, unroll=1):
        listed = listed_queries(p, p.first_head + i)
        for place in cutlass.range(listed.begin, listed.end, unroll=1):
            keeper.keep(block, p.first_tile + i * p.m_end + listed.number(place), listed.turn(place))
            block += 1


def wait_for_keys(consumer: PairConsumer) -> None:
    """The gradients of the keys are zero until then."""
    consumer.clear()
    kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
    consumer.pipes.kv.consumer_wait(kv_state)


@cute.jit
def walk_range(consumer: PairConsumer, rules: KeyRules, mask: KeyMask, problem: Problem):
    """Walk over the query tiles of each head. The first block stands by itself: there is none before it."""
    p = problem
    visit = p.visit
    m_begin, m_end, tiles, first_tile = visit.begin, visit.end, p.m_end, p.first_tile
    blocks = m_end - m_begin
    wait_for_keys(consumer)
    first_head = p.first_head
    scores = rules.for_head(mask, first_head, p.seqlens.batch)
    consumer.block(scores, m_begin, Int32(0), Int32(0), True, True)
    tile_before = sums_of(p, m_begin, first_tile + m_begin)
    for i in cutlass.range(p.heads, unroll=1):
        tile, block = first_tile + i * tiles, i * blocks - m_begin
        scores = rules.for_head(mask, first_head + i, p.seqlens.batch)
        first = m_begin + 1 if i == 0 else m_begin
        middle = cutlass.max(first, visit.unmasked)
        for m_block in cutlass.range(first, middle, unroll=1):
            consumer.block(scores, m_block, block + m_block, tile_before, True, False)
            tile_before = sums_of(p, m_block, tile + m_block)
        left_masked = (
            cutlass.max(middle, visit.left_masked) if const_expr(p.queries.window.has_left) else m_end
        )
        for m_block in cutlass.range(middle, left_masked, unroll=1):
            consumer.block(scores, m_block, block + m_block, tile_before, False, False)
            tile_before = sums_of(p, m_block, tile + m_block)
        if const_expr(p.queries.window.has_left):
            for m_block in cutlass.range(left_masked, m_end, unroll=1):
                consumer.block(scores, m_block, block + m_block, tile_before, True, False)
                tile_before = sums_of(p, m_block, tile + m_block)
    consumer.finish(p.heads * blocks - 1, tile_before)


@cute.jit
def walk_listed(consumer: PairConsumer, rules: KeyRules, mask: KeyMask, problem: Problem):
    """The same over those that are listed, of which each head has one or more."""
    p, block = problem, Int32(1)
    first_head, first_tile = p.first_head, p.first_tile
    listed = listed_queries(p, first_head)
    wait_for_keys(consumer)
    scores = listed.masked(rules.for_head(mask, first_head, p.seqlens.batch), Int32(0))
    m_block = listed.number(Int32(0))
    consumer.block(scores, m_block, Int32(0), Int32(0), False, True)
    tile_before = first_tile + m_block
    for i in cutlass.range(p.heads, unroll=1):
        tile, listed_here = first_tile + i * p.m_end, listed_queries(p, first_head + i)
        of_head = rules.for_head(mask, first_head + i, p.seqlens.batch)
        first = Int32(1) if i == 0 else Int32(0)
        middle = cutlass.max(first, listed_here.unmasked)
        for place in cutlass.range(first, middle, unroll=1):
            m_block = listed_here.number(place)
            in_block = listed_here.masked(of_head, place)
            consumer.block(in_block, m_block, block, tile_before, False, False)
            tile_before = tile + m_block
            block += 1
        for place in cutlass.range(middle, listed_here.end, unroll=1):
            m_block = listed_here.number(place)
            in_block = listed_here.fully_seen(of_head)
            consumer.block(in_block, m_block, block, tile_before, False, False)
            tile_before = tile + m_block
            block += 1
    consumer.finish(block - 1, tile_before)
