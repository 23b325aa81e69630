"""What reaches the kernel that copies a cache of e4m3, seen by a stand-in that does its work in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.dequantize.config import DequantizeConfig
from hopper.config import ForwardConfig
from hopper_attention import explain_kvcache
from hopper_attention.backends import Target
from hopper_attention.launch import cache_copy, kvcache
from hopper_attention.reference.kvcache import CacheRows, dequantized, gather_rows
from hopper_attention.scores import NO_SCORES
from tests.python.fake_gpu import H200, serve_by
from tests.python.kvcache_cases import FP8, CacheCase
from tests.python.test_decode_rules import read, with_columns


class StandIn:
    """The kernel, by the reference; NaN behind the keys."""

    def __init__(self) -> None:
        self.configs: list[DequantizeConfig] = []

    def get(self, config: DequantizeConfig) -> Callable[..., None]:
        self.configs.append(config)
        return self.launch

    def launch(self, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
        lengths, first, batch_idx, table, *descales, k, v = rest
        pages, page_size = k_cache.shape[:2]
        capacity = page_size * (table.shape[1] if len(table) else 1)
        rows = CacheRows(
            pages, page_size, capacity, table if len(table) else None, batch_idx if len(batch_idx) else None
        )
        begin = first.long() if len(first) else None
        for cache, descale, copy in zip((k_cache, v_cache), descales, (k, v), strict=True):
            copy.copy_(dequantized(gather_rows(cache, rows, *copy.shape[:2], begin), descale, copy.dtype))
            behind = torch.arange(copy.shape[1])[None] >= lengths[:, None]
            copy[behind] = torch.nan


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(kvcache, "find_way", lambda call: kvcache.Way("general", "hopper"))
    yield from serve_by(StandIn(), monkeypatch, cache_copy)


WIDE = CacheCase(head_dims=(32, 48), queries=(3, 3, 3))
CASES = {
    "pages": replace(WIDE, page_size=4),
    "pages of a batch index": replace(WIDE, page_size=4, batch_idx=(3, 1, 0)),
    "no pages": WIDE,
    "a leftpad": replace(WIDE, leftpad=(4, 0, 20)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_kernel_gets_what_pytorch_would(
    name: str, scaled: bool, kernel: StandIn, monkeypatch: Any
) -> None:
    given = {"cache_dtype": FP8}
    if scaled:
        given |= {"k_descale": torch.rand(3, 2) + 0.5, "v_descale": torch.rand(3, 2) + 0.5}
    call, tensors = read(CASES[name].build(torch.bfloat16, **given))
    *copied, room = kvcache._keys_and_values(call, tensors)
    monkeypatch.setattr(kvcache, "copy_in_16_bits", lambda *arguments: None)
    *plain, plain_room = kvcache._keys_and_values(call, tensors)
    assert room == plain_room and kernel.configs == [DequantizeConfig("sm_90a", "bfloat16")]
    used = kvcache._lengths_of_keys(call.shape, tensors)
    is_key = (torch.arange(room)[None] < used[:, None]).flatten()
    for ours, theirs in zip(copied, plain, strict=True):
        assert torch.equal(ours[is_key], theirs[is_key]) and bool(ours[~is_key].isnan().all())


def test_attention_to_the_copy(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is that of a cache of 16 bits, whose lengths are those of the call."""
    case, seen = CASES["a leftpad"], []

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append((q, k, v, options))
        return q, q

    monkeypatch.setattr(kvcache, "paged_forward", attend)
    call, tensors = read(case.build(torch.bfloat16, cache_dtype=FP8, causal=True))
    kvcache.attend_to_copy(call, tensors, NO_SCORES)
    ((q, k, v, options),) = seen
    assert q is tensors.q or torch.equal(q, tensors.q)
    assert k.shape == (3, call.shape.seqlen_k, 2, 32) and v.shape[3] == 48 and k.dtype == torch.bfloat16
    assert torch.equal(options["lengths"], kvcache._lengths_of_keys(call.shape, tensors).int())
    assert options["page_table"] is None and options["mask"] is call.mask and "leftpad" not in options


def test_what_the_kernel_does_not_copy(kernel: StandIn) -> None:
    given = WIDE.build(torch.bfloat16, cache_dtype=FP8)
    odd, _ = read(given | {"k_cache": with_columns(given["k_cache"], 36)})
    assert cache_copy.find_copy(odd.shape) is None
    assert "no multiples of 8" in cache_copy.why_not_copied(odd.shape, H200)
    of_16_bits, _ = read(WIDE.build(torch.bfloat16))
    assert cache_copy.why_not_copied(of_16_bits.shape, H200) == "there is no key of e4m3"
    call, tensors = read(WIDE.build(torch.bfloat16, cache_dtype=FP8))
    old = Target("fake A100", (8, 0), assume_installed=True)
    assert "no instructions for e4m3" in cache_copy.why_not_copied(call.shape, old)
    many = replace(call.shape, batch=70_000)
    assert "the batch is 70000" in cache_copy.why_not_copied(many, H200)
    shifted = torch.zeros(tensors.k_cache.numel() + 4).to(FP8)[4:].view(tensors.k_cache.shape)
    lengths = torch.ones(3, dtype=torch.int32)
    assert cache_copy.copy_in_16_bits(call.shape, tensors._replace(k_cache=shifted), lengths, None) is None


def test_explain_says_which_kernel_copies() -> None:
    given = replace(WIDE, page_size=3).build(torch.bfloat16, cache_dtype=FP8)
    plan = explain_kvcache(**given, device_capability=(9, 0))
    assert plan.path == "copied" and isinstance(plan.config, ForwardConfig) and not plan.config.page_box
    assert plan.steps == ("keys and values in use are copied to bfloat16, by dequantize_sm_90a_bf16",)
    there = explain_kvcache(**given, device_capability=(8, 0))
    assert there.steps[-1].endswith("are dequantized to bfloat16 by PyTorch")
