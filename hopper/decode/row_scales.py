"""Scales of single keys and values of a cache of e4m3: how a producer warp brings those of a block."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fast_math import max_over_lanes
from cute_kernels.invariant import LoopInvariant
from hopper.decode.config import P_SCALE, DecodeConfig

LANES = 32

LEAST_SCALE = 2.0**-100
"""That all scales of a block of V are divided by, at least, so that zeros may be."""


@dataclass(frozen=True)
class RowScales(LoopInvariant):
    """Those of K, or of V, float32 (pages, page_size, kv_heads) in memory, and ``smem`` (scale_words, stages).

    A lane has every 32nd key of a block. Its scales are in registers, ``held``, from one block to the next, so that the
    warp waits for none.

    P is split into two terms of e4m3, which hold numbers up to 1. So P times the scales of V is to be 1 at most: these
    are divided by the largest of their block, which follows them, and by which the product of the block is multiplied.
    """

    config: DecodeConfig
    tensor: cute.Tensor
    smem: cute.Tensor
    held: cute.Tensor
    is_of_values: bool

    @cute.jit
    def load(self, block: Int32, keys: Int32, head: Int32, page: Int32, row: Int32, lane: Int32):
        """Start to load those of a key block whose boxes lie where the lanes say. Of a key that there is not it is 0,
        whatever lies there."""
        c = self.config
        for i in cutlass.range_constexpr(c.tile_n // LANES):
            key = i * LANES + lane
            of_page = cute.arch.shuffle_sync(page, offset=key // c.box_rows)
            first = cute.arch.shuffle_sync(row, offset=key // c.box_rows)
            scale = Float32(0.0)
            if block * c.tile_n + key < keys:
                scale = self.tensor[of_page, first + key % c.box_rows, head]
            self.held[i] = scale

    @cute.jit
    def store(self, barrier: cute.Pointer, stage: Int32, lane: Int32):
        """Leave those that are held in a stage that is empty, and say so."""
        c = self.config
        scales = [self.held[i] for i in range(c.tile_n // LANES)]
        if const_expr(self.is_of_values):
            largest = Float32(LEAST_SCALE)
            for scale in scales:
                largest = cute.arch.fmax(largest, cute.arch.fmax(scale, -scale))
            largest = max_over_lanes(largest, LANES)
            factor = Float32(P_SCALE) / largest
            scales = [scale * factor for scale in scales]
            if lane == 0:
                self.smem[c.tile_n, stage] = largest
        for i, scale in enumerate(scales):
            self.smem[i * LANES + lane, stage] = scale
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
