"""What stands in a kernel whose inputs have no scales where others have something to do with them."""

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.invariant import LoopInvariant
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.softmax import normalize_rows


class NoScales(LoopInvariant):
    """What the producer publishes where inputs have no scales."""

    def begin(self):
        """Called by the producer warp before the first block of a tile."""

    def publish(self, head_kv: Int32, seqlens: SeqlenInfo, n_block: Int32, slot: Int32):
        """Called by the producer warp before it acquires the stage of K of block ``n_block``."""


class NoCorrection(LoopInvariant):
    """What is added to O where nothing is."""

    def begin(self, head_kv: Int32, batch: Int32):
        """Called before the first block of a tile."""

    def normalize(self, acc: cute.Tensor, inverse_sum: cute.Tensor):
        """Called at the end of the tile: multiply the rows of O by these factors, and add to them."""
        normalize_rows(acc, inverse_sum)
