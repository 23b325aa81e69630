"""The script that times the first example of each page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import first_results


def test_the_first_example_of_a_page_is_timed(tmp_path: Path) -> None:
    """With the same cache in the warm run, which is the second; what fails says why."""
    grows = "\n".join(
        (
            "import os, time",
            "folder = os.environ['HOPPER_ATTENTION_CACHE_DIR']",
            "time.sleep(0.0 if os.path.isdir(folder) else 2.0)",
            "os.makedirs(folder, exist_ok=True)",
        )
    )
    pages = {
        "good": f"# A\n\n```python\n{grows}\n```\n\n```python\n1 / 0\n```\n",
        "bad": "```python\n1 / 0\n```\n",
    }
    for name, text in pages.items():
        (tmp_path / f"{name}.md").write_text(text)
    out = tmp_path / "first.json"
    paths = [str(tmp_path / f"{name}.md") for name in pages]
    good, bad = first_results.main([*paths, "--runs=1", f"--out={out}"])
    assert good.cold_s - good.warm_s > 1.0
    assert bad.failed == "ZeroDivisionError: division by zero"
    assert [row["page"] for row in json.loads(out.read_text())["rows"]] == ["good.md", "bad.md"]
    (warm,) = first_results.main([paths[0], "--runs=1", f"--warm={tmp_path}", f"--out={out}"])
    assert warm.cold_s is None and warm.warm_s < good.cold_s
    with pytest.raises(ValueError, match=r"empty.md has no block of Python, allowed: pages with an example"):
        (tmp_path / "empty.md").touch()
        first_results.main([str(tmp_path / "empty.md"), f"--out={out}"])


def test_all_pages_have_an_example() -> None:
    assert all(first_results.first_example(first_results.ROOT / name) for name in first_results.PAGES)
