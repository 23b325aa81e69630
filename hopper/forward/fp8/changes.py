"""What FP8 kernels do beside a causal mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hopper.forward.fp8.config import Fp8ForwardConfig

MORE_IN_A_WINDOW = 3
"""Tiles are chosen by the most keys that a query sees. In a window nearly all queries see that many, under a causal
mask alone half as many by the mean: so a window counts as having 1/3 more (`fp8_packed_windows.json`)."""


@dataclass(frozen=True)
class Changes:
    """What a kernel does beside a causal mask; the fields of its config."""

    window: bool = False
    chunk: bool = False
    softcap: bool = False
    sinks: bool = False

    def of(self, config: Fp8ForwardConfig) -> Fp8ForwardConfig:
        """``config`` with these."""
        return replace(config, window=self.window, chunk=self.chunk, softcap=self.softcap, sinks=self.sinks)


NO_CHANGES = Changes()
