"""What prepares the kernels of GPU tests, run without a GPU: it names kernels that there are, by rules as they are."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hopper_attention import compile_cache

MODULES = sorted(path.stem for path in (Path(__file__).parent / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_kernels_are_named_that_there_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that takes something else since would raise on a GPU alone."""
    named: list[Any] = []

    def compile_all(configs: tuple[Any, ...], jobs: int) -> list[Any]:
        named.extend(configs)
        return []

    monkeypatch.setattr(compile_cache, "compile_all", compile_all)
    fixture = getattr(import_module(f"tests.gpu.{name}"), "compiled_kernels", None)
    if fixture is None:
        return
    prepare = inspect.unwrap(fixture)
    assert prepare is not fixture and not inspect.signature(prepare).parameters
    prepare()
    assert len({config.name for config in named}) == len(named)
