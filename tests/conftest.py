"""What all tests share. The ``gpu`` marker is declared, and left out by default, in pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh_notices() -> Iterator[None]:
    """Every test sees the warnings that a process gives once."""
    from hopper_attention.notices import warn_once

    warn_once.cache_clear()
    yield
