"""Consumer warpgroups of the FP8 forward kernel whose softmax goes on with a maximum of earlier blocks."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import pin
from cute_kernels.integers import ceil_div, divide, maximum
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.score_tile import ScoreTile
from hopper.forward.consumer import Consumer
from hopper.forward.ending import TileEnding
from hopper.forward.operands import consumer_slot


class LaggingConsumer(Consumer):
    """``Consumer`` with a stale maximum (``softmax/stale_maximum.py``) in blocks without a mask.

    A subclass says by ``_scores_have_come``, ``_recover`` and ``_leave_block`` what becomes of a block's K and scores.
    Here K is released at the end of the block, since its scores may be computed again (``LaggingSoftmax``).
    """

    def attend(
        self,
        scores: ScoreTile,
        blocks: KeyBlocks,
        kv_state: PipelineState,
        q_turn: Int32,
        ending: TileEnding,
    ) -> PipelineState:
        self._begin_walk(scores, blocks)
        return super().attend(scores, blocks, kv_state, q_turn, ending)

    def _begin_walk(self, scores: ScoreTile, blocks: KeyBlocks):
        """Before the first block of a tile."""
        self.softmax.begin_walk(blocks)

    @cute.jit
    def _unmasked_blocks(
        self, scores: ScoreTile, blocks: KeyBlocks, n_block: Int32, v_state: PipelineState
    ) -> PipelineState:
        return self._blocks_down_to(scores, blocks.begin, n_block, v_state)[1]

    @cute.jit
    def _blocks_within(
        self, scores: ScoreTile, blocks: KeyBlocks, n_block: Int32, v_state: PipelineState
    ) -> tuple[Int32, PipelineState]:
        return self._blocks_down_to(scores, blocks.left_masked, n_block, v_state)

    @cute.jit
    def _blocks_down_to(
        self,
        scores: ScoreTile,
        first: Int32,
        n_block: Int32,
        v_state: PipelineState,
    ) -> tuple[Int32, PipelineState]:
        """The number of the block behind ``first``, and the state of the V before it.

        The state of the next block is made while a block is computed, not between two of them.
        """
        k_state = v_state.clone()
        k_state.advance()
        while n_block >= first:
            after = state_after(k_state)
            self._lagging_block(scores, n_block, (v_state, k_state), False)
            v_state, k_state = k_state, after
            n_block = n_block - 1
        return n_block, v_state

    @cute.jit
    def _lagging_block(
        self,
        scores: ScoreTile,
        n_block: Int32,
        states: tuple[PipelineState, PipelineState],
        is_masked: cutlass.Constexpr[bool],
    ):
        """``_overlapped_block`` without a maximum. ``states`` are those of the V before and of the block's K."""
        v_state, k_state = states
        acc_S = self._make_acc_S()
        self.pipes.k.consumer_wait(k_state)
        self.ping_pong.take_turn()
        self._start_scores(acc_S, k_state)
        self.output.enter_product()
        self._await_v_for_product(v_state)
        self.output.start(self.tOrP, v_state.index)
        self.ping_pong.pass_turn()
        self._products_run(scores, n_block)
        self.softmax.enter_block(consumer_slot(k_state))
        if const_expr(self.config.awaits_v_early):
            self.pipes.v.consumer_wait(k_state)
        warpgroup.wait_group(1)
        self._scores_have_come(k_state)
        scores.finish(acc_S, n_block, is_masked)
        self.softmax.begin_scores(acc_S, n_block)
        early, late = self._rows_around_wait()
        for r in cutlass.range_constexpr(len(early)):
            self.softmax.exponentiate_by_stale_maximum(acc_S, early[r])
        suffices = self.softmax.maximum_suffices(early)
        if const_expr(not self.config.awaits_v_early):
            self._await_v_for_P(k_state)
        self.output.wait(self.tOrP, v_state.index)
        self.pipes.v.consumer_release(v_state)
        for r in cutlass.range_constexpr(len(early)):
            self.softmax.store_P(self.tOrP, acc_S, early[r])
        if const_expr(len(late) > 0):
            self.softmax.exponentiate_by_stale_maximum(acc_S, late[0])
            self.softmax.store_P(self.tOrP, acc_S, late[0])
            suffices = suffices & self.softmax.maximum_suffices(late)
        if suffices:
            self.softmax.add_totals()
        else:
            self.softmax.change_unit()
            if self.softmax.needs_maximum():
                self._recover(acc_S, n_block, k_state)
            else:
                self.softmax.add_totals()
        self._leave_block(k_state)

    def _rows_around_wait(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which of a thread's rows have their exponentials before the wait for P V, and which behind it: with two
        warpgroups there are registers for both beside a P that is still multiplied."""
        return ((0, 1), ()) if self.config.consumers <= 2 else ((0,), (1,))

    def _products_run(self, scores: ScoreTile, n_block: Int32):
        """Behind the start of both products of a block."""

    def _scores_have_come(self, k_state: PipelineState):
        """Behind Q K^T."""

    @cute.jit
    def _recover(self, acc_S: cute.Tensor, n_block: Int32, k_state: PipelineState):
        place = k_state.index, consumer_slot(k_state)
        self.softmax.recover(self.tOrP, acc_S, self.output.acc, n_block, place)

    @cute.jit
    def _leave_block(self, k_state: PipelineState):
        self.pipes.k.consumer_release(k_state)


class HalfScoresConsumer(LaggingConsumer):
    """``LaggingConsumer`` with a ``HalfScoresSoftmax``, on blocks with a mask as on those without.

    Only the first block of a tile takes a maximum whatever its P is.
    """

    @cute.jit
    def _unmasked_blocks(
        self, scores: ScoreTile, blocks: KeyBlocks, n_block: Int32, v_state: PipelineState
    ) -> PipelineState:
        """In runs of so many blocks, behind each of which O goes to the sums. Where means of V change a run ends at
        an edge between two of them, and elsewhere wherever it does; what is left over comes last."""
        if const_expr(self.config.run_blocks == 0):
            return LaggingConsumer._unmasked_blocks(self, scores, blocks, n_block, v_state)
        c, means = self.config, self.output.means
        run_blocks = c.run_blocks
        has_sums = (n_block - blocks.begin >= run_blocks) | means.has_changes()
        if has_sums:
            means.staging.forget_sums()
        following = n_block - run_blocks
        if const_expr(c.finds_ends_early):
            following = following + means.changed[0] * (means.first_end[0] - following)
        elif means.has_changes():
            run, blocks_of_it = self._run_of(scores, n_block)
            following = following + means.runs_in_front(run) * c.mean_blocks + blocks_of_it
        while n_block >= blocks.begin:
            first = maximum(blocks.begin, following + 1)
            n_block, v_state = self._blocks_down_to(scores, first, n_block, v_state)
            following = n_block - run_blocks
            if n_block >= blocks.begin:
                self.output.end_run()
        if has_sums:
            self.output.join_runs()
        return v_state

    @cute.jit
    def _products_run(self, scores: ScoreTile, n_block: Int32):
        """Where the walk comes to an edge the sums so far are noted, while nothing else is to be done. They are those
        before the block, whose P is still to be made."""
        if const_expr(self.config.run_blocks > 0):
            edge = self.output.means.edge
            if n_block == edge[0]:
                self.output.note_change(self._run_of(scores, n_block)[0])
                edge[0] = edge[0] - self.config.mean_blocks

    def _run_of(self, scores: ScoreTile, n_block: Int32) -> tuple[Int32, Int32]:
        """(run that a block is in, as means are counted, blocks of the sequence behind it in that run)."""
        behind = ceil_div(scores.mask.seqlens.seqlen_k, self.config.tile_n) - 1 - n_block
        run = divide(behind, self.config.mean_blocks)
        return run, behind - run * self.config.mean_blocks

    def _queries_have_come(self):
        self.softmax.lower_queries()

    def _clear_P(self):
        self.softmax.words.fill(0)

    @cute.jit
    def _first_scores(
        self, scores: ScoreTile, n_block: Int32, kv_state: PipelineState, keys: cutlass.Constexpr[int] = 0
    ):
        acc_S = self._make_acc_S(keys)
        self.pipes.k.consumer_wait(kv_state)
        self._start_scores(acc_S, kv_state)
        if const_expr(self.config.run_blocks > 0):
            self.output.means.begin_walk(*self._run_of(scores, n_block), n_block)
        self.softmax.start()
        self.softmax.enter_first_block()
        self.softmax.enter_block(consumer_slot(kv_state))
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(kv_state)
        scores.finish(acc_S, n_block, True)
        self.softmax.take_new_unit()
        self.softmax.take_first_maxima(self.tOrP, acc_S)
        self._await_v_for_P(kv_state)

    @cute.jit
    def _overlapped_block(
        self, scores: ScoreTile, n_block: Int32, v_state: PipelineState, is_masked: cutlass.Constexpr[bool]
    ) -> PipelineState:
        k_state = v_state.clone()
        k_state.advance()
        self._lagging_block(scores, n_block, (v_state, k_state), is_masked)
        return k_state

    @cute.jit
    def _scores_have_come(self, k_state: PipelineState):
        """They stay until P will do, so K is not wanted again."""
        self.pipes.k.consumer_release(k_state)

    @cute.jit
    def _recover(self, acc_S: cute.Tensor, n_block: Int32, k_state: PipelineState):
        self.softmax.recover(self.tOrP, acc_S, self.output.acc, n_block)

    def _leave_block(self, k_state: PipelineState):
        """Nothing is left to be released."""


def state_after(state: PipelineState) -> PipelineState:
    """Made where it stands, not where it is asked for."""
    after = state.clone()
    after.advance()
    return PipelineState(after.stages, after.count, pin(after.index, Int32), pin(after.phase, Int32))
