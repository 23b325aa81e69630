"""Backward passes like earlier ones on kernels that divide heads: their launches get what those of the first got."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import CLEARING_WORDS, SCHEDULER_WORDS
from cute_kernels.plan.config import plan_entries
from hopper_attention import (
    compile_cache,
    device_memory,
    explain_varlen,
    flash_attn_func,
    flash_attn_varlen_func,
)
from hopper_attention.backward_rules import MANY_KEYS
from hopper_attention.launch import backward, forward, packed_gradients_again
from hopper_attention.launch import varlen as varlen_launch
from hopper_attention.launch.gradient_launchers import DividedLauncher
from hopper_attention.launch.packed_backward import PackedBackwardLauncher
from tests.python.fake_gpu import SMS, forget_launchers, made_anew, noting, pretend
from tests.python.test_packed_again import count_calls, described, int32

Seen = list[tuple[Any, ...]]
"""A config, or nothing, and the arguments of its kernel."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """What kernels of gradients of a pretended H200 are called with. They compute nothing."""
    found: Seen = []
    pretend(monkeypatch, backward, forward, varlen_launch)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: noting([]))
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: noting(found, config))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def names_of(**tensors: Tensor) -> dict[int, str]:
    return {x.data_ptr(): name for name, x in tensors.items()}


def named(leaves: list[Tensor], grads: tuple[Tensor, ...], **others: Tensor) -> dict[int, str]:
    given = zip(("q", "k", "v", "dq", "dk", "dv"), (*leaves, *grads), strict=True)
    return names_of(**dict(given), **others)


# Dense


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    "head_dim,options",
    [
        (64, {"causal": True}),
        (256, {}),
        (64, {"causal": True, "deterministic": True}),
        (128, {"causal": True, "window_size": (255, 0)}),
        (192, {"causal": True}),
    ],
    ids=str,
)
def test_dense_launches(
    head_dim: int, options: dict[str, Any], is_kept: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that is kept for a pass, and in such that is given to each."""
    monkeypatch.setattr(device_memory, "made_of_memory", made_anew if is_kept else lambda *given: None)
    by_launcher = {"launches": 0}
    launch = DividedLauncher.launch

    def counted(*given: Any) -> None:
        by_launcher["launches"] += 1
        launch(*given)

    monkeypatch.setattr(DividedLauncher, "launch", counted)
    passes = []
    for _ in range(5):
        seen.clear()
        leaves = [
            torch.zeros(1, 300, n, head_dim, dtype=torch.bfloat16, requires_grad=True) for n in (8, 1, 1)
        ]
        out = flash_attn_func(*leaves, softmax_scale=0.25, **options)
        dout = torch.ones_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
        (prepare, *before), (config, *given), (finish, *behind) = seen
        left = dict(zip(("lse_log2", "delta", "sums", "key_sums", "value_sums"), given[4:9], strict=True))
        names = named(leaves, grads, out=out, dout=dout, lse=before[2], **left)
        passes.append([described(x, names) for launch in (before, given, behind) for x in launch])
    assert passes[1:] == [passes[0]] * 4
    kinds = (prepare.step, config.divides_heads, finish.step, finish.config.divides_heads)
    assert kinds == ("prepare", True, "finish", True)
    work, of_keys = ["lse_log2", "delta", "sums"], ["key_sums", "value_sums"]
    assert passes[0][:15] == ["out", "dout", "lse", *work, "q", "k", "v", "dout", *work, *of_keys]
    assert passes[0][16] == 0.25 and passes[0][-7:] == ["sums", "dq", *of_keys, "dk", "dv", 0.25]
    parts = given[7].shape[1]
    assert given[7].shape == given[8].shape == (1, parts, 3, config.dq_parts, config.dk_words) and parts > 1
    # Sums in a fixed order have a counter of their own, which is filled in each pass.
    assert by_launcher["launches"] == (5 if config.ordered else 2)


def test_dense_calls_of_other_sizes_have_other_parts(seen: Seen) -> None:
    """Which take turns."""
    parts = {}
    for _ in range(4):
        for batch, kv_heads in ((1, 1), (32, 1), (1, 8), (64, 1)):
            rows = [(batch, 300, n, 64) for n in (8, kv_heads, kv_heads)]
            leaves = [torch.zeros(row, dtype=torch.bfloat16, requires_grad=True) for row in rows]
            out = flash_attn_func(*leaves, causal=True)
            seen.clear()
            torch.autograd.grad(out, leaves, torch.ones_like(out))
            _, (config, *given), _ = seen
            found = given[7].shape[1] if config.divides_heads else 1
            assert parts.setdefault((batch, kv_heads), found) == found
    assert parts[1, 1] > parts[32, 1] > parts[64, 1] == parts[1, 8] == 1


# Packed

STARTS = int32(0, 150, 300, 450, 600)
CASES: dict[str, dict[str, Any]] = {
    "one list of lengths": {},
    "two": {"cu_seqlens_k": int32(0, 200, 300, 350, 600)},
    "queries used": {"seqused_q": int32(3, 4, 150, 0)},
    "both used": {"seqused_q": int32(3, 4, 5, 6), "seqused_k": int32(5, 6, 7, 150)},
    "window": {"window_size": (70, 0)},
    "deterministic": {"deterministic": True},
}
SCRIPTED = {"one list of lengths", "two", "queries used", "window"}
"""Of which all launches are made at once."""


def packed_leaves(heads: tuple[int, int] = (32, 8), head_dim: int = 64, rows: int = 600) -> list[Tensor]:
    numbers = heads[0], heads[1], heads[1]
    return [torch.zeros(rows, n, head_dim, dtype=torch.bfloat16, requires_grad=True) for n in numbers]


