"""Which keys a query may see, by their distance: the causal mask and sliding windows as one thing."""

from dataclasses import dataclass
from typing import Any

from cute_kernels.invariant import LoopInvariant

MAX_SEQLEN_OF_WINDOW = 2**29
"""Of Q and of K. So sums of two lengths and a side, of which ``NO_LIMIT`` is the largest, fit 32 bits."""

NO_LIMIT = 2**29
"""A side that hides nothing, of a window whose sides are known only when the kernel runs."""


@dataclass(frozen=True)
class Window(LoopInvariant):
    """Query i is level with key i + seqlen_k - seqlen_q, and sees ``left`` keys before that and ``right`` behind it.

    A side is an int when the kernel is compiled, or a number that it is given, or None for no limit.
    """

    left: Any = None
    right: Any = None

    @property
    def has_left(self) -> bool:
        return self.left is not None

    @property
    def has_right(self) -> bool:
        return self.right is not None

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a key behind it, as far as is known when the kernel is compiled."""
        return isinstance(self.right, int) and self.right == 0


EVERYTHING = Window()
CAUSAL = Window(right=0)


def window_of(causal: bool, sides: tuple = ()) -> Window:
    """Of a kernel with a causal mask or without one, and with ``sides``, (left, right), if it is given them."""
    if not sides:
        return CAUSAL if causal else EVERYTHING
    return Window(sides[0], 0 if causal else sides[1])
