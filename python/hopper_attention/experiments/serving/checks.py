"""Results of the serving benchmark held against float64: some heads of a few sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention.experiments.bench.checks import malformed
from hopper_attention.experiments.bench.fp8_peers import END_TO_END_LIMITS
from hopper_attention.experiments.bench.peers import ERROR_LIMITS, Limits
from hopper_attention.experiments.serving.inputs import CacheInputs, appended
from hopper_attention.experiments.serving.spec import ServingWorkload
from hopper_attention.experiments.workloads.checks import Comparison, worst_error

OVER_16_BITS = 2.0
"""Errors of 16-bit queries on an e4m3 cache, over those that a cache of 16 bits may have."""


@dataclass(frozen=True)
class Piece:
    """Float64 output (queries, heads, head_dim) of one sequence and the query heads of one key/value head."""

    sequence: int
    heads: slice
    right: Tensor

    def beside(self, out: Tensor) -> Comparison:
        where = f"sequence {self.sequence}, heads from {self.heads.start}"
        return Comparison(where, out[self.sequence, :, self.heads], self.right)


def limits_of(workload: ServingWorkload, rounds_queries: bool, query_factor: float = 1.0) -> Limits:
    """Allowed errors; ``rounds_queries``: queries, too, become e4m3, which changes scores the more the larger they are,
    by the ``query_factor`` of their family."""
    if workload.is_fp8 and rounds_queries:
        return scaled(END_TO_END_LIMITS, query_factor)
    return scaled(ERROR_LIMITS[workload.dtype], OVER_16_BITS if workload.is_fp8 else 1.0)


def scaled(limits: Limits, factor: float) -> Limits:
    return Limits(factor * limits.head, factor * limits.row)


def checked_places(workload: ServingWorkload) -> list[tuple[int, int]]:
    """(sequence, kv head) of those that are checked: the shortest, a middle and the longest, on different heads."""
    order = sorted(range(workload.batch), key=lambda i: workload.lengths[i])
    last = workload.heads_kv - 1
    return list(dict.fromkeys([(order[0], 0), (order[len(order) // 2], last // 2), (order[-1], last)]))


def compute_pieces(workload: ServingWorkload, inputs: CacheInputs) -> tuple[Piece, ...]:
    """What is compared with. Where the call appends, the new rows are then in the cache."""
    group = workload.heads // workload.heads_kv
    complete = appended(workload, inputs)
    pieces = []
    for sequence, head in checked_places(workload):
        heads = slice(head * group, (head + 1) * group)
        pieces.append(Piece(sequence, heads, attend(workload, complete, sequence, head, heads)))
    return tuple(pieces)


def poison_new_rows(inputs: CacheInputs) -> None:
    """NaN where the call appends."""
    if inputs.new is not None:
        k, v = inputs.new.k, inputs.new.v
        inputs.fill_new_rows(torch.full_like(k, math.nan), torch.full_like(v, math.nan))


def attend(workload: ServingWorkload, inputs: CacheInputs, sequence: int, head: int, heads: slice) -> Tensor:
    """Float64 output (queries, group, head_dim) of one key/value head."""
    length = workload.lengths[sequence]
    one = slice(head, head + 1)
    k, v = (x[:, 0].double() for x in inputs.rows(sequence, slice(0, length), one))
    if inputs.descales is not None:
        k, v = (x * of[sequence, head].double() for x, of in zip((k, v), inputs.descales, strict=True))
    q = inputs.q[sequence, :, heads].double()
    if inputs.qv is not None:
        q, k = torch.cat((q, inputs.qv[sequence, :, heads].double()), -1), torch.cat((k, v), -1)
    keys = torch.arange(length, device=q.device)
    last = length - workload.queries + torch.arange(workload.queries, device=q.device)
    hidden = keys > last[:, None]
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for i in range(q.shape[1]):
        scores = q[:, i] @ k.mT * workload.softmax_scale
        out[:, i] = torch.softmax(scores.masked_fill_(hidden, -math.inf), -1) @ v
    return out


def check_output(
    workload: ServingWorkload, out: Tensor, pieces: Sequence[Piece], limits: Limits
) -> tuple[float, str]:
    """Relative error of the worst piece, and what is wrong with the output (empty if nothing is)."""
    w = workload
    wrong = malformed("out", out, (w.batch, w.queries, w.heads, w.value_columns))
    if wrong:
        return math.inf, wrong
    return worst_error((piece.beside(out) for piece in pieces), limits)
