"""Reads the operands of PTX instructions."""

from __future__ import annotations

from functools import cache

import numpy as np


def operands_of(rest: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    if "{" not in rest:
        return [part for part in map(str.strip, rest.split(",")) if part]
    parts, depth = [""], 0
    for character in rest:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


@cache
def dtype_of(suffix: str) -> type:
    if suffix == "pred":
        return np.bool_
    kind = {"f": "f", "s": "i", "u": "u", "b": "u"}[suffix[0]]
    return np.dtype(f"{kind}{int(suffix[1:]) // 8}").type


def address_of(text: str) -> tuple[str, int]:
    base, _, offset = text.strip("[] ").partition("+")
    return base, int(offset or "0", 0)
