"""What runs before and after the backward kernels of every GPU: where the words of dQ lie, that the steps compile, and
their own numbers on NumPy."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from cute_kernels.ampere.backward.config import (
    AmpereBackwardConfig,
    select_ampere_backward_config,
    shipped_ampere_backward_configs,
    shipped_ampere_backward_kernels,
)
from cute_kernels.backward.step import BackwardStep, SteppedConfig, steps_of
from hopper.backward.config import BackwardConfig, select_backward_config
from hopper.backward.shipped import shipped_backward_configs, shipped_backward_kernels
from hopper.compile import arch_of
from hopper.inspection import ResourceUsage
from hopper_attention.launch.gradient_memory import dq_shape
from tests.compile_pool import usage_of_each
from tests.hopper.on_numpy import finish_on_numpy, prepare_on_numpy

ONE_OF_EACH_ORDER: list[AmpereBackwardConfig | BackwardConfig] = [
    config
    for config in (
        *shipped_backward_configs(),
        *shipped_ampere_backward_configs(("sm_80", "sm_86", "sm_90a")),
    )
    if (config.dtype, config.causal, config.ordered) == ("bfloat16", False, False)
]


@pytest.mark.parametrize("config", ONE_OF_EACH_ORDER, ids=lambda config: config.name)
def test_words_of_dq_are_every_element_once(config: SteppedConfig) -> None:
    places = product(range(config.dq_parts), range(config.dq_words))
    seen = {config.dq_order.row_and_column(part, word) for part, word in places}
    assert config.dq_parts * config.dq_words == config.tile_m * config.head_dim
    assert seen == set(product(range(config.tile_m), range(config.head_dim)))


def test_words_of_a_warpgroup() -> None:
    order = select_backward_config("bfloat16", 128, 128, False).dq_order
    # Four words of a thread, threads in order, 8 columns after 512 words; the second warpgroup has the right half.
    assert [order.row_and_column(0, word) for word in (0, 1, 2, 4, 16, 128, 512)] == [
        *[(0, 0), (0, 1), (8, 0), (0, 2)],
        *[(1, 0), (16, 0), (0, 8)],
    ]
    assert order.row_and_column(1, 0) == (0, 64)
    by_rows = select_backward_config("bfloat16", 64, 64, False).dq_order
    assert by_rows.row_and_column(1, 0) == (64, 0)


def test_words_of_a_warp() -> None:
    config = select_ampere_backward_config("bfloat16", 128, 128, False, "sm_80")
    assert (config.dq_warps, config.dq_splits, config.dq_bands, config.dq_words) == (2, 4, 2, 1024)
    order = config.dq_order
    # The lanes of an element in order, then its other elements; 4 fragments of a band, in pairs 64 columns apart.
    assert [order.row_and_column(0, word) for word in (0, 1, 4, 32, 64, 128, 256, 512)] == [
        *[(0, 0), (0, 2), (1, 0), (0, 1)],
        *[(8, 0), (0, 8), (0, 64), (16, 0)],
    ]
    assert [order.row_and_column(part, 0) for part in (1, 2, 7)] == [(32, 0), (0, 16), (32, 48)]


@pytest.mark.parametrize("config", ONE_OF_EACH_ORDER, ids=lambda config: config.name)
def test_words_of_a_warp_are_in_the_order_of_its_products(config: SteppedConfig) -> None:
    if isinstance(config, BackwardConfig):
        assert config.dq_order.lane_stride == 4 * config.dq_order.element_stride
        return
    pairs = config.head_dim // (16 * config.dq_splits)
    for warp, word in product(range(config.warps), range(config.dq_words)):
        fragment, rest = divmod(word, 128)
        element, lane = divmod(rest, 32)
        band, p, h = fragment // (2 * pairs), fragment // 2 % pairs, fragment % 2
        row = warp % config.dq_warps * config.dq_bands * 16 + 16 * band + lane // 4 + 8 * (element // 2)
        column = 8 * (2 * (warp // config.dq_warps + config.dq_splits * p) + h)
        column += 2 * (lane % 4) + element % 2
        assert config.dq_order.row_and_column(warp, word) == (row, column)


def test_steps_have_names_of_their_own() -> None:
    shipped = (*shipped_backward_kernels(), *shipped_ampere_backward_kernels())
    assert len({config.name for config in shipped}) == len(shipped)
    steps = [config for config in shipped if isinstance(config, BackwardStep)]
    # Two dtypes: on Hopper three steps of 5 head_dims, as one prepares for a kernel that stores; for each of 5 other
    # architectures two of 6.
    assert len(steps) == 2 * (3 * 5 + 2 * 5 * 6)
    config = select_ampere_backward_config("bfloat16", 128, 128, True, "sm_86")
    assert [step.name for step in steps_of([config])] == [
        "ampere_bwd_prepare_sm_86_bf16_d128_m64",
        "ampere_bwd_finish_sm_86_bf16_d128_m64w8dq2",
    ]
    assert [step.name for step in steps_of([select_backward_config("float16", 64, 64, True)])] == [
        "hopper_bwd_prepare_fp16_d64_m128n128",
        "hopper_bwd_finish_fp16_d64_m128n128",
    ]


def test_steps_are_compiled_for_the_architecture_of_their_kernel() -> None:
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"):
        config = select_ampere_backward_config("bfloat16", 64, 64, False, arch)
        assert arch_of(config) == arch
        assert {arch_of(step) for step in steps_of([config])} == {arch}
    assert arch_of(BackwardStep("finish", select_backward_config("bfloat16", 64, 64, False))) == "sm_90a"


def test_there_are_two_steps() -> None:
    with pytest.raises(ValueError, match="step is 'after', allowed: 'prepare' or 'finish'"):
        BackwardStep("after", select_backward_config("bfloat16", 64, 64, False))


COMPILED = [
    BackwardStep(step, select_ampere_backward_config("bfloat16", head_dim, head_dim, False, arch))
    for arch, head_dims in {
        "sm_80": (32, 256),
        "sm_86": (256,),
        "sm_89": (96,),
        "sm_120": (192,),
        "sm_90a": (128,),
    }.items()
    for head_dim in head_dims
    for step in ("prepare", "finish")
]


@pytest.fixture(scope="module")
def usages() -> dict[BackwardStep, ResourceUsage]:
    return usage_of_each(COMPILED)


@pytest.mark.parametrize("step", COMPILED, ids=lambda step: step.name)
def test_step_compiles_without_spills(step: BackwardStep, usages: dict[BackwardStep, ResourceUsage]) -> None:
    usage = usages[step]
    assert usage.local_bytes == 0
    # 65536 are shared out to the 1024 threads of a CTA, or to those of four CTAs of 128, by which loads are hidden.
    assert usage.registers <= {"finish": 64, "prepare": 128}[step.step]


FINISHED = [
    select_backward_config("bfloat16", 64, 64, False),
    select_backward_config("float16", 96, 96, False),
    select_backward_config("bfloat16", 192, 192, False),
    select_ampere_backward_config("bfloat16", 128, 128, False, "sm_90a"),
    select_ampere_backward_config("float16", 32, 32, False, "sm_80"),
    select_ampere_backward_config("bfloat16", 256, 256, False, "sm_86"),
]


@pytest.mark.parametrize("config", FINISHED, ids=lambda config: config.name)
def test_finish_puts_each_word_at_its_place(config: SteppedConfig) -> None:
    batch, seqlen, heads, head_dim = 2, config.tile_m + 5, 2, config.head_dim - 8
    q = torch.zeros(batch, seqlen, heads, head_dim, dtype=getattr(torch, config.dtype))
    sums = torch.randn(dq_shape(config, q.shape), generator=torch.Generator().manual_seed(0))
    scaled = (sums * 0.5).to(q.dtype)
    dq = torch.full_like(q, float("nan"))
    finish_on_numpy(config, sums, dq, 0.5)

    expected = torch.empty(batch, heads, 2 * config.tile_m, config.head_dim, dtype=q.dtype)
    for part in range(config.dq_parts):
        places = [config.dq_order.row_and_column(part, word) for word in range(config.dq_words)]
        rows, columns = torch.tensor(places).unbind(1)
        for tile in range(2):
            expected[:, :, tile * config.tile_m + rows, columns] = scaled[:, :, tile, part]
    assert torch.equal(dq, expected[:, :, :seqlen, :head_dim].transpose(1, 2))


@pytest.mark.parametrize("config", FINISHED[2:], ids=lambda config: config.name)
def test_prepare_says_what_the_kernel_needs_of_each_row(config: SteppedConfig) -> None:
    generator = torch.Generator().manual_seed(1)
    batch, seqlen, heads, head_dim_v = 1, config.tile_m + 3, 2, config.head_dim_v - 8
    shape, dtype = (batch, seqlen, heads, head_dim_v), getattr(torch, config.dtype)
    out, dout = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    lse = torch.randn(batch, heads, seqlen, generator=generator)
    lse[0, 1, 4] = -torch.inf
    lse_log2, delta, sums = prepare_on_numpy(config, out, dout, lse)

    expected = (out.double() * dout.double()).sum(-1).transpose(1, 2).float()
    expected[0, 1, 4] = 0.0
    torch.testing.assert_close(delta[:, :, :seqlen], expected, atol=1e-4, rtol=1e-5)
    finite = lse[0, 0] * 1.4426950408889634
    torch.testing.assert_close(lse_log2[0, 0, :seqlen], finite, atol=1e-6, rtol=1e-6)
    assert lse_log2[0, 1, 4] == torch.inf
    assert (lse_log2[:, :, seqlen:] == torch.inf).all() and (delta[:, :, seqlen:] == 0).all()
    # They were NaN before.
    assert (sums == 0).all()
