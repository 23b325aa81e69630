"""FP8 attention below the public functions: finds what serves a problem, remembers it, and calls it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hopper.fp8_config import scores_fit_half
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import target_of
from hopper_attention.checks import TensorSpec
from hopper_attention.fp8_rules import (
    Fp8Problem,
    block_of,
    choose_fp8_backend,
    select_config,
)
from hopper_attention.launch import (
    REMEMBERED_PROBLEMS,
    ResultSpec,
    is_capturing,
    run_forward,
    tile_counter,
)
from hopper_attention.layout import TMA_BYTES, Repair, contiguous_copy, make_addressable, repair_for
from hopper_attention.notices import warn_once
from hopper_attention.quantization_rules import restore_values
from hopper_attention.quantized import QuantizedQKV, QuantizedTensor, TransposedV, transpose_for_kernel
from hopper_attention.reference.fp8 import P_EXPONENT, attention_tiled_fp8
from hopper_attention.shapes import fit_shapes

ALL_ROWS = 2**31 - 1
"""Rows that share a scale, where all do, as the kernel is told."""


@dataclass(frozen=True)
class EmulationLaunch:
    """The tiled emulation, on the device of the inputs. P of the largest score is 2^p_exponent."""

    causal: bool
    p_exponent: float = P_EXPONENT

    def __call__(self, parts: QuantizedQKV, softmax_scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        # As the kernel: a mean is added before the output is rounded, a rotation undone after.
        dtype = torch.float32 if adds_mean(parts) else parts.dtype
        out, lse = attention_tiled_fp8(
            parts,
            causal=self.causal,
            softmax_scale=softmax_scale,
            out_dtype=dtype,
            p_exponent=self.p_exponent,
        )
        return restore_values(out, parts, self.causal).to(parts.dtype), lse


@dataclass(frozen=True)
class DequantizedLaunch:
    """The 16-bit ``backend`` on what the parts stand for, rounded to the dtype of the output.

    Q and K stay rotated, both by the same signs, which leaves their scores as they are; so does V, and it stays without
    its mean: what was done to it is undone in the output.
    """

    causal: bool
    backend: str

    @torch.no_grad()
    def __call__(self, parts: QuantizedQKV, softmax_scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (part.dequantize(parts.dtype) for part in (parts.q, parts.k, parts.v))
        out, lse = run_forward(q, k, v, softmax_scale, self.causal, self.backend, 0, wants_lse)
        return restore_values(out, parts, self.causal).to(parts.dtype), lse


@dataclass(frozen=True)
class Fp8HopperLaunch:
    """A compiled kernel on torch's current stream of ``device_index``.

    ``ones`` (batch, kv_heads, 1) float32 stand in for scales that a problem does not have, ``no_mean`` (batch,
    kv_heads, 0) for a mean of V. ``transposes`` says that the kernel takes V in rows.
    """

    kernel: Kernel
    causal: bool
    result: ResultSpec
    device_index: int
    num_ctas: int
    repairs: tuple[Repair, ...]
    block_q: int
    block_k: int
    no_lse: Tensor
    ones: Tensor
    no_mean: Tensor
    transposes: bool

    def __call__(self, parts: QuantizedQKV, softmax_scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        if self.device_index != torch.cuda.current_device():
            with torch.cuda.device(self.device_index):
                return self._launch(parts, softmax_scale, wants_lse)
        return self._launch(parts, softmax_scale, wants_lse)

    def _launch(self, parts: QuantizedQKV, softmax_scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        q, k, v = parts.q.data, parts.k.data, parts.v
        if self.repairs:
            q, k = (repair.apply(x) for repair, x in zip(self.repairs, (q, k), strict=True))
        if (q.data_ptr() | k.data_ptr()) % TMA_BYTES:
            q, k = (contiguous_copy(x) if x.data_ptr() % TMA_BYTES else x for x in (q, k))
        if isinstance(v, TransposedV):
            values = v.data
        else:
            values = make_addressable(v.data) if self.transposes else transpose_for_kernel(v.data)
        v_scale, o_scale = v.scale, self.ones
        if self.block_k == ALL_ROWS:
            # A lone scale is a factor of the output, whatever its sign.
            v_scale, o_scale = o_scale, v_scale
        adds = adds_mean(parts)
        out = self.result.empty_out(q)
        lse = self.result.empty_lse() if wants_lse else self.no_lse
        self.kernel(
            q,
            k,
            values,
            out,
            lse,
            tile_counter(self.device_index),
            *(_dense_rows(scale) for scale in (parts.q.scale, parts.k.scale, v_scale, o_scale)),
            _vectors(parts.mean_v) if adds else self.no_mean,
            self.block_q,
            self.block_k,
            softmax_scale,
            self.num_ctas,
        )
        return out if adds else restore_values(out, parts, self.causal).to(out.dtype), lse


def adds_mean(parts: QuantizedQKV) -> bool:
    """Whether the FP8 kernel adds a mean of V. That of a rotated V comes after PyTorch has rotated the output back."""
    return parts.mean_v.numel() > 0 and not parts.quantization.rotate_v


def _dense_rows(scale: Tensor) -> Tensor:
    """Scales of neighbouring blocks next to each other, as the kernel reads them."""
    return scale if scale.stride(-1) == 1 or scale.shape[-1] == 1 else contiguous_copy(scale)


def _vectors(mean: Tensor) -> Tensor:
    """The mean with vectors of neighbouring elements that begin at multiples of 16 bytes."""
    return mean if mean.is_contiguous() and mean.data_ptr() % TMA_BYTES == 0 else contiguous_copy(mean)


Fp8Launch = EmulationLaunch | DequantizedLaunch | Fp8HopperLaunch

HOW = {
    "ampere": "FP8 attention in 16 bits",
    "reference": "FP8 attention on its emulation, which is slow",
}
"""What a warning says of backends other than the FP8 kernel."""


def attend(
    parts: QuantizedQKV,
    softmax_scale: float,
    causal: bool,
    backend: str | None,
    two_level: bool,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of quantized tensors: out, with what was done to V undone, and lse.

    Without ``wants_lse`` the lse may lack its rows. ``two_level`` is that of ``Fp8Problem``.

    Raises:
        ValueError: the tensors do not fit together, or ``backend`` cannot run the problem.
        NotImplementedError: the problem has more tiles than the kernel can count.
    """
    q, k = parts.q.data, parts.k.data
    # What is made while a graph is captured belongs to that graph: it is not remembered.
    find = find_fp8_launch.__wrapped__ if is_capturing(q.device) else find_fp8_launch
    launch = find(problem_of(parts, causal, two_level), q.stride(), k.stride(), q.device, backend)
    return launch(parts, softmax_scale, wants_lse)


