"""The Hopper backward kernel for 16-bit inputs."""

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.pipeline import PipelineState
from cutlass.utils import hopper_helpers

from cute_kernels.backward.step import SCHEDULER_WORDS
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.key_mask import KeyMask
from cute_kernels.key_score_tile import KeyRules
from cute_kernels.tile_scheduler import MAILBOX_STAGES, ResidentTileScheduler, TileScheduler
from cute_kernels.window import window_of
from hopper.backward.batch import batch_of
from hopper.backward.clearing import Clearing
from hopper.backward.config import BackwardConfig, validate_backward_config
from hopper.backward.consumer import BackwardConsumer, BackwardFragments, BackwardMmas, previous_stage
from hopper.backward.courier import Courier
from hopper.backward.dq import GradientOfQ, OrderedGradientOfQ, QueryTile
from hopper.backward.epilogue import BackwardEpilogue, DividedEpilogue
from hopper.backward.exchange import state_of
from hopper.backward.options import NO_OPTIONS, BackwardOptions, key_rules
from hopper.backward.parts import divided_heads, query_heads
from hopper.backward.producer import BackwardOperands, BackwardPipelines, BackwardProducer
from hopper.backward.work import BackwardWork
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.tiles import WARPS_PER_WARPGROUP, TmaOperand, swizzled_layout


