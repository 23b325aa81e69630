"""What tests of FP8 have in common: errors, sides by name, and kernels that note what they are called with."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention import compile_cache
from tests.python.fake_gpu import forget_launchers, pretend


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def sides(window: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("window_left", "window_right"), window, strict=True))


class Recorder:
    """Notes what FP8 kernels are called with, and gives zeros."""

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []

    def get(self, config: Any) -> Any:
        if not isinstance(config, Fp8ForwardConfig):
            return lambda *arguments: None
        self.configs.append(config)
        return self

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        arguments[3].zero_()
        arguments[4].zero_()


def recorded(monkeypatch: pytest.MonkeyPatch, *kinds: ModuleType) -> Iterator[Recorder]:
    """For a fixture: a Hopper GPU by name for these launchers, whose kernels note their arguments."""
    found = Recorder()
    pretend(monkeypatch, *kinds)
    monkeypatch.setattr(compile_cache, "get_forward", found.get)
    yield found
    forget_launchers()
