"""The two consumer warpgroups of a CTA in the paired backward kernel: one makes P, one dS, both all gradients."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.pipeline import PipelineAsync

from cute_kernels.backward.scores import read_vector, round_into
from cute_kernels.dropout import Kept, drop_gradient_as, zero_dropped
from cute_kernels.fragments import ROWS_PER_THREAD
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_score_tile import KeyScoreTile
from hopper.backward.config import PairedBackwardConfig
from hopper.backward.dq import WORDS_PER_STORE
from hopper.backward.exchange import Exchange, PairPipelines, state_of
from hopper.config import WARPGROUP_ROWS, WARPGROUP_THREADS
from hopper.wgmma import issue_gemm

WHOLE_P = 1
"""The second buffer of P, behind the only stage of the pipeline: what dS is made of where that is not what dV is made
of. With dropout that is P^T before dropout, where the config ``publishes_factors`` P^T times the factors of dS."""


class PairFragments(NamedTuple):
    """WGMMA operands in shared memory; those of Q, dO, P and dS have a last mode over stages.

    ``k`` and ``v`` are A of S^T and dP^T, ``q`` and ``do`` their B; ``p`` and ``ds`` are A of dV and dK, ``do_t`` and
    ``q_t`` their B. For dQ there are A and B of the keys of this CTA, ``ds_t`` and ``k_t``, and of the other one.
    """

    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    p: cute.Tensor
    do_t: cute.Tensor
    ds: cute.Tensor
    q_t: cute.Tensor
    ds_t: cute.Tensor
    k_t: cute.Tensor
    other_ds_t: cute.Tensor
    other_k_t: cute.Tensor


def add_or_store(address: Int64, part: list, adds: Int32) -> None:
    """Add four float32 to as many in global memory, or where ``adds`` is negative store them. Without a branch, beside
    which ptxas would let no products be in flight."""
    cute.arch.inline_ptx(
        "{ .reg .pred stores; setp.lt.s32 stores, {$r5}, 0;"
        " @stores st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
        " @!stores red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}; }",
        read_only_args=[address, *part, adds],
    )


class PairConsumer(LoopInvariant):
    """What both warpgroups do: their columns of dV of a block, and of dK and dQ of the block before.

    Blocks are counted from 0 over all query heads of the CTA. ``mdQ`` is float32 (words, query tiles of all heads):
    the part to which this warpgroup adds, zero before the launch unless ``stores_first``. A ``tile`` is the number of a
    query tile, or its complement where this pair is the first to visit it (``sums_of``). Where dQ is summed in a fixed
    order, ``turns`` has the pipeline by which a ``TurnKeeper`` says when; else it is empty.
    """

    def __init__(
        self,
        config: PairedBackwardConfig,
        mmas,
        fragments: PairFragments,
        pipes: PairPipelines,
        exchange: Exchange,
        mdQ: cute.Tensor,
        turns: tuple[PipelineAsync, ...],
        thread: Int32,
    ):
        self.config, self.mmas, self.fragments = config, mmas, fragments
        self.pipes, self.exchange, self.mdQ, self.turns, self.thread = pipes, exchange, mdQ, turns, thread
        self.acc_dV = self._make_accumulator(mmas.dv, config.head_dim_v // 2)
        self.acc_dK = self._make_accumulator(mmas.dk, config.head_dim // 2)
        self.acc_dQ = self._make_accumulator(mmas.dq, config.dq_columns)

    @cute.jit
    def _make_accumulator(self, mma: cute.TiledMma, columns: cutlass.Constexpr[int]) -> cute.Tensor:
        return cute.make_rmem_tensor(mma.partition_shape_C((WARPGROUP_ROWS, columns)), Float32)

    @cute.jit
    def clear(self):
        self.acc_dV.fill(0.0)
        self.acc_dK.fill(0.0)

    @cute.jit
    def finish(self, block: Int32, tile: Int32):
        """dK and dQ of the last block, whose query tile is ``tile``."""
        self._issue_dk_and_dq(block)
        warpgroup.wait_group(0)
        self._release_and_add(block, tile)

    @cute.jit
    def _issue_dv(self, block: Int32):
        """dV += P^T dO, once P and dO of the block are there."""
        f = self.fragments
        do_state, p_state = self.state("do", block), self.state("p", block)
        self.pipes.do.consumer_wait(do_state)
        self.pipes.p.consumer_wait(p_state)
        p, do_t = f.p[None, None, None, p_state.index], f.do_t[None, None, None, do_state.index]
        issue_gemm(self.mmas.dv, self.acc_dV, p, do_t, True)

    @cute.jit
    def _issue_dk_and_dq(self, block: Int32):
        """dK += dS^T Q, and as a group behind it dQ = dS K over the keys of both CTAs."""
        f, buffer, state = self.fragments, self.exchange.index(block), self.state("q", block)
        self.pipes.q.consumer_wait(state)
        self.exchange.wait_own(block)
        q_t = f.q_t[None, None, None, state.index]
        issue_gemm(self.mmas.dk, self.acc_dK, f.ds[None, None, None, buffer], q_t, True)
        self.exchange.wait_other(block)
        own, other = f.ds_t[None, None, None, buffer], f.other_ds_t[None, None, None, buffer]
        issue_gemm(self.mmas.dq, self.acc_dQ, own, f.k_t, False, closes=False)
        issue_gemm(self.mmas.dq, self.acc_dQ, other, f.other_k_t, True)

    @cute.jit
    def _release_and_add(self, block: Int32, tile: Int32):
        """After dK and dQ of a block: release its Q and dS, and add dQ to query tile ``tile`` in global memory, where
        the order is fixed in its turn."""
        self.pipes.q.consumer_release(self.state("q", block))
        self.exchange.release(block)
        words = cute.make_tensor(
            self.acc_dQ.iterator,
            cute.make_layout((WORDS_PER_STORE, cute.size(self.acc_dQ) // WORDS_PER_STORE)),
        )
        for turns in self.turns:
            turns.consumer_wait(state_of(1, block))
        adds = tile
        if const_expr(self.config.stores_first):
            tile = tile ^ (tile >> 31)
        first = self.mdQ[None, tile].iterator.toint() + Int64(self.thread * (4 * WORDS_PER_STORE))
        for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
            address = first + i * (4 * WORDS_PER_STORE * WARPGROUP_THREADS)
            part = [words[e, i] for e in range(WORDS_PER_STORE)]
            if const_expr(self.config.stores_first):
                add_or_store(address, part, adds)
            else:
                cute.arch.inline_ptx(
                    "red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[address, *part],
                )
        for turns in self.turns:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                turns.consumer_release(state_of(1, block))

    def state(self, pipe: str, block: Int32):
        """Where the consumers of a pipeline stand at a block."""
        return state_of(self.config.stages_of(pipe), block)

    @cute.jit
    def make_scores(self) -> cute.Tensor:
        return self._make_accumulator(self.mmas.s, self.config.tile_m)

    @cute.jit
    def store_scores(self, acc: cute.Tensor, target: cute.Tensor):
        """Round a transposed score tile and write it to shared memory, (keys, queries)."""
        rounded = cute.make_rmem_tensor_like(acc, target.element_type)
        round_into(rounded, acc)
        self.store_rounded(rounded, target)

    @cute.jit
    def store_rounded(self, rounded: cute.Tensor, target: cute.Tensor):
        """Write a rounded tile, in the order of the accumulator."""
        atom = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), target.element_type
        )
        copy = cute.make_tiled_copy_C(atom, self.mmas.s).get_slice(self.thread)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(target))


class ScoresConsumer(PairConsumer):
    """The first warpgroup: S^T = K Q^T and P^T, which it writes to shared memory, ``sP`` (keys, queries, buffers).

    Buffer 0 has what dV is made of, P^T after dropout. Where dS is made of something else, that is in buffer
    ``WHOLE_P``.
    """

    def __init__(self, sLSE: cute.Tensor, sP: cute.Tensor, *rest):
        super().__init__(*rest)
        self.sLSE, self.sP = sLSE, sP

    @cute.jit
    def block(
        self,
        scores: KeyScoreTile,
        m_block: Int32,
        block: Int32,
        tile_before: Int32,
        is_masked: cutlass.Constexpr[bool],
        is_first: cutlass.Constexpr[bool],
    ):
        """P of a block under dK and dQ of the block before, and dV of this one under what follows those two."""
        f, acc_S = self.fragments, self.make_scores()
        state = self.state("q", block)
        self.pipes.q.consumer_wait(state)
        lse = read_vector(self.sLSE, state.index, self.thread, self.config.tile_m)
        issue_gemm(self.mmas.s, acc_S, f.k, f.q[None, None, None, state.index], False)
        if const_expr(not is_first):
            self._issue_dk_and_dq(block - 1)
        kept = scores.kept(m_block, self.config.tile_m)
        if const_expr(is_first):
            warpgroup.wait_group(0)
        else:
            warpgroup.wait_group(2)
        scores.cap(acc_S)
        if const_expr(is_masked):
            scores.mask.apply(acc_S, m_block)
        self._publish(scores, acc_S, lse, m_block, block, kept)
        self._issue_dv(block)
        if const_expr(not is_first):
            warpgroup.wait_group(1)
            self._release_and_add(block - 1, tile_before)
        warpgroup.wait_group(0)
        self.pipes.do.consumer_release(self.state("do", block))

    @cute.jit
    def _publish(
        self,
        scores: KeyScoreTile,
        acc_S: cute.Tensor,
        lse: cute.Tensor,
        m_block: Int32,
        block: Int32,
        kept: tuple[Kept, ...],
    ):
        """Write P^T to shared memory and say so, once the second warpgroup has done with the one before."""
        stages = self.config.stages_of("p")
        if const_expr(self.config.publishes_factors):
            rounded = cute.make_rmem_tensor_like(acc_S, self.sP.element_type)
            scores.round_probabilities(rounded, acc_S, lse, m_block)
            self.pipes.p.producer_acquire(state_of(stages, block, is_producer=True))
            self.store_rounded(rounded, self.sP[None, None, self.state("p", block).index])
            self.store_scores(acc_S, self.sP[None, None, WHOLE_P])
        else:
            scores.make_probabilities(acc_S, lse, m_block)
            self.pipes.p.producer_acquire(state_of(stages, block, is_producer=True))
            if const_expr(self.config.dropout):
                self.store_scores(acc_S, self.sP[None, None, WHOLE_P])
                for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                    zero_dropped(acc_S, r, kept)
            self.store_scores(acc_S, self.sP[None, None, self.state("p", block).index])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.pipes.p.producer_commit(self.state("p", block))


class GradientConsumer(PairConsumer):
    """The second warpgroup: dP^T = V dO^T and dS^T = P^T (dP^T - delta), which it sends to both CTAs."""

    def __init__(self, sDelta: cute.Tensor, sLSE: cute.Tensor, sP: cute.Tensor, *rest):
        super().__init__(*rest)
        self.sDelta, self.sLSE, self.sP = sDelta, sLSE, sP

    @cute.jit
    def block(
        self,
        scores: KeyScoreTile,
        m_block: Int32,
        block: Int32,
        tile_before: Int32,
        is_masked: cutlass.Constexpr[bool],
        is_first: cutlass.Constexpr[bool],
    ):
        """dS of a block under its dV. dK and dQ of the block before come first: dO of this one is on its way then."""
        f, acc_dP = self.fragments, self.make_scores()
        state = self.state("do", block)
        if const_expr(not is_first):
            self._issue_dk_and_dq(block - 1)
        self.pipes.do.consumer_wait(state)
        delta = read_vector(self.sDelta, state.index, self.thread, self.config.tile_m)
        issue_gemm(self.mmas.dp, acc_dP, f.v, f.do[None, None, None, state.index], False)
        if const_expr(not is_first):
            warpgroup.wait_group(1)
            self._release_and_add(block - 1, tile_before)
        warpgroup.wait_group(0)
        self._issue_dv(block)
        lse = delta
        if const_expr(scores.is_capped and scores.follows_from_probabilities):
            # The first warpgroup has seen it already, but not on behalf of this one.
            q_state = self.state("q", block)
            self.pipes.q.consumer_wait(q_state)
            lse = read_vector(self.sLSE, q_state.index, self.thread, self.config.tile_m)
        buffer = self.state("p", block).index
        if const_expr(self.config.publishes_factors):
            buffer = Int32(WHOLE_P)
        probabilities = self._read_probabilities(buffer)
        if const_expr(self.config.dropout):
            drop_gradient_as(acc_dP, probabilities, scores.dropout[0].dropout.factor)
            probabilities = self._read_probabilities(Int32(WHOLE_P))
        if const_expr(self.config.few_keys):
            of_delta = probabilities
            if const_expr(self.config.publishes_factors):
                of_delta = self._read_probabilities(self.state("p", block).index)
            scores.complete_delta(delta, acc_dP, of_delta)
        scores.make_gradient_of_rounded(acc_dP, probabilities, delta, lse, m_block)
        self.exchange.acquire(block)
        self.store_scores(acc_dP, self.exchange.own[None, None, self.exchange.index(block)])
        self.exchange.publish(block, cute.arch.make_warp_uniform(self.thread // cute.arch.WARP_SIZE))
        warpgroup.wait_group(0)
        self.pipes.do.consumer_release(state)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.pipes.p.consumer_release(self.state("p", block))

    @cute.jit
    def _read_probabilities(self, buffer: Int32) -> cute.Tensor:
        """P^T in 16 bits, in the order of the accumulator."""
        source = self.sP[None, None, buffer]
        rounded = cute.make_rmem_tensor_like(self.make_scores(), source.element_type)
        atom = cute.make_copy_atom(
            warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), source.element_type
        )
        copy = cute.make_tiled_copy_C(atom, self.mmas.s).get_slice(self.thread)
        cute.copy(atom, copy.partition_S(source), copy.retile(rounded))
        return rounded
