"""Gradients of one rank's rows of Q against keys that come group by group, and what of them stays in memory.

dQ is one float32 sum for the whole pass. Where a kernel of ours serves every group it adds to that sum itself, and the
rows of Q are prepared once. Elsewhere each group gives a dQ in 16 bits, which is added up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hopper_attention.distributed.attend import Call, Saved, differentiate_group
from hopper_attention.distributed.pieces import Group, length
from hopper_attention.launch.addition import MOST_PARTS, add_parts
from hopper_attention.launch.backward import find_plain
from hopper_attention.launch.gradient_launchers import BackwardLauncher
from hopper_attention.launch.gradient_sums import GradientSums, may_replace_keys, share_sums
from hopper_attention.reference.tiles import Span

Pair = tuple[Tensor, Tensor]
"""K and V, or their gradients."""

MOST_SPANS = 2
"""Spans of rows that a kernel has sums for, each on its own: in a causal zigzag all rows, and the second half."""


class Part(NamedTuple):
    """Entries of the batch and heads that are done at a time: all of one of the two."""

    batch: slice
    kv_heads: slice
    heads: slice

    def of_keys(self, pair: Pair) -> Pair:
        """Those of K and V."""
        if self is EVERYTHING:
            return pair
        k, v = (x[self.batch, :, self.kv_heads] for x in pair)
        return k, v

    def of_rows(self, q: Tensor) -> Tensor:
        """Those of Q."""
        return q if self is EVERYTHING else q[self.batch, :, self.heads]


def sums_for(x: Tensor) -> Tensor:
    """A float32 sum for the gradient of a tensor, contiguous."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


EVERYTHING = Part(slice(None), slice(None), slice(None))


def units_of_work(k: Tensor) -> int:
    """What work is shared out by: entries of the batch, of which each lies in one piece, or of one its key/value
    heads."""
    return k.shape[0] if k.shape[0] > 1 else k.shape[2]


def parts_of_work(q: Tensor, k: Tensor, shares: Sequence[int]) -> list[Part]:
    """One for each share, which is of so many units; all of them are shared out."""
    if len(shares) == 1:
        return [EVERYTHING]
    each = q.shape[2] // k.shape[2]
    units = [slice(stop - n, stop) for n, stop in zip(shares, accumulate(shares), strict=True)]
    if k.shape[0] > 1:
        return [EVERYTHING._replace(batch=x) for x in units]
    return [Part(slice(None), x, slice(x.start * each, x.stop * each)) for x in units]


