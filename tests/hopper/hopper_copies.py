"""What the bulk copies of PTX do to a warp of ``hopper_machine``: TMA, reductions, and copies within a cluster."""

from __future__ import annotations

import re

import numpy as np

from tests.hopper.hopper_machine import Barrier, Cta, Step, TensorMap, Warp, swizzled
from tests.hopper.ptx_text import address_of, operands_of


def bulk(name: str, ops: list[str]) -> Step:
    if name.startswith("cp.reduce."):
        return _to_global(ops, adds=True)
    if name.startswith("cp.async.bulk.global.shared::cta."):
        return _to_global(ops, adds=False)
    if name.startswith("cp.async.bulk.shared::cluster.shared::cta."):
        return _send(ops)
    assert ".tensor." in name, name
    if ".shared::cta.global." in name or ".shared::cluster.global." in name:
        return _load(ops, ".multicast::cluster" in name, ".L2::cache_hint" in name)
    return _store(ops)


class Tile:
    """A box of a tensor and its place in shared memory, as an operand of TMA names them."""

    def __init__(self, shared: str, tensor: str):
        self.base, self.offset = address_of(shared)
        match = re.match(r"\[([^,]+),\s*\{(.*)\}\]", tensor)
        self.map_name, self.coordinates = match[1], operands_of(match[2])

    def of(self, warp: Warp, lane: int) -> tuple[TensorMap, np.ndarray, np.ndarray, np.ndarray]:
        """The map; element offsets of the box and which of them lie in the tensor; bytes in shared memory of each."""
        number = int(warp.get(self.map_name, np.uint64)[lane])
        tensor_map = warp.cta.parameters[warp.program.parameters[number]]
        offsets, inside = tensor_map.places(self.start(warp, lane))
        width = tensor_map.data.dtype.itemsize
        at = int(warp.get(self.base, np.uint32)[lane]) + self.offset
        address = swizzled(at + width * np.arange(len(offsets)), tensor_map.swizzle)
        return tensor_map, offsets, inside, address[:, None] + np.arange(width)

    def start(self, warp: Warp, lane: int) -> list[int]:
        """Where the box begins in the tensor, or in front of it."""
        return [int(warp.get(x, np.int32)[lane]) for x in self.coordinates]


def _deliver(cta: Cta, cells: np.ndarray, values: np.ndarray, barrier: Barrier) -> None:
    """Bytes from the async proxy, of which a barrier counts the arrival."""
    cta.shared[cells] = values
    cta.unfenced.deliver(cells)
    barrier.tx -= cells.size
    barrier.settle()


def _load(ops: list[str], is_multicast: bool, has_policy: bool) -> Step:
    tile, (place, at_barrier) = Tile(ops[0], ops[1]), address_of(ops[2])

    def step(warp: Warp, mask: np.ndarray) -> None:
        lane = int(np.flatnonzero(mask)[0])
        # It must be of one lane, or it arrives once for each.
        assert mask.sum() == 1
        tensor_map, offsets, inside, cells = tile.of(warp, lane)
        barrier = int(warp.get(place, np.uint32)[lane]) + at_barrier
        if has_policy:
            tensor_map.policies.add(int(warp.get(ops[-1], np.uint64)[lane]))
        targets = [warp.cta]
        if is_multicast:
            to = int(warp.get(ops[3], np.uint16)[lane])
            assert to < 1 << len(warp.cta.cluster)
            targets = [cta for cta in warp.cta.cluster if to >> cta.rank & 1]

        def load(cta: Cta) -> None:
            values = np.zeros(len(offsets), tensor_map.data.dtype)
            values[inside] = tensor_map.data[offsets[inside]]
            _deliver(cta, cells, values.view(np.uint8).reshape(cells.shape), cta.barriers[barrier])

        for cta in targets:
            cta.receive(lambda cta=cta: load(cta))

    return step


def _store(ops: list[str]) -> Step:
    tile = Tile(ops[1], ops[0])

    def step(warp: Warp, mask: np.ndarray) -> None:
        # A store by a whole warp becomes one instruction.
        lane = int(np.flatnonzero(mask)[0])
        tensor_map, offsets, inside, cells = tile.of(warp, lane)
        # What is loaded may begin in front of a tensor; a store that does is an illegal instruction.
        assert min(tile.start(warp, lane)) >= 0

        def store() -> None:
            values = warp.cta.read_async(cells).view(tensor_map.data.dtype)[:, 0]
            tensor_map.data[offsets[inside]] = values[inside]

        warp.groups["bulk"].start(store)

    return step


def _send(ops: list[str]) -> Step:
    """From the own shared memory to that of any CTA of the cluster, where a barrier counts its arrival."""
    places = [address_of(ops[i]) for i in (0, 1, 3)]

    def step(warp: Warp, mask: np.ndarray) -> None:
        lane = int(np.flatnonzero(mask)[0])
        assert mask.sum() == 1
        to, source, barrier = (int(warp.get(base, np.uint32)[lane]) + offset for base, offset in places)
        size = int(warp.get(ops[2], np.uint32)[lane])
        (cta, target), (with_barrier, at) = warp.cta.locate(to), warp.cta.locate(barrier)
        assert with_barrier is cta and (target | source | size) % 16 == 0
        cells = np.arange(size)
        # Now, or a fence after the copy would do.
        warp.cta.read_async(source + cells)
        cta.receive(
            lambda: _deliver(cta, target + cells, warp.cta.read_async(source + cells), cta.barriers[at])
        )

    return step


def _to_global(ops: list[str], adds: bool) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> None:
        lane = int(np.flatnonzero(mask)[0])
        assert mask.sum() == 1
        (base, offset), (source, at) = address_of(ops[0]), address_of(ops[1])
        data, start = warp.cta.buffer(int(warp.get(base, np.uint64)[lane]) + offset)
        from_ = int(warp.get(source, np.uint32)[lane]) + at
        size = int(warp.get(ops[2], np.uint32)[lane])
        assert start % 16 == 0 and from_ % 16 == 0 and start + size <= len(data)

        def copy() -> None:
            part = warp.cta.read_async(np.arange(from_, from_ + size)).view(np.float32)
            target = data[start : start + size].view(np.float32)
            target[:] = target + part if adds else part

        warp.groups["bulk"].start(copy)

    return step
