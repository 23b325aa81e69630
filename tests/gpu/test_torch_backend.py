"""The backend "torch" on a GPU: torch's FlashAttention-2 by its operators, as GPUs without a kernel of ours run it."""

from __future__ import annotations

import pytest
import torch

from hopper_attention import explain, flash_attn_func, flash_attn_varlen_func
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(128, 128), (100, 300), (300, 100), (1, 200)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_results_and_gradients(
    seqlen_q: int, seqlen_k: int, causal: bool, dtype: torch.dtype, has_sinks: bool
) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    sizes = (seqlen_q, 4, 64), (seqlen_k, 2, 64), (seqlen_k, 2, 64)
    leaves = [torch.randn(2, *size, generator=g, device="cuda").to(dtype).requires_grad_() for size in sizes]
    if has_sinks:
        leaves.append(torch.linspace(-1, 2, 4, device="cuda", requires_grad=True))
    doubles = [x.detach().double().requires_grad_() for x in leaves]

    def attend(attention, tensors, **options):
        q, k, v, *sinks = tensors
        return attention(q, k, v, causal=causal, sinks=sinks[0] if sinks else None, **options)

    out, lse = attend(flash_attn_func, leaves, return_attn_probs=True, backend="torch")
    exact, exact_lse = attend(attention_naive, doubles)
    dout = torch.randn(out.shape, generator=g, device="cuda").to(dtype)
    found = torch.autograd.grad(out, leaves, dout)
    expected = torch.autograd.grad(exact, doubles, dout.double())
    assert torch.equal(lse.isfinite(), exact_lse.isfinite())
    assert (lse.double() - exact_lse)[exact_lse.isfinite()].abs().max() < 1e-3
    for ours, wanted in zip((out, *found), (exact, *expected), strict=True):
        assert (ours.double() - wanted).abs().max() < 3e-2 * wanted.abs().max().clamp(min=1.0)


def test_packed_sequences_and_the_plan() -> None:
    q = torch.randn(30, 4, 64, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 10, 10, 30], dtype=torch.int32, device="cuda")
    ours, plain = (
        flash_attn_varlen_func(q, q, q, cu, cu, 20, 20, causal=True, backend=name) for name in ("torch", None)
    )
    assert (ours - plain).abs().max() < 2e-2
    assert explain(q[None], q[None], q[None], backend="torch").config.name == "torch_sdpa"
