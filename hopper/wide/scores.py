"""The first consumer warpgroup: all scores of 64 queries, their softmax, and the first half of the columns of O."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import pin
from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_blocks import KeyBlocks
from cute_kernels.score_tile import ScoreTile
from cute_kernels.softmax import OnlineSoftmax
from hopper.config import WARPGROUP_ROWS
from hopper.forward.operands import Mmas
from hopper.forward.output import make_accumulator
from hopper.wgmma import issue_gemm, keep_descriptor
from hopper.wide.config import WideForwardConfig
from hopper.wide.exchange import Exchange, WideBarrier, arrive, wait
from hopper.wide.operands import FIRST_HALF, SECOND_HALF, WidePipelines, WideTensors, tile_state

LAST_STEPS = 4
"""Of QV V^T, 16 columns deep each: a group of WGMMAs by themselves (``_add_second_half``)."""


@dataclass(frozen=True)
class TileScores(LoopInvariant):
    """What is done to the scores of a ``tile``, of whose key blocks ``first`` is visited last."""

    tile: ScoreTile
    first: Int32

    def finish(self, acc_S: cute.Tensor, n_block: Int32, is_masked: bool) -> None:
        self.tile.finish(acc_S, n_block, is_masked)


class ScoresConsumer(LoopInvariant):
    """S = Q K^T + QV V^T of a key block is issued behind P V of the block before it, and its softmax runs under P V of
    the other warpgroup. ``acc`` is O in the first half of its columns. ``inverse`` tells the other warpgroup what O is
    multiplied by in the end."""

    def __init__(
        self,
        config: WideForwardConfig,
        mmas: Mmas,
        smem: WideTensors,
        inverse: Exchange,
        pipes: WidePipelines,
        exchange: Exchange,
        softmax: OnlineSoftmax,
    ):
        self.config, self.mmas, self.pipes = config, mmas, pipes
        self.inverse, self.exchange, self.softmax = inverse, exchange, softmax
        qk = mmas.qk.get_slice(0)
        self.tSrQ = keep_descriptor(mmas.qk.make_fragment_A(qk.partition_A(smem.q)))
        self.tSrK = keep_descriptor(mmas.qk.make_fragment_B(qk.partition_B(smem.k)))
        self.tSrQV = tuple(keep_descriptor(mmas.qk.make_fragment_A(qk.partition_A(x))) for x in smem.qv)
        self.tSrV = keep_descriptor(mmas.qk.make_fragment_B(qk.partition_B(smem.v)))
        self.tOrV = keep_descriptor(values_operand(mmas.pv, smem.v))
        self.acc = make_accumulator(mmas.pv, config.half)
        self.tOrP = cute.make_rmem_tensor(
            mmas.pv.partition_shape_A((WARPGROUP_ROWS, config.tile_n)), mmas.pv.op.a_dtype
        )

        self.copy_of_p = cute.make_rmem_tensor(self._make_acc_S().layout, mmas.pv.op.a_dtype)

    @cute.jit
    def start(
        self, tile: ScoreTile, blocks: KeyBlocks, state: PipelineState, q_phase: Int32
    ) -> PipelineState:
        """Key blocks from the last to the first, until P V of the last one is under way by both warpgroups, and all
        sums are in ``softmax``. Returns the state of the pipelines for the last one."""
        unmasked = blocks.unmasked
        scores = TileScores(tile, blocks.begin)
        self.pipes.q.consumer_wait(tile_state(q_phase))
        self.acc.fill(0.0)
        self._first_block(scores, blocks.last, state)
        n_block = blocks.end - 2
        if const_expr(blocks.window.has_right):
            for _ in cutlass.range(blocks.right_masked(unmasked), unroll=1):
                state = self._next_block(scores, n_block, state, True)
                n_block -= 1
        if const_expr(blocks.window.has_left):
            for _ in cutlass.range(n_block + 1 - blocks.left_masked, unroll=1):
                state = self._next_block(scores, n_block, state, False)
                n_block -= 1
            for _ in cutlass.range(blocks.number_from(n_block), unroll=1):
                state = self._next_block(scores, n_block, state, True)
                n_block -= 1
        else:
            for _ in cutlass.range(blocks.number_from(n_block), unroll=1):
                state = self._next_block(scores, n_block, state, False)
                n_block -= 1
        self._start_product(state)
        self._hand_over()
        arrive(WideBarrier.SCORED)
        return state

    @cute.jit
    def finish(self, factors: cute.Tensor):
        """Tell what O is multiplied by in the end, and leave half of it in ``acc``, not multiplied. Its part of V is
        not given back."""
        self.inverse.write_factors(factors)
        arrive(WideBarrier.SUMMED)
        warpgroup.wait_group(0)

    @cute.jit
    def _first_block(self, scores: TileScores, n_block: Int32, state: PipelineState):
        """S and P of the first block, which is always masked: it holds the end of the sequence."""
        acc_S = self._make_acc_S()
        self._start_scores(acc_S, state)
        if const_expr(self.config.qv):
            self._continue_scores(acc_S, state)
        warpgroup.wait_group(0)
        self._release_scores(state)
        self._make_p(scores, acc_S, n_block, True, True)

    @cute.jit
    def _next_block(
        self, scores: TileScores, n_block: Int32, state: PipelineState, is_masked: cutlass.Constexpr[bool]
    ) -> PipelineState:
        """P V of the block at ``state``, then S and P of block ``n_block``, at the state that is returned."""
        next_state = state.clone()
        next_state.advance()
        acc_S = self._make_acc_S()
        self._start_product(state)
        self._hand_over()
        self._start_scores(acc_S, next_state, closes=not self.config.qv)
        if const_expr(self.config.qv):
            self._add_first_half(acc_S, next_state)
        # Before the rest of S is issued, which takes until most of it is done.
        warpgroup.wait_group(1)
        self.pipes.v[FIRST_HALF].consumer_release(state)
        if const_expr(self.config.qv):
            self._add_second_half(acc_S, next_state)
            warpgroup.wait_group(1)
        arrive(WideBarrier.SCORED)
        warpgroup.wait_group(0)
        self._release_scores(next_state)
        self._make_p(scores, acc_S, n_block, is_masked, False)
        return next_state

    @cute.jit
    def _start_product(self, state: PipelineState):
        """Start P V of the block at ``state`` in the first half of the columns."""
        if const_expr(not self.config.qv):
            self.pipes.v[FIRST_HALF].consumer_wait(state)
        issue_gemm(self.mmas.pv, self.acc, self.tOrP, self.tOrV[None, None, None, state.index], True)

    @cute.jit
    def _start_scores(self, acc_S: cute.Tensor, state: PipelineState, closes: cutlass.Constexpr[bool] = True):
        """Start Q K^T of the block at ``state``; ``closes`` as in ``issue_gemm``."""
        self.pipes.k.consumer_wait(state)
        tSrQ, tSrK = self.tSrQ[None, None, None, 0], self.tSrK[None, None, None, state.index]
        issue_gemm(self.mmas.qk, acc_S, tSrQ, tSrK, False, closes)

    @cute.jit
    def _continue_scores(self, acc_S: cute.Tensor, state: PipelineState):
        """Add QV V^T."""
        self._add_first_half(acc_S, state)
        self._add_second_half(acc_S, state)

    @cute.jit
    def _add_first_half(self, acc_S: cute.Tensor, state: PipelineState):
        """Add that of the first half of the columns, as the end of the group of WGMMAs that Q K^T began."""
        self.pipes.v[FIRST_HALF].consumer_wait(state)
        tSrQV = self.tSrQV[0][None, None, None, FIRST_HALF]
        issue_gemm(self.mmas.qk, acc_S, tSrQV, self.tSrV[None, None, None, state.index], True)

    @cute.jit
    def _add_second_half(self, acc_S: cute.Tensor, state: PipelineState):
        """Add that of the second half, as two groups of WGMMAs. The last is of 64 columns: when only these are left, it
        is time to tell the other warpgroup, which takes as long to hear of it."""
        qk, stages = self.mmas.qk, self.config.stages
        self.pipes.v[SECOND_HALF].consumer_wait(state)
        tSrQV = self.tSrQV[0][None, None, None, SECOND_HALF]
        tSrV = self.tSrV[None, None, None, SECOND_HALF * stages + state.index]
        end = cute.size(tSrQV.shape[2])
        add_steps(qk, acc_S, tSrQV, tSrV, 0, end - LAST_STEPS)
        add_steps(qk, acc_S, tSrQV, tSrV, end - LAST_STEPS, end)

    @cute.jit
    def _release_scores(self, state: PipelineState):
        """What S alone has read; the first half of V waits for P V."""
        self.pipes.k.consumer_release(state)
        if const_expr(self.config.qv):
            self.pipes.v[SECOND_HALF].consumer_release(state)

    @cute.jit
    def _make_p(
        self,
        scores: TileScores,
        acc_S: cute.Tensor,
        n_block: Int32,
        is_masked: cutlass.Constexpr[bool],
        is_first: cutlass.Constexpr[bool],
    ):
        """P of a block, in registers and for the other warpgroup, and O shrunk for a new maximum. Q and QV are given
        back behind the last S."""
        if n_block == scores.first:
            self.pipes.q.consumer_release(tile_state(Int32(0)))
        scores.finish(acc_S, n_block, is_masked)
        self.softmax.take_scores(acc_S, is_first)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.exponentiate(acc_S, r, is_first)
            self.softmax.store_P(self.tOrP, acc_S, r)
        self._copy_p()
        if const_expr(not is_first):
            self.softmax.rescale_if_needed(self.acc)

    @cute.jit
    def _copy_p(self):
        """Registers that a WGMMA reads may not be touched until it is done, so what is handed over is a copy."""
        words, copies = (cute.recast_tensor(x, Int32) for x in (self.tOrP, self.copy_of_p))
        for i in cutlass.range_constexpr(cute.size(words)):
            copies[i] = pin(words[i], Int32)

    @cute.jit
    def _hand_over(self):
        """P and row factors to the other warpgroup, while P V of this one runs, whose operand P stays as it is."""
        wait(WideBarrier.READ)
        self.exchange.write_factors(self.softmax.row_scale)
        self.exchange.write_p(self.mmas.qk, self.copy_of_p)
        arrive(WideBarrier.WRITTEN)

    def _make_acc_S(self) -> cute.Tensor:
        return make_accumulator(self.mmas.qk, self.config.tile_n)


@cute.jit
def add_steps(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    tA: cute.Tensor,
    tB: cute.Tensor,
    first: cutlass.Constexpr[int],
    stop: cutlass.Constexpr[int],
):
    """Start acc += A B^T in the steps of its depth from ``first`` to before ``stop``, as the end of a group."""
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for step in cutlass.range_constexpr(first, stop):
        cute.gemm(atom, acc, tA[None, None, step], tB[None, None, step], acc)
    warpgroup.commit_group()


def values_operand(mma: cute.TiledMma, sV: cute.Tensor) -> cute.Tensor:
    """V in shared memory, (keys, columns, stages), as operand B of P V, whose rows are columns of V."""
    sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
    return mma.make_fragment_B(mma.get_slice(0).partition_B(sVt))
