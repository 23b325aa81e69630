"""Calls the fused quantizer, ``hopper.quantize``: where it runs, what it is given, what it fills."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.problem import MAX_SEQLEN
from hopper.quantize.config import CHUNK, HEAD_DIM_STEP, QuantizeConfig, validate_quantize_config
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel, kept_argument
from hopper_attention.backends import Target, target_of, why_not_hopper
from hopper_attention.checks import DTYPE_NAMES, TensorSpec
from hopper_attention.device_memory import Piece, Pieces, make_apart
from hopper_attention.launch import value_mean
from hopper_attention.launch.base import (
    REMEMBERED_CALLS,
    REMEMBERED_LAUNCHERS,
    Launcher,
    count_ctas,
    index_of,
)
from hopper_attention.layout import TMA_BYTES, contiguous_copy, make_addressable, new_layout
from hopper_attention.problem import longest_alike
from hopper_attention.quantized import (
    E4M3,
    Fp8Quantization,
    Means,
    QuantizedTensor,
    TransposedV,
    padded_keys,
)
from hopper_attention.rotation import sign_masks

MAX_ITEMS = 2**30
"""Numbers of what a CTA takes at once are 32 bits wide, with room for a grid past the end."""


def why_not_fused(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, quantization: Fp8Quantization, target: Target
) -> str:
    """What keeps the fused quantizer from doing a problem on ``target``; empty if nothing does."""
    options = q.dtype, k.shape[3], v.shape[3], longest_alike(k.shape[1]), quantization
    reason = why_not_of_this_kind(*options, target)
    if not reason and 0 in (*q.shape, *k.shape):
        return "the problem is empty"
    reason = reason or _why_too_large(q.shape, k.shape, _rows(*options))
    if not reason and quantization.smooth_v:
        return value_mean.why_too_many(v.shape[0], *v.shape[2:])
    return reason


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def why_not_of_this_kind(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    longest_k: int,
    quantization: Fp8Quantization,
    target: Target,
) -> str:
    """``why_not_fused`` of problems of any sizes."""
    blocked = why_not_hopper(target)
    if blocked:
        return blocked
    if dtype not in DTYPE_NAMES:
        return f"the fused kernel reads float16 and bfloat16, not {dtype}"
    granularity = quantization.granularity
    if granularity != "block":
        return f"granularity is {granularity!r}, and the fused kernel finds the scales of blocks"
    if head_dim % HEAD_DIM_STEP or head_dim_v % HEAD_DIM_STEP:
        return f"head_dim {head_dim} and head_dim_v {head_dim_v} must be multiples of {HEAD_DIM_STEP} in FP8"
    try:
        select_quantize_config(dtype, head_dim, head_dim_v, longest_k, quantization)
    except ValueError as error:
        return f"the fused kernel cannot be built: {error}"
    return ""


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _rows(
    dtype: torch.dtype, head_dim: int, head_dim_v: int, longest_k: int, quantization: Fp8Quantization
) -> tuple[int, int]:
    """Rows of Q and of K that a CTA takes at once."""
    config = select_quantize_config(dtype, head_dim, head_dim_v, longest_k, quantization)
    return config.q.rows, config.k.rows


def _why_too_large(q_shape: tuple[int, ...], k_shape: tuple[int, ...], rows: tuple[int, int]) -> str:
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = q_shape, k_shape
    if max(seqlen_q, seqlen_k) > MAX_SEQLEN:
        return f"seqlen_q {seqlen_q} and seqlen_k {seqlen_k} may be at most {MAX_SEQLEN}"
    items = batch * heads * -(-seqlen_q // rows[0]) + 2 * batch * kv_heads * -(-seqlen_k // rows[1])
    return f"{items} groups of rows are more than {MAX_ITEMS}" if items > MAX_ITEMS else ""


def why_not_fused_here(q: Tensor, k: Tensor, v: Tensor, quantization: Fp8Quantization) -> str:
    """``why_not_fused`` on the device of q."""
    return _why_not_of_these(q.shape, k.shape, v.shape, q.dtype, q.device, quantization)


@lru_cache(maxsize=REMEMBERED_CALLS)
def _why_not_of_these(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Fp8Quantization,
) -> str:
    q, k, v = (TensorSpec(shape, (), dtype, device) for shape in (q_shape, k_shape, v_shape))
    return why_not_fused(q, k, v, quantization, known_target(device))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def known_target(device: torch.device) -> Target:
    """``target_of``, remembered."""
    return target_of(device)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def select_quantize_config(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    seqlen_k: int,
    quantization: Fp8Quantization,
    wide_codes: bool = False,
    mean_blocks: int = 0,
) -> QuantizeConfig:
    """The config of the fused quantizer; ``wide_codes`` and ``mean_blocks`` are those of a ``QuantizeConfig``.

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
        wide_codes=wide_codes,
        mean_blocks=mean_blocks,
    )
    validate_quantize_config(config)
    return config


