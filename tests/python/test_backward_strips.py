"""Which windows have a backward kernel that writes dQ itself, and what reaches it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from hopper_attention import compile_cache, explain
from hopper_attention.backward_rules import BackwardProblem, in_strips, select_config
from hopper_attention.launch import backward
from hopper_attention.launch.gradient_launchers import BackwardLauncher, StripLauncher
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.model_kernels import ModelShape, kernels_of
from hopper_attention.scores import NO_SCORES, ScoreKind
from tests.python.fake_gpu import SMS, forget_launchers, pretend

BF16 = torch.bfloat16
NARROW = (127, -1, 0)


def problem(
    seqlens: tuple[int, int] = (300, 300),
    heads: tuple[int, int] = (4, 4),
    head_dims: tuple[int, int] = (128, 128),
    causal: bool = True,
    **features: Any,
) -> BackwardProblem:
    (seqlen_q, seqlen_k), (heads_q, heads_kv), (head_dim, head_dim_v) = seqlens, heads, head_dims
    shapes = (
        (2, seqlen_q, heads_q, head_dim),
        (2, seqlen_k, heads_kv, head_dim),
        (2, seqlen_k, heads_kv, head_dim_v),
    )
    return BackwardProblem(*shapes, BF16, causal, has_window=True, **features)


@pytest.mark.parametrize(
    "options,sides",
    [
        ({}, NARROW),
        ({}, (128, -1, 0)),
        ({}, (5, -1, 0)),
        ({"causal": False}, (64, 64, 0)),
        ({"causal": False}, (5, 60, 0)),
        ({"deterministic": True}, NARROW),
        ({"seqlens": (301, 301)}, NARROW),
        ({"seqlens": (256, 384)}, NARROW),
        ({"head_dims": (72, 40)}, NARROW),
        ({"head_dims": (40, 40)}, NARROW),
    ],
)
def test_what_is_served(options: dict[str, Any], sides: Sides) -> None:
    asked = in_strips(problem(**options), sides)
    assert asked.in_strips and asked.kind.in_strips
    config = select_config(asked, "hopper", (9, 0))
    assert (config.strips, config.ordered, config.tile_m, config.causal) == (True, False, 64, asked.causal)
    assert not select_config(asked, "ampere", (8, 0)).name.endswith("strips")


@pytest.mark.parametrize(
    "options,sides",
    [
        ({}, (129, -1, 0)),
        ({}, FULL_SIDES),
        ({"causal": False}, (127, -1, 0)),
        ({"causal": False}, (-1, 5, 0)),
        ({"causal": False}, (65, 1, 0)),
        ({"causal": False}, (20, 20, 30)),
        ({"heads": (4, 2)}, NARROW),
        ({"seqlens": (300, 330)}, NARROW),
        ({"seqlens": (364, 300)}, NARROW),
        ({"head_dims": (192, 192)}, NARROW),
        ({"head_dims": (64, 192)}, NARROW),
        ({"scores": ScoreKind(has_softcap=True)}, NARROW),
    ],
)
def test_what_is_not(options: dict[str, Any], sides: Sides) -> None:
    asked = problem(**options)
    assert in_strips(asked, sides) == asked
    assert not select_config(asked, "hopper", (9, 0)).strips


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Configs of backward kernels and what they are called with, on a Hopper GPU by name."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    pretend(monkeypatch, backward)

    def run(config: Any, *arguments: Any) -> None:
        calls.append((config, arguments))
        if isinstance(config, BackwardStep) and config.step == "prepare":
            arguments[4].zero_()

    monkeypatch.setattr(compile_cache, "get_backward", lambda config: partial(run, config))
    yield calls
    forget_launchers()


def tensors(heads_kv: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the LSE."""
    q, k, v = (torch.zeros(2, 150, heads, 64, dtype=BF16) for heads in (4, heads_kv, heads_kv))
    return q, k, v, torch.zeros(2, 4, 150)


@pytest.mark.parametrize("deterministic", [False, True])
def test_dq_is_written_by_the_kernel(kernel_calls: list[Any], deterministic: bool) -> None:
    q, k, v, lse = tensors(4)
    mask = MaskSpec(True, 127)
    dq, dk, dv = differentiate(
        q, torch.ones_like(lse), q, k, v, q, lse, 0.5, mask, NO_SCORES, None, deterministic
    )
    (prepare, rows), (config, given) = kernel_calls
    assert prepare == BackwardStep("prepare", config) and config.strips
    # Whole tiles of 64 queries; the gradient of the LSE is taken from delta before the kernel.
    assert [x.shape for x in rows[3:5]] == [(2, 4, 192)] * 2 and (rows[4][:, :, :150] == -1).all()
    # No sums of dQ but for the few words of a tile that are always cleared.
    assert rows[5].shape == (2, 4, 3, 1, 4)
    assert given[4] is rows[3] and given[5] is rows[4]
    assert [x is y for x, y in zip(given[6:9], (dq, dk, dv), strict=True)] == [True] * 3
    assert not given[9].any() and given[10:] == (0.5, 127, 2**29, *(None,) * 7, SMS)


def test_shared_heads_have_the_kernel_of_any_window(kernel_calls: list[Any]) -> None:
    q, k, v, lse = tensors(2)
    differentiate(q, None, q, k, v, q, lse, 0.5, MaskSpec(True, 127), NO_SCORES, None, False)
    _, (config, given), (finish, _) = kernel_calls
    assert finish == BackwardStep("finish", config) and not config.strips and given[6].dim() == 5


def test_sums_of_dq_are_asked_of_another_kernel(kernel_calls: list[Any]) -> None:
    shape = (2, 150, 4, 64)
    options = shape, shape, shape, BF16, torch.device("cpu"), True, False, None, NARROW
    assert isinstance(backward.find_plain(*options), BackwardLauncher)
    assert isinstance(backward.find_for_call(*options), StripLauncher)
    wide = *options[:-1], (1000, -1, 0)
    assert backward.find_for_call(*wide) is backward.find_plain(*wide)


def test_it_is_told_and_compiled_ahead() -> None:
    q, k, v = (torch.empty(1, 4096, 4, 128, dtype=BF16, requires_grad=True) for _ in range(3))
    notes = {
        left: explain(q, k, v, causal=True, window_size=(left, 0), device_capability=(9, 0)).notes[-1]
        for left in (127, 129)
    }
    assert notes[127].endswith("_window_strips") and notes[129].endswith("_window")
    for heads_kv in (4, 2):
        model = ModelShape(BF16, 4, heads_kv, 128, 128, window=128)
        names = [config.name for config in kernels_of(model, "sm_90a", train=True)]
        assert (notes[127].split()[-1] in names) == (heads_kv == 4)
