"""What each PTX instruction does to a warp of ``hopper_machine``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from tests.hopper.floats import (
    bf16_bits,
    e4m3_of_halves,
    from_bf16,
    halves_of_e4m3,
    in_halves,
    to_bf16,
    to_e4m3,
    to_f16,
)
from tests.hopper.hopper_cluster import CLUSTER_STEPS
from tests.hopper.hopper_copies import bulk
from tests.hopper.hopper_machine import EVERY_LANE, LANES, Barrier, Step, Waiting, Warp, constant
from tests.hopper.memory_steps import MEMORY_STEPS
from tests.hopper.ptx_text import address_of, dtype_of, operands_of
from tests.hopper.warp_steps import WARP_STEPS
from tests.hopper.wgmma_steps import wgmma

LANE = np.arange(LANES)
HALF = np.uint32(16)
UPPER_HALF = np.uint32(0xFFFF0000)

NOTHING = (
    "wgmma.fence", "fence.mbarrier_init", "fence.acq_rel.", "setmaxnreg.", "membar", "bar.warp.sync",
    "nanosleep", "griddepcontrol.", "cp.async.bulk.prefetch.",
)  # fmt: skip


def decode(name: str, rest: str) -> Step:
    return _maker_of(name)(name, rest)


@cache
def _maker_of(name: str) -> Callable[[str, str], Step]:
    """From the name of an instruction and its operands, as they are written, to what it does."""
    if name.startswith("cvta."):
        return lambda name, rest: _cvta(operands_of(rest))
    if name.startswith(NOTHING):
        return lambda name, rest: _nothing
    if name.startswith("fence.proxy.async"):
        return lambda name, rest: _fence
    for kind, prefix in (("wgmma", "wgmma."), ("bulk", "cp.async.bulk."), ("copy", "cp.async.")):
        if name.startswith(prefix + "commit_group"):
            return lambda name, rest: _commit_group(kind)
        if name.startswith(prefix + "wait_group"):
            return lambda name, rest: _wait_group(kind, int(rest.strip()))
    for prefix, make in (CLUSTER_STEPS | SPECIAL).items():
        if name == prefix or name.startswith(prefix + "."):
            return lambda name, rest: make(name, operands_of(rest))
    raise NotImplementedError(f"instruction {name}")


def _nothing(warp: Warp, mask: np.ndarray) -> None:
    pass


def _commit_group(kind: str) -> Step:
    return lambda warp, mask: warp.groups[kind].commit()


def _wait_group(kind: str, pending: int) -> Step:
    return lambda warp, mask: warp.groups[kind].wait(pending)


def _fence(warp: Warp, mask: np.ndarray) -> None:
    warp.cta.unfenced.fence(warp.number)


def _cvta(ops: list[str]) -> Step:
    return lambda warp, mask: warp.set(ops[0], warp.get(ops[1], np.uint64), mask)


# arithmetic


def _plain(operation: Callable[..., np.ndarray]) -> Callable[[str, list[str]], Step]:
    def make(name: str, ops: list[str]) -> Step:
        dtype, target = dtype_of(name.split(".")[-1]), ops[0]
        if len(ops) != 3:
            return lambda warp, mask: warp.set(
                target, operation(*[warp.get(x, dtype) for x in ops[1:]]), mask
            )
        (first, second), wanted, fixed = ops[1:], np.dtype(dtype), constant(ops[2], dtype)

        def step(warp: Warp, mask: np.ndarray) -> None:
            # What get and set do, written out for what is met most.
            registers = warp.registers
            a, b = registers.get(first), registers.get(second) if fixed is None else fixed
            if a is None or a.dtype is not wanted:
                a = warp.get(first, dtype)
            if b is None or b.dtype is not wanted:
                b = warp.get(second, dtype)
            if mask is EVERY_LANE:
                registers[target] = operation(a, b)
            else:
                warp.set(target, operation(a, b), mask)

        return step

    return make


def _shift(operation: Callable[..., np.ndarray]) -> Callable[[str, list[str]], Step]:
    def make(name: str, ops: list[str]) -> Step:
        dtype = dtype_of(name.split(".")[-1])
        bits = 8 * np.dtype(dtype).itemsize
        if ops[2].isdigit() and int(ops[2]) < bits:
            by = np.full(LANES, int(ops[2]), dtype)
            return lambda warp, mask: warp.set(ops[0], operation(warp.get(ops[1], dtype), by), mask)

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
            result = (a.astype(object) * b.astype(object) >> 8 * np.dtype(dtype).itemsize).astype(dtype)
        else:
            result = a * b
        if len(ops) > 3:
            result = result + warp.get(ops[3], result.dtype.type)
        warp.set(ops[0], result, mask)

    return step


def _fma(name: str, ops: list[str]) -> Step:
    if name.endswith("f16x2"):
        return _pairs(partial(_fma_of_halves, name))(name, ops)
    (target, a, b, c), saturates = ops, ".sat" in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        product = warp.get(a, np.float32).astype(np.float64) * warp.get(b, np.float32).astype(np.float64)
        result = (product + warp.get(c, np.float32).astype(np.float64)).astype(np.float32)
        if saturates:
            result = np.nan_to_num(np.clip(result, 0, 1), nan=0.0).astype(np.float32)
        warp.set(target, result, mask)

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
            values = [warp.get(x, np.uint32).view(np.float16).astype(np.float64) for x in ops[1:]]
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
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


def _setp(name: str, ops: list[str]) -> Step:
    parts = name.split(".")
    comparison, dtype = parts[1], dtype_of(parts[-1])
    combine = {"and": np.logical_and, "or": np.logical_or}.get(parts[2])
    is_float = np.dtype(dtype).kind == "f"
    unordered = comparison.endswith("u") and comparison not in ("lu",) and is_float
    compare, (first, second) = COMPARISONS[comparison.rstrip("u") if unordered else comparison], ops[1:3]

    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b = warp.get(first, dtype), warp.get(second, dtype)
        result = compare(a, b)
        if is_float:
            # Of NaN every comparison but "not equal" is False by itself.
            if unordered:
                result = result | np.isnan(a) | np.isnan(b)
            elif compare is np.not_equal:
                result = result & ~(np.isnan(a) | np.isnan(b))
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
        width = np.dtype(dtype).itemsize

        def move(warp: Warp, mask: np.ndarray) -> None:
            value = warp.registers.get(source)
            if value is None or value.itemsize != width:
                value = warp.get(source, dtype)
            warp.set(target, value, mask)

        return move
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
    to, source = name.split(".")[-2:]
    if len(ops) == 3:
        dtype = np.int32 if source == "s32" else np.float32
        join = JOINS[to]
        return lambda warp, mask: warp.set(
            ops[0], join(warp.get(ops[1], dtype), warp.get(ops[2], dtype)), mask
        )
    dtype, convert = _conversion(to, source)
    to_whole = next((TO_WHOLE[part] for part in name.split(".") if part in TO_WHOLE), lambda x: x)
    return lambda warp, mask: warp.set(ops[0], convert(to_whole(warp.get(ops[1], dtype))), mask)


TO_WHOLE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
"""What the modifiers of a conversion do that round to whole numbers."""


def _join_bf16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    bits = bf16_bits(np.concatenate((low, high)))
    return bits[:LANES] >> HALF | bits[LANES:] & UPPER_HALF


JOINS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "bf16x2": _join_bf16,
    "f16x2": lambda high, low: in_halves(to_f16(high), to_f16(low)),
    "s16": lambda high, low: in_halves(
        *(np.minimum(np.maximum(x, -(2**15)), 2**15 - 1) for x in (high, low))
    ),
    "e4m3x2": lambda high, low: to_e4m3(low) | to_e4m3(high) << np.uint16(8),
}
"""What becomes of two operands: the first goes to the high half."""


def _conversion(to: str, source: str) -> tuple[type, Callable[[np.ndarray], np.ndarray]]:
    """How the operand is read, and what becomes of it."""
    if to == "e4m3x2":
        return np.uint32, lambda x: e4m3_of_halves(x.view(np.float16))
    if source == "e4m3x2":
        return np.uint16, lambda x: halves_of_e4m3(np.ascontiguousarray(x))
    if source == "bf16":
        return np.uint16, from_bf16
    if to == "bf16":
        return np.float32, to_bf16
    dtype = dtype_of(to)
    return dtype_of(source), lambda x: x.astype(dtype)


def _prmt(name: str, ops: list[str]) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b, selector = (warp.get(x, np.uint32).astype(np.uint64) for x in ops[1:])
        source, result = a | b << np.uint64(32), np.zeros(LANES, np.uint64)
        for i in range(4):
            number = selector >> np.uint64(4 * i) & np.uint64(7)
            result |= (source >> (np.uint64(8) * number) & np.uint64(255)) << np.uint64(8 * i)
        warp.set(ops[0], result.astype(np.uint32), mask)

    return step


def _shf(name: str, ops: list[str]) -> Step:
    """What 64 bits, the first operand below the second, are shifted by: their upper half to the left, the lower to the
    right."""
    is_left = name.startswith("shf.l.wrap")
    if not is_left and not name.startswith("shf.r.wrap"):
        raise NotImplementedError(f"instruction {name}")

    def step(warp: Warp, mask: np.ndarray) -> None:
        low, high, by = (warp.get(x, np.uint32).astype(np.uint64) for x in ops[1:])
        both, by = low | high << np.uint64(32), by & np.uint64(31)
        result = both << by >> np.uint64(32) if is_left else both >> by
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


def _meet(warp: Warp, mask: np.ndarray, members: str) -> None:
    """All lanes that an instruction names must come to it: it waits for each."""
    named = int(warp.get(members, np.uint32)[mask][0]) >> LANE & 1
    assert (named == mask).all(), "some lanes that an instruction waits for do not come to it"


def _shfl(name: str, ops: list[str]) -> Step:
    target, is_butterfly, is_up = ops[0].partition("|")[0], ".bfly." in name, ".up." in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        _meet(warp, mask, ops[-1])
        value, other = warp.get(ops[1], np.uint32), warp.get(ops[2], np.int32)
        source = other
        if is_butterfly:
            source = LANE ^ other
        elif is_up:
            source = np.where(other <= LANE, LANE - other, LANE)
        warp.set(target, value[source], mask)

    return step


def _redux(name: str, ops: list[str]) -> Step:
    join = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or}[name.split(".")[2]]
    dtype = {"s32": np.int32, "u32": np.uint32, "b32": np.uint32}[name.split(".")[3]]

    def step(warp: Warp, mask: np.ndarray) -> None:
        _meet(warp, mask, ops[-1])
        joined = join.reduce(warp.get(ops[1], dtype)[mask], dtype=dtype)
        warp.set(ops[0], np.full(LANES, joined), mask)

    return step


def _vote(name: str, ops: list[str]) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> None:
        _meet(warp, mask, ops[-1])
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
            has_passed = barrier.phase != parity
            if action == "try_wait" and not has_passed:
                raise Waiting
            warp.set(ops[0], np.full(LANES, has_passed), mask)
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
    "prmt": _prmt, "shf": _shf, "lop3": _lop3, "ex2": _plain(np.exp2), "lg2": _plain(np.log2), "shfl": _shfl,
    "vote": _vote,
    "redux": _redux, "tanh": _plain(np.tanh), "sqrt": _plain(np.sqrt), "popc": _plain(_count_ones),
    "rcp": _plain(lambda x: np.float32(1) / x), "elect": _elect, "bar": _bar, "barrier": _bar, "mbarrier": _mbarrier,
    "cp.async.bulk": bulk, "cp.reduce": bulk, "wgmma.mma_async": wgmma, **MEMORY_STEPS, **WARP_STEPS,
}  # fmt: skip
