"""Reads the operands of PTX instructions."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

OPERAND = re.compile(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,{\[])+")


def operands_of(rest: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    return [part for part in map(str.strip, OPERAND.findall(rest)) if part]


@cache
def dtype_of(suffix: str) -> type:
    if suffix == "pred":
        return np.bool_
    kind = {"f": "f", "s": "i", "u": "u", "b": "u"}[suffix[0]]
    return np.dtype(f"{kind}{int(suffix[1:]) // 8}").type


def address_of(text: str) -> tuple[str, int]:
    base, _, offset = text.strip("[] ").partition("+")
    return base, int(offset or "0", 0)
