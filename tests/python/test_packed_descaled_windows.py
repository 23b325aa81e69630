"""Packed e4m3 tensors with descales in a window on the host: calls that are found again, by stand-ins for kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import device_memory, packed_descaled_again, varlen
from hopper_attention.masks import MaskSpec, kernel_sides
from tests.python.packed_fp8_calls import (
    Bounds,
    attend,
    attend_again,
    check,
    check_launches,
    descales,
    draw_call,
    exact_of,
    moved,
    plan_of_call,
    refuse,
)
from tests.python.packed_fp8_kernels import Kernels, pretended
from tests.python.varlen_cases import Case

CALLS: dict[str, tuple[Case, Bounds]] = {
    "short": (Case((50, 1, 33, 70), (60, 1, 0, 90)), (300, 260)),
    "long": (Case((90, 7, 0, 60), (95, 9, 130, 61), behind=5), (3000, 3000)),
    "used in part": (Case((70, 30), (90, 33), None, (85, 0)), (3000, 3000)),
    "few queries": (Case((3, 1, 2, 3), (400, 1, 90, 70), heads=(8, 2)), (3, 400)),
}
FEW = "few queries"
HEAD_DIMS = {"short": (64,), "long": (64, 256), "used in part": (128,), FEW: (64,)}

WINDOWS: dict[str, dict[str, Any]] = {
    "to the left": {"window_size": (20, 0)},
    "to the left, causal": {"window_size": (20, 33), "causal": True},
    "both sides": {"window_size": (7, 12)},
    "to the right": {"window_size": (-1, 1)},
    "no right side": {"window_size": (30, None)},
    "chunks": {"attention_chunk": 16},
    "chunks, causal": {"attention_chunk": 16, "causal": True},
    "chunks and a window": {"window_size": (9, 3), "attention_chunk": 24},
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Those of a pretended H200. What is new is NaN."""
    yield from pretended(monkeypatch)


def draw(name: str, head_dim: int = 64) -> tuple[Case, list[Tensor], dict[str, Any]]:
    """q, k and v, where their sequences lie, and descales."""
    case, bounds = CALLS[name]
    case = replace(case, head_dims=(head_dim, head_dim))
    tensors, lengths = draw_call(case, bounds)
    return case, tensors, lengths | descales("all", case)


def mask_of(window: dict[str, Any], bounds: Bounds) -> MaskSpec:
    sides = (-1 if side is None else side for side in window.get("window_size", (-1, -1)))
    chunk = window.get("attention_chunk", 0)
    return MaskSpec.canonical(window.get("causal", False), *sides, *bounds, chunk)


def oracle_of(window: dict[str, Any], bounds: Bounds) -> dict[str, Any]:
    """What float64 is told of a window."""
    mask = mask_of(window, bounds)
    names = "window_left", "window_right", "attention_chunk"
    return {"causal": mask.causal, **dict(zip(names, mask.sides, strict=True))}


def tolerance(name: str) -> float:
    return 4e-2 if name == FEW else 8e-3


