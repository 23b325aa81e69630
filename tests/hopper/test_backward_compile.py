"""The backward kernel compiles for sm_90a without a GPU and without spills; its configs and their errors."""

from dataclasses import replace

import pytest

from cute_kernels.backward.step import BackwardStep
from hopper.backward.config import (
    BackwardConfig,
    PairedBackwardConfig,
    select_backward_config,
    validate_backward_config,
)
from hopper.backward.shipped import shipped_backward_configs
from hopper.backward.written_configs import select_one_tile_config, select_strip_config
from hopper.config import SMEM_BYTES, Registers
from hopper.inspection import ResourceUsage
from tests.compile_pool import usage_of_each
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import ptx_of

SHIPPED = shipped_backward_configs()
ONE_FOR_EACH_SIZE = [c for c in SHIPPED if (c.dtype, c.causal, c.ordered) == ("bfloat16", False, False)]


STEPS = {step: [BackwardStep(step, config) for config in ONE_FOR_EACH_SIZE] for step in ("prepare", "finish")}


@pytest.fixture(scope="module")
def usages() -> dict[BackwardConfig | BackwardStep, ResourceUsage]:
    steps = *STEPS["prepare"], *STEPS["finish"]
    return usage_of_each([*SHIPPED, *steps, *WINDOWS_AND_PACKED, *CHANGED_SCORES, *PACKED_STEPS])


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_shipped_config_compiles_without_spills(config, usages):
    usage = usages[config]
    assert usage.local_bytes == 0
    assert config.smem_bytes <= SMEM_BYTES
    shared_out = 128 * (config.consumers * config.registers.consumer + config.registers.producer)
    assert shared_out <= usage.registers * config.threads <= 65536


WINDOWS_AND_PACKED = [
    select_backward_config("bfloat16", 64, 64, True, True, window=True),
    select_backward_config("bfloat16", 64, 64, False, True, window=True, layout="varlen"),
    select_backward_config("bfloat16", 96, 96, False, window=True, layout="varlen"),
    select_backward_config("float16", 128, 128, False, True, window=True),
    *(
        select_backward_config(dtype, head_dim, head_dim, True, True, layout="varlen")
        for dtype, head_dim in (("float16", 64), ("bfloat16", 96), ("bfloat16", 128), ("bfloat16", 256))
    ),
    select_backward_config("bfloat16", 128, 128, True, window=True, layout="varlen"),
    select_backward_config("bfloat16", 128, 128, True, window=True),
    *(
        select_backward_config("bfloat16", head_dim, head_dim, False, layout="varlen")
        for head_dim in (64, 96, 128)
    ),
    *(select_strip_config("bfloat16", head_dim, head_dim, True) for head_dim in (64, 96, 128)),
    select_strip_config("float16", 128, 128, False),
    *(select_one_tile_config("bfloat16", head_dim, head_dim, True) for head_dim in (64, 96, 128)),
    select_one_tile_config("float16", 128, 128, False),
    select_backward_config("float16", 192, 192, False, True, window=True, layout="varlen"),
    select_backward_config("bfloat16", 256, 256, True, layout="varlen"),
    *(
        replace(
            select_backward_config(dtype, size, size, False, layout="varlen"),
            few_keys=True,
            clears_ahead=False,
        )
        for dtype, size in (("bfloat16", 64), ("float16", 96), ("bfloat16", 128), ("float16", 256))
    ),
]
"""Those of most registers, couriers having 24 or 40, all strips that are not alike, and kernels of one tile."""


@pytest.mark.parametrize("config", WINDOWS_AND_PACKED, ids=lambda config: config.name)
def test_windows_and_packed_sequences_compile_without_spills(config, usages):
    usage = usages[config]
    assert usage.local_bytes == 0


CHANGED_SCORES = [
    select_backward_config("bfloat16", 64, 64, True, softcap=True, alibi=True),
    select_backward_config("float16", 64, 64, False, layout="varlen", softcap=True),
    select_backward_config("float16", 128, 128, False, True, window=True, layout="varlen", alibi=True),
    select_backward_config("bfloat16", 256, 256, True, window=True, layout="varlen", softcap=True),
    select_backward_config("float16", 256, 256, False, True, softcap=True, alibi=True),
]
"""A softcap at head_dim 128 spills, as docs/limits.md says."""


