"""Q of the next tile is loaded while a tile is at work: which kernels do it, and that a tile finds its own."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace

import pytest
import torch
from cutlass import Int32
from torch import Tensor

from cute_kernels.problem import VARLEN
from hopper.compile import compile_kernel
from hopper.config import SMEM_BYTES, ForwardConfig, Registers, validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.tilings import select_fp8_forward_config, shipped_fp8_forward_configs
from hopper.forward.operands import first_turn, next_turn, q_state
from hopper.forward.tilings import (
    select_forward_config,
    select_plain_config,
    shipped_forward_configs,
    with_dropout,
)
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy

TILE_M, TILE_N, DIM, TILES = 64, 128, 128, 3
LATE = Timing(is_late=True, seed=2)


def dense(head_dim: int, causal: bool = False, seqlen_k: int = 1024) -> ForwardConfig:
    return select_plain_config("bfloat16", head_dim, head_dim, causal, seqlen_k)


def packed(head_dim: int, causal: bool = False) -> ForwardConfig:
    return select_forward_config("bfloat16", head_dim, head_dim, causal, 0, layout=VARLEN)


@pytest.mark.parametrize("causal", [False, True])
def test_short_tiles_have_it(causal: bool) -> None:
    for head_dim in (40, 64, 72, 80, 96):
        assert dense(head_dim, causal).q_stages == packed(head_dim, causal).q_stages == 2
    assert dense(128, causal).q_stages == dense(256, causal).q_stages == 1
    assert packed(128, causal).q_stages == 2
    # Memory is short.
    assert packed(192, causal).q_stages == packed(256, causal).q_stages == 1
    windowed = {
        d: select_forward_config("float16", d, d, causal, 512, window=True) for d in (64, 80, 96, 128)
    }
    # Blocks of 192 keys gain nothing under a window.
    assert [c.q_stages for c in windowed.values()] == [2, 2, 2 if causal else 1, 1]


def test_what_was_not_timed_goes_without() -> None:
    config = dense(64)
    assert config.q_stages == 2
    others = [replace(config, **{field: True}) for field in ("softcap", "alibi", "sinks")]
    others += [with_dropout(config), replace(config, layout=VARLEN, page_box=16)]
    without_producer = {"warp_specialized": False, "registers": Registers(config.launched_registers, 0)}
    others.append(replace(config, ping_pong=False, **without_producer))
    assert all(other.q_stages == 1 for other in others)


def test_of_fp8_kernels_those_for_few_keys_have_it() -> None:
    configs = shipped_fp8_forward_configs()
    two = [config for config in configs if config.q_stages == 2]
    assert {config.softmax for config in two} == {Softmax.LAGGING}
    assert {config.head_dim for config in two} == {128}
    assert all(not config.v_rows and not config.run_blocks for config in two)
    few = select_fp8_forward_config(128, 128, True, "bfloat16", 1024, 128, half_scores=True)
    assert few.q_stages == 2 and replace(few, layout=VARLEN).q_stages == 1


def test_o_keeps_its_own_memory_and_everything_fits() -> None:
    for config in (*shipped_forward_configs(), *shipped_fp8_forward_configs()):
        assert config.q_bytes == config.q_stages * config.tile_m * config.head_dim * config.qk_bytes
        assert config.smem_bytes * config.ctas_per_sm <= SMEM_BYTES
        if config.q_stages == 2:
            assert not (config.o_shares_q or config.o_shares_v)
            assert config.smem_bytes == config.q_bytes + config.o_bytes + config.kv_bytes + config.other_bytes


@pytest.mark.parametrize("wg", [0, 1])
def test_stages_are_taken_in_turns(wg: int) -> None:
    """Consumers wait for the phase in which a stage is filled, the producer for the one before it."""
    config = dense(96)
    assert config.consumers == 2 and config.q_stages == 2

    def walk(loads: bool) -> list[tuple[int, int]]:
        turn, states = first_turn(config, loads), []
        for _ in range(6):
            state = q_state(config, Int32(wg), turn)
            states.append((int(state.index.value), int(state.phase.value)))
            turn = next_turn(config, turn)
        return states

    consumed, loaded = walk(False), walk(True)
    assert consumed == [(wg, 0), (wg + 2, 0), (wg, 1), (wg + 2, 1), (wg, 0), (wg + 2, 0)]
    assert loaded == [(stage, phase ^ 1) for stage, phase in consumed]


@pytest.mark.parametrize(
    "config",
    [
        dense(64),
        dense(96),
        packed(128),
        packed(128, True),
        select_fp8_forward_config(128, 128, True, "bfloat16", 1024, 128, half_scores=True),
    ],
    ids=lambda config: config.name,
)
def test_products_do_not_wait_for_each_other(config: ForwardConfig) -> None:
    """With a second Q at head_dim 128 without a mask, dense, ptxas makes them."""
    assert config.q_stages == 2
    report = io.StringIO()
    with contextlib.redirect_stderr(report):
        compile_kernel(config, options="--gpu-arch sm_90a remarks{ptx}")
    assert "Used" in report.getvalue() and "serialized" not in report.getvalue()


def lagging() -> Fp8ForwardConfig:
    config = select_fp8_forward_config(DIM, DIM, False, "bfloat16", 4 * TILE_N, TILE_N)
    small = {"tile_m": TILE_M, "registers": Registers(256, 24), "softmax": Softmax.LAGGING, "stages": 2}
    config = replace(config, **small, ping_pong=False, late_rescale=True, polynomial_pairs=3)
    validate_forward_config(config)
    return config


def of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    quantization = Fp8Quantization(rotate=False, block_q=1, block_k=TILE_N, smooth_v=False)
    parts = quantize_qkv(*(x.bfloat16() for x in (q, k, v)), quantization=quantization)
    return fp8_forward_on_numpy(lagging(), parts, DIM**-0.5, LATE)[0]


def test_scores_that_are_computed_again_are_those_of_the_tiles_own_queries() -> None:
    """One CTA does all tiles. In each a row has a key so far above all others, in a block that takes no maximum, that
    the warp computes its scores again, from Q in shared memory."""
    assert lagging().q_stages == 2
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, n, 1, DIM, generator=generator) for n in (TILES * TILE_M, 4 * TILE_N, 4 * TILE_N)
    )
    q[..., :TILES], k[..., :TILES] = 0.0, 0.0
    for tile in range(TILES):
        k[:, 40 + 7 * tile, :, tile] = 40.0
        q[:, tile * TILE_M + 5 + 9 * tile, :, tile] = 30.0 + tile
    together = of_rows(q, k, v)
    for rows in torch.arange(TILES * TILE_M).split(TILE_M):
        alone = of_rows(q[:, rows], k, v)
        assert torch.equal(together[:, rows], alone)
        loud = (q[0, rows, 0, :TILES] > 0).any(1)
        tile = int(rows[0]) // TILE_M
        assert (alone[0, loud, 0] - v[0, 40 + 7 * tile, 0]).norm() < 0.05 * v[0, 40 + 7 * tile, 0].norm()
