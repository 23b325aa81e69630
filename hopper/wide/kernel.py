"""The Hopper forward kernel for wide values, with a second query that multiplies them or without one."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import Agent, CooperativeGroup, PipelineTmaAsync

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import ROW_STRIDE, ROWS_PER_THREAD, first_column_of_thread, first_row_of_thread
from cute_kernels.key_blocks import BlockRange
from cute_kernels.mask import TileMask
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import ScoreRules, ScoreTile, SoftCap
from cute_kernels.tile_scheduler import MAILBOX_STAGES, TileScheduler
from cute_kernels.window import sides_of, window_of
from hopper.config import WARPGROUP_ROWS
from hopper.forward.batch import DenseBatch, PackedBatch
from hopper.forward.operands import Work
from hopper.tiles import WARPS_PER_WARPGROUP, swizzled_layout
from hopper.wide.config import CONSUMERS, WideForwardConfig, validate_wide_config
from hopper.wide.epilogue import WideEpilogue
from hopper.wide.exchange import Exchange, sync_cluster
from hopper.wide.operands import FIRST_HALF, SECOND_HALF, Place, WidePipelines, WideSmem, WideTensors
from hopper.wide.producer import DenseLoads, WideProducer
from hopper.wide.products import tiled_mmas, values_mma
from hopper.wide.scores import ScoresConsumer
from hopper.wide.softmax import make_softmax
from hopper.wide.tiles import ClusterTileScheduler
from hopper.wide.values import ValuesConsumer


class WideLayouts(NamedTuple):
    """Staged, swizzled layouts in shared memory. V's stages are those of the first half, then those of the second; O
    has theirs. QV's are its halves."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    p: cute.ComposedLayout
    qv: cute.ComposedLayout


class WideArguments(NamedTuple):
    """Arguments of a launch that only some kernels take; empty where the config has no use for them."""

    plan: tuple
    window: tuple
    softcap: tuple
    slopes: tuple
    sinks: tuple


