"""Q and O of a tile by TMA, in boxes of rows that are heads of one token."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from cute_kernels.integers import divide
from cute_kernels.invariant import LoopInvariant
from cute_kernels.softmax import scale_rows
from hopper.config import WARPGROUP_ROWS
from hopper.decode.config import BOX_COLUMNS
from hopper.decode.operands import Work
from hopper.decode.rows import TileRows
from hopper.forward.barriers import sync_warpgroup
from hopper.mla.config import OUTPUT_ROWS, MlaConfig
from hopper.mla.results import CtaRows
from hopper.wide.operands import tile_state


class BoxedRows(NamedTuple):
    """Q, QV or O as TMA sees it, (heads, columns, tokens, sequences), and the atom of a box."""

    atom: cute.CopyAtom
    rows: cute.Tensor

    def box_of(self, tile: TileRows, row: Any, box: tuple[int, int], part: int) -> cute.Tensor:
        """Some columns of the rows from ``row`` of a tile on; behind the last token TMA finds zeros, and leaves
        nothing."""
        row = tile.first + row
        token = divide(row, tile.group)
        of_token = self.rows[None, None, token, tile.seqlens.batch]
        head = tile.head_kv * tile.group + row - token * tile.group
        return cute.local_tile(cute.domain_offset((head, 0), of_token), box, (0, part))


def copy_box(atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor, is_load: bool, **others: Any) -> None:
    """One box, by a warp."""
    sides = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )
    source, target = reversed(sides) if is_load else sides
    cute.copy(atom, source, target, **others)


def wait_until_read() -> None:
    """By a warp, until what it has sent off has been read."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    # Whichever lane issued the copies, no lane goes on before they have read.
    cute.arch.sync_warp()


@dataclass(frozen=True)
class QueryBoxes(LoopInvariant):
    """The warp that brings Q and QV of every tile of a piece, from row ``first`` of each tile on: when the scores of
    the tile before have read theirs. ``sources`` and ``targets`` are of both, the latter (64, columns, 1)."""

    config: MlaConfig
    work: Work
    sources: tuple[BoxedRows, BoxedRows]
    targets: tuple[cute.Tensor, cute.Tensor]
    pipe: PipelineTmaAsync
    first: Int32 | int
    lane: Int32

    @cute.jit
    def run(self):
        work, phase = self.work, Int32(1)
        sequence, tile, start, end = work.first_tile(self.lane)
        while start < end:
            seqlens = work.batch.seqlens(sequence)
            blocks = work.batch.blocks(seqlens)
            parts = work.parts(start, blocks.count)
            if parts.begin(work.cta) < parts.begin(work.cta + 1):
                row_tiles = work.batch.row_tiles(seqlens)
                head = divide(tile, row_tiles)
                first = work.heads.row_tile(tile - head * row_tiles) * self.config.tile_m
                rows = TileRows(seqlens, first, work.heads.head(head), work.batch.group)
                self._load(rows, tile_state(phase))
                phase ^= 1
            start += blocks.units
            sequence, tile = work.batch.following(sequence, tile, work.batch.tiles(seqlens))

    @cute.jit
    def _load(self, tile: TileRows, state: PipelineState):
        self.pipe.producer_acquire(state)
        barrier = self.pipe.producer_get_barrier(state)
        box = (self.config.query_box, BOX_COLUMNS)
        for source, target in zip(self.sources, self.targets, strict=True):
            for part in cutlass.range_constexpr(cute.size(target, mode=[1]) // BOX_COLUMNS):
                for i in cutlass.range_constexpr(WARPGROUP_ROWS // box[0]):
                    smem = cute.local_tile(target[None, None, 0], box, (i, part))
                    gmem = source.box_of(tile, self.first + i * box[0], box, part)
                    copy_box(source.atom, smem, gmem, True, tma_bar_ptr=barrier)


@dataclass(frozen=True)
class OutputBoxes(LoopInvariant):
    """O of a consumer warpgroup, whose warps stage 16 rows each in the place of V of the last block of a tile. ``sV``
    are the parts of V in shared memory."""

    config: MlaConfig
    target: BoxedRows
    sV: tuple[cute.Tensor, ...]

    @cute.jit
    def leave(
        self,
        product: tuple[cute.Tensor, cute.TiledMma],
        part: cutlass.Constexpr[int],
        factors: cute.Tensor,
        rows: CtaRows,
        state: PipelineState,
    ):
        """The columns of a part of V, multiplied by ``factors``; ``product`` are the accumulator of P V and how it was
        multiplied. Behind ``wait_until_read`` that part may be given back."""
        acc, mma = product
        scale_rows(acc, factors)
        # A warp may be done with its rows of P V before others have read V for theirs.
        sync_warpgroup(min(part, 1))
        staged = self.sV[part][None, None, state.index]
        self._stage(acc, mma, staged, rows)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        box = (OUTPUT_ROWS, BOX_COLUMNS)
        before = sum(self.config.parts[:part]) // BOX_COLUMNS
        for i in cutlass.range_constexpr(self.config.parts[part] // BOX_COLUMNS):
            smem = cute.local_tile(staged, box, (rows.warp, i))
            first = rows.first + rows.warp * OUTPUT_ROWS
            gmem = self.target.box_of(rows.tile, first, box, before + i)
            copy_box(self.target.atom, smem, gmem, False)
        cute.arch.cp_async_bulk_commit_group()

    def _stage(self, acc: cute.Tensor, mma: cute.TiledMma, staged: cute.Tensor, rows: CtaRows) -> None:
        dtype = staged.element_type
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
        thread = rows.warp * cute.arch.WARP_SIZE + rows.lane
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        rounded = cute.make_rmem_tensor_like(acc, dtype)
        rounded.store(acc.load().to(dtype))
        cute.copy(atom, copy.retile(rounded), copy.partition_D(staged))
