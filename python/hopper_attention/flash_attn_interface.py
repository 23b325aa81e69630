"""Drop-in for FlashAttention-3's module of the same name: ``import hopper_attention.flash_attn_interface``.

The functions that exist take its arguments in its order. Those that do not exist yet raise
NotImplementedError.
"""

from __future__ import annotations

from typing import Any, NoReturn

from hopper_attention.api import flash_attn_func
from hopper_attention.packed import flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from hopper_attention.varlen import flash_attn_varlen_func
from hopper_attention.varlen_packed import (
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> NoReturn:
    """Decoding with a key/value cache: not implemented yet."""
    instead = "flash_attn_func on the filled part of the cache, k_cache[:, :length]"
    raise _missing("flash_attn_with_kvcache", "attention on a key/value cache", instead)


def flash_attn_combine(*args: Any, **kwargs: Any) -> NoReturn:
    """Merging of partial results by their LSE: not implemented yet."""
    instead = "the LSEs of flash_attn_func(..., return_attn_probs=True) to weigh the parts"
    raise _missing("flash_attn_combine", "merging split results", instead)


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> NoReturn:
    """Precomputed schedules for decoding: not implemented yet."""
    instead = "flash_attn_func, which needs none"
    raise _missing("get_scheduler_metadata", "precomputed scheduling", instead)


def _missing(name: str, feature: str, instead: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: {feature} is not implemented yet, neither by the 'hopper' backend nor by 'reference'; "
        f"use {instead}"
    )
