"""The steps of several ranks on one GPU, one after the other: what kernels make of them against one call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
)
from hopper_attention.distributed.attend import Call, Saved, attend
from hopper_attention.distributed.gradients import (
    EVERYTHING,
    KeyGradients,
    differentiate_keys,
    halves_of_work,
    row_gradients,
)
from hopper_attention.distributed.layout import shard, unshard
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.pieces import Problem, groups_between, hull
from hopper_attention.distributed.ring import Results
from hopper_attention.distributed.wire import (
    packed,
    pieces_of,
    quantize_chunks,
    travelling,
    unpacked,
    visible_chunks,
    with_keys,
)
from hopper_attention.quantized import DEFAULT_QUANTIZATION
from hopper_attention.reference import attention_naive
from hopper_attention.reference.tiles import Span
from tests.gpu.conftest import compile_for_ranks

DEVICE = "cuda"
ODD = (0, 1, 300, 301, 777, 1500, 1500, 1980)
SEQLEN, WORLD = 2048, 4
PROBLEMS = {
    "causal zigzag": Problem(WORLD, SEQLEN, SEQLEN, "zigzag", right=0),
    "full": Problem(WORLD, SEQLEN, SEQLEN, "contiguous"),
    "window": Problem(WORLD, SEQLEN, SEQLEN, "contiguous", 600, 0),
    "window of two sides, zigzag": Problem(WORLD, SEQLEN, SEQLEN, "zigzag", 300, 100),
    "causal documents": Problem(WORLD, SEQLEN, SEQLEN, "zigzag", right=0, documents=ODD),
    "documents under a window": Problem(WORLD, SEQLEN, SEQLEN, "contiguous", 200, 50, ODD),
}

Parts = list[tuple[Tensor, ...]]


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Those of the problems. What is not shipped compiles as it is met."""
    compile_for_ranks("bfloat16", 128)


def forward(p: Problem, call: Call, parts: Parts) -> list[Merged]:
    """What each rank has in the end; ``parts`` are q, k, v and dout of each."""
    found = []
    for rank, (q, *_) in enumerate(parts):
        merged = Merged.empty(q, parts[0][2].shape[3])
        for other, (_, k, v, _) in enumerate(parts):
            for group in groups_between(p, rank, other):
                keys = slice(group.keys.start, group.keys.stop)
                merged.add(group.rows, *attend(q, k[:, keys], v[:, keys], group, call))
        found.append(merged)
    return found


def backward(p: Problem, call: Call, parts: Parts, found: list[Merged]) -> list[list[Tensor]]:
    """Gradients of q, k and v of each rank, as the ring adds them up."""
    keys, dqs = (
        [KeyGradients((torch.empty_like(k), torch.empty_like(v)), WORLD - 1) for _, k, v, _ in parts],
        [],
    )
    for rank, (q, own_k, own_v, dout) in enumerate(parts):
        saved = Saved(q, found[rank].out.to(q.dtype), found[rank].lse, dout, None)
        met = {other: groups_between(p, rank, other) for other in range(WORLD)}
        own, halves = (own_k, own_v), halves_of_work(q, own_k)
        parts_of = {other: halves if other == rank else [EVERYTHING] for other in met}
        adds = [(group, part) for other in met for part in parts_of[other] for group in met[other]]
        rows = row_gradients(saved, own, adds, call)
        for part in halves:
            into, held = part.of_keys(keys[rank].own), Span(0, own_k.shape[1])
            differentiate_keys(rows, met[rank], part, part.of_keys(own), held, into)
        for other in (other for other in met if met[other] and other != rank):
            held = hull([group.keys for group in met[other]])
            k, v = (x[:, held.start : held.stop].clone() for x in parts[other][1:3])
            into = (k, v) if rows.may_replace_keys else (torch.empty_like(k), torch.empty_like(v))
            differentiate_keys(rows, met[other], EVERYTHING, (k, v), held, into)
            keys[other].add(held, into)
        dqs.append(rows.finish())
    return [[dq, *of_keys.finish()] for dq, of_keys in zip(dqs, keys, strict=True)]


