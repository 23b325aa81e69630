"""The public functions on the CPU: results, layouts, gradients. Errors are in test_api_errors.py."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import hopper_attention
from hopper_attention import (
    flash_attn_func,
    flash_attn_interface,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)
from hopper_attention.reference import attention_naive

HALF_STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance between neighbouring numbers around 1: the largest relative error of one rounding."""

SHAPES = [
    # batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v
    (1, 1, 1, 1, 1, 8, 8),
    (2, 17, 33, 4, 2, 64, 64),
    (1, 113, 203, 6, 1, 40, 72),
    (2, 130, 5, 2, 2, 128, 128),
    (1, 129, 257, 3, 3, 256, 96),
]


def random_qkv(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    b, sq, sk, h, hk, d, dv = shape
    generator = torch.Generator().manual_seed(7)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    return draw(b, sq, h, d), draw(b, sk, hk, d), draw(b, sk, hk, dv)


def assert_matches_oracle(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
) -> None:
    """P is rounded once and so is the output; each costs at most half a step of the largest |v|."""
    wanted, wanted_lse = attention_naive(q, k, v, causal=causal, softmax_scale=scale)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    bound = 2 * HALF_STEP[q.dtype] * v.abs().max().item()
    assert (out.double() - wanted).abs().max().item() <= bound
    finite = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert (lse.double() - wanted_lse)[finite].abs().max().item() <= 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = random_qkv(shape)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert_matches_oracle(out, lse, q, k, v, causal=causal)


def test_float16_and_softmax_scale() -> None:
    q, k, v = random_qkv((2, 40, 50, 2, 2, 64, 64), torch.float16)
    out, lse = flash_attn_func(q, k, v, 0.3, return_attn_probs=True)
    assert_matches_oracle(out, lse, q, k, v, causal=False, scale=0.3)
    same = flash_attn_func(q, k, v, softmax_scale=torch.tensor(0.3).numpy().item())
    assert (same - out).abs().max().item() <= 2**-10


def test_returns_a_tensor_or_a_pair() -> None:
    q, k, v = random_qkv(SHAPES[1])
    assert isinstance(flash_attn_func(q, k, v), Tensor)
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape == (2, 17, 4, 64) and lse.shape == (2, 4, 17)


def test_rows_without_a_key_give_zero_and_minus_infinity() -> None:
    q, k, v = random_qkv((1, 9, 4, 2, 1, 32, 32))
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not out[:, :5].any() and (lse[:, :, :5] == -math.inf).all()
    assert out[:, 5:].abs().sum() > 0 and lse[:, :, 5:].isfinite().all()


@pytest.mark.parametrize(
    "seqlen_q,seqlen_k,batch,heads", [(5, 0, 2, 4), (0, 5, 2, 4), (5, 5, 0, 4), (5, 5, 2, 0)]
)
def test_zero_sizes(seqlen_q: int, seqlen_k: int, batch: int, heads: int) -> None:
    q = torch.randn(batch, seqlen_q, heads, 64, dtype=torch.float16, requires_grad=True)
    k, v = (torch.randn(batch, seqlen_k, 2, d, dtype=torch.float16, requires_grad=True) for d in (64, 32))
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape == (batch, seqlen_q, heads, 32) and lse.shape == (batch, heads, seqlen_q)
    assert not out.any() and (lse == -math.inf).all()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()


def test_any_strides() -> None:
    q, k, v = random_qkv((2, 33, 47, 4, 2, 64, 64))
    expected = flash_attn_func(q, k, v, causal=True)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
        lambda x: torch.nn.functional.pad(x, (0, 1))[..., : x.shape[3]],
        lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        lambda x: x.repeat_interleave(2, 3)[..., ::2],
    ]
    for layout in layouts:
        strided = [layout(x) for x in (q, k, v)]
        assert all(not x.is_contiguous() for x in strided)
        assert torch.equal(flash_attn_func(*strided, causal=True), expected)


def test_gradients_of_inputs_whose_rows_have_gaps() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv((2, 33, 47, 4, 2, 64, 64)))
    flash_attn_func(q, k, v, causal=True).float().square().sum().backward()
    gaps = [
        x.detach().permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).requires_grad_() for x in (q, k, v)
    ]
    out = flash_attn_func(*gaps, causal=True)
    assert out.is_contiguous()
    out.float().square().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(gaps, (q, k, v), strict=True))


