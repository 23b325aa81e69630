"""The producer warp of the forward kernel: issues every TMA load, tile after tile."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr

from cute_kernels.integers import ceil_div
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks, PartOfBlocks
from cute_kernels.seqlen import PackedRows, SeqlenInfo
from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.forward.operands import PerOperand, Pipelines, o_state, producer_slot, q_state
from hopper.forward.unscaled import NoScales
from hopper.tiles import TmaOperand


class NoWord(LoopInvariant):
    """Told of each block of a tile before it is loaded, and does nothing."""

    def of_tile(self, blocks: Int32):
        """Before the first one of so many."""

    def of_block(self, left: Int32):
        """Before each other one, with which so many are left."""


NO_WORD = NoWord()


class Producer(LoopInvariant):
    """Loads Q once a tile, one stage for each consumer warpgroup, and K and V once a key block.

    The order is Q0, K_last, Q1, (Q2,) V_last, K, V, ...: the first warpgroup can start its first GEMM as early
    as possible, and K runs ahead of V as the pipelined consumer reads them. With ``loads_k_ahead`` it runs a block
    ahead: Q0, K_last, Q1, K, V_last, K, V, ..., V.
    """

    def __init__(
        self,
        config: ForwardConfig,
        operands: PerOperand,
        pipes: Pipelines,
        scales: NoScales,
        few: tuple[TmaOperand, ...] = (),
    ):
        self.config, self.few = config, few
        self.q, self.k, self.v = operands.q, operands.k, operands.v
        self.pipes = pipes
        self.scales = scales

    @cute.jit
    def load_tile(
        self,
        coordinates: tuple,
        head_kv: Int32,
        blocks: KeyBlocks,
        kv_state: pipeline.PipelineState,
        q_turn: Int32,
        word: NoWord = NO_WORD,
    ) -> pipeline.PipelineState:
        """Issue the loads of one output tile; returns the state of K's and V's pipelines after it. ``word`` is told of
        each block."""
        c = self.config
        m_block, head, _ = coordinates
        seqlens = blocks.seqlens
        tQsQ, tQgQ = self.q.partition((WARPGROUP_ROWS, c.head_dim), (None, 0), head, seqlens.rows_q)
        tKsK, tKgK = self.k.partition((c.tile_n, c.head_dim), (None, 0), head_kv, seqlens.rows_k)
        tVsV, tVgV = self.v.partition((c.head_dim_v, c.tile_n), (0, None), head_kv, self._rows_v(seqlens))

        word.of_tile(blocks.count)
        self._load_q(tQsQ, tQgQ, m_block, 0, q_turn)
        self._load_few_keys(blocks, head_kv, 0, q_turn)
        first = blocks.number(blocks.last)
        self.scales.begin()
        self.scales.publish(head_kv, seqlens, first, producer_slot(kv_state))
        self._load(self.pipes.k, self.k.atom, tKsK, tKgK, first, kv_state)
        for wg in cutlass.range_constexpr(1, c.consumers):
            self._load_q(tQsQ, tQgQ, m_block, wg, q_turn)
            self._load_few_keys(blocks, head_kv, wg, q_turn)
        if const_expr(c.loads_k_ahead):
            tensors = (tKsK, tKgK), (tVsV, tVgV)
            kv_state = self._load_ahead(blocks, head_kv, first, tensors, kv_state, word)
            self._load_few_values(blocks, head_kv, q_turn)
            return kv_state
        for pipe in self.pipes.o:
            # Q and K of a tile are loaded while O of the one before leaves V's place.
            pipe.producer_acquire(o_state(q_turn))
        self._load(self.pipes.v, self.v.atom, tVsV, tVgV, first, kv_state)
        kv_state.advance()
        for step in cutlass.range(blocks.count - 1, unroll=1):
            n_block = blocks.number(blocks.end - 2 - step)
            word.of_block(blocks.count - 1 - step)
            self.scales.publish(head_kv, seqlens, n_block, producer_slot(kv_state))
            self._load(self.pipes.k, self.k.atom, tKsK, tKgK, n_block, kv_state)
            self._load(self.pipes.v, self.v.atom, tVsV, tVgV, n_block, kv_state)
            kv_state.advance()
        self._load_few_values(blocks, head_kv, q_turn)
        return kv_state

    @cute.jit
    def _load_few_keys(self, blocks: KeyBlocks, head_kv: Int32, wg: cutlass.Constexpr[int], q_turn: Int32):
        """K of few keys of a warpgroup, with its Q."""
        if const_expr(len(self.few) > 0):
            c, (of_k, _) = self.config, self.few
            tKsK, tKgK = of_k.partition((c.few_keys, c.head_dim), (None, 0), head_kv, blocks.seqlens.rows_k)
            full = self.pipes.q.producer_get_barrier(q_state(c, wg, q_turn))
            number = self._number_of_few(blocks, wg)
            cute.copy(of_k.atom, tKgK[None, number], tKsK[None, wg], tma_bar_ptr=full)

    @cute.jit
    def _load_few_values(self, blocks: KeyBlocks, head_kv: Int32, q_turn: Int32):
        """V of few keys of each warpgroup, behind all blocks, as it is asked for."""
        if const_expr(len(self.few) > 0):
            c, (_, of_v), (pipe,) = self.config, self.few, self.pipes.few
            tVsV, tVgV = of_v.partition((c.head_dim_v, c.few_keys), (0, None), head_kv, blocks.seqlens.rows_k)
            for wg in cutlass.range_constexpr(c.consumers):
                number = self._number_of_few(blocks, wg)
                self._load(pipe, of_v.atom, tVsV, tVgV, number, q_state(c, wg, q_turn))

    @cute.jit
    def _number_of_few(self, blocks: KeyBlocks, wg: cutlass.Constexpr[int]) -> Int32:
        """Of the few keys that a warpgroup sees. Where there are none, what lies behind the sequence, which is zeros
        and costs no memory."""
        c = self.config
        own = PartOfBlocks.of(blocks, wg, c.consumers)
        number = ceil_div(blocks.seqlens.seqlen_k, c.few_keys)
        if own.has_few:
            number = own.end * (c.tile_n // c.few_keys)
        return number

    @cute.jit
    def load_first(
        self,
        coordinates: tuple,
        head_kv: Int32,
        blocks: KeyBlocks,
        k_state: pipeline.PipelineState,
        q_turn: Int32,
    ):
        """Issue the loads of a tile's first block of K, then those of its Q: the stage of K is free before the last
        Q K^T of the tile before has read Q, and the block's scales come from global memory meanwhile."""
        m_block, head = coordinates
        self.scales.begin()
        self.load_keys(head_kv, blocks.seqlens, blocks.last, k_state)
        self._load_queries(m_block, head, blocks.seqlens, q_turn)

    @cute.jit
    def _load_ahead(
        self,
        blocks: KeyBlocks,
        head_kv: Int32,
        n_block: Int32,
        tensors: tuple[tuple[cute.Tensor, cute.Tensor], tuple[cute.Tensor, cute.Tensor]],
        kv_state: pipeline.PipelineState,
        word: NoWord,
    ) -> pipeline.PipelineState:
        """What follows K of the first block, ``n_block``: V of each block behind K of the next. ``tensors`` are those
        of K and V. There are two stages or more, and a consumer releases K of a block before it asks for V of it, so
        that neither waits for the other."""
        of_k, of_v = tensors
        for step in cutlass.range(blocks.count - 1, unroll=1):
            k_state = kv_state.clone()
            k_state.advance()
            following = blocks.number(blocks.end - 2 - step)
            word.of_block(blocks.count - 1 - step)
            self.scales.publish(head_kv, blocks.seqlens, following, producer_slot(k_state))
            self._load(self.pipes.k, self.k.atom, *of_k, following, k_state)
            self._load(self.pipes.v, self.v.atom, *of_v, n_block, kv_state)
            n_block = following
            kv_state.advance()
        self._load(self.pipes.v, self.v.atom, *of_v, n_block, kv_state)
        kv_state.advance()
        return kv_state

    @cute.jit
    def load_queries(self, m_block: Int32, head: Int32, seqlens: SeqlenInfo, q_turn: Int32):
        """Issue the loads of Q for one output tile, before those of K."""
        self.scales.begin()
        self._load_queries(m_block, head, seqlens, q_turn)

    @cute.jit
    def _load_queries(self, m_block: Int32, head: Int32, seqlens: SeqlenInfo, q_turn: Int32):
        rows = seqlens.rows_q
        tQsQ, tQgQ = self.q.partition((WARPGROUP_ROWS, self.config.head_dim), (None, 0), head, rows)
        for wg in cutlass.range_constexpr(self.config.consumers):
            self._load_q(tQsQ, tQgQ, m_block, wg, q_turn)

    @cute.jit
    def load_keys(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, state: pipeline.PipelineState):
        """Issue the load of one block of K."""
        tile, rows = (self.config.tile_n, self.config.head_dim), seqlens.rows_k
        tKsK, tKgK = self.k.partition(tile, (None, 0), head_kv, rows)
        self.scales.publish(head_kv, seqlens, n_block, producer_slot(state))
        self._load(self.pipes.k, self.k.atom, tKsK, tKgK, n_block, state)

    @cute.jit
    def load_values(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, state: pipeline.PipelineState):
        """Issue the load of one block of V."""
        tile, rows = (self.config.head_dim_v, self.config.tile_n), self._rows_v(seqlens)
        tVsV, tVgV = self.v.partition(tile, (0, None), head_kv, rows)
        self._load(self.pipes.v, self.v.atom, tVsV, tVgV, n_block, state)

    def _rows_v(self, seqlens: SeqlenInfo) -> PackedRows | Int32:
        return seqlens.rows_k if self.v.step == 1 else seqlens.padded_rows_k(self.v.step)

    @cute.jit
    def _load_q(
        self, tQsQ: cute.Tensor, tQgQ: cute.Tensor, m_block: Int32, wg: cutlass.Constexpr[int], turn: Int32
    ):
        state = q_state(self.config, wg, turn)
        self._load(self.pipes.q, self.q.atom, tQsQ, tQgQ, m_block * self.config.consumers + wg, state)

    @cute.jit
    def _load(
        self,
        pipe: pipeline.PipelineTmaAsync,
        atom: cute.CopyAtom,
        smem: cute.Tensor,
        gmem: cute.Tensor,
        block: Int32,
        state: pipeline.PipelineState,
    ):
        pipe.producer_acquire(state)
        cute.copy(
            atom, gmem[None, block], smem[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state)
        )