def problem_of(parts: QuantizedQKV, causal: bool, two_level: bool = False) -> Fp8Problem:
    """What the rules need to know of quantized tensors."""
    q, k, v = parts.q, parts.k, parts.v
    return Fp8Problem(
        tuple(q.data.shape),
        tuple(k.data.shape),
        v.shape,
        block_of(q.block, q.data.shape[1]),
        block_of(k.block, k.data.shape[1]),
        block_of(v.block, v.shape[1]),
        parts.dtype,
        causal,
        v_rows=isinstance(v, QuantizedTensor),
        two_level=two_level,
        half_scores=scores_fit_half(q.largest, k.largest, q.data.shape[3]),
    )


@lru_cache(maxsize=REMEMBERED_PROBLEMS)
def find_fp8_launch(
    problem: Fp8Problem,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    device: torch.device,
    backend: str | None,
) -> Fp8Launch:
    """What serves a problem; checks it, and compiles or loads its kernel, the first time.

    Raises:
        ValueError: the shapes do not fit together, or ``backend`` cannot run the problem.
        NotImplementedError: the problem has more tiles than the kernel can count.
    """
    p = problem
    fit_shapes(p.q_shape, p.k_shape, p.v_shape)
    choice = choose_fp8_backend(p, target_of(device), backend)
    if choice.advice:
        warn_once(f"{HOW[choice.backend]}: {choice.reason}; {choice.advice}")
    if choice.backend == "reference":
        return EmulationLaunch(p.causal)
    if choice.backend == "ampere":
        return DequantizedLaunch(p.causal, choice.backend)
    config = select_config(p)
    index = torch.cuda.current_device() if device.index is None else device.index
    (batch, seqlen_q, heads, _), (_, _, kv_heads, head_dim_v) = p.q_shape, p.v_shape
    out_shape, lse_shape = (batch, seqlen_q, heads, head_dim_v), (batch, heads, seqlen_q)
    dtype = torch.float8_e4m3fn
    repairs = tuple(
        repair_for(TensorSpec(shape, strides, dtype, device))
        for shape, strides in ((p.q_shape, q_strides), (p.k_shape, k_strides))
    )
    with torch.inference_mode(False):
        ones = _unit_scales((batch, kv_heads, 1), device)
        no_lse = torch.empty((batch, heads, 0), dtype=torch.float32, device=device)
        no_mean = empty_vectors(batch, kv_heads, device)
    return Fp8HopperLaunch(
        kernel=compile_cache.get_forward(config),
        causal=p.causal,
        result=ResultSpec(out_shape, lse_shape, p.out_dtype, device),
        device_index=index,
        num_ctas=torch.cuda.get_device_properties(index).multi_processor_count,
        repairs=repairs if any(repair.is_needed for repair in repairs) else (),
        block_q=p.block_q or ALL_ROWS,
        block_k=p.block_k or ALL_ROWS,
        no_lse=no_lse,
        ones=ones,
        no_mean=no_mean,
        transposes=config.v_rows,
    )


def empty_vectors(batch: int, kv_heads: int, device: torch.device) -> Tensor:
    """float32 (batch, kv_heads, 0) with the strides that the kernel asks for, multiples of 16 bytes."""
    return torch.empty((batch, kv_heads, 4), dtype=torch.float32, device=device)[..., :0]


def _unit_scales(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Ones that every stream may read: copied before this returns, or made anew by each replay of a captured graph."""
    if is_capturing(device):
        return torch.ones(shape, dtype=torch.float32, device=device)
    return torch.ones(shape, dtype=torch.float32, device="cpu").to(device)
