"""What the roles of the decode kernel share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.pipeline import PipelineState, PipelineTmaAsync, PipelineUserType, make_pipeline_state

from cute_kernels.integers import divide
from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import VARLEN
from cute_kernels.window import sides_of, window_of
from hopper.config import WARPGROUP_THREADS
from hopper.decode.batch import CacheBatch, Scanned
from hopper.decode.config import DecodeConfig
from hopper.decode.schedule import HeadsTogether, Pieces, TileParts


@dataclass(frozen=True)
class Keys(LoopInvariant):
    """K or V as it is multiplied: its stages in shared memory, row-major (tile_n, head_dim, stages), and the pipeline
    that says when they are full. ``is_widened``: warps fill them, and not TMA. ``scales`` is empty, or has those of the
    stages, float32 (tile_n, stages)."""

    smem: cute.Tensor
    pipe: Any
    is_widened: bool
    scales: tuple[cute.Tensor, ...] = ()

    @cute.jit
    def release(self, state: PipelineState, lane: Int32):
        """By each warp that has multiplied a stage."""
        if const_expr(self.is_widened):
            if lane == 0:
                self.pipe.consumer_release(state)
        else:
            self.pipe.consumer_release(state)


@cute.jit
def clear_rows(
    values: cute.Tensor,
    row_bytes: cutlass.Constexpr[int],
    first: Int32,
    stages: tuple,
    thread: Int32,
    threads: cutlass.Constexpr[int] = WARPGROUP_THREADS,
):
    """Zero the rows from ``first`` on in some stages of V, (tile_n, columns, stages), by the ``threads`` of the only or
    first consumer warpgroup, or of all. What is in a cache behind the last key may be NaN, which P = 0 does not hide.
    Swizzling moves nothing from one row of ``row_bytes`` to another, so that rows are zeroed as they lie."""
    rows, columns, num_stages = (cute.size(values, mode=[mode]) for mode in range(3))
    words_of_row, words_of_stage = row_bytes // 4, rows * columns * values.element_type.width // 32
    words = cute.make_tensor(
        cute.recast_ptr(values.iterator, cute.make_swizzle(0, 4, 3), Int32),
        cute.make_layout(
            (words_of_row, rows, words_of_stage // (words_of_row * rows), num_stages),
            stride=(1, words_of_row, words_of_row * rows, words_of_stage),
        ),
    )
    for row in cutlass.range(first + thread // words_of_row, rows, threads // words_of_row, unroll=1):
        for stage in stages:
            for part in cutlass.range_constexpr(cute.size(words, mode=[2])):
                words[thread % words_of_row, row, part, stage] = Int32(0)
    cute.arch.fence_view_async_shared()
    sync_consumers(threads)


@cute.jit
def sync_consumers(threads: cutlass.Constexpr[int] = WARPGROUP_THREADS):
    """Barrier among the consumers' threads."""
    cute.arch.barrier(barrier_id=1, number_of_threads=threads)


@dataclass(frozen=True)
class RawKeys(LoopInvariant):
    """K or V as it comes: the TMA atom of a box, the cache as TMA sees it, (page_size, head_dim, kv_heads, pages), the
    stages that TMA fills, (tile_n, head_dim, stages), in boxes of ``box_columns`` columns, and their pipeline.
    ``scales`` is empty, or has the ``RowScales`` of their keys; ``ahead`` is empty, or has the pipeline, of one stage,
    that says when the block has come that was asked for before it was known to be the first one."""

    atom: cute.CopyAtom
    cache: cute.Tensor
    smem: cute.Tensor
    pipe: PipelineTmaAsync
    box_columns: int
    scales: tuple = ()
    ahead: tuple[PipelineTmaAsync, ...] = ()

    @cute.jit
    def wait_ahead(self):
        """For the block that was asked for ahead, whether it is the first one or not."""
        for ahead in self.ahead:
            ahead.consumer_wait(make_pipeline_state(PipelineUserType.Consumer, 1))


