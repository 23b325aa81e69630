"""The page of another GPU, from the reports that are committed of one."""

from __future__ import annotations

import math
import re

import pytest

from benchmarks.render import OTHER_GPUS, read_features, read_serving, read_throughput
from hopper_attention.experiments.bench.machine import repository_root
from hopper_attention.experiments.other_gpu import render_other_gpu

RESULTS = repository_root() / "benchmarks" / "results"


@pytest.mark.parametrize("gpu", OTHER_GPUS)
def test_a_page_has_ratios_and_no_promise_of_another_gpu(gpu: str) -> None:
    name, _ = OTHER_GPUS[gpu]
    reports, features = read_throughput(RESULTS, gpu), read_features(RESULTS, gpu)
    servings = read_serving(RESULTS, gpu)
    text = render_other_gpu(name, reports, features, servings)
    assert text.startswith(f"# On an {name}\n")
    assert [report.kind for report in reports] == ["forward", "fp8", "backward"]
    assert text.count("\nMeasured ") == 5 and text.count(f"NVIDIA {name}") >= 5
    for report in (*features, *servings):
        logs = [math.log(cell.ratio) for cell in report.cells if not math.isnan(cell.ratio)]
        mean = math.exp(sum(logs) / len(logs))
        assert f"Geometric mean of the ratios: **{mean:.3f}** of {len(logs)} workloads." in text
    promises = re.findall(r"^\| (\S.*?) \| ([<>]= .*?) \|", text, re.MULTILINE)
    assert any(required == ">= 1.00" for _, required in promises)
    assert not any(re.fullmatch(r"<= [\d.]+ us", required) for _, required in promises)
    assert not any(what.startswith("host time") for what, _ in promises)


def test_a_page_without_reports_has_no_tables() -> None:
    assert "|" not in render_other_gpu("H100", [], [], [])
