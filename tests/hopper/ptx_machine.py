"""Runs the PTX of a kernel on NumPy, so that its results can be tested to the bit without a GPU.

It knows the instructions of the kernels it is used for and refuses any other. All threads of a CTA are vectors; those
with the lowest program counter go first, which lets threads that parted meet again. CTAs run one after the other. A
wait for an mbarrier is one step, which a thread does not leave before that is over. Memory is unkind on purpose: an
access outside of every buffer raises, shared memory starts as garbage, and what a ``cp.async`` will bring is garbage
until the wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from tests.hopper.floats import e4m3_of_halves, halves_of_e4m3, to_e4m3

LANES = 32
GARBAGE = 0xCB
WIDTHS = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
REGISTERS = {"%p": np.bool_, "%rs": np.uint16, "%r": np.uint32, "%rd": np.uint64}
LOOP_OF_WAIT = "bra.uni     LAB_WAIT;"
BLOCK = re.compile(r"\{ (?:\.reg \.b32 ([\w, ]+); )(.*;) ?\}$")
INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\s*(.*);$")


class Memory:
    """Buffers of bytes at addresses of their own."""

    def __init__(self, buffers: dict[int, np.ndarray]) -> None:
        self.bases = np.array(sorted(buffers), np.uint64)
        self.buffers = [buffers[int(base)] for base in self.bases]

    def _locate(self, addresses: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each buffer touched: the buffer, which of the addresses lie in it, and at what bytes."""
        if (addresses % size).any():
            raise RuntimeError(f"access of {size} bytes at a misaligned address")
        number = np.searchsorted(self.bases, addresses, side="right") - 1
        found = []
        for i in sorted(set(number.tolist())):
            which = np.flatnonzero(number == i)
            start = (addresses[which] - self.bases[i]).astype(np.int64)
            if i < 0 or (start + size > len(self.buffers[i])).any():
                raise RuntimeError(f"access of {size} bytes outside of all buffers: {addresses[which]}")
            found.append((self.buffers[i], which, start[:, None] + np.arange(size)))
        return found

    def read(self, addresses: np.ndarray, size: int) -> np.ndarray:
        data = np.empty((len(addresses), size), np.uint8)
        for buffer, which, at in self._locate(addresses, size):
            data[which] = buffer[at]
        return data

    def write(self, addresses: np.ndarray, data: np.ndarray) -> None:
        for buffer, which, at in self._locate(addresses, data.shape[1]):
            buffer[at] = data[which]


@dataclass(frozen=True)
class Instruction:
    """One line of PTX. ``guard`` is a predicate register, or empty, and ``negated`` says that it must be false.

    ``parts`` are those of its name, between dots.
    """

    guard: str
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A kernel's instructions, where its labels point, and the names of its parameters."""

    code: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]
    threads: int


def split_operands(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip())


def lines_of(body: str) -> Iterator[str]:
    """Its lines, those of a block in braces one by one, and names of registers that only the block has made others. The
    loop around a wait for an mbarrier is left out."""
    for number, line in enumerate(map(str.strip, body.splitlines())):
        if line == LOOP_OF_WAIT:
            continue
        if block := BLOCK.match(line):
            own = re.compile(rf"(?<![\w%.])({'|'.join(split_operands(block[1]))})(?!\w)")
            for instruction in block[2].split(";")[:-1]:
                yield own.sub(rf"%r{number}_\1", instruction.strip()) + ";"
        else:
            assert not line.startswith("{") or len(line) == 1, f"no block that is known: {line}"
            yield line


def parse(ptx: str) -> Program:
    """The only kernel of a module."""
    header, _, body = ptx.partition(".reqntid")
    parameters = re.findall(r"\.param .*?(\w+_param_\d+)", header)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in lines_of(body):
        if label := re.fullmatch(r"(\$\w+):", line):
            labels[label[1]] = len(code)
        elif match := INSTRUCTION.match(line):
            parts = tuple(match[3].split("."))
            code.append(Instruction(match[2] or "", match[1] == "!", parts, split_operands(match[4])))
    return Program(tuple(code), labels, tuple(parameters), int(body.split(",")[0]))