def one_call(p: Problem, whole: list[Tensor], **options: Any) -> list[Tensor]:
    """out and the gradients of one GPU's own call."""
    *leaves, dout = (x.detach().clone().requires_grad_() for x in whole)
    window = {"window_size": (p.left, p.right)}
    if p.documents:
        starts = torch.tensor(p.documents, dtype=torch.int32, device=DEVICE)
        longest = max(b - a for a, b in pairwise(p.documents))
        packed = (x[0] for x in leaves)
        out = flash_attn_varlen_func(*packed, starts, starts, longest, longest, **window, **options)[None]
    else:
        out = flash_attn_func(*leaves, **window, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def exact(p: Problem, whole: list[Tensor], softcap: float) -> list[Tensor]:
    """The same in float64."""
    *leaves, dout = (x.double().requires_grad_() for x in whole)
    bounds = p.documents or (0, p.seqlen_q)
    sides = {"window_left": p.left, "window_right": p.right, "causal": p.right == 0, "softcap": softcap}
    outs = [attention_naive(*(x[:, a:b] for x in leaves), **sides)[0] for a, b in pairwise(bounds)]
    outs.append(torch.zeros_like(leaves[0][:, bounds[-1] :]))
    out = torch.cat(outs, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("name", PROBLEMS)
def test_ranks_in_turns_are_as_exact_as_one_call(name: str, softcap: float) -> None:
    p, call = PROBLEMS[name], Call(128**-0.5, softcap)
    torch.manual_seed(3)
    whole = [torch.randn(1, SEQLEN, h, 128, device=DEVICE, dtype=torch.bfloat16) for h in (4, 2, 2, 4)]
    parts = [tuple(shard(x, r, WORLD, p.layout) for x in whole) for r in range(WORLD)]
    found = forward(p, call, parts)
    sums = backward(p, call, parts, found)
    of_ranks = [[merged.out.to(torch.bfloat16) for merged in found], *zip(*sums, strict=True)]
    right, one = exact(p, whole, softcap), one_call(p, whole, softcap=softcap)
    for what, ranks, alone, wanted in zip(("out", "dq", "dk", "dv"), of_ranks, one, right, strict=True):
        got = unshard(torch.cat(list(ranks), 1), WORLD, p.layout)
        error, error_of_one = ((x.double() - wanted).norm() for x in (got, alone))
        assert error <= 1.5 * error_of_one, (what, float(error), float(error_of_one))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_in_e4m3_are_as_exact_as_one_call_in_fp8(causal: bool, count: int) -> None:
    p = Problem(WORLD, SEQLEN, SEQLEN, "zigzag", right=0 if causal else -1)
    assert pieces_of(p, DEFAULT_QUANTIZATION) == 1
    torch.manual_seed(3)
    whole = [torch.randn(1, SEQLEN, h, 128, device=DEVICE, dtype=torch.bfloat16) for h in (4, 2, 2, 4)]
    parts = [tuple(shard(x, r, WORLD, p.layout) for x in whole[:3]) for r in range(WORLD)]
    chunks = [quantize_chunks(tensors, count, DEFAULT_QUANTIZATION, None) for tensors in parts]
    outs = []
    for rank, (q, _, v) in enumerate(parts):
        results, rows = Results(q, v.shape[3], q.dtype), q.shape[1] // count
        # Its own keys are first.
        for other in ((rank - t) % WORLD for t in range(WORLD)):
            for i, j, piece in visible_chunks(p, rank, other, count):
                keys = travelling(chunks[other][j], piece.keys.stop)
                arrived = keys if other == rank else unpacked(packed(keys), keys)
                mixed = with_keys(chunks[rank][i], arrived, piece)
                options = piece.is_causal, True
                found = flash_attn_quantized_func(mixed, 128**-0.5, *options, exact_lse=False)
                results.merge()
                results.put(Span(i * rows + piece.rows.start, i * rows + piece.rows.stop), *found)
        outs.append(results.finish().out.float())
    got = unshard(torch.cat(outs, 1), WORLD, p.layout)
    wanted = exact(p, whole, 0.0)[0]
    alone = flash_attn_fp8_func(*whole[:3], causal=causal)
    error, error_of_one = ((x.double() - wanted).norm() for x in (got, alone))
    assert error <= 1.2 * error_of_one