def test_flags_may_be_numbers_and_numpys() -> None:
    q, k, v = random_qkv(SHAPES[1])
    expected = flash_attn_func(q, k, v, causal=True)
    for yes, no in ((1, 0), (np.True_, np.False_), (np.int64(1), np.int64(0))):
        assert torch.equal(flash_attn_func(q, k, v, causal=yes, deterministic=no), expected)
        assert isinstance(flash_attn_func(q, k, v, causal=no, return_attn_probs=yes), tuple)
        assert not torch.equal(flash_attn_func(q, k, v, causal=no, return_attn_probs=no), expected)


def test_expanded_heads_and_batch() -> None:
    q, k, v = random_qkv((2, 20, 30, 4, 1, 64, 64))
    shared_k, shared_v = (x[:1].expand(2, -1, 4, -1) for x in (k, v))
    expected = flash_attn_func(q, shared_k.contiguous(), shared_v.contiguous())
    assert torch.equal(flash_attn_func(q, shared_k, shared_v), expected)


def test_nan_behind_the_mask_stays_there() -> None:
    q, k, v = random_qkv((1, 40, 40, 2, 2, 64, 64))
    expected = [
        flash_attn_func(q, k, v, causal=True, backend=name)[:, :30] for name in ("reference", "torch")
    ]
    k[:, 30:], v[:, 30:] = math.nan, math.inf
    exact, near = (
        flash_attn_func(q, k, v, causal=True, backend=name)[:, :30] for name in ("reference", "torch")
    )
    assert torch.equal(exact, expected[0])
    assert torch.allclose(near, expected[1], rtol=1e-2, atol=1e-2)


def test_inputs_are_not_changed() -> None:
    tensors = random_qkv(SHAPES[1])
    before = [x.clone() for x in tensors]
    flash_attn_func(*tensors, causal=True)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


# packed


def test_qkvpacked_in_five_dimensions() -> None:
    qkv = torch.randn(2, 21, 3, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv.unbind(2))
    out, lse = flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    expected, expected_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert torch.equal(qkv.grad, torch.stack([q.grad, k.grad, v.grad], 2))


def test_qkvpacked_with_grouped_heads() -> None:
    qkv = torch.randn(2, 21, 4 + 2 + 2, 64, dtype=torch.bfloat16)
    expected = flash_attn_func(qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:], 0.2)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, 0.2, num_heads_q=4), expected)


def test_kvpacked() -> None:
    q = torch.randn(2, 9, 4, 64, dtype=torch.bfloat16)
    kv = torch.randn(2, 21, 2, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    out = flash_attn_kvpacked_func(q, kv, causal=True)
    assert torch.equal(out, flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], causal=True))
    out.float().sum().backward()
    assert kv.grad is not None and kv.grad.shape == kv.shape and kv.grad[:, :, 1].abs().sum() > 0


# gradients


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_match_the_oracle(causal: bool) -> None:
    inputs = [x.requires_grad_() for x in random_qkv((2, 37, 53, 4, 2, 64, 48))]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(2, 37, 4, 48, generator=generator)
    dlse = torch.randn(2, 4, 37, generator=generator)

    out, lse = flash_attn_func(*inputs, causal=causal, return_attn_probs=True)
    torch.autograd.backward([out, lse], [dout.bfloat16(), dlse])
    wanted_out, wanted_lse = attention_naive(*exact, causal=causal)
    torch.autograd.backward([wanted_out, wanted_lse], [dout.bfloat16().double(), dlse.double()])
    for got, wanted in zip(inputs, exact, strict=True):
        assert got.grad is not None and wanted.grad is not None and got.grad.dtype == torch.bfloat16
        error = (got.grad.double() - wanted.grad).abs().max().item()
        # P, dS and the result are rounded to bfloat16: three half steps of the largest gradient.
        assert error <= 3 * HALF_STEP[torch.bfloat16] * wanted.grad.abs().max().item()


def test_gradient_through_lse_alone() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv((1, 8, 12, 2, 2, 32, 32)))
    _, lse = flash_attn_func(q, k, v, return_attn_probs=True)
    lse.sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    attention_naive(*exact)[1].sum().backward()
    assert q.grad is not None and v.grad is not None and exact[0].grad is not None
    assert (q.grad.double() - exact[0].grad).abs().max().item() <= 0.02 * exact[0].grad.abs().max().item()
    assert not v.grad.any()


