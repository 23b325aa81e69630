"""A consumer warpgroup of the forward kernel: 64 query rows against all their key blocks."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.dropout import Kept, zero_dropped
from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.score_tile import ScoreTile
from cute_kernels.softmax import OnlineSoftmax
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS, ForwardConfig
from hopper.forward.barriers import PingPong
from hopper.forward.consumer_loads import NoConsumerLoads
from hopper.forward.ending import TileEnding
from hopper.forward.operands import Mmas, Pipelines, consumer_slot, q_state
from hopper.forward.output import Output
from hopper.forward.queries import SharedQueries
from hopper.wgmma import issue_gemm


class Consumer(LoopInvariant):
    """The two GEMMs of a tile and the softmax between them, for the rows of one warpgroup.

    Q and K are operands of WGMMA, K in shared memory with a last mode over stages. P goes from the softmax to the
    second GEMM in registers; O stays in registers until the epilogue, and ``output`` says how P V reaches it.
    """

    def __init__(
        self,
        config: ForwardConfig,
        mmas: Mmas,
        operands: tuple[SharedQueries | cute.Tensor, ...],
        pipes: Pipelines,
        softmax: OnlineSoftmax,
        output: Output,
        loads: NoConsumerLoads,
        wg: Int32,
    ):
        self.config = config
        self.mmas = mmas
        self.queries, self.tSrK, *self.few = operands
        self.pipes = pipes
        self.softmax = softmax
        self.output = output
        self.loads = loads
        self.ping_pong = PingPong(config, wg)
        self.wg = wg
        self.tOrP = cute.make_rmem_tensor(
            self.mmas.pv.partition_shape_A((WARPGROUP_ROWS, config.tile_n)), self.mmas.pv.op.a_dtype
        )

    @cute.jit
    def attend(
        self,
        scores: ScoreTile,
        blocks: KeyBlocks,
        kv_state: PipelineState,
        q_turn: Int32,
        ending: TileEnding,
    ) -> PipelineState:
        """Leave one tile's O, not yet normalised, in ``output`` and its row statistics in ``softmax``.

        Visits ``blocks`` from the last to the first: those that a mask cuts on the right, those that none does, those
        that a window cuts on the left. So only the loops at the ends pay for masks. Lets ``scores`` finish those of
        each: cap, bias, functions, mask. Releases Q unless O is to be staged in its place. Where warpgroups walk apart
        ``blocks`` are ``PartOfBlocks``, and those that are left out are let pass before and behind.
        Returns the state of K's and V's pipelines after the tile. With ``ends_in_halves`` the last P V is still made,
        and ``await_half`` has to follow.
        """
        unmasked = blocks.unmasked
        if const_expr(self.config.walks_apart):
            kv_state = self._leave_out(blocks.left_out_before, kv_state)
        self.loads.await_queries()
        of_q = q_state(self.config, self.wg, q_turn)
        self.pipes.q.consumer_wait(of_q)
        self._queries_have_come()
        self.queries.read(of_q.index)
        self.output.clear()
        if const_expr(self.config.lets_blocks_pass):
            if blocks.m_block * self.config.tile_m + self.wg * WARPGROUP_ROWS < blocks.seqlens.seqlen_q:
                kv_state = self._attend_pipelined(scores, blocks, unmasked, kv_state, q_turn, ending)
            else:
                kv_state = self._let_pass(blocks, kv_state, q_turn)
        elif const_expr(self.config.pipelined):
            kv_state = self._attend_pipelined(scores, blocks, unmasked, kv_state, q_turn, ending)
        else:
            kv_state = self._attend_in_order(scores, blocks, unmasked, kv_state, q_turn)
        if const_expr(self.config.walks_apart and blocks.window.has_left):
            kv_state = self._leave_out(blocks.left_out_behind, kv_state)
        return kv_state

    @cute.jit
    def _leave_out(
        self, count: Int32, kv_state: PipelineState, in_turn: cutlass.Constexpr[bool] = False
    ) -> PipelineState:
        """So many blocks that only other warpgroups visit. They are awaited: a stage may be released once a round."""
        for _ in cutlass.range(count, unroll=1):
            self.pipes.k.consumer_wait(kv_state)
            self.pipes.k.consumer_release(kv_state)
            if const_expr(in_turn):
                self.ping_pong.take_turn()
                self.ping_pong.pass_turn()
            self.pipes.v.consumer_wait(kv_state)
            self.pipes.v.consumer_release(kv_state)
            kv_state.advance()
        return kv_state

    def _let_pass(self, blocks: KeyBlocks, kv_state: PipelineState, q_turn: Int32) -> PipelineState:
        """A tile of which this warpgroup has no query: all of its blocks, in the turns of one that visits them. O stays
        zero, and nobody stores it or its statistics."""
        kv_state = self._leave_out(1, kv_state, in_turn=self.config.begins_in_turn)
        kv_state = self._leave_out(blocks.count - 1, kv_state, in_turn=True)
        self._release_q(q_turn)
        return kv_state

    def _queries_have_come(self):
        """Before the first Q K^T of a tile."""

    @cute.jit
    def _attend_pipelined(
        self,
        scores: ScoreTile,
        blocks: KeyBlocks,
        unmasked: Int32,
        kv_state: PipelineState,
        q_turn: Int32,
        ending: TileEnding,
    ) -> PipelineState:
        """Two-stage pipeline: S of the next block is in flight while P V of this one is, and the softmax of the
        next runs under P V of this (FlashAttention-3, algorithm 2)."""
        if const_expr(self.config.cuts_first_product):
            n_block, kv_state = self._cut_blocks(scores, blocks, kv_state, self.config.first_widths)
            right_masked = cutlass.max(n_block + 1 - unmasked, 0)
        else:
            self._first_block(scores, blocks, kv_state)
            n_block, right_masked = blocks.end - 2, blocks.right_masked(unmasked)
        if const_expr(blocks.window.has_right):
            for _ in cutlass.range(right_masked, unroll=1):
                kv_state = self._overlapped_block(scores, n_block, kv_state, True)
                n_block -= 1
        if const_expr(blocks.window.has_left):
            n_block, kv_state = self._blocks_within(scores, blocks, n_block, kv_state)
            for _ in cutlass.range(blocks.number_from(n_block), unroll=1):
                kv_state = self._overlapped_block(scores, n_block, kv_state, True)
                n_block -= 1
        else:
            kv_state = self._unmasked_blocks(scores, blocks, n_block, kv_state)
        self._few_block(scores, blocks, kv_state, q_turn)
        self._start_last_product(blocks, kv_state, q_turn)
        ending.under_last_product(self.softmax)
        if const_expr(not self.config.ends_in_halves):
            self.output.wait(self.tOrP, kv_state.index)
            self.pipes.v.consumer_release(kv_state)
            for pipe in self.pipes.few:
                pipe.consumer_release(q_state(self.config, self.wg, q_turn))
            self.output.collect()
        kv_state.advance()
        return kv_state

    @cute.jit
    def _few_block(self, scores: ScoreTile, blocks: KeyBlocks, v_state: PipelineState, q_turn: Int32):
        """S and P of few keys, if there are any, together with P V of the block at ``v_state``."""
        if const_expr(self.config.few_keys > 0):
            if blocks.has_few:
                acc_S, (tSrK, _) = self._make_acc_S(self.config.few_keys), self.few
                qk = self._qk_of(self.config.few_keys)
                issue_gemm(qk, acc_S, self.queries.fragment, tSrK[None, None, None, self.wg], False)
                self.output.enter_product()
                self.output.start(self.tOrP, v_state.index)
                self.softmax.take_bias(scores.row_bias(blocks.end))
                self.softmax.enter_block(consumer_slot(v_state))
                warpgroup.wait_group(1)
                self._release_q(q_turn)
                scores.finish(acc_S, blocks.end, True)
                self.softmax.take_scores(acc_S, is_first=False)
                self.softmax.exponentiate(acc_S, 0, is_first=False)
                self.softmax.take_second_row(acc_S)
                self.output.wait(self.tOrP, v_state.index)
                self._finish_P(acc_S, ())
                self.output.collect()
                self.output.rescale()

    @cute.jit
    def _start_last_product(self, blocks: KeyBlocks, kv_state: PipelineState, q_turn: Int32):
        """P V of the block that is visited last, or of few keys. Q is given back before it."""
        if const_expr(self.config.few_keys > 0):
            # Loaded for every tile, so that a tile is a phase.
            self.pipes.few[0].consumer_wait(q_state(self.config, self.wg, q_turn))
            if blocks.has_few:
                self.output.enter_product()
                self.output.start_few(self.tOrP, self.few[1][None, None, None, self.wg])
            else:
                self._start_last_block(kv_state, q_turn)
        else:
            self._start_last_block(kv_state, q_turn)

    @cute.jit
    def _start_last_block(self, kv_state: PipelineState, q_turn: Int32):
        self._release_q(q_turn)
        self.output.enter_product()
        self._await_v_for_product(kv_state)
        self.output.start_last(self.tOrP, kv_state.index)

    @cute.jit
    def await_half(self, h: cutlass.Constexpr[int], kv_state: PipelineState):
        """Until half ``h`` of O's columns is complete, of a tile that ``attend`` has left at ``kv_state``; the second
        half of ``OutputInHalves`` comes last."""
        warpgroup.wait_group(1 - h)
        if const_expr(h == 1):
            last = kv_state.clone()
            last.reverse()
            self.pipes.v.consumer_release(last)

    @cute.jit
    def _blocks_within(
        self, scores: ScoreTile, blocks: KeyBlocks, n_block: Int32, kv_state: PipelineState
    ) -> tuple[Int32, PipelineState]:
        """Those from ``n_block`` down to the last that the left side of a window masks, which comes back."""
        return self._blocks_down(scores, n_block, n_block + 1 - blocks.left_masked, kv_state)

    @cute.jit
    def _unmasked_blocks(
        self, scores: ScoreTile, blocks: KeyBlocks, n_block: Int32, kv_state: PipelineState
    ) -> PipelineState:
        """Those from ``n_block`` down to the first."""
        return self._blocks_down(scores, n_block, blocks.number_from(n_block), kv_state)[1]

    @cute.jit
    def _blocks_down(
        self, scores: ScoreTile, n_block: Int32, count: Int32, kv_state: PipelineState
    ) -> tuple[Int32, PipelineState]:
        """So many blocks without a mask from ``n_block`` down, which comes back as the one behind them."""
        if const_expr(self.config.asks_ahead):
            k_state = kv_state.clone()
            k_state.advance()
            has_come = self._has_come(k_state)
            for _ in cutlass.range(count, unroll=1):
                kv_state, k_state, has_come = self._asking_block(scores, n_block, kv_state, k_state, has_come)
                n_block -= 1
        else:
            for _ in cutlass.range(count, unroll=1):
                kv_state = self._overlapped_block(scores, n_block, kv_state, False)
                n_block -= 1
        return n_block, kv_state

    def _has_come(self, k_state: PipelineState) -> Boolean:
        """Whether K of a block is there; asked without waiting for it."""
        full = self.pipes.k.sync_object_full.get_barrier(k_state.index)
        return cute.arch.mbarrier_test_wait(full, k_state.phase)

    @cute.jit
    def _asking_block(
        self,
        scores: ScoreTile,
        n_block: Int32,
        v_state: PipelineState,
        k_state: PipelineState,
        has_come: Boolean,
    ) -> tuple[PipelineState, PipelineState, Boolean]:
        """``_overlapped_block`` without a mask, which asks for K of the block behind it under its exponentials.

        ``has_come`` is the answer for K of this one, at ``k_state``. Returns the states of this block and of the one
        behind it, and the answer for that.
        """
        self.pipes.k.consumer_wait(k_state, has_come)
        after = k_state.clone()
        after.advance()
        (has_come,) = self._block_of_k(scores, n_block, v_state, k_state, False, (after,))
        return k_state, after, has_come

    @cute.jit
    def _first_block(self, scores: ScoreTile, blocks: KeyBlocks, kv_state: PipelineState):
        """S and P of the block that is visited first; of its first keys alone where the rows see no more of it."""
        self._first_of_width(scores, blocks, kv_state, self.config.first_widths)

    @cute.jit
    def _first_of_width(
        self,
        scores: ScoreTile,
        blocks: KeyBlocks,
        kv_state: PipelineState,
        widths: cutlass.Constexpr[tuple[int, ...]],
    ):
        """``_first_block`` of the first of these ``widths`` that does, or of the whole block. It calls itself
        when compiled: there is a branch for each width."""
        if const_expr(len(widths) > 0):
            if blocks.keys_of_first <= widths[0]:
                self._clear_P()
                self._first_scores(scores, blocks.last, kv_state, widths[0])
            else:
                self._first_of_width(scores, blocks, kv_state, widths[1:])
        elif const_expr(self.config.has_whole_beginnings):
            if blocks.keys_of_first < self.config.tile_n:
                self._first_scores(scores, blocks.last, kv_state)
            else:
                self._first_scores(scores, blocks.last, kv_state, is_masked=False)
        else:
            self._first_scores(scores, blocks.last, kv_state)

    @cute.jit
    def _cut_blocks(
        self,
        scores: ScoreTile,
        blocks: KeyBlocks,
        kv_state: PipelineState,
        widths: cutlass.Constexpr[tuple[int, ...]],
    ) -> tuple[Int32, PipelineState]:
        """``_first_of_width``, and where a width does also the block behind it, with P V of so many keys alone.

        Returns the number of the block that comes next, and the state of the last one whose P V is due.
        """
        n_block = blocks.end - 2
        if const_expr(len(widths) > 0):
            if blocks.keys_of_first <= widths[0]:
                self._clear_P()
                self._first_scores(scores, blocks.last, kv_state, widths[0])
                if blocks.number_from(n_block) > 0:
                    is_masked = const_expr(blocks.window.has_right)
                    kv_state = self._overlapped_block(scores, n_block, kv_state, is_masked, widths[0])
                    n_block -= 1
            else:
                n_block, kv_state = self._cut_blocks(scores, blocks, kv_state, widths[1:])
        else:
            self._first_scores(scores, blocks.last, kv_state)
        return n_block, kv_state

    def _clear_P(self):
        """Before a block of which only a part is worked on: what the rest adds to P V."""
        cute.recast_tensor(self.tOrP, Int32).fill(0)

    @cute.jit
    def _first_scores(
        self,
        scores: ScoreTile,
        n_block: Int32,
        kv_state: PipelineState,
        keys: cutlass.Constexpr[int] = 0,
        is_masked: cutlass.Constexpr[bool] = True,
    ):
        """S and P of the first block, which is masked where it may hold the end of the sequence. Of its first ``keys``
        alone, if they are given."""
        acc_S = self._make_acc_S(keys)
        self.pipes.k.consumer_wait(kv_state)
        if const_expr(self.config.begins_in_turn):
            self.ping_pong.take_turn()
        self._start_scores(acc_S, kv_state)
        if const_expr(self.config.begins_in_turn):
            self.ping_pong.pass_turn()
        self.softmax.take_bias(scores.row_bias(n_block))
        self.softmax.enter_first_block()
        self.softmax.enter_block(consumer_slot(kv_state))
        kept = scores.kept(n_block)
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(kv_state)
        scores.finish(acc_S, n_block, is_masked)
        self.softmax.take_scores(acc_S, is_first=True)
        # V of a block is awaited where P of it is made, here as in the loop.
        if const_expr(not self.config.loads_k_ahead):
            self._await_v_for_P(kv_state)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self._exponentiate(acc_S, r, is_first=True, kept=kept)
        if const_expr(self.config.loads_k_ahead):
            self._await_v_for_P(kv_state)

    @cute.jit
    def _overlapped_block(
        self,
        scores: ScoreTile,
        n_block: Int32,
        v_state: PipelineState,
        is_masked: cutlass.Constexpr[bool],
        keys: cutlass.Constexpr[int] = 0,
    ) -> PipelineState:
        """Scores of block ``n_block`` together with O += P V of the block before it, at ``v_state``, of its first
        ``keys`` alone, if they are given.

        The wait for P V stands between the exponentials of the thread's two rows: those of the first hide the GEMM,
        those of the second leave issue slots (MUFU is slow) to the conversion of P and the rescaling of O. V of
        this block is awaited there too, not where it is used: the spin on its barrier ends a basic block, and
        without one ptxas moves the wait for P V up in front of the softmax. ``awaits_v_late`` says where that is worth
        less than time for V.
        """
        k_state = v_state.clone()
        k_state.advance()
        self.pipes.k.consumer_wait(k_state)
        self._block_of_k(scores, n_block, v_state, k_state, is_masked, keys=keys)
        return k_state

    @cute.jit
    def _block_of_k(
        self,
        scores: ScoreTile,
        n_block: Int32,
        v_state: PipelineState,
        k_state: PipelineState,
        is_masked: cutlass.Constexpr[bool],
        after: tuple[PipelineState, ...] = (),
        keys: cutlass.Constexpr[int] = 0,
    ) -> tuple[Boolean, ...]:
        """What ``_overlapped_block`` does once K is there. Tells of each state of ``after`` whether its K has come."""
        acc_S = self._make_acc_S()
        self.ping_pong.take_turn()
        self._start_scores(acc_S, k_state)
        self.output.enter_product()
        self._await_v_for_product(v_state)
        if const_expr(keys > 0):
            self.output.start_cut(self.tOrP, v_state.index, keys)
        else:
            self.output.start(self.tOrP, v_state.index)
        self.ping_pong.pass_turn()
        self.softmax.take_bias(scores.row_bias(n_block))
        self.softmax.enter_block(consumer_slot(k_state))
        kept = scores.kept(n_block)
        # All but the last group: S has come, and P V may still run.
        warpgroup.wait_group(1)
        self.pipes.k.consumer_release(k_state)
        scores.finish(acc_S, n_block, is_masked)
        self.softmax.take_scores(acc_S, is_first=False)
        self.softmax.exponentiate(acc_S, 0, is_first=False)
        zero_dropped(acc_S, 0, kept)
        self.loads.load_next()
        self._await_v_for_P(k_state)
        have_come = tuple(self._has_come(state) for state in after)
        self.softmax.take_second_row(acc_S)
        if const_expr(self.config.shrinks_in_branch):
            has_new_maximum = self.softmax.has_new_maximum()
            self.output.wait(self.tOrP, v_state.index)
            self.pipes.v.consumer_release(v_state)
            if has_new_maximum:
                self.output.rescale()
                self._finish_P(acc_S, kept)
            else:
                self._finish_P(acc_S, kept)
            self.output.collect()
        else:
            self.output.wait(self.tOrP, v_state.index)
            self.pipes.v.consumer_release(v_state)
            self._finish_P(acc_S, kept)
            self.output.collect()
            self.output.rescale()
        return have_come

    def _await_v_for_P(self, state: PipelineState):
        """V of a block whose P is being made."""
        if const_expr(not self.config.awaits_v_late):
            self.pipes.v.consumer_wait(state)

    def _await_v_for_product(self, state: PipelineState):
        """V of a block whose P V starts."""
        if const_expr(self.config.awaits_v_late):
            self.pipes.v.consumer_wait(state)

    @cute.jit
    def _finish_P(self, acc_S: cute.Tensor, kept: tuple[Kept, ...]):
        """P of the first row, whose exponentials are there, and all of the second."""
        self.softmax.store_P(self.tOrP, acc_S, 0)
        self._exponentiate(acc_S, 1, is_first=False, kept=kept)

    @cute.jit
    def _attend_in_order(
        self,
        scores: ScoreTile,
        blocks: KeyBlocks,
        unmasked: Int32,
        kv_state: PipelineState,
        q_turn: Int32,
    ) -> PipelineState:
        """One block after the other, each S, softmax, P V in sequence: only ping-pong overlaps anything."""
        kv_state = self._sequential_block(scores, blocks.last, kv_state, True, True)
        n_block = blocks.end - 2
        if const_expr(blocks.window.has_right):
            for _ in cutlass.range(blocks.right_masked(unmasked), unroll=1):
                kv_state = self._sequential_block(scores, n_block, kv_state, True, False)
                n_block -= 1
        if const_expr(blocks.window.has_left):
            for _ in cutlass.range(n_block + 1 - blocks.left_masked, unroll=1):
                kv_state = self._sequential_block(scores, n_block, kv_state, False, False)
                n_block -= 1
        for _ in cutlass.range(blocks.number_from(n_block), unroll=1):
            kv_state = self._sequential_block(scores, n_block, kv_state, blocks.window.has_left, False)
            n_block -= 1
        self._release_q(q_turn)
        return kv_state

    @cute.jit
    def _sequential_block(
        self,
        scores: ScoreTile,
        n_block: Int32,
        kv_state: PipelineState,
        is_masked: cutlass.Constexpr[bool],
        is_first: cutlass.Constexpr[bool],
    ) -> PipelineState:
        acc_S = self._make_acc_S()
        self.pipes.k.consumer_wait(kv_state)
        self.ping_pong.take_turn()
        self._start_scores(acc_S, kv_state)
        self.softmax.take_bias(scores.row_bias(n_block))
        if const_expr(is_first):
            self.softmax.enter_first_block()
        self.softmax.enter_block(consumer_slot(kv_state))
        warpgroup.wait_group(0)
        self.ping_pong.pass_turn()
        self.pipes.k.consumer_release(kv_state)
        scores.finish(acc_S, n_block, is_masked)
        self.softmax.take_scores(acc_S, is_first)
        self.loads.load_next()
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            if const_expr(r == 1 and not is_first):
                self.softmax.take_second_row(acc_S)
            self._exponentiate(acc_S, r, is_first)
        if const_expr(not is_first):
            self.output.rescale()
        self.output.enter_product()
        self.pipes.v.consumer_wait(kv_state)
        self.output.start(self.tOrP, kv_state.index)
        self.output.wait(self.tOrP, kv_state.index)
        self.pipes.v.consumer_release(kv_state)
        self.output.collect()
        kv_state.advance()
        return kv_state

    def _start_scores(self, acc_S: cute.Tensor, kv_state: PipelineState):
        """Issue Q K^T of a block."""
        qk = self._qk_of(cute.size(acc_S) * WARPGROUP_THREADS // WARPGROUP_ROWS)
        tSrK = self.tSrK[None, None, None, kv_state.index]
        issue_gemm(qk, acc_S, self.queries.fragment, tSrK, False, steps=self.config.steps_qk)

    @cute.jit
    def _release_q(self, q_turn: Int32):
        """After the last Q K^T; later, by the epilogue, if O is to be staged in Q's place."""
        if const_expr(not self.config.o_shares_q):
            self.pipes.q.consumer_release(q_state(self.config, self.wg, q_turn))

    def _make_acc_S(self, keys: int = 0) -> cute.Tensor:
        """Registers for the scores of a block, or of so many of its first ``keys``."""
        qk = self._qk_of(keys)
        shape = WARPGROUP_ROWS, keys or self.config.tile_n
        return cute.make_rmem_tensor(qk.partition_shape_C(shape), qk.op.acc_dtype)

    def _qk_of(self, keys: int) -> cute.TiledMma:
        """That of so many keys of a block; of all, if there is none of its own."""
        return self.mmas.narrow_qk.get(keys, self.mmas.qk)

    @cute.jit
    def _exponentiate(
        self,
        acc_S: cute.Tensor,
        r: cutlass.Constexpr[int],
        is_first: cutlass.Constexpr[bool],
        kept: tuple[Kept, ...] = (),
    ):
        """One row of P: exponentials, of which those that are ``kept`` are rounded to the input dtype as the A operand
        of the second GEMM."""
        self.softmax.exponentiate(acc_S, r, is_first)
        zero_dropped(acc_S, r, kept)
        self.softmax.store_P(self.tOrP, acc_S, r)
