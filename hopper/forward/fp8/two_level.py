"""O in float32 beside an accumulator for the P V of each key block."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.fragments import COLUMNS_PER_PAIR, ROWS_PER_THREAD, as_rows
from cute_kernels.softmax import OnlineSoftmax
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.operands import Mmas
from hopper.forward.output import Output, make_accumulator
from hopper.wgmma import issue_gemm

PARTS_IN_FLIGHT = 2
"""Parts of P V that have registers at a time: one is added to O while the tensor cores make the other."""


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
