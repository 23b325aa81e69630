"""Virtual environments with what a page tells one to install and nothing else, out of links to what is installed here.

An import takes longer where more is installed: packages look for others, and import those that they find.
"""

from __future__ import annotations

import re
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INSTALL = re.compile(r"^pip install (.*?)(?:#.*)?$", re.M)
PROJECT = re.compile(r"\.(?:\[(.*)\])?")
"""The clone that one stands in, and its extras."""


def requirements_of(page: Path, pyproject: Path) -> list[Requirement]:
    """What a page's first ``pip install`` asks for, or that of a bare install where it has none."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    command = INSTALL.search(page.read_text(encoding="utf-8"))
    wanted = re.sub("['\"]", "", command[1]).split() if command else ["."]
    found = [Requirement(text) for text in project["dependencies"]]
    for text in wanted:
        of_project = PROJECT.fullmatch(text)
        if of_project is None:
            found.append(Requirement(text))
            continue
        extras = (of_project[1] or "").split(",")
        found += [
            Requirement(x) for extra in extras if extra for x in project["optional-dependencies"][extra]
        ]
    return found


def make_environment(folder: Path, requirements: list[Requirement]) -> tuple[Path, list[str]]:
    """Make one in ``folder``; returns its Python, and names of packages that it lacks as they are not here either."""
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    here: dict[str, Distribution] = {}
    for distribution in distributions():
        # The first of a name is the one that is imported.
        here.setdefault(canonicalize_name(distribution.metadata["Name"] or ""), distribution)
    missing = []
    for name in _closure(requirements, here):
        if name in here:
            for path in here[name].files or ():
                _link(packages, Path(here[name].locate_file("")), path.parts)
        else:
            missing.append(name)
    return folder / "bin" / "python", missing


def _closure(requirements: list[Requirement], here: dict[str, Distribution]) -> Iterator[str]:
    """Names of all that is needed, each once."""
    pending, seen = list(requirements), set()
    while pending:
        wanted = pending.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if not extra:
                yield name
            for text in (here[name].requires or ()) if name in here else ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    pending.append(needed)


def _link(folder: Path, source: Path, parts: tuple[str, ...]) -> None:
    """A link to the first folder of a path that no other package shares, else to the file itself."""
    if parts[0] in ("..", "bin", "__pycache__"):
        return
    own, there = folder / parts[0], source / parts[0]
    if own.is_symlink() and own.readlink() == there:
        return
    if own.is_symlink() and own.is_dir():
        # Two packages put files into one folder of a namespace.
        before = own.readlink()
        own.unlink()
        own.mkdir()
        for child in before.iterdir():
            (own / child.name).symlink_to(child)
    if own.is_dir() and len(parts) > 1:
        _link(own, there, parts[1:])
    elif not own.exists():
        own.symlink_to(there)
