"""Integer helpers that serve traced values and Python ints alike, so that host tests run the kernels' own formulas.

Traced division truncates where Python's floors: negative dividends must be clamped, or may round either way.
"""

from typing import Any

import cutlass


def minimum(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.min(a, b)


def maximum(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.max(a, b)


def ceil_div(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def divide(a: Any, b: Any) -> Any:
    """a // b, rounded down, of an a from 0 on and a b above 0: without signs, which would cost registers."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return cutlass.Int32(cutlass.Uint32(a) // cutlass.Uint32(b))
