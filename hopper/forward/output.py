"""How the product P V of a key block reaches O, which stays in registers until the epilogue."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.fragments import COLUMNS_PER_PAIR, ROWS_PER_THREAD, as_rows
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import OnlineSoftmax, scale_rows
from hopper.config import WARPGROUP_ROWS, ForwardConfig, Fp8ForwardConfig
from hopper.forward.operands import Mmas
from hopper.wgmma import issue_gemm, keep_descriptor

PARTS_IN_FLIGHT = 2
"""Parts of P V that have registers at a time: one is added to O while the tensor cores make the other."""


class Output(LoopInvariant):
    """O as the accumulator of every P V, shrunk between two of them for a new maximum.

    ``acc`` is the thread's part of the 64 rows. ``sV`` is V in shared memory, transposed, with a last mode over stages.
    For each key block the consumer calls ``enter_product``, ``start``, ``wait`` and ``collect`` in this order, and
    ``rescale`` between ``collect`` of a block and ``enter_product`` of the next, whose maximum the softmax has found by
    then.
    """

    def __init__(self, config: ForwardConfig, mmas: Mmas, sV: cute.Tensor, softmax: OnlineSoftmax):
        self.config, self.mma, self.softmax = config, mmas.pv, softmax
        self.tOrV = keep_descriptor(self.mma.make_fragment_B(self.mma.get_slice(0).partition_B(sV)))
        self.acc = make_accumulator(mmas.pv, config.head_dim_v)

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


class TwoLevelOutput(Output):
    """O in float32 registers, to which each P V is added from an accumulator of its own.

    FP8 WGMMA keeps fewer bits of a sum than float32 has, so the larger its accumulator gets, the more it drops of what
    it adds. Here it sums no more than one block. The sum over blocks takes an FMA an element, which shrinks O as well:
    O = O row_scale + P V. Where O is wide, P V comes in parts of its columns, made by ``part_mma``.
    """

    def __init__(
        self,
        config: Fp8ForwardConfig,
        mmas: Mmas,
        part_mma: cute.TiledMma,
        sV: cute.Tensor,
        softmax: OnlineSoftmax,
    ):
        self.config, self.mma, self.softmax = config, part_mma, softmax
        columns = config.pv_columns
        parts = cute.local_tile(sV, (columns, config.tile_n), (None, 0, None))
        self.tOrV = part_mma.make_fragment_B(part_mma.get_slice(0).partition_B(parts))
        self.acc = make_accumulator(mmas.pv, config.head_dim_v)
        self.parts = config.head_dim_v // columns
        self.in_flight = min(self.parts, PARTS_IN_FLIGHT)
        self.products = [make_accumulator(part_mma, columns) for _ in range(self.in_flight)]
        self.row_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)

    @cute.jit
    def enter_product(self):
        """Keep the factors that go with this P: before ``collect`` the softmax may have those of the next block."""
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.row_scale[r] = self.softmax.row_scale[r]

    @cute.jit
    def start(self, tOrP: cute.Tensor, stage: Int32):
        for part in cutlass.range_constexpr(self.in_flight):
            self._start_part(part, tOrP, stage)

    @cute.jit
    def wait(self, tOrP: cute.Tensor, stage: Int32):
        """As in ``Output``; adds every part but the last, so that the later ones find registers."""
        for part in cutlass.range_constexpr(self.parts - 1):
            warpgroup.wait_group(self.in_flight - 1)
            self._add_part(part)
            if const_expr(part + self.in_flight < self.parts):
                self._start_part(part + self.in_flight, tOrP, stage)
        warpgroup.wait_group(0)

    @cute.jit
    def collect(self):
        self._add_part(self.parts - 1)

    @cute.jit
    def rescale(self):
        """``_add_part`` does."""

    @cute.jit
    def _start_part(self, part: cutlass.Constexpr[int], tOrP: cute.Tensor, stage: Int32):
        product = self.products[part % self.in_flight]
        issue_gemm(self.mma, product, tOrP, self.tOrV[None, None, None, part, stage], False)

    @cute.jit
    def _add_part(self, part: cutlass.Constexpr[int]):
        """O = O row_scale + P V in the columns of a part."""
        added = as_rows(self.products[part % self.in_flight])
        pairs, first = added.shape[1][1], part * added.shape[1][1]
        rows = as_rows(self.acc)
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            for j in cutlass.range_constexpr(pairs):
                for e in cutlass.range_constexpr(COLUMNS_PER_PAIR):
                    rows[r, (e, first + j)] = rows[r, (e, first + j)] * self.row_scale[r] + added[r, (e, j)]


def make_accumulator(mma: cute.TiledMma, columns: int) -> cute.Tensor:
    """Registers for a product of one warpgroup."""
    return cute.make_rmem_tensor(mma.partition_shape_C((WARPGROUP_ROWS, columns)), Float32)