class BackwardLayouts(NamedTuple):
    """Staged, swizzled layouts in shared memory; the last mode of each is its stage. ``dk``, ``dv`` and
    ``dq`` are of the rows of one warpgroup, on their way out."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    do: cute.ComposedLayout
    ds: cute.ComposedLayout
    dk: cute.ComposedLayout
    dv: cute.ComposedLayout
    dq: cute.ComposedLayout


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The first two modes of a (rows, columns, stages) tensor exchanged."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, 2]))


class BackwardKernel:
    """dQ, dK and dV of softmax(softmax_scale Q K^T) V, on sm_90a (FlashAttention-2, algorithm 2).

    Names in backticks are fields of ``BackwardConfig``.

    | role | warps | registers a thread | does |
    |---|---|---|---|
    | producer | 0 | `registers.producer` | claims tiles; TMA loads of K, V, and of Q, LSE, dO, delta |
    | courier | 1, 2, with `ordered` (3 idle) | `registers.producer` | adds dQ in its turn (``Courier``) |
    | clearing | 1, with `clears_ahead` | `registers.producer` | zeros for dQ to be added to (``Clearing``) |
    | consumer wg | 4 + 4 wg .. 7 + 4 wg | `registers.consumer` | five GEMMs, softmax, epilogue of 64 keys |

    | pipeline | stages | what a full stage holds |
    |---|---|---|
    | kv | `key_parts` | K and V of the key tile, or of a part of it |
    | q | `stages` | Q of a query tile and its LSE |
    | do | `stages` | dO of a query tile and its delta |
    | ds | `stages` | dS^T of all keys, before dQ = dS K reads it; the dQ of the block before, to be sent |
    | mailbox | 2 | the number of the next key tile (``TileScheduler``), or where it lies (``PlacedBackwardWork``) |

    | named barrier | id | threads | orders |
    |---|---|---|---|
    | CONSUMERS | 1 | all consumers | dS and the dQ sent last are read before dK and dV lie there, and these before dS |
    | WARPGROUP + wg | 2 | 128 | dK and dV, or the last dQ, staged by warpgroup wg, complete before they are sent |

    The grid is persistent: as many CTAs as SMs, fed by ``TileScheduler`` with the key tiles of each key/value head. A
    tile visits the query heads that share the head in turn, so that dK and dV need no reduction over them. Its dK and
    dV leave through the memory of dS and dQ, while the keys and queries of the next tile are loaded. With
    `divides_heads` there are tiles for each part of these heads, and dK and dV leave from registers, in float32. With
    `walks_back` it is a ``WalkingBackwardKernel``.
    """

    def __init__(self, config: BackwardConfig):
        validate_backward_config(config)
        self.config, self.batch = config, batch_of(config)
        self.dtype = DSL_DTYPES[config.dtype]

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
        mCounter: cute.Tensor,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. mQ, mK, mV, mdO, mdK, mdV are (batch, seqlen, heads, head_dim); mLSE (in base 2) and mDelta float32
        (batch, heads, padded seqlen_q), or with ``one_tile`` mLSE in base e, not padded, and O as mDelta; mdQ float32
        (batch, heads, query tiles, warpgroups, words), compact, or with ``strips`` or ``one_tile`` like mQ; mCounter
        int32, zero: two for the scheduler, zero again afterwards, and with ``ordered`` one for each query tile of all
        heads; with ``clears_ahead`` mdQ may hold anything, and mCounter is that of ``Clearing``."""
        tensors = (mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter)
        self._launch(tensors, NO_OPTIONS, softmax_scale, num_ctas, stream)

    def _launch(
        self, tensors: tuple, options: BackwardOptions, softmax_scale: Float32, num_ctas: Int32, stream
    ) -> None:
        """``tensors`` are those of ``__call__`` in their order."""
        mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter = tensors
        c, batch = self.config, self.batch
        mQ, mK, mV, mdO = (batch.view(t) for t in (mQ, mK, mV, mdO))
        view = batch.view_divided if c.divides_heads else batch.view
        mdK, mdV = view(mdK), view(mdV)
        keys = batch.divided_keys(mK, mdK)
        mLSE = batch.view_vector(mLSE)
        mDelta = batch.view(mDelta) if const_expr(c.one_tile) else batch.view_vector(mDelta)
        sizes = batch.sizes(mQ, keys, mdQ, window_of(c.causal, options.window), num_ctas)
        layouts = self._smem_layouts()
        vector = cute.make_layout((c.tile_m, c.stages))
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        loads = BackwardOperands(
            cpasync.make_tiled_tma_atom(load, mQ, layouts.q, (c.tile_m, c.head_dim)),
            cpasync.make_tiled_tma_atom(load, mK, layouts.k, (c.tile_n // c.key_parts, c.head_dim)),
            cpasync.make_tiled_tma_atom(load, mV, layouts.v, (c.tile_n // c.key_parts, c.head_dim_v)),
            cpasync.make_tiled_tma_atom(load, mdO, layouts.do, (c.tile_m, c.head_dim_v)),
            cpasync.make_tiled_tma_atom(load, mLSE, vector, (c.tile_m,)),
            self._delta_atom(load, mDelta, layouts.do, vector),
        )
        stores, divided, divisor = (), (), ()
        if const_expr(c.divides_heads):
            divided = mdK, mdV
            divisor = divided_heads(c, (mQ.shape[2], mK.shape[2], keys.shape[2]))
        else:
            stores = (
                cpasync.make_tiled_tma_atom(store, mdK, layouts.dk, (WARPGROUP_ROWS, c.head_dim)),
                cpasync.make_tiled_tma_atom(store, mdV, layouts.dv, (WARPGROUP_ROWS, c.head_dim_v)),
            )
        if const_expr(c.writes_dq):
            tile = (WARPGROUP_ROWS, c.dq_columns)
            stores = *stores, cpasync.make_tiled_tma_atom(store, batch.view(mdQ), layouts.dq, tile)
        self.kernel(
            tuple(info.atom for info in (*loads, *stores)),
            (*(info.tma_tensor for info in (*loads, *stores)), *divided),
            batch.view_sums(mdQ),
            mCounter,
            softmax_scale,
            options.window,
            batch.lengths(mQ, mK, options.plan),
            mQ.shape[2] // keys.shape[2],
            sizes,
            options.changes,
            options.lists,
            divisor,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,
        tensors: tuple,
        mdQ: cute.Tensor,
        mCounter: cute.Tensor,
        softmax_scale: Float32,
        sides: tuple,
        lengths: tuple,
        heads_per_kv_head: Int32,
        sizes: tuple[tuple, tuple],
        changes: tuple,
        lists: tuple,
        divisor: tuple,
    ):
        """One CTA: make shared memory, barriers and pipelines, then part into the roles of the table.

        ``atoms`` and ``tensors`` are those of TMA: Q, K, V, dO, LSE and delta to load, then dK, dV and what else is
        stored; with ``divides_heads`` the tensors end with dK and dV themselves, and ``divisor`` is that of
        ``divided_heads``. Where parts are unequal ``heads_per_kv_head`` is rounded down, and for the order of tiles
        alone. ``sides`` are those of a window, ``lengths`` and ``sizes`` what ``batch`` makes of sequence lengths and
        the grid; ``changes`` and ``lists`` are fields of ``BackwardOptions``.
        """
        c = self.config
        # Shared memory, and the barriers in it.
        layouts = self._smem_layouts()
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage(layouts))
        sQ, sK, sV, sdO, sdS = (
            memory.get_tensor(layout.outer, swizzle=layout.inner)
            for memory, layout in zip(
                (storage.sQ, storage.sK, storage.sV, storage.sdO, storage.sdS), layouts[:5], strict=True
            )
        )
        vector = cute.make_layout((c.tile_m, c.stages))
        sLSE, sDelta = storage.sLSE.get_tensor(vector), self._delta_memory(storage, layouts.do, vector)

        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        # Which key tiles there are, and the query tiles that each visits.
        kind = ResidentTileScheduler if const_expr(c.ordered) else TileScheduler
        scheduler = kind(
            mCounter,
            storage.mailbox.get_tensor(cute.make_layout(MAILBOX_STAGES * self.batch.mail_words)),
            TileScheduler.make_pipe(storage.barriers_mailbox.data_ptr(), self._receiving_warps()),
            cute.arch.lane_idx(),
        )
        pipes = self._make_pipelines(storage)
        window = window_of(c.causal, sides)
        work = self.batch.work(window, scheduler, lengths, heads_per_kv_head, sizes)
        work = replace(work, lists=lists, query_heads=query_heads(heads_per_kv_head, divisor))
        dq_memory = storage.sdQ.get_tensor(cute.make_layout((c.staged_words, c.stages, c.consumers)))

        # From here on each warp has its role. Registers go from the producer's warps to the consumers'.
        if warp_idx < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(c.registers.producer)
            if warp_idx == 0:
                smem = (sQ, sK, sV, sdO, sLSE, sDelta)
                operands = BackwardOperands(*map(TmaOperand, atoms[:6], tensors[:6], smem))
                sums = (mdQ,) if const_expr(c.fetches_sums) else ()
                clearing = (Clearing(c, mdQ, mCounter),) if const_expr(c.clears_ahead) else ()
                self._produce(work, BackwardProducer(c, operands, pipes), sums, clearing)
            if const_expr(c.clears_ahead):
                if warp_idx == 1:
                    Clearing(c, mdQ, mCounter).run(work)
            if const_expr(c.ordered):
                if warp_idx - 1 < c.stages and warp_idx > 0:
                    behind = mCounter.iterator + SCHEDULER_WORDS
                    added = cute.make_tensor(behind, cute.make_layout(mdQ.shape[2]))
                    Courier(c, pipes.ds, dq_memory, mdQ, added, warp_idx - 1).run(work)
        else:
            cute.arch.setmaxregister_increase(c.registers.consumer)
            wg = warp_idx // WARPS_PER_WARPGROUP - 1
            thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
            mmas = self._tiled_mmas()
            sdS_wg = cute.local_tile(sdS, (WARPGROUP_ROWS, c.tile_m), (wg, 0, None))
            dq = self._gradient_of_q(
                mmas,
                pipes,
                (dq_memory[None, None, wg], mdQ, wg, thread),
                (atoms[8:], tensors[8:], softmax_scale),
            )
            fragments = self._fragments(mmas, (sQ, sK, sV, sdO, sdS), wg)
            parts = (c, mmas, fragments, pipes, (sLSE, sDelta), sdS_wg, dq, thread)
            consumer = self._make_consumer(parts, sdO, storage)
            rules = key_rules(c, softmax_scale, changes)
            memory = (storage.sdS.data_ptr(), storage.sdQ.data_ptr())
            targets = (atoms[6:], tensors[6:])
            factors = tuple(each.factor for each in rules.dropout)
            epilogue = self._make_epilogue(c, layouts, memory, targets, (softmax_scale, factors), wg)
            self._consume(work, consumer, epilogue, rules, warp_idx)

    def _gradient_of_q(
        self, mmas: BackwardMmas, pipes: BackwardPipelines, memory: tuple, store: tuple
    ) -> GradientOfQ:
        """What becomes of dQ. ``memory`` is staging and global memory, with the warpgroup and the thread; ``store`` has
        the TMA atoms and tensors of dQ, of which there are some with ``strips`` alone, and its factor."""
        if self.config.ordered:
            return OrderedGradientOfQ(pipes.ds, self.config, mmas.used_dq, *memory)
        return GradientOfQ(self.config, mmas.used_dq, *memory)

    def _delta_atom(self, load, mDelta: cute.Tensor, tile: cute.ComposedLayout, vector: cute.Layout):
        """The TMA atom and tensor of delta; ``tile`` is the layout of dO in shared memory."""
        return cpasync.make_tiled_tma_atom(load, mDelta, vector, (self.config.tile_m,))

    def _delta_memory(self, storage, tile: cute.ComposedLayout, vector: cute.Layout) -> cute.Tensor:
        """Where that lies in shared memory."""
        return storage.sDelta.get_tensor(vector)

    def _make_epilogue(self, *parts) -> BackwardEpilogue:
        return (DividedEpilogue if self.config.divides_heads else BackwardEpilogue)(*parts)

    def _make_consumer(self, parts: tuple, sdO: cute.Tensor, storage) -> BackwardConsumer:
        return BackwardConsumer(*parts)

    def _query_tile(self, tile: Int32, place: tuple[Int32, Int32, Int32]) -> Int32 | QueryTile:
        """What ``dq`` is told of a query tile, by its number among all heads and batches or its place: m_block, head
        and batch."""
        return tile

    @cute.jit
    def _produce(self, work: BackwardWork, producer: BackwardProducer, sums: tuple, clearing: tuple = ()):
        """The producer warp: claims key tiles and loads them and their queries. ``sums`` is mdQ, where its tiles are
        brought to L2, or empty; ``clearing`` is what they are awaited from, or empty."""
        loading = pipeline.PipelineUserType.Producer
        kv_state = pipeline.make_pipeline_state(loading, 1)
        mail_state = pipeline.make_pipeline_state(loading, MAILBOX_STAGES)
        state = pipeline.make_pipeline_state(loading, self.config.stages)
        tile = work.scheduler.first()
        if const_expr(self.config.ordered):
            tile = work.scheduler.claim(mail_state)
            mail_state.advance()
        sent = Int32(0)
        while tile < work.tiles_to_load:
            n_block, head_kv, batch = work.coordinates(tile)
            work.tell((n_block, head_kv, batch), sent)
            seqlens = work.seqlens.of(batch)
            producer.load_keys(
                n_block, work.query_heads.head_of_keys(head_kv), seqlens, work.state_of_keys(kv_state, sent)
            )
            sent += 1
            kv_state.advance()
            for each in clearing:
                each.wait(work, head_kv, batch)
            visit = work.visit(n_block, batch)
            for i in cutlass.range(work.query_heads.count(head_kv), unroll=1):
                head = work.query_heads.first(head_kv) + i
                of_head = work.visit_of_head(visit, (batch, head, n_block))
                first_tile = work.first_tile(head_kv, batch) + i * work.m_end
                of_head_sums = tuple((mdQ, first_tile) for mdQ in sums)
                state = producer.load_queries(head, seqlens, of_head, state, of_head_sums)
            tile = work.claim(mail_state)
            mail_state.advance()
        work.finish(sent)

    @cute.jit
    def _consume(
        self,
        work: BackwardWork,
        consumer: BackwardConsumer,
        epilogue: BackwardEpilogue,
        rules: KeyRules,
        warp_idx: Int32,
    ):
        """A consumer warpgroup: the gradients of its keys of each tile."""
        c, receiving = self.config, pipeline.PipelineUserType.Consumer
        lane = cute.arch.lane_idx()
        wg = warp_idx // WARPS_PER_WARPGROUP - 1
        key_in_tile = wg * WARPGROUP_ROWS + first_row_of_thread(warp_idx % WARPS_PER_WARPGROUP, lane)
        state = pipeline.make_pipeline_state(receiving, c.stages)
        visited = Int32(0)
        consumer.dq.clear()
        tile = work.first()
        mails_before = 0
        if const_expr(c.ordered):
            tile, mails_before = work.scheduler.receive(state_of(MAILBOX_STAGES, Int32(0))), 1
        while tile < work.end:
            n_block, head_kv, batch = work.place(tile, visited)
            visit = work.visit(n_block, batch)
            key = n_block * c.tile_n + key_in_tile
            seqlens = work.seqlens.of(batch)
            mask = KeyMask(work.window, c.tile_m, seqlens, key, first_column_of_thread(lane))
            consumer.clear()
            kv_state = state_of(1, visited)
            consumer.pipes.kv.consumer_wait(kv_state)
            for i in cutlass.range(work.query_heads.count(head_kv), unroll=1):
                first_tile = work.first_tile(head_kv, batch) + i * work.m_end
                head = work.query_heads.first(head_kv) + i
                scores = rules.for_head(mask, head, batch)
                of_head = work.visit_of_head(visit, (batch, head, n_block))
                # Query tiles that a causal mask or the end of the sequence cuts, those that see all keys of the tile,
                # and those from which a window's left side cuts some.
                for place in cutlass.range(of_head.begin, of_head.unmasked, unroll=1):
                    m_block, in_block = of_head.number(place), of_head.masked(scores, place)
                    in_head = m_block, head, batch
                    if const_expr(c.hides_blocks and work.window.has_right):
                        if work.comes_before(m_block, n_block * c.consumers + wg, batch):
                            consumer.hidden_block(self._query_tile(first_tile + m_block, in_head), state)
                        else:
                            of_dq = self._query_tile(first_tile + m_block, in_head)
                            consumer.block(in_block, m_block, of_dq, state, True)
                    else:
                        of_dq = self._query_tile(first_tile + m_block, in_head)
                        consumer.block(in_block, m_block, of_dq, state, not c.block_lists)
                    state.advance()
                for place in cutlass.range(of_head.unmasked, of_head.left_masked, unroll=1):
                    m_block, in_block = of_head.number(place), of_head.fully_seen(scores)
                    of_dq = self._query_tile(first_tile + m_block, (m_block, head, batch))
                    consumer.block(in_block, m_block, of_dq, state, False)
                    state.advance()
                if const_expr(work.window.has_left):
                    for m_block in cutlass.range(visit.left_masked, visit.end, unroll=1):
                        if const_expr(c.hides_blocks):
                            if work.comes_behind(m_block, n_block * c.consumers + wg, batch):
                                consumer.hidden_block(first_tile + m_block, state)
                            else:
                                consumer.block(scores, m_block, first_tile + m_block, state, True)
                        else:
                            consumer.block(scores, m_block, first_tile + m_block, state, True)
                        state.advance()
            consumer.pipes.kv.consumer_release(kv_state)
            last = self._last_block(state)
            epilogue.store(consumer, last, (n_block, head_kv, seqlens))
            tile = work.next(visited, mails_before)
            visited += 1
        consumer.dq.finish(previous_stage(c, state.index), state)

    def _last_block(self, state: PipelineState) -> PipelineState:
        """The state before ``state``."""
        wraps = Int32(state.index == 0)
        index = previous_stage(self.config, state.index)
        return PipelineState(state.stages, state.count - 1, index, state.phase ^ wraps)

    def _receiving_warps(self) -> int:
        """Warps that are told which tile comes next: the consumers', and the couriers."""
        return WARPS_PER_WARPGROUP * self.config.consumers + (
            self.config.stages if self.config.ordered else 0
        )

    def _smem_layouts(self) -> BackwardLayouts:
        c = self.config
        keys = c.tile_n // c.key_parts
        return BackwardLayouts(
            q=swizzled_layout(c.tile_m, c.head_dim, c.stages, self.dtype),
            k=swizzled_layout(keys, c.head_dim, c.key_parts, self.dtype, part=c.k_columns),
            v=swizzled_layout(keys, c.head_dim_v, c.key_parts, self.dtype),
            do=swizzled_layout(c.tile_m, c.head_dim_v, c.stages, self.dtype),
            ds=swizzled_layout(c.tile_n, c.tile_m, c.stages, self.dtype),
            dk=swizzled_layout(WARPGROUP_ROWS, c.head_dim, 1, self.dtype),
            dv=swizzled_layout(WARPGROUP_ROWS, c.head_dim_v, 1, self.dtype),
            dq=swizzled_layout(WARPGROUP_ROWS, c.k_columns, 1, self.dtype),
        )

    def _shared_storage(self, layouts: BackwardLayouts) -> type:
        c = self.config
        vector = c.tile_m * c.stages
        vectors_of_delta = 2 * c.tile_m * c.consumers if c.one_tile else vector
        o_elements = cute.cosize(layouts.do.outer) if c.one_tile else 0

        @cute.struct
        class SharedStorage:
            barriers_kv: cute.struct.MemRange[cutlass.Int64, 2 * c.key_parts]
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            barriers_do: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            barriers_ds: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            barriers_mailbox: cute.struct.MemRange[cutlass.Int64, 2 * MAILBOX_STAGES]
            mailbox: cute.struct.Align[
                cute.struct.MemRange[Int32, MAILBOX_STAGES * self.batch.mail_words], 16
            ]
            sLSE: cute.struct.Align[cute.struct.MemRange[Float32, vector], 128]
            sDelta: cute.struct.Align[cute.struct.MemRange[Float32, vectors_of_delta], 128]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layouts.q.outer)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layouts.k.outer)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layouts.v.outer)], 1024]
            sdO: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layouts.do.outer)], 1024]
            sdS: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layouts.ds.outer)], 1024]
            sdQ: cute.struct.Align[
                cute.struct.MemRange[Float32, c.staged_words * c.stages * c.consumers], 1024
            ]
            sO: cute.struct.Align[cute.struct.MemRange[self.dtype, o_elements], 1024]

        return SharedStorage

    def _make_pipelines(self, storage) -> BackwardPipelines:
        c = self.config
        warps = pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS_PER_WARPGROUP * c.consumers)
        # Of a row: its part of O, or its delta.
        bytes_beside_do = 2 * c.head_dim_v if c.one_tile else 4

        def create(barriers, stages, num_bytes):
            return pipeline.PipelineTmaAsync.create(
                num_stages=stages,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
                consumer_group=warps,
                tx_count=num_bytes,
                barrier_storage=barriers.data_ptr(),
                defer_sync=True,
            )

        pipes = BackwardPipelines(
            create(
                storage.barriers_kv, c.key_parts, 2 * c.tile_n // c.key_parts * (c.head_dim + c.head_dim_v)
            ),
            create(storage.barriers_q, c.stages, c.tile_m * (2 * c.head_dim + 4)),
            create(storage.barriers_do, c.stages, c.tile_m * (2 * c.head_dim_v + bytes_beside_do)),
            pipeline.PipelineAsync.create(
                num_stages=c.stages,
                producer_group=warps,
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
                barrier_storage=storage.barriers_ds.data_ptr(),
                defer_sync=True,
            ),
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return pipes

    def _tiled_mmas(self) -> BackwardMmas:
        """Each for one warpgroup."""
        c, dtype = self.config, self.dtype
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def make(a_major, b_major, columns, source=warpgroup.OperandSource.SMEM):
            return hopper_helpers.make_trivial_tiled_mma(
                dtype, dtype, a_major, b_major, Float32, (1, 1, 1), (WARPGROUP_ROWS, columns), a_source=source
            )

        registers = warpgroup.OperandSource.RMEM
        return BackwardMmas(
            s=make(k_major, k_major, c.tile_m),
            dp=make(k_major, k_major, c.tile_m),
            dv=make(k_major, mn_major, c.head_dim_v, registers),
            dk=make(k_major, mn_major, c.head_dim, registers),
            dq=make(mn_major, mn_major, c.k_columns),
            used_dv=make(k_major, mn_major, c.used_columns_v, registers),
            used_dk=make(k_major, mn_major, c.used_columns_k, registers),
            used_dq=make(mn_major, mn_major, c.dq_columns),
        )

    def _fragments(self, mmas: BackwardMmas, smem: tuple, wg: Int32) -> BackwardFragments:
        c = self.config
        sQ, sK, sV, sdO, sdS = smem
        row, column = (Int32(0), wg) if const_expr(c.splits_columns) else (wg, Int32(0))
        keys = c.tile_n // c.key_parts
        # Of K and V in parts that of the warpgroup comes first, and then that of the other one.
        places = [(wg, 0), (1 - wg, 0)] if const_expr(c.key_parts > 1) else [(0, wg)]
        k_wg, v_wg = (
            cute.local_tile(x[None, None, places[0][0]], (WARPGROUP_ROWS, columns), (places[0][1], 0))
            for x, columns in ((sK, c.head_dim), (sV, c.head_dim_v))
        )
        ds = [
            cute.local_tile(transposed(sdS), (WARPGROUP_ROWS, keys), (row, part, None)) for part, _ in places
        ]
        k_t = [
            cute.local_tile(transposed(sK)[None, None, part], (c.k_columns, keys), (column, 0))
            for part, _ in places
        ]

        def a(mma, tensor):
            return mma.make_fragment_A(mma.get_slice(0).partition_A(tensor))

        def b(mma, tensor):
            return mma.make_fragment_B(mma.get_slice(0).partition_B(tensor))

        return BackwardFragments(
            k=a(mmas.s, k_wg),
            q=b(mmas.s, sQ),
            v=a(mmas.dp, v_wg),
            do=b(mmas.dp, sdO),
            do_t=b(mmas.dv, transposed(sdO)),
            q_t=b(mmas.dk, transposed(sQ)),
            ds=tuple(a(mmas.dq, x) for x in ds),
            k_t=tuple(b(mmas.dq, x) for x in k_t),
        )


class GeneralBackwardKernel(BackwardKernel):
    """``BackwardKernel`` with whatever its config asks for beside a causal mask."""

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
        mCounter: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        attention_chunk: Int32 | None,
        plan: cute.Tensor | None,
        sequences: Int32 | None,
        softcap: Float32 | None,
        alibi_slopes: cute.Tensor | None,
        philox: cute.Tensor | None,
        kept: Int32 | None,
        *captured_ctas_and_stream,
    ):
        """Launch. What the config has no use for is None; ``BackwardOptions`` says what the rest is. Then come the
        tensors that the config's functions read, with ``block_lists`` the lists, num_ctas and the stream."""
        *captured, num_ctas, stream = captured_ctas_and_stream
        tensors = (mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter)
        given = (
            (window_left, window_right, attention_chunk),
            (plan, sequences),
            softcap,
            alibi_slopes,
            (philox, kept),
            tuple(captured),
        )
        self._launch(tensors, BackwardOptions.of(self.config, *given), softmax_scale, num_ctas, stream)
