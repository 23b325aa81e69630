"""The page of what a call costs on the host, and the script whose figures it shows first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host_time, render
from hopper_attention.experiments.calls import (
    FIRST_KIND,
    HOST_KIND,
    JAX_KIND,
    MOST_US,
    host_targets,
    render_calls,
)
from hopper_attention.experiments.reports import dump_figures, load_figures

PLACE: dict[str, Any] = {"schema": 1, "date": "2026-11-22T20:00:00Z", "commit": "0123456789abcdef"}
MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def report(kind: str, **more: Any) -> dict[str, Any]:
    return {**PLACE, "kind": kind, "machine": MACHINE, "cores": 16, **more}


def host_report(**us: list[list[float]]) -> dict[str, Any]:
    return report(HOST_KIND, method="7 rounds", us=us)


def test_a_second_process_of_the_same_commit_is_added(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    first, second = host_report(backward=[[70.0, 66.0]]), host_report(backward=[[59.0, 58.0]])
    assert host_time.with_earlier(first, path) is first
    path.write_text(dump_figures(first))
    both = host_time.with_earlier(second, path)
    assert both["us"] == {"backward": [[70.0, 66.0], [59.0, 58.0]]}
    others = {
        "commit": "other",
        "machine": {**MACHINE, "gpu": "NVIDIA H100"},
        "cores": 8,
        "method": "9 rounds",
    }
    for key, value in others.items():
        assert host_time.with_earlier({**second, key: value}, path)["us"] == second["us"], key
    path.write_text(dump_figures(both))
    third = host_report(backward=[[80.0, 79.0]])
    assert host_time.with_earlier(third, path)["us"] == {"backward": [[59.0, 58.0], [80.0, 79.0]]}
    targets = {target.what: target for target in host_targets(load_figures(path.read_text(), HOST_KIND))}
    assert set(targets) == {f"host time, {call}" for call in MOST_US}
    target = targets.pop("host time, backward")
    assert (target.measured, target.met) == ("59.0 us", True)
    assert all((other.measured, other.met) == ("not measured", False) for other in targets.values())


def test_every_promise_is_about_a_call_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "DEVICE", "cpu")
    assert set(MOST_US) <= set(host_time.all_calls())


def test_the_page_has_the_reports_that_there_are() -> None:
    host = host_report(**{"forward, 16 bits": [[10.4, 9.8], [11.0, 10.2]], "packed backward": [[80.0, 79.0]]})
    text = render_calls({HOST_KIND: host})
    assert "| forward, 16 bits | 10.4 | 10.4, 11.0 | 9.8 | 10 |" in text
    assert "| packed backward | 80.0 | 80.0 | 79.0 | – |" in text
    assert "| host time, forward, 16 bits | <= 10 us | 10.4 us | no |" in text
    assert "JAX" not in text and "example" not in text

    us = {"torch": 10.0, "jax": 27.0}
    jax = report(
        JAX_KIND,
        host={"shape": [1, 128, 2, 128], "us": us, "jax over torch": 2.7},
        device={"shape": [4, 8192, 16, 128], "us": {"jax": 900.0}},
    )
    rows = [
        {"page": "README.md", "cold_s": 12.0, "warm_s": 6.25, "failed": ""},
        {"page": "docs/api.md", "cold_s": None, "warm_s": None, "failed": "no torch"},
    ]
    text = render_calls(
        {HOST_KIND: host, JAX_KIND: jax, FIRST_KIND: report(FIRST_KIND, limit_s=10.0, rows=rows)}
    )
    assert "| a jitted call in JAX over one in PyTorch | <= 1.5 | 2.70 | no |" in text
    assert "| jax | 27.0 | 900.0 |" in text and "| torch | 10.0 | – |" in text
    assert "| `README.md` | 12.0 | 6.2 | – |" in text
    assert "| first example of docs/api.md, warm | < 10 s | no torch | no |" in text
    assert "Nothing is installed" not in text
    alone = report(FIRST_KIND, limit_s=10.0, rows=rows, alone=True)
    assert "Nothing is installed but what the page asks for." in render_calls({FIRST_KIND: alone})
    kept = report(FIRST_KIND, limit_s=10.0, rows=rows, bytecode=True)
    assert "Python's bytecode of an earlier one." in render_calls({FIRST_KIND: kept})
    assert "bytecode" not in render_calls({FIRST_KIND: alone})


def test_the_page_says_what_of_a_backward_pass_is_torchs() -> None:
    threads = {"": (101.25, 65.0), ", in the calling thread": (55.5, 27.0)}
    us = {
        f"backward{of}{where}": [[x, x]]
        for where, pair in threads.items()
        for of, x in zip(("", " of nothing"), pair, strict=True)
    }
    assert (
        "A pass through a function that computes nothing takes 65.0 us, which leaves 36.2 of ours, and "
        "27.0 us in the calling thread, which leaves 28.5 of ours."
    ) in render_calls({HOST_KIND: host_report(**us)})


def test_the_page_is_rendered_from_a_committed_report(tmp_path: Path) -> None:
    """Beside what the repository has."""
    results, root = render.repository_root() / "benchmarks" / "results", tmp_path / "results"
    root.mkdir()
    for path in results.glob("*.json"):
        (root / path.name).symlink_to(path)
    name = root / f"{HOST_KIND}_{render.GPU}.json"
    name.unlink(missing_ok=True)
    name.write_text(json.dumps(host_report(backward=[[99.0, 98.0]])))
    pages = render.render(render.repository_root(), root)
    (text,) = (text for path, text in pages.items() if path.name == "host_time.md")
    assert "| host time, backward | <= 60 us | 99.0 us | no |" in text
