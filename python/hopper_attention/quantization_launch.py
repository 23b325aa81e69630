"""Calls the fused quantizer, ``hopper.quantize``: where it runs, what it is given, what it fills."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.problem import MAX_SEQLEN
from hopper.quantize.config import CHUNK, HEAD_DIM_STEP, QuantizeConfig, validate_quantize_config
from hopper_attention import compile_cache
from hopper_attention.backends import Target, target_of, why_not_hopper
from hopper_attention.checks import DTYPE_NAMES, TensorSpec
from hopper_attention.launch import is_capturing
from hopper_attention.layout import TMA_BYTES, contiguous_copy, make_addressable
from hopper_attention.quantized import E4M3, Fp8Quantization, Means, QuantizedTensor, TransposedV, padded_keys
from hopper_attention.rotation import rotation_signs

MAX_ITEMS = 2**30
"""Numbers of what a CTA takes at once are 32 bits wide, with room for a grid past the end."""


def why_not_fused(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, quantization: Fp8Quantization, target: Target
) -> str:
    """What keeps the fused quantizer from doing a problem on ``target``; empty if nothing does."""
    blocked = why_not_hopper(target)
    if blocked:
        return blocked
    c = quantization
    if q.dtype not in DTYPE_NAMES:
        return f"the fused kernel reads float16 and bfloat16, not {q.dtype}"
    if c.granularity != "block":
        return f"granularity is {c.granularity!r}, and the fused kernel finds the scales of blocks"
    head_dim, head_dim_v = k.shape[3], v.shape[3]
    if head_dim % HEAD_DIM_STEP or head_dim_v % HEAD_DIM_STEP:
        return f"head_dim {head_dim} and head_dim_v {head_dim_v} must be multiples of {HEAD_DIM_STEP}"
    if 0 in (*q.shape, *k.shape):
        return "the problem is empty"
    if max(q.shape[1], k.shape[1]) > MAX_SEQLEN:
        return f"seqlen_q {q.shape[1]} and seqlen_k {k.shape[1]} may be at most {MAX_SEQLEN}"
    try:
        config = select_quantize_config(q.dtype, head_dim, head_dim_v, k.shape[1], c)
    except ValueError as error:
        return f"the fused kernel cannot be built: {error}"
    items = q.shape[0] * q.shape[2] * -(-q.shape[1] // config.q.rows)
    items += 2 * k.shape[0] * k.shape[2] * -(-k.shape[1] // config.k.rows)
    return f"{items} groups of rows are more than {MAX_ITEMS}" if items > MAX_ITEMS else ""


def why_not_fused_here(q: Tensor, k: Tensor, v: Tensor, quantization: Fp8Quantization) -> str:
    """``why_not_fused`` on the device of q, and for tensors that nothing traces or transforms."""
    if _is_traced():
        return "the call is traced or transformed, which the fused kernel cannot be"
    specs = (TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v))
    return why_not_fused(*specs, quantization, target_of(q.device))


def _is_traced() -> bool:
    """Whether torch compiles the call, or runs it on tensors that stand for others."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


@lru_cache(maxsize=1024)
def select_quantize_config(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, seqlen_k: int, quantization: Fp8Quantization
) -> QuantizeConfig:
    """The config of the fused quantizer.

    Raises:
        ValueError: there is none.
    """
    config = QuantizeConfig(
        dtype=DTYPE_NAMES[dtype],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        block_q=quantization.block_q,
        block_k=quantization.keys_per_block(head_dim, head_dim_v, seqlen_k),
        rotate=quantization.rotate,
        rotate_v=quantization.rotate_v,
        smooth_k=quantization.smooth_k,
        smooth_v=quantization.smooth_v,
    )
    validate_quantize_config(config)
    return config


class Outputs(NamedTuple):
    """What the kernel fills, contiguous: e4m3 q8 (b, sq, h, d), k8 (b, sk, hk, d) and vt8 (b, hk, dv, keys), float32
    scales (b, heads, blocks), of Q (b, h, sq) where each row has one."""

    q8: Tensor
    k8: Tensor
    vt8: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


