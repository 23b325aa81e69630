"""The walk of a key tile over the queries of all heads that share its keys, from the last query tile back.

Under a causal mask each key tile begins at its diagonal, and all end at the last query tile. CTAs that have key tiles
of one head of K and V should meet the same tiles of Q, dO and dQ at the same time, so that these are in L2. So they
walk from the last query tile, where none is ahead of the others, and visit it for one query head after the other before
they go to the query tile in front of it: with a head at a time a short key tile would come to the second head when a
long one is in the middle of the first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.pipeline import PipelineState

from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.key_mask import KeyMask
from cute_kernels.key_score_tile import KeyRules, KeyScoreTile
from cute_kernels.query_range import Visit
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from hopper.backward.consumer import BackwardConsumer, previous_stage
from hopper.backward.epilogue import BackwardEpilogue
from hopper.backward.exchange import state_of
from hopper.backward.kernel import BackwardKernel
from hopper.backward.producer import BackwardProducer
from hopper.backward.work import BackwardWork
from hopper.config import WARPGROUP_ROWS
from hopper.tiles import WARPS_PER_WARPGROUP


class WalkingBackwardKernel(BackwardKernel):
    """``BackwardKernel`` of plain causal problems with ``walks_back``: roles, registers, pipelines and barriers are as
    there. The order of tiles is free, and dQ is added up in any. What stands around a walk is written here again, since
    a branch there, though decided when a kernel is traced, changes the machine code of all others."""

    @cute.jit
    def _produce(self, work: BackwardWork, producer: BackwardProducer, sums: tuple, clearing: tuple = ()):
        loading = pipeline.PipelineUserType.Producer
        kv_state = pipeline.make_pipeline_state(loading, 1)
        mail_state = pipeline.make_pipeline_state(loading, MAILBOX_STAGES)
        state = pipeline.make_pipeline_state(loading, self.config.stages)
        tile = work.scheduler.first()
        while tile < work.num_tiles:
            n_block, head_kv, batch = work.coordinates(tile)
            seqlens = work.seqlens.of(batch)
            producer.load_keys(n_block, work.query_heads.head_of_keys(head_kv), seqlens, kv_state)
            kv_state.advance()
            visit = work.visit(n_block, batch)
            state = load_back(work, producer, sums, (head_kv, batch), seqlens, visit, state)
            tile = work.scheduler.claim(mail_state)
            mail_state.advance()
        work.scheduler.finish()

    @cute.jit
    def _consume(
        self,
        work: BackwardWork,
        consumer: BackwardConsumer,
        epilogue: BackwardEpilogue,
        rules: KeyRules,
        warp_idx: Int32,
    ):
        c, receiving = self.config, pipeline.PipelineUserType.Consumer
        lane = cute.arch.lane_idx()
        wg = warp_idx // WARPS_PER_WARPGROUP - 1
        key_in_tile = wg * WARPGROUP_ROWS + first_row_of_thread(warp_idx % WARPS_PER_WARPGROUP, lane)
        state = pipeline.make_pipeline_state(receiving, c.stages)
        visited = Int32(0)
        consumer.dq.clear()
        tile = work.scheduler.first()
        while tile < work.num_tiles:
            n_block, head_kv, batch = work.coordinates(tile)
            visit = work.visit(n_block, batch)
            key = n_block * c.tile_n + key_in_tile
            seqlens = work.seqlens.of(batch)
            mask = KeyMask(work.window, c.tile_m, seqlens, key, first_column_of_thread(lane))
            consumer.clear()
            kv_state = state_of(1, visited)
            consumer.pipes.kv.consumer_wait(kv_state)
            scores = rules.for_head(mask, head_kv, batch)
            state = walk_back(work, consumer, scores, (n_block, head_kv, batch), visit, wg, state)
            consumer.pipes.kv.consumer_release(kv_state)
            epilogue.store(consumer, self._last_block(state), (n_block, head_kv, seqlens))
            tile = work.scheduler.receive(state_of(MAILBOX_STAGES, visited))
            visited += 1
        consumer.dq.finish(previous_stage(c, state.index), state)


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
    first_head, first_tile = work.query_heads.first(head_kv), work.first_tile(head_kv, batch)
    for step in cutlass.range(visit.begin, visit.end, unroll=1):
        m_block = visit.begin + visit.end - 1 - step
        for i in cutlass.range(work.query_heads.count(head_kv), unroll=1):
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
        for i in cutlass.range(work.query_heads.count(head_kv), unroll=1):
            consumer.block(scores, m_block, first_tile + i * work.m_end + m_block, state, False)
            state.advance()
    for step in cutlass.range(visit.begin, visit.unmasked, unroll=1):
        m_block = visit.begin + visit.unmasked - 1 - step
        for i in cutlass.range(work.query_heads.count(head_kv), unroll=1):
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
