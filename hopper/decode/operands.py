"""What the roles of the decode kernel share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineTmaAsync

from cute_kernels.integers import divide
from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import VARLEN
from cute_kernels.window import window_of
from hopper.decode.batch import CacheBatch
from hopper.decode.config import DecodeConfig
from hopper.decode.schedule import Pieces, TileParts


class Keys(NamedTuple):
    """K or V: the TMA atom of a box, the cache as TMA sees it, (page_size, head_dim, kv_heads, pages), the stages in
    shared memory, row-major (tile_n, head_dim, stages), and the pipeline that fills them."""

    atom: cute.CopyAtom
    cache: cute.Tensor
    smem: cute.Tensor
    pipe: PipelineTmaAsync


@dataclass(frozen=True)
class Work(LoopInvariant):
    """What there is to do, and the part of this CTA. No tile is in more than ``max_splits`` parts."""

    batch: CacheBatch
    pieces: Pieces
    max_splits: Int32
    cta: Int32

    def parts(self, start: Int32, blocks: Any) -> TileParts:
        """Of the tile whose blocks begin at ``start``."""
        return TileParts.of(self.pieces, start, blocks, self.max_splits)


class Outputs(NamedTuple):
    """O and LSE, what joins them, and the memory for partial results. ``sinks`` is empty, or has float32 (heads,)."""

    o: cute.Tensor
    lse: cute.Tensor
    sinks: tuple
    parts: cute.Tensor


class CacheLists(NamedTuple):
    """What a launch is given of its sequences: as ``CacheBatch`` and ``Work`` have it, and the sides of a window."""

    lengths: cute.Tensor
    starts: tuple
    offsets: tuple
    capacity: Int32
    kv_heads: Int32
    max_splits: Int32
    sides: tuple

    def work(self, config: DecodeConfig, mQ: cute.Tensor, cta: Int32, ctas: Int32, lane: Int32) -> Work:
        """The work of one CTA of so many."""
        queries, heads = mQ.shape[0 if config.layout == VARLEN else 1], mQ.shape[len(mQ.shape) - 2]
        batch = CacheBatch(
            config,
            window_of(config.causal, self.sides),
            self.lengths,
            self.starts,
            self.offsets,
            queries,
            self.capacity,
            self.kv_heads,
            divide(heads, self.kv_heads),
        )
        return Work(batch, Pieces(batch.all_units(lane), ctas), self.max_splits, cta)
