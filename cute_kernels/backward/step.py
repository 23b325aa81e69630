"""The small kernels on either side of a backward kernel, as data. Nothing here imports the DSL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cute_kernels.backward.word_order import WordOrder


class SteppedConfig(Protocol):
    """What the steps need of the config of a backward kernel, whatever GPU it is for."""

    @property
    def dtype(self) -> str: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def head_dim_v(self) -> int: ...

    @property
    def tile_m(self) -> int: ...

    @property
    def dq_parts(self) -> int: ...

    @property
    def dq_words(self) -> int: ...

    @property
    def dq_order(self) -> WordOrder: ...

    def step_name(self, step: str) -> str:
        """Of a step of this config: the same for two configs only where their machine code is."""


@dataclass(frozen=True)
class BackwardStep:
    """A small kernel on either side of the one of ``config``: "prepare" or "finish"."""

    step: str
    config: SteppedConfig

    def __post_init__(self) -> None:
        if self.step not in ("prepare", "finish"):
            raise ValueError(f"step is {self.step!r}, allowed: 'prepare' or 'finish'")

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels; whether the kernel between is causal makes no difference."""
        return self.config.step_name(self.step)


def steps_of(configs: Sequence[SteppedConfig]) -> tuple[BackwardStep, ...]:
    """The steps on either side of each kernel of ``configs``, each once."""
    steps = [BackwardStep(step, config) for step in ("prepare", "finish") for config in configs]
    return tuple({step.name: step for step in steps}.values())
