"""The Hopper forward kernel for e4m3 inputs with block scales."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.problem import VARLEN
from cute_kernels.window import sides_of
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.kv_source import (
    PackedTransposedTma,
    PackedTransposingRows,
    TransposedTma,
    TransposingRows,
)
from hopper.forward.fp8.paged import PagedTransposingRows
from hopper.forward.fp8.precision import BlockScaled
from hopper.forward.fp8.scales import Runs
from hopper.forward.kernel import ForwardKernel
from hopper.forward.operands import PerOperand
from hopper.forward.parts import KernelParts, LaunchOptions, batch_of


class Fp8ForwardKernel(ForwardKernel):
    """``ForwardKernel`` on e4m3 Q, K and V: the same roles and pipelines, with what FP8 WGMMA asks for.

    Both its operands are K-major, so V comes transposed, (batch, kv_heads, head_dim_v, keys), or is so on its way
    (``TransposingRows``, whose docstring has what this adds to the tables of ``ForwardKernel``). And its A operand in
    registers wants four neighbouring keys a word, which the accumulator of Q K^T does not hold, so V's keys come in
    the accumulator's order (``store_groups_as_operand_a_e4m3``), which costs no move.
    """

    def __init__(self, config: Fp8ForwardConfig):
        if config.page_box:
            source = PagedTransposingRows
        elif config.layout == VARLEN:
            source = PackedTransposingRows if config.v_rows else PackedTransposedTma
        else:
            source = TransposingRows if config.v_rows else TransposedTma
        batch = batch_of(config)
        super().__init__(config, KernelParts(BlockScaled(config), source(config), batch))

    def _divisor(self, block_q: Int32) -> Int32 | cute.FastDivmodDivisorV2:
        return cute.FastDivmodDivisorV2(block_q) if self.config.has_block_divisor else block_q

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        o_scale: cute.Tensor,
        mean_v: cute.Tensor,
        block_q: Int32,
        block_k: Int32,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. mQ, mK, mO are (batch, seqlen, heads, head_dim), mV (batch, kv_heads, head_dim_v, keys) or with
        ``v_rows`` (batch, keys, kv_heads, head_dim_v); the rest are those of ``BlockScales``."""
        block_q = self._divisor(block_q)
        extras = (q_scale, k_scale, v_scale, o_scale, mean_v, block_q, block_k)
        tensors, options = PerOperand(mQ, mK, mV, mO), LaunchOptions(extras)
        self._launch(tensors, mLSE, tile_counter, options, softmax_scale, num_ctas, stream)


class LongFp8ForwardKernel(Fp8ForwardKernel):
    """``Fp8ForwardKernel`` with ``run_blocks``."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        o_scale: cute.Tensor,
        mean_v: cute.Tensor,
        block_q: Int32,
        block_k: Int32,
        softmax_scale: Float32,
        differences: cute.Tensor,
        changes: cute.Tensor,
        notes: cute.Tensor,
        num_ctas: Int32,
        stream,
    ):
        """Launch; what is new are the tensors of ``MeansOfRuns``."""
        block_q, runs = self._divisor(block_q), Runs(differences, changes, notes)
        extras = (q_scale, k_scale, v_scale, o_scale, mean_v, block_q, block_k, (runs,))
        tensors, options = PerOperand(mQ, mK, mV, mO), LaunchOptions(extras)
        self._launch(tensors, mLSE, tile_counter, options, softmax_scale, num_ctas, stream)


class GeneralFp8ForwardKernel(Fp8ForwardKernel):
    """``Fp8ForwardKernel`` with whatever its config asks for beside a causal mask."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        o_scale: cute.Tensor,
        mean_v: cute.Tensor,
        block_q: Int32,
        block_k: Int32,
        softmax_scale: Float32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        attention_chunk: Int32 | None,
        plan: cute.Tensor | None,
        sequences: Int32 | None,
        num_ctas: Int32,
        stream,
    ):
        """Launch. What the config has no use for is None; what is not said here is as for ``GeneralForwardKernel``.

        With the layout "varlen" mQ, mK, mO are (total, heads, head_dim), mV (kv_heads, head_dim_v, keys) or with
        ``v_rows`` (total_k, kv_heads, head_dim_v).
        """
        options = LaunchOptions(
            extras=(q_scale, k_scale, v_scale, o_scale, mean_v, block_q, block_k),
            plan=(plan, sequences) if const_expr(self.config.layout == VARLEN) else (),
            window=sides_of(self.config, window_left, window_right, attention_chunk),
        )
        tensors = PerOperand(mQ, mK, mV, mO)
        self._launch(tensors, mLSE, tile_counter, options, softmax_scale, num_ctas, stream)


class ScoredFp8ForwardKernel(Fp8ForwardKernel):
    """``GeneralFp8ForwardKernel`` with a softcap or sinks."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        o_scale: cute.Tensor,
        mean_v: cute.Tensor,
        block_q: Int32,
        block_k: Int32,
        softmax_scale: Float32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        attention_chunk: Int32 | None,
        plan: cute.Tensor | None,
        sequences: Int32 | None,
        softcap: Float32 | None,
        sinks: cute.Tensor | None,
        num_ctas: Int32,
        stream,
    ):
        """Launch. ``softcap`` and ``sinks`` are those of ``GeneralForwardKernel``."""
        scales = q_scale, k_scale, v_scale, o_scale, mean_v, self._divisor(block_q), block_k
        of_scores = scores_of(self.config, softmax_scale, softcap, sinks)
        options = LaunchOptions(
            extras=(*scales, *of_scores),
            plan=(plan, sequences) if const_expr(self.config.layout == VARLEN) else (),
            window=sides_of(self.config, window_left, window_right, attention_chunk),
            softcap=(softcap,) if const_expr(self.config.softcap) else (),
        )
        tensors = PerOperand(mQ, mK, mV, mO)
        self._launch(tensors, mLSE, tile_counter, options, softmax_scale, num_ctas, stream)


class PagedFp8ForwardKernel(Fp8ForwardKernel):
    """``Fp8ForwardKernel`` of packed queries on the pages of a cache, whose heads have a scale each."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        o_scale: cute.Tensor,
        mean_v: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        attention_chunk: Int32 | None,
        plan: cute.Tensor,
        sequences: Int32,
        page_table: cute.Tensor,
        leftpad: cute.Tensor,
        softcap: Float32 | None,
        sinks: cute.Tensor | None,
        num_ctas: Int32,
        stream,
    ):
        """Launch. mQ and mO are (total, heads, head_dim), mK and mV (pages, page_size, kv_heads, head_dim); what is not
        said here is as for ``GeneralForwardKernel``."""
        scales = q_scale, k_scale, v_scale, o_scale, mean_v, Int32(0), Int32(0)
        options = LaunchOptions(
            extras=(*scales, *scores_of(self.config, softmax_scale, softcap, sinks)),
            plan=(plan, sequences),
            pages=(page_table, leftpad),
            window=sides_of(self.config, window_left, window_right, attention_chunk),
            softcap=(softcap,) if const_expr(self.config.softcap) else (),
        )
        tensors = PerOperand(mQ, mK, mV, mO)
        self._launch(tensors, mLSE, tile_counter, options, softmax_scale, num_ctas, stream)


def scores_of(config: Fp8ForwardConfig, softmax_scale: Float32, softcap: Any, sinks: Any) -> tuple:
    """The last fields of ``BlockScales``, of a kernel without runs; () where nothing is done to scores."""
    if not (config.softcap or config.sinks):
        return ()
    factor = (softmax_scale / softcap,) if config.softcap else ()
    return (), factor, (sinks,) if config.sinks else ()
