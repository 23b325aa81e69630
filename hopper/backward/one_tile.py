"""The Hopper backward kernel of keys that are one tile: all of a backward pass in one launch."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineState

from hopper.backward.barriers import sync_warpgroup
from hopper.backward.config import BackwardConfig
from hopper.backward.consumer import BackwardConsumer, BackwardMmas
from hopper.backward.dq import QueryTile
from hopper.backward.kernel import BackwardKernel, BackwardPipelines
from hopper.backward.written_dq import WrittenGradientOfQ
from hopper.config import WARPGROUP_THREADS

LANES = 4
"""That share a row of O and dO."""

ELEMENTS = 8
"""Of 16 bits, in the 16 bytes that a lane reads."""


class OneTileConsumer(BackwardConsumer):
    """``BackwardConsumer`` that finds delta = rowsum(dO O) of a query tile, and its LSE in base 2, before the first
    product of the tile.

    Each warpgroup does for itself, and needs no barrier of all. Its vectors lie in memory of its own, which is written
    again once all have announced dS of the block before, and so have read them.
    """

    def __init__(
        self, parts: tuple, rows: tuple[cute.Tensor, cute.Tensor, cute.Tensor], vectors: tuple, wg: Int32
    ):
        """``parts`` are those of a ``BackwardConsumer``, with the LSE that is given as the first vector; ``rows`` are
        O and dO in shared memory and that LSE, ``vectors`` are where LSE and delta of this warpgroup are to lie."""
        *before, _, sdS, dq, thread = parts
        super().__init__(*before, vectors, sdS, dq, thread)
        self.rows, self.wg = rows, wg

    @cute.jit
    def find_rows(self, state: PipelineState):
        c, stage = self.config, state.index
        sO, sdO, given = self.rows
        self.pipes.do.consumer_wait(state)
        rows_at_once = WARPGROUP_THREADS // LANES
        lane = self.thread % LANES
        for first in cutlass.range_constexpr(0, c.tile_m, rows_at_once):
            row = first + self.thread // LANES
            total = Float32(0.0)
            for i in cutlass.range_constexpr(c.head_dim_v // ELEMENTS // LANES):
                parts = []
                for tensor in (sO, sdO):
                    part = cute.make_rmem_tensor(ELEMENTS, tensor.element_type)
                    source = cute.local_tile(tensor[row, None, stage], (ELEMENTS,), (i * LANES + lane,))
                    cute.autovec_copy(source, part)
                    parts.append(part.load().to(Float32))
                total = total + (parts[0] * parts[1]).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=LANES)
            if lane == 0:
                lse = given[row, stage]
                is_empty = lse == -Float32.inf
                self.sLSE[row, 0] = Float32.inf if is_empty else lse * Float32(math.log2(math.e))
                self.sDelta[row, 0] = Float32(0.0) if is_empty else total
        sync_warpgroup(self.wg)


class OneTileBackwardKernel(BackwardKernel):
    """``BackwardKernel`` of sequences whose keys are one tile, which needs no kernel before or behind it.

    A query tile has one part of dQ, which is complete (``WrittenGradientOfQ``). Tiles of O come with dO in the place of
    delta. The rounded dQ takes half of the memory of the sums, and O the other half.
    """

    def _delta_atom(self, load, mDelta: cute.Tensor, tile: cute.ComposedLayout, vector: cute.Layout):
        return cpasync.make_tiled_tma_atom(load, mDelta, tile, (self.config.tile_m, self.config.head_dim_v))

    def _delta_memory(self, storage, tile: cute.ComposedLayout, vector: cute.Layout) -> cute.Tensor:
        return storage.sO.get_tensor(tile.outer, swizzle=tile.inner)

    def _query_tile(self, tile: Int32, place: tuple[Int32, Int32, Int32]) -> QueryTile:
        return QueryTile(*place, False, True)

    def _gradient_of_q(
        self, mmas: BackwardMmas, pipes: BackwardPipelines, memory: tuple, store: tuple
    ) -> WrittenGradientOfQ:
        (atom,), (tensor,), softmax_scale = store
        layout = self._smem_layouts().dq
        return WrittenGradientOfQ((atom, tensor), layout, softmax_scale, self.config, mmas.dq, *memory)

    def _make_consumer(self, parts: tuple, sdO: cute.Tensor, storage) -> OneTileConsumer:
        c: BackwardConfig = self.config
        given, sO = parts[4]
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_THREADS // 32) - 1
        # Of all stages: a warpgroup has one of each.
        layout = cute.make_layout((c.tile_m, c.stages), stride=(1, 0))
        first = storage.sDelta.data_ptr() + wg * (2 * c.tile_m)
        vectors = tuple(cute.make_tensor(first + i * c.tile_m, layout) for i in range(2))
        return OneTileConsumer(parts, (sO, sdO, given), vectors, wg)