def run(
    program: Program,
    parameters: Sequence[bytes],
    grid: int,
    memory: Memory,
    shared_bytes: int,
    by_warp: bool = False,
) -> None:
    """Launch ``grid`` CTAs with these parameters, packed as the kernel reads them.

    The threads of a CTA go together, or ``by_warp``: the first warp as far as barriers let it, then the next.
    """
    named = dict(zip(program.parameters, parameters, strict=True))
    for block in range(grid):
        Cta(program, named, grid, block, memory, np.full(shared_bytes, GARBAGE, np.uint8), by_warp).run()


@dataclass
class Barrier:
    """An mbarrier: arrivals that complete a phase, those that are still to come, and phases that are complete."""

    count: int
    pending: int
    phases: int = 0


@dataclass
class Cta:
    """Registers, shared memory and the unfinished copies of one CTA."""

    program: Program
    parameters: dict[str, bytes]
    grid: int
    block: int
    memory: Memory
    shared_bytes: np.ndarray
    by_warp: bool = False
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    barriers: dict[int, Barrier] = field(default_factory=dict)
    copies: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        threads = self.program.threads
        self.shared = Memory({0: self.shared_bytes})
        self.lanes = np.arange(threads, dtype=np.int64)
        self.everyone = np.ones(threads, bool)
        self.blocked = np.zeros(threads, bool)
        self.specials = {
            "%tid.x": np.arange(threads, dtype=np.uint32),
            "%laneid": np.arange(threads, dtype=np.uint32) % LANES,
            "%ctaid.x": np.full(threads, self.block, np.uint32),
            "%nctaid.x": np.full(threads, self.grid, np.uint32),
            **{f"%tid.{axis}": np.zeros(threads, np.uint32) for axis in "yz"},
            **{
                f"%ntid.{axis}": np.full(threads, size, np.uint32)
                for axis, size in zip("xyz", (threads, 1, 1), strict=True)
            },
        }

    def run(self) -> None:
        counter = np.zeros(self.program.threads, np.int64)
        waiting, done = np.zeros((2, self.program.threads), bool)
        targets = set(self.program.labels.values())
        with np.errstate(all="ignore"):
            while not done.all():
                # Lanes that are ahead of a blocked one would meet it again before they exchange anything.
                blocked = self.blocked.reshape(-1, LANES).any(1).repeat(LANES)
                running = ~(waiting | done | blocked)
                if not running.any():
                    if self.blocked.any():
                        raise RuntimeError("threads wait for an mbarrier that nobody completes")
                    waiting[:] = False
                    continue
                if self.by_warp:
                    warps = self.lanes // LANES
                    running &= warps == warps[running][0]
                at = int(counter[running].min())
                active = running & (counter == at)
                if active.all():
                    active = self.everyone
                while True:
                    step = self.program.code[at]
                    taken = active & self._guard(step) if step.guard else active
                    kind = step.parts[0]
                    at += 1
                    if kind == "bra":
                        counter[active] = at
                        counter[taken] = self.program.labels[step.operands[0]]
                        break
                    if kind == "ret":
                        counter[active] = at
                        done |= taken
                        break
                    if kind == "bar":
                        counter[active] = at
                        waiting |= taken
                        break
                    if step.parts[:2] == ("mbarrier", "try_wait"):
                        self.blocked |= taken & ~self._is_complete(step, taken)
                        counter[active] = at
                        counter[self.blocked & taken] -= 1
                        break
                    self._execute(step, taken)
                    if at in targets:
                        counter[active] = at
                        break

    def _guard(self, step: Instruction) -> np.ndarray:
        value = self._register(step.guard)
        return ~value if step.negated else value

    def _register(self, name: str) -> np.ndarray:
        """Its values, in an array that nothing writes into."""
        register = self.registers.get(name)
        if register is None:
            register = self.registers[name] = np.zeros(self.program.threads, register_dtype(name))
        return register

    def _value(self, text: str, dtype: type) -> np.ndarray:
        """An operand as a vector of ``dtype``: the bits of a register, or a constant."""
        value = self.registers.get(text)
        if value is None:
            if text in self.specials:
                return self.specials[text]
            if not text.startswith("%"):
                return constant(text, dtype, self.program.threads)
            value = self._register(text)
        if value.dtype.type is dtype:
            return value
        if value.dtype.itemsize == np.dtype(dtype).itemsize:
            return value.view(dtype)
        return value.astype(dtype)

    def _set(self, name: str, value: np.ndarray, where: np.ndarray) -> None:
        if name == "_":
            return
        dtype = register_dtype(name)
        if value.dtype.type is not dtype:
            same = value.dtype.itemsize == np.dtype(dtype).itemsize
            value = np.ascontiguousarray(value).view(dtype) if same else value.astype(dtype)
        if where is not self.everyone:
            value = np.where(where, value, self._register(name))
        self.registers[name] = value

    def _execute(self, step: Instruction, where: np.ndarray) -> None:
        kind = step.parts[0]
        if kind in ("ld", "st"):
            self._move(step, where)
        elif kind == "cp":
            self._copy(step, where)
        elif kind == "mov":
            self._mov(step, where)
        elif kind in ("shfl", "redux"):
            self._across(step, where)
        elif kind == "mbarrier":
            self._arrive(step, where)
        elif kind == "atom":
            self._add(step, where)
        elif kind not in (
            "griddepcontrol",
            "fence",
        ):  # there is no kernel before, and all see what one has written
            compute = COMPUTE.get(kind)
            if compute is None:
                raise NotImplementedError(f"instruction {'.'.join(step.parts)}")
            self._set(step.operands[0], compute(self, step), where)

    def _address(self, text: str) -> tuple[str, int]:
        base, _, offset = text.strip("[]").partition("+")
        return base, int(offset or 0)

    def _move(self, step: Instruction, where: np.ndarray) -> None:
        """Loads and stores."""
        space = step.parts[1]
        size = int(step.parts[-1][1:]) // 8
        registers, place = step.operands if step.parts[0] == "ld" else step.operands[::-1]
        names = split_operands(registers.strip("{}"))
        base, offset = self._address(place)
        if space == "param":
            for i, name in enumerate(names):
                raw = self.parameters[base][offset + i * size :][:size]
                value = np.full(self.program.threads, int.from_bytes(raw, "little"), f"u{size}")
                self._set(name, value, where)
            return
        memory = self.shared if space == "shared" else self.memory
        addresses = (self._value(base, np.int64 if space == "global" else np.uint32) + offset)[where]
        addresses = addresses.astype(np.uint64)
        if step.parts[0] == "ld":
            data = memory.read(addresses, size * len(names)).view(f"u{size}")
            for i, name in enumerate(names):
                value = np.zeros(self.program.threads, f"u{size}")
                value[where] = data[:, i]
                self._set(name, value, where)
        else:
            values = [self._value(name, np.dtype(f"u{size}").type)[where] for name in names]
            memory.write(addresses, np.ascontiguousarray(np.stack(values, 1)).view(np.uint8))

    def _is_complete(self, step: Instruction, where: np.ndarray) -> np.ndarray:
        """Which of some threads need not wait any longer for the phase of an mbarrier that they name by its parity."""
        (base, offset), result = self._address(step.operands[1]), np.zeros_like(where)
        addresses, parities = self._value(base, np.uint32), self._value(step.operands[2], np.uint32)
        for thread in np.flatnonzero(where):
            phases = self.barriers[int(addresses[thread]) + offset].phases
            result[thread] = phases % 2 != parities[thread]
        return result

    def _arrive(self, step: Instruction, where: np.ndarray) -> None:
        """Make an mbarrier, or arrive at one, thread by thread."""
        makes = step.parts[1] == "init"
        assert makes or step.parts[1] == "arrive", step.parts
        base, offset = self._address(step.operands[0 if makes else 1])
        addresses, counts = self._value(base, np.uint32), self._value(step.operands[-1], np.uint32)
        for thread in np.flatnonzero(where):
            address, count = int(addresses[thread]) + offset, int(counts[thread])
            if makes:
                self.barriers[address] = Barrier(count, count)
                continue
            barrier = self.barriers[address]
            barrier.pending -= count
            assert barrier.pending >= 0, "more arrivals than an mbarrier has"
            if barrier.pending == 0:
                barrier.pending, barrier.phases = barrier.count, barrier.phases + 1
                self.blocked[:] = False

    def _add(self, step: Instruction, where: np.ndarray) -> None:
        """Atomically, thread by thread, to a word of global memory."""
        assert step.parts[1] == "global" and step.parts[-2:] == ("add", "u32"), step.parts
        base, offset = self._address(step.operands[1])
        addresses = (self._value(base, np.int64) + offset).astype(np.uint64)
        added, before = self._value(step.operands[2], np.uint32), np.zeros(len(where), np.uint32)
        for thread in np.flatnonzero(where):
            word = self.memory.read(addresses[[thread]], 4)
            before[thread] = word.view(np.uint32)[0, 0]
            total = word.view(np.uint32) + added[thread]
            self.memory.write(addresses[[thread]], total.view(np.uint8))
        self._set(step.operands[0], before, where)

    def _copy(self, step: Instruction, where: np.ndarray) -> None:
        """cp.async of 16 bytes: read now, there only after the wait of the thread that issued it."""
        if step.parts[2] == "commit_group":
            return
        if step.parts[2] == "wait_group":
            assert int(step.operands[0]) == 0
            issued, self.copies = self.copies, []
            for copy in issued:
                waits = where[copy[0]]
                _, addresses, data = (x[waits] for x in copy)
                self.shared.write(addresses, data)
                self.copies.append(tuple(x[~waits] for x in copy))
            self.copies = [copy for copy in self.copies if copy[0].size]
            return
        target, source, length = step.operands[0], step.operands[1], step.operands[3]
        addresses = self._value(self._address(target)[0], np.uint32)[where].astype(np.uint64)
        size = self._value(length, np.uint32)[where]
        data = np.zeros((len(addresses), 16), np.uint8)
        sources = self._value(self._address(source)[0], np.uint64)[where]
        data[size == 16] = self.memory.read(sources[size == 16], 16)
        assert np.isin(size, (0, 16)).all()
        self.memory.read(sources, 16)  # even those that are not read must be addresses of something
        self.shared.write(addresses, np.full_like(data, GARBAGE))
        self.copies.append((np.flatnonzero(where), addresses, data))

    def _mov(self, step: Instruction, where: np.ndarray) -> None:
        target, source = step.operands
        if source.startswith("{"):
            low, high = (
                self._value(x, np.uint16).astype(np.uint32) for x in split_operands(source.strip("{}"))
            )
            self._set(target, low | high << np.uint32(16), where)
        elif target.startswith("{"):
            word = self._value(source, np.uint32)
            for i, name in enumerate(split_operands(target.strip("{}"))):
                self._set(name, (word >> np.uint32(16 * i)).astype(np.uint16), where)
        else:
            self._set(target, self._value(source, self._register(target).dtype.type), where)

    def _across(self, step: Instruction, where: np.ndarray) -> None:
        """Shuffles and reductions, which take whole warps."""
        warps = where.reshape(-1, LANES)
        assert (warps.all(1) == warps.any(1)).all(), f"{step.parts} by a part of a warp"
        value = self._value(step.operands[1], np.uint32)
        if step.parts[0] == "redux":
            largest = value.view(np.int32).reshape(-1, LANES).max(1)
            self._set(step.operands[0], largest.repeat(LANES), where)
        else:
            lane = self.lanes % LANES
            other = self._value(step.operands[2], np.int32)
            other = lane ^ other if step.parts[2] == "bfly" else other
            self._set(step.operands[0].partition("|")[0], value[self.lanes - lane + other], where)


