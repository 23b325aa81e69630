"""Number formats of the kernels, as bits in NumPy arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def to_f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.uint32)
    # Of a number this does not overflow; NaN is replaced.
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@lru_cache(maxsize=1)
def e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    size = np.where(code & 127 == 127, np.nan, size)
    return np.where(code < 128, size, -size).astype(np.float32)


@lru_cache(maxsize=1)
def e4m3_sizes() -> np.ndarray:
    """Finite and not negative, in order."""
    return e4m3_values()[:127].astype(np.float64)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest, ties to even; saturates."""
    table = e4m3_sizes()
    size = np.fmin(np.abs(x), np.float32(448.0)).astype(np.float64)
    above = np.clip(np.searchsorted(table, size), 1, 126)
    low, high = table[above - 1], table[above]
    up = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    code = np.where(up, above, above - 1) | np.where(np.signbit(x), 128, 0)
    return np.where(np.isnan(x), 127, code).astype(np.uint16)


def widen(raw: np.ndarray, kind: str) -> np.ndarray:
    """Bytes (..., element) as float32."""
    if kind == "e4m3":
        return e4m3_values()[raw[..., 0]]
    bits = raw.view(np.uint16)[..., 0]
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)
