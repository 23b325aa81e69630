"""Errors of FP8 attention over several draws of a family, ours beside FlashAttention-3 on inputs rotated as ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopper_attention.experiments.bench.fp8_peers import DEFAULT_QUANTIZATION
from hopper_attention.experiments.bench.peers import Inputs, Peer, Setting
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.experiments.families.draws import Family, draw_family
from hopper_attention.experiments.reports import markdown_table
from hopper_attention.rotation import rotate_head_dim

CHECKED_ROWS = 128
"""Queries that are looked at of each head, evenly spaced."""

OURS, ROTATED = "ours", "fa3_rotated"
MEASURES = {"together": "of all rows together", "by_row": "root of the mean square of each row's own"}
"""Two ways to put relative errors of rows together: large outputs decide the first, small ones count as much in the
second."""


def rotated(inputs: Inputs) -> Inputs:
    """Q and K times the rotation of our default, float32: their scores do not change."""
    seed = DEFAULT_QUANTIZATION.seed
    return Inputs(rotate_head_dim(inputs.q, seed), rotate_head_dim(inputs.k, seed), inputs.v)


def exact_rows(problem: Problem, inputs: Inputs, rows: Tensor) -> Tensor:
    """Float64 attention of these queries of every head: (batch, rows, heads, head_dim_v)."""
    p, outputs = problem, []
    hidden = torch.arange(p.seqlen_k, device=rows.device) > (rows + p.seqlen_k - p.seqlen_q)[:, None]
    for q, k, v in zip(inputs.q[:, rows], inputs.k, inputs.v, strict=True):
        groups = q.double().unflatten(1, (p.heads_kv, -1))
        scores = torch.einsum("qhgd,khd->hgqk", groups, k.double()) / math.sqrt(p.head_dim)
        if p.causal:
            scores.masked_fill_(hidden, -math.inf)
        outputs.append(torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v.double()).flatten(1, 2))
    return torch.stack(outputs)


def relative_errors(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Both ``MEASURES`` of rows (batch, rows, heads, head_dim_v)."""
    error, size = ((x.double()).square().sum(-1) for x in (found.double() - exact, exact))
    return {
        "together": (error.sum() / size.sum()).sqrt().item(),
        "by_row": (error / size).mean().sqrt().item(),
    }


def errors_of_draws(
    problem: Problem, family: Family, seeds: Sequence[int], peers: Mapping[str, Peer], setting: Setting
) -> dict[str, list[dict[str, float]]]:
    """``relative_errors`` of each of these seeds: of ours, and of FlashAttention-3 where it is among the peers."""
    count = min(CHECKED_ROWS, problem.seqlen_q)
    rows = torch.linspace(0, problem.seqlen_q - 1, count, dtype=torch.float64, device=setting.device)
    rows = rows.round().long()
    errors: dict[str, list[dict[str, float]]] = {}
    for seed in seeds:
        inputs = draw_family(family, problem, seed, setting.device)
        exact = exact_rows(problem, inputs, rows)
        for name, key, given in ((OURS, "ours", inputs), (ROTATED, "fa3", rotated(inputs))):
            if key in peers:
                prepared = peers[key].prepare(problem, given, setting)
                found = prepared.read(prepared.launch())[:, rows]
                errors.setdefault(name, []).append(relative_errors(found, exact))
    return errors


@dataclass(frozen=True)
class Compared:
    """Our error over theirs: the geometric mean over the draws, and its standard error."""

    ratio: float
    error: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.error:.3f}"


def compare(draws: Mapping[str, Sequence[Mapping[str, float]]], measure: str) -> Compared | None:
    """Ours over FlashAttention-3's by a measure, draw by draw; None unless both have two draws or more."""
    pairs = list(zip(draws.get(OURS, ()), draws.get(ROTATED, ()), strict=False))
    if len(pairs) < 2:
        return None
    logs = torch.tensor(
        [math.log(ours[measure] / theirs[measure]) for ours, theirs in pairs], dtype=torch.float64
    )
    ratio = math.exp(logs.mean().item())
    return Compared(ratio, ratio * logs.std().item() / math.sqrt(len(pairs)))


def errors_section(cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Markdown of what a report's cells have of this, by problem and family; nothing if they have none."""
    found = {(cell["problem"], cell["family"]): cell["draws"] for cell in cells if cell.get("draws")}
    problems = list(dict.fromkeys(problem for problem, _ in found))
    parts = []
    for measure, what in MEASURES.items():
        compared = {place: result for place, draws in found.items() if (result := compare(draws, measure))}
        if not compared:
            continue
        rows = [
            [f"`{problem}`", *(str(compared.get((problem, name), "–")) for name in names)]
            for problem in problems
        ]
        ratios = [result.ratio for result in compared.values()]
        above = sum(result.ratio - 2 * result.error > 1 for result in compared.values())
        parts += [
            f"### Relative error {what}",
            markdown_table(["problem", *names], rows),
            f"Geometric mean of all: **{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}**; {above} of "
            f"{len(ratios)} above 1 by more than two standard errors.",
        ]
    if not parts:
        return []
    count = max(len(draws[OURS]) for draws in found.values())
    return [
        "## Error over FlashAttention-3's on our rotation",
        "The error of FP8 attention from 16 bits to 16 bits, ours over that of FlashAttention-3's kernel, whose Q and "
        "K were rotated as ours before they got a scale a head: the geometric mean over "
        f"{count} draws and its standard error. Of each head {CHECKED_ROWS} queries are looked at, evenly spaced.",
        *parts,
    ]
