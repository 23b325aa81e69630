"""What plans the tiles of packed sequences, with keys in parts and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.plan.config import MOST_SEQUENCES_IN_PARTS, PlanConfig, plan_words
from cute_kernels.problem import MAX_SEQLEN
from hopper.compile import HOPPER_ARCH
from hopper.forward.tilings import select_forward_config, with_parts
from hopper_attention import compile_cache
from hopper_attention.checks import FP8_DTYPE, TensorSpec
from hopper_attention.few_e4m3_times import numbers_of_parts
from hopper_attention.few_queries import contiguous_spec
from hopper_attention.few_queries_times import best_splits
from hopper_attention.kvcache_checks import NAMES, CacheShape, read_shape
from hopper_attention.launch.planners import OF_KEYS, OF_QUERIES, PartsPlanner, Planner, find_parts_planner
from hopper_attention.masks import CAUSAL_MASK, NO_MASK, MaskSpec

PLAIN = select_forward_config("bfloat16", 128, 128, True, 0, layout="varlen")
IN_PARTS = with_parts(PLAIN, 4, 64)
CTAS = 132
META = torch.device("meta")


def packed(batch: int, queries: int, heads: int, kv_heads: int) -> CacheShape:
    """Sizes of packed e4m3 sequences of up to 2^20 keys, as far as parts are counted by them."""
    specs = dict.fromkeys(NAMES)
    q = TensorSpec((batch * queries, heads, 128), (heads * 128, 128, 1), FP8_DTYPE, META)
    k = contiguous_spec((1, 2**24, kv_heads, 128), FP8_DTYPE, META)
    counts = {
        "cache_seqlens": batch,
        "cache_batch_idx": batch,
        "cache_leftpad": batch,
        "cu_seqlens_q": batch + 1,
    }
    specs |= {"q": q, "k_cache": k, "v_cache": k}
    specs |= {name: TensorSpec((n,), (1,), torch.int32, META) for name, n in counts.items()}
    return read_shape(tuple(specs.values()), queries, 2**20)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configs of kernels that were asked for."""
    found: list[Any] = []

    def get(config: Any) -> Any:
        found.append(config)
        return lambda *given: None

    monkeypatch.setattr(compile_cache, "get_forward", get)
    return found


def test_one_part_has_the_usual_plan(asked: list[Any]) -> None:
    planner = find_parts_planner(PLAIN, CTAS, 1)
    assert type(planner) is Planner and asked == [PlanConfig(HOPPER_ARCH)]
    assert planner.options(128, 8) == (128, OF_QUERIES) and planner.options(64, 8, OF_KEYS) == (64, OF_KEYS)
    assert planner.memory(1000, 7, 128).shape == (plan_words(1000, 7, 128),)


def test_a_plan_of_parts_has_room_for_them(asked: list[Any]) -> None:
    planner = find_parts_planner(IN_PARTS, CTAS, 6)
    assert isinstance(planner, PartsPlanner) and asked == [PlanConfig(HOPPER_ARCH, in_parts=True)]
    tile, tile_n, seen, heads, slots, most = planner.options(IN_PARTS.tile_queries, 8)
    assert (tile, tile_n, heads, slots, most) == (IN_PARTS.tile_queries, IN_PARTS.tile_n, 8, CTAS, 6)
    assert seen * tile_n >= MAX_SEQLEN
    (words,) = planner.memory(1000, 7, tile).shape
    (without,) = Planner(planner.kernel).memory(1000, 7, tile).shape
    assert words == plan_words(1000, 7, tile, 6) > 4 * without


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (MaskSpec(True, 1000), 1001),
        (MaskSpec(False, 300, 100), 401),
        (MaskSpec(True, attention_chunk=512), 512),
        (MaskSpec(False, attention_chunk=512), 1024),
        (NO_MASK, MAX_SEQLEN),
        (CAUSAL_MASK, MAX_SEQLEN),
    ],
)
def test_a_tile_visits_the_blocks_that_its_queries_see(asked: list[Any], mask: MaskSpec, keys: int) -> None:
    """No fewer, wherever they begin, and few more."""
    tile, tile_n, seen, *_ = find_parts_planner(IN_PARTS, CTAS, 6, mask).options(IN_PARTS.tile_queries, 8)
    most = (keys + tile - 2) // tile_n + 2
    assert most <= seen <= most + 1 + mask.attention_chunk // tile_n


def test_more_sequences_than_numbers_of_parts_count_have_one_part() -> None:
    sizes: Any = {"queries": 40, "heads": 4, "kv_heads": 1}
    assert numbers_of_parts(packed(4, **sizes), 2.0**20, 4, 64) > {1}
    assert best_splits(packed(4, **sizes), 2.0**20, 4) > 1
    many = packed(MOST_SEQUENCES_IN_PARTS + 1, **sizes)
    assert numbers_of_parts(many, 4000.0, 4, 64) == {1} and best_splits(many, 4000.0, 4) == 1
