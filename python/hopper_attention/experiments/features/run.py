"""The features' benchmark: every peer on every workload, checked first, then timed in interleaved rounds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hopper_attention.experiments.bench.machine import find_gauge
from hopper_attention.experiments.bench.peers import Inputs, Prepared, Setting, inspect_peers
from hopper_attention.experiments.bench.results import Failed, PeerResult
from hopper_attention.experiments.bench.run import (
    L2_MULTIPLE,
    Bench,
    Entry,
    Progress,
    check_affordable,
    count_input_sets,
    describe_error,
    describe_run,
    ignore_progress,
    open_bench,
)
from hopper_attention.experiments.bench.timing import BALANCED, Effort, GpuLostError, describe_effort
from hopper_attention.experiments.features.checks import Piece, check_result, compute_pieces, limits_of
from hopper_attention.experiments.features.peers import FeaturePeer
from hopper_attention.experiments.features.results import KIND, FeatureCell, FeatureReport
from hopper_attention.experiments.features.spec import FAMILIES, Family, Workload
from hopper_attention.experiments.workloads.spec import limit_method


class WorkloadLostError(RuntimeError):
    """The GPU was lost in a workload; the report up to it has been saved."""


def draw_tokens(workload: Workload, family: Family, seed: int, device: str) -> Inputs:
    """One set of inputs, each (tokens, heads, head_dim), made on the device.

    With a latent q and k have its columns behind their own, and v are those of k.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, workload.dtype)

    def draw(heads: int) -> Tensor:
        shape = workload.tokens, heads, workload.score_dim
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = draw(workload.heads).mul_(family.query_factor)
    k = draw(workload.heads_kv)
    return Inputs(q, k, k[..., workload.head_dim :] if workload.latent else draw(workload.heads_kv))


def admit_all(
    bench: Bench, workload: Workload, peers: Sequence[FeaturePeer], sets: Sequence[Inputs]
) -> dict[str, Entry | Failed]:
    """Prepare and check the peers."""

    @cache
    def pieces() -> tuple[Piece, ...]:
        return compute_pieces(workload, sets[0])

    def prepare(peer: FeaturePeer) -> list[Prepared]:
        return [peer.prepare(workload, inputs, bench.setting) for inputs in sets]

    def judge(peer: FeaturePeer, prepared: Prepared, result: Any) -> tuple[float, str]:
        known = () if workload.dropout and peer.draws_mask else pieces()
        return check_result(workload, prepared.read(result), known, limits_of(workload))

    return {peer.name: bench.try_out(peer, partial(prepare, peer), partial(judge, peer)) for peer in peers}


def run_cell(
    bench: Bench, workload: Workload, peers: Sequence[FeaturePeer], family: Family, cells_left: int
) -> FeatureCell:
    """Check and time the peers on one workload.

    Raises:
        GpuLostError: a kernel hangs or broke the CUDA context.
    """
    count = count_input_sets(workload, bench.l2_bytes)
    sets = [draw_tokens(workload, family, seed, bench.setting.device) for seed in range(count)]
    meant = [peer for peer in peers if peer.takes(workload)]
    admitted = admit_all(bench, workload, meant, sets)
    entries = {name: entry for name, entry in admitted.items() if isinstance(entry, Entry)}
    turns = bench.plan_all(entries)
    taken = bench.play_turns(entries, turns, cells_left)
    results: dict[str, PeerResult] = {}
    for name, entry in admitted.items():
        if isinstance(entry, Failed):
            results[name] = entry
        else:
            results[name] = bench.summarize(workload, entry, turns[name], taken[name])
    gauges = bench.sampler.window((i.start, i.stop) for intervals in taken.values() for i in intervals)
    return FeatureCell(workload, count, *gauges, results)


def run_features(
    workloads: Sequence[Workload],
    peers: tuple[FeaturePeer, ...],
    setting: Setting,
    effort: Effort,
    *,
    family: str = "normal",
    commit: str = "",
    progress: Progress = ignore_progress,
    save: Callable[[FeatureReport], None] = lambda report: None,
) -> FeatureReport:
    """Run every workload, in this order; returns the report.

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
    report = FeatureReport(head, ())
    save(report)
    with open_bench(setting, effort, find_gauge(setting.device), head["machine"].get("l2_bytes", 0)) as bench:
        for index, workload in enumerate(workloads):
            progress(f"[{index + 1}/{len(workloads)}] {workload.name}")
            try:
                cell = run_cell(bench, workload, present, drawn, len(workloads) - index)
            except GpuLostError as lost:
                raise WorkloadLostError(f"{workload.name}: {describe_error(lost)}") from lost
            report = replace(report, cells=(*report.cells, cell))
            save(report)
            gc.collect()
    return report


def describe_method(family: Family, effort: Effort, gpu: str) -> dict[str, Any]:
    """How the figures came about, for the report."""
    return {
        "inputs": family.words,
        "flops": "4*h*d for each query and key that it sees, 10*h*d backward",
        "fp8": "e4m3 is made of q, k and v outside of the timing, but for ours_e2e, whose calls take 16 bits",
        "limit": f"{limit_method(gpu)}; bytes are those of q, k, v and out, backward also of the gradients of all four",
        "checked": "whole heads of a short, a middle and the longest sequence against float64, before the timing; with "
        "dropout ours alone, whose mask is known",
        "backward": "the forward runs before the timing; a launch is torch.autograd.grad of its output",
        "timing": "median over interleaved rounds of device time a launch, batches back to back",
        "order": BALANCED,
        "l2": f"launches rotate over input_sets sets of q, k, v, in all {L2_MULTIPLE} times the L2 or more",
        "power": "board power as the driver averages it over about a second; clock as sampled",
        **describe_effort(effort),
    }
