"""What kernels read of a plan of tiles whose keys are in parts (``parts_kernel.py``). A longer sequence has more parts,
so that the longest does not decide how long a call takes.

An entry of such a plan is a tile of a part, with the first tile of that part. The number of its sequence says also
which part it is, and of how many.
"""

from dataclasses import replace
from typing import Any

from cute_kernels.plan.config import PART_BITS, SEQUENCE_BITS
from cute_kernels.plan.packed import PackedSeqlens, PackedTileOrder
from cute_kernels.seqlen import SeqlenInfo


def number_of(sequence: Any, part: Any, parts: Any) -> Any:
    """That of a part of a sequence; ``parts`` are those of the sequence."""
    return sequence | (part << SEQUENCE_BITS) | ((parts - 1) << (SEQUENCE_BITS + PART_BITS))


def sequence_of_number(number: Any) -> Any:
    return number & ((1 << SEQUENCE_BITS) - 1)


def part_of_number(number: Any) -> Any:
    return (number >> SEQUENCE_BITS) & ((1 << PART_BITS) - 1)


def parts_of_number(number: Any) -> Any:
    """Those of its sequence."""
    return (number >> (SEQUENCE_BITS + PART_BITS)) + 1


class PartTileOrder(PackedTileOrder):
    """``PackedTileOrder`` of tiles in parts. In place of a sequence it has the number of a part."""

    def sequence_of(self, number: Any) -> Any:
        return sequence_of_number(number)


class PartPackedSeqlens(PackedSeqlens):
    """``PackedSeqlens`` of tiles in parts, whose ``batch`` is the number of a part."""

    def of_tile(self, m_block: Any, batch: Any) -> SeqlenInfo:
        return replace(self.of(sequence_of_number(batch)), batch=batch)
