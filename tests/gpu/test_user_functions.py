"""score_mod and mask_mod on the kernels, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from hopper_attention import flash_attn_func, flash_attn_varlen_func, mods
from hopper_attention.reference import attention_naive
from tests.gpu.conftest import LSE_TOLERANCE
from tests.python.varlen_cases import CASES

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

LENGTH = 1100


@dataclass(frozen=True)
class Mods:
    """Functions and the tensors that they read, all on the GPU."""

    score_mod: Any = None
    mask_mod: Any = None


def everything(heads: int, batch: int) -> Mods:
    bias = torch.randn(heads, 2 * LENGTH, device="cuda").bfloat16().t()
    words = torch.randint(0, 3, (batch, LENGTH), device="cuda")
    is_there = torch.rand(LENGTH, device="cuda") > 0.1
    temperature = torch.tensor(0.7, device="cuda")

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        capped = 5.0 * mods.tanh(score / 5.0) * temperature + bias[q_idx - kv_idx + LENGTH, h]
        bent = mods.where(q_idx > kv_idx, mods.exp(-score * score), mods.sqrt(abs(score) + 0.1))
        return capped + bent + (kv_idx - q_idx) // 5 % 3 * 0.1 + (words[b, kv_idx] == 2)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((words[b, q_idx] == words[b, kv_idx]) & is_there[kv_idx]) | ((kv_idx < 2) & (q_idx > 9))

    return Mods(score_mod, mask_mod)


def relative_bias(heads: int, batch: int) -> Mods:
    bias = torch.randn(heads, 65, device="cuda")
    return Mods(lambda s, b, h, q, k: s + bias[h, mods.minimum(mods.maximum(k - q + 32, 0), 64)])


def documents(heads: int, batch: int) -> Mods:
    of = torch.randint(0, 4, (batch, LENGTH), device="cuda").sort().values.int()
    return Mods(mask_mod=lambda b, h, q, k: of[b, q] == of[b, k])


KINDS = {"everything": everything, "relative bias": relative_bias, "documents": documents}


def off(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


CAUSAL: dict[str, Any] = {"causal": True}
CAPPED: dict[str, Any] = {"window_size": (100, 30), "softcap": 2.5}
SHORT, LONG = (203, 333), (1023, 1024)
CASES_OF_ONE_LENGTH = [
    (64, "everything", torch.bfloat16, LONG, CAUSAL),
    (96, "documents", torch.bfloat16, SHORT, {}),
    (128, "everything", torch.float16, LONG, CAPPED),
    (128, "relative bias", torch.bfloat16, LONG, CAUSAL),
    (192, "everything", torch.bfloat16, SHORT, {}),
    (256, "relative bias", torch.float16, SHORT, CAPPED),
]


@pytest.mark.parametrize(("head_dim", "name", "dtype", "lengths", "given"), CASES_OF_ONE_LENGTH, ids=str)
def test_results_and_gradients(
    draw,
    backend: str,
    head_dim: int,
    name: str,
    dtype: torch.dtype,
    lengths: tuple[int, int],
    given: dict[str, Any],
) -> None:
    x, functions = draw(dtype, 2, lengths, (4, 2), head_dim), KINDS[name](4, 2)
    inputs = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    out, lse = flash_attn_func(*inputs, backend=backend, return_attn_probs=True, **given, **vars(functions))
    sides = dict(zip(("window_left", "window_right"), given.get("window_size", (-1, -1)), strict=True))
    rest = {key: value for key, value in given.items() if key != "window_size"}
    wanted, wanted_lse = attention_naive(*exact, **rest, **sides, **vars(functions))
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    right = torch.autograd.grad(wanted, exact, dout.double())
    for ours, theirs in zip((out, *gradients), (wanted, *right), strict=True):
        assert off(ours, theirs) < 2 * torch.finfo(dtype).eps
    hidden = wanted_lse == -torch.inf
    assert bool((lse[hidden] == -torch.inf).all() and (out.transpose(1, 2)[hidden] == 0).all())
    # One instruction's tanh, for bfloat16, is good to 2^-11 of the cap.
    allowed = 1e-4 + 5 * LSE_TOLERANCE + 2.0**-11 * given.get("softcap", 0.0)
    assert (lse.double() - wanted_lse)[~hidden].abs().max() < allowed


@pytest.mark.parametrize("case", ["plain", "empty ones", "used"])
def test_sequences_of_different_lengths(backend: str, case: str) -> None:
    c = CASES[case]
    c = replace(c, head_dims=(64, 64))
    inputs = [x.cuda().requires_grad_() for x in c.tensors(torch.bfloat16)]
    functions = everything(c.heads[0], len(c.rooms_q))
    lengths = [x.cuda() if isinstance(x, Tensor) else x for x in c.lengths]
    out = flash_attn_varlen_func(*inputs, *lengths, causal=True, backend=backend, **vars(functions))
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    exact = [x.detach().nan_to_num().double().requires_grad_() for x in inputs]
    wanted = torch.zeros(out.shape, dtype=torch.float64, device="cuda")
    for b, (rows, keys) in enumerate(c.spans()):
        number = torch.tensor(b, device="cuda")

        def score_mod(score, _, *place, number=number):
            return functions.score_mod(score, number, *place)

        def mask_mod(_, *place, number=number):
            return functions.mask_mod(number, *place)

        parts = exact[0][None, rows], exact[1][None, keys], exact[2][None, keys]
        if rows.start < rows.stop and keys.start < keys.stop:
            part = attention_naive(*parts, causal=True, score_mod=score_mod, mask_mod=mask_mod)[0][0]
            wanted = wanted.index_copy(0, torch.arange(rows.start, rows.stop, device="cuda"), part)
    right = torch.autograd.grad(wanted, exact, dout.double())
    for ours, theirs in zip((out, *gradients), (wanted, *right), strict=True):
        assert off(ours, theirs) < 2 * torch.finfo(torch.bfloat16).eps


CASES_OF_BLOCKS: list[tuple[int, int | tuple[int, int], tuple[int, int], dict[str, Any]]] = [
    (64, 128, LONG, {}),
    (128, 128, SHORT, {"deterministic": True}),
    (128, (96, 100), LONG, {}),
    (192, 64, LONG, {"deterministic": True}),
    (256, 256, LONG, {}),
]


@pytest.mark.parametrize(("head_dim", "block", "lengths", "given"), CASES_OF_BLOCKS, ids=str)
def test_a_block_mask(
    draw,
    backend: str,
    head_dim: int,
    block: int | tuple[int, int],
    lengths: tuple[int, int],
    given: dict[str, Any],
) -> None:
    """Captured in a graph as well, which makes lists anew when it is replayed."""
    x, functions = draw(torch.bfloat16, 2, lengths, (4, 2), head_dim), documents(4, 2)
    blocks = create_block_mask(functions.mask_mod, 2, None, *lengths, device="cuda", BLOCK_SIZE=block)
    inputs = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    dout = torch.randn_like(inputs[0])

    def step() -> tuple[Tensor, ...]:
        out = flash_attn_func(*inputs, block_mask=blocks, backend=backend, **given)
        return out, *torch.autograd.grad(out, inputs, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = step()
    torch.cuda.synchronize()
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted, _ = attention_naive(*exact, mask_mod=functions.mask_mod)
    right = torch.autograd.grad(wanted, exact, dout.double())
    for ours, theirs in zip(results, (wanted, *right), strict=True):
        assert off(ours, theirs) < 2 * torch.finfo(torch.bfloat16).eps
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for ours, theirs in zip(captured, (wanted, *right), strict=True):
        assert off(ours, theirs) < 2 * torch.finfo(torch.bfloat16).eps
    if given:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, results, strict=True))


def test_values_of_tensors_are_no_part_of_a_kernel(draw, backend: str) -> None:
    x, bias = draw(torch.bfloat16, 1, (100, 100), (2, 2), 64), torch.zeros(2, device="cuda")

    def attend() -> Tensor:
        return flash_attn_func(x.q, x.k, x.v, backend=backend, score_mod=lambda s, b, h, q, k: s * bias[h])

    flat = attend()
    torch.testing.assert_close(flat, x.v.mean(1, keepdim=True).expand_as(flat), rtol=0.02, atol=0.02)
    bias.fill_(1.0)
    torch.testing.assert_close(
        attend(), flash_attn_func(x.q, x.k, x.v, backend=backend), rtol=0.02, atol=0.02
    )


def test_a_cuda_graph_reads_tensors_when_it_is_replayed(draw, backend: str) -> None:
    x, factor = draw(torch.bfloat16, 1, (100, 100), (2, 2), 64), torch.ones(2, device="cuda")

    def attend() -> Tensor:
        return flash_attn_func(x.q, x.k, x.v, backend=backend, score_mod=lambda s, b, h, q, k: s * factor[h])

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    factor.fill_(0.5)
    graph.replay()
    assert torch.equal(out, attend())