def is_same(x: Any, y: Any) -> bool:
    """Of arguments of kernels, whose tensors lie elsewhere at each call."""
    if isinstance(x, Tensor):
        return torch.equal(x, y) and x.dtype == y.dtype
    return len(x) == len(y) and all(map(is_same, x, y)) if isinstance(x, (list, tuple)) else bool(x == y)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_get_what_first_calls_give_them(
    kernels: Kernels, name: str, window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, bounds = WINDOWS[window], CALLS[name][1]
    for head_dim in HEAD_DIMS[name]:
        case, tensors, given = draw(name, head_dim)
        exact = exact_of(case, tensors, given, **oracle_of(options, bounds))
        without_lse, with_lse = {}, {"return_attn_probs": True, "exact_lse": False, "softmax_scale": 0.2}
        for of_results in (without_lse, with_lse):
            kernels.calls.clear()
            named = {**given, **options, **of_results}
            if of_results:
                exact = exact_of(case, tensors, given, softmax_scale=0.2, **oracle_of(options, bounds))
            check(attend_again(kernels, monkeypatch, tensors, named), exact, tolerance(name))
            if name == FEW and not kernels.calls:
                continue
            check_launches(kernels, plan_of_call(tensors, named))
            for call in kernels.calls:
                # Ones and factors of the output may be there for what is behind the last sequence.
                call["scales"] = [x[: len(case.rooms_q)] for x in call["scales"]]
                call["lse"] = call["lse"].shape
            first, *others = kernels.calls
            assert len(others) == 2 and all(other.keys() == first.keys() for other in others)
            assert all(is_same(first[key], other[key]) for key in first for other in others)
            mask, config = mask_of(options, bounds), first["config"]
            left, right, chunk = mask.sides
            right = 0 if mask.causal and not config.causal else right
            assert config.window and tuple(first["sides"]) == kernel_sides(left, right, chunk)


@pytest.mark.parametrize("name", CALLS)
def test_other_lengths_in_the_same_place(
    kernels: Kernels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WINDOWS["to the left"]
    case, tensors, named = draw(name)
    given = descales("all", case)
    attend_again(kernels, monkeypatch, tensors, named | options)
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    for other, drawn, scales, lengths in moved(case, named, given):
        out = attend(*drawn, **lengths, **options)
        exact = exact_of(other, drawn, scales, **oracle_of(options, CALLS[name][1]))
        check(out, exact, 4e-2 if name == FEW else 2e-2)


def make_known(name: str, window: dict[str, Any]) -> tuple[Case, list[Tensor], dict[str, Any]]:
    """A call that was made twice, and its arguments without the window."""
    case, tensors, named = draw(name)
    for _ in range(2):
        attend(*tensors, **named, **window)
    return case, tensors, named


@pytest.mark.parametrize("name", ["long", FEW])
@pytest.mark.parametrize("known", [*WINDOWS, "none", "causal"])
def test_windows_do_not_serve_each_other(
    kernels: Kernels, name: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = WINDOWS | {"none": {}, "causal": {"causal": True}, "other": {"window_size": (21, 0)}}
    _, tensors, named = make_known(name, windows[known])
    bounds = CALLS[name][1]
    masks = {of: mask_of(window, bounds) for of, window in windows.items()}
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    for of, window in windows.items():
        if masks[of] == masks[known]:
            attend(*tensors, **named, **window)
            continue
        with pytest.raises(AssertionError, match="found anew"):
            attend(*tensors, **named, **window)


def test_windows_beside_each_other(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model whose layers have a window, or none, in turn."""
    windows = [{}, *WINDOWS.values()]
    case, tensors, named = draw("long")
    for window in windows * 2:
        attend(*tensors, **named, **window)
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    for window in windows * 2:
        exact = exact_of(case, tensors, named, **oracle_of(window, CALLS["long"][1]))
        check(attend(*tensors, **named, **window), exact)


@pytest.mark.parametrize("causal", [False, True])
def test_sides_that_hide_nothing(kernels: Kernels, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that have them are those without a window."""
    case, tensors, named = make_known("long", {"causal": causal})
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    exact = exact_of(case, tensors, named, causal=causal)
    windows: list[dict[str, Any]] = [{"window_size": x} for x in ((2999, 2999), (None, -1), (-1, 3000))]
    windows += [{"attention_chunk": 3000}, {"window_size": (-1, 0)}] if causal else []
    for window in windows:
        check(attend(*tensors, **named, causal=causal, **window), exact)
        assert kernels.calls[-1]["sides"] == [None] * 3
    if causal:
        check(attend(*tensors, **named, window_size=(-1, 0)), exact)


def test_bounds_of_lengths_decide_whether_a_side_hides_keys(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one class of lengths too: what is kept for a side that hides nothing serves no longer sequences."""
    _, tensors, named = draw("long")
    window: dict[str, Any] = {"window_size": (2999, 0)}
    for _ in range(2):
        attend(*tensors, **named, **window)
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    attend(*tensors, **named, **window)
    with pytest.raises(AssertionError, match="found anew"):
        attend(*tensors, **(named | {"max_seqlen_k": 3001}), **window)


def test_flags_are_those_of_a_call(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 is True, and other numbers are none."""
    window: dict[str, Any] = {"window_size": (20, 5)}
    case, tensors, named = make_known("long", window | {"causal": True})
    with pytest.raises(ValueError, match="causal is 2"):
        attend(*tensors, **named, **window, causal=2)
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    exact = exact_of(case, tensors, named, causal=True, window_left=20)
    check(attend(*tensors, **named, **window, causal=1), exact)


@pytest.mark.parametrize("given", [[20, 0], torch.tensor([20, 0])], ids=["list", "tensor"])
def test_sides_that_may_be_others_later_are_read_each_time(kernels: Kernels, given: Any) -> None:
    case, tensors, named = draw("long")
    for left in (20, 20, 20, 5):
        given[0] = left
        out = attend(*tensors, **named, window_size=given)
        check(out, exact_of(case, tensors, named, causal=True, window_left=left))
    assert not packed_descaled_again.remembered._calls


def test_errors_are_those_of_first_calls(kernels: Kernels) -> None:
    _, tensors, named = make_known("long", WINDOWS["both sides"])
    for changed, error, message in (
        ({"window_size": (-2, 0)}, ValueError, "window_size is"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size is"),
        ({"window_size": (1.5, 0)}, TypeError, "window_size is"),
        ({"window_size": "full"}, TypeError, "window_size is"),
        ({"attention_chunk": -1}, ValueError, "attention_chunk is"),
        ({"attention_chunk": True}, TypeError, "attention_chunk is"),
        ({"window_size": (7, 12), "causal": [1]}, TypeError, "causal is"),
        ({"window_size": (7, 12), "max_seqlen_k": 1.5}, TypeError, "max_seqlen_k is a float"),
        ({"window_size": (7, 12), "max_seqlen_k": 2**30}, NotImplementedError, "windows are implemented up"),
        ({"window_size": (7, 12), "softmax_scale": math.nan}, ValueError, "softmax_scale is"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=message):
                attend(*tensors, **(named | changed))


@pytest.mark.parametrize("kind", ["gradients", "a graph", "exact lse", "some queries"])
def test_what_is_not_remembered(kernels: Kernels, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window = WINDOWS["to the left"]
    case, tensors, named = draw("long")
    exact = exact_of(case, tensors, named, **oracle_of(window, CALLS["long"][1]))
    if kind == "gradients":
        named["k_descale"].requires_grad_()
    if kind == "a graph":
        monkeypatch.setattr(device_memory, "is_capturing", lambda device: True)
    if kind == "exact lse":
        named["return_attn_probs"] = True
    if kind == "some queries":
        named["seqused_q"] = torch.tensor(case.rooms_q, dtype=torch.int32)
    for _ in range(3):
        found = attend(*tensors, **named, **window)
        check(found if isinstance(found, tuple) else found.detach(), exact)
    assert len(kernels.calls) == 3 and not packed_descaled_again.remembered._calls


def test_what_was_kept_without_gradients_does_not_serve_with_them(kernels: Kernels) -> None:
    window = WINDOWS["to the left"]
    _, tensors, named = draw("long")
    named["k_descale"].requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            assert not attend(*tensors, **named, **window).requires_grad
    out = attend(*tensors, **named, **window)
    with pytest.raises(NotImplementedError, match="which have no gradient"):
        out.float().sum().backward()


def test_what_was_found_does_not_serve_in_a_graph(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    window = WINDOWS["to the left"]
    _, tensors, named = make_known("long", window)
    attend(*tensors, **named, **window)
    monkeypatch.setattr(varlen, "_call_operator", refuse)
    attend(*tensors, **named, **window)
    monkeypatch.setattr(device_memory, "records_graph", lambda index: True)
    with pytest.raises(AssertionError, match="found anew"):
        attend(*tensors, **named, **window)
