"""Attention of Hugging Face diffusers' models by name: importing this registers "hopper_attention" and its FP8 form.

``model.set_attention_backend("hopper_attention_fp8")`` then has a model's attention on these kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hopper_attention.integrations.needs import need

OLDEST = (0, 35)
"""Of the versions of diffusers: earlier ones have no attention by name."""

# What is missing or too old must be said before names are imported from it.
need("diffusers", OLDEST)

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from hopper_attention.api import flash_attn_func
from hopper_attention.fp8 import flash_attn_fp8_func
from hopper_attention.functions import MaskMod, ScoreMod
from hopper_attention.notices import warn_once

NAMES = ("hopper_attention", "hopper_attention_fp8")
"""What ``set_attention_backend`` takes: 16 bits, and FP8 from 16-bit tensors."""

FP8_LACKS = (
    "attention of diffusers in 16 bits, as FP8 has no {}: leave it out for FP8, or ask for 'hopper_attention'"
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """diffusers' attention function on ``flash_attn_func``.

    Args:
        query: (batch, seqlen_q, heads, head_dim), float16 or bfloat16; key and value (batch, seqlen_k, kv_heads, ...).
        attn_mask: as of ``scaled_dot_product_attention``, boolean or added to the scores, or (batch, seqlen_k) of keys
            that all queries of a sample see. The kernels read it where it lies.
        dropout_p, scale: as there.
        is_causal: query i sees the keys j <= i.
        enable_gqa: fewer heads of key and value than of query are taken either way.

    Returns:
        (batch, seqlen_q, heads, head_dim_v).

    Raises:
        NotImplementedError: the LSE or context parallelism is asked for.
        ValueError, TypeError: a shape or dtype is not allowed; float32 is none.
    """
    check_options(return_lse, _parallel_config)
    score_mod, mask_mod = functions_of(
        attn_mask, is_causal and query.shape[1] != key.shape[1], query.shape[0]
    )
    causal = is_causal and query.shape[1] == key.shape[1]
    return flash_attn_func(
        query, key, value, scale, causal, score_mod=score_mod, mask_mod=mask_mod, dropout_p=dropout_p
    )


def attend_fp8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """:func:`attend` on ``flash_attn_fp8_func``. With a mask or dropout it is in 16 bits, and says so once."""
    lacking = "attn_mask" if attn_mask is not None else "dropout" if dropout_p else ""
    if is_causal and query.shape[1] != key.shape[1]:
        lacking = "causal mask that is aligned top-left"
    if lacking:
        warn_once(FP8_LACKS.format(lacking))
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, _parallel_config
        return attend(query, key, value, *options)
    check_options(return_lse, _parallel_config)
    return flash_attn_fp8_func(query, key, value, scale, is_causal)


def check_options(return_lse: bool, parallel_config: Any) -> None:
    """Raise NotImplementedError for what diffusers' own backends alone do."""
    if return_lse:
        raise NotImplementedError(
            "return_lse is True, allowed: False; use flash_attn_func(..., return_attn_probs=True)"
        )
    if parallel_config is not None:
        raise NotImplementedError("context parallelism is not implemented; use the backend 'native'")


def functions_of(
    attn_mask: Tensor | None, is_top_left: bool, batch: int
) -> tuple[ScoreMod | None, MaskMod | None]:
    """The score_mod and mask_mod that say what a mask says. ``is_top_left``: query i sees no key behind key i."""
    if attn_mask is None:
        return None, _is_at_or_before if is_top_left else None
    if attn_mask.dim() == 2 and attn_mask.shape[0] == batch:
        attn_mask = attn_mask[:, None, None]
    if attn_mask.dim() == 3:
        attn_mask = attn_mask[:, None]
    whole = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    # An axis of one element is the same for all indices, and a tensor has at least one axis.
    kept = [axis for axis, size in enumerate(whole.shape) if size > 1]
    read = whole.squeeze() if kept else whole.flatten()

    def of(*indices: Any) -> Any:
        """The element of the mask for (b, h, q_idx, kv_idx)."""
        return read[tuple(indices[axis] for axis in kept) if kept else 0]

    if whole.dtype != torch.bool:
        return lambda score, *indices: score + of(*indices), _is_at_or_before if is_top_left else None
    if is_top_left:
        return None, lambda *indices: _is_at_or_before(*indices) & of(*indices)
    return None, lambda *indices: of(*indices)


def _is_at_or_before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def register() -> None:
    """Add the names to diffusers' registry. Importing this module does it; to do so again changes nothing."""
    for name, function in zip(NAMES, (attend, attend_fp8), strict=True):
        _AttentionBackendRegistry.register(_named(name))(function)


def _named(value: str) -> AttentionBackendName:
    """A name as diffusers knows them, members of an enumeration, which takes no new ones by itself."""
    names = AttentionBackendName
    known = names._value2member_map_.get(value)
    if known is not None:
        return names(value)
    member = str.__new__(names, value)
    member._name_, member._value_ = value.upper(), value
    setattr(names, member._name_, member)
    names._member_map_[member._name_] = names._value2member_map_[value] = member
    names._member_names_.append(member._name_)
    return member


register()
