"""Number formats of the kernels, as bits in NumPy arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def to_f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Of float32, rounded to bfloat16: the bits, in the upper half of a word whose lower half is anything."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    # Of a number this does not overflow; NaN is replaced.
    rounded = bits + (bits >> SIXTEEN & ONE) + BELOW_HALF
    is_nan = np.isnan(x)
    return np.where(is_nan, BF16_NAN, rounded) if is_nan.tobytes().strip(b"\0") else rounded


SIXTEEN, ONE, BELOW_HALF, BF16_NAN = map(np.uint32, (16, 1, 0x7FFF, 0x7FFF0000))


def to_bf16(x: np.ndarray) -> np.ndarray:
    return (bf16_bits(x) >> SIXTEEN).astype(np.uint16)


def in_halves(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The lower 16 bits of both, as words."""
    words = np.empty((*high.shape, 2), np.uint16)
    words[..., 0], words[..., 1] = low, high
    return words.view(np.uint32)[..., 0]


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
    """Of float32: nearest, ties to even; saturates."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    # What is left out makes the last bit that is kept odd: 8 bits of a significand then decide as 24 do.
    kept = bits >> SIXTEEN | ((bits & LOWER_HALF) != 0)
    return _e4m3_by_upper_half()[kept]


LOWER_HALF = np.uint32(0xFFFF)


def e4m3_of_halves(x: np.ndarray) -> np.ndarray:
    """Of pairs of float16, as pairs of codes."""
    return _e4m3_by_half()[x.view(np.uint16)].view(np.uint16)


def halves_of_e4m3(pairs: np.ndarray) -> np.ndarray:
    """Of pairs of codes, as pairs of float16 in words."""
    return _halves_by_e4m3()[pairs.view(np.uint8)].view(np.uint32)


@lru_cache(maxsize=1)
def _e4m3_by_upper_half() -> np.ndarray:
    return nearest_e4m3((np.arange(2**16, dtype=np.uint32) << SIXTEEN).view(np.float32))


@lru_cache(maxsize=1)
def _e4m3_by_half() -> np.ndarray:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return nearest_e4m3(halves.astype(np.float32)).astype(np.uint8)


@lru_cache(maxsize=1)
def _halves_by_e4m3() -> np.ndarray:
    return e4m3_values().astype(np.float16)


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """By the definition: the nearest value, of two the one with an even code; saturates."""
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
    return from_half(raw.view(np.uint16)[..., 0], kind)


def from_half(bits: np.ndarray, kind: str) -> np.ndarray:
    """Numbers of 16 bits as float32."""
    return from_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)
