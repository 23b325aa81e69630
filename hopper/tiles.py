"""Tiles in shared memory: their swizzled layouts, and how TMA fills and stores them."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import LedRows, PackedRows
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


RAGGED_ROWS = 2**30
"""Rows that a ragged view has, whatever the tensor."""

ADDRESS_PART = 2**34
"""Bytes of which RAGGED_ROWS are 2^64, which is nothing to an address."""


def ragged_view(tensor: cute.Tensor, row_mode: int = 0, step: int = 1) -> cute.Tensor:
    """Packed rows, heads last, as TMA has to see them so that it stops at the end of each sequence.

    TMA clips a box to the sizes of its tensor, which are the same for all sequences. Here the rows of every sequence
    end at row RAGGED_ROWS, so that what lies behind reads as zeros and is not written. Two more modes put the address
    right: with coordinates (RAGGED_ROWS, end), row RAGGED_ROWS - i is row end - i of the tensor, since addresses wrap
    at 2^64. (The idea is that of Triton's ragged descriptors.)

    Where rows are neighbouring bytes, of which TMA cannot take one as a stride, sequences begin and end at multiples of
    ``step`` rows, and these two modes count such steps.
    """
    assert cute.rank(tensor) == 3
    row_stride = tensor.stride[row_mode]
    elements = ADDRESS_PART * 8 // tensor.element_type.width
    step_stride = row_stride if step == 1 else row_stride * step
    back = cute.assume(Int64(elements * step) - step_stride, divby=16 * 8 // tensor.element_type.width)
    shape = [*tensor.shape[:2], tensor.shape[2], RAGGED_ROWS // step + 1, 2**31 - 1]
    shape[row_mode] = RAGGED_ROWS
    layout = cute.make_layout(tuple(shape), stride=(*tensor.stride, back, step_stride))
    return cute.make_tensor(tensor.iterator, layout)


@dataclass(frozen=True)
class TmaOperand(LoopInvariant):
    """A TMA atom with the coordinate tensor and the staged shared memory between which it copies.

    ``gmem`` is (rows, columns, heads, batch), or of packed sequences a ``ragged_view``; mode ``row_mode`` has the rows.
    ``step`` is that of the view.
    """

    atom: cute.CopyAtom
    gmem: cute.Tensor
    smem: cute.Tensor
    row_mode: int = 0
    step: int = 1

    def of_head(self, head: Int32, rows: PackedRows | LedRows | Int32) -> cute.Tensor:
        """The rows of a sequence, and the columns of a head; ``rows`` is as ``SeqlenInfo`` gives it."""
        if isinstance(rows, LedRows):
            # Loads have zeros in front of the first row. No store may begin there.
            tensor = self.gmem[None, None, head, rows.batch]
            return cute.domain_offset((-rows.lead, 0) if self.row_mode == 0 else (0, -rows.lead), tensor)
        if not isinstance(rows, PackedRows):
            return self.gmem[None, None, head, rows]
        end = rows.offset + rows.length
        end = end if self.step == 1 else end // self.step
        tensor = self.gmem[None, None, head, RAGGED_ROWS // self.step, end]
        first = RAGGED_ROWS - rows.length
        return cute.domain_offset((first, 0) if self.row_mode == 0 else (0, first), tensor)

    def partition(
        self,
        tiler: tuple,
        coord: tuple,
        head: Int32,
        rows: PackedRows | LedRows | Int32,
        share: tuple[Int32 | int, int] = (0, 1),
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """(shared stages, global tiles) of one head, each with the copied tile as mode 0; with ``share`` = (i, n) of
        CTAs that share a tile out by multicast, the i-th part of n."""
        tiles = cute.local_tile(self.of_head(head, rows), tiler, coord)
        return cpasync.tma_partition(
            self.atom,
            share[0],
            cute.make_layout(share[1]),
            cute.group_modes(self.smem, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )


def box_of(tile: cute.Tensor, number: int) -> cute.Tensor:
    """One of the boxes of ``tile``, whose only mode is one of ``TmaOperand.partition``: ((box, boxes),)."""
    boxes = cute.make_tensor(tile.iterator, cute.flatten(tile.layout))
    of_box = cute.rank(boxes) - 1
    box = boxes[(*[None] * of_box, number)]
    box = box if of_box == 1 else cute.group_modes(box, 0, of_box)
    return cute.group_modes(cute.append_ones(box), 0, 2)
