"""Which keys a query sees: a causal mask, a sliding window and a chunk, in one form for every backend."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.window import MAX_SEQLEN_OF_WINDOW, NO_LIMIT

UNLIMITED = -1
"""A side of a window that hides nothing."""

MAX_WINDOW_LENGTH = MAX_SEQLEN_OF_WINDOW
"""Positions of a sequence under a window: sums of a few positions and sides fit the kernels' 32-bit integers."""

Sides = tuple[int, int, int]
"""window_left, window_right and attention_chunk: those of a ``MaskSpec``."""

FULL_SIDES: Sides = (UNLIMITED, UNLIMITED, 0)
"""Those that hide nothing."""


@dataclass(frozen=True)
class MaskSpec:
    """Query i sees the keys from i + seqlen_k - seqlen_q - window_left to i + seqlen_k - seqlen_q + window_right.

    The last query stands at the last key, whatever the lengths. ``canonical`` gives the one form that backends take.

    With a chunk of c keys, query i sees none outside of the chunk of key p = i + seqlen_k - seqlen_q: the c keys from
    p // c * c on, rounded down. A query before all keys, of negative p, is in a chunk before all keys.

    Attributes:
        causal: the right side is 0.
        window_left: keys before a query's own that it sees; UNLIMITED: all.
        window_right: keys after it, 1 or more; UNLIMITED: all, or with ``causal`` none.
        attention_chunk: keys of a chunk, up to MAX_WINDOW_LENGTH; 0: there are no chunks.
    """

    causal: bool
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    attention_chunk: int = 0

    def __post_init__(self) -> None:
        if self.window_left < UNLIMITED or self.window_right < UNLIMITED:
            raise ValueError(f"the window is {self.window}, allowed: a pair (left, right) of ints from -1")
        if self.window_right == 0 or (self.causal and self.window_right != UNLIMITED):
            raise ValueError(
                f"the right side of the window is {self.window_right} with causal={self.causal}, allowed: -1 with "
                "causal=True, which makes it 0, else -1 or more than 0"
            )
        if not 0 <= self.attention_chunk <= MAX_WINDOW_LENGTH:
            raise ValueError(
                f"attention_chunk is {self.attention_chunk}, allowed: 0, which is none, to {MAX_WINDOW_LENGTH}"
            )

    @classmethod
    def canonical(
        cls,
        causal: bool,
        window_left: int,
        window_right: int,
        seqlen_q: int,
        seqlen_k: int,
        attention_chunk: int = 0,
    ) -> MaskSpec:
        """The mask of these sides, with those that hide nothing UNLIMITED; for sequences of at most these lengths.

        The last query is the one whose left side hides the most, the first the one whose right side does. With
        ``causal`` the right side is 0, whatever was given for it, and a chunk of all keys hides nothing more.

        Args:
            window_left, window_right: from -1, which is UNLIMITED.
            attention_chunk: from 0, which is none.
        """
        if window_left >= seqlen_k - 1:
            window_left = UNLIMITED
        if causal or window_right >= seqlen_q - 1:
            window_right = UNLIMITED
        if window_right == 0:
            causal, window_right = True, UNLIMITED
        if attention_chunk and causal and attention_chunk >= seqlen_k:
            attention_chunk = 0
        if attention_chunk:
            window_left = UNLIMITED if window_left >= attention_chunk - 1 else window_left
            window_right = UNLIMITED if window_right >= attention_chunk - 1 else window_right
        if attention_chunk > MAX_WINDOW_LENGTH:
            # No sequence under a chunk is longer.
            attention_chunk = MAX_WINDOW_LENGTH
        return cls(causal, window_left, window_right, attention_chunk)

    @property
    def window(self) -> tuple[int, int]:
        """(window_left, window_right)."""
        return self.window_left, self.window_right

    @property
    def sides(self) -> Sides:
        """All beside ``causal``, as operators and launchers take it."""
        return self.window_left, self.window_right, self.attention_chunk

    def most_keys(self, seqlen_k: int, seqlen_q: int = UNLIMITED) -> int:
        """Of so many keys, those that a query sees at most. Behind a query's own key lie no more than those of the
        queries behind it, where it is known of how many it is one."""
        right = 0 if self.causal else self.window_right
        if right == UNLIMITED and seqlen_q != UNLIMITED:
            right = max(seqlen_q, 1) - 1
        most = min(seqlen_k, self.attention_chunk or seqlen_k)
        if UNLIMITED in (self.window_left, right):
            return most
        return min(most, self.window_left + 1 + right)

    @property
    def has_window(self) -> bool:
        """Whether a side is limited beyond what ``causal`` says, or there are chunks: kernels take both as one."""
        return self.sides != FULL_SIDES


NO_MASK, CAUSAL_MASK = MaskSpec(False), MaskSpec(True)
"""The usual ones, made ahead."""


def kernel_sides(*sides: int) -> tuple[int | None, ...]:
    """The sides of a window, if there is one, as kernels take them, which know no UNLIMITED, and None for no chunk."""
    if not sides:
        return ()
    *window, chunk = sides
    return *(NO_LIMIT if side == UNLIMITED else side for side in window), chunk or None


def present(sides: tuple[int | None, ...]) -> tuple[int, ...]:
    """Those of ``kernel_sides`` that there are."""
    return tuple(side for side in sides if side is not None)


def check_window_lengths(mask: MaskSpec, seqlen_q: int, seqlen_k: int) -> None:
    """Raise NotImplementedError for sequences too long for a window or a chunk."""
    if not mask.has_window or (seqlen_q <= MAX_WINDOW_LENGTH and seqlen_k <= MAX_WINDOW_LENGTH):
        return
    given, instead = "window_size", "window_size=(-1, -1)"
    if mask.attention_chunk:
        given, instead = "attention_chunk", "attention_chunk=0"
    raise NotImplementedError(
        f"{given} is given for {seqlen_q} queries and {seqlen_k} keys: windows are implemented up to "
        f"{MAX_WINDOW_LENGTH} of each; use {instead}"
    )
