"""Backward passes of packed sequences like earlier ones: their launches get what those of the first pass got."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import FEW_KEYS
from hopper_attention import backward_rules, compile_cache, explain_varlen, flash_attn_varlen_func
from hopper_attention.backward_rules import FASTER_IN_ORDER, MANY_KEYS
from hopper_attention.launch import backward, forward, packed_gradients_again
from hopper_attention.launch import varlen as varlen_launch
from hopper_attention.launch.packed_backward import PackedBackwardLauncher
from hopper_attention.launch.packed_forward import PackedForwardLauncher
from tests.python.fake_gpu import forget_launchers, noting, pretend

Seen = list[tuple[Any, ...]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Arguments of the kernels of a pretended H200, which compute nothing."""
    found: Seen = []
    pretend(monkeypatch, backward, forward, varlen_launch)
    for name in ("get_forward", "get_backward"):
        monkeypatch.setattr(compile_cache, name, lambda config: noting(found))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


CASES: dict[str, dict[str, Any]] = {
    "one list of lengths": {},
    "two": {"cu_seqlens_k": int32(0, 20, 50)},
    "queries used": {"seqused_q": int32(3, 4)},
    "both used": {"seqused_q": int32(3, 4), "seqused_k": int32(5, 6)},
    "window": {"window_size": (7, 0)},
    "both sides of a window": {"window_size": (7, 3)},
    "chunks": {"attention_chunk": 8, "causal": True},
    "deterministic": {"deterministic": True},
}
OF_WINDOWS = {"window", "both sides of a window", "chunks"}
SCRIPTED_FORWARD = {"one list of lengths", "two", "deterministic"} | OF_WINDOWS
SCRIPTED = {"one list of lengths", "two", "queries used"} | OF_WINDOWS
"""Of which all launches are made at once; where keys are unused, or sums have an order, something is filled before."""


def count_calls(monkeypatch: pytest.MonkeyPatch, *launchers: type) -> dict[type, int]:
    """How often each of these is called from now on."""
    counts = dict.fromkeys(launchers, 0)

    def count(launcher: Any) -> None:
        whole = launcher.__call__

        def counted(*given: Any, **options: Any) -> Any:
            counts[launcher] += 1
            return whole(*given, **options)

        monkeypatch.setattr(launcher, "__call__", counted)

    for launcher in launchers:
        count(launcher)
    return counts


