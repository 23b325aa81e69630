"""The Hopper backward kernel for narrow windows: a CTA has a strip of key tiles, and finishes dQ itself."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.pipeline import PipelineState

from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.key_mask import KeyMask
from cute_kernels.key_score_tile import KeyRules
from cute_kernels.tile_scheduler import MAILBOX_STAGES
from hopper.backward.config import BackwardConfig
from hopper.backward.consumer import OWN, BackwardConsumer, BackwardMmas, previous_stage
from hopper.backward.dq import QueryTile
from hopper.backward.epilogue import BackwardEpilogue
from hopper.backward.exchange import state_of
from hopper.backward.kernel import GeneralBackwardKernel
from hopper.backward.producer import BackwardPipelines, BackwardProducer
from hopper.backward.strip_dq import StripGradientOfQ
from hopper.backward.strips import StripBatch, StripWork
from hopper.config import WARPGROUP_ROWS
from hopper.tiles import WARPS_PER_WARPGROUP


def part_state(visited: Int32, part: Int32 | int, is_producer: bool = False) -> PipelineState:
    """Where the pipeline of K and V stands at a part of a key tile, before which so many were visited."""
    phase = visited & 1
    return PipelineState(2, visited, Int32(part), phase ^ 1 if is_producer else phase)


class StripBackwardKernel(GeneralBackwardKernel):
    """``GeneralBackwardKernel`` whose CTAs claim strips of key tiles of a head instead of single ones.

    dQ of a query tile has parts from two neighbouring key tiles at most. Of these the first one's stays in shared
    memory until the second one adds its own (``StripGradientOfQ``), so dQ is written once, in 16 bits, and in the same
    order in every run. At the begin of a strip the key tile before it is visited too, for its part of dQ alone.

    The kv pipeline has a stage for each half of a key tile, the keys of one warpgroup. The first half is seen by no
    query of the last tile that is visited, and the second by none of the first: so each is loaded while the other one
    is at work. A warpgroup whose keys see nothing of a query tile takes part in its dQ alone.
    """

    def __init__(self, config: BackwardConfig):
        super().__init__(config)
        self.batch = StripBatch(config)

    def _gradient_of_q(
        self, mmas: BackwardMmas, pipes: BackwardPipelines, memory: tuple, store: tuple
    ) -> StripGradientOfQ:
        (atom,), (tensor,), softmax_scale = store
        layout = self._smem_layouts().dq
        return StripGradientOfQ((atom, tensor), layout, softmax_scale, self.config, mmas.dq, *memory)

    @cute.jit
    def _produce(self, work: StripWork, producer: BackwardProducer, sums: tuple, clearing: tuple = ()):
        loading = pipeline.PipelineUserType.Producer
        visited = Int32(0)
        mail_state = pipeline.make_pipeline_state(loading, MAILBOX_STAGES)
        state = pipeline.make_pipeline_state(loading, self.config.stages)
        tile = work.scheduler.first()
        while tile < work.num_tiles:
            strip = work.strip(tile)
            seqlens = work.seqlens.of(strip.batch)
            for n_block in cutlass.range(strip.first_visited, strip.end, unroll=1):
                visit = work.visit_in(strip, n_block)
                halves = replace(visit, end=visit.second_begin), replace(visit, begin=visit.second_begin)
                for part in cutlass.range_constexpr(self.config.key_parts):
                    of_part = part_state(visited, part, True)
                    producer.load_keys(n_block, strip.head, seqlens, of_part, part)
                    state = producer.load_queries(strip.head, seqlens, halves[part], state)
                visited += 1
            tile = work.scheduler.claim(mail_state)
            mail_state.advance()
        work.scheduler.finish()

    @cute.jit
    def _consume(
        self,
        work: StripWork,
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
        visited, strips = Int32(0), Int32(0)
        consumer.dq.clear()
        tile = work.scheduler.first()
        while tile < work.num_tiles:
            strip = work.strip(tile)
            seqlens = work.seqlens.of(strip.batch)
            consumer.dq.begin_strip(work.visit_in(strip, strip.first_visited).begin)
            for n_block in cutlass.range(strip.first_visited, strip.end, unroll=1):
                visit = work.visit_in(strip, n_block)
                key = n_block * c.tile_n + key_in_tile
                mask = KeyMask(work.window, c.tile_m, seqlens, key, first_column_of_thread(lane))
                scores = rules.for_head(mask, strip.head, strip.batch)
                consumer.clear()
                own, other = part_state(visited, wg), part_state(visited, 1 - wg)
                kv = consumer.pipes.kv
                for m_block in cutlass.range(visit.begin, visit.end, unroll=1):
                    is_carried, is_final = m_block < visit.carried_end, m_block < visit.final_end
                    of_dq = QueryTile(m_block, strip.head, strip.batch, is_carried, is_final)
                    if m_block >= visit.second_begin and m_block < visit.first_end:
                        kv.consumer_wait(own)
                        kv.consumer_wait(other)
                        consumer.block(scores, m_block, of_dq, state, True)
                    elif (m_block < visit.second_begin) == (wg == 0):
                        kv.consumer_wait(own)
                        consumer.block(scores, m_block, of_dq, state, True, OWN)
                    else:
                        kv.consumer_wait(other)
                        consumer.hidden_block(of_dq, state)
                    if m_block == visit.first_end - 1:
                        kv.consumer_release(part_state(visited, 0))
                    state.advance()
                # Parts that no block has waited for are waited for here.
                if visit.first_end == visit.begin:
                    kv.consumer_wait(part_state(visited, 0))
                    kv.consumer_release(part_state(visited, 0))
                kv.consumer_wait(part_state(visited, 1))
                kv.consumer_release(part_state(visited, 1))
                visited += 1
                if n_block >= strip.first:
                    place = (n_block, strip.head, seqlens)
                    epilogue.store(consumer, self._last_block(state), place)
            tile = work.scheduler.receive(state_of(MAILBOX_STAGES, strips))
            strips += 1
        consumer.dq.finish(previous_stage(c, state.index), state)
