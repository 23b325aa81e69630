"""What the GPU tests of the backward pass share: the same formula in plain PyTorch, and the budget for error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import device_memory, flash_attn_func
from hopper_attention.checks import FULL_WINDOW
from hopper_attention.reference import attention_naive
from tests.gpu.conftest import Inputs
from tests.python.varlen_cases import Case

SLACK = 1e-4
"""Allowed where the formula in plain PyTorch happens to be exact."""

Gradients = tuple[Tensor, ...]


def poison_work_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let work memory hold NaN before it is given to a call, and 3 where it has counts; in room for pieces of all kinds
    each float32 is NaN."""
    get = device_memory.WorkMemory.get

    def poisoned(memory: Any, device_index: int, pieces: Any) -> Any:
        work = get(memory, device_index, pieces)
        for x in work.tensors:
            x.fill_(math.nan if x.is_floating_point() else 255 if x.dtype == torch.uint8 else 3)
        return work

    monkeypatch.setattr(device_memory.WorkMemory, "get", poisoned)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int] = FULL_WINDOW, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T) v and its LSE in PyTorch, every step in the dtype of the inputs. Rows without keys give 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    left, right = window[0], 0 if causal else window[1]
    level = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    distance = torch.arange(k.shape[2], device=q.device) - level
    hidden = (distance > right) & (right >= 0) | (distance < -left) & (left >= 0)
    if chunk:
        hidden |= level // chunk != torch.arange(k.shape[2], device=q.device) // chunk
    scores = scores.masked_fill(hidden, -math.inf)
    out = torch.softmax(scores, -1).nan_to_num() @ v
    return out.transpose(1, 2), torch.logsumexp(scores, -1)


def gradients_of(attention, inputs, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Gradients:
    """dq, dk and dv of ``attention``, (q, k, v) -> (out, lse), on inputs of ``dtype``."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = attention(*leaves)
    if dlse is None:
        return torch.autograd.grad(out, leaves, dout.to(out.dtype))
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    return torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse.to(lse.dtype)))


def find_gradient_errors(
    inputs,
    ours: Gradients,
    dout: Tensor,
    causal: bool,
    dlse: Tensor | None = None,
    window: tuple[int, int] = FULL_WINDOW,
    chunk: int = 0,
) -> list[str]:
    """What is wrong with dq, dk and dv, against float64.

    The budget: twice the error of the same formula in plain PyTorch at the inputs' dtype, beside the rounding of the
    result, half a unit in its last place.
    """

    def naive(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sides = {"window_left": window[0], "window_right": window[1], "attention_chunk": chunk}
        return attention_naive(q, k, v, causal=causal, **sides)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return plain_attention(q, k, v, causal, window, chunk)

    exact = gradients_of(naive, inputs, dout, dlse, torch.float64)
    torchs = gradients_of(plain, inputs, dout, dlse, inputs.q.dtype)
    wrong = []
    for name, a, b, e in zip(("dq", "dk", "dv"), ours, torchs, exact, strict=True):
        if a.shape != e.shape or a.dtype != inputs.q.dtype:
            return [f"{name} is {tuple(a.shape)}, {a.dtype}"]
        rounding = e.abs() * (torch.finfo(a.dtype).eps / 2)
        error, budget = ((a - e).abs() - rounding).max().item(), 2 * (b - e).abs().max().item() + SLACK
        # "not <=", so that NaN counts as wrong.
        if not error <= budget:
            wrong.append(f"{name}: error {error:.3e}, allowed {budget:.3e}")
    return wrong


def find_packed_errors(
    case: Case,
    leaves: Sequence[Tensor],
    ours: Gradients,
    of_results: tuple[Tensor, Tensor],
    causal: bool,
    window: tuple[int, int] = FULL_WINDOW,
) -> list[Any]:
    """The same of packed sequences: their numbers, and what is wrong with each. ``leaves`` are q, k and v,
    ``of_results`` the gradients of out and lse."""
    (dout, dlse), wrong = of_results, []
    for number, (rows, keys) in enumerate(case.spans()):
        parts = rows, keys, keys
        if rows.start == rows.stop or keys.start == keys.stop:
            if any(bool(x[part].any()) for x, part in zip(ours, parts, strict=True)):
                wrong.append(number)
            continue
        inputs = Inputs(*(x.detach()[None, part] for x, part in zip(leaves, parts, strict=True)))
        own = tuple(x[None, part] for x, part in zip(ours, parts, strict=True))
        found = find_gradient_errors(inputs, own, dout[None, rows], causal, dlse[None, :, rows], window)
        wrong += [(number, found)] if found else []
    of_q, of_k = case.unused()
    if ours[0][of_q].any() or ours[1][of_k].any() or ours[2][of_k].any():
        wrong.append("rows of no sequence have gradients")
    return wrong


def find_errors_of_call(
    inputs, causal: bool, window: tuple[int, int], chunk: int = 0, *, same_bits: bool, **others: Any
) -> list[str]:
    """The same of ``flash_attn_func`` with gradients of out and LSE; with ``same_bits`` they must be those of another
    call too. ``others`` are further arguments."""
    q = inputs.q
    dout = torch.randn(*q.shape, device="cuda").to(q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    options = {"causal": causal, "window_size": window, "attention_chunk": chunk} | others

    def differentiate() -> Gradients:
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        results = flash_attn_func(*leaves, return_attn_probs=True, **options)
        return torch.autograd.grad(results, leaves, (dout, dlse))

    ours = differentiate()
    wrong = find_gradient_errors(inputs, ours, dout, causal, dlse, window, chunk)
    if same_bits and not all(map(torch.equal, ours, differentiate())):
        wrong.append("other bits the second time")
    return wrong
