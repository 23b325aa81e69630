"""Which rows of a shard of Q meet which rows of a shard of K, as rectangles that one call of attention can do.

A mask is known by positions in the whole sequence: position p sees those from p - left to p + right of its document.
The kernels know it by sequences whose last query stands at the last key. Between two runs of positions the first
becomes the second once rows that see nothing, and keys that nobody sees, are cut off (:func:`meet`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hopper_attention.distributed.layout import spans_of
from hopper_attention.masks import UNLIMITED, MaskSpec
from hopper_attention.reference.tiles import Span

REMEMBERED = 4096


@dataclass(frozen=True)
class Problem:
    """The whole sequence, and how it is shared out.

    Attributes:
        world: ranks.
        seqlen_q, seqlen_k: of the whole; the last query stands at the last key.
        layout: of Q and of K and V.
        left, right: sides of the window, UNLIMITED for none; a causal mask is right side 0.
        documents: where each begins and the last one ends, of packed documents, or empty for one sequence. Positions
            behind the end are of none.
    """

    world: int
    seqlen_q: int
    seqlen_k: int
    layout: str
    left: int = UNLIMITED
    right: int = UNLIMITED
    documents: tuple[int, ...] = ()

    @property
    def sees_all(self) -> bool:
        """Whether some query of every rank, or every rank but for a causal mask, sees keys of every rank."""
        return self.left == UNLIMITED and not self.documents


class Piece(NamedTuple):
    """Local rows of Q and of K, and the sides of the window between them, the last row at the last key."""

    rows: Span
    keys: Span
    left: int
    right: int

    @property
    def mask(self) -> MaskSpec:
        lengths = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        return MaskSpec.canonical(False, self.left, self.right, *lengths)

    @property
    def is_full(self) -> bool:
        mask = self.mask
        return not mask.causal and not mask.has_window

    @property
    def is_causal(self) -> bool:
        mask = self.mask
        return mask.causal and not mask.has_window


@dataclass(frozen=True)
class Group:
    """Pieces that one call does: a single one, or documents of packed rows under the same sides.

    ``rows`` and ``keys`` reach from the first to the last, and may hold some that are of no piece.
    """

    pieces: tuple[Piece, ...]

    @cached_property
    def rows(self) -> Span:
        return hull([piece.rows for piece in self.pieces])

    @cached_property
    def keys(self) -> Span:
        return hull([piece.keys for piece in self.pieces])


def hull(spans: list[Span]) -> Span:
    return Span(min(span.start for span in spans), max(span.stop for span in spans))


def length(span: Span) -> int:
    return span.stop - span.start


def meet(q: Span, k: Span, left: int, right: int) -> tuple[Span, Span, int, int] | None:
    """Of positions q and k, those that see and are seen, and the sides of the window between these.

    The sides come out as the kernels take them, 0 or more: of what is left, the last query sees a key at or before the
    last, and the last key is seen by a query at or after it less ``left``.
    """
    first = k.start if left == UNLIMITED else max(k.start, q.start - left)
    stop = k.stop if right == UNLIMITED else min(k.stop, q.stop + right)
    if first >= stop or q.start >= q.stop:
        return None
    row = q.start if right == UNLIMITED else max(q.start, first - right)
    row_stop = q.stop if left == UNLIMITED else min(q.stop, stop + left)
    ahead = row_stop - stop
    new_left = UNLIMITED if left == UNLIMITED else left - ahead
    new_right = UNLIMITED if right == UNLIMITED else right + ahead
    return Span(row, row_stop), Span(first, stop), new_left, new_right


def _documents(problem: Problem, q: Span, k: Span) -> Iterator[Span]:
    """Those with positions in both."""
    if not problem.documents:
        yield Span(min(q.start, k.start), max(q.stop, k.stop))
        return
    starts = problem.documents
    number = max(0, bisect_right(starts, max(q.start, k.start)) - 1)
    while number < len(starts) - 1 and starts[number] < min(q.stop, k.stop):
        yield Span(starts[number], starts[number + 1])
        number += 1


def clip(span: Span, bounds: Span) -> Span:
    """What of a span lies inside of another; empty or of negative length if nothing."""
    return Span(max(span.start, bounds.start), min(span.stop, bounds.stop))


def _meetings(problem: Problem, q_spans: tuple[Span, ...], k_spans: tuple[Span, ...]) -> Iterator[Piece]:
    """Pieces in local rows, ordered by those of Q, then of K."""
    offset = problem.seqlen_k - problem.seqlen_q
    first_row = 0
    for q_span in q_spans:
        at = Span(q_span.start + offset, q_span.stop + offset)
        first_key = 0
        for k_span in k_spans:
            for document in _documents(problem, at, k_span):
                met = meet(clip(at, document), clip(k_span, document), problem.left, problem.right)
                if met is not None:
                    rows, keys, left, right = met
                    to_row, to_key = first_row - at.start, first_key - k_span.start
                    yield _plain(
                        Piece(
                            Span(rows.start + to_row, rows.stop + to_row),
                            Span(keys.start + to_key, keys.stop + to_key),
                            left,
                            right,
                        )
                    )
            first_key += length(k_span)
        first_row += length(q_span)


def _plain(piece: Piece) -> Piece:
    """With the sides of a causal mask or of none where the window comes to that, so that equal ones compare equal."""
    if piece.is_full:
        return piece._replace(left=UNLIMITED, right=UNLIMITED)
    return piece._replace(left=UNLIMITED, right=0) if piece.is_causal else piece


def _joined_keys(a: Piece, b: Piece) -> Piece | None:
    """One piece of the same rows that does what both do, if there is one."""
    if a.rows == b.rows and a.keys.stop == b.keys.start and a.is_full and (b.is_full or b.is_causal):
        return _plain(Piece(a.rows, Span(a.keys.start, b.keys.stop), b.left, b.right))
    return None


def _joined(a: Piece, b: Piece) -> Piece | None:
    """The same of the same rows, or of the same keys, or along a causal mask."""
    if a.rows.stop != b.rows.start:
        return _joined_keys(a, b)
    rows = Span(a.rows.start, b.rows.stop)
    if a.keys == b.keys and a.is_full and b.is_full:
        return Piece(rows, a.keys, UNLIMITED, UNLIMITED)
    steps_on = b.keys.stop - a.keys.stop == length(b.rows)
    if a.keys.start == b.keys.start and steps_on and a.is_causal and b.is_causal:
        return Piece(rows, b.keys, UNLIMITED, 0)
    return None


Join = Callable[[Piece, Piece], Piece | None]


def _coalesced(pieces: list[Piece], *joins: Join) -> list[Piece]:
    """Neighbours joined in each of these ways as long as any can be, one way after the other."""
    for join in joins:
        before = -1
        while len(pieces) != before:
            before = len(pieces)
            pieces = _joined_once(pieces, join)
    return pieces


def _joined_once(pieces: list[Piece], join: Join) -> list[Piece]:
    done: list[Piece] = []
    for piece in pieces:
        joined = join(done[-1], piece) if done else None
        if joined is None:
            done.append(piece)
        else:
            done[-1] = joined
    return done


def _grouped(pieces: list[Piece], is_packed: bool) -> tuple[Group, ...]:
    """Packed pieces of the same sides, one behind the other in Q and in K, in one group."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        for group in groups if is_packed else ():
            last = group[-1]
            is_behind = last.rows.stop <= piece.rows.start and last.keys.stop <= piece.keys.start
            if is_behind and (last.left, last.right) == (piece.left, piece.right):
                group.append(piece)
                break
        else:
            groups.append([piece])
    return tuple(Group(tuple(group)) for group in groups)