Compute = Callable[[Cta, Instruction], np.ndarray]


@cache
def register_dtype(name: str) -> type:
    return REGISTERS[re.match(r"%[a-z]+", name)[0]]


@cache
def constant(text: str, dtype: type, threads: int) -> np.ndarray:
    """An operand that is a number, for all threads."""
    if text.startswith("0f"):
        value = np.full(threads, int(text[2:], 16), np.uint32).view(np.float32)
    else:
        number = 0 if text.startswith("__dynamic_shmem__") else int(text, 0)
        bits = 8 * np.dtype(dtype).itemsize
        value = np.full(threads, number % 2**bits, f"u{bits // 8}").view(dtype)
    value.flags.writeable = False
    return value


@cache
def dtype_of(suffix: str) -> type:
    sign, bits = suffix[0], int(suffix[1:])
    if sign == "f":
        return {16: np.float16, 32: np.float32}[bits]
    return np.dtype(f"{'i' if sign == 's' else 'u'}{bits // 8}").type


def typed(operation: Callable[..., np.ndarray]) -> Compute:
    """An operation on operands of the type that the instruction names last."""

    def compute(cta: Cta, step: Instruction) -> np.ndarray:
        if step.parts[-1] == "f16x2":
            return of_halves(operation, *(cta._value(x, np.uint32) for x in step.operands[1:]))
        dtype = np.bool_ if step.parts[-1] == "pred" else dtype_of(step.parts[-1])
        return operation(*[cta._value(x, dtype) for x in step.operands[1:]])

    return compute


