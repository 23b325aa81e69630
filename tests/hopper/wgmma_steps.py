"""What a WGMMA does to a warp of ``hopper_machine``: 16 of the 64 rows of its result."""

from __future__ import annotations

import re
from functools import lru_cache
from operator import is_

import numpy as np

from tests.hopper.floats import widen
from tests.hopper.hopper_machine import LANES, SWIZZLE_BITS, Step, Warp, swizzled
from tests.hopper.ptx_text import operands_of

ROWS = 16
"""Of a warp."""

SWIZZLE_PERIOD = 1024
"""Bytes after which the pattern of every swizzle repeats."""


@lru_cache(maxsize=4096)
def _cells(
    low: int, leading: int, stride: int, bits: int, rows: range, depth: int, transposed: bool, width: int
) -> np.ndarray:
    """Where elements of ``width`` bytes of an operand lie that starts ``low`` bytes into a period: (rows, depth)."""
    row_bytes = 16 << bits
    r, k = np.meshgrid(rows, np.arange(depth), indexing="ij")
    if transposed:
        columns = row_bytes // width
        address = low + r // columns * leading + r % columns * width + k // 8 * stride + k % 8 * row_bytes
    else:
        address = low + r // 8 * stride + r % 8 * row_bytes + k * width
    return swizzled(address, bits) // width


def _matrix(warp: Warp, descriptor: int, rows: range, depth: int, transposed: bool, kind: str) -> np.ndarray:
    """Rows of an operand in shared memory, (rows, depth)."""
    width = 1 if kind == "e4m3" else 2
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    low = start % SWIZZLE_PERIOD
    cells = _cells(low, leading, stride, SWIZZLE_BITS[descriptor >> 62], rows, depth, transposed, width)
    return widen(as_bytes(warp.cta.read_async(cells + (start - low) // width, width)), kind)


def as_bytes(words: np.ndarray) -> np.ndarray:
    """(..., words) as (..., words, bytes of a word)."""
    return words.view(np.uint8).reshape(*words.shape, -1)


def add_products(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """What a WGMMA leaves in an accumulator that held ``total``: total + a b^T, in float32."""
    return total + a @ b.T


class _Sums:
    """The accumulator: ``columns // 2`` numbers of a lane, in registers of float32 or of two float16."""

    def __init__(self, registers: list[str], columns: int, are_floats: bool):
        self.registers, self.are_floats = registers, are_floats
        lane, i = np.arange(LANES), np.arange(columns // 2)[:, None]
        row, column = lane // 4 + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
        self.places = row * columns + column
        self.shape = ROWS, columns

    def read(self, warp: Warp) -> np.ndarray:
        held = list(map(warp.registers.get, self.registers))
        kept, total = warp.kept_sums.pop(id(held[0]), ((), None))
        if len(kept) == len(held) and all(map(is_, kept, held)):
            return total
        dtype = np.float32 if self.are_floats else np.uint32
        words = np.concatenate([warp.get(x, dtype) for x in self.registers]).reshape(-1, LANES)
        if not self.are_floats:
            halves = words.view(np.float16).reshape(len(self.registers), LANES, 2)
            words = halves.transpose(0, 2, 1).reshape(self.places.shape).astype(np.float32)
        total = np.empty(self.shape, np.float32)
        total.ravel()[self.places] = words
        return total

    def write(self, warp: Warp, total: np.ndarray) -> None:
        """Keep the matrix as well, for a product that adds to these very registers."""
        total = np.ascontiguousarray(total, np.float32)
        values = total.ravel()[self.places]
        if not self.are_floats:
            halves = values.astype(np.float16).reshape(len(self.registers), 2, LANES).transpose(0, 2, 1)
            words = list(np.ascontiguousarray(halves).view(np.uint32)[..., 0])
        else:
            words = list(values)
            if len(warp.kept_sums) == KEPT_SUMS:
                warp.kept_sums.clear()
            warp.kept_sums[id(words[0])] = words, total
        warp.registers.update(zip(self.registers, words, strict=True))


KEPT_SUMS = 8
"""Of a warp; what nobody adds to is forgotten with the rest."""


class _Rows:
    """The first operand in four registers of a lane: (16, depth)."""

    def __init__(self, registers: list[str], depth: int, kind: str):
        self.registers, self.kind, self.depth = registers, kind, depth
        per_word, lane, i = 4 if kind == "e4m3" else 2, np.arange(LANES)[:, None], np.arange(4)[:, None, None]
        row, k = lane // 4 + 8 * (i % 2), per_word * (lane % 4) + np.arange(per_word) + depth // 2 * (i // 2)
        self.places = row * depth + k

    def read(self, warp: Warp) -> np.ndarray:
        words = np.array([warp.get(x, np.uint32) for x in self.registers])
        a = np.empty((ROWS, self.depth), np.float32)
        a.ravel()[self.places] = widen(words.view(np.uint8).reshape(*self.places.shape, -1), self.kind)
        return a


def wgmma(name: str, ops: list[str]) -> Step:
    columns, depth = map(int, re.search(r"m64n(\d+)k(\d+)", name).groups())
    kind, sum_type = name.split(".")[-1], name.split(".")[-3]
    sums = _Sums(operands_of(ops[0].strip("{}")), columns, sum_type == "f32")
    in_registers = ops[1].startswith("{")
    in_lanes = _Rows(operands_of(ops[1].strip("{}")), depth, kind) if in_registers else None
    transposes = [bool(int(x)) for x in ops[4:][2:]]
    a_transposed = transposes[0] if len(transposes) == 2 else False
    b_transposed = transposes[-1] if transposes else False

    def multiply(warp: Warp, a_at: int, b_at: int, accumulates: bool) -> None:
        first = ROWS * (warp.number % 4)
        if in_lanes is not None:
            a = in_lanes.read(warp)
        else:
            a = _matrix(warp, a_at, range(first, first + ROWS), depth, a_transposed, kind)
        b = _matrix(warp, b_at, range(columns), depth, b_transposed, kind)
        total = sums.read(warp) if accumulates else np.zeros((ROWS, columns), np.float32)
        sums.write(warp, add_products(a, b, total))

    def step(warp: Warp, mask: np.ndarray) -> None:
        assert mask.all()
        # Addresses are read now; what lies there, and registers, when the product is made.
        a_at = 0 if in_registers else int(warp.get(ops[1], np.uint64)[0])
        b_at, accumulates = int(warp.get(ops[2], np.uint64)[0]), bool(warp.get(ops[3], np.bool_)[0])
        warp.groups["wgmma"].start(lambda: multiply(warp, a_at, b_at, accumulates))

    return step
