"""The Hopper kernel for decoding over a latent: few queries, a second query that multiplies V, and a long cache."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import Agent, CooperativeGroup, PipelineTmaAsync

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import first_column_of_thread
from cute_kernels.integers import divide
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import SoftCap, scale_in_base_2
from hopper.config import WARPGROUP_ROWS
from hopper.decode.combine import COLUMNS, COLUMNS_OF_A_CTA, LANES, WARPS
from hopper.decode.config import BOX_COLUMNS
from hopper.decode.kernel import MOST_SMS, SHORT_PIECE, tiles_of
from hopper.decode.masks import RowMask
from hopper.decode.operands import CacheLists, Outputs, RawKeys, Work
from hopper.decode.results import PartialResults
from hopper.decode.rows import TileRows
from hopper.mla.boxes import BoxedRows, OutputBoxes, QueryBoxes, wait_until_read
from hopper.mla.combine import COMBINING_CTAS, MlaCombine
from hopper.mla.config import (
    CONSUMERS,
    OUTPUT_ROWS,
    REGISTERS,
    VALUES_REGISTERS,
    MlaConfig,
    validate_mla_config,
)
from hopper.mla.producer import MlaProducer
from hopper.mla.queries import Queries, chunks_of
from hopper.mla.results import CtaRows, MlaResults
from hopper.mla.schedule import TilesTogether, mla_work, tiles_together
from hopper.mla.scores import MlaScores, PartScores
from hopper.mla.softmax import LaggingSoftmax
from hopper.mla.values import MlaValues
from hopper.tiles import WARPS_PER_WARPGROUP, swizzled_layout
from hopper.wide.exchange import Exchange, sync_cluster
from hopper.wide.operands import Place, WidePipelines, WideSmem, WideTensors, tile_state
from hopper.wide.products import tiled_mmas, values_mma


class MlaKernel:
    """softmax(softmax_scale (Q K^T + QV V^T)) V of the queries of a decoding step, K and V in a cache, on sm_90a.

    The rows of a tile and the sharing out of keys are those of ``DecodeKernel``, the two consumer warpgroups and what
    they tell each other those of ``WideForwardKernel``. Names in backticks are fields of ``MlaConfig``;
    docs/kernels/mla.md has the reasons.

    | role | warps | registers a thread | does |
    |---|---|---|---|
    | scores | 0 to 3 | `REGISTERS.consumer` | S, softmax, P V in the first of `parts`; Q, QV to shared memory |
    | values | 4 to 7 | `VALUES_REGISTERS` | P V in the others |
    | producer | 8 | `REGISTERS.producer` | TMA loads of K and of V |
    | queries | 9 (10, 11 idle) | `REGISTERS.producer` | with `query_box` TMA loads of Q and QV |

    | pipeline | stages | bytes of a full stage | warps of each CTA of the cluster that empty it |
    |---|---|---|---|
    | q, with `query_box` | 1 | `64 * (head_dim + head_dim_v) * element_bytes` | `4`, of its own CTA |
    | k | `stages` | `tile_n * head_dim * element_bytes` | `4` |
    | v, first part | `stages` | `tile_n * parts[0] * element_bytes` | `4` |
    | v, each other | `stages` | `tile_n * parts[i] * element_bytes` | `8` |

    Named barriers are those of ``WideForwardKernel`` and SUMMED. The CTAs of a cluster have 64 rows of a tile each, and
    every one loads a part of a key block for all by multicast.
    """

    def __init__(self, config: MlaConfig):
        validate_mla_config(config)
        self.config, self.dtype = config, DSL_DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mQV: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        lengths: cute.Tensor,
        table: cute.Tensor | None,
        leftpad: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        parts: cute.Tensor,
        softmax_scale: Float32,
        max_splits: Int32 | None,
        window_left: Int32 | None,
        window_right: Int32 | None,
        attention_chunk: Int32 | None,
        softcap: Float32 | None,
        sinks: cute.Tensor | None,
        num_pieces: Int32,
        stream,
    ):
        """Launch. mQV is as mO, whose columns are those of mV; all else is as for ``DecodeKernel``. Keys are shared out
        over ``num_pieces`` clusters."""
        c = self.config
        caps = (softcap,) if const_expr(c.softcap) else ()
        is_packed = c.layout == VARLEN
        copies = tuple(self._copy_of(cache) for cache in (mK, mV))
        if const_expr(c.query_box > 0):
            copies += self._row_copies(mQ, mQV, mO)
        given = lengths, table, leftpad, cu_seqlens_q, max_splits
        lists = CacheLists.of(c, mK, given, (window_left, window_right, attention_chunk))
        of_head = mQ.shape[1] * (mQ.shape[2] // mK.shape[2])
        together = Int32(1)
        if const_expr(c.cluster > 1 and not is_packed):
            together = tiles_together(cute.ceil_div(of_head, c.tile_m), num_pieces)
        pieces = num_pieces // together
        outputs = Outputs(mO, mLSE, (sinks,) if const_expr(c.sinks) else (), (), parts)
        self.kernel(
            tuple(copy[0] for copy in copies),
            tuple(copy[1] for copy in copies),
            (mQ, mQV),
            (table,) if const_expr(c.paged) else (),
            lists,
            outputs,
            scale_in_base_2(softmax_scale, caps),
            tuple(softmax_scale / cap for cap in caps),
        ).launch(
            grid=(c.cluster * together, pieces, 1),
            block=(c.threads, 1, 1),
            cluster=(c.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )
        ctas, rows = pieces * together, Int32(c.tile_m)
        if const_expr(not is_packed):
            ctas = cutlass.min(ctas, tiles_of(mQ.shape[0] * mK.shape[2], of_head, c.tile_m))
            rows = cutlass.min(of_head, rows)
        row_ctas = cutlass.min(rows, cutlass.max(COMBINING_CTAS // ctas, 1))
        self.combine(mQ, lists, outputs, pieces, together).launch(
            grid=(ctas, row_ctas, c.head_dim_v // COLUMNS_OF_A_CTA),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def _copy_of(self, cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The TMA atom of a box, and the cache as it sees it."""
        c = self.config
        view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        box = (c.box_rows, BOX_COLUMNS)
        load = cpasync.CopyBulkTensorTileG2SOp()
        if c.cluster > 1:
            load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return tuple(cpasync.make_tiled_tma_atom(load, view, swizzled_layout(*box, 1, self.dtype), box))[:2]

    def _row_copies(self, mQ: cute.Tensor, mQV: cute.Tensor, mO: cute.Tensor) -> tuple:
        """As ``_copy_of``, of Q, QV and O, whose boxes are heads of a token."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        rows = self.config.query_box
        copies = []
        for op, tensor, box_rows in ((load, mQ, rows), (load, mQV, rows), (store, mO, OUTPUT_ROWS)):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))
            box = (box_rows, BOX_COLUMNS)
            layout = swizzled_layout(*box, 1, self.dtype)
            copies.append(tuple(cpasync.make_tiled_tma_atom(op, view, layout, box))[:2])
        return tuple(copies)

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,
        views: tuple,
        queries: tuple,
        table: tuple,
        lists: CacheLists,
        outputs: Outputs,
        scale_log2: Float32,
        cap_factors: tuple,
    ):
        """A cluster for each piece of each row of blocks. ``atoms`` are of K and V, and of Q, QV and O where TMA copies
        these, ``views`` the tensors as TMA sees them."""
        c = self.config
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage())
        smem = self._tensors(storage)
        pipes = self._make_pipelines(storage)
        cute.arch.mbarrier_init_fence()
        sync_cluster(c.cluster)

        # As in the decode kernel: what puts parts together reads lengths before it waits for this kernel.
        cute.arch.griddepcontrol_wait()
        (x, piece, _), (width, pieces, _) = cute.arch.block_idx(), cute.arch.grid_dim()
        tiles, rank = TilesTogether(), 0
        if const_expr(c.cluster > 1):
            tiles = TilesTogether(width // c.cluster, x // c.cluster)
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        work = mla_work(c, lists, queries[0], (piece, pieces), tiles, lane)
        first_producer = CONSUMERS * WARPS_PER_WARPGROUP
        if warp >= first_producer:
            cute.arch.setmaxregister_decrease(REGISTERS.producer)
            if warp == first_producer:
                keys = RawKeys(atoms[0], views[0], smem.k, pipes.k, BOX_COLUMNS)
                values = tuple(
                    RawKeys(atoms[1], views[1], v, pipe, BOX_COLUMNS)
                    for v, pipe in zip(smem.v, pipes.v, strict=True)
                )
                page_size = views[0].shape[0]
                MlaProducer(c, work, keys, table, page_size, lane, values, Place(c.cluster, rank)).run()
                # Beside who still asks for keys, what puts parts together would be in the way.
                cute.arch.griddepcontrol_launch_dependents()
            if const_expr(c.query_box > 0):
                if warp == first_producer + 1:
                    sources = tuple(map(BoxedRows, atoms[2:4], views[2:4]))
                    targets = smem.q, smem.qv[0]
                    QueryBoxes(c, work, sources, targets, pipes.q, rank * WARPGROUP_ROWS, lane).run()
        else:
            warp_in_group = warp % WARPS_PER_WARPGROUP
            sP = storage.p.get_tensor(self._p_layout().outer, swizzle=self._p_layout().inner)[None, None, 0]
            exchanged = WideSmem(sP, storage.factors.get_tensor(cute.make_layout(WARPGROUP_ROWS)))
            exchange = Exchange(exchanged, warp_in_group, lane)
            parts = PartialResults(c, outputs.parts, work.heads)
            results = MlaResults(c, outputs.o, outputs.lse, outputs.sinks, parts, work.cta)
            place = warp_in_group, lane, rank * WARPGROUP_ROWS
            told = exchanged.p, storage.inverse.get_tensor(cute.make_layout(WARPGROUP_ROWS))
            inverse = Exchange(WideSmem(*told), warp_in_group, lane)
            boxes = tuple(
                OutputBoxes(c, BoxedRows(*o), smem.v) for o in zip(atoms[4:], views[4:], strict=True)
            )
            if warp < WARPS_PER_WARPGROUP:
                cute.arch.setmaxregister_increase(REGISTERS.consumer)
                softmax = LaggingSoftmax(scale_log2, self.dtype, c.rows_per_thread)
                softcaps = tuple(SoftCap(factor, self.dtype is Float16) for factor in cap_factors)
                consumer = MlaScores(c, tiled_mmas(c, self.dtype), smem, inverse, pipes, exchange, softmax)
                targets = chunks_of(smem.q, c.head_dim), chunks_of(smem.qv[0], c.head_dim_v)
                loads = Queries(c, queries, targets, place[2], warp_in_group * cute.arch.WARP_SIZE + lane)
                self._score(work, consumer, (results, boxes), loads, softcaps, place)
            else:
                cute.arch.setmaxregister_increase(VALUES_REGISTERS)
                source = warpgroup.OperandSource.SMEM
                mmas = tuple(values_mma(columns, self.dtype, source) for columns in c.parts[1:])
                values_consumer = MlaValues(c, mmas, smem, inverse, pipes, exchange, exchanged)
                self._sum_values(work, values_consumer, (results, boxes), place)
        if const_expr(c.cluster > 1):
            # The other CTA may still load for this one, or arrive at a barrier in it.
            sync_cluster(c.cluster)

    @cute.kernel
    def combine(
        self, mQ: cute.Tensor, lists: CacheLists, outputs: Outputs, num_pieces: Int32, together: Int32
    ):
        """As the kernel of this name in ``DecodeKernel``; a CTA has some columns of a row. ``num_pieces`` are those of
        each of ``together`` rows of blocks."""
        c = self.config
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((COLUMNS + 3, LANES, WARPS)), 16
        )
        piece, row, columns = cute.arch.block_idx()
        tiles = TilesTogether()
        if const_expr(c.cluster > 1 and c.layout != VARLEN):
            tiles = TilesTogether(together, piece % together)
            piece = piece // together
        work = mla_work(c, lists, mQ, (piece, num_pieces), tiles, lane)
        is_short = work.pieces.units <= SHORT_PIECE // c.tile_n * num_pieces
        if is_short and num_pieces * tiles.count * c.cluster >= MOST_SMS:
            cute.arch.griddepcontrol_launch_dependents()
        parts = PartialResults(c, outputs.parts, work.heads)
        by_tile = Boolean(False)
        if const_expr(c.layout != VARLEN):
            of_head = mQ.shape[1] * work.batch.group
            by_tile = tiles_of(mQ.shape[0] * lists.kv_heads, of_head, c.tile_m) <= num_pieces * tiles.count
        combine = MlaCombine(
            c, work, parts, outputs.o, outputs.lse, outputs.sinks, outputs.factors, smem, warp, lane
        )
        combine.run(by_tile, row, cute.arch.grid_dim()[1], (columns * COLUMNS_OF_A_CTA,))

    @cute.jit
    def _score(
        self,
        work: Work,
        consumer: MlaScores,
        ways: tuple[MlaResults, tuple[OutputBoxes, ...]],
        queries: Queries,
        softcaps: tuple,
        place: tuple,
    ):
        """The first consumer warpgroup: every tile of which this piece has a part. ``ways`` are those in which O
        leaves, ``place`` the warp in its group, the lane, and the first row of this CTA among those of a tile."""
        c, lane = self.config, place[1]
        results, _ = ways
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)
        q_phase = Int32(0)
        if const_expr(c.query_box == 0):
            queries.clear()
            consumer.clear()
        sequence, tile, start, piece_end = work.first_tile(lane)
        while start < piece_end:
            seqlens = work.batch.seqlens(sequence)
            blocks = work.batch.blocks(seqlens)
            parts = work.parts(start, blocks.count)
            first, end = parts.begin(work.cta), parts.begin(work.cta + 1)
            rows = self._rows(work, sequence, tile, place)
            if first >= end:
                results.leave_nothing(rows)
            else:
                if const_expr(c.query_box > 0):
                    consumer.pipes.q.consumer_wait(tile_state(q_phase))
                    q_phase ^= 1
                else:
                    queries.load(rows.tile)
                column = first_column_of_thread(lane)
                mask = RowMask(work.batch.window, c.tile_n, seqlens, rows.tile.first, column, rows.levels())
                edges = blocks.left_masked_end, blocks.unmasked_end
                scores = PartScores(blocks.begin + first, mask, edges, softcaps)
                state = consumer.start(scores, blocks.begin + end, state)
                factors = results.leave_sums(consumer.softmax, rows, parts)
                consumer.finish(factors)
                product = consumer.acc, consumer.mmas.pv
                self._leave(
                    ways, consumer.pipes.v[0], product, (0, factors, consumer.owed), (rows, parts), state
                )
                state.advance()
            start += blocks.units
            sequence, tile = work.batch.following(sequence, tile, work.batch.tiles(seqlens))
        consumer.give_back(state)

    @cute.jit
    def _sum_values(self, work: Work, consumer: MlaValues, ways: tuple, place: tuple):
        """The second consumer warpgroup: the same tiles."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)
        consumer.exchange.prime()
        sequence, tile, start, piece_end = work.first_tile(place[1])
        while start < piece_end:
            seqlens = work.batch.seqlens(sequence)
            blocks = work.batch.blocks(seqlens)
            parts = work.parts(start, blocks.count)
            count = parts.begin(work.cta + 1) - parts.begin(work.cta)
            if count > 0:
                state = consumer.attend(count, state)
                of_tile = self._rows(work, sequence, tile, place), parts
                for i in cutlass.range_constexpr(len(consumer.accs)):
                    product, factors = (consumer.accs[i], consumer.mmas[i]), consumer.factors
                    self._leave(ways, consumer.pipes[i], product, (i + 1, factors, None), of_tile, state)
                state.advance()
            start += blocks.units
            sequence, tile = work.batch.following(sequence, tile, work.batch.tiles(seqlens))

    @cute.jit
    def _leave(
        self,
        ways: tuple[MlaResults, tuple[OutputBoxes, ...]],
        pipe: PipelineTmaAsync,
        product: tuple[cute.Tensor, cute.TiledMma],
        multiplied: tuple,
        of_tile: tuple,
        state: pipeline.PipelineState,
    ):
        """O in the columns of a part of V, which is given back: by TMA, which takes it from there, where this piece has
        all keys of the tile, else from registers. ``multiplied`` are the number of the part and the factors."""
        results, boxes = ways
        part, factors, owed = multiplied
        rows, parts = of_tile
        if const_expr(len(boxes) == 0):
            pipe.consumer_release(state)
            results.leave_columns(product[0], part, factors, rows, parts)
        else:
            if results.is_whole(parts):
                boxes[0].leave(product, part, factors, rows, state)
                if const_expr(part == 0):
                    owed.fill(1)
                else:
                    wait_until_read()
                    pipe.consumer_release(state)
            else:
                pipe.consumer_release(state)
                results.leave_partial(product[0], part, rows, parts)

    def _rows(self, work: Work, sequence: Int32, tile: Int32, place: tuple) -> CtaRows:
        """The thread's of a tile."""
        seqlens = work.batch.seqlens(sequence)
        row_tiles = work.batch.row_tiles(seqlens)
        head = divide(tile, row_tiles)
        first = work.heads.row_tile(tile - head * row_tiles) * self.config.tile_m
        return CtaRows(self.config, TileRows(seqlens, first, work.heads.head(head), work.batch.group), *place)

    def _make_pipelines(self, storage) -> WidePipelines:
        """Those of the table in the docstring of the class."""
        c, one, both = self.config, WARPS_PER_WARPGROUP, CONSUMERS * WARPS_PER_WARPGROUP
        queries = storage.barriers_q.data_ptr(), one, WARPGROUP_ROWS * (c.head_dim + c.head_dim_v)
        barriers_v = storage.barriers_v.data_ptr()
        return WidePipelines(
            self._tma_pipeline(*queries, (1, 1)) if c.query_box else (),
            self._tma_pipeline(storage.barriers_k.data_ptr(), one, c.tile_n * c.head_dim),
            tuple(
                self._tma_pipeline(
                    barriers_v + 2 * c.stages * part, both if part else one, c.tile_n * columns
                )
                for part, columns in enumerate(c.parts)
            ),
        )

    def _tma_pipeline(
        self, barriers: cute.Pointer, warps: int, elements: int, size: tuple[int, ...] = ()
    ) -> PipelineTmaAsync:
        """A stage is empty when ``warps`` of each CTA have released it. ``size`` are the stages and CTAs, empty where
        they are those of keys."""
        c = self.config
        stages, ctas = size or (c.stages, c.cluster)
        return PipelineTmaAsync.create(
            num_stages=stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, warps * ctas),
            tx_count=elements * c.element_bytes,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, 1, ctas, 1)),
            defer_sync=True,
        )

    def _tensors(self, storage) -> WideTensors:
        """What lies in shared memory, swizzled; V as its parts, behind each other. O takes the place of V."""
        c = self.config
        layouts = {
            "q": swizzled_layout(WARPGROUP_ROWS, c.head_dim, 1, self.dtype),
            "k": swizzled_layout(c.tile_n, c.head_dim, c.stages, self.dtype),
            "qv": swizzled_layout(WARPGROUP_ROWS, c.head_dim_v, 1, self.dtype),
        }
        q, k, qv = (
            getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in layouts.items()
        )
        v, start = [], storage.v.data_ptr()
        for columns in c.parts:
            layout = swizzled_layout(c.tile_n, columns, c.stages, self.dtype)
            at = cute.recast_ptr(start, layout.inner, dtype=self.dtype)
            v.append(cute.make_tensor(at, layout.outer))
            start += c.stages * c.tile_n * columns
        return WideTensors(q, k, tuple(v), (), (qv,))

    def _p_layout(self) -> cute.ComposedLayout:
        return swizzled_layout(WARPGROUP_ROWS, self.config.tile_n, 1, self.dtype)

    def _shared_storage(self) -> type:
        c, dtype = self.config, self.dtype

        @cute.struct
        class SharedStorage:
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2 * len(c.parts) * c.stages]
            barriers_q: cute.struct.MemRange[cutlass.Int64, 2]
            factors: cute.struct.Align[cute.struct.MemRange[Float32, WARPGROUP_ROWS], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, WARPGROUP_ROWS], 16]
            q: cute.struct.Align[cute.struct.MemRange[dtype, WARPGROUP_ROWS * c.head_dim], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * c.tile_n * c.head_dim], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * c.tile_n * c.head_dim_v], 1024]
            qv: cute.struct.Align[cute.struct.MemRange[dtype, WARPGROUP_ROWS * c.head_dim_v], 1024]
            p: cute.struct.Align[cute.struct.MemRange[dtype, WARPGROUP_ROWS * c.tile_n], 1024]

        return SharedStorage
