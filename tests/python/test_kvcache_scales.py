"""Caches of e4m3 with scales by page or by token, and keys rotated by a Hadamard matrix, against float64.

What is no key is NaN, in the caches and in the scales.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper_attention import explain_kvcache, flash_attn_with_kvcache
from hopper_attention.kvcache_rotation import rotate_keys, rotate_queries_alike
from tests.python.kvcache_cases import FP8, CacheCase, bits, hadamard, int32

BY_TOKEN, BY_PAGE = "token", "page"
NEW = CacheCase(new=(3, 0, 3), packed_new=True, page_size=4)
LARGEST = 448.0


def build(case: CacheCase, kind: str, dtype: torch.dtype = torch.bfloat16, **given: Any) -> dict[str, Any]:
    """A call with scales of some kind."""
    call = case.build(dtype, FP8, **given)
    pages, rows, kv_heads, _ = call["k_cache"].shape
    rows = rows if kind == BY_TOKEN else 1
    for name in ("k_descale", "v_descale"):
        call[name] = torch.full((pages, rows, kv_heads), math.nan)
        for b, length in enumerate(case.lengths):
            for row in range(case.pad(b), length + (case.count(b) if kind == BY_PAGE else 0)):
                page, at = case.place(call, b, row)
                drawn = torch.rand(kv_heads) + 0.25
                of_page = call[name][page, at % rows]
                call[name][page, at % rows] = torch.where(of_page.isnan(), drawn, of_page)
    return call


def check(
    case: CacheCase, kind: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **given: Any
) -> dict[str, Any]:
    """Run a case on a device and compare everything; the call after it, on the CPU."""
    before = build(case, kind, dtype, **given)
    call = {name: x.to(device, copy=True) if isinstance(x, Tensor) else x for name, x in before.items()}
    results = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    call = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    out, lse = (x.cpu() for x in results)
    check_new_tokens(case, kind, call, before)
    exact, exact_lse = case.expected(call)
    assert (out.double() - exact).abs().max() <= 1.6e-2 * max(1.0, exact.abs().max())
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    error = (lse.double() - exact_lse).nan_to_num(nan=0.0).abs()
    assert error.max() <= 4e-3 * exact_lse.nan_to_num(neginf=0.0).abs().max().clamp(min=1.0)
    return call


def check_new_tokens(case: CacheCase, kind: str, call: dict[str, Any], before: dict[str, Tensor]) -> None:
    """New tokens are within half a step of e4m3, new scales what they should be, all else is as it was."""
    for b in range(case.batch):
        for i in range(case.count(b)):
            page, row = case.place(call, b, case.lengths[b] + i)
            v = case.token(call, "v", b, i).double()
            for x, name in ((case.new_key(call, b, i), "k"), (v, "v")):
                scale = call[f"{name}_descale"][page, row if kind == BY_TOKEN else 0].double()
                if kind == BY_TOKEN:
                    assert ((scale - x.abs().amax(-1) / LARGEST).abs() <= 4e-6 * scale).all()
                    before[f"{name}_descale"][page, row] = scale
                stored = call[f"{name}_cache"][page, row].double() * scale[:, None]
                exact = x.clamp(-LARGEST * scale[:, None], LARGEST * scale[:, None])
                assert ((stored - exact).abs() <= 0.0626 * exact.abs() + scale[:, None] * 2.0**-10).all()
                before[f"{name}_cache"][page, row] = call[f"{name}_cache"][page, row]
    for name in ("k_cache", "v_cache"):
        assert torch.equal(bits(call[name]), bits(before[name]))
    for name in ("k_descale", "v_descale"):
        assert torch.equal(call[name].view(torch.int32), before[name].view(torch.int32))


CASES: dict[str, CacheCase] = {
    "pages": CacheCase(page_size=4),
    "pages of one row": CacheCase(page_size=1, new=(1, 1, 1)),
    "no pages": CacheCase(new=(2, 2, 2)),
    "batch index": CacheCase(batch_idx=(4, 0, 2), new=(1, 1, 1)),
    "batch index and pages": replace(NEW, batch_idx=(3, 1, 0), rotary_dim=16),
    "leftpad": CacheCase(leftpad=(4, 0, 7), new=(2, 1, 3), packed_new=True),
    "packed": replace(NEW, queries=(0, 4, 2), packed_q=True, rotary_dim=32, interleaved=False),
    "one head of keys": replace(NEW, heads=(4, 1), queries=(1, 1, 1)),
    "narrow heads": replace(NEW, head_dims=(24, 40), queries=(1, 1, 1)),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    # A page of one row is a token.
    [*((BY_TOKEN, name) for name in CASES), *((BY_PAGE, name) for name in CASES if "one row" not in name)],
)
def test_scales_by_token_and_by_page(kind: str, name: str) -> None:
    check(CASES[name], kind, causal=True)


@pytest.mark.parametrize("kind", [BY_TOKEN, BY_PAGE])
@pytest.mark.parametrize("rotary_dim", [0, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_and_queries_are_multiplied_by_a_hadamard_matrix(
    kind: str, rotary_dim: int, interleaved: bool
) -> None:
    case = replace(NEW, rotary_dim=rotary_dim, interleaved=interleaved)
    check(case, kind, causal=True, hadamard=True)
    check(replace(case, head_dims=(56, 24)), kind, torch.float16, hadamard=1)
    if not rotary_dim:
        check(replace(case, new=(), packed_new=False), kind, hadamard=True)


def test_a_hadamard_matrix_with_other_scales_and_dtypes() -> None:
    """Scores are those without it, within the rounding of 16 bits."""
    case = CacheCase(lengths=(0, 0, 0), new=(9, 9, 9), queries=(9, 9, 9), rotary_dim=32)
    found = []
    for given in ({}, {"hadamard": True}):
        call = case.build(torch.bfloat16, **given)
        found.append(flash_attn_with_kvcache(**call, causal=True, return_softmax_lse=True))
        k = torch.stack([torch.stack([case.new_key(call, b, i) for i in range(9)]) for b in range(3)])
        assert (call["k_cache"][:, :9].double() - k).abs().max() <= 0.02
    assert (found[0][0] - found[1][0]).abs().max() <= 0.03 and (found[0][1] - found[1][1]).abs().max() <= 0.03
    assert not torch.equal(found[0][0], found[1][0])
    descale = {name: torch.full((3, 2), 2.0**-6) for name in ("k_descale", "v_descale")}
    out, _ = flash_attn_with_kvcache(
        **case.build(torch.bfloat16, FP8, **descale), hadamard=True, causal=True, return_softmax_lse=True
    )
    assert (out - found[0][0]).abs().mean() <= 0.05


def test_the_rotation_is_orthogonal_and_the_same_for_keys_and_queries() -> None:
    for size in (8, 64, 96, 256):
        matrix = hadamard(size)
        assert (matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-12
        assert (rotate_keys(torch.eye(size)).double() - matrix).abs().max() < 1e-7
        q = torch.randn(3, size).bfloat16()
        assert (rotate_queries_alike(q).double() - q.double() @ matrix).abs().max() <= 2.0**-8 * 4
    assert torch.tensor([float(hadamard(256)[i, 0] < 0) for i in range(256)]).mean() > 0.3


def test_the_rotation_does_not_depend_on_the_mode_of_the_call_before() -> None:
    size = 88  # Of no other test, as what is kept would be kept from there.
    with FakeTensorMode():
        rotate_keys(torch.ones(2, size))
    with torch.inference_mode():
        rotate_keys(torch.ones(2, size))
    x = torch.ones(2, size, requires_grad=True)
    rotate_keys(x).sum().backward()
    torch.set_default_dtype(torch.float64)
    try:
        assert rotate_keys(x).dtype == rotate_keys(torch.ones(2, 72).half()).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def error_with_outliers(of_queries: float, on: bool) -> float:
    """Of attention where every 16th column of keys is 20 times as large as the others, and of queries so many times."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 16, 2, 64), torch.randn(1, 64, 1, 64), torch.randn(1, 64, 1, 64)
    k[..., ::16] *= 20.0
    q[..., ::16] *= of_queries
    scale = float(3.0 / torch.einsum("bqhd,bkd->bqhk", q, k[:, :, 0]).std())
    weights = torch.softmax(scale * torch.einsum("bqhd,bkd->bqhk", q.double(), k[:, :, 0].double()), -1)
    wanted = torch.einsum("bqhk,bkd->bqhd", weights, v[:, :, 0].double())
    call = {name: torch.zeros(1, 64, 1, 64).to(FP8) for name in ("k_cache", "v_cache")}
    call |= {name: torch.zeros(1, 64, 1) for name in ("k_descale", "v_descale")}
    call |= {"q": q.half(), "k": k.half(), "v": v.half(), "cache_seqlens": int32([0])}
    out = flash_attn_with_kvcache(**call, hadamard=on, softmax_scale=scale)
    return float((out.double() - wanted).norm() / wanted.norm())


