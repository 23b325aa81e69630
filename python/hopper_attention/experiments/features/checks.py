"""Results of the features' benchmark held against float64: whole heads of a few sequences, by chunks of queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hopper_attention.experiments.bench.backward_peers import GRADIENT_LIMITS
from hopper_attention.experiments.bench.checks import CHECKED_SCORES, malformed
from hopper_attention.experiments.bench.fp8_peers import END_TO_END_LIMITS
from hopper_attention.experiments.bench.gradients import DOUT_SEED, NAMES
from hopper_attention.experiments.bench.peers import ERROR_LIMITS, Inputs, Limits
from hopper_attention.experiments.features import score_terms
from hopper_attention.experiments.features.functions import bias_of
from hopper_attention.experiments.features.spec import BIAS, Workload
from hopper_attention.experiments.workloads.checks import Comparison, worst_error
from hopper_attention.reference.dropout import DropoutMask, dropped
from hopper_attention.reference.tiles import Span

LEAST_CHECKED = 64
"""A sequence shorter than this is not checked if there are others: its gradients nearly vanish, and rounding is most of
what is left."""


@dataclass(frozen=True)
class Piece:
    """Float64 values of some rows and heads of one tensor of a result: (rows, heads, head_dim)."""

    name: str
    tensor: int
    rows: slice
    heads: slice
    right: Tensor

    def beside(self, result: Sequence[Tensor]) -> Comparison:
        rows, heads = self.rows, self.heads
        where = f"{self.name} of rows {rows.start} to {rows.stop}, heads from {heads.start}"
        return Comparison(where, result[self.tensor][rows, heads], self.right)


def draw_output_gradient(workload: Workload, device: str) -> Tensor:
    """dout (tokens, heads, head_dim), N(0, 1): the same numbers at every call."""
    generator = torch.Generator(device).manual_seed(DOUT_SEED)
    shape = workload.tokens, workload.heads, workload.value_dim
    return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, workload.dtype))


def limits_of(workload: Workload) -> Limits:
    """Allowed errors, as in the benchmarks of dense attention."""
    if workload.is_fp8:
        return END_TO_END_LIMITS
    return (GRADIENT_LIMITS if workload.is_backward else ERROR_LIMITS)[workload.dtype]


def checked_places(workload: Workload) -> list[tuple[int, int]]:
    """(sequence, kv head) of those that are checked: a short, a middle and the longest sequence, on different heads."""
    lengths, last = workload.lengths, workload.heads_kv - 1
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    order = [i for i in order if lengths[i] >= LEAST_CHECKED] or order[-1:]
    return list(dict.fromkeys([(order[0], 0), (order[len(order) // 2], last // 2), (order[-1], last)]))


def compute_pieces(
    workload: Workload, inputs: Inputs, chunk_scores: int = CHECKED_SCORES
) -> tuple[Piece, ...]:
    """What is compared with: out, or dq, dk and dv for ``draw_output_gradient``; about ``chunk_scores`` scores at a
    time. ``inputs`` are (tokens, heads, head_dim)."""
    device, group = inputs.q.device, workload.heads // workload.heads_kv
    dout = draw_output_gradient(workload, str(device)) if workload.is_backward else torch.empty(0)
    pieces: list[Piece] = []
    for sequence, head_kv in checked_places(workload):
        start = sum(workload.lengths[:sequence])
        rows = slice(start, start + workload.lengths[sequence])
        of_q, of_k = slice(head_kv * group, (head_kv + 1) * group), slice(head_kv, head_kv + 1)
        k, v = inputs.k[rows, head_kv].double(), inputs.v[rows, head_kv].double()
        q = inputs.q[rows, of_q].double()
        terms = terms_of_heads(workload, sequence, of_q, str(device))
        if workload.is_backward:
            found = attend_backward(workload, (q, k, v, dout[rows, of_q].double()), terms, chunk_scores)
            places = zip(NAMES, (of_q, of_k, of_k), found, strict=True)
            pieces += [Piece(name, i, rows, of, right) for i, (name, of, right) in enumerate(places)]
        else:
            pieces.append(Piece("out", 0, rows, of_q, attend(workload, (q, k, v), terms, chunk_scores)))
    return tuple(pieces)


@dataclass(frozen=True)
class Terms:
    """What is done to the scores of one head, float64: slope of ALiBi, 0 for none, sink, -inf for none, our mask of
    dropout, and ``bias``, what a function adds to them, of the distance of keys."""

    softcap: float
    slope: Tensor
    sink: Tensor
    dropout: DropoutMask | None
    bias: Callable[[Tensor], Tensor | float]

    def dropped(self, x: Tensor, rows: slice, keys: slice) -> Tensor:
        """P, or its gradient, without what dropout drops."""
        if self.dropout is None:
            return x
        kept = self.dropout.tile(Span(rows.start, rows.stop), Span(keys.start, keys.stop))[0, 0]
        return dropped(x, kept, self.dropout.factor)


def terms_of_heads(workload: Workload, sequence: int, heads: slice, device: str) -> list[Terms | None]:
    """Of query heads of a sequence; None for each where scores stay as they are."""
    if not (workload.changes_scores or workload.functions == BIAS):
        return [None] * (heads.stop - heads.start)
    slopes = score_terms.slopes_of(workload, device).double() * workload.alibi
    sinks = score_terms.sinks_of(workload, device).double()
    sinks = sinks if workload.sinks else torch.full_like(sinks, -math.inf)
    mask = DropoutMask.of(workload.dropout, score_terms.philox_of(device), 1, 1, sequence)
    masks = [mask and replace(mask, first_head=head) for head in range(heads.start, heads.stop)]
    biases = (partial(bias_of, workload, head) for head in range(heads.start, heads.stop))
    parts = zip(slopes[heads], sinks[heads], masks, biases, strict=True)
    return [Terms(workload.softcap, *of_head) for of_head in parts]


def chunks(workload: Workload, like: Tensor, scores: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Queries of a sequence, the keys that they see together, which of these each does not see, and how far each key
    is behind each query.

    ``like`` has a row for each query, on the device that is wanted.
    """
    length, device = like.shape[0], like.device
    left, right = workload.sides(length)
    size = max(1, math.isqrt(scores) if workload.has_window else scores // length)
    for first in range(0, length, size):
        stop = min(first + size, length)
        begin, end = workload.key_range(length, first, stop)
        queries = torch.arange(first, stop, device=device)
        distance = torch.arange(begin, end, device=device) - queries[:, None]
        yield slice(first, stop), slice(begin, end), (distance < -left) | (distance > right), distance


def weigh(
    q: Tensor, k: Tensor, hidden: Tensor, distance: Tensor, terms: Terms | None
) -> tuple[Tensor, Tensor | float]:
    """softmax of the scores of one head, (rows, keys), and the slope of what softcap makes of each score.

    A sink takes its part of a row and has no column. ``terms`` are None where scores stay as they are.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if terms is None:
        return torch.softmax(scores.masked_fill_(hidden, -math.inf), -1), 1.0
    slope: Tensor | float = 1.0
    if terms.softcap:
        capped = torch.tanh(scores / terms.softcap)
        scores, slope = terms.softcap * capped, 1 - capped.square()
    biased = scores - terms.slope * distance.abs() + terms.bias(distance)
    scores = biased.masked_fill_(hidden, -math.inf)
    sink = terms.sink.expand(scores.shape[0], 1)
    return torch.softmax(torch.cat((scores, sink), -1), -1)[:, :-1], slope


def drop(terms: Terms | None, x: Tensor, rows: slice, keys: slice) -> Tensor:
    """``Terms.dropped``, where there are some."""
    return x if terms is None else terms.dropped(x, rows, keys)


def attend(
    workload: Workload, tensors: tuple[Tensor, Tensor, Tensor], terms: Sequence[Terms | None], scores: int
) -> Tensor:
    """Output (rows, group, head_dim) of one key/value head; ``terms`` are of its query heads."""
    q, k, v = tensors
    out = q.new_empty(*q.shape[:2], v.shape[1])
    for rows, keys, hidden, distance in chunks(workload, q, scores):
        for i in range(q.shape[1]):
            weights, _ = weigh(q[rows, i], k[keys], hidden, distance, terms[i])
            out[rows, i] = drop(terms[i], weights, rows, keys) @ v[keys]
    return out


def attend_backward(
    workload: Workload,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    terms: Sequence[Terms | None],
    scores: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (rows, group, head_dim), dk and dv (rows, 1, head_dim) of one key/value head, from query head ``head`` on."""
    q, k, v, dout = tensors
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, hidden, distance in chunks(workload, q, scores):
        for i in range(q.shape[1]):
            (weights, slope), do = weigh(q[rows, i], k[keys], hidden, distance, terms[i]), dout[rows, i]
            ds = drop(terms[i], do @ v[keys].mT, rows, keys)
            ds -= (weights * ds).sum(-1, keepdim=True)
            ds.mul_(weights).mul_(slope).div_(math.sqrt(q.shape[-1]))
            dq[rows, i] = ds @ k[keys]
            dk[keys] += ds.mT @ q[rows, i]
            dv[keys] += drop(terms[i], weights, rows, keys).mT @ do
    return dq, dk[:, None], dv[:, None]


def check_result(
    workload: Workload, result: Sequence[Tensor], pieces: Sequence[Piece], limits: Limits
) -> tuple[float, str]:
    """Relative error of the worst piece, and what is wrong with the result (empty if nothing is)."""
    w = workload
    heads = (w.heads, w.heads_kv, w.heads_kv) if w.is_backward else (w.heads,)
    names = NAMES if w.is_backward else ("out",)
    for name, tensor, of in zip(names, result, heads, strict=True):
        wrong = malformed(name, tensor, (w.tokens, of, w.value_dim))
        if wrong:
            return math.inf, wrong
    return worst_error((piece.beside(result) for piece in pieces), limits)
