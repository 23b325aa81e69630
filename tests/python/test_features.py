"""Windows and chunks as masks, against brute force; hints of FlashAttention-3 that ask for nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hopper_attention import explain, flash_attn_func, flash_attn_kvpacked_func
from hopper_attention.features import resolve_mask, resolve_packed_mask
from hopper_attention.masks import MaskSpec
from tests.python.dense_cases import sees

LENGTHS = ((1, 1), (1, 5), (5, 1), (4, 4), (3, 6), (6, 3))


def qkv(seqlen_q: int = 5, seqlen_k: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (1, seqlen_q, 4, 32), (1, seqlen_k, 2, 32), (1, seqlen_k, 2, 32)
    return tuple(torch.randn(s, generator=generator).half() for s in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_every_window_and_chunk_is_a_mask(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    q, k, _ = qkv(seqlen_q, seqlen_k)
    full, triangle = (sees(seqlen_q, seqlen_k, is_causal) for is_causal in (False, True))
    dense = windows = chunks = 0
    for left, right, chunk in itertools.product(range(-1, 8), range(-1, 8), (0, 1, 2, 5, 8, 2**40)):
        wanted = sees(seqlen_q, seqlen_k, causal, (left, right), chunk)
        options: dict[str, Any] = {"window_size": (left, right), "attention_chunk": chunk}
        mask = resolve_mask(q, k, causal, **options)
        of_some_length = resolve_packed_mask(causal, (left, right), chunk, seqlen_q + 1, seqlen_k + 2)
        for found in (mask, of_some_length):
            seen = sees(seqlen_q, seqlen_k, found.causal, found.window, found.attention_chunk)
            assert torch.equal(seen, wanted), options
        # A chunk may hide nothing new for another reason than that it holds all keys.
        if not mask.attention_chunk and (torch.equal(wanted, full) or torch.equal(wanted, triangle)):
            assert mask == MaskSpec(mask.causal), options
            dense += 1
        windows += mask.window != (-1, -1)
        chunks += mask.attention_chunk > 0
    assert dense >= 8 and (windows >= 8 or min(seqlen_q, seqlen_k) < 3)
    assert chunks >= 80 or max(seqlen_q, seqlen_k) == 1 or (causal and seqlen_k == 1)


SAME_AS_CAUSAL: list[Any] = [
    (-1, 0),
    [None, 0],
    torch.tensor([-1, 0]),
    (6, 0),
    (np.int64(10**6), 0),
    (torch.tensor(6), torch.tensor(0)),
]
SAME_AS_FULL: list[Any] = [(None, None), (-1, -1), [-1, None], (6, 4), (10**6, 10**6), torch.tensor([6, -1])]


@pytest.mark.parametrize("window", SAME_AS_CAUSAL, ids=str)
def test_windows_that_are_causal(window: Any) -> None:
    q, k, v = qkv()
    expected = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), expected)
    assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=window), expected)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), window_size=window), expected)
    meta = [x.to("meta") for x in (q, k, v)]
    assert explain(*meta, window_size=window, device_capability=(9, 0)).config.causal


@pytest.mark.parametrize("window", SAME_AS_FULL, ids=str)
def test_windows_that_hide_nothing(window: Any) -> None:
    q, k, v = qkv()
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v))
    both = flash_attn_func(q, k, v, causal=True, window_size=window)
    assert torch.equal(both, flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize(
    "hint",
    [
        *({"num_splits": n} for n in (None, 0, 1, 3, np.int32(4))),
        *({"pack_gqa": flag} for flag in (None, True, False, 1, np.False_)),
        *({"softcap": cap} for cap in (0, 0.0, np.float32(0))),
        *({"attention_chunk": chunk} for chunk in (0, 7, 100)),
    ],
    ids=str,
)
def test_hints_change_nothing(hint: dict[str, Any]) -> None:
    q, k, v = qkv()
    assert torch.equal(flash_attn_func(q, k, v, **hint), flash_attn_func(q, k, v))
    assert explain(q, k, v, **hint) == explain(q, k, v)


def test_a_single_query_behind_a_window_of_its_own_key() -> None:
    q, k, v = qkv(1, 7)
    assert torch.equal(flash_attn_func(q, k, v, window_size=(6, 0)), flash_attn_func(q, k, v))
    seen = flash_attn_func(q, k[:, 1:], v[:, 1:])
    assert torch.equal(flash_attn_func(q, k, v, window_size=(5, 0)), seen)


@pytest.mark.parametrize("dynamic", [False, True])
def test_they_compile(dynamic: bool) -> None:
    options = {"window_size": (-1, 0), "num_splits": 0, "pack_gqa": True, "softcap": 0.0}
    compiled = torch.compile(flash_attn_func, fullgraph=True, dynamic=dynamic, backend="eager")
    for seqlen in (5, 6, 9):
        q, k, v = qkv(seqlen, seqlen)
        assert torch.equal(compiled(q, k, v, **options), flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_that_depends_on_the_length_compiles(dynamic: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=q.shape[1] > 1)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="eager")
    for seqlen in (5, 1, 6):
        q, k, v = qkv(seqlen, 7)
        assert torch.equal(compiled(q, k, v), attend(q, k, v))


def test_lengths_are_read_off_tensors_with_the_right_dimensions() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="q has 3 dimensions"):
        flash_attn_func(q[0], k, v, window_size=(-1, 0))
    with pytest.raises(TypeError, match="k is a list"):
        flash_attn_func(q, [k], v, window_size=(3, 3))
