"""The CPU that tests are for; kernels that are asked for on a GPU by name, and remember their calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without AMX, on which an output has the same bits whether there is an LSE or gradients beside it or not.
    With AMX it is made in bfloat16 where it is alone; tests of that ask for it."""
    from hopper_attention.sdpa import attention, operators, products

    for module in (attention, operators, products):
        monkeypatch.setattr(module, "has_tiles", lambda: False)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Configs of dense kernels, and what they are called with, on a Hopper GPU by name."""
    from hopper_attention import compile_cache
    from hopper_attention.launch import backward, forward
    from tests.python.fake_gpu import forget_launchers, pretend

    calls: list[tuple[Any, tuple[Any, ...]]] = []
    pretend(monkeypatch, forward, backward)
    for name in ("get_forward", "get_backward"):
        monkeypatch.setattr(compile_cache, name, lambda config: lambda *a: calls.append((config, a)))
    yield calls
    forget_launchers()
