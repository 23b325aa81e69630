"""Every program of the tutorial runs, page by page, and its drawings are those of their script."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorial"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run_in_order(page: Path) -> None:
    names: dict[str, Any] = {}
    for program in PROGRAM.findall(page.read_text()):
        exec(program, names)


def test_they_need_numpy_alone() -> None:
    imports = {
        name
        for page in PAGES
        for program in PROGRAM.findall(page.read_text())
        for name in re.findall(r"^(?:import|from) (\w+)", program, re.M)
    }
    assert imports == {"heapq", "numpy", "random"}


def test_the_drawings_are_those_of_their_script() -> None:
    drawn = runpy.run_path(str(FOLDER / "drawings.py"))["draw_all"]()
    assert {name: (FOLDER / name).read_text() for name in drawn} == drawn
    assert {path.name for path in FOLDER.glob("*.svg")} == set(drawn)


def test_each_page_leads_to_the_next() -> None:
    for page, following in pairwise(PAGES):
        assert f"]({following.name})" in page.read_text().partition("\n## ")[0]
