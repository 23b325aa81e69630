"""The Hopper forward kernel for e4m3 inputs with block scales."""

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopper.forward.batch import DenseBatch
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.kv_source import TransposedTma, TransposingRows
from hopper.forward.fp8.precision import BlockScaled
from hopper.forward.kernel import ForwardKernel, KernelParts, LaunchOptions
from hopper.forward.operands import PerOperand


class Fp8ForwardKernel(ForwardKernel):
    """``ForwardKernel`` on e4m3 Q, K and V: the same roles and pipelines, with what FP8 WGMMA asks for.

    Both its operands are K-major, so V comes transposed, (batch, kv_heads, head_dim_v, keys), or is so on its way
    (``TransposingRows``, whose docstring has what this adds to the tables of ``ForwardKernel``). And its A operand in
    registers wants four neighbouring keys a word, which the accumulator of Q K^T does not hold, so V's keys come in
    the accumulator's order (``store_groups_as_operand_a_e4m3``), which costs no move.
    """

    def __init__(self, config: Fp8ForwardConfig):
        kv_source = TransposingRows(config) if config.v_rows else TransposedTma(config)
        super().__init__(config, KernelParts(BlockScaled(config), kv_source, DenseBatch(config)))

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
        extras = (q_scale, k_scale, v_scale, o_scale, mean_v, block_q, block_k)
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
        num_ctas: Int32,
        stream,
    ):
        """Launch. What the config has no use for is None; the sides of a window are as for ``GeneralForwardKernel``."""
        options = LaunchOptions(
            extras=(q_scale, k_scale, v_scale, o_scale, mean_v, block_q, block_k),
            window=(window_left, window_right) if const_expr(self.config.window) else (),
        )
        tensors = PerOperand(mQ, mK, mV, mO)
        self._launch(tensors, mLSE, tile_counter, options, softmax_scale, num_ctas, stream)
