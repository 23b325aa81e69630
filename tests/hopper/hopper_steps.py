"""What each PTX instruction does to a warp of ``hopper_machine``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.hopper.floats import from_bf16, to_bf16, to_e4m3, to_f16, widen
from tests.hopper.hopper_cluster import CLUSTER_STEPS
from tests.hopper.hopper_copies import bulk
from tests.hopper.hopper_machine import LANES, Barrier, Places, Step, Waiting, Warp, in_words
from tests.hopper.ptx_text import address_of, dtype_of, operands_of
from tests.hopper.warp_steps import WARP_STEPS
from tests.hopper.wgmma_steps import wgmma

NOTHING = (
    "wgmma.fence", "fence.mbarrier_init", "fence.acq_rel.", "prefetch.", "setmaxnreg.", "membar", "bar.warp.sync",
    "nanosleep", "griddepcontrol.",
)  # fmt: skip


def decode(name: str, rest: str) -> Step:
    if name.startswith("cvta."):
        return _cvta(operands_of(rest))
    if name.startswith(NOTHING):
        return lambda warp, mask: None
    if name.startswith("fence.proxy.async"):
        return _fence
    for kind, prefix in (("wgmma", "wgmma."), ("bulk", "cp.async.bulk."), ("copy", "cp.async.")):
        if name.startswith(prefix + "commit_group"):
            return lambda warp, mask: warp.groups[kind].commit()
        if name.startswith(prefix + "wait_group"):
            pending = int(rest.strip())
            return lambda warp, mask: warp.groups[kind].wait(pending)
    for prefix, make in (CLUSTER_STEPS | SPECIAL).items():
        if name == prefix or name.startswith(prefix + "."):
            return make(name, operands_of(rest))
    raise NotImplementedError(f"instruction {name} {rest}")


def _fence(warp: Warp, mask: np.ndarray) -> None:
    unfenced = warp.cta.unfenced
    unfenced[unfenced == warp.number + 1] = 0


def _cvta(ops: list[str]) -> Step:
    return lambda warp, mask: warp.set(ops[0], warp.get(ops[1], np.uint64), mask)


# arithmetic


def _plain(operation: Callable[..., np.ndarray]) -> Callable[[str, list[str]], Step]:
    def make(name: str, ops: list[str]) -> Step:
        suffix = name.split(".")[-1]
        dtype = np.bool_ if suffix == "pred" else dtype_of(suffix)

        def step(warp: Warp, mask: np.ndarray) -> None:
            warp.set(ops[0], operation(*(warp.get(x, dtype) for x in ops[1:])), mask)

        return step

    return make


def _shift(operation: Callable[..., np.ndarray]) -> Callable[[str, list[str]], Step]:
    def make(name: str, ops: list[str]) -> Step:
        dtype = dtype_of(name.split(".")[-1])
        bits = 8 * np.dtype(dtype).itemsize

        def step(warp: Warp, mask: np.ndarray) -> None:
            value, count = warp.get(ops[1], dtype), warp.get(ops[2], np.uint32)
            result = operation(value, np.minimum(count, bits - 1).astype(dtype))
            if np.dtype(dtype).kind == "u":
                result = np.where(count < bits, result, 0).astype(dtype)
            warp.set(ops[0], result, mask)

        return step

    return make


def _mul(name: str, ops: list[str]) -> Step:
    dtype, wide = dtype_of(name.split(".")[-1]), ".wide." in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b = (warp.get(x, dtype) for x in ops[1:3])
        if wide:
            double = np.dtype(f"{np.dtype(dtype).kind}{2 * np.dtype(dtype).itemsize}")
            result = a.astype(double) * b.astype(double)
        elif ".hi." in name:
            double = np.int64 if np.dtype(dtype).kind == "i" else np.uint64
            result = (a.astype(double) * b.astype(double) >> 32).astype(dtype)
        else:
            result = a * b
        if len(ops) > 3:
            result = result + warp.get(ops[3], result.dtype.type)
        warp.set(ops[0], result, mask)

    return step


def _fma(name: str, ops: list[str]) -> Step:
    if name.endswith("f16x2"):
        return _pairs(partial(_fma_of_halves, name))(name, ops)

    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b, c = (warp.get(x, np.float32) for x in ops[1:])
        result = np.multiply(a, b, dtype=np.float64)
        result = np.add(result, c, dtype=np.float64).astype(np.float32)
        if ".sat" in name:
            result = np.nan_to_num(np.clip(result, 0, 1), nan=0.0).astype(np.float32)
        warp.set(ops[0], result, mask)

    return step


SMALLEST_NORMAL_HALF = 2.0**-14


def _fma_of_halves(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    flushed = [np.where(np.abs(x) < SMALLEST_NORMAL_HALF, 0.0, x) if ".ftz" in name else x for x in (a, b, c)]
    result = flushed[0] * flushed[1] + flushed[2]
    if ".ftz" in name:
        result = np.where(np.abs(result) < SMALLEST_NORMAL_HALF, 0.0, result)
    if ".relu" in name:
        result = np.maximum(result, 0.0)
    return np.nan_to_num(np.clip(result, 0.0, 1.0), nan=0.0) if ".sat" in name else result


def _pairs(operation: Callable[..., np.ndarray]) -> Callable[[str, list[str]], Step]:
    """Two float16 a word, computed in float64 and rounded once."""

    def make(name: str, ops: list[str]) -> Step:
        def step(warp: Warp, mask: np.ndarray) -> None:
            values = (warp.get(x, np.uint32).view(np.float16).astype(np.float64) for x in ops[1:])
            warp.set(ops[0], operation(*values).astype(np.float16).view(np.uint32), mask)

        return step

    return make


def _by_type(scalar: Callable, pair: Callable) -> Callable[[str, list[str]], Step]:
    def make(name: str, ops: list[str]) -> Step:
        return (_pairs(pair) if name.endswith("f16x2") else _plain(scalar))(name, ops)

    return make


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _setp(name: str, ops: list[str]) -> Step:
    parts = name.split(".")
    comparison, dtype = parts[1], dtype_of(parts[-1])
    combine = {"and": np.logical_and, "or": np.logical_or}.get(parts[2])
    is_float = np.dtype(dtype).kind == "f"
    unordered = comparison.endswith("u") and comparison not in ("lu",) and is_float
    compare = COMPARISONS[comparison.rstrip("u") if unordered else comparison]

    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b = (warp.get(x, dtype) for x in ops[1:3])
        result = compare(a, b)
        if is_float:
            nan = np.isnan(a) | np.isnan(b)
            result = result | nan if unordered else result & ~nan
        if combine is not None:
            result = combine(result, warp.get(ops[3], np.bool_))
        warp.set(ops[0], result, mask)

    return step


def _selp(name: str, ops: list[str]) -> Step:
    dtype = dtype_of(name.split(".")[-1])

    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b, p = warp.get(ops[1], dtype), warp.get(ops[2], dtype), warp.get(ops[3], np.bool_)
        warp.set(ops[0], np.where(p, a, b), mask)

    return step


def _mov(name: str, ops: list[str]) -> Step:
    size = int(name.split(".")[-1][1:]) // 8 if not name.endswith("pred") else 0
    dtype = np.dtype(f"u{size}").type if size else np.bool_
    target, source = ops
    if "{" not in target + source:
        return lambda warp, mask: warp.set(target, warp.get(source, dtype), mask)
    parts = operands_of((source if source.startswith("{") else target).strip("{}"))
    half = np.dtype(f"u{size // len(parts)}").type

    def join(warp: Warp, mask: np.ndarray) -> None:
        stacked = np.stack([warp.get(x, half) for x in parts], 1)
        warp.set(target, stacked.view(dtype)[:, 0], mask)

    def split(warp: Warp, mask: np.ndarray) -> None:
        halves = np.ascontiguousarray(warp.get(source, dtype)).view(half).reshape(LANES, -1)
        for part, values in zip(parts, np.ascontiguousarray(halves.T), strict=True):
            warp.set(part, values, mask)

    return join if source.startswith("{") else split


def _cvt(name: str, ops: list[str]) -> Step:
    parts = name.split(".")
    to, source = parts[-2:]

    def step(warp: Warp, mask: np.ndarray) -> None:
        if to in ("bf16x2", "f16x2") and source == "f32":
            rounded = [to_bf16 if to == "bf16x2" else to_f16][0]
            high, low = (rounded(warp.get(x, np.float32)).astype(np.uint32) for x in ops[1:])
            result = low | high << np.uint32(16)
        elif ".pack.sat.s16.s32" in name:
            high, low = (warp.get(x, np.int32).clip(-(2**15), 2**15 - 1) for x in ops[1:])
            result = (low.astype(np.uint32) & np.uint32(0xFFFF)) | high.astype(np.uint32) << np.uint32(16)
        elif to == "e4m3x2":
            if source == "f16x2":
                low, high = warp.get(ops[1], np.uint32).view(np.float16).astype(np.float32).reshape(-1, 2).T
            else:
                high, low = (warp.get(x, np.float32) for x in ops[1:])
            result = to_e4m3(low) | to_e4m3(high) << np.uint16(8)
        elif source == "e4m3x2":
            pair = np.ascontiguousarray(warp.get(ops[1], np.uint16)).view(np.uint8).reshape(-1, 2, 1)
            result = np.ascontiguousarray(widen(pair, "e4m3").astype(np.float16)).view(np.uint32)[:, 0]
        elif source == "bf16":
            result = from_bf16(warp.get(ops[1], np.uint16))
        elif to == "bf16":
            result = to_bf16(warp.get(ops[1], np.float32))
        else:
            result = warp.get(ops[1], dtype_of(source)).astype(dtype_of(to))
        warp.set(ops[0], result, mask)

    return step


def _prmt(name: str, ops: list[str]) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b, selector = (warp.get(x, np.uint32).astype(np.uint64) for x in ops[1:])
        source, result = a | b << np.uint64(32), np.zeros(LANES, np.uint64)
        for i in range(4):
            number = selector >> np.uint64(4 * i) & np.uint64(7)
            result |= (source >> (np.uint64(8) * number) & np.uint64(255)) << np.uint64(8 * i)
        warp.set(ops[0], result.astype(np.uint32), mask)

    return step


def _lop3(name: str, ops: list[str]) -> Step:
    table = int(ops[4], 0)

    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b, c = (warp.get(x, np.uint32) for x in ops[1:4])
        result = np.zeros(LANES, np.uint32)
        for i in range(8):
            if table >> i & 1:
                terms = (x if i >> k & 1 else ~x for x, k in ((a, 2), (b, 1), (c, 0)))
                x, y, z = terms
                result |= x & y & z
        warp.set(ops[0], result, mask)

    return step


# across lanes


def _shfl(name: str, ops: list[str]) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> None:
        value, other = warp.get(ops[1], np.uint32), warp.get(ops[2], np.int32)
        lane = np.arange(LANES)
        if ".up." in name:
            source = np.where(lane >= other, lane - other, lane)
        else:
            source = lane ^ other if ".bfly." in name else other
        warp.set(ops[0].partition("|")[0], value[source], mask)

    return step


def _vote(name: str, ops: list[str]) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> None:
        value = warp.get(ops[1], np.bool_)
        if ".ballot." in name:
            bits = int(((value & mask).astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum())
            warp.set(ops[0], np.full(LANES, bits, np.uint32), mask)
            return
        result = value[mask].any() if ".any." in name else value[mask].all()
        warp.set(ops[0], np.full(LANES, result), mask)

    return step


def _elect(name: str, ops: list[str]) -> Step:
    register, predicate = ops[0].split("|")

    def step(warp: Warp, mask: np.ndarray) -> None:
        first = int(np.flatnonzero(mask)[0])
        warp.set(register, np.full(LANES, first, np.uint32), mask)
        warp.set(predicate, np.arange(LANES) == first, mask)

    return step


# memory


def _load_or_store(name: str, ops: list[str]) -> Step:
    parts = [
        part
        for part in name.split(".")
        if part not in ("relaxed", "weak", "volatile", "nc", "acquire", "gpu")
    ]
    kind, space, size = parts[0], parts[1].partition("::")[0], int(parts[-1][1:]) // 8
    values, place = (ops[0], ops[1]) if kind == "ld" else (ops[1], ops[0])
    names = operands_of(values.strip("{}"))
    base, offset = address_of(place)
    dtype, words = np.dtype(f"u{size}").type, np.arange(len(names))[:, None]

    def step(warp: Warp, mask: np.ndarray) -> None:
        if space == "param":
            raw = warp.cta.parameters[base]
            for i, register in enumerate(names):
                number = int.from_bytes(raw[offset + i * size :][:size], "little")
                warp.set(register, np.full(LANES, number, dtype), mask)
            return
        lanes = np.flatnonzero(mask)
        address = warp.get(base, np.uint32 if space == "shared" else np.uint64)[lanes]
        address = address.astype(np.int64).view(np.uint64) + np.uint64(offset % 2**64)
        move = load if kind == "ld" else store
        move(warp, mask, lanes, list(warp.cta.places(space, address, size * len(names))))

    def load(warp: Warp, mask: np.ndarray, lanes: np.ndarray, places: list[Places]) -> None:
        results = np.zeros((len(names), LANES), dtype)
        for data, which, at in places:
            results[:, lanes[which]] = in_words(data, size)[at // size + words]
        for register, value in zip(names, results, strict=True):
            warp.set(register, value, mask)

    def store(warp: Warp, mask: np.ndarray, lanes: np.ndarray, places: list[Places]) -> None:
        sources = np.stack([warp.get(register, dtype) for register in names])
        for data, which, at in places:
            in_words(data, size)[at // size + words] = sources[:, lanes[which]]
            if space == "shared":
                in_words(warp.cta.unfenced, size)[at // size + words] = warp.written(size)

    return step


def _atom(name: str, ops: list[str]) -> Step:
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


def _red(name: str, ops: list[str]) -> Step:
    """Adds some float32 next to each other for each lane."""
    assert name in ("red.global.add.v4.f32", "red.global.add.f32"), name
    (base, offset), registers = address_of(ops[0]), operands_of(ops[1].strip("{}"))
    size = 4 * len(registers)

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint64)[mask] + np.uint64(offset % 2**64)
        values = np.stack([warp.get(x, np.float32) for x in registers], 1)[mask]
        for data, which, at in warp.cta.places("global", addresses, size):
            sums = in_words(data, 4).view(np.float32)
            np.add.at(sums, at[:, None] // 4 + np.arange(len(registers)), values[which])

    return step


# barriers


def _bar(name: str, ops: list[str]) -> Step:
    waits = "arrive" not in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        cta = warp.cta
        number = int(warp.get(ops[0], np.uint32)[mask][0])
        count = int(warp.get(ops[1], np.uint32)[0]) if len(ops) > 1 else warp.program.threads
        generation = cta.generation.get(number, 0)
        cta.arrived[number] = cta.arrived.get(number, 0) + LANES
        assert cta.arrived[number] <= count
        if cta.arrived[number] == count:
            cta.arrived[number] = 0
            cta.generation[number] = generation + 1
        elif waits:
            warp.awaited = number, generation

    return step


def _mbarrier(name: str, ops: list[str]) -> Step:
    action = name.split(".")[1]
    expects = ".expect_tx" in name
    place = ops[0] if action == "init" else ops[1]
    base, offset = address_of(place)

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint32)
        if action == "init":
            count = int(warp.get(ops[1], np.uint32)[mask][0])
            warp.cta.barriers[int(addresses[mask][0]) + offset] = Barrier(count, count)
            return
        if action in ("try_wait", "test_wait"):
            barrier = warp.cta.barriers[int(addresses[mask][0]) + offset]
            assert (addresses[mask] == addresses[mask][0]).all()
            parity = int(warp.get(ops[2], np.uint32)[mask][0]) & 1
            if barrier.phase == parity:
                raise Waiting
            warp.set(ops[0], np.ones(LANES, bool), mask)
            return
        for lane in np.flatnonzero(mask):
            barrier = warp.cta.barriers[int(addresses[lane]) + offset]
            if expects:
                barrier.tx += int(warp.get(ops[2], np.uint32)[lane])
                barrier.pending -= 1
            else:
                barrier.pending -= int(warp.get(ops[2], np.uint32)[lane]) if len(ops) > 2 else 1
            barrier.settle()

    return step


# arithmetic of more than one kind


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    safe = np.where(b == 0, 1, b)
    if a.dtype.kind == "f":
        return a / b
    return (np.abs(a.astype(np.int64)) // np.abs(safe.astype(np.int64)) * np.sign(a) * np.sign(safe)).astype(
        a.dtype
    )


def _max(name: str, ops: list[str]) -> Step:
    if name.endswith("s16x2"):
        return lambda warp, mask: warp.set(
            ops[0], _larger_halves(*(warp.get(x, np.uint32) for x in ops[1:])), mask
        )
    if ".relu" in name:
        return _plain(lambda a, b: np.maximum(np.maximum(a, b), 0))(name, ops)
    operation = np.maximum if ".NaN" in name else np.fmax
    return _by_type(operation, operation)(name, ops)


def _min(name: str, ops: list[str]) -> Step:
    if ".relu" in name:
        return _plain(lambda a, b: np.maximum(np.minimum(a, b), 0))(name, ops)
    operation = np.minimum if ".NaN" in name else np.fmin
    return _by_type(operation, operation)(name, ops)


def _count_ones(word: np.ndarray) -> np.ndarray:
    bits = word[:, None] >> np.arange(8 * word.itemsize, dtype=word.dtype)
    return (bits & word.dtype.type(1)).sum(1).astype(word.dtype)


def _larger_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(*(np.ascontiguousarray(x).view(np.int16) for x in (a, b))).view(np.uint32)


SPECIAL: dict[str, Callable[[str, list[str]], Step]] = {
    "add": _by_type(np.add, np.add), "sub": _by_type(np.subtract, np.subtract), "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or), "xor": _plain(np.bitwise_xor), "not": _plain(np.invert), "neg": _plain(np.negative),
    "max": _max,
    "min": _min, "abs": _plain(np.abs), "div": _plain(_divide),
    "rem": _plain(lambda a, b: (a - _divide(a, b) * b).astype(a.dtype)), "shl": _shift(np.left_shift),
    "mul": lambda name, ops: _pairs(np.multiply)(name, ops) if name.endswith("f16x2") else _mul(name, ops),
    "shr": _shift(np.right_shift), "mad": _mul, "fma": _fma, "setp": _setp, "selp": _selp, "mov": _mov, "cvt": _cvt,
    "prmt": _prmt, "lop3": _lop3, "ex2": _plain(np.exp2), "lg2": _plain(np.log2), "shfl": _shfl, "vote": _vote,
    "tanh": _plain(np.tanh), "sqrt": _plain(np.sqrt), "popc": _plain(_count_ones),
    "rcp": _plain(lambda x: np.float32(1) / x), "elect": _elect, "ld": _load_or_store, "st": _load_or_store,
    "atom": _atom, "bar": _bar, "barrier": _bar, "mbarrier": _mbarrier,
    "cp.async.bulk": bulk, "cp.reduce": bulk, "red": _red, "wgmma.mma_async": wgmma, **WARP_STEPS,
}  # fmt: skip
