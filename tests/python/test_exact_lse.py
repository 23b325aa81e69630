"""Which kernel serves FP8 calls that return the LSE, and which serves those that do not: one rule for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.quantize.config import QuantizeConfig
from hopper.widen.config import WidenConfig
from hopper_attention import (
    compile_cache,
    explain,
    explain_fp8,
    explain_varlen,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    quantize_qkv,
)
from hopper_attention.checks import check_exact_lse
from hopper_attention.distributed import ulysses, wire
from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.pieces import Problem
from hopper_attention.experiments.bench.spec import parse_shapes
from hopper_attention.experiments.families.draws import FAMILIES, Family, draw_family
from hopper_attention.launch import backward, forward, packed_fp8, quantize, varlen, widen
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.masks import NO_LIMIT
from hopper_attention.quantization import from_descales
from hopper_attention.quantized import DEFAULT_QUANTIZATION
from hopper_attention.reference import attention_naive
from tests.python.fake_gpu import forget_launchers, noting, pretend

E4M3 = torch.float8_e4m3fn
ROWS, DIM = 96, 64
CASES = [
    # (exact_lse, whether the LSE is returned, whether it is exact)
    (None, False, False),
    (None, True, True),
    (False, True, False),
    (False, False, False),
    (True, True, True),
    (True, False, True),
]

Configs = list[Any]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Configs]:
    """Of the kernels that a pretended H200 is asked for, which compute nothing."""
    found: Configs = []
    pretend(monkeypatch, backward, forward, fp8_launch, packed_fp8, quantize, varlen, widen)
    for name in ("get_forward", "get_backward", "get_quantize", "get_serving"):
        monkeypatch.setattr(compile_cache, name, lambda config: found.append(config) or noting([]))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield found
    forget_launchers()


def qkv(dtype: torch.dtype = torch.bfloat16, *sizes: int) -> list[Tensor]:
    return [torch.zeros(*(sizes or (1, ROWS)), 2, DIM, dtype=dtype) for _ in range(3)]


def starts() -> dict[str, Any]:
    bounds = torch.tensor([0, 40, ROWS], dtype=torch.int32)
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 56, "max_seqlen_k": 56}


def with_gradients(**options: Any) -> Any:
    q, k, v = qkv()
    return flash_attn_fp8_func(q.requires_grad_(), k, v, **options)


def packed_parts(**options: Any) -> Any:
    return flash_attn_quantized_func(quantize_qkv(*qkv(torch.bfloat16, ROWS), **starts()), **options)


def of_one_tensor(**options: Any) -> Any:
    bounds = starts()["cu_seqlens_q"]
    return flash_attn_varlen_qkvpacked_func(torch.stack(qkv(E4M3, ROWS), 1), bounds, 56, **options)


def of_two_tensors(**options: Any) -> Any:
    q, k, v = qkv(E4M3, ROWS)
    return flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), **starts(), **options)


WAYS: dict[str, Callable[..., Any]] = {
    "16 bits": lambda **o: flash_attn_fp8_func(*qkv(), **o),
    "16 bits, gradients": with_gradients,
    "16 bits, window": lambda **o: flash_attn_fp8_func(*qkv(), window_size=(20, 0), **o),
    "16 bits, packed": lambda **o: flash_attn_fp8_func(*qkv(torch.bfloat16, ROWS), **starts(), **o),
    "parts": lambda **o: flash_attn_quantized_func(quantize_qkv(*qkv()), **o),
    "parts, packed": packed_parts,
    "e4m3": lambda **o: flash_attn_func(*qkv(E4M3), **o),
    "e4m3, two levels": lambda **o: flash_attn_func(*qkv(E4M3), two_level_accumulation=True, **o),
    "e4m3, q, k and v in one": lambda **o: flash_attn_qkvpacked_func(torch.stack(qkv(E4M3), 2), **o),
    "e4m3, k and v in one": lambda **o: flash_attn_kvpacked_func(
        qkv(E4M3)[0], torch.stack(qkv(E4M3)[:2], 2), **o
    ),
    "e4m3, packed": lambda **o: flash_attn_varlen_func(*qkv(E4M3, ROWS), **starts(), **o),
    "e4m3, packed in one": of_one_tensor,
    "e4m3, packed in two": of_two_tensors,
}


@pytest.mark.parametrize(("exact_lse", "returns_lse", "is_exact"), CASES)
@pytest.mark.parametrize("way", WAYS)
def test_the_kernel_of_an_exact_lse_serves(
    configs: Configs, way: str, exact_lse: bool | None, returns_lse: bool, is_exact: bool
) -> None:
    """Calls that return the LSE, unless they ask for the fast one. Three alike are served alike."""
    for _ in range(3):
        found = WAYS[way](return_attn_probs=returns_lse, exact_lse=exact_lse)
        assert isinstance(found, tuple) == returns_lse
    chosen = [config for config in configs if isinstance(config, Fp8ForwardConfig)]
    assert chosen and all(config.wide_codes == is_exact for config in chosen)
    # In a dense call of 16 bits the quantizer stores wide codes; elsewhere another kernel makes them.
    quantizes = is_exact and way in ("16 bits", "16 bits, window")
    assert any(isinstance(config, QuantizeConfig) and config.wide_codes for config in configs) == quantizes
    assert any(isinstance(config, WidenConfig) for config in configs) == (is_exact and not quantizes)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [
        (True, (20, 0), (20, 0, None)),
        (True, (20, 9), (20, 0, None)),
        (False, (20, 9), (20, 9, None)),
        (False, (-1, 9), (NO_LIMIT, 9, None)),
    ],
)
def test_a_side_of_a_packed_window_stands_for_the_causal_mask(
    monkeypatch: pytest.MonkeyPatch,
    configs: Configs,
    dim: int,
    causal: bool,
    window: tuple[int, int],
    expected: tuple[int | None, ...],
) -> None:
    """Where the kernel has none: at head_dim 256."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: configs.append(config) or noting(calls))
    q, k, v = (torch.zeros(ROWS, 2, dim, dtype=torch.bfloat16) for _ in range(3))
    options = {"causal": causal, "window_size": window, "return_attn_probs": True, **starts()}
    flash_attn_fp8_func(q, k, v, **options)
    (config,) = [config for config in configs if isinstance(config, Fp8ForwardConfig)]
    assert config.window and config.wide_codes and config.causal == (causal and dim < 256)
    left, right, chunk = calls[-1][14:17]
    assert (left, chunk) == (expected[0], expected[2])
    assert right == expected[1] or (config.causal and right == NO_LIMIT)
    plan = explain_fp8(q, k, v, **options, device_capability=(9, 0)).attention
    assert plan.config == config


