"""The public functions for Q, K and V in one tensor, or K and V in one: FlashAttention-3's names and argument order."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from hopper_attention import checks
from hopper_attention.api import Window, flash_attn_func
from hopper_attention.checks import FULL_WINDOW, Result


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    num_heads_q: int | None = ...,
    sm_margin: int = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    num_heads_q: int | None = ...,
    sm_margin: int = ...,
    *,
    return_attn_probs: Literal[True],
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    num_heads_q: int | None = ...,
    sm_margin: int = ...,
    return_attn_probs: bool = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    two_level_accumulation: bool = False,
    exact_lse: bool | None = None,
    backend: str | None = None,
) -> Result:
    """:func:`flash_attn_func` on one tensor that holds Q, K and V; nothing is copied to take them apart.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim); or, with ``num_heads_q``, (batch, seqlen, heads,
            head_dim) whose heads are those of Q, then K's, then as many of V.
        num_heads_q: query heads in a qkv of four dimensions.
        others: as for :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`. The gradient of qkv comes in one tensor.

    Raises:
        ValueError, TypeError, NotImplementedError: as there, and for a qkv that is none of the above.
    """
    q, k, v = _unpack_qkv(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        two_level_accumulation=two_level_accumulation,
        exact_lse=exact_lse,
        backend=backend,
    )


@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    *,
    return_attn_probs: Literal[True],
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    softmax_scale: float | None = ...,
    causal: bool | int = ...,
    q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ...,
    window_size: Window = ...,
    attention_chunk: int = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    sm_margin: int = ...,
    return_attn_probs: bool = ...,
    *,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    two_level_accumulation: bool = ...,
    exact_lse: bool | None = ...,
    backend: str | None = ...,
) -> Result: ...


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    two_level_accumulation: bool = False,
    exact_lse: bool | None = None,
    backend: str | None = None,
) -> Result:
    """:func:`flash_attn_func` with K and V in one tensor; nothing is copied to take them apart.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, kv_heads, head_dim).
        others: as for :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`. The gradient of kv comes in one tensor.

    Raises:
        ValueError, TypeError, NotImplementedError: as there, and for a kv that is none of the above.
    """
    checks.check_are_tensors(q=q, kv=kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv has shape {tuple(kv.shape)}, allowed: (batch, seqlen_k, 2, kv_heads, head_dim)")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        two_level_accumulation=two_level_accumulation,
        exact_lse=exact_lse,
        backend=backend,
    )


def _unpack_qkv(qkv: Any, num_heads_q: int | None) -> tuple[Tensor, ...]:
    checks.check_are_tensors(qkv=qkv)
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)}, allowed: (batch, seqlen, 3, heads, head_dim), or four "
                "dimensions and num_heads_q"
            )
        return qkv.unbind(2)
    if qkv.dim() != 4:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}, allowed with num_heads_q: (batch, seqlen, heads, head_dim)"
        )
    return split_heads(qkv, num_heads_q, 2)


def split_heads(qkv: Tensor, num_heads_q: int, dim: int) -> tuple[Tensor, ...]:
    """q, k and v of a tensor whose dimension ``dim`` has the heads of all three."""
    num_heads_q = checks.python_int(num_heads_q)
    if isinstance(num_heads_q, bool) or not isinstance(num_heads_q, (int, torch.SymInt)):
        raise TypeError(f"num_heads_q is a {type(num_heads_q).__name__}, {num_heads_q!r}, allowed: an int")
    heads = qkv.shape[dim]
    both_kv = heads - num_heads_q
    if not 0 < num_heads_q < heads or both_kv % 2:
        raise ValueError(
            f"num_heads_q is {num_heads_q}, allowed with the {heads} heads of qkv: above 0, and "
            "leaving as many heads for K as for V"
        )
    return qkv.split([num_heads_q, both_kv // 2, both_kv // 2], dim=dim)