class WideForwardKernel:
    """softmax(softmax_scale (Q K^T + QV V^T)) V and its log-sum-exp, on sm_90a, for V of up to 512 columns.

    O of 64 queries by 512 columns is all that the registers of two warpgroups hold, so each has half of the columns.
    The first one makes the scores and P, and hands P on through shared memory. Names in backticks are fields of
    ``WideForwardConfig``; docs/kernels/wide.md has the reasons.

    | role | warps | registers a thread | does |
    |---|---|---|---|
    | producer | 0 (1 to 3 idle) | `registers.producer` | TMA loads of Q, QV, K, V; claims tiles |
    | scores | 4 .. 7 | `registers.consumer` | S, softmax, P V in the first half of the columns |
    | values | 8 .. 11 | `registers.consumer` | P V in the second half |

    | pipeline | stages | what a full stage holds | empty when |
    |---|---|---|---|
    | q | 1 | Q and QV of a tile | S of the last block has read them |
    | k | `stages` | K of a block | S of all CTAs of the cluster has read it |
    | v, first half | `stages` | half of the columns of V | so has P V of the scores' warpgroups |
    | v, second half | `stages` | the other half | so has S with `qv`, and P V of the values' warpgroups |
    | mailbox | 2 | the number of a tile | all consumer warps have read it, of a cluster the producers too |

    | named barrier | id | threads | orders |
    |---|---|---|---|
    | of one warpgroup | 1, 2 | 128 | the staging of O |
    | WRITTEN, SCORED, READ, SUMMED | 3 to 6 | 256 | the exchange of P (``Exchange``) |

    Key blocks in time, the tensor cores in the middle (S is the scores of a block, A and B are P V of the two halves, ~
    is softmax)::

        scores             ~~~~~~~~~           ~~~~~~~~~
        tensor cores  S1   B0         A1  S2   B1         A2  S3 ...

    O is staged in the place of the last block's V, which is given back when it has left. So Q, QV and the first block
    of the next tile are on their way under the last P V of this one.

    The grid is persistent. The CTAs of a cluster have 64 queries of a tile each and walk over the same key blocks, of
    which each loads a part for all by multicast. The first CTA claims the tiles (``ClusterTileScheduler``).
    """

    def __init__(self, config: WideForwardConfig):
        validate_wide_config(config)
        self.config, self.dtype = config, DSL_DTYPES[config.dtype]
        # ``WideForwardConfig`` has all that this reads of a ``ForwardConfig``.
        self.batch = PackedBatch(config) if config.layout == VARLEN else DenseBatch(config)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mQV: cute.Tensor | None,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        attention_chunk: Int32 | None,
        plan: cute.Tensor | None,
        sequences: Int32 | None,
        softcap: Float32 | None,
        alibi_slopes: cute.Tensor | None,
        sinks: cute.Tensor | None,
        num_ctas: Int32,
        stream,
    ):
        """Launch. The arguments are those of ``GeneralForwardKernel``, with mQV as mO is; None without ``qv``."""
        c, batch = self.config, self.batch
        given = WideArguments(
            plan=(plan, sequences) if const_expr(c.layout == VARLEN) else (),
            window=sides_of(c, window_left, window_right, attention_chunk),
            softcap=(softcap,) if const_expr(c.softcap) else (),
            slopes=(alibi_slopes,) if const_expr(c.alibi) else (),
            sinks=(sinks,) if const_expr(c.sinks) else (),
        )
        queries = (mQV,) if const_expr(c.qv) else ()
        views = WideTensors(*(batch.view(t) for t in (mQ, mK, mV, mO)), tuple(batch.view(t) for t in queries))
        copies = self._make_copies(views)
        # Capped scores are tanh(s / cap) in the accumulator: what is left to multiply by is the cap.
        scale = given.softcap[0] if const_expr(c.softcap) else softmax_scale
        self.kernel(
            WideTensors(*(copy.atom for copy in copies[:4]), tuple(copy.atom for copy in copies.qv)),
            WideTensors(
                *(copy.tma_tensor for copy in copies[:4]), tuple(copy.tma_tensor for copy in copies.qv)
            ),
            batch.view_lse(mLSE),
            tile_counter,
            given.sinks,
            scale * Float32(math.log2(math.e)),
            batch.lengths(views.q, views.k, given.plan),
            views.q.shape[2] // views.k.shape[2],
            batch.sections(views.q, views.k, num_ctas),
            given.window,
            tuple(softmax_scale / cap for cap in given.softcap),
            given.slopes,
        ).launch(
            grid=(c.cluster * batch.num_ctas(views.q, cutlass.max(num_ctas // c.cluster, 1)), 1, 1),
            block=(c.threads, 1, 1),
            cluster=(c.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _make_copies(self, views: WideTensors) -> WideTensors:
        """The TMA of each tensor, atom and coordinate tensor."""
        c, layouts = self.config, self._smem_layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_keys = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.cluster > 1 else load
        rows, half = WARPGROUP_ROWS, c.half
        make = cpasync.make_tiled_tma_atom
        return WideTensors(
            make(load, views.q, layouts.q, (rows, c.head_dim)),
            make(load_keys, views.k, layouts.k, (c.tile_n, c.head_dim), c.cluster),
            make(load_keys, views.v, layouts.v, (c.tile_n, half), c.cluster),
            make(store, views.o, layouts.v, (rows, half)),
            tuple(make(load, qv, layouts.qv, (rows, half)) for qv in views.qv),
        )

    @cute.kernel
    def kernel(
        self,
        atoms: WideTensors,
        tensors: WideTensors,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        sinks: tuple,
        scale_log2: Float32,
        lengths: tuple,
        heads_per_kv_head: Int32,
        sections: tuple,
        sides: tuple,
        caps: tuple,
        slopes: tuple,
    ):
        c, layouts = self.config, self._smem_layouts()
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage(layouts))
        sQ, sK, sV, sP, *sQV = (
            getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in zip(WideLayouts._fields[: 4 + c.qv], layouts, strict=False)
        )
        smem = WideTensors(sQ, sK, sV, sV, tuple(sQV))
        row_factors = cute.make_layout(WARPGROUP_ROWS)
        exchanged, told = (
            WideSmem(sP[None, None, 0], factors.get_tensor(row_factors))
            for factors in (storage.factors, storage.inverse)
        )

        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in (*atoms[:4], *atoms.qv):
                cpasync.prefetch_descriptor(atom)
        operands = WideTensors.of_operands(atoms, tensors, smem)
        lane = cute.arch.lane_idx()
        rank = (
            cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(c.cluster > 1) else 0
        )
        place = Place(c.cluster, rank)
        scheduler = self._make_scheduler(tile_counter, storage, lane, place)
        pipes = self._make_pipelines(storage)
        cute.arch.mbarrier_init_fence()
        sync_cluster(c.cluster)

        order = self.batch.order(lengths, mLSE, heads_per_kv_head, sections)
        block_range = BlockRange(c.tile_m, c.tile_n, window_of(c.causal, sides))
        is_precise = self.dtype is cutlass.Float16
        inverse_scale = 1.0
        if const_expr(c.alibi):
            inverse_scale = Float32(math.log2(math.e)) / scale_log2
        rules = ScoreRules(tuple(SoftCap(factor, is_precise) for factor in caps), slopes, inverse_scale)
        work = Work(scheduler, order, block_range, self.batch.seqlens(lengths), heads_per_kv_head, rules)
        store = self.batch.store_type(operands.o, mLSE, c.half)
        if warp_idx < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(c.registers.producer)
            if warp_idx == 0:
                WideProducer(c, operands, pipes, DenseLoads(c, operands, pipes, place)).run(work)
        else:
            cute.arch.setmaxregister_increase(c.registers.consumer)
            warp = warp_idx % WARPS_PER_WARPGROUP
            exchange, inverse = Exchange(exchanged, warp, lane), Exchange(told, warp, lane)
            mmas = tiled_mmas(c, self.dtype)
            epilogue = WideEpilogue(c, store, pipes, mmas.pv, place, warp, lane)
            if warp_idx < 2 * WARPS_PER_WARPGROUP:
                softmax = make_softmax(scale_log2, sinks, self.dtype)
                consumer = ScoresConsumer(c, mmas, smem, inverse, pipes, exchange, softmax)
                self._score(work, consumer, epilogue)
            else:
                mma = values_mma(c.half, self.dtype, warpgroup.OperandSource.SMEM)
                values = ValuesConsumer(c, mma, smem.v, exchanged, inverse, pipes, exchange)
                self._sum_values(work, values, epilogue)
        if const_expr(c.cluster > 1):
            # The other CTA may still load for this one, or arrive at a barrier in it.
            sync_cluster(c.cluster)

    def _make_scheduler(self, tile_counter: cute.Tensor, storage, lane: Int32, place: Place) -> TileScheduler:
        mailbox = storage.mailbox.get_tensor(cute.make_layout(MAILBOX_STAGES))
        barriers, warps = storage.barriers_mailbox.data_ptr(), WARPS_PER_WARPGROUP * CONSUMERS
        if place.cluster > 1:
            pipe = ClusterTileScheduler.make_cluster_pipe(barriers, warps, place.cluster)
            return ClusterTileScheduler(tile_counter, mailbox, pipe, lane, place)
        return TileScheduler(tile_counter, mailbox, TileScheduler.make_pipe(barriers, warps), lane)

    @cute.jit
    def _score(self, work: Work, consumer: ScoresConsumer, epilogue: WideEpilogue):
        """The first consumer warpgroup: attend to each tile and store its half."""
        c, lane, softmax = self.config, epilogue.lane, consumer.softmax
        row_in_tile = first_row_of_thread(epilogue.warp_in_group, lane)
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)
        mail_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, MAILBOX_STAGES)
        q_phase = Int32(0)
        tile = work.scheduler.first()
        while tile < work.order.num_tiles:
            m_block, head, batch = work.order.coordinates(tile)
            blocks = work.key_blocks(m_block, head, batch)
            row = epilogue.place.own(m_block) * WARPGROUP_ROWS + row_in_tile
            seqlens = work.seqlens.of(batch)
            col_in_block = first_column_of_thread(lane)
            mask = TileMask(work.block_range.window, c.tile_n, seqlens, row, col_in_block)
            scores = ScoreTile(mask, work.rules.for_tile(mask, head, batch))
            last_row = seqlens.seqlen_q - 1
            rows = tuple(cutlass.min(row + r * ROW_STRIDE, last_row) for r in range(ROWS_PER_THREAD))
            softmax.enter_tile(rows, head, batch)
            kv_state = consumer.start(scores, blocks, kv_state, q_phase)
            inverse_sum, lse = (cute.make_rmem_tensor(ROWS_PER_THREAD, Float32) for _ in range(2))
            softmax.finalize(inverse_sum, lse, head // work.heads_per_kv_head, batch)
            consumer.finish(inverse_sum)
            epilogue.store.lse(lse, head, seqlens, row, lane)
            epilogue.finish(FIRST_HALF, consumer.acc, inverse_sum, (m_block, head), seqlens, kv_state)
            kv_state.advance()
            q_phase ^= 1
            tile = work.scheduler.receive(mail_state)
            mail_state.advance()

    @cute.jit
    def _sum_values(self, work: Work, consumer: ValuesConsumer, epilogue: WideEpilogue):
        """The second consumer warpgroup: sum P V of each tile and store its half."""
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        mail_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, MAILBOX_STAGES)
        consumer.exchange.prime()
        tile = work.scheduler.first()
        while tile < work.order.num_tiles:
            m_block, head, batch = work.order.coordinates(tile)
            blocks = work.key_blocks(m_block, head, batch)
            kv_state = consumer.attend(blocks.count, kv_state)
            seqlens = work.seqlens.of(batch)
            epilogue.finish(SECOND_HALF, consumer.acc, consumer.factors, (m_block, head), seqlens, kv_state)
            kv_state.advance()
            tile = work.scheduler.receive(mail_state)
            mail_state.advance()

    def _make_pipelines(self, storage) -> WidePipelines:
        """Those of the table in the docstring of the class, but the mailbox."""
        c, one, both = self.config, WARPS_PER_WARPGROUP, CONSUMERS * WARPS_PER_WARPGROUP
        queries = WARPGROUP_ROWS * (c.head_dim + (c.head_dim_v if c.qv else 0))
        barriers_v, keys = storage.barriers_v.data_ptr(), c.tile_n * c.half
        second = both if c.qv else one
        return WidePipelines(
            self._tma_pipeline(storage.barriers_q.data_ptr(), 1, one, queries, 1),
            self._tma_pipeline(
                storage.barriers_k.data_ptr(), c.stages, one, c.tile_n * c.head_dim, c.cluster
            ),
            (
                self._tma_pipeline(barriers_v, c.stages, one, keys, c.cluster),
                self._tma_pipeline(barriers_v + 2 * c.stages, c.stages, second, keys, c.cluster),
            ),
        )

    def _tma_pipeline(
        self, barriers: cute.Pointer, stages: int, warps: int, elements: int, ctas: int
    ) -> PipelineTmaAsync:
        """A stage is empty when ``warps`` of each of ``ctas`` have released it."""
        return PipelineTmaAsync.create(
            num_stages=stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, warps * ctas),
            tx_count=elements * self.config.element_bytes,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, 1, ctas, 1)),
            defer_sync=True,
        )

    def _smem_layouts(self) -> WideLayouts:
        c = self.config
        return WideLayouts(
            q=swizzled_layout(WARPGROUP_ROWS, c.head_dim, 1, self.dtype),
            k=swizzled_layout(c.tile_n, c.head_dim, c.stages, self.dtype),
            v=swizzled_layout(c.tile_n, c.half, 2 * c.stages, self.dtype),
            p=swizzled_layout(WARPGROUP_ROWS, c.tile_n, 1, self.dtype),
            qv=swizzled_layout(WARPGROUP_ROWS, c.half, 2, self.dtype),
        )

    def _shared_storage(self, layouts: WideLayouts) -> type:
        c, dtype = self.config, self.dtype
        sizes = WideLayouts(*(cute.cosize(layout.outer) for layout in layouts))
        if not c.qv:
            sizes = sizes._replace(qv=0)

        @cute.struct
        class SharedStorage:
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 4 * c.stages]
            barriers_mailbox: cute.struct.MemRange[cutlass.Int64, 2 * MAILBOX_STAGES]
            mailbox: cute.struct.MemRange[Int32, MAILBOX_STAGES]
            factors: cute.struct.Align[cute.struct.MemRange[Float32, WARPGROUP_ROWS], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, WARPGROUP_ROWS], 16]
            q: cute.struct.Align[cute.struct.MemRange[dtype, sizes.q], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, sizes.k], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, sizes.v], 1024]
            qv: cute.struct.Align[cute.struct.MemRange[dtype, sizes.qv], 1024]
            p: cute.struct.Align[cute.struct.MemRange[dtype, sizes.p], 1024]

        return SharedStorage
