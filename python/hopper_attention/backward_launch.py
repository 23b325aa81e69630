"""Calls the Hopper backward kernel: what it is given, and what is made of what it leaves.

``ops.backward`` does not call it yet: only tests and the sanitizer cases run it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hopper.backward.config import BackwardConfig, BackwardStep, select_backward_config
from hopper_attention import compile_cache
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.layout import make_addressable


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention on a Hopper GPU, on torch's current stream.

    Args:
        dout, out: (batch, seqlen_q, heads, head_dim_v).
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16.
        k, v: (batch, seqlen_k, kv_heads, head_dim) and (..., head_dim_v).
        lse: float32 (batch, heads, seqlen_q), natural log; -inf for rows without keys.

    Returns:
        dq, dk, dv with the shapes and dtype of q, k, v, contiguous.

    Raises:
        ValueError: a head dimension is larger than the kernel takes.
    """
    config = select_backward_config(DTYPE_NAMES[q.dtype], q.shape[3], v.shape[3], causal)
    prepare, finish = (BackwardStep(step, config) for step in ("prepare", "finish"))
    rows = torch.empty((2, *lse_shape(config, q)), dtype=torch.float32, device=q.device)
    sums = zero_dq(config, q)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dout, out, q, k, v = (make_addressable(x) for x in (dout, out, q, k, v))
    with torch.cuda.device(q.device):
        compile_cache.get_backward(prepare)(out, dout, lse.contiguous(), rows[0], rows[1])
        compile_cache.get_backward(config)(q, k, v, dout, rows[0], rows[1], sums, dk, dv, softmax_scale)
        compile_cache.get_backward(finish)(sums, dq, softmax_scale)
    return dq, dk, dv


def lse_shape(config: BackwardConfig, q: Tensor) -> tuple[int, int, int]:
    """(batch, heads, seqlen_q rounded up to whole query tiles)."""
    batch, seqlen, heads, _ = q.shape
    return batch, heads, -(-seqlen // config.tile_m) * config.tile_m


def zero_dq(config: BackwardConfig, q: Tensor) -> Tensor:
    """The float32 sums of dQ, (batch, heads, query tiles, warpgroups, words)."""
    batch, seqlen, heads, _ = q.shape
    tiles = -(-seqlen // config.tile_m)
    shape = (batch, heads, tiles, config.consumers, config.dq_words)
    return torch.zeros(shape, dtype=torch.float32, device=q.device)
