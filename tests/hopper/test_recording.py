"""The forward kernel with a clock in it, run from its PTX without a GPU: same numbers, and stamps in order."""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks.recording import compile_recording, stamp_shape
from hopper.config import ForwardConfig, Registers
from hopper.forward.tilings import select_forward_config
from hopper.inspection import parse_ptxas
from hopper_attention.experiments.timeline.spec import (
    GEMM_0,
    GEMM_1,
    SOFTMAX,
    Event,
    events_of,
    middle_blocks,
)
from tests.hopper import on_numpy, tensor_maps
from tests.hopper.hopper_machine import LANES, Program, Warp, parse
from tests.hopper.on_numpy import forward_on_numpy

SHIPPED = replace(select_forward_config("float16", 64, 64, False, 8448), tile_n=64, stages=2)
VARIANTS = {
    "full": SHIPPED,
    "no-pipelining": replace(SHIPPED, pipelined=False),
    "no-warp-specialization": replace(
        SHIPPED, tile_m=128, warp_specialized=False, ping_pong=False, registers=Registers(256, 0)
    ),
}
RECORDED, BLOCKS = 1, 6


@cache
def recorded_ptx(config: ForwardConfig) -> str:
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
        return compile_recording(config, RECORDED, options).__ptx__


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves on whenever it is read."""
    get, ticks = Warp.get, iter(range(1, 10**9))

    def read(warp: Warp, text: str, dtype: type) -> np.ndarray:
        return np.full(LANES, next(ticks), dtype) if text == "%clock64" else get(warp, text, dtype)

    monkeypatch.setattr(Warp, "get", read)


def run(
    config: ForwardConfig, program: Program, seqlen_q: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out without a clock, out with it, and the stamps."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, seqlen_q, 1, 64), (1, BLOCKS * 64, 1, 64), (1, BLOCKS * 64, 1, 64))
    q, k, v = (torch.randn(shape, generator=generator).to(torch.float16) for shape in shapes)
    arguments, out, _ = on_numpy._forward_arguments(config, q, 64, q.dtype)
    arguments.values[:4] = (
        tensor_maps.row_map(q, 64, 64),
        tensor_maps.row_map(k, config.tile_n, 64),
        tensor_maps.row_map(v, config.tile_n, 64),
        tensor_maps.row_map(out, 64, 64),
    )
    stamps = torch.zeros(stamp_shape(config, BLOCKS), dtype=torch.int64)
    arguments.tensor(stamps, (stamps.numel(),), ())
    on_numpy.finish_forward(config, arguments, q, k, 0.125)
    if config.asks_early:
        arguments.asked(q, k, v)
    arguments.launch(program, (1, 1, 1))
    return forward_on_numpy(config, q, k, v, 0.125)[0], out, stamps


@pytest.mark.parametrize("name", VARIANTS)
def test_a_clock_changes_no_number_and_stamps_are_in_order(name: str, ticking: None) -> None:
    config = VARIANTS[name]
    plain, recorded, stamps = run(config, parse(recorded_ptx(config)), 2 * config.tile_m)
    assert torch.equal(plain, recorded)
    tile = stamps[:, 1:-1]
    if config.pipelined:
        # The last P V is issued after the loop, where nothing is called that could stamp.
        assert bool((tile[:, -1, 2, 0] == 0).all())
        tile[:, -1, 2, 0] = tile[:, -1, 1, 1] + 1
    assert bool((tile > 0).all()), tile.tolist()
    events = events_of(tile.tolist())
    assert len(events) == config.consumers * BLOCKS * 3
    for warpgroup in range(config.consumers):
        check_order(config, [e for e in events if e.warpgroup == warpgroup])
    assert len(middle_blocks(tile.tolist(), BLOCKS - 2)[0]) == BLOCKS - 2


def check_order(config: ForwardConfig, events: list[Event]) -> None:
    """Of one warpgroup: S before the softmax before P V, and what overlaps what."""
    found = {(event.block, event.unit): event for event in events}
    for block in range(BLOCKS):
        scores, softmax, values = (found[block, unit] for unit in (GEMM_0, SOFTMAX, GEMM_1))
        assert scores.start < scores.stop < softmax.start < softmax.stop <= values.stop
        if block == 0:  # the last one that is visited
            continue
        following = found[block - 1, GEMM_0], found[block - 1, SOFTMAX]
        if config.pipelined:
            # P V is issued with the scores of the next block, and ends under that one's softmax.
            assert softmax.stop < values.start < following[0].stop
            assert following[1].start < values.stop < following[1].stop
        else:
            assert softmax.stop < values.start < values.stop < following[0].start


def test_another_tile_leaves_no_stamps(ticking: None) -> None:
    config = VARIANTS["full"]
    _, _, stamps = run(config, parse(recorded_ptx(config)), config.tile_m)
    assert not bool(stamps.any())
    with pytest.raises(ValueError, match="too few tiles to record one"):
        middle_blocks(stamps[:, 1:-1].tolist(), 2)


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_clock_costs_no_registers_that_would_be_spilled(pipelined: bool) -> None:
    config = replace(select_forward_config("float16", 128, 128, False, 8448), pipelined=pipelined)
    report = io.StringIO()
    with contextlib.redirect_stderr(report):
        compile_recording(config, RECORDED, "--gpu-arch sm_90a remarks{ptx}")
    usage = parse_ptxas(report.getvalue(), config.smem_bytes)
    assert (usage.registers, usage.stack_bytes) == (config.launched_registers, 0)
    # A WGMMA that ptxas serialises would show another kernel than the one that runs.
    assert "serialized" not in report.getvalue()
