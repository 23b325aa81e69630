"""torch's fused attention of one device, forward and backward, with the log-sum-exp.

``scaled_dot_product_attention`` does not return the LSE. The operators beneath it do, and take it back for the
gradient, so that what is not in their own sum, a sink or other keys, counts there too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from hopper_attention.sdpa.products import has_tiles
from hopper_attention.sdpa.shares import Rows, share_out

aten = torch.ops.aten

Attend = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, causal, scale) -> (out, lse) of (batch, heads, seqlen, columns); lse is float32 (batch, heads, seqlen)."""

Differentiate = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(dout, q, k, v, out, lse, causal, scale) -> (dq, dk, dv). Both take a mask after these on a CPU, (1 or batch, 1 or
heads, seqlen_q, seqlen_k), which is added to the scores."""

COLUMN_STEP = 8
"""Columns that a head_dim is filled up to a multiple of."""

LSE_ROWS = 256
"""Queries whose scores are in memory at once where the LSE is found beside the output."""


@dataclass(frozen=True)
class Operators:
    """What computes on a device.

    A causal mask is that of as many queries as keys. K and V may have fewer heads than Q; all have as many columns.

    Attributes:
        name: what ``explain`` calls them.
        dtype: what they compute in; None is that of q.
        attend: the forward pass.
        differentiate: the backward pass, or None where the tiled reference does it.
    """

    name: str
    dtype: torch.dtype | None
    attend: Attend
    differentiate: Differentiate | None


def _attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = map(_side_by_side, (q, k, v))
    out, lse = attend(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _differentiate_on_cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, threads = k.shape[1], torch.get_num_threads()

    def backward(rows: Rows, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        (*wide, lse), (k, v) = rows, map(_side_by_side, (k, v))
        dout, q, out = map(_side_by_side, wide)
        differentiate = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = differentiate(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return dq, dk, dv

    rows = dout, q, out, lse
    if mask is not None or q.shape[0] * kv_heads >= threads:
        return backward(rows, k, v, causal)
    whole_k, whole_v = _whole_heads(q, k, v)
    dq, dk, dv = share_out(backward, rows, whole_k, whole_v, causal, threads)
    return dq, _sum_heads(dk, kv_heads), _sum_heads(dv, kv_heads)


def _side_by_side(x: Tensor) -> Tensor:
    """x with the columns of a row side by side, as torch's operators for CPUs take them to be without a look."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _whole_heads(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """K and V with as many heads as Q."""
    group = q.shape[1] // others[0].shape[1]
    return tuple(x if group == 1 else x.repeat_interleave(group, 1) for x in others)


def _sum_heads(x: Tensor, kv_heads: int) -> Tensor:
    """A gradient of ``_whole_heads``, of as many heads as K has."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


def _attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    k, v = _whole_heads(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _differentiate_on_gpu(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k.shape[1]
    k, v = _whole_heads(q, k, v)
    # The state of dropout's generator, which nothing reads without dropout.
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    lengths = None, None, q.shape[2], k.shape[2]
    backward = aten._scaled_dot_product_flash_attention_backward
    dq, dk, dv = backward(dout, q, k, v, out, lse, *lengths, 0.0, causal, state, state[:1], scale=scale)
    return dq, _sum_heads(dk, kv_heads), _sum_heads(dv, kv_heads)


def _attend_anywhere(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """By the public function, and the LSE in plain torch."""
    k, v = _whole_heads(q, k, v)
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    keys = torch.arange(k.shape[2], device=q.device)
    columns = k.mT.float()
    parts = []
    for first in range(0, q.shape[2], LSE_ROWS):
        scores = q[:, :, first : first + LSE_ROWS].float() @ columns * scale
        if causal:
            own = torch.arange(first, first + scores.shape[2], device=q.device)
            scores = scores.masked_fill(keys > own[:, None], -torch.inf)
        parts.append(scores.logsumexp(-1))
    return out, torch.cat(parts, -1)


CPU = Operators("torch's fused attention for CPUs", torch.float32, _attend_on_cpu, _differentiate_on_cpu)
"""In float32: 16 bits are no faster but on few CPUs, and float16 is slower by far in the backward pass on most."""

TILES = Operators("torch's fused attention for CPUs, in bfloat16", None, _attend_on_cpu, None)
"""For the output alone, on CPUs that multiply tiles of bfloat16. Scores and sums are float32, P is rounded, and the
exponentials are such that an LSE is off by up to 1e-4. torch adds up gradients of bfloat16 in bfloat16, so that their
error grows with the length: they are left to ``CPU``."""

FLASH = Operators("torch's FlashAttention-2", None, _attend_on_gpu, _differentiate_on_gpu)
PUBLIC = Operators("torch's scaled_dot_product_attention", None, _attend_anywhere, None)


def operators_for(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, wants_output_alone: bool = False
) -> Operators:
    """What computes these tensors of (batch, heads, seqlen, columns), or their output without LSE and gradients."""
    if q.device.type == "cpu":
        return TILES if wants_output_alone and q.dtype == torch.bfloat16 and has_tiles() else CPU
    if q.device.type != "cuda":
        return PUBLIC
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return FLASH if can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, causal, False)) else PUBLIC
