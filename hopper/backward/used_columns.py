"""Columns of a backward tile that products leave out, where those behind a head dimension are known to be zeros."""

from __future__ import annotations

from typing import Any

from cute_kernels.problem import DENSE
from hopper.config import COLUMNS_PER_ATOM

SPILLING_IN_ORDER = 128
"""The head_dim of packed kernels with sums in a fixed order of which those without a mask would spill; both are left
alone."""

FEWEST_COLUMNS = 2 * COLUMNS_PER_ATOM
"""With one atom of columns the layout of a gradient would have a mode less."""


def leave_out_zeros(config: Any, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """``used_head_dim`` and ``used_head_dim_v`` of a ``BackwardConfig`` for these head dimensions, or zeros."""
    used, used_v = (
        max(-(-size // COLUMNS_PER_ATOM) * COLUMNS_PER_ATOM, FEWEST_COLUMNS)
        for size in (head_dim, head_dim_v)
    )
    is_whole = (used, used_v) == (config.head_dim, config.head_dim_v)
    return (0, 0) if is_whole or not can_leave_out_zeros(config) else (used, used_v)


def can_leave_out_zeros(config: Any) -> bool:
    """Whether a kernel can: one whose warpgroups have all columns of dK and dV. Not tried in a window and where scores
    are changed."""
    c = config
    is_changed = c.softcap or c.alibi or c.dropout or c.functions
    spills = c.ordered and c.layout != DENSE and c.head_dim == SPILLING_IN_ORDER
    return c.tile_columns == c.head_dim and not (is_changed or c.window or c.block_lists or spills)


def check_used_columns(config: Any) -> None:
    """Raise ValueError unless both are 0, or fit, and dQ that a kernel writes itself is as wide as its tile."""
    c = config
    if c.writes_dq and c.dq_columns < c.k_columns:
        raise ValueError(f"tile_m is {c.tile_m} in {c.name}, allowed with strips and one_tile: 64")
    if not (c.used_head_dim or c.used_head_dim_v):
        return
    for name, of_tile in (("used_head_dim", c.head_dim), ("used_head_dim_v", c.head_dim_v)):
        used = getattr(c, name)
        if used % COLUMNS_PER_ATOM or not FEWEST_COLUMNS <= used <= of_tile:
            allowed = f"multiples of {COLUMNS_PER_ATOM} from {FEWEST_COLUMNS} to {of_tile}, or both 0"
            raise ValueError(f"{name} is {used}, allowed: {allowed}")
    if not can_leave_out_zeros(c):
        allowed = "0 in a window, by lists, where scores are changed, in pairs of CTAs"
        of_order = f"and packed in a fixed order at head_dim {SPILLING_IN_ORDER}"
        raise ValueError(f"used_head_dim is {c.used_head_dim} in {c.name}, allowed: {allowed}, {of_order}")