def described(x: Any, names: dict[int, str]) -> Any:
    """A tensor by the name of its address, or by what it is; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    return names.get(x.data_ptr(), (tuple(x.shape), x.stride(), x.dtype))


@pytest.mark.parametrize("name", CASES)
def test_launches_get_what_those_of_the_first_pass_got(
    name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = int32(0, 16, 40)
    case = {"cu_seqlens_q": starts, "cu_seqlens_k": starts} | CASES[name]
    total_k = int(case["cu_seqlens_k"][-1])
    by_launchers = count_calls(monkeypatch, PackedForwardLauncher, PackedBackwardLauncher)
    passes = []
    for _ in range(5):
        seen.clear()
        rows = 40, total_k, total_k
        leaves = [torch.zeros(n, 2, 64, dtype=torch.bfloat16, requires_grad=True) for n in rows]
        out, lse = flash_attn_varlen_func(
            *leaves, max_seqlen_q=24, max_seqlen_k=30, softmax_scale=0.25, return_attn_probs=True, **case
        )
        dout = torch.ones_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
        of_queries, _, plan, prepare, *_ = seen
        known = {"out": out, "dout": dout, "lse": lse, **dict(zip(("q", "k", "v"), leaves, strict=True))}
        known |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        known |= {"plan": plan[4], "lse_log2": prepare[4], "delta": prepare[5], "sums": prepare[6]}
        known["plan of queries"] = of_queries[4]
        known |= {name: x for name, x in case.items() if isinstance(x, Tensor)}
        names = {x.data_ptr(): name for name, x in known.items()}
        passes.append([described(x, names) for launch in seen for x in launch])
        assert [x.shape for x in grads] == [x.shape for x in leaves]
    first, *others = passes
    wanted = {"q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv", "plan", "lse_log2", "delta", "sums"}
    assert wanted <= {x for x in first if isinstance(x, str)}
    assert others == [first] * 4
    # The first two passes are made by the launchers, and the others where they have no script.
    forward_is_scripted, backward_is_scripted = name in SCRIPTED_FORWARD, name in SCRIPTED
    assert by_launchers[PackedForwardLauncher] == (2 if forward_is_scripted else 5)
    assert by_launchers[PackedBackwardLauncher] == (2 if backward_is_scripted else 5)


def test_an_odd_address_is_copied(seen: Seen) -> None:
    starts = int32(0, 16, 40)
    leaves = [torch.zeros(40, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    odd = torch.zeros(40 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(40, 2, 64)
    for dout in (torch.zeros_like(odd), torch.zeros_like(odd), torch.zeros_like(odd), odd):
        out = flash_attn_varlen_func(*leaves, starts, starts, 24, 24)
        seen.clear()
        found = torch.autograd.grad(out, leaves, dout)
    *_, prepare, kernel, finish = seen
    assert all(x is not odd and x.data_ptr() % 16 == 0 for x in (prepare[1], kernel[3]))
    assert finish[1] is found[0]


def test_a_pass_whose_sequences_may_have_more_keys_is_not_like_one_with_few(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of lengths decides on the kernel, though all tensors are the same."""
    ran: list[str] = []

    def get(config: Any) -> Any:
        return lambda *given: ran.append(config.name)

    monkeypatch.setattr(compile_cache, "get_backward", get)
    starts = int32(0, FEW_KEYS, 2 * FEW_KEYS)
    leaves = [torch.zeros(2 * FEW_KEYS, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for bound in (FEW_KEYS, FEW_KEYS + 1) * 4:
        out = flash_attn_varlen_func(*leaves, starts, starts, FEW_KEYS, bound)
        ran.clear()
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
        prepare, kernel, _ = ran
        assert prepare.endswith("_few") == kernel.endswith("_few") == (bound == FEW_KEYS)


def test_only_long_sequences_have_their_sums_cleared_ahead(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones would wait for the zeros; a bound that changes finds the other kernel again."""
    ran: list[str] = []
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: lambda *given: ran.append(config.name))
    starts = int32(0, 16, 32)
    leaves = [torch.zeros(32, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for bound in (MANY_KEYS - 1, MANY_KEYS) * 4:
        out = flash_attn_varlen_func(*leaves, starts, starts, 16, bound)
        ran.clear()
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
        prepare, kernel, _ = ran
        assert prepare.endswith("_clears") == kernel.endswith("_clears") == (bound == MANY_KEYS)


def test_many_short_sequences_have_their_sums_in_order(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a causal mask and bounds that are the same; others find the other kernel again."""
    ran: list[str] = []
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: lambda *given: ran.append(config.name))
    monkeypatch.setattr(backward_rules, "MANY_ELEMENTS", 32 * 2 * 128)
    starts, bound = int32(0, 16, 32), FASTER_IN_ORDER[128]
    leaves = [torch.zeros(32, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for bounds in ((bound, bound), (bound + 1, bound + 1), (bound - 1, bound)) * 4:
        out = flash_attn_varlen_func(*leaves, starts, starts, *bounds, causal=True)
        ran.clear()
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
        prepare, kernel, _ = ran
        is_in_order = bounds == (bound, bound)
        assert prepare.endswith("_stores") == kernel.endswith("_ordered_varlen_stores") == is_in_order
    in_plan = [
        explain_varlen(*leaves, starts, starts, n, n, causal=True, device_capability=(9, 0)).notes
        for n in (bound, bound + 1)
    ]
    assert ["_ordered" in " ".join(notes) for notes in in_plan] == [True, False]


def test_layers_of_several_kinds_do_not_drive_each_other_out(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = int32(0, 16, 40)
    leaves = [torch.zeros(40, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    kinds: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"softmax_scale": 0.5},
        {"deterministic": True},
        {"softmax_scale": 0.25, "deterministic": True},
        {"cu_seqlens_k": starts.clone()},
        {"seqused_q": int32(3, 4)},
        {"max_seqlen_k": MANY_KEYS},
    ]

    def step() -> list[float]:
        """The scales that kernels of gradients were given."""
        scales = []
        for options in kinds:
            given: dict[str, Any] = {"cu_seqlens_k": starts, "max_seqlen_k": 30} | options
            out = flash_attn_varlen_func(*leaves, starts, max_seqlen_q=24, **given)
            seen.clear()
            out.backward(torch.ones_like(out), inputs=leaves)
            scales.append(seen[2][10])
        return scales

    for _ in range(4):
        scales = step()
    assert scales == [0.125, 0.125, 0.5, 0.125, 0.25, 0.125, 0.125, 0.125]

    def searched(*given: Any) -> Any:
        raise AssertionError("a pass was searched for")

    monkeypatch.setattr(packed_gradients_again.remembered, "find_kept", searched)
    assert step() == scales


def test_lengths_that_hooks_take_apart_are_not_taken_for_one_tensor(seen: Seen) -> None:
    starts = int32(0, 16, 40)
    leaves = [torch.zeros(40, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for taken_apart in (False, False, False, True, True):
        unpack = torch.clone if taken_apart else torch.Tensor.detach
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = flash_attn_varlen_func(*leaves, starts, starts, 24, 24)
        seen.clear()
        found = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert [x.shape for x in found] == [x.shape for x in leaves]
        of_keys, prepare, *_ = seen
        assert torch.equal(of_keys[0], starts) and torch.equal(of_keys[1], starts) and len(prepare) > 7


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "longest"),
    [
        (0, 0, (0, 0)),
        (0, 0, (5, 5)),
        (0, 30, (0, 30)),
        (30, 0, (30, 0)),
        (3000, 3000, (0, 0)),
        (300, 0, (0, 0)),
    ],
)
def test_calls_of_nothing_are_made_again(
    seen: Seen, queries: int, keys: int, longest: tuple[int, int], requires_grad: bool
) -> None:
    """Without tokens, or of sequences that have none by their bounds."""
    q, k, v = (torch.zeros(n, 4, 64, dtype=torch.bfloat16) for n in (queries, keys, keys))
    q.requires_grad_(requires_grad)
    none = int32(0, 0, 0)
    for _ in range(3):
        out, lse = flash_attn_varlen_func(q, k, v, none, none, *longest, causal=True, return_attn_probs=True)
        assert (out.shape, lse.shape) == ((queries, 4, 64), (4, queries))