def empty_outputs(config: QuantizeConfig, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    batch, seqlen_k, kv_heads, head_dim_v = v.shape
    blocks_q, blocks_k = -(-q.shape[1] // config.block_q), -(-seqlen_k // config.block_k)
    transposed = batch, kv_heads, head_dim_v, padded_keys(seqlen_k)
    data = (torch.empty(shape, dtype=E4M3, device=q.device) for shape in (q.shape, k.shape, transposed))
    scales = (
        torch.empty(shape, dtype=torch.float32, device=q.device)
        for shape in ((batch, q.shape[2], blocks_q), *2 * ((batch, kv_heads, blocks_k),))
    )
    return Outputs(*data, *scales)


def quantize_fused(
    q: Tensor, k: Tensor, v: Tensor, quantization: Fp8Quantization, means: Means
) -> tuple[QuantizedTensor, QuantizedTensor, TransposedV]:
    """Quantize on a Hopper GPU, on torch's current stream. The problem passes ``why_not_fused``.

    Of ``means``, contiguous, only those that ``quantization`` asks for are read. The first call with a head_dim and
    seed copies the signs of the rotation to the GPU.

    Raises:
        RuntimeError: that first call is made while a CUDA graph is captured.
    """
    config = select_quantize_config(q.dtype, q.shape[3], v.shape[3], k.shape[1], quantization)
    outputs = empty_outputs(config, q, k, v)
    fill(outputs, config, quantization.seed, q, k, v, means)
    largest_q, largest_k = config.largest_codes
    return (
        QuantizedTensor(outputs.q8, outputs.q_scale, config.block_q, largest_q),
        QuantizedTensor(outputs.k8, outputs.k_scale, config.block_k, largest_k),
        TransposedV(outputs.vt8, outputs.v_scale, config.block_k, k.shape[1]),
    )


def fill(
    outputs: Outputs, config: QuantizeConfig, seed: int, q: Tensor, k: Tensor, v: Tensor, means: Means
) -> None:
    """Launch the kernel of ``config`` on ``outputs``."""
    device = q.device
    index = torch.cuda.current_device() if device.index is None else device.index
    unused = no_words(device)
    kernel = compile_cache.get_quantize(config)
    with torch.cuda.device(index):
        kernel(
            *map(_addressable, (q, k, v)),
            *outputs,
            sign_masks(config.head_dim, seed, device) if config.rotate else unused,
            sign_masks(config.head_dim_v, seed, device) if config.rotate_v else unused,
            means.k if config.smooth_k else unused,
            means.v if config.smooth_v else unused,
            torch.cuda.get_device_properties(index).multi_processor_count * config.ctas_per_sm,
        )


def _addressable(x: Tensor) -> Tensor:
    """x with rows of neighbouring elements that begin at multiples of 16 bytes; copied if it has none."""
    *strides, last = x.stride()
    if last == 1 and x.data_ptr() % TMA_BYTES == 0 and all(stride % CHUNK == 0 for stride in strides):
        return x
    return make_addressable(x if last == 1 else contiguous_copy(x))


@lru_cache(maxsize=64)
def sign_masks(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """int32 (head_dim / 2,): what XOR with a pair of 16-bit columns gives them the signs of the rotation.

    They are on the GPU when this returns, so that every stream may read them.

    Raises:
        RuntimeError: they would have to be copied while a CUDA graph is captured, which CUDA does not allow.
    """
    if is_capturing(device):
        raise RuntimeError(
            f"a CUDA graph is being captured, and the signs of the rotation for head_dim {head_dim} and seed {seed} "
            f"are not on {device} yet: quantize once with them before the capture"
        )
    flips = (rotation_signs(head_dim, seed) < 0).long()
    with torch.inference_mode(False):
        return (flips[0::2] * 2**15 - flips[1::2] * 2**31).to(torch.int32).to(device)


@lru_cache(maxsize=64)
def no_words(device: torch.device) -> Tensor:
    """Stands for an argument that a config does not use."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.int32, device=device)
