"""Scales of single keys and values of a cache of e4m3: how a producer warp brings those of a block."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.fast_math import max_over_lanes
from cute_kernels.invariant import LoopInvariant
from hopper.decode.config import DecodeConfig

LANES = 32

LEAST_SCALE = 2.0**-100
"""What the largest scale of a block of V is taken for, at least, so that all may be zeros."""


@dataclass(frozen=True)
class RowScales(LoopInvariant):
    """Those of K, or of V, float32 (pages, page_size, kv_heads) in memory, and ``smem`` (tile_n, stages)."""

    config: DecodeConfig
    tensor: cute.Tensor
    smem: cute.Tensor

    @cute.jit
    def load(self, block: Int32, seen: tuple, head: Int32, place: tuple, barrier: cute.Pointer, stage: Int32):
        """Start to copy those of a key block to a stage that is empty, behind which each lane arrives at a barrier.

        ``place`` are the lane, and the page and the row at which its box of keys lies. A lane copies every 32nd scale
        of the block. ``seen`` are the first key that some query sees and the end of the keys: the scale of any other is
        0, whatever lies there, so that none of it is ever the largest of a block.
        """
        c, (lane, page, row), (begin, end) = self.config, place, seen
        for i in cutlass.range_constexpr(c.tile_n // LANES):
            key = i * LANES + lane
            of_page = cute.arch.shuffle_sync(page, offset=key // c.box_rows)
            first = cute.arch.shuffle_sync(row, offset=key // c.box_rows)
            source = cute.domain_offset((of_page, first + key % c.box_rows, head), self.tensor)
            target = cute.domain_offset((key, stage), self.smem)
            number = block * c.tile_n + key
            is_seen = Int32(1) if number >= begin and number < end else Int32(0)
            copy_4_bytes(target.iterator.toint(), source.iterator.toint(), is_seen)
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)


def copy_4_bytes(target: Int32, source: Int64, exists: Int32):
    """Start a copy from global to shared memory, of zeros where ``exists`` is 0."""
    cute.arch.inline_ptx(
        "{ .reg .pred is_missing; setp.eq.s32 is_missing, {$r2}, 0; "
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, is_missing; }",
        read_only_args=[target, source, exists],
    )


@cute.jit
def largest_of_block(scales: cute.Tensor, stage: Int32, lane: Int32) -> Float32:
    """The largest of a block, (tile_n, stages), in all lanes of a warp. NaN are passed over."""
    largest = Float32(LEAST_SCALE)
    for i in cutlass.range_constexpr(cute.size(scales, mode=[0]) // LANES):
        scale = scales[i * LANES + lane, stage]
        largest = cute.arch.fmax(largest, cute.arch.fmax(scale, -scale))
    return max_over_lanes(largest, LANES)
