"""Functions for score and mask functions: of the values that one is traced with, of tensors, and of plain numbers.

    from hopper_attention import flash_attn_func, mods

    def soft_cap(score, b, h, q_idx, kv_idx):
        return 20.0 * mods.tanh(score / 20.0)

    out = flash_attn_func(q, k, v, score_mod=soft_cap)

torch's functions of the same names serve as well, but for plain numbers among their arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from hopper_attention.tracing import first_value, is_traced

__all__ = [
    "abs",
    "exp",
    "exp2",
    "floor",
    "log",
    "log2",
    "maximum",
    "minimum",
    "rsqrt",
    "sigmoid",
    "sqrt",
    "tanh",
    "where",
]

OF_ANY_KIND = ("abs", "floor", "maximum", "minimum", "where")
"""Functions of integers too; others make floats of them."""


def _is_wide(name: str, x: Any) -> bool:
    """Whether a function takes this number for a float."""
    return isinstance(x, float) or name not in OF_ANY_KIND


def _call(name: str, *values: Any) -> Any:
    if is_traced(values):
        return first_value(values).trace.call(name, values, {})
    device = next((x.device for x in values if isinstance(x, torch.Tensor)), None)
    if device is None:
        # A tensor would be one that the functions read, and on a CPU. Numbers are Python's: of 64 bits.
        wide = (torch.tensor(x, dtype=torch.float64 if _is_wide(name, x) else None) for x in values)
        return getattr(torch, name)(*wide).item()
    return getattr(torch, name)(*(torch.as_tensor(x, device=device) for x in values))


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition, a truth value, holds, else ``b``."""
    return _call("where", condition, a, b)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent of x, a float."""
    return _call("tanh", x)


def exp(x: Any) -> Any:
    """e to the power of x, a float."""
    return _call("exp", x)


def exp2(x: Any) -> Any:
    """2 to the power of x, a float."""
    return _call("exp2", x)


def log(x: Any) -> Any:
    """The natural logarithm of x, a float; NaN below 0, -inf at 0."""
    return _call("log", x)


def log2(x: Any) -> Any:
    """The logarithm of x to the base 2, a float; NaN below 0, -inf at 0."""
    return _call("log2", x)


def sqrt(x: Any) -> Any:
    """The square root of x, a float; NaN below 0."""
    return _call("sqrt", x)


def rsqrt(x: Any) -> Any:
    """1 over the square root of x, a float; NaN below 0, inf at 0."""
    return _call("rsqrt", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), a float."""
    return _call("sigmoid", x)


def floor(x: Any) -> Any:
    """The largest whole number that is not above x, of the kind of x."""
    return _call("floor", x)


def abs(x: Any) -> Any:
    """x without its sign, of the kind of x."""
    return _call("abs", x)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of a and b: a float where one of them is, else an integer or, of two truth values, one."""
    return _call("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of a and b, of the kind that ``minimum`` gives."""
    return _call("maximum", a, b)
