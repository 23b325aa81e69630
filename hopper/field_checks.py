"""Checks of fields of a ``ForwardConfig`` that go with others. Each raises ValueError naming the field."""

from typing import Any

GROUPS = range(2, 65)
"""Query heads that a tile may have as rows: no more than the 64 rows of a warpgroup."""


def check_used_columns(config: Any) -> None:
    """Both are given or none is."""
    c = config
    if bool(c.used_head_dim) != bool(c.used_head_dim_v):
        raise ValueError(
            f"used_head_dim is {c.used_head_dim} and used_head_dim_v {c.used_head_dim_v}, allowed: both 0, or both more"
        )
    for name, step in zip(("head_dim", "head_dim_v"), c.used_steps, strict=True):
        used, of_tile = getattr(c, f"used_{name}"), getattr(c, name)
        if used % step or not 0 <= used <= of_tile:
            raise ValueError(f"used_{name} is {used}, allowed: multiples of {step} up to {name}, {of_tile}")


def check_group(config: Any) -> None:
    """Rows of several heads take no slopes, words of dropout or, in 16 bits, sinks, which differ by head. In 16 bits
    parts take no window."""
    c = config
    if c.split and not c.pipelined:
        raise ValueError("split is True, allowed where nothing is pipelined: False")
    if c.split and c.window and c.element_bytes == 2:
        raise ValueError("split is True, allowed with a window in 16 bits: False")
    if c.group == 1 and not c.split:
        return
    by_head = c.alibi or (c.sinks and c.element_bytes == 2) or c.dropout or c.functions or c.block_lists
    is_known = c.takes_groups and c.warp_specialized
    if c.group not in (1, *GROUPS) or by_head or c.few_keys or not is_known:
        raise ValueError(
            f"group is {c.group} and split {c.split}, allowed: 1 and False, or without few_keys and what is "
            f"done to scores by head 1 to {GROUPS[-1]} and either; of e4m3 where each block takes its "
            "maximum, and with the layout 'varlen' lone_scales"
        )
