"""Outputs of the forward benchmarks held against float64: what is computed of them, and what counts as wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopper_attention.experiments.bench.peers import Inputs, Limits
from hopper_attention.experiments.bench.spec import Problem

WHOLE_SCORES = 2**30
"""Scores of a head up to which all of them are computed in float64: 32k queries and keys."""

CHECKED_SCORES = 2**26
"""Scores of a head that are computed in float64 where there are more: half a gigabyte of them."""

Rounding = Callable[[Inputs], Inputs]


@dataclass(frozen=True)
class Check:
    """How a suite's results are held against float64.

    ``oracles`` computes what is compared with from a problem and one set of its inputs. ``compare`` gives, of what a
    launch returned, the relative error and what is wrong with it (empty if nothing is).
    """

    oracles: Callable[[Problem, Inputs], Sequence[Any]]
    compare: Callable[[Problem, Any, Sequence[Any], Limits], tuple[float, str]]


@dataclass(frozen=True)
class Oracle:
    """Float64 output of some rows of one (batch, head): (rows, head_dim_v)."""

    batch: int
    head: int
    rows: Tensor
    out: Tensor


def checked_heads(problem: Problem) -> list[tuple[int, int]]:
    """(batch, head) of those that are checked: the first, a middle and the last."""
    total = problem.batch * problem.heads
    return [divmod(index, problem.heads) for index in sorted({0, total // 2, total - 1})]


def is_short(problem: Problem) -> bool:
    """Whether whole heads can be checked in moments."""
    return problem.seqlen_q * problem.seqlen_k <= WHOLE_SCORES


def compute_oracles(problem: Problem, inputs: Inputs) -> list[Oracle]:
    """Float64 attention of whole heads."""
    from hopper_attention.reference import attention_naive

    group = problem.heads // problem.heads_kv
    all_rows = torch.arange(problem.seqlen_q, device=inputs.q.device)
    oracles = []
    for b, h in checked_heads(problem):
        rows, head, head_kv = slice(b, b + 1), slice(h, h + 1), slice(h // group, h // group + 1)
        parts = inputs.q[rows, :, head], inputs.k[rows, :, head_kv], inputs.v[rows, :, head_kv]
        out = attention_naive(*parts, causal=problem.causal)[0][0, :, 0]
        oracles.append(Oracle(b, h, all_rows, out))
    return oracles


def compute_row_oracles(
    problem: Problem, inputs: Inputs, checked_scores: int = CHECKED_SCORES
) -> list[Oracle]:
    """Float64 attention of evenly spaced rows of a head, so many that they have ``checked_scores`` scores: for
    sequences too long to check whole."""
    device = inputs.q.device
    count = max(1, checked_scores // problem.seqlen_k)
    ends = 0.0, problem.seqlen_q - 1.0, min(count, problem.seqlen_q)
    rows = torch.linspace(*ends, dtype=torch.float64, device=device).round().long()
    last_keys = rows + problem.seqlen_k - problem.seqlen_q
    hidden = torch.arange(problem.seqlen_k, device=device) > last_keys[:, None]
    oracles = []
    for b, h in checked_heads(problem):
        head_kv = h * problem.heads_kv // problem.heads
        scores = (
            inputs.q[b, rows, h].double() @ inputs.k[b, :, head_kv].double().mT / math.sqrt(problem.head_dim)
        )
        if problem.causal:
            scores.masked_fill_(hidden, -math.inf)
        weights = torch.softmax(scores, -1).nan_to_num_()  # rows that see no key
        oracles.append(Oracle(b, h, rows, weights @ inputs.v[b, :, head_kv].double()))
    return oracles


def malformed(name: str, x: Tensor, shape: tuple[int, ...]) -> str:
    """What is wrong with a tensor before its numbers are looked at; empty if nothing is."""
    if tuple(x.shape) != shape:
        return f"{name} is {tuple(x.shape)}, expected {shape}"
    wrong = int((~x.isfinite()).sum())
    return f"{wrong} of {x.numel()} of {name} are not finite" if wrong else ""


def check_output(
    problem: Problem, out: Tensor, oracles: Sequence[Oracle], limits: Limits
) -> tuple[float, str]:
    """Relative error of the worst checked head, and what is wrong with the output (empty if nothing is)."""
    expected = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v)
    if tuple(out.shape) != expected:
        return math.inf, f"the output is {tuple(out.shape)}, expected {expected}"
    if not bool(out.isfinite().all()):
        return math.inf, f"{int((~out.isfinite()).sum())} of {out.numel()} outputs are not finite"
    worst = 0.0
    for oracle in oracles:
        difference = out[oracle.batch, oracle.rows, oracle.head].double() - oracle.out
        norms = oracle.out.norm(dim=-1)
        error = (difference.norm() / norms.norm()).item()
        row_errors = difference.norm(dim=-1) / norms.clamp_min(1e-3 * norms.max())
        row_error, index = row_errors.max(0)
        worst = max(worst, error)
        where = f"batch {oracle.batch}, head {oracle.head}"
        if not error <= limits.head:
            return worst, f"{where}: error {error:.2e} against float64, allowed {limits.head:.1e}"
        if not row_error <= limits.row:
            where = f"{where}, row {int(oracle.rows[index])}"
            return worst, f"{where}: error {row_error:.2e} against float64, allowed {limits.row:.1e}"
    return worst, ""


def compute_output_oracles(problem: Problem, inputs: Inputs) -> list[Oracle]:
    """Of whole heads where that takes moments, else of some of their rows."""
    return (compute_oracles if is_short(problem) else compute_row_oracles)(problem, inputs)


OUTPUT = Check(compute_output_oracles, check_output)
