"""What ptxas makes of configs: from the record of all shipped kernels where that holds, else compiled side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from hopper.compile import module_of
from hopper.inspection import ResourceUsage
from tests.shipped_usage import compile_each, fingerprint, recorded

SAMPLED = 32
"""Of so many recorded kernels one is compiled again, others with each change of the sources."""


def usage_of_each(configs: Sequence[Any]) -> dict[Any, ResourceUsage]:
    """By config. What is recorded and compiled nevertheless must be as recorded."""
    known = recorded()
    compiled = compile_each([c for c in configs if c.name not in known or is_sampled(c)])
    for config, usage in compiled.items():
        was = known.get(config.name, usage)
        assert usage == was, f"{config.name}: recorded {was}, compiled {usage}; see tests/shipped_usage.py"
    return {config: compiled.get(config) or known[config.name] for config in configs}


def is_sampled(config: Any) -> bool:
    drawn = hashlib.sha256(f"{fingerprint(module_of(config))} {config.name}".encode())
    return drawn.digest()[0] % SAMPLED == 0
