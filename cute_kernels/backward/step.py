"""The small kernels on either side of a backward kernel, as data. Nothing here imports the DSL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cute_kernels.backward.word_order import WordOrder
from cute_kernels.problem import MAX_SEQLEN

MAX_BATCH_OR_HEADS = 65_535
"""What the second and third dimension of a CUDA grid can count; the first counts tiles, up to 2^31."""


SCHEDULER_WORDS = 2
"""int32 of a counter in which a kernel shares out its tiles; what else it counts lies behind them."""

CLEARING_WORDS = 2
"""Those behind them where a kernel clears sums itself: shares that are claimed, and that are clear."""

CLAIMED_SHARES, CLEARED_SHARES = SCHEDULER_WORDS, SCHEDULER_WORDS + 1


NUMBERS_OF_A_PLACE = 3
"""Of a key tile that ``divides_visits``: n_block, head of K and V, batch."""

FEW_KEYS = 16
"""Keys of a sequence that lie in one warp of a Hopper kernel, which can add up delta from P and dP by itself."""


class SteppedConfig(Protocol):
    """What the steps need of the config of a backward kernel, whatever GPU it is for."""

    @property
    def dtype(self) -> str: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def head_dim_v(self) -> int: ...

    @property
    def layout(self) -> str: ...

    @property
    def tile_m(self) -> int: ...

    @property
    def dq_parts(self) -> int: ...

    @property
    def dq_words(self) -> int: ...

    @property
    def clears_ahead(self) -> bool: ...

    @property
    def few_keys(self) -> bool: ...

    @property
    def stores_first(self) -> bool: ...

    @property
    def divides_heads(self) -> bool: ...

    @property
    def divides_visits(self) -> bool: ...

    @property
    def dq_order(self) -> WordOrder: ...

    def step_name(self, step: str) -> str:
        """Of a step of this config: the same for two configs only where their machine code is."""


class DividedConfig(SteppedConfig, Protocol):
    """The same of a kernel that ``divides_heads`` or ``divides_visits``, for dK and dV."""

    @property
    def tile_n(self) -> int: ...

    @property
    def dk_words(self) -> int: ...

    @property
    def dk_order(self) -> WordOrder: ...


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


def check_step_size(kernel: str, sizes: tuple[int, int], seqlens: tuple[int, int]) -> None:
    """Raise NotImplementedError for sizes that the grids of the steps cannot count, or the rows and keys of a kernel.

    ``sizes`` are batch and heads, ``seqlens`` those of Q and K; ``kernel`` is the one between the steps, as the
    message calls it.
    """
    for name, size in zip(("batch", "heads"), sizes, strict=True):
        if size > MAX_BATCH_OR_HEADS:
            raise NotImplementedError(
                f"{name} is {size}, the {kernel} takes at most {MAX_BATCH_OR_HEADS}: split it"
            )
    for name, size in zip(("seqlen_q", "seqlen_k"), seqlens, strict=True):
        if size > MAX_SEQLEN:
            raise NotImplementedError(f"{name} is {size}, the {kernel} takes at most {MAX_SEQLEN}")


def steps_of(configs: Sequence[SteppedConfig]) -> tuple[BackwardStep, ...]:
    """The steps on either side of each kernel of ``configs``, each once."""
    steps = [BackwardStep(step, config) for step in ("prepare", "finish") for config in configs]
    return tuple({step.name: step for step in steps}.values())