class Outputs(NamedTuple):
    """What the kernel fills, contiguous: q8 (b, sq, h, d) and k8 (b, sk, hk, d) of the config's ``code_dtype``, e4m3
    vt8 (b, hk, dv, keys), float32 scales (b, heads, blocks), of Q (b, h, sq) where each row has one."""

    q8: Tensor
    k8: Tensor
    vt8: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


class Extras(NamedTuple):
    """What the kernel takes behind its outputs: signs of the rotations, and means to subtract. What its config has no
    use for is int32 without elements."""

    signs: Any
    signs_v: Any
    mean_k: Any
    mean_v: Any

    def kept(self) -> Extras:
        """The same, of tensors that are kept."""
        return Extras(*map(kept_argument, self))


def output_pieces(
    block_q: int,
    block_k: int,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    codes: torch.dtype = E4M3,
) -> Pieces:
    """What ``Outputs`` are, in their order, where so many rows of Q and of K share a scale; ``codes`` are stored of Q
    and K."""
    batch, seqlen_k, kv_heads, head_dim_v = v_shape
    _, seqlen_q, heads, _ = q_shape
    scales_k = Piece((batch, kv_heads, -(-seqlen_k // block_k)))
    return (
        Piece(q_shape, codes),
        Piece(k_shape, codes),
        Piece((batch, kv_heads, head_dim_v, padded_keys(seqlen_k)), E4M3),
        Piece((batch, heads, -(-seqlen_q // block_q))),
        scales_k,
        scales_k,
    )


def empty_outputs(config: QuantizeConfig, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
    """New tensors for the kernel to fill, on the current GPU."""
    codes = getattr(torch, config.code_dtype)
    pieces = output_pieces(config.block_q, config.block_k, q.shape, k.shape, v.shape, codes)
    make = device_memory.empty_on_gpu
    return Outputs(*[make(*new_layout(piece.shape), piece.dtype) for piece in pieces])


@dataclass(frozen=True)
class QuantizeLauncher(Launcher):
    """A quantizer on a grid of at most ``num_ctas``.

    ``largest_codes`` are those of ``config``, which cost time to look up.
    """

    config: QuantizeConfig
    kernel: Kernel
    num_ctas: int
    largest_codes: tuple[float, float]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: int, means: Means
    ) -> tuple[QuantizedTensor, QuantizedTensor, TransposedV]:
        """As ``quantize_fused``."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(q, k, v, seed, means)
        q, k, v = map(addressable, (q, k, v))
        return self.launch(q, k, v, seed, means)

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, seed: int, means: Means
    ) -> tuple[QuantizedTensor, QuantizedTensor, TransposedV]:
        """The same of ``addressable`` tensors on the current GPU, which is that of this launcher."""
        outputs = empty_outputs(self.config, q, k, v)
        self.fill(outputs, q, k, v, self.extras(seed, means, q.device))
        return self.parts(outputs, k.shape[1])

    def parts(self, outputs: Outputs, seqlen_k: int) -> tuple[QuantizedTensor, QuantizedTensor, TransposedV]:
        """What was filled, with what its scales hold for."""
        c, (largest_q, largest_k) = self.config, self.largest_codes
        return (
            QuantizedTensor.unchecked(outputs.q8, outputs.q_scale, c.block_q, largest_q),
            QuantizedTensor.unchecked(outputs.k8, outputs.k_scale, c.block_k, largest_k),
            TransposedV.unchecked(outputs.vt8, outputs.v_scale, c.block_k, seqlen_k),
        )

    def find_mean_v(self, v: Tensor) -> Tensor:
        """What the quantizer subtracts from an ``addressable`` V; no elements if that is nothing."""
        return mean_of_values(v) if self.config.smooth_v else device_memory.no_floats(v.device)

    def extras(self, seed: int, means: Means, device: torch.device) -> Extras:
        """Those of a call; of ``means`` those that the config asks for."""
        c, unused = self.config, no_words(device)
        return Extras(
            sign_masks(c.head_dim, seed, device) if c.rotate else unused,
            sign_masks(c.head_dim_v, seed, device) if c.rotate_v else unused,
            means.k if c.smooth_k else unused,
            means.v if c.smooth_v else unused,
        )

    def fill(
        self, outputs: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, extras: tuple[Any, ...]
    ) -> None:
        """Queue the kernel on ``Outputs``, on tensors that are ``addressable``, and on ``Extras``, behind which comes a
        tile counter where the config ``claims_items``."""
        self.kernel(q, k, v, *outputs, *extras, self.num_ctas)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(config: QuantizeConfig, device: torch.device) -> QuantizeLauncher:
    """The launcher of a quantizer; compiles or loads it the first time."""
    index = index_of(device)
    kernel = compile_cache.get_quantize(config)
    num_ctas = count_ctas(index) * config.ctas_per_sm
    return QuantizeLauncher(index, config, kernel, num_ctas, config.largest_codes)


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_launch(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    seqlen_k: int,
    quantization: Fp8Quantization,
    device: torch.device,
    wide_codes: bool = False,
    mean_blocks: int = 0,
) -> QuantizeLauncher:
    """``find`` by what a call tells."""
    options = longest_alike(seqlen_k), quantization, wide_codes, mean_blocks
    return find(select_quantize_config(dtype, head_dim, head_dim_v, *options), device)


def quantize_fused(
    q: Tensor, k: Tensor, v: Tensor, quantization: Fp8Quantization, means: Means
) -> tuple[QuantizedTensor, QuantizedTensor, TransposedV]:
    """Quantize on a Hopper GPU, on torch's current stream. The problem passes ``why_not_fused``.

    Of ``means``, contiguous, only those that ``quantization`` asks for are read. The first call with a head_dim and
    seed copies the signs of the rotation to the GPU.

    Raises:
        RuntimeError: that first call is made while a CUDA graph is captured.
    """
    launch = find_launch(q.dtype, k.shape[3], v.shape[3], k.shape[1], quantization, q.device)
    q8, k8, vt8 = launch(q, k, v, quantization.seed, means)
    return q8, k8, vt8


def mean_of_values(v: Tensor) -> Tensor:
    """``value_mean_rules.mean_worth_subtracting`` on a Hopper GPU, of values that pass ``why_not_fused``."""
    return value_mean.find(v)(addressable(v))


def addressable(x: Tensor) -> Tensor:
    """x with rows of neighbouring elements that begin at multiples of 16 bytes; copied if it has none."""
    *strides, last = x.stride()
    if last == 1 and x.data_ptr() % TMA_BYTES == 0 and not (strides[0] | strides[1] | strides[2]) % CHUNK:
        return x
    return make_addressable(x if last == 1 else contiguous_copy(x))


@lru_cache(maxsize=64)
def no_words(device: torch.device) -> Tensor:
    """int32 (0,): stands for an argument that a config does not use."""
    return make_apart(lambda: torch.empty(0, dtype=torch.int32, device=device))
