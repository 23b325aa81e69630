"""The Hopper backward kernel for wide heads: two CTAs of a cluster work on the same queries."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp
from cutlass.utils import hopper_helpers

from cute_kernels.backward.step import SCHEDULER_WORDS
from cute_kernels.dropout import multiply_all
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import first_column_of_thread, first_row_of_thread
from cute_kernels.key_mask import KeyMask
from cute_kernels.key_score_tile import KeyRules
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.problem import DENSE
from cute_kernels.query_range import QueryRange
from cute_kernels.seqlen import DenseSeqlens, SeqlenInfo
from cute_kernels.window import window_of
from hopper.backward.barriers import sync_consumers
from hopper.backward.config import CLUSTER_CTAS, PairedBackwardConfig, validate_backward_config
from hopper.backward.epilogue import divided_part, store_words
from hopper.backward.exchange import Exchange, PairPipelines
from hopper.backward.kernel import transposed
from hopper.backward.options import NO_OPTIONS, BackwardOptions, key_rules
from hopper.backward.pair_batch import pair_batch_of
from hopper.backward.pair_consumer import GradientConsumer, PairConsumer, PairFragments, ScoresConsumer
from hopper.backward.pair_producer import PairProducer
from hopper.backward.pair_walk import (
    Problem,
    keep_turns_of_list,
    keep_turns_of_range,
    load_listed,
    load_range,
    walk_listed,
    walk_range,
)
from hopper.backward.parts import divided_heads, query_heads
from hopper.backward.producer import BackwardOperands
from hopper.backward.turn_keeper import TurnKeeper
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.tiles import WARPS_PER_WARPGROUP, TmaOperand, swizzled_layout


class PairMmas(NamedTuple):
    """The tiled MMAs, each for one warpgroup: S^T = K Q^T, dP^T = V dO^T, and some columns of dV += P^T dO, of
    dK += dS^T Q and of dQ = dS K."""

    s: cute.TiledMma
    dp: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma


class PairLayouts(NamedTuple):
    """Staged, swizzled layouts in shared memory; the last mode of each is its stage. With dropout, and where the config
    ``publishes_factors``, ``p`` has one more: what dS is made of."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    do: cute.ComposedLayout
    other_k: cute.ComposedLayout
    p: cute.ComposedLayout
    ds: cute.ComposedLayout
    other_ds: cute.ComposedLayout


