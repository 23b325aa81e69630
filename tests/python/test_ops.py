"""The custom operators under torch's own checks, torch.compile, autograd's corners and CUDA-free tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hopper_attention import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

OPS = torch.ops.hopper_attention
NO_SCHEMA_CHECK = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""What opcheck can do with FP8: its schema test multiplies the inputs, which torch cannot do on a CPU."""


def qkv(requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = (2, 9, 4, 32), (2, 13, 2, 32), (2, 13, 2, 24)
    q, k, v = (torch.randn(s, generator=generator).to(torch.bfloat16) for s in shapes)
    return tuple(x.requires_grad_(requires_grad) for x in (q, k, v))


def strided(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_forward(causal: bool, requires_grad: bool) -> None:
    tensors = qkv(requires_grad)
    torch.library.opcheck(OPS.forward.default, (*tensors, 0.2, causal, None, 0))
    torch.library.opcheck(OPS.forward.default, (*map(strided, tensors), 0.2, causal, "reference", 0))


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(with_dlse: bool) -> None:
    q, k, v = qkv()
    out, lse = OPS.forward(q, k, v, 0.2, True, None, 0)
    dlse = torch.randn_like(lse) if with_dlse else None
    arguments = (torch.randn_like(out), dlse, strided(q), k, v, out, lse, 0.2, True)
    torch.library.opcheck(OPS.backward.default, arguments)


def test_opcheck_forward_fp8() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv())
    descale = torch.ones(2, 2)
    arguments = (q, k, v, descale, None, descale, 0.2, True, None)
    for of_call in ((False,), (True,), (False, 0, False)):
        torch.library.opcheck(OPS.forward_fp8.default, (*arguments, *of_call), test_utils=NO_SCHEMA_CHECK)


@pytest.mark.parametrize("sizes", [(0, 13, 4), (9, 0, 4), (9, 13, 0)])
def test_fakes_of_empty_problems(sizes: tuple[int, int, int]) -> None:
    seqlen_q, seqlen_k, heads = sizes
    q = torch.zeros(2, seqlen_q, heads, 32, dtype=torch.float16, requires_grad=True)
    k, v = (torch.zeros(2, seqlen_k, 2, d, dtype=torch.float16) for d in (32, 24))
    torch.library.opcheck(OPS.forward.default, (q, k, v, 0.2, False, None, 0))


def test_meta_and_fake_tensors_have_results() -> None:
    meta = [x.to("meta") for x in qkv()]
    out, lse = flash_attn_func(*meta, causal=True, return_attn_probs=True)
    assert out.is_meta and out.shape == (2, 9, 4, 24) and out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    with FakeTensorMode() as mode:
        fake = flash_attn_func(*(mode.from_tensor(x) for x in qkv()))
        assert fake.shape == (2, 9, 4, 24) and fake.is_contiguous()
        on_gpu = flash_attn_func(
            *(torch.empty(1, 5, 2, 64, dtype=torch.half, device="cuda") for _ in range(3))
        )
        assert on_gpu.device.type == "cuda" and on_gpu.shape == (1, 5, 2, 64)


# torch.compile


@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiles_as_one_graph(requires_grad: bool) -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_func(q * 2, k, v, 0.2, True, return_attn_probs=True)
        return out + 1, lse

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    ours, theirs = qkv(requires_grad), qkv(requires_grad)
    got, wanted = compiled(*ours), block(*theirs)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    if requires_grad:
        got[0].float().square().sum().backward()
        wanted[0].float().square().sum().backward()
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_one_graph_serves_every_length(needs_grad: bool, is_marked: bool) -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        flash_attn_func, fullgraph=True, dynamic=None if is_marked else True, backend=count
    )
    for seqlen in (5, 9, 14, 33, 64, 70, 96, 128, 130, 200, 257, 300):
        q, k, v = (torch.randn(2, n, 2, 32).half() for n in (seqlen, seqlen + 3, seqlen + 3))
        for x in (q, k, v):
            x.requires_grad_(needs_grad)
            if is_marked:
                torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(q, k, v), flash_attn_func(q, k, v))
    assert len(graphs) == 1


def _packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The same of the rows of a batch behind each other."""
    starts = (torch.arange(x.shape[0] + 1, dtype=torch.int32) * x.shape[1] for x in (q, k))
    longest = q.shape[1], k.shape[1]
    return flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *starts, *longest, **options)


@pytest.mark.parametrize("attend", [flash_attn_func, _packed])
def test_gradients_compile_where_a_window_changes(attend: Callable[..., Tensor]) -> None:
    """Its sides become symbols, which have no hash."""

    def block(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
        return attend(q, k, v, causal=True, window_size=(left, 0))

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for left in (2, 3, 5):
        leaves = qkv(True)
        got, wanted = (torch.autograd.grad(f(*leaves, left).sum(), leaves) for f in (compiled, block))
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_compiles_packed_and_fp8() -> None:
    packed = torch.randn(2, 9, 3, 2, 32).half()
    compiled = torch.compile(flash_attn_qkvpacked_func, fullgraph=True, backend="eager")
    assert torch.equal(compiled(packed, causal=True), flash_attn_qkvpacked_func(packed, causal=True))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv())
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    got = compiled(q, k, v, q_descale=torch.ones(2, 2))
    assert got.dtype == torch.bfloat16 and torch.equal(got, flash_attn_func(q, k, v))


def test_compiled_errors_say_the_same() -> None:
    q, k, v = qkv()
    compiled = torch.compile(flash_attn_func, backend="eager")
    with pytest.raises(Exception, match=r"k has shape \(1, 13, 2, 32\), allowed with q of shape"):
        compiled(q, k[:1], v)


def test_export() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_func(q, k, v, causal=True)

    program = torch.export.export(Attention(), qkv())
    assert torch.equal(program.module()(*qkv()), flash_attn_func(*qkv(), causal=True))
    assert "hopper_attention.forward" in str(program.graph)


# autograd


def test_checkpointing_recomputes() -> None:
    q, k, v = qkv(True)
    out = torch.utils.checkpoint.checkpoint(flash_attn_func, q, k, v, use_reentrant=False)
    out.float().sum().backward()
    again = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    flash_attn_func(*again).float().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip((q, k, v), again, strict=True))


def test_gradient_of_an_expanded_output_gradient() -> None:
    q, k, v = qkv(True)
    flash_attn_func(q, k, v).sum().backward()
    expected = [x.grad.clone() for x in (q, k, v)]
    again = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*again)
    out.backward(torch.ones_like(out))
    assert all(torch.equal(x.grad, y) for x, y in zip(again, expected, strict=True))
