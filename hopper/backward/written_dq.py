"""dQ of a query tile that is complete: rounded on the chip, and written as it is to be."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp
from cutlass.pipeline import PipelineState

from cute_kernels.fast_math import pin
from hopper.backward.config import BackwardConfig
from hopper.backward.dq import NO_TILE, GradientOfQ, QueryTile
from hopper.config import WARPGROUP_ROWS
from hopper.tiles import TmaOperand

HEAD_BITS = 16
"""Of a head beside a batch: either is at most ``MAX_BATCH_OR_HEADS``."""

SWIZZLE_BYTES = 1024
"""After which a swizzle repeats."""


class WrittenGradientOfQ(GradientOfQ):
    """The part of a dQ tile that one warpgroup computes, which nothing is added to later: rounded, staged in shared
    memory and stored by TMA, when and as ``GradientOfQ`` sends its sums.

    A buffer of a warpgroup may be as large as the rounded part alone.
    """

    def __init__(
        self,
        store: tuple,
        layout: cute.ComposedLayout,
        softmax_scale: Float32,
        config: BackwardConfig,
        mma: cute.TiledMma,
        *rest,
    ):
        """``store`` is the TMA atom and tensor of dQ, ``layout`` that of a rounded part in shared memory."""
        super().__init__(config, mma, *rest)
        self.store, self.layout, self.softmax_scale, self.mma = store, layout, softmax_scale, mma
        self.place = cute.make_rmem_tensor(2, Int32)

    @cute.jit
    def clear(self):
        self.place[0] = Int32(NO_TILE)
        self.acc.fill(0.0)

    @cute.jit
    def hold(self, tile: QueryTile):
        self.place[0], self.place[1] = tile.m_block, tile.head | tile.batch << HEAD_BITS

    @cute.jit
    def stage(self, buffer: Int32, state: PipelineState):
        self._stage_rounded(buffer)

    @cute.jit
    def send(self, buffer: Int32):
        if self.is_issuer:
            if self.place[0] != NO_TILE:
                self._store(buffer)

    def free_buffer(self, buffer: Int32) -> Int32:
        """The first one: all are free once what was sent is read, and dV takes two."""
        return Int32(0)

    @cute.jit
    def _stage_rounded(self, buffer: Int32):
        dtype = self.mma.op.a_dtype
        scaled = self.acc.load() * self.softmax_scale
        rounded = cute.make_rmem_tensor_like(self.acc, dtype)
        rounded.store(scaled.to(dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        # Pinned, or else addresses are held in registers throughout.
        copy = cute.make_tiled_copy_C(atom, self.mma).get_slice(pin(self.thread, Int32))
        cute.copy(atom, copy.retile(rounded), copy.partition_D(self._staged(buffer)[None, None, 0]))

    @cute.jit
    def _store(self, buffer: Int32):
        """Start the store of what is staged; fence and barrier lie behind. By the warp that issues."""
        c = self.config
        operand = TmaOperand(*self.store, self._staged(buffer))
        m_block = self.place[0]
        head, batch = (self.place[1] >> shift & ((1 << HEAD_BITS) - 1) for shift in (0, HEAD_BITS))
        tile = (m_block, self.wg) if c.splits_columns else (m_block * c.consumers + self.wg, 0)
        source, target = operand.partition((WARPGROUP_ROWS, c.dq_columns), tile, head, batch)
        cute.copy(operand.atom, source[None, 0], target)
        cute.arch.cp_async_bulk_commit_group()

    def _staged(self, buffer: Int32) -> cute.Tensor:
        """(rows, columns, 1) of what is rounded."""
        place = self.sdQ[None, buffer].iterator.align(SWIZZLE_BYTES)
        pointer = cute.recast_ptr(place, self.layout.inner, dtype=self.mma.op.a_dtype)
        return cute.make_tensor(pointer, self.layout.outer)
