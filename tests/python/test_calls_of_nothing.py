"""Calls without batches, queries or keys on a pretended H200, made again and again: outputs are zeros with an LSE of
-inf, and of tensors without a cache no kernel is launched."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import hopper_attention
from hopper_attention import (
    compile_cache,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    launch,
    quantize_qkv,
)
from tests.python.fake_gpu import forget_launchers, noting, pretend

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DESCALES = "q_descale", "k_descale", "v_descale"
HEADS, KV_HEADS, TIMES = 8, 2, 3

Results = tuple[Tensor, Tensor]


def modules_of_launchers() -> list[Any]:
    """All that ask which GPU there is."""
    names = [f"{launch.__name__}.{found.name}" for found in pkgutil.iter_modules(launch.__path__)]
    beside = pkgutil.iter_modules(hopper_attention.__path__)
    names += [f"{hopper_attention.__name__}.{found.name}" for found in beside if not found.ispkg]
    loaded = (import_module(name) for name in names if not name.endswith(("__main__", ".cli")))
    return [module for module in loaded if hasattr(module, "target_of") or hasattr(module, "index_of")]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Arguments of the kernels of a pretended H200, which compute nothing."""
    found: list[Any] = []
    modules = modules_of_launchers()
    pretend(monkeypatch, *modules)
    for module in modules:
        monkeypatch.setattr(module, "index_of", lambda device: 0, raising=False)
    for name in ("get_forward", "get_backward", "get_quantize", "get_serving"):
        monkeypatch.setattr(compile_cache, name, lambda *facts: noting(found))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def descales(dtype: torch.dtype, batch: int) -> dict[str, Tensor]:
    return {name: torch.ones(batch, KV_HEADS) for name in DESCALES} if dtype == E4M3 else {}


def drawn(shape_q: tuple[int, ...], shape_k: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    shapes = (*shape_q, HEADS, 128), *((*shape_k, KV_HEADS, 128),) * 2
    return [torch.ones(shape).to(dtype) for shape in shapes]


def check(results: Results, shape: tuple[int, ...]) -> None:
    out, lse = results
    assert out.shape == (*shape, HEADS, 128) and lse.numel() * 128 == out.numel()
    assert not out.float().any() and bool((lse == -math.inf).all())


DENSE: dict[str, Callable[..., Results]] = {
    "tensors": lambda *x, **options: flash_attn_func(*x, return_attn_probs=True, **options),
    "from 16 bits": lambda *x, **options: flash_attn_fp8_func(*x, return_attn_probs=True, **options),
    "parts": lambda *x, **options: flash_attn_quantized_func(
        quantize_qkv(*x), return_attn_probs=True, **options
    ),
}


@pytest.mark.filterwarnings("ignore:FP8 attention on its emulation")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 0)}], ids=str)
@pytest.mark.parametrize(
    "sizes", [(0, 20, 20), (2, 0, 20), (1, 20, 0), (2, 1, 0), (1, 0, 0), (0, 0, 0)], ids=str
)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("tensors", BF16), ("tensors", E4M3), ("from 16 bits", BF16), ("parts", BF16)]
)
def test_dense_calls(launched: list[Any], kind: str, dtype: torch.dtype, sizes, options) -> None:
    batch, seqlen_q, seqlen_k = sizes
    tensors = drawn((batch, seqlen_q), (batch, seqlen_k), dtype)
    for _ in range(TIMES):
        check(DENSE[kind](*tensors, **descales(dtype, batch), **options), (batch, seqlen_q))
    assert launched == []


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (100, 0)}, {"num_splits": 0}], ids=str
)
@pytest.mark.parametrize(
    "lengths", [((), ()), ((0,), (300,)), ((0, 0), (0, 0)), ((300, 5), (0, 0)), ((7,), (0,))], ids=str
)
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_packed_calls(launched: list[Any], dtype: torch.dtype, lengths, options) -> None:
    tensors = drawn((sum(lengths[0]),), (sum(lengths[1]),), dtype)
    starts = [torch.tensor((0, *each)).cumsum(0).int() for each in lengths]
    longest = [max(each, default=0) for each in lengths]
    given = descales(dtype, len(lengths[0])) | options
    for _ in range(TIMES):
        check(
            flash_attn_varlen_func(*tensors, *starts, *longest, return_attn_probs=True, **given),
            (sum(lengths[0]),),
        )
    assert launched == []


@pytest.mark.parametrize("sizes", [(0, 1, 300), (2, 0, 300), (2, 1, 0), (2, 40, 0)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_calls_on_a_cache(launched: list[Any], dtype: torch.dtype, sizes) -> None:
    batch, seqlen_q, room = sizes
    tensors = drawn((batch, seqlen_q), (batch, room), dtype)
    used = torch.zeros(batch, dtype=torch.int32)
    for _ in range(TIMES):
        given = {"cache_seqlens": used, "causal": True, "return_softmax_lse": True, **descales(dtype, batch)}
        out, lse, *_ = flash_attn_with_kvcache(*tensors, **given)
        check((out, lse), (batch, seqlen_q))
