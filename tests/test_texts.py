"""What the texts promise: links lead somewhere, names and commands exist, figures are those of a committed report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"))
RESULTS = ROOT / "benchmarks" / "results"
MAX_README_LINES = 150

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^```.*?^```$", re.S | re.M)
HEADING = re.compile(r"^#+ (.*)$", re.M)
ROW_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return CODE_BLOCK.sub("", page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link may say behind ``#``: what GitHub makes of headings, and what a row of a table is given."""
    text = prose(page)
    titles = (LINK.sub("]", title).lower() for title in HEADING.findall(text))
    of_headings = (re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles)
    return frozenset((*of_headings, *ROW_ANCHOR.findall(text)))


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if link.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One title\n[a](#one-title) [b](#another) [c](gone.md) [d](page.md#one-title) [e](page.md#x)"
        '\n| <a id="row"></a>a row | [f](#row) |'
    )
    assert list(broken_links(page)) == ["#another", "gone.md", "page.md#x"]


def test_readme_can_be_read_in_one_sitting() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


def test_readme_lists_its_sections() -> None:
    text = README.read_text()
    contents, sections = text.partition("\n## ")[0], HEADING.findall(prose(README))[1:]
    linked = {link.removeprefix("#") for link in LINK.findall(contents)}
    assert len(sections) >= 5
    assert linked == anchors(README) - {HEADING.findall(text)[0]}


def test_every_page_of_the_documentation_is_in_its_list() -> None:
    docs = ROOT / "docs"
    listed = {(docs / link).resolve() for link in LINK.findall((docs / "README.md").read_text())}
    assert {page for page in docs.rglob("*.md") if page not in listed} == {docs / "README.md"}


def test_the_api_page_has_every_public_name_and_no_other() -> None:
    import hopper_attention

    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "api.md").read_text().partition("\n## ")[0], re.M)
    assert sorted(listed) == sorted(hopper_attention.__all__)


def test_the_make_targets_of_the_texts_exist() -> None:
    targets = {target for page in PAGES for target in re.findall(r"`make ([\w-]+)", page.read_text())}
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "lint", "bench"} <= targets <= rules


def test_the_commands_of_the_texts_exist() -> None:
    import typer

    from hopper_attention.cli import app

    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # a group has commands
    named = {name for page in PAGES for name in re.findall(r"`hopper-attention ([\w-]+)", page.read_text())}
    assert {"info", "bench", "ablation", "rmse"} <= named | commands
    assert named - commands == set()


def test_the_gate_runs_make_targets_that_the_readme_names() -> None:
    gate = ROOT / ".ci" / "run"
    assert os.access(gate, os.X_OK)
    targets = re.findall(r"^make (?:--silent )?([\w-]+)", gate.read_text(), re.M)
    assert targets == ["lint", "test"]
    assert all(f"`make {target}`" in README.read_text() for target in targets)


def test_rendered_results_are_those_of_the_committed_reports(capsys: pytest.CaptureFixture[str]) -> None:
    # Text only: a plot's bytes depend on the fonts of the machine that drew it.
    from benchmarks import render

    assert render.main(["--check", "--root", str(ROOT)]) == 0, capsys.readouterr().err


def test_every_development_report_is_named_somewhere() -> None:
    folders = ("python", "hopper", "cute_kernels", "benchmarks")
    sources = [*PAGES, *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    texts = "\n".join(path.read_text() for path in sources)
    reports = sorted(path.name for path in (RESULTS / "development").glob("*.json"))
    assert reports and [name for name in reports if name not in texts] == []


def test_every_report_that_a_page_names_exists() -> None:
    reports = {path.name for folder in (RESULTS, ROOT / "tests") for path in folder.rglob("*.json")}
    named = {name for page in PAGES for name in re.findall(r"[`\[/](\w+\.json)", prose(page))}
    assert "fp8_nvidia_h200.json" in named
    assert named - reports == set()
