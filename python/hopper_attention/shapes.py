"""The sizes of an attention problem, read off its tensors and checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hopper_attention.checks import TensorSpec, check_heads


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one dense attention problem; ``group`` query heads share a key/value head."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def attention_shape(
    q: torch.Tensor | TensorSpec, k: torch.Tensor | TensorSpec, v: torch.Tensor | TensorSpec
) -> AttentionShape:
    """The sizes of q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv).

    Raises:
        ValueError: the shapes do not fit together; names the argument, what it was and what is allowed.
        TypeError: q, k and v differ in dtype.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if len(tensor.shape) != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, allowed: (batch, seqlen, heads, head_dim)"
            )
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}, allowed: the dtype of q, {q.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, allowed: the device of q, {q.device}")
    return fit_shapes(q.shape, k.shape, v.shape)


def fit_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> AttentionShape:
    """``attention_shape`` of shapes with four dimensions each.

    Raises:
        ValueError: they do not fit together.
    """
    batch, seqlen_q, heads, head_dim = q
    _, seqlen_k, kv_heads, _ = k
    head_dim_v = v[3]
    check_heads(heads, kv_heads)
    if k != (batch, seqlen_k, kv_heads, head_dim):
        raise ValueError(
            f"k has shape {tuple(k)}, allowed with q {tuple(q)}: ({batch}, seqlen_k, kv_heads, {head_dim})"
        )
    if v != (batch, seqlen_k, kv_heads, head_dim_v):
        raise ValueError(
            f"v has shape {tuple(v)}, allowed with k {tuple(k)}: ({batch}, {seqlen_k}, {kv_heads}, head_dim_v)"
        )
    if head_dim == 0 or head_dim_v == 0:
        raise ValueError(f"head_dim is {head_dim} and head_dim_v is {head_dim_v}, allowed: 1 or more")
    return AttentionShape(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v)
