"""FlashAttention-3 for NVIDIA Hopper GPUs in the CuTe Python DSL, used from PyTorch.

``flash_attn_func`` and its packed forms compute attention; ``explain`` says what a call would run and
why, and ``describe_machine`` what this machine can run. Importing this package does not import the DSL.
"""

from hopper_attention.rooms import check_rooms

check_rooms()

# A foreign `hopper` must be found out before ours is imported.
from hopper_attention import mods
from hopper_attention.api import flash_attn_func
from hopper_attention.combine import flash_attn_combine
from hopper_attention.dispatch import describe_machine, explain
from hopper_attention.fp8 import flash_attn_fp8_func, flash_attn_quantized_func
from hopper_attention.fp8_plan import explain_fp8
from hopper_attention.kvcache import flash_attn_with_kvcache
from hopper_attention.kvcache_plan import explain_kvcache
from hopper_attention.kvcache_schedule import get_scheduler_metadata
from hopper_attention.packed import flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.rotary import apply_rotary
from hopper_attention.varlen import flash_attn_varlen_func
from hopper_attention.varlen_packed import (
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from hopper_attention.varlen_plan import explain_varlen

__all__ = [
    "Fp8Quantization",
    "apply_rotary",
    "describe_machine",
    "explain",
    "explain_fp8",
    "explain_kvcache",
    "explain_varlen",
    "flash_attn_combine",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_quantized_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "mods",
    "quantize_qkv",
]
