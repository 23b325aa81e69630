"""What FP8 kernels do beside a causal mask."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hopper.forward.fp8.config import Fp8ForwardConfig

KEYS_IN_A_WINDOW = 2
"""So many times as many under a causal mask alone are as much work: there a query sees half of its keys by the mean, in
a window nearly all."""


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
