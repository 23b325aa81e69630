"""What PTX instructions that a warp has had since sm_80 do: cp.async, ldmatrix, mma.sync, and Hopper's stmatrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.hopper.floats import widen
from tests.hopper.hopper_machine import LANES, Step, Warp
from tests.hopper.ptx_text import address_of, operands_of

GARBAGE = 0xCB
BYTES_PER_COPY = 16


def _stmatrix(name: str, ops: list[str]) -> Step:
    base, offset = address_of(ops[0])
    registers = operands_of(ops[1].strip("{}"))
    assert ".trans" not in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint32)
        for i, register in enumerate(registers):
            rows = warp.get(register, np.uint32).reshape(8, 4)
            for row in range(8):
                at = int(addresses[8 * i + row]) + offset
                warp.cta.shared[at : at + 16].view(np.uint32)[:] = rows[row]
                warp.cta.unfenced[at : at + 16] = warp.number + 1

    return step


def _ldmatrix(name: str, ops: list[str]) -> Step:
    registers = operands_of(ops[0].strip("{}"))
    base, offset = address_of(ops[1])
    transposes = ".trans" in name
    assert ".x4." in name

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint32)
        for i, register in enumerate(registers):
            cells = addresses[8 * i : 8 * i + 8, None].astype(np.int64) + offset + np.arange(16)
            rows = np.ascontiguousarray(warp.cta.shared[cells]).view(np.uint16)
            placed = np.ascontiguousarray((rows.T if transposes else rows).reshape(LANES, 2))
            warp.set(register, placed.view(np.uint32)[:, 0], mask)

    return step


def _copy(name: str, ops: list[str]) -> Step:
    """cp.async of 16 bytes a lane, zeros where it ignores its source. Until the wait its target holds garbage."""
    (to, to_offset), (source, source_offset) = address_of(ops[0]), address_of(ops[1])
    assert ".cg." in name and ops[2] == "16"

    def step(warp: Warp, mask: np.ndarray) -> None:
        targets, sources = warp.get(to, np.uint32) + to_offset, warp.get(source, np.uint64)
        is_ignored = warp.get(ops[3], np.bool_)
        cta = warp.cta
        cells = targets[mask].astype(np.int64)[:, None] + np.arange(BYTES_PER_COPY)
        data = np.zeros(cells.shape, np.uint8)
        for i, lane in enumerate(np.flatnonzero(mask)):
            assert targets[lane] % BYTES_PER_COPY == 0
            if not is_ignored[lane]:
                memory, at = cta.buffer(int(sources[lane]) + source_offset)
                assert at % BYTES_PER_COPY == 0 and at + BYTES_PER_COPY <= len(memory), "bad address"
                data[i] = memory[at : at + BYTES_PER_COPY]
        cta.shared[cells] = GARBAGE

        def arrive() -> None:
            cta.shared[cells] = data

        warp.groups["copy"].start(arrive)

    return step


def _mma(name: str, ops: list[str]) -> Step:
    """D = A B + C of 16 x 8 x 16, in float32."""
    kind = name.split(".")[-2]
    assert ".m16n8k16.row.col.f32." in name
    d, a, b, c = (operands_of(op.strip("{}")) for op in ops)
    lane = np.arange(LANES)
    row, column = lane // 4, 2 * (lane % 4)

    def fill(warp: Warp, matrix: np.ndarray, registers: list[str], bands: int) -> np.ndarray:
        for i, register in enumerate(registers):
            pair = np.ascontiguousarray(warp.get(register, np.uint32)).view(np.uint8).reshape(LANES, 2, 2)
            at = (row + 8 * (i % bands))[:, None], (column + 8 * (i // bands))[:, None] + np.arange(2)
            matrix[at] = widen(pair, kind)
        return matrix

    def step(warp: Warp, mask: np.ndarray) -> None:
        assert mask.all()
        product = fill(warp, np.zeros((16, 16), np.float32), a, 2)
        product = product @ fill(warp, np.zeros((8, 16), np.float32), b, 1).T
        sums = [warp.get(register, np.float32) for register in c]
        for i, register in enumerate(d):
            value = product[row + 8 * (i // 2), column + i % 2] + sums[i]
            warp.set(register, value.astype(np.float32), mask)

    return step


WARP_STEPS: dict[str, Callable[[str, list[str]], Step]] = {
    "stmatrix": _stmatrix,
    "ldmatrix": _ldmatrix,
    "mma.sync": _mma,
    "cp.async.cg": _copy,
}
