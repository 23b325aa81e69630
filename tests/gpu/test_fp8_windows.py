"""Sliding windows on the FP8 kernel, against float64 and its emulation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hopper.forward.fp8.config import Softmax
from hopper_attention import flash_attn_fp8_func, flash_attn_func, flash_attn_quantized_func, quantize_qkv
from hopper_attention.fp8_rules import select_config
from hopper_attention.launch.fp8 import problem_of
from hopper_attention.masks import MaskSpec
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, from_descales, restore_values
from hopper_attention.reference import attention_naive
from tests.gpu.test_fp8 import allowed_16_bit_error, allowed_error, dequantized, rms
from tests.hopper.fp8_errors import LAGGING_LSE_ROUNDING, emulate, exact_lse_error
from tests.hopper.fp8_sums import allowed_lse_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("usual_tiles")]
BACKENDS = ("hopper", "ampere")

SEQLENS = ((1, 239), (113, 203), (203, 113), (1023, 1024), (900, 1500))
WINDOWS = ((0, 0), (63, 0), (128, 0), (500, 0), (0, 1), (100, 30), (7, 400), (-1, 3), (200, -1))
LSE_16_BITS = 5e-4


def find_differences(
    parts: QuantizedQKV,
    causal: bool,
    window: tuple[int, int],
    backend: str = "hopper",
    two_level: bool = False,
) -> list[str]:
    """What a kernel has worse than the emulation, measured against float64 on the dequantized inputs: that of calls
    which return the LSE, that of an exact LSE, and that of calls without one where it is another."""
    options = {"two_level_accumulation": two_level, "backend": backend, "window_size": window}
    (out, lse), exact = (
        flash_attn_quantized_func(parts, None, causal, True, **options, exact_lse=exact_lse)
        for exact_lse in (False, True)
    )
    without_lse = flash_attn_quantized_func(parts, None, causal, **options)
    is_other = not torch.equal(without_lse, out)
    return [
        *compare(parts, out, lse, causal, window, backend),
        *(compare(parts, without_lse, lse, causal, window, backend) if is_other else ()),
        *compare(parts, *exact, causal, window, backend, lagging=False),
    ]


def compare(
    parts: QuantizedQKV,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: tuple[int, int],
    backend: str = "hopper",
    lagging: bool = True,
) -> list[str]:
    """The same, with what was done to V undone, of results (batch, seqlen_q, heads, head_dim_v) and (batch, heads,
    seqlen_q) that are there."""
    mask = MaskSpec.canonical(causal, *window, parts.q.shape[1], parts.k.shape[1])
    tensors = (x.dequantize() for x in (parts.q, parts.k, parts.v))
    sides = {"window_left": mask.window_left, "window_right": mask.window_right}
    oracle, oracle_lse = attention_naive(*tensors, causal=mask.causal, **sides)
    oracle = restore_values(oracle, parts, mask.causal, mask.sides)
    visible = oracle_lse > -math.inf
    emulations = emulate(parts, mask.causal, lagging, mask.sides)
    emulated = max(rms(like.double() - oracle) for like, _ in emulations)
    if backend == "ampere":
        allowed, of_lse = allowed_16_bit_error(emulated, oracle, out), torch.full_like(lse, LSE_16_BITS)
        oracle_lse = attention_naive(*dequantized(parts), causal=mask.causal, **sides)[1]
    else:
        allowed = allowed_error(emulated, oracle, out, lagging)
        of_lse = exact_lse_error(oracle_lse)
        if lagging:
            of_lse = allowed_lse_error(parts, parts.q.shape[3] ** -0.5, 3 * LAGGING_LSE_ROUNDING)
    wrong, error = [], rms(out.double() - oracle)
    # "not <=" so that NaN counts as wrong.
    if not error <= allowed:
        wrong.append(f"RMS error {error:.3e}, emulation {emulated:.3e}, output {rms(oracle):.3e}")
    if not torch.equal(lse > -math.inf, visible):
        wrong.append("LSE of rows without keys")
    difference = (lse - oracle_lse)[visible].abs()
    if not bool((difference <= of_lse[visible]).all()):
        wrong.append(f"LSE differs by {difference.max().item():.3e}")
    if not bool((out.transpose(1, 2)[~visible] == 0).all()):
        wrong.append("rows without keys are not 0")
    return wrong


@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
def test_every_window_on_odd_lengths(draw, head_dim: int, backend: str) -> None:
    failures = {}
    for seqlens in SEQLENS:
        x = draw(torch.bfloat16, 2, seqlens, (4, 2), head_dim)
        parts = quantize_qkv(x.q, x.k, x.v, quantization=Fp8Quantization(rotate=head_dim != 96))
        for window in WINDOWS:
            for causal in (False, True):
                wrong = find_differences(parts, causal, window, backend)
                if wrong:
                    failures[seqlens, window, causal] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_levels_and_v_in_rows(draw, head_dim: int) -> None:
    x = draw(torch.bfloat16, 1, (700, 900), (2, 1), head_dim)
    parts = quantize_qkv(x.q, x.k, x.v)
    e4m3 = (tensor.to(torch.float8_e4m3fn) for tensor in (x.q, x.k, x.v))
    rows = from_descales(*e4m3, None, None, None, torch.bfloat16)
    for window in ((100, 30), (300, 0)):
        assert find_differences(parts, False, window, two_level=True) == []
        assert find_differences(rows, False, window) == []
        assert find_differences(rows, True, window, two_level=True) == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_that_rise_and_fall(draw, head_dim: int) -> None:
    """Maxima that a row meets early, late, or in blocks that the window masks."""
    x = draw(torch.bfloat16, 1, (1500, 1500), (2, 2), head_dim)
    rise = torch.linspace(-3, 3, 1500, device="cuda").view(1, -1, 1, 1)
    for factor in (rise, -rise, 4 * rise.sin()):
        q, k = x.q.abs() + 0.5, (x.k * 0.2 + factor).bfloat16()
        parts = quantize_qkv(q.bfloat16(), k, x.v, quantization=Fp8Quantization(rotate=False))
        for window in ((400, 0), (333, 90)):
            assert find_differences(parts, False, window) == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(draw, head_dim: int) -> None:
    x = draw(torch.bfloat16, 1, (9001, 9001), (2, 1), head_dim)
    for window in ((128, 0), (1000, 0), (4096, 0), (333, 444)):
        options = {"window_size": window, "return_attn_probs": True, "exact_lse": False}
        out, lse = flash_attn_fp8_func(x.q, x.k, x.v, **options)
        sides = {"window_left": window[0], "window_right": window[1]}
        oracle, oracle_lse = attention_naive(x.q, x.k, x.v, **sides)
        assert rms(out.double() - oracle) < 0.08 * rms(oracle)
        assert (lse - oracle_lse).abs().max().item() < 0.2
        sixteen = flash_attn_func(x.q, x.k, x.v, window_size=window)
        assert rms(out.double() - sixteen.double()) < 0.08 * rms(oracle)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_codes_that_promise_nothing(draw, head_dim: int) -> None:
    """As those of other quantizers: scores in float32, but where nobody gets the LSE."""
    x = draw(torch.bfloat16, 2, (900, 1500), (4, 2), head_dim)
    parts = quantize_qkv(x.q, x.k, x.v)
    parts = replace(parts, q=replace(parts.q, largest=448.0))
    for window in ((100, 30), (300, 1), (-1, 70)):
        problem = problem_of(parts, False, False, (*window, 0))
        config = select_config(problem)
        assert config.window and config.softmax is not Softmax.HALF_SCORES
        config = select_config(problem._replace(without_lse=True))
        assert config.window and config.lowers_queries == (config.softmax is Softmax.HALF_SCORES)
        # A window of few keys has tiles that take each maximum.
        assert head_dim != 128 or config.lowers_queries == (window == (-1, 70))
        assert find_differences(parts, False, window) == []


def test_keys_outside_are_never_read(draw) -> None:
    """To the bit without the mean of V, which is one of all keys: the quantizer leaves groups with a NaN out of it."""
    x = draw(torch.bfloat16, 1, (128, 4096), (2, 2), 128)
    kinds = [Fp8Quantization(block_k=128, smooth_v=smooth) for smooth in (False, True)]

    def outputs() -> list[torch.Tensor]:
        options = {"window_size": (100, 0)}
        return [flash_attn_fp8_func(x.q, x.k, x.v, quantization=kind, **options) for kind in kinds]

    exact, near = outputs()
    for tensor in (x.k, x.v):
        tensor[:, : 4096 - 128 - 100 - 256] = torch.nan
    out, out_with_mean = outputs()
    assert torch.equal(out, exact)
    assert rms(out_with_mean.double() - near) < 0.1 * rms(near)


def test_gradients(draw, backend: str) -> None:
    x = draw(torch.bfloat16, 1, (500, 700), (4, 2), 64)
    dout = torch.randn_like(x.q)
    leaves = [tensor.clone().requires_grad_() for tensor in (x.q, x.k, x.v)]
    out = flash_attn_fp8_func(*leaves, None, True, window_size=(200, 0), backend=backend)
    exact = [tensor.double().requires_grad_() for tensor in (x.q, x.k, x.v)]
    right, _ = attention_naive(*exact, causal=True, window_left=200)
    found, expected = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(right, exact, dout.double())
    for ours, own in zip(found, expected, strict=True):
        assert rms(ours.double() - own) < 0.1 * rms(own)


def test_sides_change_nothing_that_is_compiled(draw) -> None:
    x = draw(torch.bfloat16, 1, (1000, 1000), (2, 2), 128)
    parts = quantize_qkv(x.q, x.k, x.v)
    flash_attn_quantized_func(parts, window_size=(100, 7))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for left in range(50, 90):
            flash_attn_quantized_func(parts, window_size=(left, left // 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks(draw, head_dim: int) -> None:
    x = draw(torch.bfloat16, 2, (900, 1500), (4, 2), head_dim)
    for options in ({"causal": True}, {"window_size": (100, 30)}, {}):
        options = {"attention_chunk": 333, "return_attn_probs": True, **options}
        out, lse = flash_attn_fp8_func(x.q, x.k, x.v, **options)
        exact, exact_lse = flash_attn_func(x.q, x.k, x.v, **options)
        assert rms(out.double() - exact) < 0.08 * rms(exact)
        assert torch.equal(lse > -math.inf, exact_lse > -math.inf)