@dataclass(frozen=True)
class Work(LoopInvariant):
    """What there is to do, and the part of this CTA. No tile has more than ``max_splits`` parts, unless it is None.

    ``batch`` has the tiles of this CTA's row, and ``heads`` says of which K/V heads, or which of a head they are.
    ``cta`` is the number of its piece.
    ``own`` is empty, or has the sequence and number of the tile of a cluster: its blocks alone are the row that is cut
    then, for the CTAs of the cluster, and ``cta`` is the number of this one among them. ``scanned`` is empty then, or
    has what the lanes know of all sequences.
    """

    batch: CacheBatch
    pieces: Pieces
    max_splits: Int32 | None
    cta: Int32
    heads: HeadsTogether
    own: tuple[Int32, ...] = ()
    scanned: tuple[Scanned, ...] = ()

    def parts(self, start: Int32, blocks: Any) -> TileParts:
        """Of the tile whose blocks begin at ``start``."""
        return TileParts.of(self.pieces, start, blocks, self.max_splits)

    def first_tile(self, lane: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """The sequence and number of the tile in which this CTA begins, the first block of that tile, and the block
        behind the last of this CTA. For the lanes of a warp."""
        if self.own:
            return *self.own, Int32(0), self.pieces.begin(self.cta + 1)
        return *self.tile_of(self.pieces.begin(self.cta), lane), self.pieces.begin(self.cta + 1)

    def begin(self, found: tuple, lane: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """``first_tile``, which ``found`` has unless it is empty."""
        return found or self.first_tile(lane)

    def tile_of(self, unit: Int32, lane: Int32) -> tuple[Int32, Int32, Int32]:
        """The sequence and number of the tile that has a block, and the first block of that tile."""
        return self.batch.locate(unit, self.scanned[0], lane)


class Outputs(NamedTuple):
    """O and LSE, what joins them, and the memory for partial results. ``sinks`` is empty, or has float32 (heads,);
    ``factors`` is empty, or has that of V, float32 (batch, kv_heads)."""

    o: cute.Tensor
    lse: cute.Tensor
    sinks: tuple
    factors: tuple
    parts: cute.Tensor


@dataclass(frozen=True)
class Unsettled(LoopInvariant):
    """A tensor of int32 that what is before this kernel may still write: what is read of it may be old, and is no more
    than a guess. Nothing that is read so is kept near an SM, where it would be found again."""

    tensor: cute.Tensor

    @property
    def shape(self) -> Any:
        return self.tensor.shape

    def __getitem__(self, place: Any) -> Int32:
        address = (self.tensor.iterator + cute.crd2idx(place, self.tensor.layout)).toint()
        return cute.arch.inline_ptx(
            "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
        )


class CacheLists(NamedTuple):
    """What a launch is given of its sequences: as ``CacheBatch`` and ``Work`` have it, and the sides of a window.
    ``heads_of_row`` are the K/V heads that a CTA visits one after another."""

    lengths: cute.Tensor
    starts: tuple
    offsets: tuple
    capacity: Int32
    kv_heads: Int32
    heads_of_row: Int32
    max_splits: tuple
    sides: tuple

    @staticmethod
    def of(
        config: DecodeConfig, mK: cute.Tensor, given: tuple, sides: tuple, together: Any = 1
    ) -> "CacheLists":
        """Out of what a kernel is given, None for what its config has no use for: lengths, table, leftpad, cu_seqlens_q
        and max_splits; the sides of a window and the chunk. ``together`` K/V heads are visited at the same time."""
        lengths, table, leftpad, cu_seqlens_q, max_splits = given
        return CacheLists(
            lengths,
            (leftpad,) if config.leftpad else (),
            (cu_seqlens_q,) if config.layout == VARLEN else (),
            mK.shape[1] * table.shape[1] if config.paged else mK.shape[1],
            mK.shape[2],
            mK.shape[2] // together,
            (max_splits,) if config.limits_splits else (),
            sides_of(config, *sides),
        )

    def unsettled(self) -> "CacheLists":
        """For who looks before what is before this kernel has ended."""
        starts, offsets = (tuple(map(Unsettled, tensors)) for tensors in (self.starts, self.offsets))
        return self._replace(lengths=Unsettled(self.lengths), starts=starts, offsets=offsets)

    def batch(self, config: DecodeConfig, mQ: cute.Tensor, kind: type[CacheBatch] = CacheBatch) -> Any:
        """The sequences, as a ``kind`` of batch."""
        queries, query_heads = mQ.shape[0 if config.layout == VARLEN else 1], mQ.shape[len(mQ.shape) - 2]
        return kind(
            config,
            window_of(config.causal, self.sides),
            self.lengths,
            self.starts,
            self.offsets,
            queries,
            self.capacity,
            self.heads_of_row,
            # So that what is multiplied with it stays out of the threads' registers.
            cute.arch.make_warp_uniform(divide(query_heads, self.kv_heads)),
        )

    @property
    def most_parts(self) -> Any:
        """Of a tile; None if there is no limit."""
        return self.max_splits[0] if self.max_splits else None

    def work(
        self,
        config: DecodeConfig,
        mQ: cute.Tensor,
        place: tuple[Int32, Int32],
        heads: HeadsTogether,
        lane: Int32,
        cluster: int = 1,
    ) -> Work:
        """The work of one CTA. ``place`` are its piece of a row and the pieces of that; with a cluster of several CTAs,
        which have a tile together, its number and that of all CTAs."""
        batch = self.batch(config, mQ)
        max_splits = self.most_parts
        if cluster == 1:
            piece, pieces = place
            scanned = batch.scan_all(lane)
            shared = Pieces(scanned.groups.totals[0], pieces)
            return Work(batch, shared, max_splits, piece, heads, scanned=(scanned,))
        cta = place[0]
        own = batch.tile_at(divide(cta, cluster))
        blocks = batch.blocks(batch.seqlens(own[0])).count
        return Work(batch, Pieces(blocks, cluster), max_splits, cta % cluster, heads, own)
