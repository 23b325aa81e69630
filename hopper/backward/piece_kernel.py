"""The backward kernel that divides the visits of some key tiles among CTAs."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.pipeline import PipelineState

from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.key_mask import KeyMask
from cute_kernels.key_score_tile import KeyRules, KeyScoreTile
from cute_kernels.query_range import Visit
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from hopper.backward.config import BackwardConfig
from hopper.backward.consumer import BackwardConsumer, previous_stage
from hopper.backward.epilogue import BackwardEpilogue
from hopper.backward.exchange import state_of
from hopper.backward.kernel import BackwardKernel
from hopper.backward.options import NO_OPTIONS
from hopper.backward.parts import reciprocal_of
from hopper.backward.pieces import PieceBatch, PieceWork, blocks_between
from hopper.backward.producer import BackwardProducer
from hopper.config import WARPGROUP_ROWS
from hopper.tiles import WARPS_PER_WARPGROUP


class PieceBackwardKernel(BackwardKernel):
    """``BackwardKernel`` with ``divides_visits``: roles, registers, pipelines and barriers are as there. dK and dV of
    a piece leave as with ``divides_heads``, those of other key tiles as ever. What stands around a walk is written here
    again, as in ``walk.py`` and for the same reason."""

    def __init__(self, config: BackwardConfig):
        super().__init__(config)
        self.batch = PieceBatch(config)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mKeySums: cute.Tensor,
        mValueSums: cute.Tensor,
        mPlaces: cute.Tensor,
        mCounter: cute.Tensor,
        softmax_scale: Float32,
        first: Int32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. mKeySums and mValueSums float32 (divided tiles, pieces, warpgroups, words) and mPlaces int32, three
        for each of them, are written, of the tiles from number ``first`` on; the rest as of ``BackwardKernel``."""
        count, each, _, _ = mKeySums.shape
        sums = tuple(
            cute.make_tensor(x.iterator, cute.select(x.layout, mode=[3, 2, 1, 0]))
            for x in (mKeySums, mValueSums)
        )
        plan = first, count, each, reciprocal_of(each), sums, (mPlaces,)
        tensors = (mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter)
        self._launch(tensors, replace(NO_OPTIONS, plan=plan), softmax_scale, num_ctas, stream)

    @cute.jit
    def _produce(self, work: PieceWork, producer: BackwardProducer, sums: tuple, clearing: tuple = ()):
        loading = pipeline.PipelineUserType.Producer
        kv_state = pipeline.make_pipeline_state(loading, 1)
        mail_state = pipeline.make_pipeline_state(loading, MAILBOX_STAGES)
        state = pipeline.make_pipeline_state(loading, self.config.stages)
        item = work.scheduler.first()
        while item < work.num_items:
            n_block, head_kv, batch = work.coordinates(work.divided.tile(item))
            seqlens = work.seqlens.of(batch)
            producer.load_keys(n_block, head_kv, seqlens, kv_state)
            kv_state.advance()
            visit = work.visit(n_block, batch)
            span = work.span(item, visit)
            for i in cutlass.range(work.query_heads.shared, unroll=1):
                first_tile = work.first_tile(head_kv, batch) + i * work.m_end
                of_head = tuple((mdQ, first_tile) for mdQ in sums)
                between = blocks_between(span, i, visit)
                head = work.query_heads.first(head_kv) + i
                state = producer.load_queries(head, seqlens, between, state, of_head)
            item = work.scheduler.claim(mail_state)
            mail_state.advance()
        work.scheduler.finish()

    @cute.jit
    def _consume(
        self,
        work: PieceWork,
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
        item = work.scheduler.first()
        while item < work.num_items:
            n_block, head_kv, batch = work.coordinates(work.divided.tile(item))
            visit = work.visit(n_block, batch)
            span = work.span(item, visit)
            key = n_block * c.tile_n + key_in_tile
            seqlens = work.seqlens.of(batch)
            mask = KeyMask(work.window, c.tile_m, seqlens, key, first_column_of_thread(lane))
            consumer.clear()
            kv_state = state_of(1, visited)
            consumer.pipes.kv.consumer_wait(kv_state)
            for i in cutlass.range(work.query_heads.shared, unroll=1):
                scores = rules.for_head(mask, work.query_heads.first(head_kv) + i, batch)
                first_tile = work.first_tile(head_kv, batch) + i * work.m_end
                between = blocks_between(span, i, visit)
                state = walk(work, consumer, scores, (n_block, first_tile, batch), between, wg, state)
            consumer.pipes.kv.consumer_release(kv_state)
            if work.divided.is_piece(item):
                work.leave(item, consumer, wg, epilogue.softmax_scale)
            else:
                epilogue.store(consumer, self._last_block(state), (n_block, head_kv, seqlens))
            item = work.scheduler.receive(state_of(MAILBOX_STAGES, visited))
            visited += 1
        consumer.dq.finish(previous_stage(c, state.index), state)


@cute.jit
def walk(
    work: PieceWork,
    consumer: BackwardConsumer,
    scores: KeyScoreTile,
    place: tuple[Int32, Int32, Int32],
    visit: Visit,
    wg: Int32,
    state: PipelineState,
) -> PipelineState:
    """A consumer warpgroup's part, number ``wg``, of what an item visits of a query head. ``place`` is n_block, the
    number of the head's first query tile, and the batch."""
    c, (n_block, first_tile, batch) = consumer.config, place
    for m_block in cutlass.range(visit.begin, visit.unmasked, unroll=1):
        if const_expr(c.hides_blocks):
            if work.comes_before(m_block, n_block * c.consumers + wg, batch):
                consumer.hidden_block(first_tile + m_block, state)
            else:
                consumer.block(scores, m_block, first_tile + m_block, state, True)
        else:
            consumer.block(scores, m_block, first_tile + m_block, state, True)
        state.advance()
    for m_block in cutlass.range(visit.unmasked, visit.end, unroll=1):
        consumer.block(scores, m_block, first_tile + m_block, state, False)
        state.advance()
    return state
