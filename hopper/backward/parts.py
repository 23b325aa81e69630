"""Which query heads share a head of K and V, or are a part of those that do, where these are divided among CTAs."""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64

from cute_kernels.invariant import LoopInvariant
from hopper.backward.config import BackwardConfig, PairedBackwardConfig


@dataclass(frozen=True)
class QueryHeads(LoopInvariant):
    """The query heads of a head of K and V: ``shared`` of them."""

    shared: Any

    def head_of_keys(self, head_kv: Any) -> Any:
        """That of K and V which ``head_kv`` reads."""
        return head_kv

    def first(self, head_kv: Any) -> Any:
        """The first query head of ``head_kv``."""
        return head_kv * self.shared

    def count(self, head_kv: Any) -> Any:
        """How many there are."""
        return self.shared


@dataclass(frozen=True)
class Parts(QueryHeads):
    """The same divided into parts, as if each part had K and V of its own: ``head_kv`` counts parts. ``reciprocal`` is
    ``reciprocal_of`` how many a head of K and V has."""

    reciprocal: Any

    def head_of_keys(self, head_kv: Any) -> Any:
        return head_of_part(head_kv, self.reciprocal)


class EqualParts(Parts):
    """Of ``shared`` query heads each."""


class UnequalParts(Parts):
    """Of ``shared`` query heads in all, which the number of parts need not divide: of 7 in 3 parts the last one has 3.
    All parts there are, times ``shared``, times the parts of a head of K and V are below 2**30."""

    def first(self, head_kv: Any) -> Any:
        return head_of_part(head_kv * self.shared, self.reciprocal)

    def count(self, head_kv: Any) -> Any:
        return self.first(head_kv + 1) - self.first(head_kv)


def divided_heads(config: BackwardConfig, heads: tuple[Any, Any, Any]) -> tuple:
    """What a kernel that ``divides_heads`` is told of parts. ``heads`` are those of Q, of K and V, and the parts of all
    of these. Couriers have no registers for parts that are not equal."""
    of_queries, of_keys, parts = heads
    are_equal = config.ordered and not isinstance(config, PairedBackwardConfig)
    reciprocal = reciprocal_of(parts // of_keys)
    return (reciprocal,) if are_equal else (of_queries // of_keys, reciprocal)


def query_heads(shared: Any, divided: tuple) -> QueryHeads:
    """``divided`` is empty, or that of ``divided_heads``; ``shared`` are the query heads of each head of K and V, or of
    each of equal parts."""
    if not divided:
        return QueryHeads(shared)
    return EqualParts(shared, *divided) if len(divided) == 1 else UnequalParts(*divided)


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
