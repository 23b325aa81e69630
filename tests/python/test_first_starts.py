"""The script that takes the starts of a page's first example apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import first_starts
from benchmarks.first_starts import BYTECODE_FOLDER, NO_BYTECODE

EXAMPLE = """
import time

import only_here

time.sleep(0.3)
parts = [
    only_here.value,
]
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose example imports a module that no process has bytecode of, where none may be written."""
    (tmp_path / "only_here.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(NO_BYTECODE, "1")
    monkeypatch.delenv(BYTECODE_FOLDER, raising=False)
    page = tmp_path / "page.md"
    page.write_text(f"# A\n\n```python\n{EXAMPLE}```\n\n```python\n1 / 0\n```\n", encoding="utf-8")
    return page


def test_each_statement_of_each_start_is_timed(page: Path, tmp_path: Path) -> None:
    """Bytecode is there from the second start of its own folder on, and not where it may not be written."""
    out = tmp_path / "starts.json"
    found, fresh, second = first_starts.main(
        [str(page), "--starts", "found", "fresh", "second", f"--out={out}"]
    )
    names = ["import time", "import only_here", "time.sleep(0.3)", "parts = [only_here.value]"]
    for start in (found, fresh, second):
        assert not start.failed
        assert [name for name, _ in start.parts] == [*names, "(until the GPU is done)"]
        assert start.parts[2][1] >= 0.3 and start.again_s >= 0.3 and start.parts[0][1] < 0.3
        assert start.own_s >= 0.3 and start.loads == [0, 0]
        # The statement that was run once more is no part of the whole.
        assert start.own_s <= start.whole_s < start.own_s + start.again_s + 5.0
    assert not found.writes_bytecode and found.with_bytecode < found.modules
    assert fresh.writes_bytecode and second.with_bytecode == second.modules
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["variables"] == {NO_BYTECODE: "1", BYTECODE_FOLDER: ""} and not report["alone"]
    assert [row["start"] for row in report["rows"]] == ["found", "fresh", "second"]


def test_what_fails_says_why(page: Path, tmp_path: Path) -> None:
    page.write_text("```python\nimport time\n1 / 0\n```\n", encoding="utf-8")
    start, files = first_starts.start_page(str(page), "found", sys.executable, None, 60.0)
    assert start.failed == "ZeroDivisionError: division by zero" and not files
    page.write_text("```python\nimport time\ntime.sleep(9)\n```\n", encoding="utf-8")
    start, _ = first_starts.start_page(str(page), "found", sys.executable, None, 0.5)
    assert start.failed == "no result after 0 s"
    page.write_text("# A\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page.md has no block of Python, allowed: pages with an example"):
        first_starts.start_page(str(page), "found", sys.executable, None, 60.0)


def test_files_can_be_forgotten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("kept", encoding="utf-8")
    first_starts.forget([str(tmp_path / "a"), str(tmp_path / "missing")])
    assert (tmp_path / "a").read_text(encoding="utf-8") == "kept"
