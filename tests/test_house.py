"""The rules of the house: who may import whom, how long a file may be, what is left behind. Texts: test_texts.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("python", "hopper", "cute_kernels", "tests", "benchmarks")
PROSE = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"))
BUILD = ("Makefile", "CMakeLists.txt", "pyproject.toml", ".pre-commit-config.yaml", ".ci/run")
REPORTS = tuple((ROOT / "benchmarks" / "results").rglob("*.json"))
MAX_LINES = 600


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert found, f"no Python files under {folders}"
    return sorted(found)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported_roots(path: Path) -> set[str]:
    """First component of every module that the file imports, at any depth of nesting."""
    roots = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.partition(".")[0])
    return roots


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("hopper", {"torch", "hopper_attention"}),
        ("cute_kernels", {"torch", "hopper_attention", "hopper"}),
        ("python", {"tests", "benchmarks"}),
    ],
)
def test_imports_run_one_way(folder: str, forbidden: set[str]) -> None:
    wrong = {name(path): sorted(imported_roots(path) & forbidden) for path in python_files(folder)}
    assert {path: roots for path, roots in wrong.items() if roots} == {}


def test_imports_of_the_host_side_run_in_no_circle() -> None:
    paths = {dotted(path): path for path in python_files("python")}
    unsettled = {module: imported_modules(path, set(paths)) - {module} for module, path in paths.items()}
    # A module is settled once all that it imports is. What can never be stands in a circle, or imports from one.
    while settled := {module for module, wanted in unsettled.items() if not wanted}:
        unsettled = {m: wanted - settled for m, wanted in unsettled.items() if m not in settled}
    assert unsettled == {}


def dotted(path: Path) -> str:
    """The name that a module under python/ is imported by."""
    parts = path.relative_to(ROOT / "python").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, known: set[str]) -> set[str]:
    """Which of the ``known`` modules the file imports, at any depth of nesting."""
    modules = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # Of a package from which a module is taken, only that module counts.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= inner if inner <= known else {node.module} | inner
    return modules & known


def test_one_thin_adapter_touches_the_dsl_from_the_host_side() -> None:
    users = [name(path) for path in python_files("python") if "cutlass" in imported_roots(path)]
    assert len(users) <= 1, users


def uses_cute_struct(path: Path) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "struct" for node in ast.walk(tree(path)))


def test_structs_of_shared_memory_have_real_annotations() -> None:
    # cute.struct reads the annotation objects of a class body; postponed annotations are only strings to it.
    files = [path for path in python_files("hopper", "cute_kernels") if uses_cute_struct(path)]
    postponed = [name(path) for path in files if "annotations" in future_imports(path)]
    assert postponed == []


def future_imports(path: Path) -> set[str]:
    nodes = [n for n in tree(path).body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    return {alias.name for node in nodes for alias in node.names}


def test_a_file_is_one_room() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in python_files(*CODE_FOLDERS)}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [name(path) for path in python_files("python", "hopper", "cute_kernels") if not docstring(path)]
    assert silent == []


def docstring(path: Path) -> str:
    return ast.get_docstring(tree(path)) or ""


def texts() -> Iterator[tuple[str, str]]:
    for path in [*python_files(*CODE_FOLDERS), *PROSE, *REPORTS, *(ROOT / other for other in BUILD)]:
        if path != Path(__file__).resolve():
            yield name(path), path.read_text()


LEFT_OVERS = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(home|root|work|opt|Users|mnt)/")
LINKS = re.compile(r"https?://([\w.-]+)")
KNOWN_HOSTS = {"arxiv.org", "github.com", "keepachangelog.com", "semver.org", "docs.nvidia.com"}


def test_nothing_is_left_over() -> None:
    assert [where for where, text in texts() if LEFT_OVERS.search(text)] == []


def test_no_file_knows_a_particular_machine_or_host() -> None:
    assert [where for where, text in texts() if MACHINE_PATHS.search(text)] == []
    strange = {where: sorted(set(LINKS.findall(text)) - KNOWN_HOSTS) for where, text in texts()}
    assert {where: hosts for where, hosts in strange.items() if hosts} == {}


def test_version_is_the_same_everywhere() -> None:
    package = re.search(r'^version = "([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    newest = re.search(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert package and newest and newest[1] == package[1]
