"""Which keys a query sees: a causal mask, a sliding window, or both, in one form for every backend."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.window import MAX_SEQLEN_OF_WINDOW, NO_LIMIT

UNLIMITED = -1
"""A side of a window that hides nothing."""

MAX_WINDOW_LENGTH = MAX_SEQLEN_OF_WINDOW
"""Positions of a sequence under a window: sums of a few positions and sides fit the kernels' 32-bit integers."""


@dataclass(frozen=True)
class MaskSpec:
    """Query i sees the keys from i + seqlen_k - seqlen_q - window_left to i + seqlen_k - seqlen_q + window_right.

    The last query stands at the last key, whatever the lengths. ``canonical`` gives the one form that backends take.

    Attributes:
        causal: the right side is 0.
        window_left: keys before a query's own that it sees; UNLIMITED: all.
        window_right: keys after it, 1 or more; UNLIMITED: all, or with ``causal`` none.
    """

    causal: bool
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED

    def __post_init__(self) -> None:
        if self.window_left < UNLIMITED or self.window_right < UNLIMITED:
            raise ValueError(f"the window is {self.window}, allowed: a pair (left, right) of ints from -1")
        if self.window_right == 0 or (self.causal and self.window_right != UNLIMITED):
            raise ValueError(
                f"the right side of the window is {self.window_right} with causal={self.causal}, allowed: -1 with "
                "causal=True, which makes it 0, else -1 or more than 0"
            )

    @classmethod
    def canonical(
        cls, causal: bool, window_left: int, window_right: int, seqlen_q: int, seqlen_k: int
    ) -> MaskSpec:
        """The mask of these sides, with those that hide nothing UNLIMITED; for sequences of at most these lengths.

        The last query is the one whose left side hides the most, the first the one whose right side does. With
        ``causal`` the right side is 0, whatever was given for it.

        Args:
            window_left, window_right: from -1, which is UNLIMITED.
        """
        if window_left >= seqlen_k - 1:
            window_left = UNLIMITED
        if causal or window_right >= seqlen_q - 1:
            window_right = UNLIMITED
        if window_right == 0:
            causal, window_right = True, UNLIMITED
        return cls(causal, window_left, window_right)

    @property
    def window(self) -> tuple[int, int]:
        """(window_left, window_right)."""
        return self.window_left, self.window_right

    def most_keys(self, seqlen_k: int) -> int:
        """Of so many keys, those that a query sees at most."""
        right = 0 if self.causal else self.window_right
        if UNLIMITED in (self.window_left, right):
            return seqlen_k
        return min(seqlen_k, self.window_left + 1 + right)

    @property
    def has_window(self) -> bool:
        """Whether a side is limited beyond what ``causal`` says."""
        return self.window_left != UNLIMITED or self.window_right != UNLIMITED


def kernel_sides(*window: int) -> tuple[int, ...]:
    """The sides of a window, if there is one, as kernels take them, which know no UNLIMITED."""
    return tuple(NO_LIMIT if side == UNLIMITED else side for side in window)


def check_window_lengths(mask: MaskSpec, seqlen_q: int, seqlen_k: int) -> None:
    """Raise NotImplementedError for sequences too long for a window."""
    if mask.has_window and not (seqlen_q <= MAX_WINDOW_LENGTH and seqlen_k <= MAX_WINDOW_LENGTH):
        raise NotImplementedError(
            f"window_size is given for {seqlen_q} queries and {seqlen_k} keys: windows are implemented up to "
            f"{MAX_WINDOW_LENGTH} of each; use window_size=(-1, -1)"
        )
