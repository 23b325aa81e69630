"""The backward kernel compiles for sm_90a without a GPU and without spills; its configs and their errors."""

from dataclasses import replace

import pytest

from hopper.backward.compile import compile_backward
from hopper.backward.config import (
    BackwardStep,
    select_backward_config,
    shipped_backward_configs,
    validate_backward_config,
)
from hopper.backward.dq import row_and_column
from hopper.config import SMEM_BYTES, Registers
from hopper.inspection import resource_usage
from tests.hopper.wgmma_hazards import find_hazards

SHIPPED = shipped_backward_configs()


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_shipped_config_compiles_without_spills(config):
    usage = resource_usage(config)
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0)
    assert config.smem_bytes <= SMEM_BYTES
    shared_out = 128 * (config.consumers * config.registers.consumer + config.registers.producer)
    assert shared_out <= usage.registers * config.threads <= 65536


@pytest.mark.parametrize("step", ["prepare", "finish"])
def test_steps_compile_without_spills(step):
    names = set()
    for config in SHIPPED[:4:2]:
        usage = resource_usage(BackwardStep(step, config))
        assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0)
        names.add(BackwardStep(step, config).name)
    assert len(names) == 2
    with pytest.raises(ValueError, match="step is 'after', allowed: 'prepare' or 'finish'"):
        BackwardStep("after", SHIPPED[0])


def test_no_instruction_touches_a_register_of_a_wgmma_in_flight(tmp_path):
    config = select_backward_config("bfloat16", 128, 128, True)
    ptx = compile_backward(config, f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}").__ptx__
    count, hazards = find_hazards(ptx)
    # S and dP over head_dim, dV and dK over the queries, dQ over the keys; in a loop with a mask and one without.
    assert count == 2 * (2 * 128 // 16 + 2 * config.tile_m // 16 + config.tile_n // 16)
    assert hazards == []


@pytest.mark.parametrize("config", SHIPPED[:3:2], ids=lambda config: config.name)
def test_words_of_dq_are_every_element_once(config):
    seen = {
        row_and_column(config, wg, word) for wg in range(config.consumers) for word in range(config.dq_words)
    }
    assert seen == {(row, column) for row in range(config.tile_m) for column in range(config.head_dim)}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"head_dim": 160}, "head_dim is 160"),
        ({"head_dim_v": 64}, "head_dim is 128 and head_dim_v 64, allowed: the same"),
        ({"tile_n": 64}, "tile_n is 64"),
        ({"tile_m": 32}, "tile_m is 32"),
        ({"stages": 1}, "stages is 1"),
        ({"stages": 4}, "bytes of shared memory, allowed: 232448"),
        ({"registers": Registers(256, 24)}, "need 68608, allowed: 64512"),
    ],
)
def test_invalid_field_is_named(change, message):
    config = select_backward_config("bfloat16", 128, 128, False)
    with pytest.raises(ValueError, match=message):
        validate_backward_config(replace(config, **change))


def test_selection_covers_head_dims_and_refuses_wide_ones():
    assert select_backward_config("float16", 72, 40, True).head_dim == 128
    assert len({config.name for config in SHIPPED}) == len(SHIPPED) == 8
    with pytest.raises(ValueError, match="head_dim 136 and head_dim_v 64: both may be at most 128"):
        select_backward_config("float16", 136, 64, True)
