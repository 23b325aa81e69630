"""Between Q K^T and the softmax: the one place in which a kernel changes scores."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.invariant import LoopInvariant
from cute_kernels.mask import TileMask


@dataclass(frozen=True)
class ScoreTile(LoopInvariant):
    """What is done to the scores of a thread's rows of one query tile."""

    mask: TileMask

    @cute.jit
    def finish(self, acc_S: cute.Tensor, n_block: Int32, is_masked: cutlass.Constexpr[bool]):
        """Scores of key block ``n_block`` as the softmax takes them; without ``is_masked`` every row sees every key."""
        if const_expr(is_masked):
            self.mask.apply(acc_S, n_block)