def halves_of_work(q: Tensor, k: Tensor) -> list[Part]:
    """All of it in two parts, or in one where there is one unit."""
    units = units_of_work(k)
    return parts_of_work(q, k, [n for n in (units - units // 2, units // 2) if n])


def parts_of_heads(q: Tensor, k: Tensor, count: int) -> list[Part]:
    """All entries of the batch, and the heads in ``count`` equal parts; kv_heads is a multiple of it."""
    if count == 1:
        return [EVERYTHING]
    of_keys, of_rows = (x.shape[2] // count for x in (k, q))
    return [
        Part(
            slice(None),
            slice(i * of_keys, (i + 1) * of_keys),
            slice(i * of_rows, (i + 1) * of_rows),
        )
        for i in range(count)
    ]


Add = tuple[Group, Part]
"""Keys, and what of the batch and the heads is done with them."""


class RowGradients(ABC):
    """dQ of all local rows, while groups of keys come.

    Attributes:
        may_replace_keys: whether gradients of keys may be written to where the keys are.
        may_overlap: whether two calls of ``add`` may run at the same time on two streams, both after ``begin``, and
            ``close`` after both.
    """

    may_replace_keys: bool
    may_overlap: bool

    @abstractmethod
    def begin(self, groups: Sequence[Group], part: Part) -> None:
        """Before ``add`` for these, make what it adds to."""

    @abstractmethod
    def add(self, group: Group, part: Part, pair: Pair, into: Pair) -> None:
        """Add dQ of a group, and write the gradients of its keys.

        Args:
            part: what of the batch and the heads is done.
            pair: K and V of ``group.keys`` and of the part.
            into: of their shapes and dtype.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what nothing more will be added to."""

    @abstractmethod
    def finish(self) -> Tensor:
        """dQ in the dtype of Q."""


class AddedGradients(RowGradients):
    """By what serves each group alone."""

    may_replace_keys = True
    may_overlap = False

    def __init__(self, saved: Saved, call: Call) -> None:
        self.saved = saved
        self.call = call
        self.sums = sums_for(saved.q)

    def begin(self, groups: Sequence[Group], part: Part) -> None:
        """There is one sum."""

    def close(self) -> None:
        """It is of all groups."""

    def add(self, group: Group, part: Part, pair: Pair, into: Pair) -> None:
        saved = self.saved.of_part(part.batch, part.heads)
        dq, *of_keys = differentiate_group(saved, *pair, group, self.call)
        self.sums[part.batch, group.rows.start : group.rows.stop, part.heads].add_(dq)
        for target, x in zip(into, of_keys, strict=True):
            target.copy_(x)

    def finish(self) -> Tensor:
        dq = self.sums.to(self.saved.q.dtype)
        self.sums = self.sums.new_empty(0)
        return dq


class Place(NamedTuple):
    """What sums are of: rows, and the first entry of the batch and head."""

    rows: Span
    entry: int
    head: int

    @classmethod
    def of(cls, rows: Span, part: Part) -> Place:
        return cls(rows, part.batch.start or 0, part.heads.start or 0)


class KernelGradients(RowGradients):
    """By kernels that add to the same sums: one for all rows, and one for each span of some, which goes into the other
    or is rounded when the last of its groups is done."""

    def __init__(
        self, saved: Saved, call: Call, launchers: dict[Group, BackwardLauncher], adds: Sequence[Add]
    ) -> None:
        """``adds``: for what ``add`` will be called."""
        self.saved = saved
        self.scale = call.softmax_scale
        self.launchers = launchers
        self.may_replace_keys = all(map(may_replace_keys, launchers.values()))
        # Kernels that take turns do so among themselves.
        self.may_overlap = saved.q.is_cuda and not any(x.config.ordered for x in launchers.values())
        self.whole = Place(Span(0, saved.q.shape[1]), 0, 0)
        self.joined = {self.whole.rows} | _rows_of_unlike_parts(adds)
        self.uses = Counter(self._place_of(group, part) for group, part in adds)
        self.sums: dict[Place, tuple[Part, GradientSums]] = {}
        self.rounded: list[tuple[Span, Part, Tensor]] = []

    def _kept(self, group: Group, part: Part) -> Part:
        """What the sums are of to which a part of the work adds."""
        return EVERYTHING if group.rows in self.joined else part

    def _place_of(self, group: Group, part: Part) -> Place:
        return Place.of(group.rows, self._kept(group, part))

    def begin(self, groups: Sequence[Group], part: Part) -> None:
        for group in groups:
            self._sums_of(group, part)

    def _sums_of(self, group: Group, part: Part) -> GradientSums:
        place, kept = self._place_of(group, part), self._kept(group, part)
        if place not in self.sums:
            saved = self.saved if kept is EVERYTHING else self.saved.of_part(kept.batch, kept.heads)
            q, out, lse, dout, dlse = saved.of_rows(group.rows)
            self.sums[place] = kept, GradientSums(self.launchers[group], q, out, lse, dout, dlse)
        return self.sums[place][1]

    def add(self, group: Group, part: Part, pair: Pair, into: Pair) -> None:
        sums, place = self._sums_of(group, part), self._place_of(group, part)
        # Sums of a part have its entries and heads alone.
        batch, _, heads = part if self._kept(group, part) is EVERYTHING else EVERYTHING
        sums.add(self.launchers[group], (batch, heads), (*pair, *into), self.scale, group.pieces[0].mask)
        self.uses[place] -= 1

    def close(self) -> None:
        """Sums of all rows that are still to begin take the others over, when they are there."""
        if self.whole in self.sums or not self.uses[self.whole]:
            for place in [x for x in self.sums if x != self.whole and not self.uses[x]]:
                self._close(place)

    def _close(self, place: Place) -> None:
        (part, sums), rows = self.sums.pop(place), place.rows
        _, whole = self.sums.get(self.whole, (EVERYTHING, None))
        if whole is None or not whole.take(sums, (part.batch, part.heads), rows.start):
            self.rounded.append((rows, part, self._round(sums)))

    def _round(self, sums: GradientSums) -> Tensor:
        dq = sums.q.new_empty(sums.q.shape)
        sums.finish(dq, self.scale)
        return dq

    def finish(self) -> Tensor:
        for place in [x for x in self.sums if x != self.whole]:
            self._close(place)
        q, (_, whole) = self.saved.q, self.sums.pop(self.whole, (EVERYTHING, None))
        dq = q.new_zeros(q.shape) if whole is None else self._round(whole)
        for rows, part, x in self.rounded:
            dq[part.batch, rows.start : rows.stop, part.heads].add_(x)
        return dq


def _rows_of_unlike_parts(adds: Sequence[Add]) -> set[Span]:
    """Rows for which the work is shared out in two ways, as own keys are and others' are not: their sums are of
    everything. Two ways have parts that begin alike and end elsewhere."""
    ends: dict[Place, set[tuple[int | None, int | None]]] = {}
    for group, part in adds:
        ends.setdefault(Place.of(group.rows, part), set()).add((part.batch.stop, part.heads.stop))
    return {place.rows for place, found in ends.items() if len(found) > 1}


def row_gradients(saved: Saved, own: Pair, adds: Sequence[Add], call: Call) -> RowGradients:
    """What adds up dQ over groups and parts, as they will be added; ``own`` are K and V of any keys."""
    spans = {group.rows for group, _ in adds}
    launchers = {group: _find(saved, own, group, call) for group, _ in adds}
    found = {group: launcher for group, launcher in launchers.items() if launcher is not None}
    if found and not share_sums(list(found.values())):
        # Of narrow heads, groups in a window and others.
        found = {group: launcher.with_all_columns for group, launcher in found.items()}
    if (
        not found
        or len(found) < len(launchers)
        or len(spans) > MOST_SPANS
        or not share_sums(list(found.values()))
    ):
        return AddedGradients(saved, call)
    return KernelGradients(saved, call, found, adds)


def _find(saved: Saved, own: Pair, group: Group, call: Call) -> BackwardLauncher | None:
    """What adds to sums of a group's rows; None where there is no such kernel."""
    if len(group.pieces) > 1 or call.softcap:
        return None
    (batch, _, heads, head_dim), keys = saved.q.shape, length(group.keys)
    q_shape = batch, length(group.rows), heads, head_dim
    k_shape, v_shape = ((x.shape[0], keys, *x.shape[2:]) for x in own)
    mask = group.pieces[0].mask
    deterministic = call.deterministic or torch.are_deterministic_algorithms_enabled()
    kind = saved.q.dtype, saved.q.device, mask.causal, deterministic, call.backend, mask.sides
    return find_plain(q_shape, k_shape, v_shape, *kind)


def differentiate_keys(
    rows: RowGradients, groups: tuple[Group, ...], part: Part, pair: Pair, held: Span, into: Pair
) -> None:
    """Write the gradients of the keys ``held`` to ``into``, from all groups that see some.

    Args:
        pair: K and V of these keys and of ``part``. ``into`` may be the same where ``rows.may_replace_keys``.
    """
    if _are_all_of(held, groups):
        for group in groups:
            keys = slice(group.keys.start - held.start, group.keys.stop - held.start)
            k, v, dk, dv = (x[:, keys] for x in (*pair, *into))
            rows.add(group, part, (k, v), (dk, dv))
        return
    sums = [sums_for(x) for x in pair]
    for group in groups:
        keys = slice(group.keys.start - held.start, group.keys.stop - held.start)
        k, v = (x[:, keys] for x in pair)
        each = torch.empty_like(k), torch.empty_like(v)
        rows.add(group, part, (k, v), each)
        for total, x in zip(sums, each, strict=True):
            total[:, keys].add_(x)
    for target, total in zip(into, sums, strict=True):
        target.copy_(total)


def _are_all_of(held: Span, groups: tuple[Group, ...]) -> bool:
    """Whether each key that is held is of exactly one group."""
    row = held.start
    for span in sorted(group.keys for group in groups):
        if span.start != row:
            return False
        row = span.stop
    return bool(groups) and row == held.stop


class KeyGradients:
    """Gradients of a rank's own keys: what its own rows make of them, and what comes back from others.

    The own ones are written to ``own``. What others send is kept as it came where no more than three do, and added up
    in float32 where more do. All is rounded together, when the own ones are there.
    """

    def __init__(self, own: Pair, others: int) -> None:
        """``own``: where dK and dV will be; ``others``: how often ``add`` will be called."""
        self.own = own
        self.sums = [sums_for(x) for x in own] if others > MOST_PARTS else []
        self.returned: list[tuple[Span, Pair]] = []

    def add(self, span: Span, pair: Pair) -> None:
        """What came back of some keys."""
        if not self.sums:
            self.returned.append((span, pair))
        for total, x in zip(self.sums, pair, strict=False):
            total[:, span.start : span.stop].add_(x)

    def finish(self) -> Pair:
        """dK and dV."""
        for total, x in zip(self.own, self.sums, strict=False):
            total.add_(x)
        bounds = sorted({bound for span, _ in self.returned for bound in span})
        for start, stop in pairwise(bounds):
            parts = [
                (span, pair) for span, pair in self.returned if span.start <= start and stop <= span.stop
            ]
            for i, total in enumerate(self.own if parts else ()):
                rows = [pair[i][:, start - span.start : stop - span.start] for span, pair in parts]
                add_parts(total[:, start:stop], rows)
        self.returned.clear()
        self.sums.clear()
        return self.own