@pytest.mark.parametrize(("exact_lse", "returns_lse", "is_exact"), CASES)
def test_explain_names_it(exact_lse: bool | None, returns_lse: bool, is_exact: bool) -> None:
    options = {"return_attn_probs": returns_lse, "exact_lse": exact_lse, "device_capability": (9, 0)}
    plans = [
        explain_fp8(*qkv(), **options).attention,
        explain_fp8(*qkv(torch.bfloat16, ROWS), **starts(), **options).attention,
        explain(*qkv(E4M3), **options),
        explain_varlen(*qkv(E4M3, ROWS), *starts().values(), **options),
    ]
    for plan in plans:
        assert plan.config.wide_codes == is_exact
        assert ("lse: exact" in str(plan)) == is_exact == ("exact_lse=False" in str(plan))
    in_16_bits = explain(*qkv(), return_attn_probs=True, device_capability=(9, 0))
    assert "lse: exact" not in str(in_16_bits)


def test_the_quantizer_of_a_call_is_the_one_that_is_explained(configs: Configs) -> None:
    for options in ({}, {"return_attn_probs": True}, {"return_attn_probs": True, "exact_lse": False}):
        configs.clear()
        forget_launchers()
        flash_attn_fp8_func(*qkv(), **options)
        (config,) = [config for config in configs if isinstance(config, QuantizeConfig)]
        assert config == explain_fp8(*qkv(), **options, device_capability=(9, 0)).quantizer_config
        assert config.wide_codes == (options == {"return_attn_probs": True})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("bad", "error"), [("yes", TypeError), (2, ValueError)])
