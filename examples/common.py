"""What the examples share: inputs, and the check against plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hopper_attention import flash_attn_func

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(seqlen: int = 200, heads: int = 4, head_dim: int = 64, batch: int = 2) -> list[Tensor]:
    """q, k and v (batch, seqlen, heads, head_dim), bfloat16, which require gradients."""
    torch.manual_seed(0)
    shape = batch, seqlen, heads, head_dim
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention with all scores (batch, heads, seqlen, seqlen) in memory, float32; ``change`` is done to them."""
    queries, keys, values = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = change(queries @ keys.mT / math.sqrt(q.shape[3]))
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ values).transpose(1, 2)


def check(name: str, change: Callable[[Tensor], Tensor], seqlen: int = 200, **functions: Any) -> None:
    """Print how far flash_attn_func with these functions is from plain PyTorch, forward and backward."""
    q, k, v = inputs(seqlen)
    out = flash_attn_func(q, k, v, **functions)
    wanted = plain_attention(q, k, v, change)
    dout = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), dout)
    theirs = torch.autograd.grad(wanted, (q, k, v), dout.float())
    pairs = [(out, wanted), *zip(ours, theirs, strict=True)]
    errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs]
    print(name, *(f"{x} {e:.1e}" for x, e in zip(("out", "dq", "dk", "dv"), errors, strict=True)))
    assert max(errors) < 0.02, f"{name} is off by {errors}"
