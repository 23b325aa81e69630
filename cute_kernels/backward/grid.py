"""In which order the CTAs of the steps around a backward kernel take their query tiles."""

import cutlass.cute as cute
from cutlass import Int32


def from_the_last(*sizes: Int32) -> tuple[Int32, ...]:
    """The place of a CTA in a grid of these sizes, from whose end on CTAs start.

    The kernel between the steps begins with the first heads and ends with the last ones. So the step before it leaves
    in L2 what is read first, and the one behind it finds there what was added last.
    """
    return tuple(size - 1 - block for size, block in zip(sizes, cute.arch.block_idx(), strict=True))