@pytest.mark.parametrize("config", CHANGED_SCORES, ids=lambda config: config.name)
def test_changes_of_scores_compile_without_spills(config, usages):
    usage = usages[config]
    assert usage.local_bytes == 0


CAUSAL_PACKED, FULL_PACKED, ORDERED_PACKED = (
    select_backward_config("bfloat16", 128, 128, causal, ordered, layout="varlen")
    for causal, ordered in ((True, False), (False, False), (True, True))
)
PACKED_STEPS = [
    *(BackwardStep(step, CAUSAL_PACKED) for step in STEPS),
    *(BackwardStep("prepare", config) for config in (FULL_PACKED, ORDERED_PACKED)),
]


@pytest.mark.parametrize("kernel", PACKED_STEPS, ids=lambda kernel: kernel.name)
def test_packed_steps_compile_without_spills(kernel, usages):
    usage = usages[kernel]
    assert usage.local_bytes == 0
    end = "_clears" * kernel.config.clears_ahead + "_stores" * kernel.config.stores_first
    assert kernel.name == f"hopper_bwd_{kernel.step}_bf16_d128_m64n128_varlen{end}"


def test_windows_and_layouts_have_the_tiles_of_dense_problems_and_names_of_their_own():
    for head_dim in (64, 128, 256):
        dense = select_backward_config("bfloat16", head_dim, head_dim, True)
        window = select_backward_config("bfloat16", head_dim, head_dim, True, window=True)
        packed = select_backward_config("bfloat16", head_dim, head_dim, True, window=True, layout="varlen")
        assert window == replace(dense, window=True) and packed == replace(window, layout="varlen")
        pair = "_pair" if head_dim == 256 else ""
        stem = dense.name.removesuffix("_pair")
        assert (window.name, packed.name) == (f"{stem}_window{pair}", f"{stem}_window_varlen{pair}")
        assert (dense.can_miss_queries, dense.least_blocks) == (False, 0)
        assert [c.least_blocks for c in (window, packed, replace(packed, ordered=True))] == (
            [1, 1, 1] if head_dim == 256 else [0, 0, 1]
        )


@pytest.mark.parametrize("step", STEPS)
def test_steps_compile_without_spills(step, usages):
    for kernel in STEPS[step]:
        usage = usages[kernel]
        assert usage.local_bytes == 0
    assert len({kernel.name for kernel in STEPS[step]}) == 5


def test_no_instruction_touches_a_register_of_a_wgmma_in_flight():
    config = select_backward_config("bfloat16", 128, 128, True)
    ptx = ptx_of(config)
    count, hazards = find_hazards(ptx)
    # S and dP over head_dim, dV and dK over the queries, dQ over the keys; in a loop with a mask and one without. A
    # warpgroup whose keys are hidden has dQ alone.
    dq = config.tile_n // 16
    assert count == 2 * (2 * 128 // 16 + 2 * config.tile_m // 16 + dq) + dq
    assert hazards == []
    assert ptx.count("cp.async.bulk.prefetch.L2") == 1


def test_sums_are_asked_for_under_a_causal_mask_in_dense_batches():
    config = select_backward_config("bfloat16", 128, 128, True)
    others = [{"causal": False}, {"ordered": True}, {"window": True}, {"layout": "varlen"}, {"alibi": True}]
    assert config.fetches_sums
    assert not any(replace(config, **other).fetches_sums for other in others)


def test_strips_have_no_hazards():
    config = select_strip_config("bfloat16", 128, 128, True)
    count, hazards = find_hazards(ptx_of(config))
    # With dQ of all keys, with that of the half which sees the queries, and that alone.
    assert count == 2 * (2 * 128 // 16 + 2 * 64 // 16) + 128 // 16 + 2 * 64 // 16
    assert hazards == []


def test_the_paired_kernel_has_its_groups_and_no_hazards():
    config = select_backward_config("bfloat16", 256, 256, True)
    ptx = ptx_of(config)
    count, hazards = find_hazards(ptx)
    # Of each of two warpgroups: S or dP over head_dim and dV over the queries in the first block, a loop with a mask
    # and one without; dK over the queries and dQ over the keys of both CTAs in the loops and at the end.
    scores, dv, dk, dq = 256 // 16, config.tile_m // 16, config.tile_m // 16, config.tile_n // 16
    assert count == 2 * 3 * (scores + dv + dk + dq) == 192
    assert hazards == []
    # dQ takes two calls, of which the first leaves its group open: five fences for four groups.
    assert ptx.count("wgmma.fence") == 2 * 3 * 5
    assert ptx.count("wgmma.commit_group") == 2 * 3 * 4
    # Each CTA loads half of the rows of Q and of dO, for both: one copy for 64 columns.
    assert ptx.count(".multicast::cluster") == 2 * 256 // 64


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
        ({"layout": "paged"}, "layout is 'paged', allowed: dense, varlen"),
    ],
)
def test_invalid_field_is_named(change, message):
    config = select_backward_config("bfloat16", 128, 128, False)
    with pytest.raises(ValueError, match=message):
        validate_backward_config(replace(config, **change))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"head_dim": 160, "head_dim_v": 160}, "head_dim is 160"),
        (
            {"head_dim": 128, "head_dim_v": 128},
            "head_dim is 128, allowed: above 128 in pairs of CTAs, and only there",
        ),
        ({"head_dim_v": 128}, "head_dim is 256 and head_dim_v 128, allowed: the same"),
        ({"tile_n": 256}, "tile_n is 256, allowed: 128"),
        ({"tile_m": 128}, "tile_m is 128, allowed: 64$"),
        ({"stages": 1}, "stages is 1, allowed: 2$"),
        ({"stages": 3}, "stages is 3, allowed: 2$"),
        ({"registers": Registers(256, 24)}, "need 68608, allowed: 64512"),
    ],
)
def test_invalid_field_of_a_pair_is_named(change, message):
    config = select_backward_config("bfloat16", 256, 256, False)
    with pytest.raises(ValueError, match=message):
        validate_backward_config(replace(config, **change))


