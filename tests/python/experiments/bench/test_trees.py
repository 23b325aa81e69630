"""Two checkouts in interleaved rounds: what is asked of the workers, and what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks import trees, trees_worker
from hopper_attention.experiments.bench.machine import NoGauge


class Worker:
    """Answers as a worker does, a microsecond times ``slowness`` a call."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, tree: Path) -> None:
        self.name, self.slowness = tree.name, {"old": 3.0, "new": 2.0}[tree.name]

    def terminate(self) -> None:
        Worker.asked.append((self.name, "terminate"))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    def ask(worker: Worker, line: str) -> float:
        Worker.asked.append((worker.name, line))
        return worker.slowness * 1e-6

    monkeypatch.setattr(Worker, "asked", [])
    monkeypatch.setattr(trees, "start_worker", Worker)
    monkeypatch.setattr(trees, "ask", ask)
    return Worker.asked


def test_every_cell_is_timed_in_turns(workers: list[tuple[str, str]]) -> None:
    cells = list(trees.list_cells(trees.KINDS, "bfloat16"))
    rows = trees.compare([Path("old"), Path("new")], cells, 3, NoGauge("no GPU"))
    assert len(rows) == 6 * 36 + 18 and {row["ratio"] for row in rows} == {1.5}
    assert (rows[0]["old_us"], rows[0]["new_us"], rows[0]["power_w"]) == (3.0, 2.0, None)
    # Both import, both prepare the first cell, then three rounds, the second the other way round.
    turns = [name for name, _ in Worker.asked[:10]]
    assert turns == ["old", "new", "old", "new", "old", "new", "new", "old", "old", "new"]
    assert json.loads(Worker.asked[2][1])["kind"] == "forward" and Worker.asked[4][1] == ""
    assert Worker.asked[-2:] == [("old", "terminate"), ("new", "terminate")]


def test_a_report_names_both_commits(
    workers: list[tuple[str, str]], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(trees, "find_gauge", lambda device: NoGauge("no GPU"))
    monkeypatch.setattr(trees, "describe_machine", lambda device, gauge: {"gpu": "none"})
    path = tmp_path / "report.json"
    assert trees.main(["old", "new", "--commits", "aaa", "bbb", "--rounds", "2", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["old"], report["new"], len(report["cells"])) == ("aaa", "bbb", 234)
    assert "backward: 36 cells, old over new 1.5000" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        trees.main(["old"])
    assert "allowed: two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seqlen", "head_dim", "expected"),
    [
        (512, 64, (32, 32)),
        (16_384, 128, (1, 16)),
        (65_536, 128, (1, 4)),
        (65_536, 256, (1, 2)),
        (2**20, 256, (1, 1)),
    ],
)
def test_what_a_cell_attends_to(seqlen: int, head_dim: int, expected: tuple[int, int]) -> None:
    """Of sequences longer than all tokens there is one, with fewer heads."""
    cell = next(trees.list_cells(("fp8",), "bfloat16", seqlens=(seqlen,)))
    problem = trees_worker.problem_of(cell | {"head_dim": head_dim})
    assert (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k) == (*expected, seqlen, seqlen)
    assert (problem.head_dim, problem.heads_kv) == (head_dim, expected[1])
