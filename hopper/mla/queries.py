"""Q and QV of a tile: by ordinary loads to the swizzled shared memory from which WGMMA reads them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cute_kernels.fragments import ROW_STRIDE
from cute_kernels.invariant import LoopInvariant
from hopper.config import WARPGROUP_ROWS
from hopper.decode.config import BOX_COLUMNS
from hopper.decode.rows import TileRows
from hopper.forward.barriers import sync_warpgroup
from hopper.mla.config import MlaConfig
from hopper.wide.operands import FIRST_HALF

VECTOR = 8
"""16-bit elements of 16 bytes, which swizzling moves as one."""

CHUNK_WORDS = 4
"""32-bit words of as much."""

CHUNKS_PER_ROW = BOX_COLUMNS // VECTOR
"""Of a row of 128 bytes, within which they are swizzled by the row's number."""

ROWS_AT_ONCE = 16
"""That a warpgroup loads, a thread for each chunk of a row."""


def chunks_of(smem: cute.Tensor, columns: int) -> cute.Tensor:
    """(CHUNK_WORDS, CHUNKS_PER_ROW, 64, parts) of a tile of 64 rows, as it lies and not as its swizzle says."""
    start = cute.recast_ptr(smem.iterator, cute.make_swizzle(0, 4, 3), Int32)
    row = CHUNK_WORDS * CHUNKS_PER_ROW
    layout = cute.make_layout(
        (CHUNK_WORDS, CHUNKS_PER_ROW, WARPGROUP_ROWS, columns // BOX_COLUMNS),
        stride=(1, CHUNK_WORDS, row, row * WARPGROUP_ROWS),
    )
    return cute.make_tensor(start.align(16), layout)


@dataclass(frozen=True)
class Queries(LoopInvariant):
    """Loads the rows of a CTA, from row ``first`` of each tile on, by the 128 threads of the scores' warpgroup.

    ``sources`` are Q and QV, ``targets`` the ``chunks_of`` their shared memory.
    """

    config: MlaConfig
    sources: tuple[cute.Tensor, cute.Tensor]
    targets: tuple[cute.Tensor, cute.Tensor]
    first: Int32 | int
    thread: Int32

    @cute.jit
    def clear(self):
        """Once, rows of a WGMMA that no tile has: what they hold joins no row that is looked at, but each of their
        maxima would have O scaled anew. A tile's rows are loaded by other warps than those that clear their place."""
        none = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
        none.fill(0)
        chunk, lane = self.thread % CHUNKS_PER_ROW, self.thread // CHUNKS_PER_ROW
        for target in self.targets:
            for row in cutlass.range_constexpr(0, WARPGROUP_ROWS, ROWS_AT_ONCE):
                for part in cutlass.range_constexpr(target.shape[3]):
                    cute.autovec_copy(none, target[None, chunk, row + lane, part])
        sync_warpgroup(FIRST_HALF)

    @cute.jit
    def load(self, rows: TileRows):
        """The rows of a tile; zeros for rows and columns that there are not."""
        thread_row = self.thread // CHUNKS_PER_ROW
        own = [row + thread_row for row in range(0, self.config.cta_rows, ROWS_AT_ONCE)]
        # All are under way before the first is stored: O has left the registers.
        loaded = [self._load_row(rows, row) for row in own]
        for i in cutlass.range_constexpr(len(own)):
            self._store_row(own[i], loaded[i])
        cute.arch.fence_view_async_shared()
        sync_warpgroup(FIRST_HALF)

    def _load_row(self, rows: TileRows, row: Int32) -> list:
        """The thread's chunks of a row of this CTA."""
        of_tile, chunk = self.first + row, self.thread % CHUNKS_PER_ROW
        is_row = of_tile < rows.count
        loaded = []
        for source, target in zip(self.sources, self.targets, strict=True):
            of_row = rows.of(source, of_tile)
            for part in range(target.shape[3]):
                column = part * BOX_COLUMNS + chunk * VECTOR
                loaded.append(load_chunk(of_row, column, is_row))
        return loaded

    def _store_row(self, row: Int32, loaded: list):
        """What was loaded of it."""
        place, chunk = self._place(row), self.thread % CHUNKS_PER_ROW
        for target in self.targets:
            for part in range(target.shape[3]):
                cute.autovec_copy(loaded.pop(0), target[None, place % CHUNKS_PER_ROW ^ chunk, place, part])

    def _place(self, row: Int32) -> Int32:
        """Of a row, among the 64 of a WGMMA."""
        if self.config.cta_rows == WARPGROUP_ROWS:
            return row
        return row // ROW_STRIDE * (2 * ROW_STRIDE) + row % ROW_STRIDE


@cute.jit
def load_chunk(row: cute.Tensor, column: Int32, is_row: Boolean) -> cute.Tensor:
    """CHUNK_WORDS words of a row from a column on; zeros where there is none."""
    found = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
    found.fill(0)
    if is_row and column < row.shape[0]:
        start = cute.make_ptr(
            Int32, (row.iterator + column).toint(), cute.AddressSpace.gmem, assumed_align=16
        )
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(CHUNK_WORDS)), found)
    return found
