"""What all tests share. The ``gpu`` marker is declared, and left out by default, in pyproject.toml."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


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