def test_only_pairs_serve_wide_heads():
    config = BackwardConfig("float16", 256, 256, False, tile_m=64, tile_n=128, stages=2)
    with pytest.raises(
        ValueError, match="head_dim is 256, allowed: above 128 in pairs of CTAs, and only there"
    ):
        validate_backward_config(config)


def test_sizes_of_a_pair():
    config = select_backward_config("bfloat16", 256, 256, True)
    assert (config.keys, config.consumers, config.threads) == (64, 2, 384)
    assert [config.stages_of(pipe) for pipe in ("q", "do", "p")] == [2, 1, 1]
    assert (config.dq_parts, config.dq_columns, config.dq_words) == (4, 64, 4096)
    # K, V and half of the other K; two Q, one dO; P, two dS and two of the other; two LSE, one delta; barriers.
    assert config.smem_bytes == 2 * 64 * (256 + 256 + 128 + 3 * 256 + 5 * 64) + 4 * 64 * 3 + 1024 == 222_976
    assert config.name == "hopper_bwd_bf16_d256_causal_m64n128s2_r240_24_pair"


def test_the_order_of_dq_is_a_config_of_its_own():
    for head_dim in (64, 96, 128, 192, 256):
        config = select_backward_config("bfloat16", head_dim, head_dim, True, ordered=True)
        changes = {"ordered": True, "stores_first": True}
        assert config == replace(select_backward_config("bfloat16", head_dim, head_dim, True), **changes)
        assert config.counts_per_tile == (4 if head_dim > 128 else 1)
        with pytest.raises(ValueError, match=r"stages is 3, allowed: 2$"):
            validate_backward_config(replace(config, stages=3))


@pytest.mark.parametrize(
    "head_dims,native",
    [
        ((8, 64), 64),
        ((72, 40), 96),
        ((104, 40), 128),
        ((128, 128), 128),
        ((136, 64), 192),
        ((64, 192), 192),
        ((200, 64), 256),
        ((256, 256), 256),
    ],
)
def test_selection_covers_head_dims(head_dims, native):
    config = select_backward_config("float16", *head_dims, True)
    assert config.head_dim == config.head_dim_v == native
    assert isinstance(config, PairedBackwardConfig) == (native > 128)
    assert config.tile_m == (128 if native == 64 else 64)


def test_selection_refuses_what_no_kernel_takes():
    assert len({config.name for config in SHIPPED}) == len(SHIPPED) == 40
    with pytest.raises(ValueError, match="head_dim 264 and head_dim_v 64: both may be at most 256"):
        select_backward_config("float16", 264, 64, True)
