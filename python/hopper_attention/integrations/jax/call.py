"""What of a call of attention is not an array: fixed when JAX traces it, and a part of the keys of its caches."""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from hopper_attention.masks import MaskSpec

Result = tuple[Array, Array]
"""out (batch, seqlen_q, heads, head_dim_v) and lse float32 (batch, heads, seqlen_q)."""

Gradients = tuple[Array, Array, Array]
"""dq, dk and dv, of the shapes and dtype of q, k and v."""


@dataclass(frozen=True)
class Call:
    """
    Attributes:
        mask: which keys a query sees.
        softmax_scale: factor of the scores.
        softcap: c of c tanh(score / c); 0 is none.
        returns_lse: the caller wants the LSE, so that it may have a gradient.
        deterministic: gradients are to have the same bits in every run.
        backend: "hopper", "ampere", "reference", or None to have one chosen.
    """

    mask: MaskSpec
    softmax_scale: float
    softcap: float
    returns_lse: bool
    deterministic: bool
    backend: str | None
