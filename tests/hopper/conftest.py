"""What tests on simulated machine code share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hopper import on_numpy


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file() -> Iterator[None]:
    """Those of other files are let go: each has some ten thousand objects, through which every full collection of
    garbage goes, and tests of benchmarks ask for many of these."""
    yield
    on_numpy.program_of.cache_clear()
