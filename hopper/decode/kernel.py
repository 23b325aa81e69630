"""The Hopper decode kernel: few queries, many keys, which lie in a cache."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float8E4M3FN, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineTmaAsync
from cutlass.utils import hopper_helpers

from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.integers import divide, minimum
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import SoftCap, scale_in_base_2
from hopper.config import WARPGROUP_ROWS
from hopper.decode.cluster_parts import ClusterParts
from hopper.decode.combine import COLUMNS, COLUMNS_OF_A_CTA, LANES, WARPS, Combine
from hopper.decode.config import (
    PRODUCER_WARPS,
    DecodeConfig,
    cluster_bytes,
    query_words,
    validate_decode_config,
)
from hopper.decode.consumer import Consumer
from hopper.decode.operands import CacheLists, Keys, Outputs, RawKeys, Unsettled, Work
from hopper.decode.producer import Guess, Producer
from hopper.decode.results import PartialResults, Results
from hopper.decode.row_scales import LANES as LANES_OF_SCALES
from hopper.decode.row_scales import RowScales
from hopper.decode.rows import HeadRows, TileRows
from hopper.decode.schedule import HeadsTogether, TileParts, heads_together, launched_together
from hopper.decode.softmax import RowSoftmax, TileSoftCap
from hopper.decode.swapped_consumer import SwappedConsumer
from hopper.decode.widener import Widener
from hopper.tiles import WARPS_PER_WARPGROUP, swizzled_layout

ONE_WARPGROUP = (1, 1, 1)

COMBINING_CTAS, COMBINING_CTAS_OF_PAIRS = 256, 2048
"""That put parts together, or a little more, and as many more as ``MOST_ROWS`` asks for. Each adds up one row after
another. Beside two consumers there is no room for them to wait in, and behind them the GPU is theirs."""

MOST_ROWS = 4
"""Of a tile, that such a CTA adds up one after another."""

SHORT_PIECE, MOST_SMS = 8192, 100
"""Keys that a CTA visits at most, and CTAs that there are at least, where what comes next in the stream may start,
up to its own wait, while parts are put together. It takes the SMs in the order in which they become free: a long call
that follows is slower by 1 % for that, one of 64 CTAs by 7 (``decode_starts.json``)."""


def tiles_of(kv_heads: Int32, rows: Int32, tile_m: int) -> Int32:
    """Tiles of so many K/V heads, each of so many rows."""
    return kv_heads * cute.ceil_div(rows, tile_m)


class DecodeKernel:
    """softmax(softmax_scale Q K^T) V of the queries of a decoding step, K and V in a cache, on sm_90a.

    | role | warps | warps with a cache of e4m3 | warps with 128 rows | does |
    |---|---|---|---|---|
    | consumers | 0 to 3 | 0 to 3 | 0 to 7 | Q to registers, both GEMMs, softmax, partial results |
    | wideners | none | 4 to 7, 8 to 11 | none | e4m3 to float16, of K and of V |
    | producers | 4, 5 | 12, 13 | 8, 9 | TMA loads of K and of V |

    | pipeline | stages | bytes of a full stage | arrivals that empty it |
    |---|---|---|---|
    | k | `stages` | `tile_n * head_dim * element_bytes` | `4 * consumers` |
    | v | `stages` | `tile_n * head_dim_v * element_bytes` | `4 * consumers` |
    | k of e4m3 | `raw_stages` | `tile_n * head_dim` | `4` |
    | v of e4m3 | `raw_stages` | `tile_n * head_dim_v` | `4` |

    TMA fills the first two, or the last two from which wideners fill the first. Where the first block is guessed, k and
    v have a pipeline each besides for that block: its one stage is stage 0 of theirs, and nobody empties it. A swapped
    kernel has a cache of e4m3 without wideners: keys are the rows of mma.sync in float16, and columns of V those of its
    WGMMAs (``SwappedConsumer``). Named barrier 1 is among
    the 128 threads of the consumer, or the 256 of both. 192 threads have registers enough; 512 and 384 share them out
    as ``DecodeConfig.registers`` says.

    The query heads of a K/V head, and the tokens of a step, are the rows of a tile, so that keys are read once for all
    of them. Every CTA reads as many keys as the others (``schedule``), in clusters as the others of its tile, and all
    roles walk over them alike.
    """

    def __init__(self, config: DecodeConfig):
        validate_decode_config(config)
        self.config, self.dtype = config, DSL_DTYPES[config.mma_dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
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
        q_descale: cute.Tensor | None,
        k_descale: cute.Tensor | None,
        v_descale: cute.Tensor | None,
        num_ctas: Int32,
        stream,
    ):
        """Launch.

        mQ and mO are (batch, seqlen_q, heads, columns), or packed (total_q, heads, columns) with cu_seqlens_q, mLSE
        (batch, heads, seqlen_q) or (heads, total_q). mK and mV are (pages, page_size, kv_heads, columns); ``lengths``
        and ``leftpad`` are described at ``CacheBatch``, ``table`` at ``Producer``, ``parts`` at ``PartialResults``.
        Descales are float32 (batch, kv_heads), for a cache of e4m3 and for such queries; with ``row_scales`` those of K
        and V (pages, page_size, kv_heads). What the config has no use for is None.
        """
        c = self.config
        caps = (softcap,) if const_expr(c.softcap) else ()
        atoms, caches = [], []
        for cache, columns in ((mK, c.head_dim), (mV, c.head_dim_v)):
            view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
            box = (c.box_rows, c.box_columns(columns))
            layout = cute.make_layout(box, stride=(box[1], 1))
            if const_expr(not c.is_widened):
                layout = swizzled_layout(*box, 1, self.dtype)
            load = cpasync.CopyBulkTensorTileG2SOp()
            atom, tensor = cpasync.make_tiled_tma_atom(load, view, layout, box)
            atoms.append(atom)
            caches.append(tensor)
        given = lengths, table, leftpad, cu_seqlens_q, max_splits
        together = heads_together(mK.shape[2], num_ctas) if const_expr(c.cluster == 1) else 1
        lists = CacheLists.of(c, mK, given, (window_left, window_right, attention_chunk), together)
        tables = (table,) if const_expr(c.paged) else ()
        of_sinks = (sinks,) if const_expr(c.sinks) else ()
        score_factors, v_factors, row_scales = (), (), ()
        if const_expr(c.row_scales):
            row_scales = k_descale, v_descale
        elif const_expr(c.cache_dtype):
            score_factors, v_factors = (k_descale,), (v_descale,)
        if const_expr(c.e4m3_queries):
            score_factors = q_descale, *score_factors
        outputs = Outputs(mO, mLSE, of_sinks, v_factors, parts)
        scale_log2, factors = scale_in_base_2(softmax_scale, caps), tuple(softmax_scale / cap for cap in caps)
        self.kernel(
            tuple(atoms),
            tuple(caches),
            mQ,
            tables,
            lists,
            outputs,
            scale_log2,
            factors,
            score_factors,
            row_scales,
        ).launch(
            grid=(together, num_ctas // together, 1) if const_expr(c.cluster == 1) else (num_ctas, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(c.cluster if const_expr(c.cluster > 1) else launched_together(together), 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )
        if const_expr(c.cluster == 1):
            self._launch_combine(mQ, lists, outputs, (together, num_ctas // together), stream)

    @cute.jit
    def _launch_combine(
        self, mQ: cute.Tensor, lists: CacheLists, outputs: Outputs, shape: tuple[Int32, Int32], stream
    ):
        """``shape`` are the K/V heads that are visited together, and the pieces of each row."""
        c, (together, num_pieces) = self.config, shape
        pieces, rows = num_pieces, Int32(c.tile_m)
        if const_expr(c.layout != VARLEN):
            of_head = mQ.shape[1] * (mQ.shape[2] // lists.kv_heads)
            tiles = tiles_of(mQ.shape[0] * lists.heads_of_row, of_head, c.tile_m)
            pieces, rows = cutlass.min(pieces, tiles), cutlass.min(of_head, rows)
        most = COMBINING_CTAS if const_expr(c.consumers == 1) else COMBINING_CTAS_OF_PAIRS
        row_ctas = cutlass.max(most // (together * pieces), cute.ceil_div(rows, MOST_ROWS))
        row_ctas = cutlass.min(rows, row_ctas)
        self.combine(mQ, lists, outputs, num_pieces).launch(
            grid=(together, pieces, row_ctas),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        atoms: tuple,
        caches: tuple,
        mQ: cute.Tensor,
        table: tuple,
        lists: CacheLists,
        outputs: Outputs,
        scale_log2: Float32,
        cap_factors: tuple,
        score_factors: tuple,
        row_scales: tuple,
    ):
        """A CTA for each piece of the row of blocks, or of its tile where that has a cluster."""
        c = self.config
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        if const_expr(c.cluster > 1):
            # No CTA sends to another one before that has started.
            cute.arch.cluster_arrive_relaxed()
        storage = cutlass.memory.SmemAllocator().allocate(self._shared_storage())
        wide, raw = self._keys(storage, atoms, caches, row_scales)
        cute.arch.mbarrier_init_fence()

        page_size = caches[0].shape[0]
        first_producer = c.threads // cute.arch.WARP_SIZE - (
            WARPS_PER_WARPGROUP if const_expr(c.registers) else PRODUCER_WARPS
        )
        guesses = ()
        if const_expr(c.guesses):
            guesses = (self._wait_and_ask(lists, mQ, raw, table, (warp - first_producer, lane)),)
        else:
            # The kernel that puts parts together waits for this one, but reads lengths before that: it may not come
            # before what writes them has ended.
            cute.arch.griddepcontrol_wait()
            if const_expr(c.cluster > 1):
                cute.arch.griddepcontrol_launch_dependents()
        work = self._work(lists, mQ, lane)
        if const_expr(not c.guesses):
            # Lengths are under way while barriers are made.
            cute.arch.sync_threads()
        # Once, in front of the roles: that each finds it itself is as much machine code again.
        begin = work.first_tile(lane) if const_expr(c.is_compact) else ()
        if warp >= first_producer:
            if const_expr(c.registers):
                cute.arch.setmaxregister_decrease(c.registers["producer"])
            if warp == first_producer:
                Producer(c, work, raw[0], table, page_size, lane).run(begin, guesses)
                if const_expr(c.cluster == 1):
                    # Beside who still asks for keys, what puts parts together would be in the way.
                    cute.arch.griddepcontrol_launch_dependents()
            elif warp == first_producer + 1:
                Producer(c, work, raw[1], table, page_size, lane).run(begin, guesses)
            if const_expr(c.cluster > 1):
                # As consumers do.
                cute.arch.cluster_wait()
                cute.arch.cluster_arrive()
        elif warp >= c.consumers * WARPS_PER_WARPGROUP:
            if const_expr(c.is_widened):
                cute.arch.setmaxregister_decrease(c.registers["widener"])
                thread = warp % WARPS_PER_WARPGROUP * cute.arch.WARP_SIZE + lane
                if warp < 2 * WARPS_PER_WARPGROUP:
                    Widener(c, work, raw[0], wide[0], thread, lane).run(begin)
                else:
                    Widener(c, work, raw[1], wide[1], thread, lane).run(begin)
        else:
            if const_expr(c.registers):
                cute.arch.setmaxregister_increase(c.registers["consumer"])
            thread = warp * cute.arch.WARP_SIZE + lane
            if const_expr(c.is_swapped):
                memory, capped_log2 = (
                    (storage.sQ, storage.sP, storage.exchange),
                    tuple(scale_log2 for _ in cap_factors),
                )
                consumer = SwappedConsumer(c, *wide, memory, thread, capped_log2)
            else:
                softmax = RowSoftmax(scale_log2, self.dtype, c.rows_per_thread)
                is_precise = DSL_DTYPES[c.dtype] is Float16
                softcaps = tuple(SoftCap(factor, is_precise) for factor in cap_factors)
                if const_expr(bool(c.cache_dtype)):
                    softcaps = tuple(TileSoftCap(is_precise) for _ in cap_factors)
                consumer = Consumer(c, self._tiled_mmas(), *wide, softmax, softcaps, thread)
            parts = PartialResults(c, outputs.parts, work.heads)
            results = Results(c, outputs.o, outputs.lse, outputs.sinks, outputs.factors, parts, work.cta)
            shared = ()
            if const_expr(c.cluster > 1):
                shared = (ClusterParts.of(c, storage.cluster_parts, work.cta),)
            # Descales belong to scores, which come before the tanh of a softcap.
            is_before_cap = const_expr(c.softcap and bool(c.cache_dtype))
            given = mQ, cap_factors[0] if is_before_cap else scale_log2, score_factors, raw
            self._consume(work, work.begin(begin, lane), consumer, (results, shared), *given)

    @cute.kernel
    def combine(self, mQ: cute.Tensor, lists: CacheLists, outputs: Outputs, num_pieces: Int32):
        """A CTA for each piece of each row of blocks, and for each row of the tile that may be begun in it."""
        c = self.config
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((COLUMNS + 3, LANES, WARPS)), 16
        )
        own, piece, row = cute.arch.block_idx()
        work = lists.work(c, mQ, (piece, num_pieces), HeadsTogether(cute.arch.grid_dim()[0], own), lane)
        is_short = work.pieces.units <= SHORT_PIECE // c.tile_n * num_pieces
        if is_short and num_pieces * work.heads.count >= MOST_SMS:
            cute.arch.griddepcontrol_launch_dependents()
        parts = PartialResults(c, outputs.parts, work.heads)
        by_tile = Boolean(False)
        if const_expr(c.layout != VARLEN):
            of_head = mQ.shape[1] * work.batch.group
            by_tile = tiles_of(mQ.shape[0] * lists.heads_of_row, of_head, c.tile_m) <= num_pieces
        combine = Combine(
            c, work, parts, outputs.o, outputs.lse, outputs.sinks, outputs.factors, smem, warp, lane
        )
        columns = tuple(range(0, c.head_dim_v, COLUMNS_OF_A_CTA))
        combine.run(by_tile, row, cute.arch.grid_dim()[2], columns)

    @cute.jit
    def _wait_and_ask(
        self, lists: CacheLists, mQ: cute.Tensor, raw: tuple, table: tuple, thread: tuple[Int32, Int32]
    ) -> Guess:
        """Wait for what is before this kernel, and then ask for the block that was found to be the first before that.

        ``thread`` are the number of the producer warp and the lane. Before the wait lengths, left pads and pages are
        looked at, which may be those of the call before; K and V are not, as a new token may be on its way there.
        """
        number, lane = thread
        page_size, unsettled = raw[0].cache.shape[0], tuple(map(Unsettled, table))
        work = self._work(lists.unsettled(), mQ, lane)
        producers = tuple(Producer(self.config, work, keys, unsettled, page_size, lane) for keys in raw)
        guess = producers[0].guess(work.first_tile(lane))
        if minimum(minimum(guess.head, guess.page), guess.row) < 0:
            # Never so, which the compiler does not know: it would work all of this out behind the wait.
            cute.arch.inline_ptx("nanosleep.u32 100;")
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        if const_expr(self.config.cluster > 1):
            cute.arch.griddepcontrol_launch_dependents()
        for own in cutlass.range_constexpr(len(producers)):
            if number == own:
                producers[own].ask(guess)
        return guess

    def _work(self, lists: CacheLists, mQ: cute.Tensor, lane: Int32) -> Work:
        """That of this CTA."""
        c, (x, y, _), (width, height, _) = self.config, cute.arch.block_idx(), cute.arch.grid_dim()
        if c.cluster > 1:
            return lists.work(c, mQ, (x, width), HeadsTogether(), lane, c.cluster)
        return lists.work(c, mQ, (y, height), HeadsTogether(width, x), lane)

    @cute.jit
    def _consume(
        self,
        work: Work,
        begin: tuple,
        consumer: Consumer | SwappedConsumer,
        targets: tuple,
        mQ: cute.Tensor,
        score_scale: Float32,
        score_factors: tuple,
        raw: tuple,
    ):
        """Every tile of which this CTA has a part, from ``begin`` on. ``targets`` are the results, and what the cluster
        puts together, ``score_scale`` and ``score_factors`` what scores are multiplied with, ``raw`` K and V as they
        come."""
        c = self.config
        results, shared = targets
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)
        sequence, tile, start, piece_end = begin
        while start < piece_end:
            seqlens = work.batch.seqlens(sequence)
            blocks = work.batch.blocks(seqlens)
            parts = work.parts(start, blocks.count)
            first, end = parts.begin(work.cta), parts.begin(work.cta + 1)
            row_tiles = work.batch.row_tiles(seqlens)
            head = divide(tile, row_tiles)
            first_row = (tile - head * row_tiles) * c.tile_m
            rows = consumer.rows_of(TileRows(seqlens, first_row, work.heads.head(head), work.batch.group))
            if first >= end:
                if const_expr(c.cluster == 1):
                    results.leave_nothing(rows)
            else:
                consumer.load_queries(mQ, rows, score_scale * rows.tile.factor(score_factors))
                if const_expr(c.guesses):
                    for keys in raw:
                        keys.wait_ahead()
                mask = consumer.mask_of(work.batch.window, rows)
                edges = blocks.left_masked_end, blocks.unmasked_end
                state = consumer.attend(mask, edges, blocks.begin + first, blocks.begin + end, state)
                if const_expr(c.cluster == 1):
                    results.leave(consumer, rows, parts)
            if const_expr(c.cluster > 1):
                self._put_together(consumer, shared[0], rows, parts, results.outputs)
            start += blocks.count
            sequence, tile = work.batch.following(sequence, tile, work.batch.tiles(seqlens))

    @cute.jit
    def _put_together(
        self, consumer: Any, shared: ClusterParts, rows: HeadRows, parts: TileParts, outputs: tuple
    ):
        """The tile of a cluster, of which this CTA may have no key."""
        cute.arch.cluster_wait()
        if parts.begin(shared.rank) < parts.begin(shared.rank + 1):
            shared.send(consumer, rows)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        shared.add_up(rows.tile, minimum(parts.blocks, self.config.cluster), consumer.thread, outputs)

    def _keys(self, storage, atoms: tuple, caches: tuple, row_scales: tuple) -> tuple[tuple, tuple]:
        """K and V as they are multiplied, and as they come."""
        c = self.config
        wide, raw = [], []
        scales = self._row_scales(storage, row_scales) or ((), ())
        memory = (
            (storage.sK, storage.barriers_k, storage.sKraw, storage.barriers_k_raw, c.head_dim, 0),
            (storage.sV, storage.barriers_v, storage.sVraw, storage.barriers_v_raw, c.head_dim_v, 2),
        )
        warps = CooperativeGroup(Agent.Thread, c.consumers * WARPS_PER_WARPGROUP)
        for atom, cache, of_rows, (smem, barriers, raw_smem, raw_barriers, columns, number) in zip(
            atoms, caches, scales, memory, strict=True
        ):
            layout = swizzled_layout(c.tile_n, columns, c.stages, self.dtype)
            stages = smem.get_tensor(layout.outer, swizzle=layout.inner)
            if const_expr(not c.is_widened):
                raw_stages, raw_barriers = stages, barriers
            else:
                raw_layout = cute.make_layout(
                    (c.tile_n, columns, c.raw_stages), stride=(columns, 1, c.tile_n * columns)
                )
                raw_stages = raw_smem.get_tensor(raw_layout)
            pipe = PipelineTmaAsync.create(
                num_stages=c.raw_stages or c.stages,
                # TMA, and each lane of a warp that copies scales.
                producer_group=CooperativeGroup(Agent.Thread, 1 + LANES_OF_SCALES * int(c.row_scales)),
                consumer_group=warps,
                tx_count=c.tile_n * columns * raw_stages.element_type.width // 8,
                barrier_storage=raw_barriers.data_ptr(),
                defer_sync=True,
            )
            ahead = ()
            if const_expr(c.guesses):
                ahead = (self._ahead(storage.barriers_ahead.data_ptr() + number, c.tile_n * columns),)
            raw.append(RawKeys(atom, cache, raw_stages, pipe, c.box_columns(columns), of_rows, ahead))
            if const_expr(c.is_widened):
                pipe = PipelineAsync.create(
                    num_stages=c.stages,
                    producer_group=warps,
                    consumer_group=warps,
                    barrier_storage=barriers.data_ptr(),
                    defer_sync=True,
                )
            wide.append(Keys(stages, pipe, c.is_widened, tuple(x.smem for x in of_rows)))
        return tuple(wide), tuple(raw)

    def _ahead(self, barriers: cute.Pointer, elements: int) -> PipelineTmaAsync:
        """Of the block of so many elements that is asked for ahead; nobody empties its only stage."""
        one = CooperativeGroup(Agent.Thread, 1)
        return PipelineTmaAsync.create(
            num_stages=1,
            producer_group=one,
            consumer_group=one,
            tx_count=elements * self.config.element_bytes,
            barrier_storage=barriers,
            defer_sync=True,
        )

    def _row_scales(self, storage, tensors: tuple) -> tuple:
        """Of K and of V, in a tuple each."""
        c, found = self.config, []
        for number, tensor in enumerate(tensors):
            smem = (storage.sKscales, storage.sVscales)[number].get_tensor(
                cute.make_layout((c.tile_n, c.stages))
            )
            found.append((RowScales(c, tensor, smem),))
        return tuple(found)

    def _shared_storage(self) -> type:
        c = self.config
        columns_k, columns_v = c.tile_n * c.head_dim, c.tile_n * c.head_dim_v
        of_cluster = cluster_bytes(c.tile_m, c.head_dim_v, c.cluster) // 4
        swapped, scaled = int(c.is_swapped), int(c.row_scales) * c.stages * c.tile_n
        words_of_q = swapped * math.prod(query_words(c.tile_m, c.head_dim))

        @cute.struct
        class SharedStorage:
            barriers_k: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            barriers_v: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            barriers_k_raw: cute.struct.MemRange[cutlass.Int64, 2 * c.raw_stages]
            barriers_v_raw: cute.struct.MemRange[cutlass.Int64, 2 * c.raw_stages]
            barriers_ahead: cute.struct.MemRange[cutlass.Int64, 4 * int(c.guesses)]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, c.stages * columns_k], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, c.stages * columns_v], 1024]
            sKraw: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, c.raw_stages * columns_k], 1024]
            sVraw: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, c.raw_stages * columns_v], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[Int32, words_of_q], 128]
            sP: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, swapped * c.split_rows * c.tile_n], 1024]
            exchange: cute.struct.MemRange[Float32, swapped * WARPS_PER_WARPGROUP * c.tile_m]
            sKscales: cute.struct.MemRange[Float32, scaled]
            sVscales: cute.struct.MemRange[Float32, scaled]
            cluster_parts: cute.struct.Align[cute.struct.MemRange[Float32, of_cluster], 16]

        return SharedStorage

    def _tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Q K^T and P V, their first operands in registers."""
        c = self.config
        return tuple(
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                OperandMajorMode.K,
                major,
                Float32,
                ONE_WARPGROUP,
                (WARPGROUP_ROWS, columns),
                a_source=warpgroup.OperandSource.RMEM,
            )
            for major, columns in ((OperandMajorMode.K, c.tile_n), (OperandMajorMode.MN, c.head_dim_v))
        )