def test_where_a_hadamard_matrix_helps_and_where_it_does_not() -> None:
    """It evens out the error of e4m3, a part of each number. So it helps where queries are large in the columns in
    which keys are, and hurts where they are small there."""
    assert error_with_outliers(20.0, True) < 0.7 * error_with_outliers(20.0, False)
    assert error_with_outliers(0.05, True) > error_with_outliers(0.05, False)


def test_a_token_of_zeros_and_one_that_is_not_finite() -> None:
    call = build(CacheCase(new=(2, 2, 2)), BY_TOKEN)
    call["k"][0, 0], call["v"][0, 0] = 0.0, 0.0
    call["v"][1, 0, 0, 3] = math.nan
    out = flash_attn_with_kvcache(**call, causal=True)
    assert not call["k_cache"][0, 9].float().any() and not call["k_descale"][0, 9].any()
    assert bool(out[0].isfinite().all()) and bool(out[2].isfinite().all())
    assert bool(out[1, -1, :2, 3].isnan().all()) and bool(out[1, -1, 2:].isfinite().all())
    assert bool(call["v_descale"][1, 0].isfinite().all())


def test_tokens_of_e4m3_keep_the_scales_that_are_there() -> None:
    case = CacheCase(new=(2, 2, 2))
    call = build(case, BY_TOKEN)
    call |= {name: call[name].to(FP8) for name in ("k", "v")}
    for name in ("k_descale", "v_descale"):
        call[name].nan_to_num_(nan=0.5)
    before = call["k_descale"].clone()
    out, _ = flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert torch.equal(call["k_descale"], before)
    assert (out.double() - case.expected(call)[0]).abs().max() <= 0.02


