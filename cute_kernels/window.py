"""Which keys a query may see: the causal mask, sliding windows and chunks as one thing."""

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

    A side is an int when the kernel is compiled, or a number that it is given, or None for no limit. With a ``chunk``
    of c keys, a query that is level with key p sees none outside of its own chunk, which begins at p // c * c; before
    key 0 there are chunks too, which have no key. A window with a chunk has both sides.
    """

    left: Any = None
    right: Any = None
    chunk: Any = None

    @property
    def has_left(self) -> bool:
        return self.left is not None

    @property
    def has_right(self) -> bool:
        return self.right is not None

    @property
    def has_chunk(self) -> bool:
        return self.chunk is not None

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a key behind it, as far as is known when the kernel is compiled."""
        return isinstance(self.right, int) and self.right == 0


EVERYTHING = Window()
CAUSAL = Window(right=0)


def window_of(causal: bool, sides: tuple = ()) -> Window:
    """Of a kernel with a causal mask or without one, and with ``sides``, (left, right) or (left, right, chunk), if it
    is given them."""
    if not sides:
        return CAUSAL if causal else EVERYTHING
    left, right, *chunk = sides
    return Window(left, 0 if causal else right, *chunk)


def sides_of(config: Any, left: Any, right: Any, chunk: Any) -> tuple:
    """Of these, those that a kernel with the fields ``window`` and ``chunk`` is given, as ``window_of`` takes them."""
    if not config.window:
        return ()
    return (left, right, chunk) if config.chunk else (left, right)
