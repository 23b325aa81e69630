"""Softcap, ALiBi and sinks on the kernels, against float64."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import flash_attn_func, flash_attn_varlen_func
from hopper_attention.reference import attention_naive, attention_standard
from tests.gpu.conftest import LSE_TOLERANCE
from tests.python.varlen_cases import CASES

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

DTYPES = (torch.float16, torch.bfloat16)
RULES = ("softcap", "alibi", "sinks", "softcap sinks", "softcap alibi sinks")


def rules_of(names: str, batch: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the public functions."""
    rules: dict[str, Any] = {}
    if "softcap" in names:
        rules["softcap"] = 2.5
    if "alibi" in names:
        rules["alibi_slopes"] = 0.3 * torch.rand(batch, heads, device="cuda")
    if "sinks" in names:
        rules["sinks"] = torch.linspace(-3, 5, heads, device="cuda").to(dtype)
    return rules


def errors_of(x: Any, out: Tensor, lse: Tensor, **options: Any) -> list[str]:
    """What is wrong with a result, by the budget of ``conftest.find_errors``."""
    exact, exact_lse = attention_naive(x.q, x.k, x.v, **options)
    plain = attention_standard(x.q, x.k, x.v, **options)
    rounding = torch.finfo(x.q.dtype).eps / 2 * exact.abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + rounding
    error, wrong = (out.double() - exact).abs().max().item(), []
    if not error <= allowed:
        wrong.append(f"error {error:.3e}, allowed {allowed:.3e}")
    hidden = exact_lse == -torch.inf
    # One instruction's tanh, for bfloat16, is good to 2^-11 of the cap.
    tolerance = LSE_TOLERANCE + (2.0**-11 * options.get("softcap", 0.0) if x.q.dtype == torch.bfloat16 else 0)
    if not bool(
        ((lse.double() - exact_lse)[~hidden].abs() <= tolerance + 1e-5 * exact_lse[~hidden].abs()).all()
    ):
        wrong.append("LSE")
    if not bool((lse[hidden] == -torch.inf).all() and (out.transpose(1, 2)[hidden] == 0).all()):
        wrong.append("rows that see no key")
    return wrong


@pytest.mark.parametrize("names", RULES)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_every_rule(draw, backend: str, head_dim: int, names: str) -> None:
    failures = {}
    for dtype, seqlens, causal, window in product(
        DTYPES, ((113, 203), (203, 113), (1023, 1024)), (False, True), ((-1, -1), (100, 30))
    ):
        x = draw(dtype, 2, seqlens, (4, 2), head_dim)
        rules = rules_of(names, 2, 4, dtype)
        options = {"causal": causal, "window_size": window, "backend": backend, "return_attn_probs": True}
        out, lse = flash_attn_func(x.q, x.k, x.v, **options, **rules)
        sides = {"window_left": window[0], "window_right": window[1]}
        wrong = errors_of(x, out, lse, causal=causal, **sides, **rules)
        if wrong:
            failures[dtype, seqlens, causal, window] = wrong
    assert failures == {}


@pytest.mark.parametrize("names", RULES)
def test_packed_sequences(backend: str, names: str) -> None:
    for name in ("many tiles", "used", "empty ones", "rows behind"):
        case = CASES[name]
        lengths = [x.cuda() if isinstance(x, Tensor) else x for x in case.lengths]
        q, k, v = (x.cuda() for x in case.tensors(torch.bfloat16))
        rules = rules_of(names, len(case.rooms_q), q.shape[1], torch.bfloat16)
        options = {"causal": True, "backend": backend, "return_attn_probs": True}
        out, lse = flash_attn_varlen_func(q, k, v, *lengths, **options, **rules)
        for number, (rows, keys) in enumerate(case.spans()):
            of_one = dict(rules)
            if "alibi_slopes" in rules:
                of_one["alibi_slopes"] = rules["alibi_slopes"][number : number + 1]
            alone = flash_attn_func(q[None, rows], k[None, keys], v[None, keys], **options, **of_one)
            torch.testing.assert_close(out[rows], alone[0][0], rtol=0.01, atol=0.01)
            torch.testing.assert_close(lse[:, rows], alone[1][0], rtol=1e-4, atol=1e-3)


