"""What our FP8 promises of its error, held against what was measured."""

from __future__ import annotations

from hopper_attention.experiments.reports import Target
from hopper_attention.experiments.rmse.methods import HOPPER_KERNEL
from hopper_attention.experiments.rmse.run import RmseReport
from hopper_attention.experiments.rmse.sweep import LONG, SHORT, SweepReport, summarize

OURS, EXACT, BASELINE = "fp8-both", "fp8-float64", "fp8-per-tensor"
FA3_ROTATED = ("fa3-fp8-tensor-rotated", "fa3-fp8-head-rotated")

LARGEST_RMSE = 9.1e-3
"""The paper's own figure."""

BELOW_BASELINE = 2.6
"""The paper's, too. By draw it is anything from 2.3 to 3.1, so it takes several seeds."""

OVER_EMULATION = 1.05
GROWTH_RATIO = 1.5


def as_printed(figure: float) -> float:
    """Two digits, as the paper prints its figures: the third depends on the draw."""
    return float(f"{figure:.1e}")


def fp8_targets(report: RmseReport) -> list[Target]:
    """The promises for the paper's inputs; none where those were not drawn, or the kernel did not run."""
    if not (report.experiment.is_papers and report.has(OURS)):
        return []
    if report.row(OURS).implementation != HOPPER_KERNEL:
        return []
    error = report.row(OURS).rmse
    met = as_printed(error) <= LARGEST_RMSE
    targets = [Target("FP8 RMSE on the paper's inputs", f"<= {LARGEST_RMSE:.1e}", f"{error:.2e}", met)]
    if report.has(EXACT):
        ratio = error / report.row(EXACT).rmse
        what = "FP8 RMSE over its float64 emulation"
        targets.append(Target(what, f"<= {OVER_EMULATION}", f"{ratio:.3f}", ratio <= OVER_EMULATION))
    if report.has(BASELINE):
        factor = report.row(BASELINE).rmse / error
        what, met = "FP8 baseline's RMSE over ours", as_printed(factor) >= BELOW_BASELINE
        targets.append(Target(what, f">= {BELOW_BASELINE}", f"{factor:.2f}", met))
    rotated = [report.row(name).rmse for name in FA3_ROTATED if report.has(name)]
    if rotated:
        what, best = "FP8 RMSE against FlashAttention-3 with our rotation", min(rotated)
        targets.append(Target(what, f"<= {best:.3e}", f"{error:.3e}", error <= best))
    return targets


def sweep_targets(report: SweepReport) -> list[Target]:
    """The promise for long sequences; none where the kernel or one of the two lengths is missing."""
    summary = summarize(report)
    if "ratio" not in summary:
        return []
    figure = f"{summary['ratio']:.3f} (kernel {summary['kernel']:.3f}, emulation {summary['emulation']:.3f})"
    what = f"FP8 error at {LONG} keys over that at {SHORT}, kernel over emulation"
    return [Target(what, f"<= {GROWTH_RATIO}", figure, summary["ratio"] <= GROWTH_RATIO)]
