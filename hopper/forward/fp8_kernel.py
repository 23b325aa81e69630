"""The Hopper forward kernel for e4m3 inputs with block scales."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from cute_kernels.block_scaled_softmax import BlockScaledSoftmax
from cute_kernels.softmax import OnlineSoftmax
from hopper.config import WARPGROUP_ROWS, Fp8ForwardConfig
from hopper.forward.kernel import ForwardKernel, SmemLayouts, swizzled_layout
from hopper.forward.scales import SLOT_FLOATS, BlockScales, ScalePublisher


class Fp8ForwardKernel(ForwardKernel):
    """``ForwardKernel`` on e4m3 Q, K and V: the same roles and pipelines, with what FP8 WGMMA asks for.

    Both its operands are K-major, so V comes transposed, (batch, kv_heads, head_dim_v, keys); and its A operand
    in registers wants four neighbouring keys a word, which the accumulator of Q K^T does not hold, so V's keys
    come in the accumulator's order (``fragments.store_row_as_operand_a_e4m3``). Neither costs this kernel a move.
    """

    v_major = OperandMajorMode.K

    def __init__(self, config: Fp8ForwardConfig):
        super().__init__(config)
        self.scale_slots = 2 * config.stages

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mVt: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        tile_counter: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        o_scale: cute.Tensor,
        block_q: Int32,
        block_k: Int32,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. mQ, mK, mO are (batch, seqlen, heads, head_dim), mVt (batch, kv_heads, head_dim_v, keys); the
        scales are those of ``BlockScales``."""
        mVt = cute.make_tensor(mVt.iterator, cute.select(mVt.layout, mode=[2, 3, 1, 0]))
        scales = (q_scale, k_scale, v_scale, o_scale, block_q, block_k)
        self._launch(mQ, mK, mVt, mO, mLSE, tile_counter, scales, softmax_scale, num_ctas, stream)

    def _make_softmax(self, scale_log2: Float32, scales: tuple, storage) -> OnlineSoftmax:
        s = BlockScales(*scales)
        tile_scales = (s.q, s.o, s.block_q)
        return BlockScaledSoftmax(scale_log2, tile_scales, self._slots(storage), self.config.polynomial_pairs)

    def _make_scales(self, scales: tuple, storage) -> ScalePublisher:
        return ScalePublisher(BlockScales(*scales), self.config.tile_n, self._slots(storage))

    def _slots(self, storage) -> cute.Tensor:
        layout = cute.make_layout((self.scale_slots, SLOT_FLOATS), stride=(SLOT_FLOATS, 1))
        return storage.scales.get_tensor(layout)

    def _smem_layouts(self) -> SmemLayouts:
        c = self.config
        return SmemLayouts(
            q=swizzled_layout(WARPGROUP_ROWS, c.head_dim, c.consumers, self.dtype),
            k=swizzled_layout(c.tile_n, c.head_dim, c.stages, self.dtype),
            vt=swizzled_layout(c.head_dim_v, c.tile_n, c.stages, self.dtype),
            o=swizzled_layout(WARPGROUP_ROWS, c.head_dim_v, c.consumers, self.out_dtype),
        )