@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("name", CASES)
def test_packed_launches(name: str, head_dim: int, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS} | CASES[name]
    by_launchers = count_calls(monkeypatch, PackedBackwardLauncher)
    passes = []
    for _ in range(5):
        seen.clear()
        leaves = packed_leaves((8, 1), head_dim)
        options = {"causal": True, "softmax_scale": 0.25, "return_attn_probs": True} | case
        out, lse = flash_attn_varlen_func(*leaves, max_seqlen_q=600, max_seqlen_k=600, **options)
        dout = torch.ones_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
        (_, *before), (config, *given), (_, *behind) = seen[-3:]
        left = dict(zip(("lse_log2", "delta", "sums", "key_sums", "value_sums"), given[4:9], strict=True))
        names = named(leaves, grads, out=out, dout=dout, lse=lse, plan=before[7], **left)
        names |= names_of(**{x: y for x, y in case.items() if isinstance(y, Tensor)})
        passes.append([described(x, names) for launch in (before, given, behind) for x in launch])
    assert passes[1:] == [passes[0]] * 4 and config.divides_heads
    work, of_keys = ["lse_log2", "delta", "sums"], ["key_sums", "value_sums"]
    assert passes[0][:3] == ["out", "dout", "lse"] and passes[0][4:8] == [*work, "plan"]
    assert passes[0][10:19] == ["q", "k", "v", "dout", *work, *of_keys] and passes[0][20] == 0.25
    assert passes[0][-9:] == ["sums", "dq", *of_keys, "dk", "dv", "plan", 5, 0.25]
    parts, *shape = given[7].shape
    assert given[8].shape == given[7].shape and parts in (2, 4, 8)
    assert shape == [plan_entries(600, 4, config.tile_n), config.dq_parts, config.dk_words]
    assert by_launchers[PackedBackwardLauncher] == (2 if name in SCRIPTED else 5)


def test_sums_that_are_cleared_ahead(seen: Seen) -> None:
    """The counter that `prepare` fills is the last piece of memory, behind those of dK and dV."""
    for _ in range(4):
        leaves = packed_leaves((32, 4), 128)
        out = flash_attn_varlen_func(*leaves, STARTS, STARTS, 600, MANY_KEYS)
        seen.clear()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        (_, *before), (config, *given), (_, *behind) = seen[-3:]
        assert config.divides_heads and config.clears_ahead and given[9].data_ptr() == before[9].data_ptr()
        tiles = plan_entries(600, 4, config.tile_m)
        assert given[9].shape == (SCHEDULER_WORDS + CLEARING_WORDS + 32 * tiles,)
        assert given[9].dtype == torch.int32 and given[-1] == SMS
        assert given[7].shape[2:] == (config.dq_parts, config.dk_words) and given[7].shape[0] > 4
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(behind[2:4], given[7:9], strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_bounds_of_lengths_change_the_number_of_parts(deterministic: bool, seen: Seen) -> None:
    """Of tensors that are the same in every other way: 150 keys are those of all sequences, and 600 may be of one."""
    starts, found = STARTS, {}
    for bound in (150, 600, 150, 300, 600, 300) * 3:
        leaves = packed_leaves()
        out = flash_attn_varlen_func(
            *leaves, starts, starts, bound, bound, causal=True, deterministic=deterministic
        )
        seen.clear()
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        (_, *_), (config, *given), (_, *behind) = seen[-3:]
        parts = given[7].shape[0] // 8 if config.divides_heads else 1
        assert found.setdefault(bound, parts) == parts
        of_keys = behind[4:6] if config.divides_heads else given[7:9]
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(of_keys, grads[1:], strict=True))
        assert len(behind) == (9 if parts > 1 else 5)
    assert found[150] == 1 < found[600]


def test_layers_of_several_kinds_do_not_drive_each_other_out(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[dict[str, Any]] = [{"max_seqlen_k": 600}, {"max_seqlen_k": 150}, {"softmax_scale": 0.5}]
    leaves = packed_leaves()

    def step() -> list[tuple[bool, float]]:
        """Whether heads were divided, and scales that kernels were given."""
        found = []
        for options in kinds:
            given = {"max_seqlen_q": 600, "max_seqlen_k": 600} | options
            given["max_seqlen_q"] = given["max_seqlen_k"]
            out = flash_attn_varlen_func(*leaves, STARTS, STARTS, causal=True, **given)
            seen.clear()
            out.backward(torch.ones_like(out), inputs=leaves)
            found.append((seen[-2][0].divides_heads, seen[-2][11]))
        return found

    for _ in range(4):
        found = step()
    assert found == [(True, 0.125), (False, 0.125), (True, 0.5)]

    def searched(*given: Any) -> Any:
        raise AssertionError("a pass was searched for")

    monkeypatch.setattr(packed_gradients_again.remembered, "find_kept", searched)
    assert step() == found


def test_keys_that_are_not_used_have_zeros(seen: Seen) -> None:
    """The kernels write those of sequences."""
    for _ in range(3):
        leaves = packed_leaves((8, 1))
        out = flash_attn_varlen_func(*leaves, STARTS, STARTS, 600, 600, seqused_k=int32(5, 6, 7, 150))
        seen.clear()
        _, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert seen[-2][0].divides_heads and not dk.any() and not dv.any()


def test_it_is_told() -> None:
    leaves = packed_leaves()
    notes = [
        " ".join(explain_varlen(*leaves, STARTS, STARTS, n, n, causal=True, device_capability=(9, 0)).notes)
        for n in (150, 600)
    ]
    assert ["_varlen_divided" in text for text in notes] == [False, True]