def of_halves(operation: Callable[..., np.ndarray], *words: np.ndarray) -> np.ndarray:
    """An operation on pairs of float16, in float64, which has their sums and products, and rounded once.

    There is one NaN, as on a GPU.
    """
    pairs = [np.ascontiguousarray(word).view(np.float16).astype(np.float64) for word in words]
    result = operation(*pairs)
    bits = np.where(np.isnan(result), NAN_OF_HALVES, result.astype(np.float16).view(np.uint16))
    return bits.astype(np.uint16).view(np.uint32)


NAN_OF_HALVES = np.uint16(0x7FFF)


def shift(operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Compute:
    """Shifts by at least the width give what shifting bit by bit would."""

    def compute(cta: Cta, step: Instruction) -> np.ndarray:
        dtype = dtype_of(step.parts[-1])
        bits = 8 * np.dtype(dtype).itemsize
        value, count = cta._value(step.operands[1], dtype), cta._value(step.operands[2], np.uint32)
        result = operation(value, np.minimum(count, bits - 1).astype(dtype))
        if np.dtype(dtype).kind == "i":
            return result
        return np.where(count < bits, result, np.zeros_like(result))

    return compute


def minimum(cta: Cta, step: Instruction) -> np.ndarray:
    """With .xorsign.abs the smaller magnitude, negative where one of the two is."""
    if "xorsign" not in step.parts:
        return typed(np.fmin)(cta, step)
    signs = np.uint32(0x80008000)
    a, b = (cta._value(x, np.uint32) for x in step.operands[1:])
    smaller = of_halves(np.fmin, a & ~signs, b & ~signs)
    return smaller | (a ^ b) & signs


def multiply(cta: Cta, step: Instruction) -> np.ndarray:
    part, suffix = step.parts[-2], step.parts[-1]
    if suffix == "f16x2":
        return typed(np.multiply)(cta, step)
    dtype = dtype_of(suffix)
    a, b = (cta._value(x, dtype) for x in step.operands[1:3])
    if suffix.startswith("f"):
        return a * b
    if part == "lo":
        return a * b
    bits = 8 * np.dtype(dtype).itemsize
    wide = a.astype(np.dtype(f"{np.dtype(dtype).kind}{bits // 4}")) * b
    return wide if part == "wide" else (wide >> bits).astype(dtype)


def multiply_add(cta: Cta, step: Instruction) -> np.ndarray:
    product = multiply(cta, step)
    return product + cta._value(step.operands[3], product.dtype.type)


def fused_multiply_add(cta: Cta, step: Instruction) -> np.ndarray:
    if step.parts[-1] == "f16x2":
        return of_halves(lambda a, b, c: a * b + c, *(cta._value(x, np.uint32) for x in step.operands[1:]))
    a, b, c = (cta._value(x, np.float32).astype(np.float64) for x in step.operands[1:])
    # Exact products only: then the sum in float64, rounded to float32, is rounded as if once.
    assert any((np.abs(x * (np.abs(x) - 1)) == 0).all() for x in (b, a))
    return (a * b + c).astype(np.float32)


def compare(cta: Cta, step: Instruction) -> np.ndarray:
    comparison, suffix = step.parts[1], step.parts[-1]
    a, b = (cta._value(x, dtype_of(suffix)) for x in step.operands[1:3])
    unordered = np.isnan(a) | np.isnan(b) if suffix.startswith("f") else np.False_
    name = comparison.removesuffix("u") if suffix.startswith("f") else comparison
    result = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[name]
    return result | unordered if comparison != name else result & ~unordered


def select(cta: Cta, step: Instruction) -> np.ndarray:
    dtype = dtype_of(step.parts[-1])
    a, b = (cta._value(x, dtype) for x in step.operands[1:3])
    return np.where(cta._value(step.operands[3], np.bool_), a, b)


def convert(cta: Cta, step: Instruction) -> np.ndarray:
    if step.parts[-1] == "e4m3x2":
        return halves_of_e4m3(np.ascontiguousarray(cta._value(step.operands[1], np.uint16)))
    if step.parts[-2:] == ("e4m3x2", "f16x2"):
        halves = np.ascontiguousarray(cta._value(step.operands[1], np.uint32)).view(np.float16)
        return e4m3_of_halves(halves)
    if step.parts[-2:] == ("f16x2", "f32"):
        high, low = (cta._value(x, np.float32).astype(np.float16).view(np.uint16) for x in step.operands[1:])
        return low | high.astype(np.uint32) << np.uint32(16)
    if "e4m3x2" in step.parts:
        high, low = (to_e4m3(cta._value(x, np.float32)) for x in step.operands[1:])
        return low | high << np.uint16(8)
    to, source = step.parts[-2:]
    return cta._value(step.operands[1], dtype_of(source)).astype(dtype_of(to))


def permute(cta: Cta, step: Instruction) -> np.ndarray:
    low, high, selector = (cta._value(x, np.uint32) for x in step.operands[1:])
    source = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(low)
    for i in range(4):
        number = (selector >> np.uint32(4 * i) & np.uint32(15)).astype(np.uint64)
        assert (number < 8).all()
        byte = (source >> (np.uint64(8) * number) & np.uint64(255)).astype(np.uint32)
        result |= byte << np.uint32(8 * i)
    return result


def three_way_logic(cta: Cta, step: Instruction) -> np.ndarray:
    """Of each bit of three words, the bit of a table that they number, the first word's being the highest."""
    *words, table = (cta._value(x, np.uint32) for x in step.operands[1:])
    result = np.zeros_like(words[0])
    for number in range(8):
        chosen = [word if number & bit else ~word for word, bit in zip(words, (4, 2, 1), strict=True)]
        result |= np.where(
            table >> np.uint32(number) & np.uint32(1), chosen[0] & chosen[1] & chosen[2], np.uint32(0)
        )
    return result


COMPUTE: dict[str, Compute] = {
    "add": typed(np.add),
    "sub": typed(np.subtract),
    "and": typed(np.bitwise_and),
    "or": typed(np.bitwise_or),
    "xor": typed(np.bitwise_xor),
    "not": typed(np.invert),
    "min": minimum,
    "max": typed(np.fmax),
    "abs": typed(np.abs),
    "neg": typed(np.negative),
    "shl": shift(np.left_shift),
    "shr": shift(np.right_shift),
    "div": typed(lambda a, b: (np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)).astype(a.dtype)),
    "rcp": typed(lambda x: np.float32(1.0) / x),
    "mul": multiply,
    "mad": multiply_add,
    "fma": fused_multiply_add,
    "setp": compare,
    "selp": select,
    "cvt": convert,
    "prmt": permute,
    "lop3": three_way_logic,
}
