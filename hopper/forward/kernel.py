"""The Hopper forward kernel."""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.utils import hopper_helpers

from cute_kernels.dropout import Dropout
from cute_kernels.dtypes import DSL_DTYPES
from cute_kernels.fragments import (
    ROW_STRIDE,
    ROWS_PER_THREAD,
    first_column_of_thread,
    first_row_of_thread,
)
from cute_kernels.key_blocks import KeyBlocks, PartOfBlocks, SharedBlocks
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import (
    Alibi,
    ColumnAlibi,
    ScoreRules,
    function_rules,
    scale_after_functions,
)
from cute_kernels.softmax import OnlineSoftmax
from cute_kernels.tile_scheduler import MAILBOX_STAGES, TileScheduler
from cute_kernels.window import sides_of, window_of
from hopper.config import WARPGROUP_ROWS, ForwardConfig, validate_forward_config
from hopper.forward.ahead import ask_for_first_tile
from hopper.forward.consumer import Consumer
from hopper.forward.consumer_loads import ConsumerLoads, NoConsumerLoads, ReturnOfO
from hopper.forward.ending import ending_of
from hopper.forward.epilogue import Epilogue
from hopper.forward.operands import Mmas, PerOperand, Pipelines, Work, first_turn, next_turn
from hopper.forward.paged import Pages
from hopper.forward.parts import KernelParts, LaunchOptions
from hopper.forward.places import TilePlace
from hopper.forward.producer import Producer
from hopper.forward.queries import KeptQueries, SharedQueries, StagedQueries
from hopper.forward.shared_memory import (
    few_tensors,
    smem_layouts,
    smem_tensors,
    storage_type,
    words_of_mailbox,
)
from hopper.forward.store import CutTmaStore
from hopper.forward.unscaled import NoCorrection
from hopper.tiles import WARPS_PER_WARPGROUP, TmaOperand
from hopper.wgmma import keep_descriptor

ONE_WARPGROUP = (1, 1, 1)
"""Warpgroups of an MMA along rows, columns and depth."""


class Roles(NamedTuple):
    """What both roles are made from: producer and consumers. ``extras`` are those of ``LaunchOptions``."""

    operands: PerOperand
    pipes: Pipelines
    scale_log2: Float32
    extras: tuple
    storage: Any
    few: tuple[TmaOperand, ...] = ()


class ConsumerParts(NamedTuple):
    """What a consumer is made from: the operands and their pipelines, the softmax, the loads that consumers issue, what
    is added to O, and the extras of ``Roles``."""

    operands: PerOperand
    pipes: Pipelines
    softmax: OnlineSoftmax
    loads: NoConsumerLoads
    correction: NoCorrection
    extras: tuple
    few: tuple[TmaOperand, ...] = ()


def present(atoms: PerOperand) -> tuple:
    """Those that there are: O of parts goes from registers."""
    return tuple(atom for atom in atoms if atom is not None)


