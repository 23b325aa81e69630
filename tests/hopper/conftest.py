"""What tests on simulated machine code share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hopper import on_numpy


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file() -> Iterator[None]:
    """Programs of other files are let go: each has tens of thousands of objects, which every full collection of garbage
    looks through, and what runs benchmarks collects between any two of them."""
    yield
    on_numpy.program_of.cache_clear()
