"""The script that times decoding by what shares a scale of its cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cache_scales
from hopper_attention.experiments.bench.timing import Effort

ONCE = Effort(measure_s=1e-6, min_rounds=1, max_rounds=1)


def test_a_report_names_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows a size: four kinds of scales, each without and with a new token, two of these with a Hadamard matrix."""
    monkeypatch.setattr(cache_scales, "HEADS", 2)
    monkeypatch.setattr(cache_scales, "KV_HEADS", 1)
    out = tmp_path / "scales.json"
    rows = cache_scales.main(["--device=cpu", "--sizes=1x1", "--commit=abc", f"--out={out}"], ONCE)
    report = json.loads(out.read_text())
    assert (report["kind"], report["commit"], len(report["rows"])) == ("cache_scales", "abc", 10)
    assert "torch" in report["machine"] and report["method"].startswith("1 rounds")
    assert all(row.us > 0 for row in rows)
    assert {row.scales for row in rows} == set(cache_scales.KINDS)


def test_a_kind_that_gives_other_results_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cache_scales.scales_of

    def wrong(kind: str, batch: int, pages: int, device: str) -> object:
        return plain(kind, batch, pages, device) * (2 if kind == cache_scales.BY_PAGE else 1)

    monkeypatch.setattr(cache_scales, "scales_of", wrong)
    monkeypatch.setattr(cache_scales, "HEADS", 2)
    monkeypatch.setattr(cache_scales, "KV_HEADS", 1)
    with pytest.raises(AssertionError, match="scales by page"):
        cache_scales.check(cache_scales.launches_of(1, 128, "cpu"))
