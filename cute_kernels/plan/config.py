"""The plan of a launch on packed sequences, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.early_start import starts_early_on
from cute_kernels.problem import MAX_TILES

PLAN_HEADER, RECORD, ENTRY = 4, 4, 2
"""Words of a plan (``packed.py``): of its head, of a sequence, of a tile."""

WARPS_PER_CTA = 8

SEQUENCE_BITS, PART_BITS = 17, 7
"""Of the number of a sequence whose keys are in parts (``parts.py``): those that are the sequence's, those of the part.
Those above are one less than its number of parts."""

MOST_PARTS = 2**PART_BITS - 1
MOST_SEQUENCES_IN_PARTS = 2**SEQUENCE_BITS - 1
"""Beside the last, of rows that belong to none."""


@dataclass(frozen=True)
class PlanConfig:
    """The kernel that makes plans, for any tiles; ``arch`` is what it is compiled for. With ``in_parts`` keys of tiles
    are in parts (``parts_kernel.py``)."""

    arch: str
    in_parts: bool = False

    @property
    def starts_early(self) -> bool:
        """Whether CTAs may start before the kernel in front of this one has ended, and let the next one start
        (programmatic dependent launch)."""
        return starts_early_on(self.arch)

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        return f"plan_{self.arch}{'_parts' if self.in_parts else ''}"


def plan_entries(total: int, batch: int, tile: int) -> int:
    """Tiles of one head at most, of ``total`` rows in ``batch`` sequences and one of those that belong to none."""
    return total // tile + batch + 1


def plan_words(total: int, batch: int, tile: int, parts: int = 1) -> int:
    """int32 of a plan for tiles of ``tile`` out of ``total`` rows, whose keys are in up to so many parts."""
    return PLAN_HEADER + RECORD * (batch + 1) + ENTRY * plan_entries(total, batch, tile) * parts


def check_packed_size(
    kernel: str, heads: int, batch: int, totals: tuple[int, int], tile: int, parts: int = 1
) -> None:
    """Raise NotImplementedError for packed rows or tiles that a kernel's 32-bit numbers cannot count.

    ``totals`` are rows of Q and of K, ``tile`` those of a tile of Q, whose keys are in up to so many ``parts``;
    ``kernel`` is its name in the message.
    """
    for name, total in zip(("total_q", "total_k"), totals, strict=True):
        if total > MAX_PACKED_ROWS:
            raise NotImplementedError(
                f"{name} is {total}, the {kernel} takes at most {MAX_PACKED_ROWS} packed rows: split the batch"
            )
    tiles = heads * plan_entries(totals[0], batch, tile) * parts
    if tiles > MAX_TILES:
        raise NotImplementedError(
            f"heads {heads} x total_q {totals[0]} in {batch} sequences may be {tiles} tiles of {tile} queries, the "
            f"{kernel} counts at most {MAX_TILES}: split the batch"
        )


MAX_PACKED_ROWS = 2**29
"""Of all sequences together: sums of two lengths and a side of a window fit 32 bits."""
