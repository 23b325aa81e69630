"""Which backward passes take one launch, and what reaches its kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from hopper_attention import compile_cache, explain
from hopper_attention.backward_rules import BackwardProblem, in_one_tile, select_config
from hopper_attention.launch import backward
from hopper_attention.launch.gradient_launchers import BackwardLauncher, OneTileLauncher
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import FULL_SIDES, MaskSpec
from hopper_attention.model_kernels import ModelShape, kernels_of
from hopper_attention.scores import NO_SCORES, ScoreKind
from tests.python.fake_gpu import SMS, forget_launchers, pretend

BF16 = torch.bfloat16


def problem(
    seqlens: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (4, 4),
    head_dims: tuple[int, int] = (128, 128),
    causal: bool = True,
    dtype: torch.dtype = BF16,
    batch: int = 2,
    **features: Any,
) -> BackwardProblem:
    (seqlen_q, seqlen_k), (heads_q, heads_kv), (head_dim, head_dim_v) = seqlens, heads, head_dims
    q_shape = batch, seqlen_q, heads_q, head_dim
    k_shape, v_shape = ((batch, seqlen_k, heads_kv, size) for size in (head_dim, head_dim_v))
    return BackwardProblem(q_shape, k_shape, v_shape, dtype, causal, **features)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "seqlens": (256, 77)},
        {"causal": False, "seqlens": (512, 77), "batch": 4},
        {"causal": False, "seqlens": (4096, 77), "batch": 16},
        {"deterministic": True},
        {"heads": (4, 2)},
        {"head_dims": (72, 40)},
        {"seqlens": (60, 128), "dtype": torch.float16},
    ],
)
def test_what_is_served(options: dict[str, Any]) -> None:
    asked = in_one_tile(problem(**options))
    assert asked.one_tile and asked.kind.one_tile
    config = select_config(asked, "hopper", (9, 0))
    assert (config.one_tile, config.ordered, config.causal) == (True, False, asked.causal)
    assert not select_config(asked, "ampere", (8, 0)).name.endswith("tile")


@pytest.mark.parametrize(
    "options",
    [
        {"seqlens": (129, 129)},
        # Long walks of few CTAs, along a sequence or over the heads that share K and V.
        {"causal": False, "seqlens": (260, 77)},
        {"causal": False, "seqlens": (516, 77), "batch": 15},
        {"causal": False, "seqlens": (4096, 77), "batch": 15},
        {"causal": False, "seqlens": (68, 77), "heads": (8, 1)},
        {"seqlens": (126, 126)},
        {"seqlens": (128, 64)},
        {"has_window": True},
        {"has_chunk": True},
        {"head_dims": (192, 192)},
        {"head_dims": (64, 192)},
        {"dtype": torch.float32},
        {"scores": ScoreKind(has_softcap=True)},
        {"scores": ScoreKind(has_sinks=True)},
    ],
)
def test_what_is_not(options: dict[str, Any]) -> None:
    asked = problem(**options)
    assert in_one_tile(asked) == asked


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Configs of backward kernels and what they are called with, on a Hopper GPU by name."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    pretend(monkeypatch, backward)

    def run(config: Any, *arguments: Any) -> None:
        calls.append((config, arguments))

    monkeypatch.setattr(compile_cache, "get_backward", lambda config: partial(run, config))
    yield calls
    forget_launchers()


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the LSE."""
    q, k, v = (torch.zeros(2, 128, heads, 64, dtype=BF16) for heads in (4, 2, 2))
    return q, k, v, torch.zeros(2, 4, 128)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pass_takes_one_launch(kernel_calls: list[Any], deterministic: bool) -> None:
    q, k, v, lse = tensors()
    out = torch.ones_like(q)
    options = 0.5, MaskSpec(False), NO_SCORES, None, deterministic
    dq, dk, dv = differentiate(q, None, q, k, v, out, lse, *options)
    ((config, given),) = kernel_calls
    assert config.one_tile and given[4] is lse and given[5] is out
    assert all(x is y for x, y in zip(given[6:9], (dq, dk, dv), strict=True))
    assert not given[9].any() and given[10:] == (0.5, SMS)


def test_a_gradient_of_the_lse_takes_the_kernel_with_sums(kernel_calls: list[Any]) -> None:
    q, k, v, lse = tensors()
    differentiate(q, torch.ones_like(lse), q, k, v, q, lse, 0.5, MaskSpec(False), NO_SCORES, None, False)
    (prepare, _), (config, _), (finish, _) = kernel_calls
    assert not config.one_tile
    assert (prepare, finish) == (BackwardStep("prepare", config), BackwardStep("finish", config))


def of_heads_in_rows(lse: Tensor) -> Tensor:
    """Contiguous, as one head is, but with a stride of 1 there."""
    return torch.zeros(2, 128, 1).mT


@pytest.mark.parametrize(
    "change",
    [lambda lse: torch.zeros(2 * 128 + 1)[1:].view(2, 1, 128), of_heads_in_rows],
    ids=["odd", "rows"],
)
def test_an_lse_that_tma_cannot_address_is_copied(kernel_calls: list[Any], change: Any) -> None:
    q, k, v = (torch.zeros(2, 128, 1, 64, dtype=BF16) for _ in range(3))
    lse = change(torch.zeros(2, 1, 128))
    assert lse.is_contiguous()
    differentiate(q, None, q, k, v, q, lse, 0.5, MaskSpec(False), NO_SCORES, None, False)
    ((_, given),) = kernel_calls
    assert given[4].stride() == (128, 128, 1) and given[4].data_ptr() % 16 == 0


def test_sums_of_dq_are_asked_of_another_kernel(kernel_calls: list[Any]) -> None:
    shape = (2, 128, 4, 64)
    options = shape, shape, shape, BF16, torch.device("cpu"), True, False, None, FULL_SIDES
    assert isinstance(backward.find_plain(*options), BackwardLauncher)
    assert isinstance(backward.find_for_call(*options), OneTileLauncher)
    assert backward.find_for_call(*options, True) is backward.find_plain(*options)


def test_it_is_told_and_compiled_ahead() -> None:
    names = []
    for rows in (128, 132):
        q, k, v = (torch.empty(1, rows, 4, 128, dtype=BF16, requires_grad=True) for _ in range(3))
        names.append(explain(q, k, v, causal=True, device_capability=(9, 0)).notes[-1].split()[-1])
    assert names[0].endswith("_tile") and not names[1].endswith("_tile")
    ahead = [c.name for c in kernels_of(ModelShape(BF16, 4, 4, 128, 128), "sm_90a", train=True)]
    assert set(names) <= set(ahead)


def test_few_heads_of_keys_are_compiled_ahead_for_batches() -> None:
    """One sequence has too few key/value heads for long walks, and eight have enough."""
    configs = kernels_of(ModelShape(BF16, 14, 2, 64, 64), "sm_90a", train=True)
    assert any(config.name.endswith("_tile") for config in configs)
