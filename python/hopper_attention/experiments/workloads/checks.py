"""Parts of a result held against float64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from hopper_attention.experiments.bench.peers import Limits


class Comparison(NamedTuple):
    """A part of a result beside its float64 values, both (rows, heads, head_dim); ``where`` says which part."""

    where: str
    found: Tensor
    right: Tensor


def errors_of(found: Tensor, right: Tensor) -> tuple[float, float]:
    """Relative error of the whole (Frobenius), and of the worst row. A row smaller than rows are on average counts as
    one of average size: where a query sees few keys its dq nearly vanishes, and the rounding of out does not."""
    difference, norms = found.double() - right, right.norm(dim=-1)
    average = norms.square().mean().sqrt().clamp_min(1e-30)
    rows = difference.norm(dim=-1) / norms.clamp_min(average)
    return (difference.norm() / norms.norm().clamp_min(1e-30)).item(), rows.max().item()


def worst_error(comparisons: Iterable[Comparison], limits: Limits) -> tuple[float, str]:
    """Relative error of the worst part, and what the first beyond ``limits`` is; empty if none is."""
    worst = 0.0
    for where, found, right in comparisons:
        error, row_error = errors_of(found, right)
        worst = max(worst, error)
        if not (error <= limits.head and row_error <= limits.row):
            errors = f"{error:.2e} in all and {row_error:.2e} of a row against float64"
            return worst, f"{where}: error {errors}, allowed {limits.head:.1e} and {limits.row:.1e}"
    return worst, ""
