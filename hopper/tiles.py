"""Tiles in shared memory: their swizzled layouts, and how TMA fills and stores them."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_THREADS

WARPS_PER_WARPGROUP = WARPGROUP_THREADS // 32

SWIZZLES = {128: SmemLayoutAtomKind.K_SW128, 64: SmemLayoutAtomKind.K_SW64, 32: SmemLayoutAtomKind.K_SW32}
"""By the bytes of a row, or of the part of it within which they are."""


def swizzle_bytes(row_bytes: int) -> int:
    """Of the widest swizzle that divides a row."""
    return next(width for width in SWIZZLES if row_bytes % width == 0)


def swizzled_layout(
    rows: int, cols: int, stages: int, dtype, stage_stride: int | None = None, part: int | None = None
) -> cute.ComposedLayout:
    """Row-major (rows, cols, stages) in the widest swizzle that divides a row, or a ``part`` of its columns that is an
    operand by itself."""
    part_bytes = (cols if part is None else part) * dtype.width // 8
    atom = warpgroup.make_smem_layout_atom(SWIZZLES[swizzle_bytes(part_bytes)], dtype)
    tile = cute.tile_to_shape(atom, (rows, cols), (0, 1))
    stride = rows * cols if stage_stride is None else stage_stride
    staged = cute.append(tile.outer, cute.make_layout(stages, stride=stride))
    return cute.make_composed_layout(tile.inner, 0, staged)


@dataclass(frozen=True)
class TmaOperand(LoopInvariant):
    """A TMA atom with the coordinate tensor and the staged shared memory between which it copies."""

    atom: cute.CopyAtom
    gmem: cute.Tensor
    smem: cute.Tensor

    def partition(
        self,
        tiler: tuple,
        coord: tuple,
        head: Int32,
        batch: Int32,
        share: tuple[Int32 | int, int] = (0, 1),
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """(shared stages, global tiles) of one head, each with the copied tile as mode 0; with ``share`` = (i, n) of
        CTAs that share a tile out by multicast, the i-th part of n."""
        tiles = cute.local_tile(self.gmem[None, None, head, batch], tiler, coord)
        return cpasync.tma_partition(
            self.atom,
            share[0],
            cute.make_layout(share[1]),
            cute.group_modes(self.smem, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