def test_an_operator_says_that_it_writes_scales() -> None:
    call = build(NEW, BY_TOKEN, hadamard=True)
    other = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    out = flash_attn_with_kvcache(**call)
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**other), out)
    for name in ("k_descale", "v_descale", "k_cache"):
        one, two = (x.view(torch.uint8 if x.dtype == FP8 else torch.int32) for x in (call[name], other[name]))
        assert torch.equal(one, two)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"v_descale": None},
        r"v_descale is None, allowed with k_descale of shape \(21, 4, 2\): the same kind, \(21, 4, 2\)",
    ),
    (
        {"v_descale": torch.ones(3, 2)},
        r"v_descale has shape \(3, 2\), allowed with k_descale of shape \(21, 4, 2\): the same",
    ),
    ({"k_descale": torch.ones(21, 1, 2)}, r"v_descale has shape .*|k_descale has shape .* the same kind"),
    (
        {"k_descale": torch.ones(21, 3, 2)},
        r"k_descale has shape \(21, 3, 2\), allowed: \(batch, kv_heads\), \(3, 2\), or by token \(21, 4, 2\), or by "
        r"page \(21, 1, 2\)",
    ),
    ({"k_descale": torch.ones(21, 4)}, r"k_descale has shape \(21, 4\), allowed: \(batch, kv_heads\)"),
    (
        {"k_descale": torch.ones(21, 1, 2).expand(21, 4, 2)},
        r"k_descale has strides \(2, 0, 1\), allowed with new tokens: none that is 0",
    ),
    ({"hadamard": "yes"}, "hadamard is .*yes"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_allowed(given: dict[str, Any], message: str) -> None:
    call = build(NEW, BY_TOKEN)
    assert call["k_cache"].shape[0] == 21
    with pytest.raises((ValueError, TypeError), match=message):
        flash_attn_with_kvcache(**(call | given))


@pytest.mark.parametrize("names", [("k", "v"), ("q",)])
def test_numbers_of_e4m3_are_not_rotated_out_of_their_range(names: tuple[str, ...]) -> None:
    call = build(CacheCase(new=(2, 2, 2) if "k" in names else ()), BY_TOKEN)
    call |= {name: torch.full_like(call[name], 448.0).to(FP8) for name in names}
    with pytest.raises(NotImplementedError, match=f"hadamard is True and {names[0]} has dtype"):
        flash_attn_with_kvcache(**call, hadamard=True)


def test_a_plan_says_what_happens() -> None:
    call = build(replace(NEW, rotary_dim=16), BY_TOKEN, hadamard=True)
    text = str(explain_kvcache(**call))
    assert "these multiplied by a Hadamard matrix, with a scale of its own each" in text
    assert "queries are multiplied by a Hadamard matrix" in text


def test_scales_that_are_written_are_two_tensors() -> None:
    call = build(NEW, BY_TOKEN)
    before = {name: call[name].clone() for name in ("k_cache", "v_cache", "k_descale")}
    with pytest.raises(ValueError, match="v_descale is the memory of k_descale"):
        flash_attn_with_kvcache(**(call | {"v_descale": call["k_descale"]}))
    for name, x in before.items():
        assert torch.equal(bits(call[name]), bits(x))
    # Those that are only read may be one.
    call = build(NEW, BY_PAGE)
    flash_attn_with_kvcache(**(call | {"v_descale": call["k_descale"]}))
