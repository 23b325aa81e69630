"""Drop-in for FlashAttention-3's module of the same name: ``import hopper_attention.flash_attn_interface``.

Its functions take FlashAttention-3's arguments in their order.
"""

from __future__ import annotations

from hopper_attention.api import flash_attn_func
from hopper_attention.combine import flash_attn_combine
from hopper_attention.kvcache import flash_attn_with_kvcache
from hopper_attention.kvcache_schedule import get_scheduler_metadata
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
