"""A consumer warpgroup of the backward kernel: 64 keys against all query tiles that see them."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.backward.scores import make_gradient, read_vector, round_into
from cute_kernels.dropout import drop_gradient
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_score_tile import KeyScoreTile
from hopper.backward.config import BackwardConfig
from hopper.backward.dq import GradientOfQ, QueryTile
from hopper.backward.producer import BackwardPipelines
from hopper.config import COLUMNS_PER_STEP, WARPGROUP_ROWS
from hopper.wgmma import issue_gemm

ALL, OWN, OTHERS = slice(None), slice(0, 1), slice(1, None)
"""Which parts of the keys see a query tile, of those of ``BackwardFragments``."""


class BackwardMmas(NamedTuple):
    """The tiled MMAs, each for one warpgroup: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K.

    ``used_dv``, ``used_dk`` and ``used_dq`` are those of the columns that products have; the others say where all of
    them lie."""

    s: cute.TiledMma
    dp: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma
    used_dv: cute.TiledMma
    used_dk: cute.TiledMma
    used_dq: cute.TiledMma


class BackwardFragments(NamedTuple):
    """WGMMA operands in shared memory; those of Q and dO have a last mode over stages, those of dS over buffers.

    ``k`` and ``v`` are A of S^T and dP^T for the keys of the warpgroup, ``q`` and ``do`` their B; ``do_t`` and
    ``q_t`` are B of dV and dK; ``ds`` and ``k_t`` are A and B of dQ, one of each for each part of the keys, that of the
    warpgroup first.
    """

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    do_t: cute.Tensor
    q_t: cute.Tensor
    ds: tuple
    k_t: tuple


@cute.jit
def previous_stage(config: cutlass.Constexpr[BackwardConfig], stage: Int32) -> Int32:
    """The number of the stage before."""
    return Int32(config.stages - 1) if stage == 0 else stage - 1


def first_columns(acc: cute.Tensor, mma: cute.TiledMma, columns: int) -> cute.Tensor:
    """The part of an accumulator of 64 rows that ``mma``, of so many columns, adds to."""
    return cute.make_tensor(acc.iterator, cute.make_layout(mma.partition_shape_C((WARPGROUP_ROWS, columns))))


class BackwardConsumer(LoopInvariant):
    """The five GEMMs of a block and what lies between them, for the keys of one warpgroup.

    S and dP are computed transposed, so that P^T and dS^T are register operands of dV and dK as they are. For dQ
    the warpgroups meet: each writes its dS^T to shared memory, and each takes a part of dQ over all keys of the tile.
    """

    def __init__(
        self,
        config: BackwardConfig,
        mmas: BackwardMmas,
        fragments: BackwardFragments,
        pipes: BackwardPipelines,
        vectors: tuple[cute.Tensor, cute.Tensor],
        sdS: cute.Tensor,
        dq: GradientOfQ,
        thread: Int32,
    ):
        self.config, self.mmas, self.fragments, self.pipes = config, mmas, fragments, pipes
        self.sLSE, self.sDelta = vectors
        self.sdS, self.dq, self.thread = sdS, dq, thread
        c, rows = config, WARPGROUP_ROWS
        dtype = mmas.dv.op.a_dtype
        self.acc_dV = cute.make_rmem_tensor(mmas.dv.partition_shape_C((rows, c.head_dim_v)), Float32)
        self.acc_dK = cute.make_rmem_tensor(mmas.dk.partition_shape_C((rows, c.head_dim)), Float32)
        self.tPrP = cute.make_rmem_tensor(mmas.dv.partition_shape_A((rows, c.tile_m)), dtype)
        self.tSrdS = cute.make_rmem_tensor(mmas.dk.partition_shape_A((rows, c.tile_m)), dtype)

    @cute.jit
    def clear(self):
        self.acc_dV.fill(0.0)
        self.acc_dK.fill(0.0)

    @cute.jit
    def block(
        self,
        scores: KeyScoreTile,
        m_block: Int32,
        tile: Int32 | QueryTile,
        state: PipelineState,
        is_masked: cutlass.Constexpr[bool],
        parts: cutlass.Constexpr[slice] = ALL,
    ):
        """Add a query tile's part to dV and dK, and this tile's part to dQ in global memory.

        ``m_block`` counts the query tiles of a head; ``tile`` is what ``dq`` is told of it. dS and the staged dQ
        go to the buffers of the number of the stage. Releases the stages of Q and dO.

        Under S the dQ of the block before is staged, under dP runs the softmax, under dV dS, and under dK the wait
        for the dS of the other warpgroups. LSE is read before the GEMMs that would slow these loads down are under
        way. Nothing stays in flight on return: ptxas serialises all WGMMAs of a loop that carries one around its end.
        """
        f = self.fragments
        acc_S, acc_dP = self._make_scores(self.mmas.s), self._make_scores(self.mmas.dp)
        stage = state.index
        before = previous_stage(self.config, stage)
        self.pipes.q.consumer_wait(state)
        self.find_rows(state)
        lse = read_vector(self.sLSE, stage, self.thread, self.config.tile_m)
        steps_k, steps_v = (
            -(-used // COLUMNS_PER_STEP) for used in (self.config.used_columns_k, self.config.used_columns_v)
        )
        issue_gemm(self.mmas.s, acc_S, f.k, f.q[None, None, None, stage], False, steps=steps_k)
        self.dq.stage(before, state)
        self.pipes.do.consumer_wait(state)
        issue_gemm(self.mmas.dp, acc_dP, f.v, f.do[None, None, None, stage], False, steps=steps_v)
        kept = scores.kept(m_block, self.config.tile_m)
        warpgroup.wait_group(1)
        scores.cap(acc_S)
        if const_expr(is_masked):
            scores.mask.apply(acc_S, m_block)
        if const_expr(self.config.rounds_probabilities):
            scores.make_probabilities(acc_S, lse, m_block)
            round_into(self.tPrP, acc_S)
        else:
            scores.round_probabilities(self.tPrP, acc_S, lse, m_block, kept=kept)
        used_dV = first_columns(self.acc_dV, self.mmas.used_dv, self.config.used_columns_v)
        issue_gemm(self.mmas.used_dv, used_dV, self.tPrP, f.do_t[None, None, None, stage], True)
        warpgroup.wait_group(1)
        delta = read_vector(self.sDelta, stage, self.thread, self.config.tile_m)
        if const_expr(self.config.rounds_probabilities):
            if const_expr(scores.is_capped):
                lse = read_vector(self.sLSE, stage, self.thread, self.config.tile_m)
            if const_expr(self.config.few_keys):
                scores.complete_delta(delta, acc_dP, self.tPrP)
            scores.make_gradient_of_rounded(acc_dP, self.tPrP, delta, lse, m_block)
        else:
            drop_gradient(acc_dP, kept)
            if const_expr(self.config.few_keys):
                self._complete_delta(scores, delta, acc_dP, acc_S)
            make_gradient(acc_dP, acc_S, delta)
        round_into(self.tSrdS, acc_dP)
        self.dq.resume(tile)
        self._write_gradient_of_scores(state)
        self._announce_gradient_of_scores(state)
        used_dK = first_columns(self.acc_dK, self.mmas.used_dk, self.config.used_columns_k)
        issue_gemm(self.mmas.used_dk, used_dK, self.tSrdS, f.q_t[None, None, None, stage], True)
        self._add_to_gradient_of_queries(tile, state, parts)

    def find_rows(self, state: PipelineState) -> None:
        """Before LSE and delta are read: nothing, where they are given."""

    def _complete_delta(
        self, scores: KeyScoreTile, delta: cute.Tensor, acc_dP: cute.Tensor, acc_S: cute.Tensor
    ) -> None:
        """``KeyScoreTile.complete_delta``, of P in float32 where it is P and not its product with factors of dS."""
        if scores.has_factors:
            scores.complete_delta(delta, acc_dP, self.tPrP, not scores.dropout)
        else:
            scores.complete_delta(delta, acc_dP, acc_S)

    @cute.jit
    def hidden_block(self, tile: Int32 | QueryTile, state: PipelineState):
        """``block`` for keys that no query of the tile sees, though other keys of the CTA are seen: their dS is 0."""
        self.pipes.q.consumer_wait(state)
        self.dq.stage(previous_stage(self.config, state.index), state)
        self.pipes.do.consumer_wait(state)
        self.dq.resume(tile)
        if const_expr(self.config.key_parts == 1):
            self.tSrdS.fill(0.0)
            self._write_gradient_of_scores(state)
        self._announce_gradient_of_scores(state)
        self._add_to_gradient_of_queries(tile, state, OTHERS if self.config.key_parts > 1 else ALL)

    @cute.jit
    def _add_to_gradient_of_queries(
        self, tile: Int32 | QueryTile, state: PipelineState, parts: cutlass.Constexpr[slice]
    ):
        """The end of a block: dQ, once dS of all keys is there. Waits for all that is in flight."""
        f, stage = self.fragments, state.index
        before = previous_stage(self.config, stage)
        self.pipes.ds.consumer_wait(state)
        self.dq.send(before)
        chosen = list(zip(f.ds, f.k_t, strict=True))[parts]
        for i, (ds, k_t) in enumerate(chosen):
            accumulates, is_last = i > 0 or self.dq.accumulates, i == len(chosen) - 1
            issue_gemm(self.mmas.used_dq, self.dq.acc, ds[None, None, None, stage], k_t, accumulates, is_last)
        self.dq.hold(tile)
        warpgroup.wait_group(1)
        self.pipes.do.consumer_release(state)
        self.pipes.q.consumer_release(state)
        warpgroup.wait_group(0)

    @cute.jit
    def _make_scores(self, mma: cute.TiledMma) -> cute.Tensor:
        return cute.make_rmem_tensor(mma.partition_shape_C((WARPGROUP_ROWS, self.config.tile_m)), Float32)

    @cute.jit
    def _write_gradient_of_scores(self, state: PipelineState):
        """dS^T to shared memory."""
        target = self.sdS[None, None, state.index]
        atom = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), target.element_type
        )
        copy = cute.make_tiled_copy_C(atom, self.mmas.s).get_slice(self.thread)
        # Operand and accumulator hold the same elements in the same order.
        like_acc = cute.make_tensor(self.tSrdS.iterator, self._make_scores(self.mmas.s).layout)
        cute.copy(atom, copy.retile(like_acc), copy.partition_D(target))

    @cute.jit
    def _announce_gradient_of_scores(self, state: PipelineState):
        """Say that dS^T lies in shared memory. What of dQ was sent before has been read by then."""
        cute.arch.fence_view_async_shared()
        self.dq.free()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.pipes.ds.producer_commit(state)
