"""What PTX instructions that a warp has had since sm_80 do: cp.async, ldmatrix, mma.sync, and Hopper's stmatrix."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import numpy as np

from tests.hopper.floats import from_half
from tests.hopper.hopper_machine import EVERY_LANE, LANES, Step, Warp, in_words
from tests.hopper.ptx_text import address_of, operands_of

GARBAGE = 0xCB
BYTES_PER_COPY = 16


ROW_WORDS = np.arange(4)
"""Words of a row of a matrix, 16 bytes."""


def _rows_at(warp: Warp, base: str, offset: int, count: int) -> np.ndarray:
    """Numbers of the words in shared memory of ``count`` rows, whose addresses the first lanes have: (rows, 4)."""
    addresses = warp.get(base, np.uint32)[:count].astype(np.int64) + offset
    assert (addresses % BYTES_PER_COPY == 0).all(), "bad address"
    return addresses[:, None] // 4 + ROW_WORDS


def _stmatrix(name: str, ops: list[str]) -> Step:
    base, offset = address_of(ops[0])
    registers = operands_of(ops[1].strip("{}"))
    assert ".trans" not in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        cells = _rows_at(warp, base, offset, 8 * len(registers))
        words = np.stack([warp.get(register, np.uint32) for register in registers])
        in_words(warp.cta.shared, 4)[cells] = words.reshape(cells.shape)
        warp.cta.unfenced.write(warp.number, cells, 4)

    return step


def _ldmatrix(name: str, ops: list[str]) -> Step:
    registers = operands_of(ops[0].strip("{}"))
    base, offset = address_of(ops[1])
    transposes = ".trans" in name
    assert ".x4." in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        words = in_words(warp.cta.shared, 4)[_rows_at(warp, base, offset, 8 * len(registers))]
        if transposes:
            halves = words.view(np.uint16).reshape(len(registers), 8, 8).transpose(0, 2, 1)
            words = np.ascontiguousarray(halves).view(np.uint32)
        for register, of_lanes in zip(registers, words.reshape(len(registers), LANES), strict=True):
            warp.set(register, of_lanes, mask)

    return step


def _copy(name: str, ops: list[str]) -> Step:
    """cp.async of 16 bytes a lane, or past L1 of 4 too, zeros where it ignores its source, if it may. Until the wait
    its target holds garbage."""
    (to, to_offset), (source, source_offset) = address_of(ops[0]), address_of(ops[1])
    size = int(ops[2])
    assert size == BYTES_PER_COPY or (".ca." in name and size == 4)

    def step(warp: Warp, mask: np.ndarray) -> None:
        cta, of_copy = warp.cta, np.arange(size)
        targets = (warp.get(to, np.uint32) + to_offset)[mask]
        assert (targets % size == 0).all()
        cells = targets.astype(np.int64)[:, None] + of_copy
        data = np.zeros(cells.shape, np.uint8)
        ignored = warp.get(ops[3], np.bool_)[mask] if len(ops) > 3 else np.zeros(len(cells), np.bool_)
        copied = np.flatnonzero(~ignored)
        sources = warp.get(source, np.uint64)[mask][copied] + np.uint64(source_offset % 2**64)
        for memory, which, at in cta.places(sources, size):
            data[copied[which]] = memory[at[:, None] + of_copy]
        cta.shared[cells] = GARBAGE

        def arrive() -> None:
            cta.shared[cells] = data

        warp.groups["copy"].start(arrive)

    return step


def _arrive_of_copies(name: str, ops: list[str]) -> Step:
    """An arrival of each lane at an mbarrier, once what it copies is there."""
    base, offset = address_of(ops[0])
    assert ".noinc." in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        group, cta = warp.groups["copy"], warp.cta
        copies, group.open = group.open, []
        barrier = cta.barriers[int(warp.get(base, np.uint32)[mask][0]) + offset]

        def arrive() -> None:
            for copy in copies:
                copy()
            barrier.pending -= int(mask.sum())
            barrier.settle()

        cta.receive(arrive)

    return step


def _halves_of(rows: int) -> np.ndarray:
    """Which of the halves of all lanes' registers, in the order of registers and lanes, stand at each place of a matrix
    (rows, 16)."""
    register, lane = np.arange(rows // 4)[:, None, None], np.arange(LANES)[:, None]
    bands = rows // 8
    row, column = lane // 4 + 8 * (register % bands), 2 * (lane % 4) + 8 * (register // bands) + np.arange(2)
    return np.argsort((row * 16 + column).ravel()).reshape(rows, 16)


OF_A, OF_B = _halves_of(16), np.ascontiguousarray(_halves_of(8).T)
"""Of the first operand (16, 16), and of the second (16, 8)."""

OF_D = np.arange(LANES) // 4 * 8 + 2 * (np.arange(LANES) % 4) + np.array([[0], [1], [64], [65]])
"""Of a result (16, 8): (registers, lanes)."""


class _Operand:
    """A matrix in registers. What one product has read serves others, while these very registers hold it."""

    def __init__(self, registers: list[str], halves: np.ndarray, kind: str):
        self.registers, self.halves, self.kind = registers, halves, kind
        self.key = " ".join(registers)

    def read(self, warp: Warp) -> np.ndarray:
        words = [warp.registers[x] for x in self.registers]
        kept, matrix = warp.kept_operands.get(self.key, ((), None))
        if len(kept) == len(words) and all(map(is_, kept, words)):
            return matrix
        halves = np.concatenate([word.view(np.uint32) for word in words]).view(np.uint16)
        matrix = from_half(halves[self.halves], self.kind)
        warp.kept_operands[self.key] = words, matrix
        return matrix


def _mma(name: str, ops: list[str]) -> Step:
    """D = A B + C of 16 x 8 x 16, in float32."""
    kind = name.split(".")[-2]
    assert ".m16n8k16.row.col.f32." in name
    d, a, b, c = (operands_of(op.strip("{}")) for op in ops)
    first, second = _Operand(a, OF_A, kind), _Operand(b, OF_B, kind)

    def step(warp: Warp, mask: np.ndarray) -> None:
        assert mask is EVERY_LANE or mask.all()
        product = first.read(warp) @ second.read(warp)
        sums = np.concatenate([warp.get(register, np.float32) for register in c]).reshape(OF_D.shape)
        sums += product.ravel()[OF_D]
        warp.registers.update(zip(d, sums, strict=True))

    return step


WARP_STEPS: dict[str, Callable[[str, list[str]], Step]] = {
    "stmatrix": _stmatrix,
    "ldmatrix": _ldmatrix,
    "mma.sync": _mma,
    "cp.async.cg": _copy,
    "cp.async.ca": _copy,
    "cp.async.mbarrier": _arrive_of_copies,
}
