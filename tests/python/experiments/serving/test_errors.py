"""What is promised of the error on a cache in e4m3."""

from __future__ import annotations

from dataclasses import replace

from hopper_attention.experiments.serving.results import serving_targets
from tests.python.experiments.serving.test_serving import measured, report_of, workload


def test_the_error_on_an_e4m3_cache_is_held_against_that_of_16_bits() -> None:
    """Where both have run; twice as large is allowed."""
    small, other = workload("1x64k*e4m3"), workload("8x8k-q1*e4m3")
    cells = [(w, {"ours": 9.0}) for w in (small, replace(small, is_fp8=False), other)]
    report = report_of(*cells)
    of_small, of_16_bits, of_other = report.cells
    for least, ratio, met in ((2e-3, "1.50", True), (1.4e-3, "2.14", False)):
        known = replace(of_16_bits, peers={"ours": replace(measured(9.0), error=least)})
        worse = replace(of_small, peers={"ours": replace(measured(9.0), error=3e-3)})
        targets = serving_targets(replace(report, cells=(worse, known, of_other)))
        found = [t for t in targets if t.what.startswith("error")]
        assert [(t.what, t.measured, t.met) for t in found] == [(f"error of {small.name}", ratio, met)]
