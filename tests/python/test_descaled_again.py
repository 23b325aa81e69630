"""Calls on e4m3 tensors with descales like those of earlier ones: kernels are given what they were given before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.transpose.config import TransposeConfig
from hopper.widen.config import WidenConfig
from hopper_attention import api, compile_cache, descaled_again, device_memory, flash_attn_func
from hopper_attention.launch import fp8, transpose, widen
from hopper_attention.quantized import transpose_for_kernel
from tests.python.fake_gpu import forget_launchers, pretend

E4M3 = torch.float8_e4m3fn
Facts = tuple[Any, ...]
Q_SCALE = 6
"""Its place among the arguments of attention."""


class StandIns:
    """Kernels that note what they are given, and do what they do to codes in PyTorch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[Facts]]] = []

    def get(self, config: Any) -> Callable[..., None]:
        of_kinds = {Fp8ForwardConfig: self.attend, TransposeConfig: self.transpose, WidenConfig: self.widen}
        compute = of_kinds[type(config)]

        def kernel(*given: Any) -> None:
            read = list(given)
            if getattr(config, "lone_scales", False):
                # Heads that share a descale may read it in one place, or each a copy.
                read[Q_SCALE] = read[Q_SCALE].contiguous()
            self.seen.append((config.name, [facts_of(x) for x in read if not is_result(x)]))
            compute(*given)

        return kernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any) -> None:
        out.fill_(float(q.float().sum() + 2 * k.float().sum() + 3 * v.float().sum()))
        lse.fill_(1.0)

    def transpose(self, v: Tensor, transposed: Tensor) -> None:
        transposed.copy_(transpose_for_kernel(v))

    def widen(self, q: Tensor, k: Tensor, wide_q: Tensor, wide_k: Tensor) -> None:
        wide_q.copy_(q.half())
        wide_k.copy_(k.half())


def is_result(x: Any) -> bool:
    """What a kernel fills: its values are those of no one."""
    return isinstance(x, Tensor) and x.numel() > 0 and bool(torch.isnan(x.float()).any())


def facts_of(x: Any) -> Facts:
    if not isinstance(x, Tensor):
        return type(x), x
    # A dimension of size 1 may have any stride.
    strides = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return tuple(x.shape), strides, x.dtype, x.float().flatten().tolist()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    found = StandIns()
    pretend(monkeypatch, fp8, transpose, widen)
    for module in (fp8, transpose, widen):
        monkeypatch.setattr(module, "index_of", lambda device: 0)
    for name in ("get_forward", "get_quantize"):
        monkeypatch.setattr(compile_cache, name, found.get)
    monkeypatch.setattr(descaled_again, "current_device", lambda: 0)
    monkeypatch.setattr(descaled_again, "kept_argument", lambda x: x)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def tensors(
    seqlen_q: int = 48, seqlen_k: int = 80, heads: int = 4, kv_heads: int = 4, head_dim: int = 64
) -> list[Tensor]:
    shapes = [(2, seqlen_q, heads, head_dim), *[(2, seqlen_k, kv_heads, head_dim)] * 2]
    return [torch.randn(shape).to(E4M3) for shape in shapes]


def descales(kv_heads: int = 4) -> dict[str, Tensor]:
    return {name: torch.rand(2, kv_heads) for name in ("q_descale", "k_descale", "v_descale")}


def one_for_all(kv_heads: int = 4) -> dict[str, Tensor]:
    return dict.fromkeys(descales(kv_heads), torch.rand(2, kv_heads))


def without_k(kv_heads: int = 4) -> dict[str, Tensor]:
    return {name: scale for name, scale in descales(kv_heads).items() if name != "k_descale"}


def of_q_and_v(kv_heads: int = 4) -> dict[str, Tensor]:
    given = descales(kv_heads)
    return given | {"v_descale": given["q_descale"]}


def strided(kv_heads: int = 4) -> dict[str, Tensor]:
    return {name: torch.rand(kv_heads, 3, 2)[:, 1].T for name in descales()}


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "V in rows": ({}, {"causal": True}),
    "grouped": ({"heads": 8, "kv_heads": 2}, {"causal": True}),
    "grouped, many queries": ({"heads": 8, "kv_heads": 2, "seqlen_q": 900}, {}),
    "V transposed before": ({"seqlen_q": 2000, "seqlen_k": 300}, {}),
    "a window": ({}, {"window_size": (7, 2)}),
    "a window, V transposed before": ({"seqlen_q": 2000, "seqlen_k": 300}, {"window_size": (90, 0)}),
    "chunks": ({}, {"attention_chunk": 16, "causal": True}),
    "two levels": ({}, {"two_level_accumulation": True}),
    "an LSE": ({}, {"return_attn_probs": True, "exact_lse": False}),
    "an exact LSE": ({"seqlen_q": 70}, {"return_attn_probs": True, "causal": True}),
    "an exact LSE, grouped": ({"heads": 8, "kv_heads": 2}, {"return_attn_probs": True}),
    "a scale": ({}, {"softmax_scale": 0.25}),
}


def refuse(*given: Any) -> Any:
    raise AssertionError("found anew")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scales", [descales, one_for_all, without_k, of_q_and_v, strided, lambda heads: {}])
