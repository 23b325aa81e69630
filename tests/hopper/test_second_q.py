"""Q of the next tile is loaded while a tile is at work: which kernels do it, and in which order stages are taken."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace

import pytest
from cutlass import Int32

from cute_kernels.problem import VARLEN
from hopper.compile import compile_kernel
from hopper.config import SMEM_BYTES, ForwardConfig, Registers
from hopper.forward.fp8.config import Softmax
from hopper.forward.fp8.tilings import select_fp8_forward_config, shipped_fp8_forward_configs
from hopper.forward.operands import first_turn, next_turn, q_state
from hopper.forward.tilings import (
    select_forward_config,
    select_plain_config,
    shipped_forward_configs,
    with_dropout,
)


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
    assert {config.softmax for config in two} == {Softmax.EAGER}
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
