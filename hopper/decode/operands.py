"""What the roles of the decode kernel share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineTmaAsync

from cute_kernels.invariant import LoopInvariant
from hopper.decode.batch import CacheBatch
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
