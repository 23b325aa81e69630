"""Slopes, sinks and masks of dropout of the features' benchmark: their values, and what each peer gets for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hopper_attention.experiments.features.spec import Workload


def slopes_of(workload: Workload, device: str) -> Tensor:
    """float32 (heads,): 2^(-8 / heads), its square, and so on, as ALiBi has them."""
    numbers = torch.arange(1, workload.heads + 1, device=device)
    return torch.exp2(-8.0 / workload.heads * numbers)


def sinks_of(workload: Workload, device: str) -> Tensor:
    """(heads,) of the workload's dtype: from a sink that hardly shows to one that outweighs a few keys."""
    return torch.linspace(-2, 4, workload.heads, device=device).to(getattr(torch, workload.dtype))


def philox_of(device: str) -> Tensor:
    """int64 (2,): what our mask of dropout is made of, so that it can be checked."""
    return torch.tensor([0x2545F4914F6CDD1D, 0x5851F42D4C957F2D], device=device)


def our_terms(workload: Workload, device: str) -> dict[str, Any]:
    """Arguments of our functions, those alone that the workload has."""
    terms: dict[str, Any] = {"softcap": workload.softcap} if workload.softcap else {}
    terms |= {"alibi_slopes": slopes_of(workload, device)} if workload.alibi else {}
    terms |= {"dropout_p": workload.dropout} if workload.dropout else {}
    return terms | ({"sinks": sinks_of(workload, device)} if workload.sinks else {})


def fa3_terms(workload: Workload, device: str) -> dict[str, Any]:
    """Arguments of FlashAttention-3's operator.

    Raises:
        NotImplementedError: it has no ALiBi, and no dropout.
    """
    if workload.alibi:
        raise NotImplementedError("FlashAttention-3 has no ALiBi")
    if workload.dropout:
        raise NotImplementedError("FlashAttention-3 has no dropout")
    terms: dict[str, Any] = {"softcap": workload.softcap} if workload.softcap else {}
    return terms | ({"sinks": sinks_of(workload, device)} if workload.sinks else {})


def fa4_terms(workload: Workload, device: str) -> dict[str, Any]:
    """Arguments of FlashAttention-4's function, which has ALiBi as a function of the user's.

    Raises:
        NotImplementedError: it has no dropout.
    """
    if workload.dropout:
        raise NotImplementedError("FlashAttention-4 has no dropout")
    terms: dict[str, Any] = {"softcap": workload.softcap} if workload.softcap else {}
    terms |= {"score_mod": fa4_alibi(workload.heads)} if workload.alibi else {}
    return terms | ({"learnable_sink": sinks_of(workload, device)} if workload.sinks else {})


@lru_cache(maxsize=4)
def fa4_alibi(heads: int) -> Callable[..., Any]:
    """ALiBi in FlashAttention-4's language. The slope is computed: an index into a tensor would be checked for each
    score, which costs more."""
    math = importlib.import_module("cutlass.cute").math

    def alibi(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, **rest: Any) -> Any:
        slope = math.exp2((head + 1).to(score.dtype) * (-8.0 / heads), fastmath=True)
        return score + slope * (kv_idx - q_idx).to(score.dtype)

    return alibi


def flex_score(workload: Workload, device: str) -> Callable[..., Tensor] | None:
    """FlexAttention's ``score_mod``, or None where scores stay as they are.

    Raises:
        NotImplementedError: it has no sinks, and no dropout.
    """
    if workload.sinks:
        raise NotImplementedError("FlexAttention has no sinks")
    if workload.dropout:
        raise NotImplementedError("FlexAttention has no dropout")
    if not workload.changes_scores:
        return None
    cap, slopes = workload.softcap, slopes_of(workload, device) * workload.alibi

    def change(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        return score - slopes[head] * (query - key).abs()

    return change
