"""Attention in plain PyTorch on any device: the float64 oracle, and emulators of the kernels."""

from hopper_attention.reference.dropout import dropout_mask
from hopper_attention.reference.fp8 import attention_fp8_per_tensor, attention_tiled_fp8
from hopper_attention.reference.naive import attention_naive, attention_standard
from hopper_attention.reference.tiled import attention_tiled, tiled_forward
from hopper_attention.reference.tiled_backward import tiled_backward
from hopper_attention.reference.varlen import varlen_backward, varlen_forward

__all__ = [
    "attention_fp8_per_tensor",
    "attention_naive",
    "attention_standard",
    "attention_tiled",
    "attention_tiled_fp8",
    "dropout_mask",
    "tiled_backward",
    "tiled_forward",
    "varlen_backward",
    "varlen_forward",
]
