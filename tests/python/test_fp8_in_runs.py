"""FP8 attention to so many keys that V loses a mean for each part of a run: what is launched, on a GPU by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hopper.forward.fp8.tilings import RUNLESS_KEYS
from hopper.mean.config import MOST_PARTS
from hopper_attention import (
    Fp8Quantization,
    compile_cache,
    explain_fp8,
    flash_attn_fp8_func,
    flash_attn_quantized_func,
    parts_again,
    quantize_qkv,
)
from hopper_attention.fp8_at_once import calls_at_once
from hopper_attention.launch import base, fp8, quantize, value_mean
from hopper_attention.packing_rules import MOST_QUERIES
from tests.python.fake_gpu import SMS, forget_launchers, noting, pretend

Seen = list[tuple[object, ...]]
KEYS, HEAD_DIM = 20_000, 128
CONSUMERS = 2
"""Warpgroups of a kernel for few tiles, which these calls have."""

compiled: list[str] = []
"""Names of the kernels that were asked for."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """The name of each kernel that is launched, and its arguments."""
    found: Seen = []
    pretend(monkeypatch, fp8, quantize, value_mean)

    def get(config: compile_cache.KernelConfig) -> Callable[..., None]:
        compiled.append(config.name)
        return noting(found, config.name)

    compiled.clear()
    for getter in ("get_forward", "get_quantize"):
        monkeypatch.setattr(compile_cache, getter, get)
    for module in (base, fp8, quantize, value_mean):
        monkeypatch.setattr(module, "index_of", lambda device: 0, raising=False)
    yield found
    forget_launchers()


def qkv(keys: int = KEYS, queries: int = MOST_QUERIES + 44) -> list[torch.Tensor]:
    """Of so many queries that no part of a tile's keys is a CTA's."""
    return [torch.zeros(1, n, 2, HEAD_DIM, dtype=torch.bfloat16) for n in (queries, keys, keys)]


def test_each_part_of_a_run_loses_its_mean(seen: Seen) -> None:
    q, k, v = qkv()
    assert flash_attn_fp8_func(q, k, v).shape == q.shape
    names = [name for name, *_ in seen]
    assert sorted(compiled) == sorted(map(str, names))
    assert [str(name).split("_bf16")[0] for name in names[:3]] == [
        "hopper_value_mean",
        "hopper_run_means",
        "hopper_quantize",
    ]
    assert str(names[2]).endswith("runs8") and str(names[3]).endswith("runs64of8") and len(names) == 4
    assert explain_fp8(q, k, v, device_capability=(9, 0)).quantizer_config.name == names[2]
    (_, _, statistics, *of_first), (_, _, same, means, differences, changes, *of_second) = seen[:2]
    # Means of 8 blocks of 128 keys; the last block has 32 of them.
    assert of_first == of_second == [1024, 20_096] and same is statistics
    assert statistics.shape == (2, 1, 20, 2, HEAD_DIM) and means.shape == (1, 20, 2, HEAD_DIM)
    assert differences.shape == (1, 5, 2, 8 * HEAD_DIM) and differences.dtype == torch.int32
    assert changes.shape == (1, 2, MOST_PARTS)
    lost, counter, _ = seen[2][-3:]
    assert counter.shape == (2,) and counter.dtype == torch.int32
    assert lost.shape == (20, 2, HEAD_DIM) and lost.data_ptr() == means.data_ptr()
    *_, of_last, _, _, _, given, same_changes, notes, ctas = seen[3]
    assert of_last.shape == (1, 2, HEAD_DIM) and of_last.data_ptr() == means[:, -1].data_ptr()
    assert given is differences and same_changes is changes and ctas == SMS
    assert notes.shape == (SMS, 20, CONSUMERS * 128)


@pytest.mark.parametrize(
    "options",
    [
        {"smooth_v": False},
        {"rotate_v": True},
        {"smooth_k": True},
        {"block_k": 256},
        {"granularity": "head"},
    ],
    ids=str,
)
def test_others_lose_one_mean_or_none(seen: Seen, options: dict[str, object]) -> None:
    flash_attn_fp8_func(*qkv(), quantization=Fp8Quantization(**options))
    assert not any("runs8" in str(name) or "run_means" in str(name) for name, *_ in seen)
    for arguments in seen:
        if "hopper_fwd" in str(arguments[0]):
            *_, means, changes, notes, _ = arguments
            assert means.numel() == changes.numel() == notes.numel() == 0


def test_fewer_keys_have_no_runs(seen: Seen) -> None:
    flash_attn_fp8_func(*qkv(RUNLESS_KEYS))
    assert not any("runs" in str(name) for name, *_ in seen)


def test_few_queries_have_parts_of_keys_unless_these_lose_means(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part is longer than a sum of P V may be."""
    monkeypatch.setattr(compile_cache, "get_serving", lambda config: noting(seen, config.name))
    tensors = qkv(queries=40)
    for smooth_v in (True, False):
        c = Fp8Quantization(smooth_v=smooth_v)
        seen.clear()
        assert flash_attn_fp8_func(*tensors, quantization=c).shape == tensors[0].shape
        plan = explain_fp8(*tensors, quantization=c, device_capability=(9, 0))
        names = [str(name) for name, *_ in seen]
        assert plan.attention.config.name in names and plan.quantizer_config.name in names
        assert any("runs" in name for name in names) == smooth_v
        assert any("combine" in name for name in names) == plan.attention.config.split == (not smooth_v)
    *_, attention, combine = seen
    parts, part_lse = attention[4:6]
    assert combine[1] is parts and combine[2] is part_lse and parts.shape[0] >= KEYS / RUNLESS_KEYS


def facts_of(x: object) -> object:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("options", [{}, {"smooth_v": False}], ids=str)
@pytest.mark.parametrize("keys", [RUNLESS_KEYS + 1, KEYS])
def test_a_call_like_an_earlier_one_launches_the_same(
    seen: Seen, options: dict[str, bool], keys: int
) -> None:
    """Then a script finds all that is read and written in the pieces of a call."""
    quantization, calls = Fp8Quantization(**options), []
    tensors = [x.repeat(2, 1, 1, 1) for x in qkv(keys)]
    for _ in range(4):
        seen.clear()
        flash_attn_fp8_func(*tensors, quantization=quantization)
        calls.append(list(seen))
    assert calls_at_once.find(*tensors, quantization, False, False, None, False, None)
    first, again = calls[0], calls[-1]
    assert [list(map(facts_of, x)) for x in first] == [list(map(facts_of, x)) for x in again]
    if not options:
        (_, _, statistics, *_), (_, _, same, means, *others), (*_, lost, _, _), attention = again
        *_, of_last, _, _, _, given, same_changes, notes, _ = attention
        differences, changes, *_ = others
        assert same is statistics and same_changes is changes and given.data_ptr() == differences.data_ptr()
        assert lost.data_ptr() == means.data_ptr() and of_last.data_ptr() == means[:, -1].data_ptr()
        assert notes.shape == (SMS, means.shape[1], CONSUMERS * 128)


def test_parts_like_earlier_ones(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, calls, found = quantize_qkv(*qkv()), [], []
    find = parts_again.find
    monkeypatch.setattr(parts_again, "find", lambda *given: found.append(find(*given)) or found[-1])
    for _ in range(4):
        seen.clear()
        flash_attn_quantized_func(parts)
        calls.append(list(seen))
    assert found[0] is None and found[-1] is not None and "runs64of8" in str(calls[0][0][0])
    assert [list(map(facts_of, x)) for x in calls[0]] == [list(map(facts_of, x)) for x in calls[-1]]