def plain_attention(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The formula at the dtype of its inputs, with the LSE of the oracle."""
    return attention_standard(*tensors, **options), attention_naive(*tensors, **options)[1]


@pytest.mark.filterwarnings("ignore:FP8 attention in 16 bits")
@pytest.mark.parametrize("names", ["softcap", "softcap alibi sinks"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_e4m3_tensors_give_the_bits_of_dequantized_ones(
    draw, backend: str, head_dim: int, names: str
) -> None:
    x = draw(torch.bfloat16, 2, (130, 257), (4, 2), head_dim)
    tensors = [y.to(torch.float8_e4m3fn) for y in (x.q, x.k, x.v)]
    factors = {f"{name}_descale": 0.5 + torch.rand(2, 2, device="cuda") for name in "qkv"}
    rules = rules_of(names, 2, 4, torch.float32) | {
        "backend": backend,
        "causal": True,
        "return_attn_probs": True,
    }
    wide = [
        factor.repeat_interleave(y.shape[2] // 2, 1)
        for y, factor in zip(tensors, factors.values(), strict=True)
    ]
    exact = [(y.float() * z[:, None, :, None]).bfloat16() for y, z in zip(tensors, wide, strict=True)]
    cu_q, cu_k = (n * torch.arange(3, dtype=torch.int32, device="cuda") for n in (130, 257))
    packed = partial(
        flash_attn_varlen_func, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=130, max_seqlen_k=257
    )
    for call, shaped in ((flash_attn_func, lambda y: y), (packed, lambda y: y.flatten(0, 1))):
        found = call(*map(shaped, tensors), **factors, **rules)
        wanted = call(*map(shaped, exact), **rules)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def gradients(x: Any, dout: Tensor, dlse: Tensor, dtype: torch.dtype, attend: Any, rules: dict) -> tuple:
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (x.q, x.k, x.v)]
    rules = dict(rules)
    if "sinks" in rules:
        rules["sinks"] = rules["sinks"].detach().to(dtype).requires_grad_()
        leaves.append(rules["sinks"])
    out, lse = attend(*leaves[:3], **rules)
    grads = (dout.to(out.dtype), dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0))
    return torch.autograd.grad((out, lse), leaves, grads)


@pytest.mark.parametrize("names", RULES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients(draw, backend: str, head_dim: int, names: str) -> None:
    failures = {}
    for dtype, seqlens, causal in product(DTYPES, ((113, 203), (203, 113), (640, 700)), (False, True)):
        x = draw(dtype, 1, seqlens, (4, 2), head_dim)
        rules = rules_of(names, 1, 4, dtype)
        dout = torch.randn(1, seqlens[0], 4, head_dim, device="cuda").to(dtype)
        dlse = torch.randn(1, 4, seqlens[0], device="cuda")

        exact = gradients(x, dout, dlse, torch.float64, partial(attention_naive, causal=causal), rules)
        ours = partial(flash_attn_func, causal=causal, backend=backend, return_attn_probs=True)
        plain = partial(plain_attention, causal=causal)
        mine, torchs = (gradients(x, dout, dlse, dtype, attend, rules) for attend in (ours, plain))
        for name, a, b, e in zip(("dq", "dk", "dv"), mine, torchs, exact, strict=False):
            rounding = e.abs().max() * torch.finfo(dtype).eps
            budget = 2 * (b - e).abs().max() + rounding + 1e-4
            if not bool((a - e).abs().max() <= budget):
                failures[dtype, seqlens, causal, name] = ((a - e).abs().max().item(), budget.item())
    assert failures == {}


@pytest.mark.parametrize("names", ["sinks", "softcap alibi sinks"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_sinks(draw, backend: str, dtype: torch.dtype, head_dim: int, names: str) -> None:
    # A sum over all rows, whose roundings add up at random: errors of one draw say little, of twelve enough.
    failures = {}
    for seqlens, causal in (((113, 203), False), ((640, 700), True)):
        errors, torch_errors, roundings = [], [], []
        for _ in range(12):
            x = draw(dtype, 1, seqlens, (4, 2), head_dim)
            rules = rules_of(names, 1, 4, dtype)
            dout = torch.randn(1, seqlens[0], 4, head_dim, device="cuda").to(dtype)
            dlse = torch.randn(1, 4, seqlens[0], device="cuda")
            exact = gradients(x, dout, dlse, torch.float64, partial(attention_naive, causal=causal), rules)[3]
            ours = partial(flash_attn_func, causal=causal, backend=backend, return_attn_probs=True)
            plain = partial(plain_attention, causal=causal)
            mine, torchs = (gradients(x, dout, dlse, dtype, attend, rules)[3] for attend in (ours, plain))
            errors.append(mine.double() - exact)
            torch_errors.append(torchs.double() - exact)
            roundings.append(exact * torch.finfo(dtype).eps / 2)
        found, plains, rounding = (
            torch.stack(x).square().mean(0).sqrt() for x in (errors, torch_errors, roundings)
        )
        budget = 2 * plains + rounding
        if not bool((found <= budget).all()):
            failures[seqlens, causal] = (found.tolist(), budget.tolist())
    assert failures == {}
