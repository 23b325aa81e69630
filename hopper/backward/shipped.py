"""The backward kernels that are shipped, as data."""

from __future__ import annotations

from cute_kernels.backward.step import BackwardStep, steps_of
from cute_kernels.problem import DTYPES
from hopper.backward.config import NATIVE_HEAD_DIMS, BackwardConfig, select_backward_config


def shipped_backward_configs() -> tuple[BackwardConfig, ...]:
    """Every config of dense problems with plain scores and the head_dims that have kernels of their own, each once."""
    return tuple(
        select_backward_config(dtype, size, size, causal, ordered)
        for dtype in DTYPES
        for size in NATIVE_HEAD_DIMS
        for causal in (False, True)
        for ordered in (False, True)
    )


def shipped_backward_kernels() -> tuple[BackwardConfig | BackwardStep, ...]:
    """All that a backward pass launches: the shipped configs, and the steps on either side of each, each once."""
    configs = shipped_backward_configs()
    return *configs, *steps_of(configs)
