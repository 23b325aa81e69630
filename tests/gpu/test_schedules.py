"""A schedule that several layers use, each of which appends to a cache of its own, and batches of tokens with a prompt.

Every layer is held to float64, for every number of parts that a tile may be in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_with_kvcache, get_scheduler_metadata
from tests.gpu.test_kvcache import on
from tests.python.kvcache_cases import CacheCase, bits

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LAYERS = 2
STEP = CacheCase(
    lengths=(150, 0, 277, 64),
    new=(3, 1, 2, 3),
    queries=(2, 1, 3, 1),
    capacity=288,
    heads=(6, 2),
    head_dims=(128, 128),
    packed_q=True,
    packed_new=True,
    leftpad=(7, 0, 150, 1),
    batch_idx=(3, 0, 5, 1),
)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 3)},
    "chunk": {"causal": True, "attention_chunk": 100},
}


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Each test compiles the few kernels that it needs."""


def schedule_of(case: CacheCase, call: dict[str, Any], **options: Any) -> Tensor:
    """The schedule of a call, of what a server knows before its first layer."""
    (heads, kv_heads), (head_dim, head_dim_v) = case.heads, case.head_dims
    lengths = {
        name: call[name] for name in ("cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad") if name in call
    }
    return get_scheduler_metadata(
        case.batch,
        max(case.queries),
        call["page_table"].shape[1] * case.page_size if case.page_size else case.capacity,
        heads,
        kv_heads,
        head_dim,
        call["cache_seqlens"],
        call["q"].dtype,
        headdim_v=head_dim_v,
        max_seqlen_k_new=max(case.new, default=0),
        page_size=case.page_size or None,
        **lengths,
        **options,
    )


def check_layer(case: CacheCase, call: dict[str, Any], schedule: Tensor | None, num_splits: int) -> None:
    """New tokens are in the cache, bit by bit, and results are those of float64."""
    k_after, v_after = case.caches_after(call)
    there = on(DEVICE, call)
    out, lse = flash_attn_with_kvcache(
        **there, scheduler_metadata=schedule, num_splits=num_splits, return_softmax_lse=True
    )
    after = on("cpu", there)
    assert torch.equal(bits(after["k_cache"]), bits(k_after))
    assert torch.equal(bits(after["v_cache"]), bits(v_after))
    exact, exact_lse = case.expected(after)
    assert (out.cpu().double() - exact).abs().max() <= 1.6e-2 * max(1.0, exact.abs().max())
    assert torch.equal(lse.cpu() == -torch.inf, exact_lse == -torch.inf)
    assert (lse.cpu().double() - exact_lse).nan_to_num(nan=0.0).abs().max() <= 1e-2


@pytest.mark.parametrize("num_splits", [1, 3, 0])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("mask", MASKS)
def test_layers_append_under_one_schedule(mask: str, page_size: int, num_splits: int) -> None:
    """Packed queries and new tokens, cache entries by number, and keys that begin behind the first row."""
    case, options = replace(STEP, page_size=page_size), MASKS[mask]
    layers = [case.build(torch.bfloat16, seed=seed, **options) for seed in range(LAYERS)]
    schedule = schedule_of(case, on(DEVICE, layers[0]), num_splits=num_splits, **options)
    for call in layers:
        check_layer(case, call, schedule, num_splits)


PROMPT = 97
BATCH = 12
AMONG = CacheCase(
    lengths=tuple(40 + 17 * b for b in range(BATCH)),
    queries=tuple(PROMPT if b == 8 else 1 for b in range(BATCH)),
    capacity=256,
    heads=(6, 2),
    head_dims=(64, 64),
    page_size=16,
    packed_q=True,
)


@pytest.mark.parametrize("pack_gqa", [None, True, False])
@pytest.mark.parametrize("num_splits", [1, 4, 0])
def test_a_prompt_among_tokens(num_splits: int, pack_gqa: bool | None) -> None:
    """One sequence has a prompt and the others a token each: tiles of one call have one row or all of theirs."""
    call = AMONG.build(torch.bfloat16, causal=True, pack_gqa=pack_gqa)
    check_layer(AMONG, call, None, num_splits)
    schedule = schedule_of(AMONG, on(DEVICE, call), num_splits=num_splits, causal=True, pack_gqa=pack_gqa)
    check_layer(AMONG, call, schedule, num_splits)
