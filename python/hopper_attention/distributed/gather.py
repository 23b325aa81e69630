"""All-gather attention: every rank gets K and V of the whole sequence, a part of the heads after the other.

While the kernel works on the heads of one part, those of the next are gathered. A row of Q meets all its keys in one
call, so that the output is that of one GPU, and nothing is merged. It suits few key/value heads, of which the whole is
small. In the backward pass K and V are gathered anew, and the gradients of the keys of each rank go back to it in the
dtype of the kernel, where they are added up in float32 in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from hopper_attention.distributed.attend import Call, Gradients, Saved, attend
from hopper_attention.distributed.exchange import Ranks, Transfer, all_gather, all_to_all, give_head_start
from hopper_attention.distributed.gradients import EVERYTHING, Pair, differentiate_keys, row_gradients
from hopper_attention.distributed.layout import parts_of, spans_of, unshard
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.pieces import Group, Problem, groups_with_all, length, rows_of_none
from hopper_attention.reference.tiles import Span

Gathering = tuple[Tensor, Tensor, Transfer, Transfer]


def _gathered(ranks: Ranks, own: Pair, layout: str) -> Iterator[tuple[slice, Pair]]:
    """Each part of the heads with K and V of all positions; the next part is on its way meanwhile."""

    def post(heads: slice) -> Gathering:
        k, v = (x[:, :, heads].contiguous() for x in own)
        (all_k, k_transfer), (all_v, v_transfer) = all_gather(ranks, k, "K"), all_gather(ranks, v, "V")
        return all_k, all_v, k_transfer, v_transfer

    def whole(x: Tensor) -> Tensor:
        """(size, batch, rows, ...) -> (batch, positions, ...)."""
        return unshard(x.movedim(0, 1).flatten(1, 2), ranks.size, layout)

    parts = parts_of(own[0].shape[2])
    posted = post(parts[0])
    for heads, following in zip(parts, [*parts[1:], None], strict=True):
        all_k, all_v, *transfers = posted
        for transfer in transfers:
            transfer.wait()
        if following is not None:
            posted = post(following)
            give_head_start(all_k.device)
        yield heads, (whole(all_k), whole(all_v))


def _are_apart(groups: tuple[Group, ...]) -> bool:
    """Whether no row is in two of them."""
    spans = sorted(group.rows for group in groups)
    return all(a.stop <= b.start for a, b in pairwise(spans))


def _attend_to_all(q: Tensor, pair: Pair, groups: tuple[Group, ...], call: Call) -> tuple[Tensor, Tensor]:
    """out in the dtype of q and lse of all rows; rows of no group have 0 and -inf."""
    k, v = pair

    def of(group: Group) -> tuple[Tensor, Tensor]:
        keys = slice(group.keys.start, group.keys.stop)
        return attend(q, k[:, keys], v[:, keys], group, call)

    if len(groups) == 1 and length(groups[0].rows) == q.shape[1]:
        return of(groups[0])
    if not _are_apart(groups):
        merged = Merged.empty(q, v.shape[3])
        for group in groups:
            merged.add(group.rows, *of(group))
        return merged.out.to(q.dtype), merged.lse
    batch, rows, heads, _ = q.shape
    out = q.new_zeros(batch, rows, heads, v.shape[3])
    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=torch.float32)
    for group in groups:
        here = slice(group.rows.start, group.rows.stop)
        out[:, here], lse[:, :, here] = of(group)
    return out, lse


def _heads_of_q(q: Tensor, kv_heads: int, part: slice) -> slice:
    each = q.shape[2] // kv_heads
    return slice(part.start * each, part.stop * each)


def gather_forward(
    ranks: Ranks, problem: Problem, call: Call, tensors: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out of q's dtype and lse, of the local rows."""
    q, k, v = tensors
    groups = groups_with_all(problem, ranks.rank)
    outs, lses = [], []
    for part, pair in _gathered(ranks, (k, v), problem.layout):
        out, lse = _attend_to_all(q[:, :, _heads_of_q(q, k.shape[2], part)], pair, groups, call)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs, 2), torch.cat(lses, 1)
    if sinks is None:
        return out, lse
    whole = Merged(out, lse)
    whole.add_sinks(sinks, rows_of_none(problem, ranks.rank))
    return whole.out.to(q.dtype), whole.lse


def gather_backward(ranks: Ranks, problem: Problem, call: Call, saved: Saved, own: Pair) -> Gradients:
    """dq, dk and dv in the dtype of q."""
    groups = groups_with_all(problem, ranks.rank)
    kv_heads = own[0].shape[2]
    dq, dk, dv = (x.new_empty(x.shape) for x in (saved.q, *own))
    finish: list[tuple[slice, Callable[[], Pair]]] = []
    for part, pair in _gathered(ranks, own, problem.layout):
        heads = _heads_of_q(saved.q, kv_heads, part)
        adds = [(group, EVERYTHING) for group in groups]
        rows = row_gradients(saved.of_part(slice(None), heads), pair, adds, call)
        into = pair if rows.may_replace_keys else (torch.empty_like(pair[0]), torch.empty_like(pair[1]))
        differentiate_keys(rows, groups, EVERYTHING, pair, Span(0, problem.seqlen_k), into)
        dq[:, :, heads] = rows.finish()
        finish.append((part, _send_back(ranks, problem.layout, into)))
    for part, done in finish:
        dk[:, :, part], dv[:, :, part] = done()
    return dq, dk, dv


def by_owner(x: Tensor, world: int, layout: str) -> Tensor:
    """(batch, positions, ...) -> (world, batch, rows, ...), in one copy."""
    batch, positions, *others = x.shape
    sorted_out = x.new_empty((world, batch, positions // world, *others))
    for rank in range(world):
        row = 0
        for span in spans_of(rank, world, positions, layout):
            sorted_out[rank, :, row : row + length(span)] = x[:, span.start : span.stop]
            row += length(span)
    return sorted_out


def _send_back(ranks: Ranks, layout: str, gradients: Pair) -> Callable[[], Pair]:
    """Post the gradients of all keys to their owners; what comes back waits, and adds up this rank's in float32."""
    posted = []
    for x in gradients:
        parts = by_owner(x, ranks.size, layout)
        posted.append(all_to_all(ranks, parts, "gradients of K and V"))

    def wait() -> Pair:
        for _, transfer in posted:
            transfer.wait()
        dk, dv = (x.sum(0, dtype=torch.float32) for x, _ in posted)
        return dk, dv

    return wait