class ForwardKernel:
    """softmax(softmax_scale Q K^T) V and its log-sum-exp, on sm_90a.

    Names in backticks are fields of ``ForwardConfig``; a test traces the kernel and holds what they say to it.

    | role | warps | registers a thread | does |
    |---|---|---|---|
    | producer | 0 (1 to 3 idle) | `registers.producer` | TMA loads of Q, K, V; claims tiles |
    | consumer wg | 4 + 4 wg .. 7 + 4 wg | `registers.consumer` | both GEMMs, softmax, epilogue of 64 rows |

    | pipeline | stages | bytes of a full stage | arrivals that empty it |
    |---|---|---|---|
    | pipe_q | `consumers * q_stages` | `(64 + few_keys) * head_dim * qk_bytes` | `4` |
    | pipe_k | `stages` | `tile_n * head_dim * qk_bytes` | `4 * consumers` |
    | pipe_v | `stages` | `tile_n * head_dim_v * element_bytes` | `4 * consumers` |
    | mailbox | `2` | `4` | `4 * consumers` |

    Where O is staged in V's place there is one more, pipe_o of one stage, by which consumers give that place back. V
    of few keys has pipe_few, a stage for each warpgroup: K of them comes and goes back with Q, V goes back last.

    | named barrier | first id | threads | orders |
    |---|---|---|---|
    | EPILOGUE + wg | `1` | `128` | the staging of O in shared memory by warpgroup wg |
    | PING_PONG + wg | `4` | `256` | the turn of warpgroup wg on the tensor cores |
    | V_READ | `8` | `128 * consumers` | the last P V of all warpgroups, where O is then staged in V's place |

    One tile in time, two consumers in ping-pong (S is Q K^T of a block, O is P V of the block before it, in the
    order in which the tensor cores get them; ~ is softmax)::

        producer    Q0 K Q1 V  K V  K V  ...
        consumer 0  S ~~~~~~ [S O]~~~~~~~~~~~[S O]~~~~~~~~~~~ ... O, store
        consumer 1     S ~~~~~~   [S O]~~~~~~~~~~~[S O]~~~~~~ ...    O, store

    K of a block is loaded before V of the one in front of it where `loads_k_ahead`.

    Tensors have CuTe's names: m in global memory, s in shared memory, r in registers, acc an accumulator. tSrQ is the
    part of Q that a thread has in registers, or as descriptors, for the product S; tOrP that of P for the product O. wg
    is the number of a consumer warpgroup from 0 on. A ``PipelineState`` is a stage and the phase that its barrier is
    waited for at: consumers begin with phase 0, a producer with 1, since stages are empty then.
    Methods are called in loops that are traced, and so their classes are a ``LoopInvariant``.

    The grid is persistent: `ctas_per_sm` CTAs an SM, fed by ``TileScheduler`` in the order of ``TileOrder``. Barriers
    and descriptors are made ready while the kernel before this one on the stream still runs.
    """

    def __init__(self, config: ForwardConfig, parts: KernelParts):
        validate_forward_config(config)
        self.config, self.parts = config, parts
        self.dtype, self.out_dtype = DSL_DTYPES[config.dtype], DSL_DTYPES[config.out_dtype]
        self.qk_dtype = DSL_DTYPES[config.qk_dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. mQ, mK, mV, mO are (batch, seqlen, heads, head_dim), mLSE (batch, heads, seqlen_q or 0)."""
        tensors = PerOperand(mQ, mK, mV, mO)
        self._launch(tensors, mLSE, tile_counter, LaunchOptions(), softmax_scale, num_ctas, stream)

    @cute.jit
    def _launch(
        self,
        arguments: PerOperand,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        options: LaunchOptions,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """``__call__`` with the tensor of V that ``kv_source`` takes, and the other tensors as ``batch`` takes them."""
        c, batch = self.config, self.parts.batch
        mVt = self.parts.kv_source.arrange_v(arguments.v)
        mQ = batch.view_queries(arguments.q)
        mK = self.parts.kv_source.arrange_k(arguments.k, batch)
        mO = batch.view_outputs(arguments.o)
        mLSE = batch.view_lse(mLSE)

        layouts = smem_layouts(c, self.parts.kv_source)
        load = cpasync.CopyBulkTensorTileG2SOp()
        of_box = batch.layout_of_box(layouts.q), (batch.rows_of_box, c.head_dim)
        atom_Q, tma_Q = cpasync.make_tiled_tma_atom(load, mQ, *of_box)
        atom_K, tma_K = self.parts.kv_source.make_k_atom(mK, layouts.k)
        atom_V, tma_V = self.parts.kv_source.make_v_atom(mVt, self.dtype)
        atom_O, tma_O = batch.make_o_atom(mO, layouts.o)

        lengths = batch.lengths(mQ, mK, options.plan)
        first = ()
        if const_expr(c.stores_first_apart):
            mO_first = batch.view_first(mO, lengths)
            first = batch.make_o_atom(mO_first, layouts.o)
        few = ()
        if const_expr(c.few_keys):
            few = self.parts.kv_source.make_few_atoms(mK, mVt)
        sections = batch.sections(mQ, mK, num_ctas)
        # A softcap leaves tanh(softmax_scale * S / cap) in place of S, so the cap takes the place of softmax_scale.
        scale = options.softcap[0] if const_expr(c.softcap) else softmax_scale
        self.kernel(
            PerOperand(atom_Q, atom_K, atom_V, atom_O),
            PerOperand(tma_Q, tma_K, tma_V, tma_O),
            mLSE,
            tile_counter,
            options.extras,
            scale * Float32(math.log2(math.e)),
            lengths,
            batch.group(mQ, mK),
            sections,
            batch.divisors(mQ, mK, sections),
            options.window,
            tuple(softmax_scale / cap for cap in options.softcap),
            options.slopes,
            options.dropout,
            options.captured,
            options.lists,
            self.parts.kv_source.pages(arguments, options.pages),
            (mO,) if const_expr(c.o_from_registers) else (),
            (mQ, mK, mVt) if const_expr(c.asks_early) else (),
            tuple(first),
            few,
        ).launch(
            grid=(batch.num_ctas(mQ, num_ctas), 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=c.ctas_per_sm,
            use_pdl=c.starts_early,
            preferred_smem_carveout=self._smem_carveout(),
        )

    @cute.kernel
    def kernel(
        self,
        atoms: PerOperand,
        tensors: PerOperand,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        extras: tuple,
        scale_log2: Float32,
        lengths: tuple,
        heads_per_kv_head: Int32,
        sections: tuple,
        divisors: tuple,
        sides: tuple,
        caps: tuple,
        slopes: tuple,
        dropout: tuple,
        captured: tuple,
        lists: tuple,
        pages: tuple,
        outputs: tuple,
        inputs: tuple,
        first: tuple,
        few: tuple,
    ):
        """One CTA: make barriers and pipelines, then part into producer and consumers, who meet in them alone.

        ``scale_log2`` is the factor of scores in exponents of 2: softmax_scale, or the cap of a softcap, times log2(e).
        ``caps`` is empty, or has the factor of a score under the tanh, softmax_scale / cap. ``lengths`` and
        ``divisors`` are what ``batch`` makes of sequence lengths and of numbers to divide by; ``sides`` are those of a
        window; ``outputs`` is that of ``DenseTmaStore``, ``inputs`` that of ``ask_for_first_tile``; ``first`` is empty,
        or has the TMA atom and the tensor of O for the first query tile, ``few`` those of K and V for few keys. The
        other tuples are fields of ``LaunchOptions``, and empty likewise.
        """
        c, parts = self.config, self.parts
        # Shared memory, and the barriers in it.
        layouts = smem_layouts(c, parts.kv_source)
        storage_of_cta = storage_type(c, layouts, parts.kv_source, parts.precision)
        storage = cutlass.memory.SmemAllocator().allocate(storage_of_cta)
        smem = smem_tensors(c, storage, layouts)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in present(atoms):
                cpasync.prefetch_descriptor(atom)
        lane = cute.arch.lane_idx()
        scheduler = self._scheduler(tile_counter, storage, lane)
        pipes = parts.kv_source.make_pipelines(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        of_order = lengths, mLSE, heads_per_kv_head, sections, divisors
        first_tile = c, inputs, parts.kv_source.v_row_mode, parts.batch, of_order
        if const_expr(c.asks_early and not c.waits_to_load):
            ask_for_first_tile(*first_tile)
        if const_expr(c.starts_early and not c.waits_to_load):
            # Nothing above reads or writes global memory. From here on the kernel in front has ended, and the next one
            # may start, up to its own wait.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        # Which tiles there are, the keys that each visits, and what is done to scores.
        order = parts.batch.order(*of_order)
        block_range = parts.batch.block_range(window_of(c.causal, sides), mLSE)
        seqlens = parts.batch.seqlens(lengths)
        rules = self._score_rules(scale_log2, caps, slopes, dropout, captured)
        scale_log2 = scale_after_functions(c.functions, scale_log2)
        pages = tuple(Pages(*each) for each in pages)
        work = Work(scheduler, order, block_range, seqlens, heads_per_kv_head, rules, lists, pages)
        # From here on each warp has its role. Registers go from the producer's warps to the consumers'.
        of_few = self._few_operands(few, storage)
        roles = Roles(self._operands(atoms, tensors, smem), pipes, scale_log2, extras, storage, of_few)
        if const_expr(not c.warp_specialized):
            producer = self._make_producer(roles)
            of_consumer = self._consumer_parts(roles)
            of_consumer = of_consumer._replace(loads=ConsumerLoads(c, producer, warp_idx))
            self._consume(work, of_consumer, (mLSE, outputs, first), warp_idx)
        else:
            if warp_idx < WARPS_PER_WARPGROUP:
                cute.arch.setmaxregister_decrease(c.registers.producer)
                if const_expr(c.waits_to_load):
                    if warp_idx > 0:
                        ask_for_first_tile(*first_tile)
                parts.kv_source.produce(work, self._make_producer(roles), storage, warp_idx)
            else:
                cute.arch.setmaxregister_increase(c.registers.consumer)
                of_consumer = self._consumer_parts(roles)
                if const_expr(c.o_shares_rows):
                    loads = ReturnOfO(pipes.o, warp_idx % WARPS_PER_WARPGROUP, lane)
                    of_consumer = of_consumer._replace(loads=loads)
                self._consume(work, of_consumer, (mLSE, outputs, first), warp_idx - WARPS_PER_WARPGROUP)

    def _operands(self, atoms: PerOperand, tensors: PerOperand, smem: PerOperand) -> PerOperand:
        """What TMA copies: of each operand the atom, the coordinate tensor and shared memory."""
        kv_source = self.parts.kv_source
        # Of Q, K, V and O: which mode of the coordinate tensor has the rows, and how many rows are one step of it.
        row_modes, steps = (0, 0, kv_source.v_row_mode, 0), (1, 1, kv_source.v_row_step, 1)
        rows, keys = self.parts.batch.operand, TmaOperand
        kinds = rows, keys, keys, rows
        given = zip(kinds, atoms, tensors, smem, row_modes, steps, strict=True)
        return PerOperand(*(kind(*each) for kind, *each in given))

    def _few_operands(self, few: tuple, storage: Any) -> tuple[TmaOperand, ...]:
        """What TMA copies of few keys: K and V; ``few`` is that of ``kernel``."""
        if not few:
            return ()
        atom_K, tma_K, atom_V, tma_V = few
        sK, sV = few_tensors(self.parts.kv_source, storage)
        row_mode = self.parts.kv_source.v_row_mode
        return TmaOperand(atom_K, tma_K, sK), TmaOperand(atom_V, tma_V, sV, row_mode)

    def _scheduler(self, tile_counter: cute.Tensor, storage: Any, lane: Int32) -> TileScheduler:
        """Who hands out tiles, and its mailbox."""
        kv_source = self.parts.kv_source
        mailbox = storage.mailbox.get_tensor(cute.make_layout(words_of_mailbox(kv_source)))
        barriers = storage.barriers_mailbox.data_ptr()
        pipe = TileScheduler.make_pipe(barriers, kv_source.receiving_warps)
        return TileScheduler(tile_counter, mailbox, pipe, lane)

    def _score_rules(
        self, scale_log2: Float32, caps: tuple, slopes: tuple, dropout: tuple, captured: tuple
    ) -> ScoreRules:
        """What is done to scores before the softmax; arguments are those of ``kernel``."""
        c = self.config
        inverse_scale = 1.0
        if c.alibi:
            # The bias is added to S before the factor, so it is divided by that first.
            inverse_scale = Float32(math.log2(math.e)) / scale_log2
        functions = function_rules(c.functions, captured, scale_log2)
        softcaps = self.parts.precision.softcaps(caps)
        alibi = ColumnAlibi if c.adds_row_bias_late else Alibi
        return ScoreRules(softcaps, slopes, inverse_scale, Dropout.all_of(dropout), functions, alibi)

    def _make_producer(self, roles: Roles) -> Producer:
        scales = self.parts.precision.make_scales(roles.scale_log2, roles.extras, roles.storage)
        return Producer(self.config, roles.operands, roles.pipes, scales, roles.few)

    def _consumer_parts(self, roles: Roles) -> ConsumerParts:
        """Of a consumer that loads nothing."""
        precision = self.parts.precision
        softmax = precision.make_softmax(roles.scale_log2, roles.extras, roles.storage)
        correction = precision.make_correction(roles.extras, roles.storage)
        loads = NoConsumerLoads()
        return ConsumerParts(roles.operands, roles.pipes, softmax, loads, correction, roles.extras, roles.few)

    @cute.jit
    def _consume(self, work: Work, parts: ConsumerParts, results: tuple, warp: Int32):
        """The consumer warps, numbered from 0: attend to each tile and store it.

        ``results`` are LSE, the ``outputs`` of ``DenseTmaStore``, and ``first`` of ``kernel``.
        """
        c, precision = self.config, self.parts.precision
        lane = cute.arch.lane_idx()
        wg, warp_in_group = warp // WARPS_PER_WARPGROUP, warp % WARPS_PER_WARPGROUP
        softmax, loads, correction = parts.softmax, parts.loads, parts.correction
        consumer = self._make_consumer(parts, wg, (warp_in_group, lane))
        epilogue = self._make_epilogue(work, parts, results, (warp_in_group, lane))
        row_in_tile = wg * WARPGROUP_ROWS + first_row_of_thread(warp_in_group, lane)
        col_in_block = first_column_of_thread(lane)
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)
        mail_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, MAILBOX_STAGES)
        claim_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, MAILBOX_STAGES)
        q_turn = first_turn(c, loads=False)
        consumer.ping_pong.prime()
        tiles = self.parts.kv_source.tiles(work, precision.recomputes_addresses)
        tile = tiles.first(mail_state)
        while tile < tiles.end:
            # Where the tile lies, its key blocks, and the rules for the scores of this thread's rows.
            place = tiles.place(tile, mail_state)
            blocks = work.key_blocks_of(place)
            loads.begin(tile, place, blocks, q_turn ^ 1)
            row = place.m_block * c.tile_m + row_in_tile
            mask = self.parts.batch.mask(work.block_range.window, place.seqlens, row, col_in_block)
            scores = work.score_tile(mask, place.head, place.seqlens.batch, blocks)
            scores = precision.score_tile(scores, softmax)
            softmax.enter_tile(self._rows_of(row, place), place.head, place.seqlens)
            precision.enter_head(softmax, place)
            correction.begin(place.head_kv, place.seqlens.batch)
            # Both GEMMs and the softmax of all blocks; then O and LSE.
            own_blocks = self._blocks_of_warpgroup(blocks, wg)
            ending = ending_of(
                c.finalizes_early, tiles, tile, mail_state, place, precision.recomputes_addresses
            )
            kv_state = consumer.attend(scores, own_blocks, kv_state, q_turn, ending)
            if const_expr(precision.recomputes_addresses):
                place = ending.place()
                row = place.m_block * c.tile_m + row_in_tile
            epilogue.finish(consumer, place, row, q_turn, ending, kv_state)
            # The next tile: its number comes by mail from the producer, or is claimed here where there is none.
            q_turn = next_turn(c, q_turn)
            if const_expr(not c.warp_specialized):
                if warp == 0:
                    work.scheduler.claim(claim_state)
                claim_state.advance()
            tile, mail_state = tiles.next(mail_state)
        if const_expr(not c.warp_specialized):
            if warp == 0:
                work.scheduler.finish()
        epilogue.drain()

    def _make_consumer(self, parts: ConsumerParts, wg: Int32, thread: tuple[Int32, Int32]) -> Consumer:
        """Operands in shared memory are descriptors."""
        precision, mmas = self.parts.precision, self._tiled_mmas()
        # A descriptor is alike in all threads of a warpgroup.
        tSrK = mmas.qk.make_fragment_B(mmas.qk.get_slice(0).partition_B(parts.operands.k.smem))
        queries = self._queries(mmas, parts.operands.q.smem, wg, thread)
        fragments = queries, keep_descriptor(tSrK), *self._few_fragments(mmas, parts.few)
        output = precision.make_output(mmas, self._pv_mma, parts)
        return precision.consumer_type(
            self.config, mmas, fragments, parts.pipes, parts.softmax, output, parts.loads, wg
        )

    def _few_fragments(self, mmas: Mmas, few: tuple[TmaOperand, ...]) -> tuple[cute.Tensor, ...]:
        """Few keys of K and V as operands B."""
        if not few:
            return ()
        (of_k, of_v), qk = few, mmas.narrow_qk[self.config.few_keys]
        tSrK = qk.make_fragment_B(qk.get_slice(0).partition_B(of_k.smem))
        return tSrK, mmas.pv.make_fragment_B(mmas.pv.get_slice(0).partition_B(of_v.smem))

    def _queries(
        self, mmas: Mmas, staged: cute.Tensor, wg: Int32, thread: tuple[Int32, Int32]
    ) -> SharedQueries:
        """Operand A of Q K^T, of a warpgroup, from the ``staged`` Q; ``thread`` is the warp in it and the lane."""
        warp_in_group, lane = thread
        sQ = staged[None, None, wg]
        if self.config.keeps_q:
            return KeptQueries(mmas.qk, sQ, warp_in_group * cute.arch.WARP_SIZE + lane)
        if self.config.q_stages > 1:
            return StagedQueries(mmas.qk.make_fragment_A(mmas.qk.get_slice(0).partition_A(staged)))
        tSrQ = mmas.qk.make_fragment_A(mmas.qk.get_slice(0).partition_A(sQ))
        # Consumers whose producers transpose V have fewer registers.
        has_registers = self.parts.kv_source.row_stages == 0
        return SharedQueries(keep_descriptor(tSrQ) if has_registers else tSrQ)

    def _make_epilogue(
        self, work: Work, parts: ConsumerParts, results: tuple, thread: tuple[Int32, Int32]
    ) -> Epilogue:
        """``results`` are those of ``_consume``, ``thread`` the warp in its warpgroup and the lane."""
        c, (mLSE, outputs, first), (warp_in_group, lane) = self.config, results, thread
        has_quads = self.parts.kv_source.row_stages > 0
        of_store = parts.operands.o, mLSE, c.head_dim_v, outputs, has_quads
        if first:
            of_first = (TmaOperand(*first, parts.operands.o.smem),)
            store = CutTmaStore(*of_store, of_first, c.consumers)
        else:
            store = self.parts.batch.store_type(*of_store)
        recomputes = self.parts.precision.recomputes_addresses
        factors = tuple(each.factor for each in work.rules.dropout)
        return Epilogue(store, parts.correction, lane, warp_in_group, recomputes, factors)

    def _rows_of(self, row: Int32, place: TilePlace) -> tuple[Int32, ...]:
        """The thread's rows of a tile, of which ``row`` is the first; behind the last of a query that one again, where
        none is nobody's."""
        rows, group = tuple(row + r * ROW_STRIDE for r in range(ROWS_PER_THREAD)), self.config.group
        if WARPGROUP_ROWS % group:
            return rows
        last_row = place.seqlens.seqlen_q * group - 1
        return tuple(cutlass.min(each, last_row) for each in rows)

    def _blocks_of_warpgroup(self, blocks: KeyBlocks, wg: Int32) -> KeyBlocks:
        """Those of the tile's ``blocks`` that a warpgroup visits: all, but for warpgroups that walk apart."""
        if self.config.walks_apart:
            return PartOfBlocks.of(blocks, wg, self.config.consumers)
        if self.config.shares_first_block:
            return SharedBlocks.of(blocks, wg, self.config.consumers)
        return blocks

    def _smem_carveout(self) -> int | None:
        """Percent of the L1 cache to use as shared memory. For several CTAs an SM the DSL would ask the GPU, and there
        may be none when compiling."""
        return None if self.config.ctas_per_sm == 1 else 100

    def _tiled_mmas(self) -> Mmas:
        """S = Q K^T, Q from shared memory or registers, and O += P V with P in registers; each for one warpgroup."""
        c = self.config
        few = (c.few_keys,) if c.few_keys else ()
        narrow = {keys: self._qk_mma(keys) for keys in (*few, *c.first_widths)}
        whole = (self._pv_mma(c.head_dim_v),) if c.columns_pv < c.head_dim_v else ()
        return Mmas(self._qk_mma(c.tile_n), self._pv_mma(c.columns_pv), narrow, whole)

    def _qk_mma(self, keys: int) -> cute.TiledMma:
        """Q K^T of so many keys."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.qk_dtype,
            self.qk_dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            DSL_DTYPES[self.config.score_dtype],
            ONE_WARPGROUP,
            (WARPGROUP_ROWS, keys),
            a_source=OperandSource.RMEM if self.config.keeps_q else OperandSource.SMEM,
        )

    def _pv_mma(self, columns: int) -> cute.TiledMma:
        """P V in so many columns of V."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            self.parts.kv_source.v_major,
            Float32,
            ONE_WARPGROUP,
            (WARPGROUP_ROWS, columns),
            a_source=OperandSource.RMEM,
        )


