"""What each PTX instruction does to a warp of ``hopper_machine``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from tests.hopper.floats import from_bf16, to_bf16, to_e4m3, to_f16, widen
from tests.hopper.hopper_cluster import CLUSTER_STEPS
from tests.hopper.hopper_copies import bulk
from tests.hopper.hopper_machine import LANES, SWIZZLE_BITS, Barrier, Step, Waiting, Warp, swizzled
from tests.hopper.ptx_text import address_of, dtype_of, operands_of
from tests.hopper.warp_steps import WARP_STEPS

NOTHING = (
    "wgmma.fence", "fence.mbarrier_init", "fence.acq_rel.", "prefetch.", "setmaxnreg.", "membar", "bar.warp.sync",
    "nanosleep",
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
        a, b, c = (warp.get(x, np.float32).astype(np.float64) for x in ops[1:])
        result = (a * b + c).astype(np.float32)
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


def _setp(name: str, ops: list[str]) -> Step:
    parts = name.split(".")
    comparison, dtype = parts[1], dtype_of(parts[-1])
    combine = {"and": np.logical_and, "or": np.logical_or}.get(parts[2])
    unordered = comparison.endswith("u") and comparison not in ("lu",) and np.dtype(dtype).kind == "f"
    key = comparison.rstrip("u") if unordered else comparison

    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b = (warp.get(x, dtype) for x in ops[1:3])
        result = {
            "eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b,
            "ls": a <= b, "lo": a < b, "hi": a > b, "hs": a >= b,
        }[key]  # fmt: skip
        if np.dtype(dtype).kind == "f":
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

    def step(warp: Warp, mask: np.ndarray) -> None:
        target, source = ops
        if source.startswith("{"):
            parts = operands_of(source.strip("{}"))
            half = np.dtype(f"u{size // len(parts)}").type
            stacked = np.stack([warp.get(x, half) for x in parts], 1)
            warp.set(target, np.ascontiguousarray(stacked).view(dtype)[:, 0], mask)
        elif target.startswith("{"):
            parts = operands_of(target.strip("{}"))
            half = np.dtype(f"u{size // len(parts)}").type
            split = np.ascontiguousarray(warp.get(source, dtype)).view(half).reshape(LANES, -1)
            for i, part in enumerate(parts):
                warp.set(part, np.ascontiguousarray(split[:, i]), mask)
        else:
            warp.set(target, warp.get(source, dtype), mask)

    return step


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
        source = lane ^ other if ".bfly." in name else other
        warp.set(ops[0].partition("|")[0], value[source], mask)

    return step


def _vote(name: str, ops: list[str]) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> None:
        value = warp.get(ops[1], np.bool_)[mask]
        result = value.any() if ".any." in name else value.all()
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


def _bytes(warp: Warp, space: str, address: int) -> tuple[np.ndarray, int]:
    return (warp.cta.shared, address) if space == "shared" else warp.cta.buffer(address)


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
    dtype = np.dtype(f"u{size}").type

    def step(warp: Warp, mask: np.ndarray) -> None:
        if space == "param":
            raw = warp.cta.parameters[base]
            for i, register in enumerate(names):
                number = int.from_bytes(raw[offset + i * size :][:size], "little")
                warp.set(register, np.full(LANES, number, dtype), mask)
            return
        addresses = warp.get(base, np.uint32 if space == "shared" else np.uint64)
        results = np.zeros((len(names), LANES), dtype)
        sources = [warp.get(register, dtype) for register in names] if kind == "st" else []
        for lane in np.flatnonzero(mask):
            data, at = _bytes(warp, space, int(addresses[lane]) + offset)
            assert at % (size * len(names)) == 0 and at + size * len(names) <= len(data), "bad address"
            for i in range(len(names)):
                cell = data[at + i * size : at + (i + 1) * size].view(dtype)
                if kind == "ld":
                    results[i, lane] = cell[0]
                else:
                    cell[0] = sources[i][lane]
                    if space == "shared":
                        warp.cta.unfenced[at + i * size : at + (i + 1) * size] = warp.number + 1
        if kind == "ld":
            for register, value in zip(names, results, strict=True):
                warp.set(register, value, mask)

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
        addresses = warp.get(base, np.uint64)
        values = np.stack([warp.get(x, np.float32) for x in registers], 1)
        for lane in np.flatnonzero(mask):
            data, at = warp.cta.buffer(int(addresses[lane]) + offset)
            assert at % size == 0 and at + size <= len(data), "bad address"
            data[at : at + size].view(np.float32)[:] += values[lane]

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


# WGMMA


def _matrix(
    warp: Warp, descriptor: int, rows: np.ndarray, depth: int, transposed: bool, kind: str
) -> np.ndarray:
    """Rows of an operand in shared memory, (rows, depth)."""
    width = 1 if kind == "e4m3" else 2
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    bits = SWIZZLE_BITS[descriptor >> 62]
    row_bytes = 16 << bits
    r, k = np.meshgrid(rows, np.arange(depth), indexing="ij")
    if transposed:
        columns = row_bytes // width
        address = start + r // columns * leading + r % columns * width + k // 8 * stride + k % 8 * row_bytes
    else:
        address = start + r // 8 * stride + r % 8 * row_bytes + k * width
    cells = swizzled(address, bits)[..., None] + np.arange(width)
    return widen(warp.cta.read_async(cells), kind)


def add_products(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """What a WGMMA leaves in an accumulator that held ``total``: total + a b^T, in float32."""
    return total + a @ b.T


def _wgmma(name: str, ops: list[str]) -> Step:
    columns, depth = map(int, re.search(r"m64n(\d+)k(\d+)", name).groups())
    kind = name.split(".")[-1]
    sum_type = name.split(".")[-3]
    results = operands_of(ops[0].strip("{}"))
    in_registers = ops[1].startswith("{")
    flags = [x for x in ops[4:]]
    transposes = [int(x) for x in flags[2:]]
    a_transposed = bool(transposes[0]) if len(transposes) == 2 else False
    b_transposed = bool(transposes[-1]) if transposes else False
    lane = np.arange(LANES)
    row = lane[:, None] // 4 + 8 * (np.arange(4) % 4 // 2)
    places = [(row[:, i % 4], 8 * (i // 4) + 2 * (lane % 4) + i % 2) for i in range(columns // 2)]

    def sums(warp: Warp) -> np.ndarray:
        """Of each place the lanes' values."""
        if sum_type == "f32":
            return np.stack([warp.get(x, np.float32) for x in results])
        words = np.stack([warp.get(x, np.uint32) for x in results])
        halves = np.ascontiguousarray(words).view(np.float16).reshape(len(results), LANES, 2)
        return halves.transpose(0, 2, 1).reshape(len(places), LANES).astype(np.float32)

    def set_sums(warp: Warp, values: np.ndarray) -> None:
        if sum_type != "f32":
            halves = values.astype(np.float16).reshape(len(results), 2, LANES).transpose(0, 2, 1)
            values = np.ascontiguousarray(halves).view(np.uint32)[..., 0]
        for register, of_lanes in zip(results, values, strict=True):
            warp.set(register, of_lanes, np.ones(LANES, bool))

    def multiply(warp: Warp, a_at: int, b_at: int, accumulates: bool) -> None:
        if in_registers:
            words = np.stack([warp.get(x, np.uint32) for x in operands_of(ops[1].strip("{}"))])
            a = np.zeros((16, depth), np.float32)
            per_word = 4 if kind == "e4m3" else 2
            for i in range(4):
                raw = np.ascontiguousarray(words[i]).view(np.uint8).reshape(LANES, per_word, -1)
                k = per_word * (lane % 4)[:, None] + np.arange(per_word) + depth // 2 * (i // 2)
                a[(lane // 4 + 8 * (i % 2))[:, None], k] = widen(raw, kind)
        else:
            rows = np.arange(16) + 16 * (warp.number % 4)
            a = _matrix(warp, a_at, rows, depth, a_transposed, kind)
        b = _matrix(warp, b_at, np.arange(columns), depth, b_transposed, kind)
        total = np.zeros((16, columns), np.float32)
        if accumulates:
            for of_lanes, (r, c) in zip(sums(warp), places, strict=True):
                total[r, c] = of_lanes
        total = add_products(a, b, total)
        set_sums(warp, np.stack([total[r, c] for r, c in places]))

    def step(warp: Warp, mask: np.ndarray) -> None:
        assert mask.all()
        # Addresses are read now; what lies there, and registers, when the product is made.
        a_at = 0 if in_registers else int(warp.get(ops[1], np.uint64)[0])
        b_at, accumulates = int(warp.get(ops[2], np.uint64)[0]), bool(warp.get(ops[3], np.bool_)[0])
        warp.groups["wgmma"].start(lambda: multiply(warp, a_at, b_at, accumulates))

    return step


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
    "tanh": _plain(np.tanh), "sqrt": _plain(np.sqrt),
    "rcp": _plain(lambda x: np.float32(1) / x), "elect": _elect, "ld": _load_or_store, "st": _load_or_store,
    "atom": _atom, "bar": _bar, "barrier": _bar, "mbarrier": _mbarrier,
    "cp.async.bulk": bulk, "cp.reduce": bulk, "red": _red, "wgmma.mma_async": _wgmma, **WARP_STEPS,
}  # fmt: skip