class PairedBackwardKernel:
    """dQ, dK and dV of softmax(softmax_scale Q K^T) V for wide heads, on sm_90a (FlashAttention-2, algorithm 2).

    dK and dV of 128 keys would fill all registers of an SM. So a cluster of two CTAs owns 128 keys, 64 each, and the
    two consumer warpgroups of a CTA half of the columns each. Loaded by multicast, Q and dO cross the L2 cache once for
    both; with dS exchanged, each CTA adds half of the columns of dQ, of all 128 keys. Names in backticks are fields of
    ``PairedBackwardConfig``.

    | role | warps | registers a thread | does |
    |---|---|---|---|
    | producer | 0 | `registers.producer` | TMA: K, V; half of each Q, dO for both CTAs; LSE, delta |
    | turns | 1, 2, with `ordered` (3 idle) | `registers.producer` | says when a warpgroup adds dQ (``TurnKeeper``) |
    | scores | 4 .. 7 | `registers.consumer` | S, P; half of dV and dK, a quarter of dQ |
    | gradients | 8 .. 11 | `registers.consumer` | dP, dS; the other halves, another quarter |

    | pipeline | stages | what a full stage holds | empty when |
    |---|---|---|---|
    | kv | 1 | K and V of the CTA's keys, and this CTA's columns of the other's K | |
    | q | `stages` | Q of a query tile and its LSE | dK of both CTAs has read it |
    | do | 1 | dO of a query tile and its delta | dV of both CTAs has read it |
    | p | 1 | P^T of the CTA's keys | dV and the gradients' warpgroup have read it |
    | ds | `stages` | dS^T of the CTA's keys, and of the other's (``Exchange``) | dK and dQ of both CTAs have |

    | named barrier | id | threads | orders |
    |---|---|---|---|
    | CONSUMERS | 1 | all consumers | K and V, read for the last time before dK and dV are staged in their place |
    """

    def __init__(self, config: PairedBackwardConfig):
        validate_backward_config(config)
        self.config, self.batch = config, pair_batch_of(config)
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
        stream,
    ):
        """Launch. The arguments are those of ``BackwardKernel``; mdQ has a part for each warpgroup of the cluster. Of
        mCounter the SCHEDULER_WORDS are not used, and with ``ordered`` there is one for each part."""
        tensors = (mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter)
        self._launch(tensors, NO_OPTIONS, softmax_scale, stream)

    def _launch(self, tensors: tuple, options: BackwardOptions, softmax_scale: Float32, stream) -> None:
        """``tensors`` are those of ``__call__`` in their order."""
        mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter = tensors
        c, batch = self.config, self.batch
        mQ, mK, mV, mdO = (batch.view(t) for t in (mQ, mK, mV, mdO))
        view = batch.view_divided if c.divides_heads else batch.view
        mdK, mdV = view(mdK), view(mdV)
        keys = batch.divided_keys(mK, mdK)
        mLSE, mDelta = (batch.view_vector(t) for t in (mLSE, mDelta))
        m_ends, ordered = batch.m_ends(mdQ), batch.ordered_tiles(mQ, keys)
        mdQ = batch.view_sums(mdQ)
        mTurns = cute.make_tensor(mCounter.iterator + SCHEDULER_WORDS, cute.make_layout(mdQ.shape[1:]))
        layouts = self._smem_layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
        vectors = [cute.make_layout((c.tile_m, c.stages_of(pipe))) for pipe in ("q", "do")]
        rows_k, rows_v = (c.keys, c.head_dim), (c.keys, c.head_dim_v)
        columns = (c.keys, c.head_dim // CLUSTER_CTAS)
        copies = (
            cpasync.make_tiled_tma_atom(multicast, mQ, layouts.q, (c.tile_m, c.head_dim), CLUSTER_CTAS),
            cpasync.make_tiled_tma_atom(load, mK, layouts.k, rows_k),
            cpasync.make_tiled_tma_atom(load, mV, layouts.v, rows_v),
            cpasync.make_tiled_tma_atom(multicast, mdO, layouts.do, (c.tile_m, c.head_dim_v), CLUSTER_CTAS),
            cpasync.make_tiled_tma_atom(load, mLSE, vectors[0], (c.tile_m,)),
            cpasync.make_tiled_tma_atom(load, mDelta, vectors[1], (c.tile_m,)),
            cpasync.make_tiled_tma_atom(load, mK, layouts.other_k, columns),
        )
        divided, divisor = (), ()
        if const_expr(c.divides_heads):
            divided = mdK, mdV
            divisor = divided_heads(c, (mQ.shape[2], mK.shape[2], keys.shape[2]))
        else:
            copies = (
                *copies,
                cpasync.make_tiled_tma_atom(store, mdK, layouts.k, rows_k),
                cpasync.make_tiled_tma_atom(store, mdV, layouts.v, rows_v),
            )
        self.kernel(
            tuple(copy.atom for copy in copies),
            (*(copy.tma_tensor for copy in copies), *divided),
            mdQ,
            mTurns,
            softmax_scale,
            options.window,
            batch.lengths(mQ, mK, options.plan),
            mQ.shape[2] // keys.shape[2],
            m_ends,
            options.changes,
            options.lists,
            ordered,
            divisor,
        ).launch(
            grid=batch.grid(keys, options.plan, ordered),
            block=(c.threads, 1, 1),
            cluster=(CLUSTER_CTAS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,
        tensors: tuple,
        mdQ: cute.Tensor,
        mTurns: cute.Tensor,
        softmax_scale: Float32,
        sides: tuple,
        lengths: tuple,
        heads_per_kv_head: Int32,
        m_ends: tuple,
        changes: tuple,
        lists: tuple,
        ordered: tuple,
        divisor: tuple,
    ):
        c = self.config
        layouts = self._smem_layouts()
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage(layouts))
        smem = PairLayouts(
            *(
                getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
                for name, layout in layouts._asdict().items()
            )
        )
        sLSE, sDelta = (
            memory.get_tensor(cute.make_layout((c.tile_m, c.stages_of(pipe))))
            for memory, pipe in ((storage.lse, "q"), (storage.delta, "do"))
        )
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        x, head_kv, batch = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        window = window_of(c.causal, sides)
        queries = QueryRange(c.tile_m, c.tile_n, window, c.least_blocks, c.stores_first)

        heads = query_heads(heads_per_kv_head, divisor)
        shared = softmax_scale, heads, rank, queries, m_ends, changes, lists
        if const_expr(c.layout == DENSE and (c.has_sections or c.shortens)):
            problem = self._place_in_order(shared, lengths, ordered)
        elif const_expr(c.layout == DENSE):
            problem = self._place(shared, x, head_kv, DenseSeqlens(*lengths).of(batch))
        pipes = self._make_pipelines(storage)
        barriers = (
            storage.barriers_ds.data_ptr(),
            storage.barriers_ds.data_ptr() + c.stages,
            storage.barriers_ds.data_ptr() + 2 * c.stages,
        )
        exchange = Exchange(c, barriers, (smem.ds, smem.other_ds), rank)
        if cute.arch.thread_idx()[0] == 0:
            exchange.initialize()
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        parts = (smem, sLSE, sDelta), (atoms, tensors), (pipes, exchange), (mdQ, mTurns), warp_idx
        if const_expr(c.layout == DENSE):
            self._run(problem, *parts)
        else:
            plan, (number, heads) = lengths[0], self.batch.number()
            # The grid has a cluster for each tile that there may be; the others have nothing to do.
            if number < PackedTileOrder.count(plan, heads):
                self._run_packed(shared, lengths, heads_per_kv_head, parts)

    @cute.jit
    def _run_packed(self, shared: tuple, lengths: tuple, heads_per_kv_head: Int32, parts: tuple):
        """The roles of a CTA that has a tile."""
        pair, head_kv, batch = self.batch.place(lengths, *self.batch.number(), heads_per_kv_head)
        n_block, seqlens = CLUSTER_CTAS * pair + shared[2], PackedSeqlens(lengths[0]).of(batch)
        self._run(self._place(shared, n_block, head_kv, seqlens), *parts)

    def _place_in_order(self, shared: tuple, lengths: tuple, ordered: tuple) -> Problem:
        """The problem of a CTA of a grid in an order. With sections it begins from the last key tiles on; so that
        ``_place`` has them from the first one on, they are counted from the end."""
        x, _, _ = cute.arch.block_idx()
        tile, head_kv, batch = self.batch.order(ordered).coordinates(x // CLUSTER_CTAS)
        if const_expr(self.config.has_sections):
            tile = ordered[0] - 1 - tile
        n_block = CLUSTER_CTAS * tile + shared[2]
        return self._place(shared, n_block, head_kv, DenseSeqlens(*lengths).of(batch))

    def _place(self, shared: tuple, n_block: Int32, head_kv: Int32, seqlens: SeqlenInfo) -> Problem:
        """The problem of a CTA; ``shared`` is what all have of it."""
        softmax_scale, heads, *rest = shared
        p = Problem(softmax_scale, seqlens, heads, n_block, head_kv, *rest)
        if self.config.ordered and p.queries.last_keys_first:
            # The last keys first: they are the first to add to their queries, and wait for none.
            p = p._replace(n_block=CLUSTER_CTAS * (p.pairs - 1 - p.pair) + p.rank)
        return p

    @cute.jit
    def _run(
        self,
        problem: Problem,
        memory: tuple,
        copies: tuple,
        between: tuple[PairPipelines, Exchange],
        sums: tuple,
        warp_idx: Int32,
    ):
        """The roles of a CTA. ``memory`` is shared: of tiles, LSE and delta. ``copies`` are TMA atoms and their
        tensors, ``between`` what hands blocks from one role to another, ``sums`` mdQ and the counts of its turns."""
        c, rank = self.config, problem.rank
        (smem, sLSE, sDelta), (atoms, tensors), (mdQ, mTurns) = memory, copies, sums
        pipes, exchange = between
        batch = self.batch.of_sums(problem.seqlens)
        if warp_idx < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(c.registers.producer)
            if warp_idx == 0:
                targets = (smem.q, smem.k, smem.v, smem.do, sLSE, sDelta)
                operands = BackwardOperands(*map(TmaOperand, atoms[:6], tensors[:6], targets))
                other_k = TmaOperand(atoms[6], tensors[6], smem.other_k)
                self._produce(PairProducer(c, operands, other_k, pipes, rank), problem)
            for wg, turns in enumerate(pipes.turns):
                if warp_idx == 1 + wg:
                    added = mTurns[rank * c.consumers + wg, None, batch]
                    self._keep_turns(TurnKeeper(turns, added, c.layout != DENSE), problem)
        else:
            cute.arch.setmaxregister_increase(c.registers.consumer)
            wg = warp_idx // WARPS_PER_WARPGROUP - 1
            thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
            mmas = self._tiled_mmas()
            part = rank * c.consumers + wg
            shared = (
                c,
                mmas,
                self._fragments(mmas, smem, rank, wg),
                pipes,
                exchange,
                mdQ[None, part, None, batch],
            )
            stores = (atoms[7:], tensors[7:])
            if wg == 0:
                rules = key_rules(c, problem.softmax_scale, problem.changes)
                consumer = ScoresConsumer(sLSE, smem.p, *shared, pipes.turns[:1], thread)
                self._consume(consumer, rules, problem, smem, stores, 0)
            else:
                rules = key_rules(c, problem.softmax_scale, problem.changes)
                consumer = GradientConsumer(sDelta, sLSE, smem.p, *shared, pipes.turns[1:], thread)
                self._consume(consumer, rules, problem, smem, stores, 1)
        # The other CTA may still send to this one's shared memory, or arrive at a barrier in it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _produce(self, producer: PairProducer, problem: Problem):
        if const_expr(self.config.block_lists):
            load_listed(producer, problem)
        else:
            load_range(producer, problem)

    @cute.jit
    def _keep_turns(self, keeper: TurnKeeper, problem: Problem):
        if const_expr(self.config.block_lists):
            keep_turns_of_list(keeper, problem)
        else:
            keep_turns_of_range(keeper, problem)

    @cute.jit
    def _consume(
        self,
        consumer: PairConsumer,
        rules: KeyRules,
        problem: Problem,
        smem: PairLayouts,
        stores: tuple,
        wg: cutlass.Constexpr[int],
    ):
        """dK and dV of the keys, from all their query tiles, to global memory."""
        p, c = problem, self.config
        lane, warp_in_group = cute.arch.lane_idx(), cute.arch.warp_idx() % WARPS_PER_WARPGROUP
        key = p.n_block * c.keys + first_row_of_thread(warp_in_group, lane)
        mask = KeyMask(p.queries.window, c.tile_m, p.seqlens, key, first_column_of_thread(lane))
        if const_expr(c.block_lists):
            walk_listed(consumer, rules, mask, p)
        else:
            walk_range(consumer, rules, mask, p)
        for of_launch in rules.dropout:
            multiply_all(consumer.acc_dV, (of_launch.factor,))
        self._store(consumer, smem, stores, problem, wg)

    @cute.jit
    def _store(
        self,
        consumer: PairConsumer,
        smem: PairLayouts,
        stores: tuple,
        problem: Problem,
        wg: cutlass.Constexpr[int],
    ):
        """dK and dV from registers through the memory of K and V, which both warpgroups have finished with."""
        c, p = self.config, problem
        scaled = consumer.acc_dK.load() * p.softmax_scale
        consumer.acc_dK.store(scaled)
        if const_expr(c.divides_heads):
            part = p.rank + CLUSTER_CTAS * wg
            for i in cutlass.range_constexpr(2):
                target = divided_part(stores[1][i], part, p.pair, p.head_kv, p.seqlens, c.tile_n)
                store_words((consumer.acc_dK, consumer.acc_dV)[i], target, consumer.thread)
        else:
            self._store_rows(consumer, smem, stores, problem, wg)

    @cute.jit
    def _store_rows(
        self,
        consumer: PairConsumer,
        smem: PairLayouts,
        stores: tuple,
        problem: Problem,
        wg: cutlass.Constexpr[int],
    ):
        """In 16 bits."""
        c, p = self.config, problem
        sync_consumers(c)
        accumulators, targets = (consumer.acc_dK, consumer.acc_dV), (smem.k, smem.v)
        mmas, columns = (consumer.mmas.dk, consumer.mmas.dv), (c.head_dim, c.head_dim_v)
        for i in cutlass.range_constexpr(2):
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
            copy = cute.make_tiled_copy_C(atom, mmas[i]).get_slice(consumer.thread)
            rounded = cute.make_rmem_tensor_like(accumulators[i], self.dtype)
            rounded.store(accumulators[i].load().to(self.dtype))
            half = cute.local_tile(targets[i][None, None, 0], (c.keys, columns[i] // c.consumers), (0, wg))
            cute.copy(atom, copy.retile(rounded), copy.partition_D(half))
        cute.arch.fence_view_async_shared()
        sync_consumers(c)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == WARPS_PER_WARPGROUP:
            for i in cutlass.range_constexpr(2):
                operand = TmaOperand(stores[0][i], stores[1][i], targets[i])
                source, target = operand.partition(
                    (c.keys, columns[i]), (p.n_block, 0), p.head_kv, p.seqlens.rows_k
                )
                cute.copy(operand.atom, source[None, 0], target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _smem_layouts(self) -> PairLayouts:
        c = self.config

        half, half_v = c.head_dim // c.consumers, c.head_dim_v // c.consumers

        def layout(rows, columns, stages, part=None):
            return swizzled_layout(rows, columns, stages, self.dtype, part=part)

        return PairLayouts(
            q=layout(c.tile_m, c.head_dim, c.stages_of("q"), half),
            k=layout(c.keys, c.head_dim, 1, c.dq_columns),
            v=layout(c.keys, c.head_dim_v, 1, half_v),
            do=layout(c.tile_m, c.head_dim_v, c.stages_of("do"), half_v),
            other_k=layout(c.keys, c.head_dim // CLUSTER_CTAS, 1, c.dq_columns),
            p=layout(c.keys, c.tile_m, c.buffers_of_p),
            ds=layout(c.keys, c.tile_m, c.stages),
            other_ds=layout(c.keys, c.tile_m, c.stages),
        )

    def _shared_storage(self, layouts: PairLayouts) -> type:
        c = self.config

        def tile(layout):
            return cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout.outer)], 1024]

        def vector(pipe):
            return cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.stages_of(pipe)], 128]

        @cute.struct
        class SharedStorage:
            barriers_kv: cute.struct.MemRange[cutlass.Int64, 2]
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2 * c.stages_of("q")]
            barriers_do: cute.struct.MemRange[cutlass.Int64, 2 * c.stages_of("do")]
            barriers_p: cute.struct.MemRange[cutlass.Int64, 2 * c.stages_of("p")]
            barriers_ds: cute.struct.MemRange[cutlass.Int64, 3 * c.stages]
            barriers_turns: cute.struct.MemRange[cutlass.Int64, 2 * c.consumers * c.ordered]
            lse: vector("q")
            delta: vector("do")
            q: tile(layouts.q)
            k: tile(layouts.k)
            v: tile(layouts.v)
            do: tile(layouts.do)
            other_k: tile(layouts.other_k)
            p: tile(layouts.p)
            ds: tile(layouts.ds)
            other_ds: tile(layouts.other_ds)

        return SharedStorage

    def _make_pipelines(self, storage) -> PairPipelines:
        c = self.config
        threads = pipeline.Agent.Thread
        pair = cute.make_layout((1, 1, CLUSTER_CTAS, 1))
        warps = WARPS_PER_WARPGROUP * c.consumers

        def create(barriers, stages, num_bytes, ctas):
            return pipeline.PipelineTmaAsync.create(
                num_stages=stages,
                producer_group=pipeline.CooperativeGroup(threads),
                consumer_group=pipeline.CooperativeGroup(threads, warps * cute.size(ctas)),
                tx_count=num_bytes,
                barrier_storage=barriers.data_ptr(),
                cta_layout_vmnk=ctas,
                defer_sync=True,
            )

        one = pipeline.CooperativeGroup(threads, WARPS_PER_WARPGROUP)
        keys = c.keys * (c.head_dim + c.head_dim_v + c.head_dim // CLUSTER_CTAS)
        return PairPipelines(
            create(storage.barriers_kv, 1, 2 * keys, cute.make_layout((1, 1, 1, 1))),
            create(storage.barriers_q, c.stages_of("q"), c.tile_m * (2 * c.head_dim + 4), pair),
            create(storage.barriers_do, c.stages_of("do"), c.tile_m * (2 * c.head_dim_v + 4), pair),
            pipeline.PipelineAsync.create(
                num_stages=c.stages_of("p"),
                producer_group=one,
                consumer_group=one,
                barrier_storage=storage.barriers_p.data_ptr(),
                defer_sync=True,
            ),
            tuple(
                pipeline.PipelineAsync.create(
                    num_stages=1,
                    producer_group=pipeline.CooperativeGroup(threads),
                    consumer_group=one,
                    barrier_storage=storage.barriers_turns.data_ptr() + 2 * wg,
                    defer_sync=True,
                )
                for wg in range(c.consumers if c.ordered else 0)
            ),
        )

    def _tiled_mmas(self) -> PairMmas:
        c, dtype = self.config, self.dtype
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def make(a_major, b_major, columns):
            return hopper_helpers.make_trivial_tiled_mma(
                dtype, dtype, a_major, b_major, Float32, (1, 1, 1), (WARPGROUP_ROWS, columns)
            )

        return PairMmas(
            s=make(k_major, k_major, c.tile_m),
            dp=make(k_major, k_major, c.tile_m),
            dv=make(k_major, mn_major, c.head_dim_v // c.consumers),
            dk=make(k_major, mn_major, c.head_dim // c.consumers),
            dq=make(mn_major, mn_major, c.dq_columns),
        )

    def _fragments(self, mmas: PairMmas, smem: PairLayouts, rank: Int32, wg: Int32) -> PairFragments:
        c = self.config
        half, half_v = c.head_dim // c.consumers, c.head_dim_v // c.consumers

        def a(mma, tensor):
            return mma.make_fragment_A(mma.get_slice(0).partition_A(tensor))

        def b(mma, tensor):
            return mma.make_fragment_B(mma.get_slice(0).partition_B(tensor))

        def columns(tensor, width, rows, number):
            """Some columns of a tile, as rows of its transpose; of every stage."""
            return cute.local_tile(transposed(tensor), (width, rows), (number, 0, None))

        k_t = columns(smem.k, c.dq_columns, c.keys, rank * c.consumers + wg)
        other_k_t = columns(smem.other_k, c.dq_columns, c.keys, wg)
        return PairFragments(
            k=a(mmas.s, smem.k[None, None, 0]),
            q=b(mmas.s, smem.q),
            v=a(mmas.dp, smem.v[None, None, 0]),
            do=b(mmas.dp, smem.do),
            p=a(mmas.dv, smem.p),
            do_t=b(mmas.dv, columns(smem.do, half_v, c.tile_m, wg)),
            ds=a(mmas.dk, smem.ds),
            q_t=b(mmas.dk, columns(smem.q, half, c.tile_m, wg)),
            ds_t=a(mmas.dq, transposed(smem.ds)),
            k_t=b(mmas.dq, k_t[None, None, 0]),
            other_ds_t=a(mmas.dq, transposed(smem.other_ds)),
            other_k_t=b(mmas.dq, other_k_t[None, None, 0]),
        )


class GeneralPairedBackwardKernel(PairedBackwardKernel):
    """``PairedBackwardKernel`` with whatever its config asks for beside a causal mask."""

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
        *captured_and_stream,
    ):
        """Launch. What the config has no use for is None; ``BackwardOptions`` says what the rest is. Then come the
        tensors that the config's functions read, with ``block_lists`` the lists, and the stream."""
        *captured, stream = captured_and_stream
        tensors = (mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mdK, mdV, mCounter)
        sides, dropout = (window_left, window_right, attention_chunk), (philox, kept)
        given = sides, (plan, sequences), softcap, alibi_slopes, dropout, tuple(captured)
        self._launch(tensors, BackwardOptions.of(self.config, *given), softmax_scale, stream)
