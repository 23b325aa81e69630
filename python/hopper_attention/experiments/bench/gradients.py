"""Gradients of the backward benchmark held against float64, on whole key/value heads, by chunks of queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention.experiments.bench.checks import CHECKED_SCORES, Check, malformed
from hopper_attention.experiments.bench.peers import Inputs, Limits
from hopper_attention.experiments.bench.spec import Problem

DOUT_SEED = 1_000_003
"""Of the gradient of the output: one that no set of inputs is drawn with."""

NAMES = ("dq", "dk", "dv")


def draw_output_gradient(problem: Problem, device: str) -> Tensor:
    """dout (batch, seqlen_q, heads, head_dim_v), N(0, 1): the same numbers at every call."""
    p = problem
    generator = torch.Generator(device).manual_seed(DOUT_SEED)
    shape = (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
    return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, p.dtype))


@dataclass(frozen=True)
class GradientOracle:
    """Float64 gradients of one (batch, kv_head): dq (seqlen_q, group, head_dim), dk and dv (seqlen_k, ...)."""

    batch: int
    head_kv: int
    dq: Tensor
    dk: Tensor
    dv: Tensor


def checked_kv_heads(problem: Problem) -> list[tuple[int, int]]:
    """(batch, kv_head) of those that are checked: the first and the last."""
    total = problem.batch * problem.heads_kv
    return [divmod(index, problem.heads_kv) for index in sorted({0, total - 1})]


def compute_gradient_oracles(
    problem: Problem, inputs: Inputs, chunk_scores: int = CHECKED_SCORES
) -> list[GradientOracle]:
    """Float64 gradients for ``draw_output_gradient``, ``chunk_scores`` scores at a time."""
    p, oracles = problem, []
    group = p.heads // p.heads_kv
    dout = draw_output_gradient(problem, str(inputs.q.device))
    for b, head_kv in checked_kv_heads(problem):
        k, v = inputs.k[b, :, head_kv].double(), inputs.v[b, :, head_kv].double()
        dq = torch.zeros(p.seqlen_q, group, p.head_dim, dtype=torch.float64, device=k.device)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i in range(group):
            h = head_kv * group + i
            for rows in torch.arange(p.seqlen_q, device=k.device).split(max(1, chunk_scores // p.seqlen_k)):
                q, do = inputs.q[b, rows, h].double(), dout[b, rows, h].double()
                weights, ds = _weights_and_score_gradients(problem, rows, (q, k, v, do))
                dq[rows, i] = ds @ k
                dk += ds.mT @ q
                dv += weights.mT @ do
        oracles.append(GradientOracle(b, head_kv, dq, dk, dv))
    return oracles


def _weights_and_score_gradients(
    problem: Problem, rows: Tensor, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """softmax(S) of some rows, and the gradient of Q K^T, both (rows, seqlen_k)."""
    q, k, v, do = tensors
    scale = 1 / math.sqrt(problem.head_dim)
    scores = q @ k.mT * scale
    if problem.causal:
        last_keys = rows + problem.seqlen_k - problem.seqlen_q
        scores.masked_fill_(torch.arange(problem.seqlen_k, device=k.device) > last_keys[:, None], -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num_()  # rows that see no key
    ds = do @ v.mT
    ds -= (weights * ds).sum(-1, keepdim=True)
    return weights, ds.mul_(weights).mul_(scale)


def check_gradients(
    problem: Problem, gradients: Sequence[Tensor], oracles: Sequence[GradientOracle], limits: Limits
) -> tuple[float, str]:
    """Relative error of the worst gradient of a checked head, and what is wrong with them (empty if nothing is)."""
    for name, gradient, shape in zip(NAMES, gradients, problem.shapes, strict=True):
        wrong = malformed(name, gradient, shape)
        if wrong:
            return math.inf, wrong
    worst = 0.0
    group = problem.heads // problem.heads_kv
    for oracle in oracles:
        b, head_kv = oracle.batch, oracle.head_kv
        heads = slice(head_kv * group, (head_kv + 1) * group)
        found = gradients[0][b, :, heads], gradients[1][b, :, head_kv], gradients[2][b, :, head_kv]
        for name, ours, right in zip(NAMES, found, (oracle.dq, oracle.dk, oracle.dv), strict=True):
            error, row_error = _errors(ours, right)
            worst = max(worst, error)
            where = f"{name} of batch {b}, kv head {head_kv}"
            if not error <= limits.head:
                return worst, f"{where}: error {error:.2e} against float64, allowed {limits.head:.1e}"
            if not row_error <= limits.row:
                return (
                    worst,
                    f"{where}: a row's error {row_error:.2e} against float64, allowed {limits.row:.1e}",
                )
    return worst, ""


def _errors(ours: Tensor, right: Tensor) -> tuple[float, float]:
    """Relative error of the whole (Frobenius), and of the worst row; rows near zero count as a thousandth of the
    largest."""
    difference, norms = ours.double() - right, right.norm(dim=-1)
    rows = difference.norm(dim=-1) / norms.clamp_min(max(1e-3 * norms.max().item(), 1e-30))
    whole = difference.norm() / norms.norm().clamp_min(1e-30)
    return whole.item(), rows.max().item()


GRADIENTS = Check(compute_gradient_oracles, check_gradients)
