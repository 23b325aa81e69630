"""Which head of K and V has a part of the query heads that share it, where these are divided among CTAs."""

from typing import Any

from cutlass import Int32, Int64


def reciprocal_of(parts: Any) -> Any:
    """What ``head_of_part`` takes of the number of parts of each head: as much of 2**31, rounded up."""
    return (2**31 - 2) // parts + 1


def head_of_part(part: Any, reciprocal: Any) -> Any:
    """The number of a part by that of the parts of a head, rounded down, where both multiply to less than 2**30. A
    division would take more registers than some producer warps have. Half a part is added, so that no rounding counts.
    """
    if isinstance(part, int):
        return (2 * part + 1) * reciprocal >> 32
    return Int32((Int64(2 * part + 1) * Int64(reciprocal)) >> 32)
