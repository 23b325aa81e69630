"""Calls drawn at random, many times over and in any order: each does what it does in a process that made no other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import tvm_ffi
from torch import Tensor

from hopper_attention import (
    Fp8Quantization,
    compile_cache,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    quantize_qkv,
)
from hopper_attention.launch import backward, forward, quantize
from hopper_attention.launch import fp8 as fp8_launch
from tests.python.fake_gpu import forget_launchers, noting, pretend

BF16 = torch.bfloat16
KINDS, CALLS = 80, 320
"""Of calls, and how many are made of them."""

QUANTIZATIONS = [
    Fp8Quantization(),
    Fp8Quantization(smooth_v=False),
    Fp8Quantization(rotate_v=True, smooth_v=False),
    Fp8Quantization(smooth_k=True, smooth_v=False),
    Fp8Quantization(granularity="head"),
    Fp8Quantization(seed=3),
]

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", BF16),
}

Seen = list[tuple[Any, ...]]


class Drawn(NamedTuple):
    """A call."""

    function: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    quantization: Fp8Quantization
    mode: str


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Configs and arguments of the kernels of a pretended H200, which compute nothing."""
    found: Seen = []
    pretend(monkeypatch, backward, forward, fp8_launch, quantize)
    for name in ("get_forward", "get_backward", "get_quantize"):
        monkeypatch.setattr(compile_cache, name, lambda config: noting(found, config))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def lay(r: random.Random, shape: tuple[int, ...]) -> Tensor:
    """A tensor in one of the ways that tensors lie in memory."""
    batch, rows, heads, columns = shape
    ways: list[Callable[[], Tensor]] = [
        lambda: torch.zeros(shape, dtype=BF16),
        lambda: torch.zeros(batch, rows + 24, heads, columns, dtype=BF16)[:, :rows],
        lambda: torch.zeros(batch, heads, rows, columns, dtype=BF16).transpose(1, 2),
        lambda: torch.zeros(batch, rows, heads, columns + 3, dtype=BF16)[..., :columns],
        lambda: torch.zeros(1, *shape[1:], dtype=BF16).expand(shape),
        lambda: torch.zeros(batch * rows * heads * columns + 1, dtype=BF16)[1:].view(shape),
    ]
    return r.choices(ways, (6, 1, 1, 1, 1, 1))[0]().requires_grad_(r.random() < 0.1)


def draw(r: random.Random, rows: int) -> Drawn:
    """The same of the same generator, of new tensors with so many rows of Q."""
    batch, keys = 2, r.choice([34, 34, 34, 34, 35, 65, 1, 0])
    q, k, v = lay(r, (batch, rows, 4, 64)), lay(r, (batch, keys, 2, 64)), lay(r, (batch, keys, 2, 64))
    function = r.choice(["dense", "fp8", "parts"])
    options: dict[str, Any] = {
        "causal": r.choice([False, False, True, 1]),
        "return_attn_probs": r.choice([False, False, True]),
        "softmax_scale": r.choice([None, None, 0.5, 0.5, 0.25, -1.0]),
        "window_size": r.choice([(-1, -1), (-1, -1), (-1, -1), (None, None), (5, 0)]),
    }
    if function == "dense":
        more: dict[str, list[Any]] = {"deterministic": [False, True], "sm_margin": [0, 0, 4, True]}
        more |= {"softcap": [0.0, 0.0, 3.0], "backend": [None, "hopper"]}
    else:
        more = {"two_level_accumulation": [False] * 5 + [True], "exact_lse": [False] * 5 + [True]}
    options |= {name: r.choice(values) for name, values in more.items()}
    tensors = {"q": q, "k": k, "v": k if r.random() < 0.1 else v}
    return Drawn(function, tensors, options, r.choice(QUANTIZATIONS), r.choice([*MODES, "plain", "plain"]))


def make(call: Drawn) -> list[Any]:
    """What comes of it, gradients too, or the error."""
    q, k, v = given = tuple(call.tensors.values())
    try:
        if call.function == "dense":
            found: Any = flash_attn_func(*given, **call.options)
        elif call.function == "fp8":
            found = flash_attn_fp8_func(*given, quantization=call.quantization, **call.options)
        else:
            parts = quantize_qkv(q, k, v, quantization=call.quantization)
            parts = replace(parts, dtype=torch.float16) if call.mode == "no_grad" else parts
            found = flash_attn_quantized_func(parts, **call.options)
        results = [*found] if isinstance(found, tuple) else [found]
        leaves = [x for x in {id(x): x for x in given}.values() if x.requires_grad]
        if results[0].requires_grad:
            results += torch.autograd.grad(results[0], leaves, torch.ones_like(results[0]))
    except (ValueError, TypeError, NotImplementedError) as error:
        return [type(error).__name__, str(error)]
    return results


def facts(x: Any, tensors: dict[str, Tensor]) -> Any:
    """What of a result, or of an argument of a kernel, is the same in every call of a kind: which of ``tensors`` it is,
    among it."""
    if isinstance(x, tvm_ffi.Tensor):
        return tuple(x.shape), f"torch.{x.dtype}", [], False, False
    if not isinstance(x, Tensor):
        return repr(x)
    same = [name for name, y in tensors.items() if x.numel() and x.data_ptr() == y.data_ptr()]
    return tuple(x.shape), str(x.dtype), same, x.requires_grad and not same, bool(x.data_ptr() % 16)


def run(kind: int, rows: int, seen: Seen) -> tuple[Any, ...]:
    """A call of a kind, what comes of it, and what its kernels are given."""
    call = draw(random.Random(kind), rows)
    seen.clear()
    with MODES[call.mode]():
        results = make(call)
    # A kernel sees nothing of autograd: whether a saved LSE needs a gradient depends on who asked for it first.
    kernels = [
        [facts(x.detach() if isinstance(x, Tensor) else x, call.tensors) for x in given] for given in seen
    ]
    arguments = {
        f"{i} {j}": x for i, given in enumerate(seen) for j, x in enumerate(given) if isinstance(x, Tensor)
    }
    return call, [facts(x, arguments) for x in results], kernels


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_call_does_the_same_whatever_came_before(rows: int, seen: Seen) -> None:
    r = random.Random(rows)
    kinds = [r.randrange(1 << 30) for _ in range(KINDS)]
    order = r.choices(kinds, k=CALLS)
    found = [run(kind, rows, seen)[1:] for kind in order]
    for kind in kinds:
        forget_launchers()
        call, *alone = run(kind, rows, seen)
        for other in (found[i] for i, made in enumerate(order) if made == kind):
            assert list(other) == alone, call