def test_gradients_of_some_inputs_only() -> None:
    q, k, v = random_qkv(SHAPES[1])
    k.requires_grad_()
    flash_attn_func(q, k, v).float().sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


def test_no_graph_without_grad_mode() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(SHAPES[1]))
    with torch.no_grad():
        assert not flash_attn_func(q, k, v).requires_grad
    with torch.inference_mode():
        assert flash_attn_func(q, k, v).is_inference()


# FP8


def test_fp8_with_descales_matches_the_dequantized_oracle() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in random_qkv((2, 40, 72, 4, 2, 64, 64)))
    q_descale, k_descale, v_descale = (torch.rand(2, 2) + 0.5 for _ in range(3))
    out, lse = flash_attn_func(
        q,
        k,
        v,
        causal=True,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        return_attn_probs=True,
    )
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    wide = [
        q.double() * q_descale.repeat_interleave(2, 1)[:, None, :, None],
        k.double() * k_descale[:, None, :, None],
        v.double() * v_descale[:, None, :, None],
    ]
    wanted, wanted_lse = attention_naive(*wide, causal=True)
    # P in e4m3 has 3 bits of mantissa, so each of its entries is off by at most 2^-4 of itself.
    assert (out.double() - wanted).abs().max().item() <= (2.0**-4 + 2.0**-8) * wide[2].abs().max().item()
    assert (lse.double() - wanted_lse).abs().max().item() <= 1e-5


def test_fp8_without_descales_means_ones() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in random_qkv(SHAPES[1]))
    ones = torch.ones(2, 2)
    expected = flash_attn_func(q, k, v, q_descale=ones, k_descale=ones, v_descale=ones)
    assert torch.equal(flash_attn_func(q, k, v), expected)
    packed = torch.stack([k, v], 2)
    assert torch.equal(flash_attn_kvpacked_func(q, packed, k_descale=ones), expected)


# the package


def test_drop_in_module_has_the_fields_names_and_order() -> None:
    assert flash_attn_interface.flash_attn_func is flash_attn_func
    assert flash_attn_interface.flash_attn_qkvpacked_func is flash_attn_qkvpacked_func
    names = list(inspect.signature(flash_attn_func).parameters)
    assert names == [
        *("q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale"),
        *("window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic"),
        *("sm_margin", "return_attn_probs", "alibi_slopes", "sinks", "score_mod", "mask_mod", "block_mask"),
        *("dropout_p", "two_level_accumulation", "exact_lse", "backend"),
    ]
    packed = list(inspect.signature(flash_attn_qkvpacked_func).parameters)
    assert packed == [
        *("qkv", "softmax_scale", "causal", "q_descale", "k_descale", "v_descale", "window_size"),
        *("attention_chunk", "softcap", "deterministic", "num_heads_q", "sm_margin", "return_attn_probs"),
        *("alibi_slopes", "sinks", "dropout_p", "two_level_accumulation", "exact_lse", "backend"),
    ]


def test_public_names_exist() -> None:
    assert all(
        callable(getattr(hopper_attention, name)) for name in hopper_attention.__all__ if name != "mods"
    )
    assert all(callable(getattr(hopper_attention.mods, name)) for name in hopper_attention.mods.__all__)


def test_import_brings_in_nothing_heavy_and_refuses_a_foreign_hopper(tmp_path) -> None:
    heavy = "('cutlass', 'tvm_ffi', 'matplotlib', 'typer', 'filelock')"
    code = (
        "import sys, hopper_attention as h\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
        "import torch; print(hasattr(torch.ops.hopper_attention, 'forward'))\n"
        f"sys.path.insert(0, {str(tmp_path)!r}); del sys.modules['hopper']\n"
        "try: h.rooms.check_rooms()\n"
        "except ImportError as error: print(error)\n"
    )
    (tmp_path / "hopper").mkdir()
    (tmp_path / "hopper" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    imported, registered, refusal = done.stdout.splitlines()
    assert imported == "[]"
    assert registered == "True"  # a saved program finds our operators after `import hopper_attention`
    assert f"found {tmp_path / 'hopper'}, expected" in refusal and "shadows ours" in refusal
