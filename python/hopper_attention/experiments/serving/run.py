"""The serving benchmark: every peer on every workload, checked first, then timed in interleaved rounds.

A launch is the replay of a CUDA graph with calls on each of several sets of inputs in turn: so many sets that no call
finds its keys in L2, and so many calls that what lies between two replays does not count.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hopper_attention.experiments.bench.latency import WARM_UP_CALLS, time_calls
from hopper_attention.experiments.bench.machine import find_gauge
from hopper_attention.experiments.bench.peers import Setting, inspect_peers
from hopper_attention.experiments.bench.results import Failed, PeerResult, relative_spread
from hopper_attention.experiments.bench.run import (
    Bench,
    Entry,
    Progress,
    check_affordable,
    describe_error,
    describe_run,
    ignore_progress,
    open_bench,
)
from hopper_attention.experiments.bench.timing import (
    BALANCED,
    AfterOtherWork,
    Effort,
    GpuLostError,
    Launch,
    Stopwatch,
    broken_context_is_lost,
    describe_effort,
    order_of_round,
)
from hopper_attention.experiments.features.run import WorkloadLostError
from hopper_attention.experiments.features.spec import FAMILIES, Family
from hopper_attention.experiments.serving import spec
from hopper_attention.experiments.serving.checks import (
    Piece,
    check_output,
    compute_pieces,
    limits_of,
    poison_new_rows,
)
from hopper_attention.experiments.serving.inputs import CacheInputs, draw_set
from hopper_attention.experiments.serving.peers import HOST_PEERS, ServingPeer
from hopper_attention.experiments.serving.results import (
    KIND,
    HostTime,
    ServingCell,
    ServingReport,
    with_cell,
)
from hopper_attention.experiments.serving.spec import ServingWorkload
from hopper_attention.experiments.workloads.spec import limit_method

KV_BYTES = 400_000_000
"""All sets of a launch have more keys and values than this, eight times the L2 cache of an H200."""

MIN_SETS, MAX_SETS = 2, 128

READ_BYTES = 2_000_000_000
"""Calls of a launch read about this much, which takes half a millisecond."""

MAX_CALLS = 256

HOST_CALLS, HOST_ROUNDS = 300, 9


def count_sets(workload: ServingWorkload, setting: Setting) -> int:
    """Sets of inputs; without a GPU there is no L2 to miss."""
    if not setting.is_cuda:
        return MIN_SETS
    return max(MIN_SETS, min(MAX_SETS, KV_BYTES // workload.kv_bytes + 1))


def count_passes(workload: ServingWorkload, sets: int, setting: Setting) -> int:
    """How often a launch goes through all sets."""
    if not setting.is_cuda:
        return 1
    return max(1, min(MAX_CALLS // sets, -(-READ_BYTES // (sets * workload.kv_bytes))))


# Many calls as one launch


def as_one(launches: Sequence[Launch], setting: Setting) -> tuple[Launch, str]:
    """All launches as one, which returns what the first returned: a CUDA graph where there is a GPU and they can be
    captured. The text says why there is no graph."""
    if not setting.is_cuda:
        return in_turn(launches), ""
    try:
        return as_graph(launches), ""
    except Exception as error:  # a peer may refuse to be captured in any way
        torch.cuda.synchronize()
        return in_turn(launches), f"eager calls: {describe_error(error)}"


def in_turn(launches: Sequence[Launch]) -> Launch:
    def launch() -> Any:
        first = launches[0]()
        for other in launches[1:]:
            other()
        return first

    return launch


def as_graph(launches: Sequence[Launch]) -> Launch:
    """A graph of warm launches. It keeps these, and so the tensors that they hold: the next capture would give back the
    memory which a replay reads."""
    graph = torch.cuda.CUDAGraph()
    captured = in_turn(launches)
    with torch.cuda.graph(graph):
        first = captured()

    def replay(kept: Launch = captured) -> Any:
        graph.replay()
        return first

    return replay


# Correctness before speed


@dataclass(frozen=True)
class Tried:
    """One way to call a peer, whose output is right, and seconds of a launch."""

    entry: Entry
    seconds: float


@dataclass(frozen=True)
class Trial:
    """What the peers of a workload are admitted with."""

    bench: Bench
    workload: ServingWorkload
    sets: Sequence[CacheInputs]
    passes: int
    pieces: Sequence[Piece]
    query_factor: float

    def admit(self, peer: ServingPeer) -> Entry | Failed:
        """The fastest way to call a peer among those that are right, or why there is none."""
        bench = self.bench
        try:
            with bench.budget.pause():
                return self._find_best(peer)
        except GpuLostError as lost:
            raise GpuLostError(f"{peer.name}: {lost}") from lost
        except Exception as raised:
            bench.stopwatch.synchronize()
            return Failed(describe_error(raised))

    def _find_best(self, peer: ServingPeer) -> Entry | Failed:
        setting, workload = self.bench.setting, self.workload
        note = peer.note(workload, self.sets[0], setting)
        bound = [peer.bind(workload, inputs, setting) for inputs in self.sets]
        best: Tried | None = None
        failed: Failed | None = None
        for way in bound[0]:
            tried = self._try_way(peer, ", ".join(filter(None, (note, way))), [ways[way] for ways in bound])
            if isinstance(tried, Failed):
                failed = failed or tried
            elif best is None or tried.seconds < best.seconds:
                best = tried
        if best is None:
            return failed or Failed("NotImplementedError: there is no way to call it")
        return best.entry

    def _try_way(self, peer: ServingPeer, note: str, launches: Sequence[Launch]) -> Tried | Failed:
        bench = self.bench
        try:
            with peer.context():
                for launch in launches:
                    launch()
                bench.stopwatch.synchronize()
                launch, no_graph = as_one(self.passes * list(launches), bench.setting)
                poison_new_rows(self.sets[0])
                out: Tensor = peer.leave(launch())
                bench.stopwatch.synchronize()
                limits = limits_of(self.workload, peer.rounds_queries, self.query_factor)
                error, wrong = check_output(self.workload, out, self.pieces, limits)
                if wrong:
                    return Failed(f"wrong result: {wrong}")
                seconds = bench.stopwatch.calibrate([launch]).device_s
        except GpuLostError:
            raise
        except Exception as raised:
            bench.stopwatch.synchronize()
            return Failed(describe_error(raised))
        note = ", ".join(filter(None, (note, no_graph)))
        return Tried(Entry(peer, [launch], note, error), seconds)


def run_cell(
    bench: Bench, workload: ServingWorkload, peers: Sequence[ServingPeer], family: Family, cells_left: int
) -> ServingCell:
    """Check and time the peers on one workload.

    Raises:
        GpuLostError: a kernel hangs or broke the CUDA context.
    """
    count = count_sets(workload, bench.setting)
    with bench.budget.pause():
        sets = [draw_set(workload, family, seed, bench.setting.device) for seed in range(count)]
        passes = count_passes(workload, count, bench.setting)
        pieces = compute_pieces(workload, sets[0])
        trial = Trial(bench, workload, sets, passes, pieces, family.query_factor)
    admitted = {peer.name: trial.admit(peer) for peer in peers}
    entries = {name: entry for name, entry in admitted.items() if isinstance(entry, Entry)}
    turns, calls = bench.plan_all(entries), count * passes
    taken = bench.play_turns(entries, turns, cells_left)
    results: dict[str, PeerResult] = {}
    for name, entry in admitted.items():
        if isinstance(entry, Failed):
            results[name] = entry
        else:
            of_a_call = [replace(interval, seconds=interval.seconds / calls) for interval in taken[name]]
            results[name] = bench.summarize(workload, entry, turns[name], of_a_call)
    gauges = bench.sampler.window((i.start, i.stop) for intervals in taken.values() for i in intervals)
    return ServingCell(workload, count, *gauges, results, calls)


def run_cell_or_fail(
    bench: Bench, workload: ServingWorkload, peers: Sequence[ServingPeer], family: Family, cells_left: int
) -> ServingCell:
    """``run_cell``; what goes wrong outside of a peer, as for want of memory, is the failure of all of them."""
    meant = [peer for peer in peers if peer.takes(workload)]
    try:
        return run_cell(bench, workload, meant, family, cells_left)
    except GpuLostError:
        raise
    except Exception as raised:
        bench.stopwatch.synchronize()
        reason = Failed(describe_error(raised))
        return ServingCell(workload, 0, None, None, {peer.name: reason for peer in meant}, 0)


# Host time


def measure_host(
    bench: Bench,
    workload: ServingWorkload,
    peers: Sequence[ServingPeer],
    family: Family,
    calls: int = HOST_CALLS,
    rounds: int = HOST_ROUNDS,
) -> dict[str, HostTime | Failed]:
    """Host time of eager calls, which are queued while the GPU, the faster side, has nothing else to do; in interleaved
    rounds."""
    synchronize = bench.stopwatch.synchronize
    inputs = draw_set(workload, family, 0, bench.setting.device)
    launches: dict[str, Launch] = {}
    found: dict[str, HostTime | Failed] = {}
    for peer in peers:
        try:
            launch = next(iter(peer.bind(workload, inputs, bench.setting).values()))
            time_calls(launch, min(calls, WARM_UP_CALLS), synchronize)
            launches[peer.name] = launch
        except GpuLostError:
            raise
        except Exception as raised:
            synchronize()
            found[peer.name] = Failed(describe_error(raised))
    samples: dict[str, list[float]] = {name: [] for name in launches}
    gc.disable()
    try:
        for number in range(rounds):
            for name in order_of_round(list(launches), number):
                samples[name].append(time_calls(launches[name], calls, synchronize))
    finally:
        gc.enable()
    found |= {name: HostTime(statistics.median(us), relative_spread(us)) for name, us in samples.items()}
    return found


# Runs


def run_serving(
    workloads: Sequence[ServingWorkload],
    peers: tuple[ServingPeer, ...],
    setting: Setting,
    effort: Effort,
    *,
    family: str = "normal",
    commit: str = "",
    progress: Progress = ignore_progress,
    save: Callable[[ServingReport], None] = lambda report: None,
) -> ServingReport:
    """Run every workload, in this order, and host times with ``spec.SHORT``; returns the report.

    Args:
        workloads: what to run.
        peers: rows of the registry; those that are not available are listed in the report with the reason.
        setting: device and library paths.
        effort: how long to measure. Time spent in first calls, which may compile, does not count.
        family: how inputs are drawn, a name out of FAMILIES.
        commit: what is measured, if not what git or a file COMMIT says.
        progress: called with a line as each workload starts.
        save: called with the report so far after each workload.

    Raises:
        ValueError: there is no such family; or the device is a CPU, and the workloads are too large for it.
        WorkloadLostError: a kernel hangs or broke the CUDA context. The report up to it has been saved.
    """
    if family not in FAMILIES:
        raise ValueError(f"inputs is {family!r}, allowed: {', '.join(FAMILIES)}")
    check_affordable(workloads, setting.device)
    drawn = FAMILIES[family]
    infos = inspect_peers(peers, setting)
    present = [peer for peer in peers if not infos[peer.name].unavailable]
    head = describe_run(KIND, infos, setting, commit)
    head["method"] = describe_method(drawn, effort, head["machine"]["gpu"])
    report = ServingReport(head, (), {})
    save(report)
    l2_bytes = head["machine"].get("l2_bytes", 0)
    with open_bench(setting, effort, find_gauge(setting.device), l2_bytes) as bench:
        bench = replace(bench, stopwatch=after_others(bench.stopwatch, l2_bytes, setting.device))
        for index, workload in enumerate(workloads):
            progress(f"[{index + 1}/{len(workloads)}] {workload.name}")
            with or_workload_lost(workload):
                cell = run_cell_or_fail(bench, workload, present, drawn, len(workloads) - index)
                report = with_cell(report, cell)
                save(report)
                free_memory(setting)
                if workload == spec.SHORT:
                    timed = [peer for peer in present if peer.name in HOST_PEERS]
                    report = replace(report, host=measure_host(bench, workload, timed, drawn))
                    save(report)
    return report


def after_others(stopwatch: Stopwatch, l2_bytes: int, device: str) -> Stopwatch:
    """The stopwatch, each batch of which begins when as much other memory was read as fills L2 twice, as the weights of
    a layer are in a model.

    A kernel whose keys leave L2 first reads up to 1.3 % faster where L2 holds lines that stay. In rounds of several
    libraries these were what another one had read: a cache of the kernel's own gained by that, and one that all read,
    as that in pages is, did not (``decode_l2_state.json``).
    """
    if not l2_bytes:
        return stopwatch
    return AfterOtherWork(stopwatch, other_memory(l2_bytes, device).sum)


def other_memory(l2_bytes: int, device: str) -> Tensor:
    """float32, of twice as many bytes as L2 has, and of no peer."""
    return torch.zeros(2 * l2_bytes // 4, device=device)


@contextmanager
def or_workload_lost(workload: ServingWorkload) -> Iterator[None]:
    """Turn a lost GPU or a broken CUDA context into the loss of this workload."""
    try:
        with broken_context_is_lost():
            yield
    except GpuLostError as lost:
        raise WorkloadLostError(f"{workload.name}: {describe_error(lost)}") from lost


def free_memory(setting: Setting) -> None:
    """Give back what the caches and graphs of a workload held."""
    gc.collect()
    if setting.is_cuda:
        torch.cuda.empty_cache()


def describe_method(family: Family, effort: Effort, gpu: str) -> dict[str, Any]:
    """How the figures came about, for the report."""
    return {
        "inputs": family.words,
        "flops": "4*h*d for each query and key that it sees, over a latent 2*h*(576 + 512)",
        "GB/s": "of keys and values alone, each read once",
        "fp8": "the cache is e4m3 with a descale for each sequence and key/value head; queries of ours have 16 bits, "
        "those of ours_fp8q, fa3 and fa3_best are made e4m3 outside of the timing",
        "lengths": "cache_seqlens is a tensor; of ours_known an int, so that the host knows the lengths",
        "pages": "in random order; caches without pages are (batch, keys, heads, d), for cudnn and fa2 (batch, heads, "
        "keys, d)",
        "limit": f"{limit_method(gpu)}; bytes are those of K, V, q and out",
        "checked": "heads of the shortest, a middle and the longest sequence against float64, before the timing; new "
        "rows are NaN before a call that has to write them",
        "timing": "median over interleaved rounds of device time a call; prefill and decode alike as replays of a CUDA "
        "graph with a call for each set of inputs; a note says where calls were eager",
        "order": BALANCED,
        "l2": f"{MIN_SETS} sets of inputs or more, with more than {KV_BYTES // 10**6} MB of keys and values; "
        "before the call that goes ahead of each batch, twice the bytes of L2 are read elsewhere",
        "best way": "fa3_best is the fastest of several numbers of splits, with a schedule made ahead; fa4 that of one "
        "split and its own choice; flashmla has a schedule made ahead",
        "latent": "a row of the cache has V and behind it K, which ours and fa3 are given as views",
        "host": f"eager calls on {spec.SHORT.name}, median of {HOST_ROUNDS} rounds of {HOST_CALLS}",
        "power": "board power as the driver averages it over about a second; clock as sampled",
        **describe_effort(effort),
    }