def test_it_is_a_flag_or_none(configs: Configs, way: str, bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"exact_lse is .*, allowed: True, False or None"):
        WAYS[way](exact_lse=bad)
    assert check_exact_lse(1, False) is True and check_exact_lse(0, True) is False


def test_16_bits_take_it_and_change_nothing() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 32).bfloat16() for _ in range(3))
    expected = flash_attn_func(q, k, v, return_attn_probs=True)
    for exact_lse in (None, False, True):
        found = flash_attn_func(q, k, v, return_attn_probs=True, exact_lse=exact_lse)
        assert all(map(torch.equal, found, expected))
    with pytest.raises(TypeError, match=r"exact_lse is .*, allowed: True, False or None"):
        flash_attn_func(q, k, v, exact_lse="no")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_emulation_is_exact(family: Family) -> None:
    """Whatever is asked for."""
    (problem,) = parse_shapes("bf16-b1-s300-h2-d64-causal")
    x = draw_family(family, problem, 0, "cpu")
    parts = quantize_qkv(x.q, x.k, x.v)
    codes = from_descales(*(t.to(E4M3) for t in (x.q, x.k, x.v)), None, None, None, torch.bfloat16)
    for each in (parts, codes):
        _, exact = attention_naive(*(t.dequantize().double() for t in (each.q, each.k, each.v)), causal=True)
        for exact_lse in (None, False):
            _, lse = flash_attn_quantized_func(each, None, True, True, exact_lse=exact_lse)
            assert (lse - exact).abs().max() <= 1e-4


def test_merged_results_are_those_of_fast_steps_unless_the_lse_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that share a sequence: what they ask a step for, and the one call of a rank's heads."""
    asked: list[bool] = []

    def noted(attend: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, exact_lse: bool, **options: Any) -> Any:
            asked.append(exact_lse)
            return attend(*given, exact_lse=exact_lse, **options)

        return call

    for module, name in ((wire, "flash_attn_quantized_func"), (ulysses, "flash_attn_fp8_func")):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    torch.manual_seed(0)
    tensors = tuple(torch.randn(1, 64, 2, 32).bfloat16() for _ in range(3))
    ranks = Ranks(None, 0, 1)  # type: ignore[arg-type]  # no message is sent
    problem, call = Problem(1, 64, 64, "contiguous", right=0), Call(0.2, backend="reference")
    given = ranks, problem, call, tensors, None, DEFAULT_QUANTIZATION
    outs = [wire.ring_forward_fp8(*given, *options)[0] for options in ((), (True,))]
    assert asked == [False, True] and torch.equal(*outs)
    asked.clear()
    heads = ulysses.Heads(ranks, "contiguous", 0, torch.device("cpu"))
    heads.exchange = AsTheyAre()
    options = ulysses.Fp8Options(DEFAULT_QUANTIZATION, True)
    for sinks, wants_lse in ((None, False), (torch.zeros(2), False), (None, True), (torch.zeros(2), True)):
        found = heads.attend_in_fp8(tensors, sinks, call, options, wants_lse)
        assert (found[1] is not None) == wants_lse
    assert asked == [False, False, True, True]


class AsTheyAre:
    """An exchange of one rank."""

    def to_heads(self, tensors: Sequence[Tensor], layout: str) -> Sequence[Tensor]:
        return tensors

    to_rows = to_heads
