"""Which source files a kernel is made of: what decides whether something kept of it is still that of this source.

A kernel is made of the module that compiles it (``hopper.compile.module_of``) and of every module of ours that this one
imports, directly or not. So a change to the backward kernels leaves what is known of the forward kernels as it is.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

ROOTS = {name: Path(__file__).resolve().parents[1] / name for name in ("hopper", "cute_kernels")}
"""Our packages of kernel code, and where they lie."""

OUR_IMPORT = re.compile(
    rf"^ *from ((?:{'|'.join(ROOTS)})[\w.]*) import (\([^)]*\)|[^\n#]*)"
    rf"|^ *import ((?:{'|'.join(ROOTS)})[\w.]*)",
    re.MULTILINE,
)
"""An import of ours, also below the top of a file; a syntax tree would take longer than loading a kernel does."""


@lru_cache(maxsize=16)
def sources_of(module: str) -> dict[str, Path]:
    """The files of a module and of all that it reaches, by module name and in its order."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = path_of(name)
        if path is not None and name not in found:
            found[name] = path
            waiting += imported_by(path.read_text())
            # Importing a module runs the packages around it.
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return dict(sorted(found.items()))


def path_of(module: str) -> Path | None:
    """The file of a module of ours; None if there is no such module, as for a function of one."""
    package, *rest = module.split(".")
    path = ROOTS[package].joinpath(*rest)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def imported_by(source: str) -> list[str]:
    """What a file imports from our packages: modules, and names that may be modules."""
    modules: list[str] = []
    for package, names, module in OUR_IMPORT.findall(source):
        parts = [name.split()[0] for name in names.strip("()").split(",") if name.split()]
        modules += [module] if module else [package, *(f"{package}.{part}" for part in parts)]
    return modules
