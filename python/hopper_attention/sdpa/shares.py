"""The backward pass of torch's fused attention for CPUs, shared out to all threads.

It gives each thread whole heads of K and V, so that eight heads leave eight of sixteen threads without work. Here heads
are cut: queries into parts that each see all keys, whose gradients of K and V are added; and a causal square into two
causal squares of half its side and the square between them, which has no mask.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

LEAST_ROWS = 128
"""Queries of a part, and of half a square: with fewer, asking for it takes longer than it saves."""

Gradients = tuple[Tensor, Tensor, Tensor]
Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""What there is for each query: dout, q and out of (batch, heads, rows, columns), and lse (batch, heads, rows)."""

Backward = Callable[[Rows, Tensor, Tensor, bool], Gradients]
"""(rows, k, v, causal) -> (dq, dk, dv), of as many heads of K as of Q."""


def share_out(backward: Backward, rows: Rows, k: Tensor, v: Tensor, causal: bool, threads: int) -> Gradients:
    """The gradients of ``backward``, of calls that have work for so many threads, where there is as much.

    Args:
        rows, k, v: float32; a causal mask is that of as many queries as keys.
    """
    lse = rows[3]
    batch, heads, seqlen = lse.shape
    wanted = -(-threads // (batch * heads))
    if wanted < 2 or seqlen < 2 * LEAST_ROWS:
        return backward(rows, k, v, causal)
    if causal:
        return _share_square(backward, rows, k, v, threads)
    number = min(wanted, seqlen // LEAST_ROWS)
    parts = _cut(rows, number)
    whole_k, whole_v = (x[:, None].expand(-1, number, -1, -1, -1).flatten(0, 1) for x in (k, v))
    dq, dk, dv = backward(parts, whole_k, whole_v, False)
    return _joined(dq, batch)[:, :, :seqlen], *(x.unflatten(0, (batch, -1)).sum(1) for x in (dk, dv))


def _share_square(backward: Backward, rows: Rows, k: Tensor, v: Tensor, threads: int) -> Gradients:
    """Of a causal one: two in one call, and what the later queries see of the earlier keys."""
    batch, _, seqlen = rows[3].shape
    own_k, own_v = (_halves(x, 2) for x in (k, v))
    both = [
        _joined(x, batch)[:, :, :seqlen]
        for x in share_out(backward, _cut(rows, 2), own_k, own_v, True, threads)
    ]
    half = own_k.shape[2]
    dout, q, out, lse = (x[:, :, half:] for x in rows)
    between = share_out(backward, (dout, q, out, lse), k[:, :, :half], v[:, :, :half], False, threads)
    for whole, part, first in zip(both, between, (half, 0, 0), strict=True):
        whole[:, :, first : first + part.shape[2]] += part
    dq, dk, dv = both
    return dq, dk, dv


def _cut(rows: Rows, number: int) -> Rows:
    """Rows in so many parts, as a longer batch. What fills up the last has no part in a gradient, as its dout is 0."""
    dout, q, out, lse = rows
    cut_lse = _halves(lse[..., None], number)[..., 0].contiguous()
    return _halves(dout, number), _halves(q, number), _halves(out, number), cut_lse


def _halves(x: Tensor, number: int) -> Tensor:
    """(batch, heads, rows, columns) -> (batch * number, heads, rows of a part, columns)."""
    each = -(-x.shape[2] // number)
    filled = pad(x, (0, 0, 0, each * number - x.shape[2])) if x.shape[2] % number else x
    return filled.unflatten(2, (number, each)).transpose(1, 2).flatten(0, 1)


def _joined(x: Tensor, batch: int) -> Tensor:
    """The other way round."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
