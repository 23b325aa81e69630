"""Few queries of what the quantizer made: which calls get tiles of several heads, and keys in how many parts."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.combine.config import MAX_SPLITS
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.few_tilings import FEW_QUERIES_OF_BLOCKS, tiling_of_blocks
from hopper.forward.fp8.tilings import RUNLESS_KEYS
from hopper_attention import Fp8Quantization, explain_fp8, few_blocks, few_queries, problem
from hopper_attention.few_blocks import class_of_keys, find_few, kind_of
from hopper_attention.few_queries import NOT_FEW, FewQueries
from hopper_attention.fp8_plan import quantize_nothing
from hopper_attention.fp8_rules import Fp8Problem, block_of, select_for
from hopper_attention.launch.fp8 import problem_of

Sizes = tuple[int, int, int]
Heads = tuple[int, int]
HOPPER = (9, 0)


def shapes_of(sizes: Sizes, heads: Heads, head_dims: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    (batch, seqlen_q, seqlen_k), (of_q, of_k), (d, dv) = sizes, heads, head_dims
    return (batch, seqlen_q, of_q, d), (batch, seqlen_k, of_k, d), (batch, seqlen_k, of_k, dv)


def meta(sizes: Sizes, heads: Heads, head_dim: int = 128) -> list[Tensor]:
    shapes = shapes_of(sizes, heads, (head_dim, head_dim))
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


def problem_with(sizes: Sizes, heads: Heads, head_dim: int = 128, causal: bool = False) -> Fp8Problem:
    """Of what the quantizer makes by default, whose LSE nobody gets."""
    parts = quantize_nothing(*meta(sizes, heads, head_dim), Fp8Quantization())
    return problem_of(parts, causal, without_lse=True)


def plan_of(sizes: Sizes, heads: Heads, head_dim: int = 128, **given: Any) -> Fp8ForwardConfig:
    """The config that ``explain_fp8`` says, whose notes are of it; V loses no mean, which many keys would in runs."""
    given.setdefault("quantization", Fp8Quantization(smooth_v=False))
    plan = explain_fp8(*meta(sizes, heads, head_dim), device_capability=HOPPER, **given).attention
    config = plan.config
    assert isinstance(config, Fp8ForwardConfig) and plan.backend == "hopper"
    assert (few_queries.NOTE_ON_GROUPS in plan.notes) == (config.group > 1)
    assert any("a part of a tile's keys" in note for note in plan.notes) == config.split
    return config


MANY_KEYS, MANY_TILES = ((1, 40, 20_000), (8, 2)), ((64, 16, 1000), (32, 4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("call", "head_dim", "group", "splits"),
    [
        *((MANY_KEYS, head_dim, 4, (20, 44)) for head_dim in (64, 80, 128, 192, 256)),
        *((MANY_TILES, head_dim, 8, (1, 1)) for head_dim in (64, 80, 128, 192, 256)),
        # Query heads that do not divide a warpgroup's rows, 12, 3 and 5.
        (((64, 16, 1000), (48, 4)), 128, 12, (1, 1)),
        (((1, 40, 20_000), (24, 2)), 128, 12, (12, 20)),
        (((1, 40, 20_000), (6, 2)), 128, 3, (20, 50)),
        (((1, 40, 20_000), (10, 2)), 64, 5, (20, 40)),
        # A single query, of many heads too.
        (((64, 1, 4096), (32, 8)), 128, 4, (1, 1)),
        (((1, 1, 100_000), (64, 1)), 128, 64, (60, MAX_SPLITS)),
        (((1, 1, 2000), (32, 8)), 64, 4, (8, 16)),
        # The most queries.
        (((1, 256, 6000), (32, 8)), 128, 1, (2, 2)),
    ],
)
def test_calls_that_are_served(
    call: tuple[Sizes, Heads], head_dim: int, group: int, splits: tuple[int, int], causal: bool
) -> None:
    (_, seqlen_q, _), _ = call
    few, (fewest, most) = find_few(problem_with(*call, head_dim, causal)), splits
    config = plan_of(*call, head_dim, causal=causal)
    assert (few.group, config.group, config.split) == (group, group, most > 1)
    assert config.tile_m == few.tile_rows and fewest <= few.splits <= most and few.call is None
    assert not config.v_rows and not config.lone_scales and not config.run_blocks
    # A single query is the last, and sees all keys.
    assert config.causal == (causal and seqlen_q > 1)
    (note,) = [x for x in few.notes if "CTAs visit" in x] or [f"{few.splits} CTAs"]
    assert f"{few.splits} CTAs" in note and config.output == "bfloat16"


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [((1, 257, 20_000), (8, 2)), ((21, 93, 40_000), (6, 6)), ((16, 256, 6000), (32, 32))],
)
def test_calls_that_are_served_as_any_other(sizes: Sizes, heads: Heads) -> None:
    for head_dim, causal in itertools.product((64, 128, 256), (False, True)):
        assert find_few(problem_with(sizes, heads, head_dim, causal)) == NOT_FEW
        config = plan_of(sizes, heads, head_dim, causal=causal)
        assert (config.group, config.split) == (1, False) and config.tile_m > 64


@pytest.mark.parametrize("call", [MANY_KEYS, MANY_TILES], ids=["parts", "groups"])
def test_what_tiles_of_few_queries_do_not_do(call: tuple[Sizes, Heads]) -> None:
    for given in (
        {"two_level_accumulation": True},
        {"return_attn_probs": True},
        {"exact_lse": True},
    ):
        config = plan_of(*call, **given)
        assert (config.group, config.split) == (1, False), given
    for given in ({"window_size": (-1, 0)}, {"window_size": (40_000, 40_000)}, {"backend": "hopper"}):
        assert plan_of(*call, **given).group > 1, given
    fast_lse = plan_of(*call, return_attn_probs=True, exact_lse=False)
    assert (fast_lse.group, fast_lse.split) == (plan_of(*call).group, plan_of(*call).split)
    p = problem_with(*call)
    for given in ({"window_size": (100, 0)}, {"attention_chunk": 64}):
        config = plan_of(*call, **given)
        assert config.window and config.tile_m == 64 and not config.split, given
    assert find_few(p).tile_rows
    for changed in (
        {"v_rows": True},
        {"two_level": True},
        {"exact_lse": True},
        {"block_v": p.block_k + 64},
        {"q_shape": (0, *p.q_shape[1:])},
        {"q_shape": (p.q_shape[0], 0, *p.q_shape[2:])},
        {"k_shape": (p.k_shape[0], 0, *p.k_shape[2:]), "v_shape": (p.v_shape[0], 0, *p.v_shape[2:])},
        {"v_shape": (*p.v_shape[:3], 0)},
        {"q_shape": (*p.q_shape[:3], 72), "k_shape": (*p.k_shape[:3], 72)},
    ):
        assert find_few(p._replace(**changed)) == NOT_FEW, changed


def test_what_divides_blocks_of_keys() -> None:
    """Of blocks that no tile for few queries divides calls are served as before."""
    for head_dim, block_k, tile in ((128, 320, 64), (128, 256, 128), (64, 384, None), (256, 64, 64)):
        c = Fp8Quantization(block_k=block_k, smooth_v=False)
        config = plan_of(*MANY_KEYS, head_dim, quantization=c)
        assert config.group == 4 and block_k % config.tile_n == 0 and config.tile_n == (tile or config.tile_n)
    for sizes, heads in (MANY_KEYS, MANY_TILES):
        plan = explain_fp8(
            *meta(sizes, heads), quantization=Fp8Quantization(block_k=96), device_capability=HOPPER
        )
        assert plan.attention.backend == "reference" and "block_k is 96" in plan.attention.reason
    # Of 192 keys higher tiles take half at a time.
    p = problem_with((1, 1, 100_000), (64, 1), 64)
    assert p.block_k == 192 and tiling_of_blocks(64, 192, 192, split=True).tile_n == 96
    config = select_for(kind_of(p, FewQueries(group=64, splits=9, tile_rows=192)))
    assert (config.tile_m, config.tile_n) == (192, 96)


def random_problem(draw: random.Random) -> Fp8Problem | None:
    """None where the FP8 kernel does not serve it."""
    d = 16 * draw.randint(1, 16)
    dv = draw.choice((d, d, 16 * draw.randint(1, 16)))
    kv_heads, group = draw.choice((1, 2, 3, 8, 16)), draw.choice((1, 2, 3, 4, 5, 8, 64))
    sizes = (
        draw.choice((1, 2, 7, 32, 300)),
        draw.choice((1, 2, 16, 70, 214, 256)),
        int(2 ** draw.uniform(0, 21)),
    )
    block = block_of(draw.choice((64, 96, 128, 160, 192, 256, 2**30)), sizes[2])
    found = Fp8Problem(
        *shapes_of(sizes, (kv_heads * group, kv_heads), (d, dv)),
        draw.choice((0, 1)),
        block,
        block,
        torch.bfloat16,
        draw.random() < 0.5,
        half_scores=draw.random() < 0.5,
        without_lse=True,
    )
    try:
        select_for(found.kind)
    except ValueError:
        return None
    return found


def with_keys(p: Fp8Problem, keys: int) -> Fp8Problem:
    (batch, _, *of_k), (_, _, *of_v) = p.k_shape, p.v_shape
    return p._replace(k_shape=(batch, keys, *of_k), v_shape=(batch, keys, *of_v))


def test_what_is_found_can_be_built_and_parts_are_within_limits() -> None:
    """Of all head dimensions, and of values that are narrower or wider than Q."""
    draw, served = random.Random(0), 0
    for p in filter(None, (random_problem(draw) for _ in range(3000))):
        few = find_few(p)
        if few == NOT_FEW:
            continue
        served += 1
        config = select_for(kind_of(p, few))
        assert (config.group, config.tile_m, config.split) == (few.group, few.tile_rows, few.splits > 1)
        assert p.block_k % config.tile_n == 0 and few.group in (1, p.q_shape[2] // p.k_shape[2])
        blocks = -(-few_queries.longest_alike(p.k_shape[1]) // config.tile_n)
        # As ``SplitRange`` shares blocks out.
        assert -(-blocks // few.splits) * config.tile_n <= RUNLESS_KEYS + config.tile_n - 1
        assert -(-p.k_shape[1] // config.tile_n // few.splits) * config.tile_n <= RUNLESS_KEYS
        assert 1 <= few.splits <= min(MAX_SPLITS, blocks) and few.splits * p.q_shape[0] <= 2**20
    assert served > 1000


def test_the_most_keys() -> None:
    few = find_few(problem_with((1, 64, 2**19), (8, 2)))
    assert 2**19 / RUNLESS_KEYS <= few.splits <= few_blocks.MOST_PARTS <= MAX_SPLITS
    assert find_few(problem_with((1, 64, 2**19 + 1), (8, 2))) == NOT_FEW
    assert find_few(problem_with((2**20, 2, RUNLESS_KEYS + 1), (1, 1))) == NOT_FEW


def test_classes_of_keys() -> None:
    """All numbers of keys of a class have one answer, however few tiles one with fewer queries that count has."""
    draw, compared = random.Random(1), 0
    some = [(7, 214, 64, 16, 64, False), (16, 214, 8, 2, 128, True)]
    problems = [
        Fp8Problem(
            *shapes_of((b, n, 1056), (h, hk), (d, d)),
            *(0, 128, 128, torch.bfloat16, True),
            half_scores=half,
            without_lse=True,
        )
        for b, n, h, hk, d, half in some
    ]
    for p in (*problems, *filter(None, (random_problem(draw) for _ in range(1500)))):
        keys = p.k_shape[1]
        longest = min(few_queries.longest_alike(keys), problem.longest_alike(keys))
        for other in (longest, *(draw.randint(1, longest) for _ in range(6)), 1029, 1036):
            like = class_of_keys(p.q_shape, other) == class_of_keys(p.q_shape, keys)
            if like and problem.longest_alike(other) == problem.longest_alike(keys) and other >= p.block_k:
                assert find_few(with_keys(p, other)) == find_few(p)
                compared += other != keys
    assert compared > 1000
    assert class_of_keys((1, 257, 8, 64), 100) == class_of_keys((1, 9, 8, 64), 0) == 0
    assert class_of_keys((1, 256, 8, 64), 100) == few_queries.longest_alike(100) == 128


def test_costs_are_close_to_the_least() -> None:
    """Of all numbers of parts, not only those that are tried."""
    for sizes, heads, head_dim in (
        (*MANY_KEYS, 128),
        ((1, 50, 513), (3, 3), 64),
        ((4, 32, 4000), (32, 4), 128),
        ((3, 70, 1000), (4, 1), 256),
        ((1, 1, 100_000), (64, 1), 64),
        ((2, 9, 40_000), (8, 2), 256),
    ):
        p = problem_with((*sizes[:2], few_queries.longest_alike(sizes[2])), heads, head_dim)
        few, shape, whole = find_few(p), few_blocks._shape_of(p), heads[0] // heads[1]
        costs = {}
        for rows, group, n in itertools.product(FEW_QUERIES_OF_BLOCKS[head_dim], {1, whole}, range(1, 128)):
            tiling = tiling_of_blocks(head_dim, rows, p.block_k, n > 1)
            if tiling is not None and shape.seqlen_k <= n * (RUNLESS_KEYS - tiling.tile_n):
                costs[group, n, rows] = few_blocks.few_cost(shape, tiling, group, n)
        cost, usual = costs[few.group, few.splits, few.tile_rows], few_blocks.usual_cost(shape, p.kind)
        assert cost <= 1.05 * min(costs.values()) and few_blocks.MARGIN * cost <= usual


def test_every_head_dim_has_a_usual_cost() -> None:
    """Also where V is narrow, whose kernels have tiles of other sizes."""
    for d, dv, half, causal in itertools.product(range(16, 257, 16), (16, 64, 128, 256), (0, 1), (0, 1)):
        for keys in (100, 1000, 5000, 30_000):
            shapes = shapes_of((4, 200, keys), (8, 2), (d, dv))
            options = {"half_scores": bool(half), "without_lse": True}
            p = Fp8Problem(*shapes, 0, 0, 0, torch.bfloat16, bool(causal), **options)
            assert few_blocks.usual_cost(few_blocks._shape_of(p), p.kind) > 3.0
