"""The benchmark of context parallelism, on two processes without a GPU: that each way runs, and what a report has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 300
BOTH = "forward + backward"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("report") / "short.json"
    launch = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    script = str(ROOT / "benchmarks" / "context_parallel.py"), "--short", "--rounds", "1", "--without-torch"
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launch, *script, "--json", str(out), "--commit", "none"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_each_way_is_timed_alone_and_in_a_row(report: dict[str, Any]) -> None:
    rows = {row["way"]: row for row in report["cells"]}
    ways = {way.rpartition(", ")[0] for way in rows if way.endswith(BOTH)}
    assert {"one GPU", "auto", "ring", "ulysses", "ulysses, heads at once", "auto, least memory"} <= ways
    for row in report["cells"]:
        assert row["seconds"] > 0 and row["seconds_in_a_row"] > 0 and row["host_seconds"] > 0
    for kind in (BOTH, "forward"):
        alone, auto = rows[f"one GPU, {kind}"], rows[f"auto, {kind}"]
        for key in ("", "_in_a_row"):
            expected = alone[f"seconds{key}"] / 2 / auto[f"seconds{key}"]
            assert auto[f"efficiency{key}"] == pytest.approx(expected, rel=0.01)
    assert rows["ulysses FP8, forward"]["over_16_bits"] > 0


def test_every_way_is_checked_against_float64(report: dict[str, Any]) -> None:
    exact = [row for row in report["errors"] if "from one GPU" not in row["way"]]
    assert {"auto", "ring", "ulysses", "one GPU FP8"} <= {row["way"] for row in exact}
    for row in exact:
        budget = 0.06 if "FP8" in row["way"] else 4e-3
        assert all(value < budget for key, value in row.items() if key.endswith("_error")), row
