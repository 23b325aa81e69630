"""Runs the PTX of a warp-specialized Hopper kernel on NumPy: TMA, mbarriers, WGMMA, barriers and clusters included.

It knows the instructions of this project's kernels and refuses any other. Warps take turns, in an order drawn anew each
time, and run until they wait. What is asynchronous happens at once, or as late as the waits allow, as ``Timing`` says:
a product then reads its operands when it is waited for, and a copy arrives when nobody can go on without it. A kernel
that gives the same in both has its waits in place. Shared memory that a thread wrote must be fenced before TMA or
WGMMA reads it. Lanes of a warp that part meet again at the lowest program counter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

LANES = 32
QUANTUM = 400
"""Instructions of a warp before another has its turn."""

SPINS = 20
"""Rounds in which the same warps as before have moved, and so may wait in a loop: then a late copy arrives."""

MOST_SPINS = 1000
"""The same, where no copy is under way: then they wait for ever."""

REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64, "f": np.uint32}
SWIZZLE_BITS = {0: 0, 1: 3, 2: 2, 3: 1}
"""By the code in a WGMMA descriptor: how many address bits, from bit 4, are flipped by those from bit 7."""

CLUSTER_WINDOW = 1 << 24
"""Shared memory of the CTA of rank r in a cluster starts for all of them at r + 1 of these."""

Step = Callable[["Warp", np.ndarray], None]


SHARED_BYTES = 232448


class Waiting(Exception):
    """A warp cannot go on before another has done something."""


class Unfenced:
    """What warps have written to shared memory and not fenced since."""

    def __init__(self) -> None:
        self.writer = np.zeros(SHARED_BYTES, np.uint8)
        """Of each byte: the warp, plus 1, or 0."""
        self.written: dict[int, list[tuple[np.ndarray, int]]] = {}
        """By warp: cells that it has written since its last fence, in units of so many bytes."""

    def write(self, warp: int, cells: np.ndarray, size: int) -> None:
        in_words(self.writer, size)[cells] = int.from_bytes(bytes([warp + 1]) * size, "little")
        self.written.setdefault(warp, []).append((cells, size))

    def fence(self, warp: int) -> None:
        """Forget what the warp wrote, but where another has written since."""
        for cells, size in self.written.pop(warp, ()):
            writers = in_words(self.writer, size)
            of_cells = writers[cells].reshape(-1, 1).view(np.uint8)
            of_cells[of_cells == warp + 1] = 0
            writers[cells] = of_cells.view(writers.dtype).reshape(cells.shape)

    def deliver(self, cells: np.ndarray) -> None:
        """Bytes that the async proxy writes."""
        if self.written:
            self.writer[cells] = 0

    def check(self, cells: np.ndarray, size: int) -> None:
        if self.written:
            writers = in_words(self.writer, size)[cells]
            assert not writers.any(), "shared memory is read through the async proxy without a fence"


@dataclass
class TensorMap:
    """What TMA knows of a tensor: its elements (innermost dimension first), the box that it copies, and its swizzle.
    ``policies`` are those with which L2 was told to keep what was loaded."""

    data: np.ndarray
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    policies: set[int] = field(default_factory=set)

    def places(self, start: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Element offsets of a box in its own order, and which of them lie inside of the tensor."""
        grids = np.meshgrid(*(np.arange(n) + s for n, s in zip(self.box, start, strict=True)), indexing="ij")
        inside = np.ones(self.box, bool)
        address, width = np.zeros(self.box, np.uint64), self.data.itemsize
        for grid, size, stride in zip(grids, self.sizes, self.strides, strict=True):
            inside &= (grid >= 0) & (grid < size)
            # Addresses are of 64 bits, and wrap.
            address += grid.astype(np.uint64) * np.uint64(stride * width)
        return (address.view(np.int64) // width).ravel("F"), inside.ravel("F")


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    pending: int
    phase: int = 0
    tx: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than a barrier expects"
        if self.pending == 0 and self.tx == 0:
            self.phase ^= 1
            self.pending = self.count


def swizzled(address: np.ndarray, bits: int) -> np.ndarray:
    mask = (1 << bits) - 1
    return address ^ ((address >> 7 & mask) << 4)


@dataclass(frozen=True)
class Timing:
    """Whether what is asynchronous happens as late as it may, and the seed of the order in which warps take turns."""

    is_late: bool = False
    seed: int = 0


AT_ONCE = Timing()


@dataclass
class Cta:
    """Shared memory and barriers of one CTA, and the buffers of global memory by their first address.

    ``older`` are buffers as a relaxed load finds them, where what is there is not settled. ``arriving`` are copies
    under way to it. ``cluster`` are the CTAs of its cluster by rank, ``cluster_arrivals`` how
    often each warp has arrived at their barrier. ``asked`` are the addresses whose lines of L2 it has asked for.
    """

    parameters: dict[str, Any]
    memory: dict[int, np.ndarray]
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    timing: Timing = AT_ONCE
    shared: np.ndarray = field(default_factory=lambda: np.full(SHARED_BYTES, 0xCB, np.uint8))
    barriers: dict[int, Barrier] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    generation: dict[int, int] = field(default_factory=dict)
    unfenced: Unfenced = field(default_factory=Unfenced)
    arriving: list[Callable[[], None]] = field(default_factory=list)
    cluster: list[Cta] = field(default_factory=list)
    rank: int = 0
    cluster_arrivals: dict[int, int] = field(default_factory=dict)
    older: dict[int, np.ndarray] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    has_ended: bool = False

    def locate(self, address: int) -> tuple[Cta, int]:
        """The CTA and the offset that an address in the shared memory of the cluster means."""
        window, offset = divmod(address, CLUSTER_WINDOW)
        cta = self.cluster[window - 1] if window else self
        assert not cta.has_ended, "a CTA of the cluster has ended whose shared memory is used"
        return cta, offset

    def receive(self, copy: Callable[[], None]) -> None:
        assert not self.has_ended, "a CTA has ended to which something is copied"
        if self.timing.is_late:
            self.arriving.append(copy)
        else:
            copy()

    def read_async(self, cells: np.ndarray, size: int = 1) -> np.ndarray:
        """What TMA or WGMMA finds at these addresses, in units of ``size`` bytes."""
        self.unfenced.check(cells, size)
        return in_words(self.shared, size)[cells]

    def places(self, addresses: np.ndarray, size: int) -> Iterator[Places]:
        """Where ``size`` bytes at each of the addresses in global memory lie, which are multiples of the size."""
        left = np.arange(len(addresses))
        while left.size:
            data, first = self.buffer(int(addresses[left[0]]))
            at = (addresses[left] - addresses[left[0]]).view(np.int64) + first
            inside = (at >= 0) & (at < len(data))
            assert inside[0], "bad address"
            if inside.all():
                yield _checked(data, left, at, size)
                return
            yield _checked(data, left[inside], at[inside], size)
            left = left[~inside]

    def older_of(self, data: np.ndarray) -> np.ndarray:
        """A buffer as a relaxed load finds it."""
        return next((old for base, old in self.older.items() if self.memory[base] is data), data)

    def buffer(self, address: int) -> tuple[np.ndarray, int]:
        base = max(b for b in self.memory if b <= address)
        return self.memory[base], address - base


Places = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A buffer, which of some addresses lie in it, and at what bytes."""


def _checked(data: np.ndarray, which: np.ndarray, at: np.ndarray, size: int) -> Places:
    assert not (at % size).any() and at.min() >= 0 and at.max() + size <= len(data), "bad address"
    return data, which, at


def in_words(data: np.ndarray, size: int) -> np.ndarray:
    """Bytes as unsigned integers of ``size`` bytes."""
    return data[: len(data) // size * size].view(WORDS[size])


class Groups:
    """Asynchronous work of a warp: committed in groups, finished in their order."""

    def __init__(self, is_late: bool):
        self.is_late = is_late
        self.open: list[Callable[[], None]] = []
        self.committed: list[list[Callable[[], None]]] = []

    def start(self, work: Callable[[], None]) -> None:
        if self.is_late:
            self.open.append(work)
        else:
            work()

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        """Finish all groups but the last ``pending``."""
        while len(self.committed) > pending:
            for work in self.committed.pop(0):
                work()


ALL, NONE = bytes([1]) * LANES, bytes(LANES)
"""Masks of all lanes and of none, as bytes: comparing those takes a tenth of the time of a reduction."""

EVERY_LANE = np.ones(LANES, bool)
EVERY_LANE.flags.writeable = False
"""The mask of all lanes; what is set under it takes no look at the mask."""

SIZES = {
    np.dtype(f"{kind}{size}").type: size
    for kind in "iuf"
    for size in (1, 2, 4, 8)
    if kind + str(size) != "f1"
}
WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
UNSIGNED = {kind: np.dtype(f"u{size}").type for kind, size in SIZES.items()} | {np.bool_: np.bool_}


class Warp:
    """Registers and program counters of 32 lanes."""

    def __init__(self, program: Program, cta: Cta, number: int, threads: int):
        self.program, self.cta, self.number = program, cta, number
        self.registers: dict[str, np.ndarray] = {}
        self.kept_sums: dict[int, tuple[list[np.ndarray], np.ndarray]] = {}
        self.kept_operands: dict[str, tuple[list[np.ndarray], np.ndarray]] = {}
        self.counter = np.zeros(LANES, np.int64)
        self.together: int | None = 0
        """The program counter while all lanes share it, which ``counter`` then does not hold."""
        self.done = np.zeros(LANES, bool)
        self.has_ended = False
        self.awaited: tuple[int, int] | None = None
        self.groups = {kind: Groups(cta.timing.is_late) for kind in ("wgmma", "bulk", "copy")}
        lane = np.arange(LANES, dtype=np.uint32)
        same = {
            f"%{name}.{axis}": value
            for name, values in (("ctaid", cta.block), ("nctaid", cta.grid), ("ntid", (threads, 1, 1)))
            for axis, value in zip("xyz", values, strict=True)
        }
        self.special = {name: np.full(LANES, value, np.uint32) for name, value in same.items()}
        self.special |= {"%tid.x": lane + number * LANES, "%laneid": lane}
        self.special |= {"%tid.y": lane * 0, "%tid.z": lane * 0}
        self.special["%cluster_ctarank"] = np.full(LANES, cta.rank, np.uint32)

    def get(self, text: str, dtype: type) -> np.ndarray:
        """An operand as 32 values of ``dtype``, whose bits a register of that size holds."""
        value = self.registers.get(text)
        if value is not None:
            return value if value.dtype.type is dtype else _as(value, dtype)
        if text in self.special:
            return self.special[text].view(dtype)
        value = constant(text, dtype)
        if value is not None:
            return value
        if text in self.cta.parameters:
            return np.full(LANES, self.program.parameters.index(text), dtype)
        self.registers[text] = np.zeros(LANES, dtype)
        return self.registers[text]

    def set(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        """A register has an array of its own, of whatever dtype was written last, which nothing writes into."""
        if name == "_":
            return
        if mask is EVERY_LANE or mask.tobytes() == ALL:
            self.registers[name] = value
            return
        old = self.registers.get(name)
        if old is None or old.itemsize != value.itemsize:
            old = np.zeros(LANES, value.dtype)
        self.registers[name] = np.where(mask, value, old.view(value.dtype))

    def turn(self) -> bool:
        """Run until it waits, ends or has had its quantum; whether anything was done."""
        if self.awaited is not None:
            number, generation = self.awaited
            if self.cta.generation.get(number, 0) == generation:
                return False
            self.awaited = None
        code, targets, done_before = self.program.code, self.program.targets, 0
        while not self.has_ended and done_before < QUANTUM:
            at, mask = self._next()
            try:
                while True:
                    guard, negated, step, target = code[at]
                    taken = self._taken(guard, negated, mask) if guard else mask
                    at += 1
                    done_before += 1
                    if target is not None:
                        self._go(mask, at)
                        self._branch(taken, target)
                        break
                    if taken is EVERY_LANE or taken.tobytes() != NONE:
                        step(self, taken)
                    if self.awaited is not None or at in targets:
                        self._go(mask, at)
                        break
            except Waiting:
                self._go(mask, at - 1)
                return done_before > 1
            if self.awaited is not None:
                return True
        return done_before > 0

    def _next(self) -> tuple[int, np.ndarray]:
        """The lowest program counter, and the lanes that are there."""
        if self.together is not None:
            return self.together, EVERY_LANE
        live = ~self.done
        at = int(self.counter[live].min())
        mask = live & (self.counter == at)
        if mask.tobytes() != ALL:
            return at, mask
        self.together = at
        return at, EVERY_LANE

    def _taken(self, guard: str, negated: bool, mask: np.ndarray) -> np.ndarray:
        value = self.registers[guard]
        value = ~value if negated else value
        if mask is not EVERY_LANE:
            return mask & value
        return EVERY_LANE if value.tobytes() == ALL else value

    def _go(self, mask: np.ndarray, at: int) -> None:
        if mask is EVERY_LANE:
            self.together = at
        else:
            self.counter[mask] = at

    def _branch(self, taken: np.ndarray, target: int) -> None:
        """To ``target``, of lanes that have gone on to what follows, or to the end."""
        if taken is EVERY_LANE and target >= 0:
            self.together = target
        elif taken.tobytes() != NONE:
            if self.together is not None:
                self.counter[:], self.together = self.together, None
            if target < 0:
                self.done |= taken
                self.has_ended = self.done.tobytes() == ALL
            else:
                self.counter[taken] = target


def _as(value: np.ndarray, dtype: type) -> np.ndarray:
    if value.itemsize == SIZES.get(dtype):
        return value.view(dtype)
    return value.view(UNSIGNED[value.dtype.type]).astype(dtype)


@cache
def constant(text: str, dtype: type) -> np.ndarray | None:
    """Of an operand that is a number, its value in all lanes."""
    value = None
    if text.startswith("0f"):
        value = np.full(LANES, int(text[2:], 16), np.uint32).view(dtype)
    elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        if np.dtype(dtype).kind == "f":
            value = np.full(LANES, float(int(text, 0)), dtype)
        else:
            bits = 8 * np.dtype(dtype).itemsize
            value = np.full(LANES, int(text, 0) % 2**bits, f"u{bits // 8}").view(dtype)
    elif re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", text):
        value = np.full(LANES, float(text), dtype)
    elif text.startswith("__dynamic_shmem__"):
        value = np.zeros(LANES, dtype)
    if value is not None:
        value.flags.writeable = False
    return value


@dataclass(frozen=True)
class Program:
    """Decoded instructions: (guard, whether it must be false, step, target of a branch or -1 for the end)."""

    code: list[tuple[str, bool, Step | None, int | None]]
    targets: frozenset[int]
    parameters: list[str]
    threads: int


def parse(ptx: str) -> Program:
    """The only kernel of a module."""
    from tests.hopper.hopper_steps import decode

    header, _, body = ptx.partition(".reqntid")
    parameters = re.findall(r"\.param [^,)]*?(\w+_param_\d+)", header)
    threads = int(re.match(r"\s*(\d+)", body)[1])
    labels: dict[str, int] = {}
    decoded: list[tuple[str, bool, str, str]] = []
    for item in tidy(body):
        if item.endswith(":"):
            labels[item[:-1]] = len(decoded)
            continue
        match = re.match(r"(?:@(!?)([%\w.$]+)\s+)?([a-z][\w.:]*)\s*(.*)", item)
        assert match, item
        decoded.append((match[2] or "", match[1] == "!", match[3], match[4]))
    code: list[tuple[str, bool, Step | None, int | None]] = []
    for guard, negated, name, rest in decoded:
        if name in ("bra", "bra.uni"):
            code.append((guard, negated, None, labels[rest.strip()]))
        elif name == "ret":
            code.append((guard, negated, None, -1))
        else:
            code.append((guard, negated, decode(name, rest), None))
    return Program(code, frozenset(labels.values()), parameters, threads)


def tidy(body: str) -> list[str]:
    """Statements without declarations, the names of each block of inline assembly made its own."""
    text = re.sub(r"//.*", "", body)
    text = text[text.index("{") + 1 : text.rindex("}")]
    items: list[str] = []
    blocks = 0
    for piece in _pieces(text):
        if isinstance(piece, str):
            items += _split(piece)
        else:
            blocks += 1
            names = set(re.findall(r"^\s*([A-Za-z]\w*):", piece[0], re.M))
            for declared in re.findall(r"\.reg\s+\.\w+\s+([^;]+);", piece[0]):
                names |= {name.strip() for name in declared.split(",")}
            renamed = piece[0]
            for name in names:
                renamed = re.sub(rf"(?<![\w.%$]){re.escape(name)}(?![\w.])", f"{name}${blocks}", renamed)
            items += _split(renamed)
    return items


def _pieces(text: str) -> Iterator[Any]:
    """Text outside of blocks as strings, blocks that declare registers as one-element lists."""
    end = 0
    for match in BLOCK.finditer(text):
        if match.start() < end:  # inside of the last block
            continue
        yield text[end : match.start()]
        depth = 0
        for brace in BRACE.finditer(text, match.start()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                break
        yield [text[match.start() + 1 : brace.start()]]
        end = brace.end()
    yield text[end:]


BLOCK, BRACE = re.compile(r"\{\s*\.reg"), re.compile(r"[{}]")


def _split(text: str) -> list[str]:
    items = []
    for part in re.split(r";|(?<=:)\s*\n|(?<=:) ", text):
        part = " ".join(part.split())
        while label := re.match(r"([$\w]+):(?!:)\s*", part):
            items.append(label[1] + ":")
            part = part[label.end() :]
        if part and not part.startswith(".") and part not in ("{", "}"):
            items.append(part)
    return items


def run(program: Program, *ctas: Cta) -> None:
    """The CTAs of a cluster, by rank, to their end."""
    order = np.random.default_rng(ctas[0].timing.seed)
    warps: list[Warp] = []
    for rank, cta in enumerate(ctas):
        cta.cluster, cta.rank = list(ctas), rank
        warps += [Warp(program, cta, number, program.threads) for number in range(program.threads // LANES)]
    with np.errstate(all="ignore"):
        moved: set[Warp] = set()
        alike = 0
        while running := [warp for warp in warps if not warp.has_ended]:
            turns = [running[i] for i in order.permutation(len(running))]
            before, moved = moved, {warp for warp in turns if warp.turn()}
            alike = alike + 1 if moved == before else 0
            for cta in ctas:
                if all(warp.has_ended for warp in warps if warp.cta is cta):
                    _end(cta, [warp for warp in warps if warp.cta is cta])
            waiting = [cta for cta in ctas if cta.arriving]
            assert moved or waiting, "every warp waits for another"
            assert waiting or alike < MOST_SPINS, "warps wait in a loop for what no other does"
            if waiting and (not moved or alike >= SPINS):
                waiting[order.integers(len(waiting))].arriving.pop(0)()
                alike = 0


def _end(cta: Cta, warps: list[Warp]) -> None:
    assert not cta.arriving, "a CTA ends with copies under way to it"
    cta.has_ended = True
    for warp in warps:
        products, copies = warp.groups["wgmma"], warp.groups["bulk"]
        assert not products.open and not any(products.committed), "a warp ends with products under way"
        copies.commit()
        copies.wait(0)
        assert not warp.groups["copy"].open
