"""What ptxas makes of configs: from the record of all shipped kernels where that holds, else compiled side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hopper.compile import module_of
from hopper.inspection import ResourceUsage
from tests.shipped_usage import compile_each, fingerprint, recorded

OF_EACH_SAMPLE = 100
"""Of so many recorded kernels, or fewer, one is compiled again."""


def usage_of_each(configs: Sequence[Any]) -> dict[Any, ResourceUsage]:
    """By config. What is recorded and compiled nevertheless must be as recorded."""
    known = recorded(configs)
    again = sample([c for c in configs if c.name in known])
    compiled = compile_each([c for c in configs if c.name not in known or c in again])
    for config, usage in compiled.items():
        was = known.get(config.name, usage)
        assert usage == was, f"{config.name}: recorded {was}, compiled {usage}; see tests/shipped_usage.py"
    return {config: compiled.get(config) or known[config.name] for config in configs}


def sample(configs: Sequence[Any]) -> list[Any]:
    """Some of them, others with each change of the sources."""
    return sorted(configs, key=_drawn)[: -(-len(configs) // OF_EACH_SAMPLE)]


def _drawn(config: Any) -> bytes:
    return hashlib.sha256(f"{fingerprint(module_of(config))} {config.name}".encode()).digest()
