"""What PTX instructions between the CTAs of a cluster do to a warp of ``hopper_machine``, but for copies.

A CTA's shared memory lies at its offsets for the CTA itself, and in a window of its own, by rank, for the cluster.
"""

from __future__ import annotations

import numpy as np

from tests.hopper.hopper_machine import CLUSTER_WINDOW, LANES, Cta, Step, Warp
from tests.hopper.ptx_text import address_of

CLUSTER_BARRIER = -1
"""In the place of the number of a named barrier."""


def _mapa(name: str, ops: list[str]) -> Step:
    """The address, in the window of the CTA of a rank, of a place in the own shared memory."""
    assert name == "mapa.shared::cluster.u32", name

    def step(warp: Warp, mask: np.ndarray) -> None:
        address, rank = warp.get(ops[1], np.uint32), warp.get(ops[2], np.uint32)
        assert (address[mask] < CLUSTER_WINDOW).all() and (rank[mask] < len(warp.cta.cluster)).all()
        warp.set(ops[0], address + (rank + np.uint32(1)) * np.uint32(CLUSTER_WINDOW), mask)

    return step


def _arrive(name: str, ops: list[str]) -> Step:
    """At an mbarrier of any CTA of the cluster."""
    assert name == "mbarrier.arrive.shared::cluster.b64", name
    base, offset = address_of(ops[1])

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint32)
        counts = warp.get(ops[2], np.uint32) if len(ops) > 2 else np.ones(LANES, np.uint32)
        for lane in np.flatnonzero(mask):
            cta, at = warp.cta.locate(int(addresses[lane]) + offset)
            cta.barriers[at].pending -= int(counts[lane])
            cta.barriers[at].settle()

    return step


def _store(name: str, ops: list[str]) -> Step:
    """A word, or two, to the shared memory of any CTA of the cluster."""
    assert name in ("st.shared::cluster.f32", "st.shared::cluster.b32", "st.shared::cluster.v2.f32"), name
    base, offset = address_of(ops[0])
    words = [word.strip() for word in ops[1].strip("{}").split(",")]
    assert len(words) == (2 if ".v2" in name else 1)

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses = warp.get(base, np.uint32)
        values = np.stack([warp.get(word, np.uint32) for word in words], axis=1)
        for lane in np.flatnonzero(mask):
            cta, at = warp.cta.locate(int(addresses[lane]) + offset)
            assert at % (4 * len(words)) == 0
            cta.shared[at : at + 4 * len(words)].view(np.uint32)[:] = values[lane]

    return step


def _store_async(name: str, ops: list[str]) -> Step:
    """A word to the shared memory of any CTA of the cluster, of which a barrier of that CTA counts the arrival."""
    assert name == "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32", name
    (base, offset), (place, at_barrier) = address_of(ops[0]), address_of(ops[2])

    def step(warp: Warp, mask: np.ndarray) -> None:
        addresses, places = warp.get(base, np.uint32), warp.get(place, np.uint32)
        values = warp.get(ops[1], np.uint32)
        for lane in np.flatnonzero(mask):
            cta, at = warp.cta.locate(int(addresses[lane]) + offset)
            same, barrier = warp.cta.locate(int(places[lane]) + at_barrier)
            assert same is cta and at % 4 == 0
            _deliver_later(cta, at, values[lane], barrier)

    return step


def _deliver_later(cta: Cta, at: int, value: np.uint32, barrier: int) -> None:
    """Whenever it comes."""

    def deliver() -> None:
        cta.shared[at : at + 4].view(np.uint32)[0] = value
        cta.barriers[barrier].tx -= 4
        cta.barriers[barrier].settle()

    cta.receive(deliver)


def _barrier(name: str, ops: list[str]) -> Step:
    """Arrival of a warp at the barrier of the cluster, or its wait for all other warps after that."""
    waits = name.startswith("barrier.cluster.wait")

    def step(warp: Warp, mask: np.ndarray) -> None:
        assert mask.all()
        cta = warp.cta
        if waits:
            before = cta.cluster_arrivals[warp.number] - 1
            if cta.generation.get(CLUSTER_BARRIER, 0) == before:
                warp.awaited = CLUSTER_BARRIER, before
            return
        number = cta.cluster_arrivals.get(warp.number, 0) + 1
        cta.cluster_arrivals[warp.number] = number
        warps = warp.program.threads // LANES
        arrivals = [x for other in cta.cluster for x in other.cluster_arrivals.values()]
        if len(arrivals) == warps * len(cta.cluster) and min(arrivals) == number:
            for other in cta.cluster:
                other.generation[CLUSTER_BARRIER] = number

    return step


CLUSTER_STEPS = {
    "mapa": _mapa,
    "mbarrier.arrive.shared::cluster": _arrive,
    "st.shared::cluster": _store,
    "st.async": _store_async,
    "barrier.cluster": _barrier,
}