def test_kernels_are_given_what_they_were_given_before(
    name: str, scales: Callable[[int], dict[str, Tensor]], kernels: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, options = CALLS[name]
    kv_heads = sizes.get("kv_heads", 4)
    # Poison, by which results are told from what is read.
    empty, strided_empty = torch.empty, device_memory.empty_on_gpu
    monkeypatch.setattr(torch, "empty", lambda *a, **b: poisoned(empty(*a, **b)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **b: poisoned(empty(x.shape, **b)))
    monkeypatch.setattr(device_memory, "empty_on_gpu", lambda *a: poisoned(strided_empty(*a)))
    calls = [(tensors(**sizes), scales(kv_heads)) for _ in range(3)]
    for given, named in calls[:2]:
        flash_attn_func(*given, **named, **options)
    given, named = calls[2]
    descaled_again.remembered.cache_clear()
    kernels.seen.clear()
    wanted = flash_attn_func(*given, **named, **options)
    of_first = list(kernels.seen)
    for others, more in calls[:2]:
        flash_attn_func(*others, **more, **options)
    monkeypatch.setattr(api, "_call_operator", refuse)
    for _ in range(2):
        kernels.seen.clear()
        found = flash_attn_func(*given, **named, **options)
        assert kernels.seen == of_first and len(of_first) > 0
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
        for x, y in pairs:
            assert torch.equal(x, y) and x.dtype == y.dtype and x.shape == y.shape
            assert x.stride() == y.stride()


def poisoned(x: Tensor) -> Tensor:
    return x.fill_(float("nan"))


def make_known(**sizes: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    given, named = tensors(**sizes), descales(sizes.get("kv_heads", 4))
    for _ in range(2):
        flash_attn_func(*given, **named, causal=True)
    return given, named


def test_other_calls_are_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = make_known()
    q, k, v = given
    monkeypatch.setattr(api, "_call_operator", refuse)
    flash_attn_func(*given, **named, causal=True)
    odd = torch.zeros(v.numel() + 1, dtype=E4M3)[1:].view(v.shape)
    others: list[tuple[list[Tensor], dict[str, Any]]] = [
        (tensors(seqlen_k=81), {**named, "causal": True}),
        ([q, k, odd], {**named, "causal": True}),
        ([q, k, k], {**named, "causal": True}),
        (given, named),
        (given, {**named, "causal": True, "return_attn_probs": True}),
        (given, {**named, "causal": True, "two_level_accumulation": True}),
        (given, {**named, "causal": True, "window_size": (5, 0)}),
        (given, {**named, "causal": True, "sm_margin": 4}),
        (given, {**named, "causal": True, "backend": "hopper"}),
        (given, {**named, "causal": True, "softcap": 1.0}),
        (given, {"q_descale": named["q_descale"], "causal": True}),
        (given, {**dict.fromkeys(named, named["q_descale"]), "causal": True}),
        (given, {**named, "v_descale": named["v_descale"].double(), "causal": True}),
        (given, {**named, "v_descale": named["v_descale"][:, :1], "causal": True}),
        (given, {**named, "v_descale": named["v_descale"].requires_grad_(), "causal": True}),
    ]
    for tensors_, options in others:
        with pytest.raises(AssertionError, match="found anew"):
            flash_attn_func(*tensors_, **options)


@pytest.mark.parametrize("how", ["graph", "gpu", "mode"])
def test_what_was_found_does_not_serve_elsewhere(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = make_known()
    monkeypatch.setattr(api, "_call_operator", refuse)
    if how == "graph":
        monkeypatch.setattr(device_memory, "records_graph", lambda index: True)
    elif how == "gpu":
        monkeypatch.setattr(descaled_again, "current_device", lambda: 1)
    else:
        monkeypatch.setattr(descaled_again, "may_be_like", lambda: False)
    with pytest.raises(AssertionError, match="found anew"):
        flash_attn_func(*given, **named, causal=True)


def test_errors_are_those_of_first_calls() -> None:
    (q, k, v), named = make_known()
    with pytest.raises(TypeError, match="softmax_scale is"):
        flash_attn_func(q, k, v, softmax_scale="1", causal=True, **named)
    with pytest.raises(ValueError, match="softmax_scale is"):
        flash_attn_func(q, k, v, softmax_scale=float("nan"), causal=True, **named)
    with pytest.raises(ValueError, match="k_descale has shape"):
        flash_attn_func(q, k, v, causal=True, **{**named, "k_descale": torch.ones(2, 3)})
    with pytest.raises(TypeError, match="v_descale is"):
        flash_attn_func(q, k, v, causal=True, **{**named, "v_descale": 1.0})


def test_what_needs_a_copy_is_not_kept() -> None:
    q, k, v = tensors()
    for odd in ([q.transpose(1, 3).contiguous().transpose(1, 3), k, v], [q[..., :56], k[..., :56], v]):
        for _ in range(3):
            flash_attn_func(*odd, **descales())
    assert not descaled_again.remembered._calls


def test_what_was_kept_without_gradients_does_not_serve_with_them() -> None:
    given, named = tensors(), descales()
    named["k_descale"].requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            assert not flash_attn_func(*given, **named).requires_grad
    out = flash_attn_func(*given, **named)
    with pytest.raises(NotImplementedError, match="no gradient"):
        out.float().sum().backward()