@lru_cache(maxsize=REMEMBERED)
def groups_between(problem: Problem, q_rank: int, k_rank: int) -> tuple[Group, ...]:
    """What the rows of Q of one rank have to do with the rows of K and V of another; empty if nothing."""
    return groups_with(problem, q_rank, spans_of(k_rank, problem.world, problem.seqlen_k, problem.layout))


@lru_cache(maxsize=REMEMBERED)
def groups_with_all(problem: Problem, q_rank: int) -> tuple[Group, ...]:
    """The same of K and V of the whole sequence, in the order of positions."""
    return groups_with(problem, q_rank, (Span(0, problem.seqlen_k),))


def groups_with(problem: Problem, q_rank: int, k_spans: tuple[Span, ...]) -> tuple[Group, ...]:
    """The same of keys at some positions, which lie one behind the other. Few groups have the same rows."""
    pieces = _coalesced(_pieces(problem, q_rank, k_spans), _joined_keys, _joined)
    return _grouped(pieces, bool(problem.documents))


def groups_by_key(problem: Problem, q_rank: int, k_spans: tuple[Span, ...]) -> tuple[Group, ...]:
    """``groups_with`` in which few groups have the same keys."""
    pieces = sorted(_pieces(problem, q_rank, k_spans), key=lambda piece: (piece.keys, piece.rows))
    return _grouped(_coalesced(pieces, _joined), bool(problem.documents))


def _pieces(problem: Problem, q_rank: int, k_spans: tuple[Span, ...]) -> list[Piece]:
    q_spans = spans_of(q_rank, problem.world, problem.seqlen_q, problem.layout)
    return list(_meetings(problem, q_spans, k_spans))


def rows_of_none(problem: Problem, rank: int) -> list[Span]:
    """Local rows of Q behind the last document."""
    if not problem.documents:
        return []
    found, first_row = [], 0
    for span in spans_of(rank, problem.world, problem.seqlen_q, problem.layout):
        behind = clip(span, Span(problem.documents[-1], problem.seqlen_q))
        if behind.start < behind.stop:
            found.append(Span(behind.start - span.start + first_row, behind.stop - span.start + first_row))
        first_row += length(span)
    return found


def count_scores(groups: tuple[Group, ...]) -> int:
    """Pairs of a query and a key that it sees, to be computed."""
    return sum(_scores_of(piece) for group in groups for piece in group.pieces)


def _scores_of(piece: Piece) -> int:
    rows, keys = length(piece.rows), length(piece.keys)
    if piece.is_full:
        return rows * keys
    total = 0
    # Row i sees keys from low to high; both grow by 1 a row until they meet an end.
    ahead = keys - rows
    for side, sign in ((piece.right, 1), (piece.left, -1)):
        if side == UNLIMITED:
            total += rows * keys if sign == 1 else 0
        elif sign == 1:
            total += _sum_clamped(ahead + side + 1, rows, keys)
        else:
            total -= _sum_clamped(ahead - side, rows, keys)
    return total


def _sum_clamped(first: int, count: int, top: int) -> int:
    """Sum over i < count of first + i, clamped to 0..top."""
    low = min(max(0, -first), count)
    high = min(max(low, top - first), count)
    ramp = high - low
    return ramp * first + (low + high - 1) * ramp // 2 + (count - high) * top
