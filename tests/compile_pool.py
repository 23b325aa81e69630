"""What ptxas makes of configs: from the record of all shipped kernels where that holds, else compiled side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from hopper.compile import module_of
from hopper.inspection import ResourceUsage, resource_usage
from tests.shipped_usage import compile_each, fingerprint, recorded
from tests.store import kept

OF_EACH_SAMPLE = 100
"""Of so many recorded kernels one is compiled again, on average."""

COMPILED_AGAIN = 6
"""How often at most one that is not as recorded is compiled."""


def usage_of_each(configs: Sequence[Any]) -> dict[Any, ResourceUsage]:
    """By config. What is recorded and compiled nevertheless must be as recorded."""
    known = recorded(configs)
    again = sample([c for c in configs if c.name in known])
    compiled = compile_each([c for c in configs if c.name not in known or c in again], compile_one=kept_usage)
    for config, usage in compiled.items():
        was = known.get(config.name, usage)
        is_as_recorded = usage == was or may_be_compiled_as(config, usage, was)
        assert is_as_recorded, f"{config.name}: recorded {was}, compiled {usage}; see tests/shipped_usage.py"
    return {config: compiled.get(config) or known[config.name] for config in configs}


def may_be_compiled_as(config: Any, usage: ResourceUsage, was: ResourceUsage) -> bool:
    """Whether what has another machine code than it ``was``, and else the same ``usage``, has that code too: some FP8
    kernels of head_dim 64 with keys in parts have one of two, by chance."""
    is_other_code = replace(usage, code=was.code) == was
    return is_other_code and any(resource_usage(config) == was for _ in range(COMPILED_AGAIN))


def assert_small(configs: Sequence[Any]) -> None:
    """That kernels which only move data keep all that they have in few registers."""
    for config, usage in usage_of_each(configs).items():
        assert usage.local_bytes == 0, config.name
        assert usage.registers <= 64, config.name


def kept_usage(config: Any) -> ResourceUsage:
    """Compiled once for all workers and runs of the tests."""
    text = kept("usage", config, lambda c: json.dumps(astuple(resource_usage(c))))
    return ResourceUsage(*json.loads(text))


def sample(configs: Sequence[Any]) -> list[Any]:
    """Some of them, each drawn by itself, others with each change of the sources."""
    return [config for config in configs if _drawn(config) % OF_EACH_SAMPLE == 0]


def _drawn(config: Any) -> int:
    digest = hashlib.sha256(f"{fingerprint(module_of(config))} {config.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
