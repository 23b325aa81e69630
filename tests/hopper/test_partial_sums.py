"""O that is added up in float32, run by run, is what one sum is, on simulated machine code."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from hopper.config import validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.mean_v import STEPS_AT_HAND
from hopper.forward.fp8.tilings import (
    MEAN_KEYS,
    RUN_KEYS,
    RUNLESS_KEYS,
    select_fp8_forward_config,
    shipped_long_fp8_forward_configs,
    with_runs,
)
from hopper.mean.config import EDGES_AT_ONCE
from hopper_attention.reference import attention_naive
from tests.hopper import test_half_scores, test_lagging_softmax
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_half_scores import BLOCKS, over_a_flat_tail
from tests.hopper.test_lagging_softmax import (  # noqa: F401  (pytest runs those cases here too, with the config below)
    DIM,
    LATE,
    SCALE,
    TILE,
    dequantized,
    draw,
    quantized,
    relative,
    test_a_nan_reaches_who_sees_it,
    test_many_large_p,
    test_odd_lengths_and_a_scale_for_each_row,
    test_scores_of_any_sign,
    test_scores_that_rise_with_every_block,
    test_units_of_o_that_change_with_jumps,
    test_warps_that_are_wary,
)

half_config = test_half_scores.config_of


def config_of(
    causal: bool = False, lagging: bool = True, pairs: int = 5, blocks: int = 1, means: int = 0
) -> Fp8ForwardConfig:
    """In runs of so many ``blocks``, and a mean for each of so many ``means``, or of one block."""
    config = half_config(causal, lagging, pairs)
    if lagging:
        config = replace(config, run_blocks=blocks, mean_blocks=blocks // (means or blocks or 1))
    validate_forward_config(config)
    return config


@pytest.fixture(autouse=True)
def with_runs_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_lagging_softmax, "config_of", config_of)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 64])
def test_runs_of_any_length(blocks: int, causal: bool) -> None:
    """Tiles of which some end in a run and some in the first, one behind the other."""
    parts = quantized(*draw(5 * TILE + 7, 7 * TILE + 13))
    expected, lse = fp8_forward_on_numpy(config_of(causal, blocks=0), parts, SCALE, LATE)
    found, same_lse = fp8_forward_on_numpy(config_of(causal, blocks=blocks), parts, SCALE, LATE)
    assert torch.equal(lse, same_lse) and relative(found, expected.double()) < 2.0**-9


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("blocks", "means"), [(1, 1), (4, 4), (8, 4), (8, 8), (6, 2)])
@pytest.mark.parametrize(
    "seqlens",
    [
        (5 * TILE + 7, 7 * TILE + 13),
        (2 * TILE, 8 * TILE),
        (8 * TILE - 1, 8 * TILE),
        (TILE + 3, (EDGES_AT_ONCE * STEPS_AT_HAND + 7) * TILE + 13),
    ],
)
def test_runs_without_a_mean_each(seqlens: tuple[int, int], blocks: int, means: int, causal: bool) -> None:
    """Wherever a tile begins: under a mask, too, and in the middle of a run."""
    assert_means_come_back(config_of(causal, blocks=blocks, means=means), seqlens)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("blocks", "means"), [(4, 4), (8, 4), (8, 8)])
def test_where_ends_are_found_early(blocks: int, means: int, causal: bool) -> None:
    """Which they are at head_dim 128 under a causal mask, and at 256."""
    config = replace(config_of(causal, blocks=blocks, means=means), head_dim=2 * DIM, head_dim_v=2 * DIM)
    validate_forward_config(config)
    assert config.finds_ends_early is causal and not config_of(causal, blocks=blocks).finds_ends_early
    assert replace(config, head_dim=4 * DIM).finds_ends_early
    assert_means_come_back(config, (3 * TILE + 7, 13 * TILE + 13))


@pytest.mark.parametrize("causal", [False, True])
def test_notes_that_are_read_at_once(causal: bool) -> None:
    """From head_dim 128 on, those of ``STEPS_AT_HAND`` steps: more edges than these have, and fewer."""
    config = replace(config_of(causal, blocks=8, means=8), head_dim=2 * DIM, head_dim_v=2 * DIM)
    assert config.reads_notes_at_once and not config_of(causal).reads_notes_at_once
    for tiles in (EDGES_AT_ONCE * STEPS_AT_HAND + 7, EDGES_AT_ONCE + 2):
        assert_means_come_back(config, (TILE + 3, tiles * TILE + 13))


def assert_means_come_back(config: Fp8ForwardConfig, seqlens: tuple[int, int]) -> None:
    """O is that of V with the means of its runs added. Rows have the columns that products do not leave out."""
    seqlen_k, causal, head_dim = seqlens[1], config.causal, config.used_head_dim or config.head_dim
    scale, head_dim_v = head_dim**-0.5, config.columns_pv
    generator = torch.Generator().manual_seed(1)
    shapes = (1, seqlens[0], 1, head_dim), (1, seqlen_k, 1, head_dim), (1, seqlen_k, 1, head_dim_v)
    parts = quantized(*(torch.randn(shape, generator=generator) for shape in shapes))
    tiles = -(-seqlen_k // TILE)
    run = (tiles - 1 - torch.arange(seqlen_k) // TILE) // config.mean_blocks
    means = 8 * torch.randn(1, int(run.max()) + 1, 1, head_dim_v, generator=generator)
    q, k, v = dequantized(parts)
    exact, _ = attention_naive(q, k, v + means[:, run], causal=causal)
    changed = replace(parts, mean_v=means[:, -1].contiguous())
    changes = torch.tensor([[[0, 0, 0, 1]]], dtype=torch.int32)
    out, _ = fp8_forward_on_numpy(config, changed, scale, LATE, runs=(means, changes))
    # P as e4m3 is rounded, and that by more where it is small; its sums, which means are multiplied by, are as exact as
    # scores in float16.
    of_v, of_means = (attention_naive(q, k, x.abs(), causal=causal)[0] for x in (v, means[:, run]))
    allowed = 0.15 * of_v + 2.0**-8 * exact.abs() + 2.0**-9 * of_means
    assert bool(((out.double() - exact).abs() <= allowed).all()) and relative(out, exact) < 0.03
    # Nothing is read of means of a head that has no changes.
    means[:] = float("nan")
    out, _ = fp8_forward_on_numpy(config, parts, scale, LATE, runs=(means, 0 * changes))
    assert torch.equal(out, fp8_forward_on_numpy(config, parts, scale, LATE)[0])


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("first", [0, 2, 5])
def test_means_where_units_of_o_jump(first: int, scale: float) -> None:
    """What they add to the output of two blocks of large values and others, whose sums they are no part of."""
    q, k, v = draw(3 * TILE + 7, 7 * TILE + 13)
    v[:, first * TILE : (first + 2) * TILE] *= 64
    parts, config = quantized(scale * q, k, v), config_of(blocks=4)
    run = (7 - torch.arange(k.shape[1]) // TILE) // config.mean_blocks
    means = 8 * torch.randn(1, 8, 1, DIM, generator=torch.Generator().manual_seed(1))
    changes = torch.tensor([[[0, 1, 0, 0]]], dtype=torch.int32)
    changed = replace(parts, mean_v=means[:, -1].contiguous())
    out, _ = fp8_forward_on_numpy(config, changed, SCALE, LATE, runs=(means, changes))
    without, _ = fp8_forward_on_numpy(config, parts, SCALE, LATE)
    added, _ = attention_naive(*dequantized(parts)[:2], means[:, run].expand_as(v))
    assert relative(out.double() - without.double(), added) < 0.02


@pytest.mark.parametrize("octaves", [10.0, 13.0])
def test_a_maximum_that_falls_between_runs(octaves: float) -> None:
    parts, exact = over_a_flat_tail([BLOCKS * TILE - 5], octaves, slice(0, TILE))
    out, _ = fp8_forward_on_numpy(config_of(blocks=4), parts, SCALE, LATE)
    assert ((out.double() - exact).abs() / exact.abs()).max() < 3 / BLOCKS + 0.08


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_which_problems_have_runs(head_dim: int, causal: bool) -> None:
    def select(seqlen_k: int, **options: int) -> Fp8ForwardConfig:
        config = select_fp8_forward_config(head_dim, head_dim, causal, "bfloat16", seqlen_k, **options)
        return with_runs(config, seqlen_k)

    blocks_and_lengths = product((0, 64, 128, 192, 256, 384), (RUNLESS_KEYS + 1, 20_000, 2**30))
    long = [select(seqlen_k, block_k=k, half_scores=True) for k, seqlen_k in blocks_and_lengths]
    assert long[0].run_blocks
    for config in (c for c in long if c.run_blocks):
        assert config in shipped_long_fp8_forward_configs() and config.name.endswith(
            f"runs{config.run_blocks}of{config.mean_blocks}"
        )
        most, keys = RUN_KEYS[head_dim], config.mean_blocks * config.tile_n
        assert most - keys < config.run_blocks * config.tile_n <= most
        assert MEAN_KEYS[head_dim] - config.tile_n < keys <= MEAN_KEYS[head_dim]
    assert not select(RUNLESS_KEYS, half_scores=True).run_blocks
    for other in ({"half_scores": False}, {"half_scores": True, "window": True}, {"two_level": True}):
        assert not select(2**30, **other).run_blocks


def test_runs_of_other_kernels_are_refused() -> None:
    config = config_of()
    assert config.note_floats == 2 * 64 and not replace(config, run_blocks=0).note_floats
    for runs, means, allowed in (
        (9, 2, "what divides them"),
        (8, 0, "what divides"),
        (8, -1, "what"),
        (0, 1, 0),
    ):
        with pytest.raises(
            ValueError, match=f"mean_blocks is {means}, allowed with run_blocks {runs}: {allowed}"
        ):
            validate_forward_config(replace(config, run_blocks=runs, mean_blocks=means))
    for wrong in (
        {"run_blocks": -1, "mean_blocks": 1},
        {"lowers_queries": True},
        {"window": True},
        {"v_rows": True},
    ):
        with pytest.raises(ValueError, match=r"run_blocks is -?1, allowed: 0, or more with softmax 'half'"):
            validate_forward_config(replace(config, **wrong))
    long = next(x for x in shipped_long_fp8_forward_configs() if x.head_dim == 128)
    with pytest.raises(ValueError, match="run_blocks is 64, allowed where O has no shared memory of its own"):
        validate_forward_config(replace(long, stages=long.stages + 1))
