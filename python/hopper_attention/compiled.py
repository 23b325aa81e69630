"""What torch.compile is told about functions, put off until it is there.

``torch.compiler.disable`` and its like import torch._dynamo, which takes longer than all of this package. Most programs
that import this package never compile; those that do get told when torch._dynamo has been imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

COMPILER = "torch._dynamo"


class AfterImport(MetaPathFinder):
    """Calls ``actions`` once a module has been imported."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actions: list[Callable[[], object]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            for act in self.actions:
                act()

        # This one loader is told what to do besides; mypy takes a method for what nobody may replace.
        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec

    def then(self, act: Callable[[], object]) -> None:
        """Call ``act`` when the module is there, at once if it is."""
        if self.name in sys.modules and self not in sys.meta_path:
            act()
            return
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self.actions.append(act)


AFTER_COMPILER = AfterImport(COMPILER)


def disable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``torch.compiler.disable``: torch.compile calls ``function``, and does not look into it."""
    current = [function]

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return current[0](*args, **kwargs)

    AFTER_COMPILER.then(lambda: current.__setitem__(0, torch.compiler.disable(function)))
    return run


def allow_in_graph(function: Callable[Arguments, Result]) -> list[Callable[Arguments, Result]]:
    """``torch.compiler.allow_in_graph`` of a function that is disabled: a graph may have calls of it.

    It is the one element of what is returned, to be called from there: torch.compile would look into any other function
    that calls it, and put the call into a graph where there is none yet.
    """
    current = [function]

    def replace() -> None:
        current[0] = torch.compiler.allow_in_graph(torch.compiler.disable(function))

    AFTER_COMPILER.then(replace)
    return current


def assume_constant_result(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``torch.compiler.assume_constant_result``: torch.compile calls ``function`` once, and keeps the result."""
    AFTER_COMPILER.then(lambda: torch.compiler.assume_constant_result(function))
    return function
