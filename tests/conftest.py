"""What all tests share. The ``gpu`` marker is declared, and left out by default, in pyproject.toml."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

YOUNG_OBJECTS = 50_000
"""How many new ones the garbage collector waits for, in place of 700: to trace a kernel makes a million."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need a GPU are not imported where none of them is wanted."""
    leave_out = collection_path == Path(__file__).parent / "gpu" and config.option.markexpr == "not gpu"
    return True if leave_out else None


def pytest_collection_finish() -> None:
    """What was imported and collected stays, and need not be looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


@pytest.fixture(autouse=True)
def fresh_notices() -> Iterator[None]:
    """Every test sees the warnings that a process gives once."""
    from hopper_attention.notices import warn_once

    warn_once.cache_clear()
    yield


@pytest.fixture(autouse=True)
def fresh_compilations() -> Iterator[None]:
    """No test is compiled as the ninth variant of a function, at which torch.compile gives up."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
