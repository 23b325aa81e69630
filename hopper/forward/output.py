"""How the product P V of a key block reaches O, which stays in registers until the epilogue."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import OnlineSoftmax, scale_rows
from hopper.config import COLUMNS_PER_STEP, WARPGROUP_ROWS, ForwardConfig
from hopper.forward.operands import Mmas
from hopper.wgmma import issue_gemm, keep_descriptor


class Output(LoopInvariant):
    """O as the accumulator of every P V, shrunk between two of them for a new maximum.

    ``acc`` is the thread's part of the 64 rows. ``sV`` is V in shared memory, transposed, with a last mode over stages.
    For each key block the consumer calls ``enter_product``, ``start``, ``wait`` and ``collect`` in this order, and
    ``rescale`` between ``collect`` of a block and ``enter_product`` of the next, whose maximum the softmax has found by
    then.
    """

    def __init__(self, config: ForwardConfig, mmas: Mmas, sV: cute.Tensor, softmax: OnlineSoftmax):
        self.config, self.mma, self.softmax = config, mmas.pv, softmax
        # A descriptor says where V lies. How many of its columns are read is in the instruction.
        whole = mmas.whole_pv
        self.tOrV = keep_descriptor(whole.make_fragment_B(whole.get_slice(0).partition_B(sV)))
        self.acc = make_accumulator(mmas.pv, config.columns_pv)

    def clear(self):
        """Before the first block of a tile."""
        self.acc.fill(0.0)

    @cute.jit
    def enter_product(self):
        """Before ``start``; under Q K^T of the next block where there is one."""
        if const_expr(self.config.late_rescale):
            self.softmax.rescale_if_needed(self.acc)

    @cute.jit
    def start(self, tOrP: cute.Tensor, stage: Int32):
        """Start P V of the block whose V lies in ``stage``."""
        issue_gemm(self.mma, self.acc, tOrP, self.tOrV[None, None, None, stage], True)

    @cute.jit
    def start_cut(self, tOrP: cute.Tensor, stage: Int32, keys: cutlass.Constexpr[int]):
        """``start`` of the first ``keys`` of the block alone."""
        tOrV = self.tOrV[None, None, None, stage]
        issue_gemm(self.mma, self.acc, tOrP, tOrV, True, steps=keys // COLUMNS_PER_STEP)

    @cute.jit
    def start_few(self, tOrP: cute.Tensor, tOrV: cute.Tensor):
        """``start`` of ``few_keys``, whose V is ``tOrV``."""
        issue_gemm(self.mma, self.acc, tOrP, tOrV, True, steps=self.config.few_keys // COLUMNS_PER_STEP)

    @cute.jit
    def start_last(self, tOrP: cute.Tensor, stage: Int32):
        """``start`` of the last block of a tile."""
        self.start(tOrP, stage)

    @cute.jit
    def wait(self, tOrP: cute.Tensor, stage: Int32):
        """Until this P V, and all WGMMAs before it, are done: P and V may change."""
        warpgroup.wait_group(0)

    @cute.jit
    def collect(self):
        """After ``wait``: leave O with this P V in it. May come after the next block's softmax."""

    @cute.jit
    def rescale(self):
        """Shrink O for the maximum that the softmax has found last."""
        if const_expr(not self.config.late_rescale):
            scale_rows(self.acc, self.softmax.row_scale)


class OutputInHalves(Output):
    """``Output`` of which the last P V of a tile is two products, each of half of the columns: O of the first can leave
    while the second is made.

    ``half_mma`` makes such a product. After ``start_last`` its caller waits for the two, which are a group each, and
    ``half`` has the result of one.
    """

    def __init__(self, half_mma: cute.TiledMma, *output: Any):
        super().__init__(*output)
        self.half_mma = half_mma
        _, _, sV, _ = output
        halves = half_mma.make_fragment_B(half_mma.get_slice(0).partition_B(sV))
        self.tOrV_halves = cute.make_tensor(self.tOrV.iterator, halves.layout)

    @cute.jit
    def start_last(self, tOrP: cute.Tensor, stage: Int32):
        for h in cutlass.range_constexpr(2):
            of_half = self.tOrV_halves[None, h, None, stage]
            shape, stride = of_half.layout.shape, of_half.layout.stride
            layout = cute.make_layout((shape[0], 1, shape[1]), stride=(stride[0], 0, stride[1]))
            issue_gemm(self.half_mma, self.half(h), tOrP, cute.make_tensor(of_half.iterator, layout), True)

    def half(self, h: int) -> cute.Tensor:
        """The part of ``acc`` that has half ``h`` of the columns."""
        like = make_accumulator(self.half_mma, self.config.head_dim_v // 2)
        return cute.make_tensor(self.acc.iterator + cute.size(like) * h, like.layout)


def make_accumulator(mma: cute.TiledMma, columns: int, dtype: Any = Float32) -> cute.Tensor:
    """Registers for a product of one warpgroup."""
    return cute.make_rmem_tensor(mma.partition_shape_C((WARPGROUP_ROWS, columns)), dtype)