class GeneralForwardKernel(ForwardKernel):
    """``ForwardKernel`` with whatever its config asks for beside a causal mask."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        attention_chunk: Int32 | None,
        plan: cute.Tensor | None,
        sequences: Int32 | None,
        page_table: cute.Tensor | None,
        leftpad: cute.Tensor | None,
        softcap: Float32 | None,
        alibi_slopes: cute.Tensor | None,
        sinks: cute.Tensor | None,
        philox: cute.Tensor | None,
        kept: Int32 | None,
        *captured_ctas_and_stream,
    ):
        """Launch. What the config has no use for is None.

        The sides of a window are 0 or more, and NO_LIMIT for one without an end; with ``causal`` the right one is 0,
        whatever is given. ``attention_chunk`` is 1 or more keys. With the layout "varlen" mQ, mK, mV, mO are (total,
        heads, head_dim), mLSE (heads, total_q or 0), and ``plan`` is of query tiles, for ``sequences`` - 1 sequences of
        the caller's. With ``page_box`` mK and mV are (pages, page_size, heads, head_dim), and ``page_table`` and
        ``leftpad`` are those of ``Pages``. ``softcap`` is positive; alibi_slopes are float32 (batch, heads) and sinks
        float32 (heads,); ``philox`` and ``kept`` are those of ``Dropout.of``. Then come the tensors that the config's
        functions read, with ``block_lists`` the tensor of lists (``Work``), num_ctas and the stream.
        """
        c = self.config
        *captured, num_ctas, stream = captured_ctas_and_stream
        of_functions = len(c.functions.tensors)
        options = LaunchOptions(
            extras=(sinks,) if const_expr(c.sinks) else (),
            plan=(plan, sequences) if const_expr(c.layout == VARLEN) else (),
            pages=(page_table, leftpad) if const_expr(c.page_box) else (),
            window=sides_of(c, window_left, window_right, attention_chunk),
            softcap=(softcap,) if const_expr(c.softcap) else (),
            slopes=(alibi_slopes,) if const_expr(c.alibi) else (),
            dropout=(philox, kept) if const_expr(c.dropout) else (),
            captured=tuple(captured[:of_functions]),
            lists=tuple(captured[of_functions:]),
        )
        tensors = PerOperand(mQ, mK, mV, mO)
        self._launch(tensors, mLSE, tile_counter, options, softmax_scale, num_ctas, stream)
