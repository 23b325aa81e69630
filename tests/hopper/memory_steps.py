"""What the loads and stores of PTX do to a warp of ``hopper_machine``."""

from __future__ import annotations

import numpy as np

from tests.hopper.hopper_machine import EVERY_LANE, LANES, Step, Warp, in_words
from tests.hopper.ptx_text import address_of, operands_of

UNHEARD = ("relaxed", "weak", "volatile", "nc", "acquire", "release", "gpu")
"""Parts of a name that change nothing here."""


def load_or_store(name: str, ops: list[str]) -> Step:
    parts = [part for part in name.split(".") if part not in UNHEARD]
    kind, space, size = parts[0], parts[1].partition("::")[0], int(parts[-1][1:]) // 8
    values, place = (ops[0], ops[1]) if kind == "ld" else (ops[1], ops[0])
    names, (base, offset) = operands_of(values.strip("{}")), address_of(place)
    if space == "param":
        return _load_parameter(names, base, offset, size)
    if space == "global" and kind == "ld" and "relaxed" in name:
        return _load_global(names, base, offset, size, is_relaxed=True)
    make = {"shared": (_load_shared, _store_shared), "global": (_load_global, _store_global)}[space]
    return make[kind == "st"](names, base, offset, size)


def _load_parameter(names: list[str], base: str, offset: int, size: int) -> Step:
    dtype = np.dtype(f"u{size}").type

    def step(warp: Warp, mask: np.ndarray) -> None:
        raw = warp.cta.parameters[base]
        for i, register in enumerate(names):
            number = int.from_bytes(raw[offset + i * size :][:size], "little")
            warp.set(register, np.full(LANES, number, dtype), mask)

    return step


def _shared_cells(warp: Warp, base: str, offset: int, size: int, words: np.ndarray, mask: np.ndarray):
    """Numbers of the words of ``size`` bytes that the lanes of a mask access: (words, lanes)."""
    at = warp.get(base, np.uint32).astype(np.int64)
    if mask is not EVERY_LANE:
        at = at[mask]
    if offset:
        at += offset
    bytes_each = size * len(words)
    assert not (at % bytes_each).any() and at.min() >= 0, "bad address"
    assert at.max() + bytes_each <= len(warp.cta.shared), "bad address"
    return at // size + words


def _load_shared(names: list[str], base: str, offset: int, size: int) -> Step:
    words = np.arange(len(names))[:, None]

    def step(warp: Warp, mask: np.ndarray) -> None:
        cells = _shared_cells(warp, base, offset, size, words, mask)
        results = in_words(warp.cta.shared, size)[cells]
        if mask is not EVERY_LANE:
            results = _spread(results, mask)
        for register, value in zip(names, results, strict=True):
            warp.set(register, value, mask)

    return step


def _spread(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(words, lanes of the mask) as (words, lanes)."""
    results = np.zeros((len(values), LANES), values.dtype)
    results[:, mask] = values
    return results


def _store_shared(names: list[str], base: str, offset: int, size: int) -> Step:
    words, dtype = np.arange(len(names))[:, None], np.dtype(f"u{size}").type

    def step(warp: Warp, mask: np.ndarray) -> None:
        cells = _shared_cells(warp, base, offset, size, words, mask)
        sources = np.array([warp.get(register, dtype) for register in names])
        in_words(warp.cta.shared, size)[cells] = sources if mask is EVERY_LANE else sources[:, mask]
        warp.cta.unfenced.write(warp.number, cells, size)

    return step


def _load_global(names: list[str], base: str, offset: int, size: int, is_relaxed: bool = False) -> Step:
    words = np.arange(len(names))[:, None]

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint64)[mask] + np.uint64(offset % 2**64)
        results = np.empty((len(names), len(addresses)), f"u{size}")
        for data, which, at in warp.cta.places(addresses, size * len(names)):
            found = warp.cta.older_of(data) if is_relaxed else data
            results[:, which] = in_words(found, size)[at // size + words]
        if mask is not EVERY_LANE:
            results = _spread(results, mask)
        for register, value in zip(names, results, strict=True):
            warp.set(register, value, mask)

    return step


def _store_global(names: list[str], base: str, offset: int, size: int) -> Step:
    words, dtype = np.arange(len(names))[:, None], np.dtype(f"u{size}").type

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint64)[mask] + np.uint64(offset % 2**64)
        sources = np.array([warp.get(register, dtype) for register in names])[:, mask]
        for data, which, at in warp.cta.places(addresses, size * len(names)):
            in_words(data, size)[at // size + words] = sources[:, which]

    return step


def prefetch(name: str, ops: list[str]) -> Step:
    """Of a line of L2, or of the description of a tensor, which is no memory here."""
    base, offset = address_of(ops[0])

    def step(warp: Warp, mask: np.ndarray) -> None:
        if name == "prefetch.global.L2":
            addresses = warp.get(base, np.uint64)[mask] + np.uint64(offset)
            assert sum(len(which) for _, which, _ in warp.cta.places(addresses, 1)) == len(addresses)
            warp.cta.asked += addresses.tolist()

    return step


def atom(name: str, ops: list[str]) -> Step:
    base, offset = address_of(ops[1])

    def step(warp: Warp, mask: np.ndarray) -> None:
        old, addresses = np.zeros(LANES, np.uint32), warp.get(base, np.uint64)
        for lane in np.flatnonzero(mask):
            data, at = warp.cta.buffer(int(addresses[lane]) + offset)
            cell = data[at : at + 4].view(np.uint32)
            old[lane] = cell[0]
            cell[0] += warp.get(ops[2], np.uint32)[lane]
        warp.set(ops[0], old, mask)

    return step


def red(name: str, ops: list[str]) -> Step:
    """Adds some float32 next to each other for each lane, or raises an int32."""
    name = ".".join(part for part in name.split(".") if part not in UNHEARD)
    assert name in ("red.global.add.v4.f32", "red.global.add.f32", "red.global.max.s32"), name
    apply, dtype = (np.maximum, np.int32) if name.endswith("max.s32") else (np.add, np.float32)
    (base, offset), registers = address_of(ops[0]), operands_of(ops[1].strip("{}"))
    size = 4 * len(registers)

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint64)[mask] + np.uint64(offset % 2**64)
        values = np.stack([warp.get(x, dtype) for x in registers], 1)[mask]
        for data, which, at in warp.cta.places(addresses, size):
            sums = in_words(data, 4).view(dtype)
            apply.at(sums, at[:, None] // 4 + np.arange(len(registers)), values[which])

    return step


MEMORY_STEPS = {"ld": load_or_store, "st": load_or_store, "prefetch": prefetch, "atom": atom, "red": red}
