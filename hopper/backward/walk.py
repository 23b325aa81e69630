"""The walk of a key tile over the queries of all heads that share its keys, from the last query tile back.

Under a causal mask each key tile begins at its diagonal, and all end at the last query tile. CTAs that have key tiles
of one head of K and V should meet the same tiles of Q, dO and dQ at the same time, so that these are in L2. So they
walk from the last query tile, where none is ahead of the others, and visit it for one query head after the other before
they go to the one before it: with a head at a time a short key tile would come to the second head when a long one is in
the middle of the first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.pipeline import PipelineState

from cute_kernels.key_score_tile import KeyScoreTile
from cute_kernels.query_range import Visit
from cute_kernels.seqlen import SeqlenInfo
from hopper.backward.consumer import BackwardConsumer
from hopper.backward.producer import BackwardProducer
from hopper.backward.work import BackwardWork


@cute.jit
def load_back(
    work: BackwardWork,
    producer: BackwardProducer,
    sums: tuple,
    place: tuple[Int32, Int32],
    seqlens: SeqlenInfo,
    visit: Visit,
    state: PipelineState,
) -> PipelineState:
    """The producer warp's part: loads the queries of a key tile. ``place`` is its head of K and V and batch."""
    head_kv, batch = place
    first_head, first_tile = head_kv * work.heads_per_kv_head, work.first_tile(head_kv, batch)
    for step in cutlass.range(visit.begin, visit.end, unroll=1):
        m_block = visit.begin + visit.end - 1 - step
        for i in cutlass.range(work.heads_per_kv_head, unroll=1):
            at = Visit(m_block, m_block, m_block + 1, m_block + 1)
            of_head = tuple((mdQ, first_tile + i * work.m_end) for mdQ in sums)
            state = producer.load_queries(first_head + i, seqlens, at, state, of_head)
    return state


@cute.jit
def walk_back(
    work: BackwardWork,
    consumer: BackwardConsumer,
    scores: KeyScoreTile,
    place: tuple[Int32, Int32, Int32],
    visit: Visit,
    wg: Int32,
    state: PipelineState,
) -> PipelineState:
    """A consumer warpgroup's part, number ``wg``. ``place`` is n_block, the head of K and V and the batch."""
    c, (n_block, head_kv, batch) = consumer.config, place
    first_tile = work.first_tile(head_kv, batch)
    for step in cutlass.range(visit.unmasked, visit.end, unroll=1):
        m_block = visit.unmasked + visit.end - 1 - step
        for i in cutlass.range(work.heads_per_kv_head, unroll=1):
            consumer.block(scores, m_block, first_tile + i * work.m_end + m_block, state, False)
            state.advance()
    for step in cutlass.range(visit.begin, visit.unmasked, unroll=1):
        m_block = visit.begin + visit.unmasked - 1 - step
        for i in cutlass.range(work.heads_per_kv_head, unroll=1):
            tile = first_tile + i * work.m_end + m_block
            if const_expr(c.hides_blocks):
                if work.comes_before(m_block, n_block * c.consumers + wg, batch):
                    consumer.hidden_block(tile, state)
                else:
                    consumer.block(scores, m_block, tile, state, True)
            else:
                consumer.block(scores, m_block, tile, state, True)
            state.advance()
    return state
