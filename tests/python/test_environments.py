"""Environments with what a page installs and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("tomllib", reason="Python reads TOML from 3.11 on")

from benchmarks.environments import _link, make_environment, requirements_of
from benchmarks.first_results import PAGES, ROOT

PYPROJECT = ROOT / "pyproject.toml"


def names(page: Path) -> set[str]:
    return {requirement.name for requirement in requirements_of(page, PYPROJECT)}


def test_a_page_asks_for_the_package_its_extra_and_what_it_names_beside(tmp_path: Path) -> None:
    bare = tmp_path / "bare.md"
    bare.write_text("# No install\n")
    core = names(bare)
    assert {"torch", "nvidia-cutlass-dsl", "apache-tvm-ffi"} <= core
    assert "transformers" not in core and "jax" not in core
    found = {page: names(ROOT / page) - core for page in PAGES}
    assert found["docs/integrations/transformers.md"] == {"transformers"}
    assert found["docs/integrations/diffusers.md"] == {"diffusers", "transformers", "accelerate"}
    assert found["docs/integrations/jax.md"] == {"jax", "jax-tvm-ffi"}
    assert found["docs/quickstart.md"] == {"typer", "rich"}
    assert found["docs/api.md"] == found["docs/serving.md"] == set()
    jax = [x for x in requirements_of(ROOT / "docs/integrations/jax.md", PYPROJECT) if x.extras]
    assert [(x.name, x.extras) for x in jax] == [("nvidia-cutlass-dsl", {"cu13"}), ("jax", {"cuda13"})]


def test_an_environment_has_what_is_needed_and_nothing_else(tmp_path: Path) -> None:
    wanted = [Requirement("rich>=13"), Requirement("nobody-has-this")]
    python, missing = make_environment(tmp_path / "environment", wanted)
    assert missing == ["nobody-has-this"]
    program = (
        "import rich, pygments, importlib.util, importlib.metadata as m; "
        "print(m.version('rich')); print([importlib.util.find_spec(x) for x in ('pytest', 'torch')])"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, env={}, check=True)
    assert done.stdout.splitlines()[1] == "[None, None]"


def test_packages_that_share_a_folder_are_both_in_it(tmp_path: Path) -> None:
    for source, name in (("one", "a"), ("two", "b")):
        (tmp_path / source / "shared" / name).mkdir(parents=True)
        (tmp_path / source / "shared" / name / "file.py").write_text(f"which = {name!r}\n")
    folder = tmp_path / "packages"
    folder.mkdir()
    for source, name in (("one", "a"), ("two", "b"), ("one", "a")):
        _link(folder, tmp_path / source, ("shared", name, "file.py"))
        _link(folder, tmp_path / source, ("..", "bin", "program"))
    assert sorted(x.name for x in folder.iterdir()) == ["shared"]
    for name in "ab":
        assert (folder / "shared" / name / "file.py").read_text() == f"which = {name!r}\n"


@pytest.mark.parametrize("page", PAGES)
def test_every_page_says_what_it_needs(page: str) -> None:
    assert names(ROOT / page)
