"""FP8 attention of packed sequences on the host side: each as if it were alone, gradients, and what kernels get."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from cute_kernels.window import NO_LIMIT
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper_attention import (
    Fp8Quantization,
    explain_fp8,
    explain_varlen,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    fp8_rules,
    quantize_qkv,
)
from hopper_attention.backends import Target
from hopper_attention.launch import fp8 as fp8_launch
from hopper_attention.launch import packed_fp8
from hopper_attention.launch.packed_quantize import empty_packed
from hopper_attention.launch.varlen import run_varlen
from hopper_attention.lengths import Lengths
from hopper_attention.masks import FULL_SIDES
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.fp8_cases import Recorder, recorded, relative, sides
from tests.python.test_packed_quantization import NAMES, PACKED, lengths_of
from tests.python.varlen_cases import CASES, Case

MASKS: list[tuple[bool, tuple[int, int]]] = [
    (False, (-1, -1)),
    (True, (-1, -1)),
    (False, (20, 5)),
    (True, (9, -1)),
]
C = Fp8Quantization(block_k=32)


@pytest.mark.parametrize(
    "name", ["plain", "empty ones", "many tiles", "no sequence", "no queries", "no keys"]
)
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_each_sequence_as_if_it_were_alone(name: str, causal: bool, window: tuple[int, int]) -> None:
    case = CASES[name]
    q, k, v = case.tensors(torch.float16)
    options: dict[str, Any] = {"quantization": C, "window_size": window}
    out, lse = flash_attn_fp8_func(q, k, v, None, causal, True, **options, **lengths_of(case))
    assert (
        out.shape == (*q.shape[:2], v.shape[2]) and out.dtype == q.dtype and lse.shape == (q.shape[1], len(q))
    )
    for rows, keys in case.spans():
        if rows.start < rows.stop:
            one = (q[None, rows], k[None, keys], v[None, keys])
            alone, alone_lse = flash_attn_fp8_func(*one, None, causal, True, **options)
            assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], alone_lse[0])
    unused = case.unused()[0]
    assert not out[unused].any() and bool((lse[:, unused] == -math.inf).all())


@pytest.mark.parametrize(
    "c",
    [C, Fp8Quantization(), Fp8Quantization(rotate_v=True, block_q=32), Fp8Quantization(granularity="head")],
)
def test_it_is_near_exact_attention(c: Fp8Quantization) -> None:
    for case in (PACKED, CASES["many tiles"]):
        q, k, v = case.tensors(torch.bfloat16)
        out, lse = flash_attn_fp8_func(q, k, v, 0.2, True, True, quantization=c, **lengths_of(case))
        exact, exact_lse = case.oracle(q, k, v, causal=True, softmax_scale=0.2)
        visible = exact_lse > -math.inf
        assert torch.equal(lse > -math.inf, visible)
        assert relative(out, exact) < 0.08 and (lse - exact_lse)[visible].abs().max() < 0.2
        parts = quantize_qkv(q, k, v, quantization=c, **lengths_of(case))
        again, again_lse = flash_attn_quantized_func(parts, 0.2, True, True)
        assert relative(again, exact) < 0.08 and torch.equal(again_lse > -math.inf, visible)


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("c", [C, Fp8Quantization(rotate_v=True, granularity="head", block_k=32)])
def test_gradients_are_those_of_each_sequence(
    c: Fp8Quantization, causal: bool, window: tuple[int, int]
) -> None:
    case = PACKED
    q, k, v = (x.requires_grad_() for x in case.tensors(torch.float16))
    # A window that hides nothing of a short sequence is none to it, and then torch has its gradients.
    options: dict[str, Any] = {"quantization": c, "window_size": window, "backend": "reference"}
    out = flash_attn_fp8_func(q, k, v, None, causal, **options, **lengths_of(case))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
    found = torch.autograd.grad(out, (q, k, v), dout)
    for rows, keys in case.spans():
        if rows.start < rows.stop and keys.start < keys.stop:
            one = [x[None, s].detach().requires_grad_() for x, s in ((q, rows), (k, keys), (v, keys))]
            alone = flash_attn_fp8_func(*one, None, causal, **options)
            expected = torch.autograd.grad(alone, one, dout[None, rows])
            for ours, own, s in zip(found, expected, (rows, keys, keys), strict=True):
                assert torch.equal(ours[s], own[0])
    for gradient, unused in zip(found, (case.unused()[0], *2 * [case.unused()[1]]), strict=True):
        assert not gradient[unused].any()


def test_the_lse_has_a_gradient_too() -> None:
    case = CASES["plain"]
    q, k, v = (x.requires_grad_() for x in case.tensors(torch.float16))
    c = Fp8Quantization(rotate=False, block_k=32)
    _, lse = flash_attn_fp8_func(q, k, v, None, False, True, quantization=c, **lengths_of(case))
    (dq,) = torch.autograd.grad(lse.sum(), q)
    exact_q = q.detach().double().requires_grad_()
    _, exact_lse = case.oracle(exact_q, k.detach().double(), v.detach().double())
    (expected,) = torch.autograd.grad(exact_lse.sum(), exact_q)
    assert relative(dq, expected) < 0.05


def test_torch_compile_takes_other_lengths_without_compiling_anew() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 99, "max_seqlen_k": 99}
        return flash_attn_fp8_func(q, k, v, causal=True, quantization=C, **lengths)

    for case in (Case((5, 17), (9, 17)), Case((15, 7), (2, 24))):
        q, k, v = case.tensors(torch.float16)
        out = attend(q, k, v, *case.lengths[:2])
        assert torch.equal(out, flash_attn_fp8_func(q, k, v, causal=True, quantization=C, **lengths_of(case)))
    assert counter.frame_count == 1


def test_the_operators_say_the_shapes_that_they_give() -> None:
    from hopper_attention.fp8_ops import Options
    from hopper_attention.packed_fp8_training import _forward

    q, k, v = (x.requires_grad_() for x in PACKED.tensors(torch.float16, poisoned=False))
    cu_q, cu_k, max_q, max_k, used_q, used_k = PACKED.lengths
    arguments = (q, k, v, cu_q, cu_k, used_q, used_k, max_q, max_k, *Options.of(C), 0.2, True, None, False)
    torch.library.opcheck(_forward, arguments, test_utils=("test_autograd_registration", "test_faketensor"))


def test_meta_tensors_have_the_shapes_of_a_result() -> None:
    case = CASES["plain"]
    q, k, v = case.tensors(torch.float16)
    of_meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in lengths_of(case).items()}
    options = {"quantization": C, "return_attn_probs": True}
    results = flash_attn_fp8_func(*(x.to("meta") for x in (q, k, v)), **of_meta, **options)
    for x, expected in zip(results, flash_attn_fp8_func(q, k, v, **lengths_of(case), **options), strict=True):
        assert x.is_meta and (x.shape, x.dtype) == (expected.shape, expected.dtype)


# e4m3 tensors with descales


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_tensors_with_descales(causal: bool, window: tuple[int, int]) -> None:
    case = Case((8, 70, 3, 5), (16, 40, 99, 0), used_k=(11, 33, 64, 0), behind=7, head_dims=(32, 16))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in case.tensors(torch.float16))
    generator = torch.Generator().manual_seed(1)
    descales = [torch.rand(4, 2, generator=generator) + 0.5 for _ in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    options: dict[str, Any] = {"causal": causal, "window_size": window, "return_attn_probs": True}
    out, lse = flash_attn_varlen_func(q, k, v, **lengths_of(case), **named, **options)
    assert out.dtype == torch.bfloat16
    for number, (rows, keys) in enumerate(case.spans()):
        if keys.start < keys.stop:
            own = {name: x[number : number + 1] for name, x in named.items()}
            alone = flash_attn_func(q[None, rows], k[None, keys], v[None, keys], **own, **options)
            assert torch.equal(out[rows], alone[0][0]) and torch.equal(lse[:, rows], alone[1][0])
    unused = case.unused()[0]
    assert not out[unused].any() and not out[case.spans()[3][0]].any()


def test_a_wide_v_with_descales() -> None:
    case = CASES["wide v"]
    q, k, v = (x.to(torch.float8_e4m3fn) for x in case.tensors(torch.float16))
    out = flash_attn_varlen_func(q, k, v, **lengths_of(case))
    exact, _ = case.oracle(*(x.float() for x in (q, k, v)))
    assert relative(out, exact) < 0.06


def test_descales_that_do_not_fit() -> None:
    case = CASES["plain"]
    q, k, v = (x.to(torch.float8_e4m3fn) for x in case.tensors(torch.float16))
    with pytest.raises(
        ValueError, match=r"q_descale has shape \(3, 2\), allowed: \(batch, kv_heads\), \(4, 2\)"
    ):
        flash_attn_varlen_func(q, k, v, **lengths_of(case), q_descale=torch.ones(3, 2))
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.5: dropout of P of"):
        explain_varlen(q, k, v, **lengths_of(case), dropout_p=0.5)
    q.requires_grad_()
    out = flash_attn_varlen_func(q, k, v, **lengths_of(case))
    with pytest.raises(NotImplementedError, match="which have no gradient"):
        out.float().sum().backward()


# Kernels


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    yield from recorded(monkeypatch, fp8_launch, packed_fp8)


def test_what_the_kernel_is_given(recorder: Recorder) -> None:
    dims = (64, 32)
    cases = [
        replace(case, head_dims=dims) for case in (PACKED, Case((40, 9, 1), (30, 60, 2)), CASES["plain"])
    ]
    for case in cases:
        parts = quantize_qkv(
            *case.tensors(torch.float16), quantization=Fp8Quantization(block_k=128), **lengths_of(case)
        )
        out, lse = flash_attn_quantized_func(parts, 0.3, True, True, exact_lse=False)
        assert out.shape[0] == lse.shape[1] == parts.q.shape[0]
        problem = packed_fp8.packed_problem_of(parts, True, False, FULL_SIDES)
        assert recorder.configs[-1] == fp8_rules.select_for(problem)
    (config,) = set(recorder.configs)
    assert config.layout == "varlen" and config.tile_n == 128 and not config.window
    assert config.softmax is Softmax.EAGER and config.tile_m == 128 and config.causal
    for case, arguments in zip(cases, recorder.calls, strict=True):
        batch, (q, k, v, out, lse) = len(case.rooms_q), arguments[:5]
        assert v.shape == (2, 32, 32 * (k.shape[0] // 32 + batch + 1)) and lse.shape == (4, q.shape[0])
        assert [x.shape[0] for x in arguments[6:11]] == [1, 1, 1, batch + 1, batch + 1]
        assert arguments[6].shape == (1, 4, q.shape[0] + batch + 1)
        assert arguments[11:14] == (1, 128, 0.3) and arguments[14:17] == (None, None, None)
        assert arguments[17].dtype == torch.int32 and arguments[18:] == (batch + 1, 132)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rows", "bounds", "softmax", "tile_m"),
    [
        (64, 50_000, (100, 200), Softmax.EAGER, 128),
        (64, 50_000, (4096, 4096), Softmax.HALF_SCORES, 192),
        (64, 300, (4096, 4096), Softmax.EAGER, 128),
        (128, 50_000, (100, 200), Softmax.EAGER, 128),
        (128, 50_000, (4096, 4096), Softmax.HALF_SCORES, 192),
        (128, 300, (4096, 4096), Softmax.EAGER, 128),
        (256, 50_000, (100, 200), Softmax.EAGER, 128),
        (256, 50_000, (4096, 4096), Softmax.HALF_SCORES, 128),
    ],
)
def test_bounds_of_lengths_and_tiles_decide_on_the_kernel(
    head_dim: int, rows: int, bounds: tuple[int, int], softmax: Softmax, tile_m: int, causal: bool
) -> None:
    config = config_of_bounds(head_dim, rows, bounds, causal)
    assert (config.softmax, config.tile_m, config.tile_n) == (softmax, tile_m, 128)
    assert config.layout == "varlen" and config.causal == causal and not config.lowers_queries


@pytest.mark.parametrize(
    ("head_dim", "causal", "most"),
    [(64, False, 512), (64, True, 1024), (128, False, 512), (128, True, 1024), (256, False, 640)],
)
def test_the_most_keys_that_are_few(head_dim: int, causal: bool, most: int) -> None:
    """With an LSE there are more of them, and tiles may be few."""
    few, many = (config_of_bounds(head_dim, 50_000, (4096, n), causal) for n in (most, most + 1))
    assert few.softmax is Softmax.EAGER and many.softmax is Softmax.HALF_SCORES
    longest = {(64, False): 512, (64, True): 1536, (128, False): 1280, (128, True): 1024, (256, False): 768}
    most_with_lse = longest[head_dim, causal]
    for keys, softmax in ((most_with_lse, Softmax.EAGER), (2048, Softmax.HALF_SCORES)):
        of_lse = config_of_bounds(head_dim, 300, (4096, keys), causal, with_lse=True)
        # Which has another softmax for more keys.
        other = Softmax.LAGGING if (head_dim, causal) == (64, True) else Softmax.HALF_SCORES
        assert of_lse.softmax is (softmax if softmax is Softmax.EAGER else other)


def config_of_bounds(
    head_dim: int, rows: int, bounds: tuple[int, int], causal: bool, with_lse: bool = False
) -> Fp8ForwardConfig:
    """That of eight sequences in so many rows: as a call on 16 bits has it, and one on parts."""
    q, k = (torch.empty(rows, heads, head_dim, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    named: dict[str, Any] = dict(zip(NAMES, (starts, starts, *bounds, None, None), strict=True))
    options: dict[str, Any] = {"causal": causal, "return_attn_probs": with_lse, "exact_lse": False}
    plan = explain_fp8(q, k, k, **named, **options, device_capability=(9, 0))
    config, quantizer = plan.attention.config, plan.quantizer_config
    assert isinstance(config, Fp8ForwardConfig) and quantizer is not None
    lengths = Lengths(starts, starts, None, None, *bounds)
    c = Fp8Quantization(block_k=quantizer.block_k)
    parts = empty_packed(quantizer, q, k, k, lengths, c)
    problem = packed_fp8.packed_problem_of(parts, causal, False, FULL_SIDES, without_lse=not with_lse)
    assert fp8_rules.select_for(problem) == config
    return config


def test_a_window_and_rows_of_v_choose_other_kernels(recorder: Recorder) -> None:
    case = replace(CASES["plain"], head_dims=(64, 64))
    q, k, v = case.tensors(torch.float16)
    flash_attn_fp8_func(q, k, v, window_size=(9, 3), **lengths_of(case))
    flash_attn_fp8_func(q, k, v, window_size=(10, -1), **lengths_of(case))
    e4m3 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    flash_attn_varlen_func(*e4m3, **lengths_of(case))
    windowed, rows = recorder.configs
    assert windowed.window and windowed.softmax is Softmax.EAGER and windowed.layout == "varlen"
    assert rows.v_rows and rows.layout == "varlen"
    given = [(9, 3, None), (10, NO_LIMIT, None), (None, None, None)]
    assert [call[14:17] for call in recorder.calls] == given
    assert recorder.calls[2][2].shape == e4m3[2].shape and recorder.calls[2][12] == 2**31 - 1


@pytest.mark.parametrize(
    ("causal", "window", "rotate_v"),
    [(True, (30, 0), True), (False, (-1, -1), False), (False, (-1, 3), True)],
)
def test_without_wgmma_it_is_16_bits(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: tuple[int, int], rotate_v: bool
) -> None:
    """The mean of V of each sequence comes back in rows that see a key."""
    old = Target("fake A100", (8, 0), assume_installed=True)
    pretend(monkeypatch, fp8_launch, target=lambda: old)

    def attend(*arguments: Any) -> Any:
        q, k, v, lengths, scale, causal, backend, *rest = arguments
        assert backend == "ampere"
        return run_varlen(q, k, v, lengths, scale, causal, "reference", *rest)

    monkeypatch.setattr(packed_fp8, "run_varlen", attend)
    case, c = PACKED, Fp8Quantization(block_k=32, rotate_v=rotate_v)
    q, k, v = case.tensors(torch.bfloat16)
    v = v + 2
    with pytest.warns(UserWarning, match="FP8 attention in 16 bits"):
        out = flash_attn_fp8_func(
            q, k, v, None, causal, quantization=c, window_size=window, **lengths_of(case)
        )
    forget_launchers()
    exact, lse = case.oracle(q, k, v, causal=causal, **sides(window))
    assert relative(out, exact) < 0.03 and not out[case.unused()[0]].any()
    assert not out[(lse == -torch.inf).all(0)].any()


def test_explain_packed_tensors_with_descales() -> None:
    case = Case((5, 17), (9, 17), head_dims=(64, 64))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in case.tensors(torch.float16))
    for capability, backend in (((9, 0), "hopper"), ((8, 0), "ampere")):
        plan = explain_varlen(q, k, v, **lengths_of(case), window_size=(4, 2), device_capability=capability)
        assert plan.backend == backend and plan.config.window and plan.config.layout == "varlen"
    assert explain_varlen(q, k, v, **lengths_of(case)).backend == "reference"
    assert set(NAMES) == set(lengths_of(case))


def test_explain_packed_16_bit_tensors() -> None:
    case = replace(CASES["plain"], head_dims=(64, 64))
    q, k, v = case.tensors(torch.bfloat16)
    named: dict[str, Any] = {"window_size": (9, 3), **lengths_of(case)}
    plan = explain_fp8(q, k, v, device_capability=(9, 0), **named)
    config = plan.attention.config
    assert plan.quantizer == "fused" and plan.quantizer_config is not None
    assert plan.quantizer_config.layout == "varlen" and plan.quantizer_config.block_k == config.tile_n
    assert config.layout == "varlen" and config.window and config.softmax is Softmax.EAGER
    assert "none for two sequences" in str(plan) and "window: a query sees 9 of the keys" in str(plan)
    older = explain_fp8(q, k, v, device_capability=(8, 0), **named)
    assert older.quantizer == "torch" and older.attention.backend == "ampere"
    here = explain_fp8(
        q, k, v, quantization=Fp8Quantization(granularity="head"), backend="reference", **named
    )
    assert here.attention.backend == "reference" and "q: a scale for each sequence and head" in str(here)
    with pytest.raises(NotImplementedError, match="smooth_k is True"):
        explain_fp8(q, k, v, quantization=Fp8Quantization(smooth_k=True), **named)
