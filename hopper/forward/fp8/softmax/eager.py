"""The softmax of FP8 scores for few warps: nothing waits that could be known earlier."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.fast_math import pin
from cute_kernels.seqlen import SeqlenInfo
from hopper.forward.fp8.row_maximum import maximum_over_lanes, thread_maximum, thread_maximum_of_any
from hopper.forward.fp8.softmax.exact import ExactSoftmax


class EagerSoftmax(ExactSoftmax):
    """``ExactSoftmax`` with the same results, by fewer steps that depend on each other.

    - Whether a warp needs the maximum of scores that may all be negative is known before they are: only where a running
      maximum is negative. Elsewhere ``thread_maximum`` will do, for what it takes of such a row is negative too.
    - The maximum of a thread's second row is final before the wait for P V. So the exponentials of that row can start
      behind it at once, while the first row is converted, and MUFU does not rest.

    With two warpgroups, of which each scheduler has a warp, this mostly gains; with three, where there is another warp
    to issue from, it loses (docs/kernels/fp8.md).
    """

    def __init__(self, scale_log2: Float32, tile_scales: tuple, slots: cute.Tensor, polynomial_pairs: int):
        super().__init__(scale_log2, tile_scales, slots, polynomial_pairs)
        self.has_negative = cute.make_rmem_tensor(1, Int32)

    @cute.jit
    def enter_tile(self, rows: tuple, head: Int32, seqlens: SeqlenInfo):
        ExactSoftmax.enter_tile(self, rows, head, seqlens)
        self.shift.fill(
            0.0
        )  # ``enter_block`` reads it, though the first block of a tile does not use what comes of it

    @cute.jit
    def enter_block(self, slot: Int32):
        ExactSoftmax.enter_block(self, slot)
        lowest = cute.arch.fmin(self.shift[0], self.shift[1])
        self.has_negative[0] = Int32(cute.arch.vote_any_sync(not lowest >= Float32(0.0)))

    @cute.jit
    def take_scores(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        if const_expr(is_first):
            self._update_max(acc_S, 0, thread_maximum_of_any(acc_S, 0), is_first)
            self.second_maximum[0] = thread_maximum_of_any(acc_S, 1)
        else:
            self._take_more_scores(acc_S)

    @cute.jit
    def _take_more_scores(self, acc_S: cute.Tensor):
        first, of_any = thread_maximum(acc_S, 0), Int32(0)
        if self.has_negative[0] != 0:
            first, of_any = thread_maximum_of_any(acc_S, 0), thread_maximum_of_any(acc_S, 1)
        self._update_max(acc_S, 0, first, is_first=False)
        second = thread_maximum(acc_S, 1)
        self.second_maximum[0] = of_any if self.has_negative[0] != 0 else second

    def _row_maximum(self, acc_S: cute.Tensor, r: cutlass.Constexpr[int], of_thread: Int32) -> Float32:
        return maximum_over_lanes(of_thread)

    @cute.jit
    def _leave_first_row(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        self._update_max(acc_S, 1, self.second_maximum[0], is_first)
        self.shift[1] = pin(self.shift[1])

    def _enter_second_row(self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """Nothing is left to do."""
