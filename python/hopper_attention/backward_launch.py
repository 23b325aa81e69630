"""Runs a backward kernel: what it is given, and what is made of what it leaves."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import HOPPER_CAPABILITY, Choice, target_of
from hopper_attention.backward_rules import (
    BackwardProblem,
    KernelConfig,
    choose_backward,
    select_for_head_dims,
)
from hopper_attention.launch import REMEMBERED_PROBLEMS, tile_counter
from hopper_attention.layout import make_addressable


@lru_cache(maxsize=REMEMBERED_PROBLEMS)
def find_choice(problem: BackwardProblem, device: torch.device, requested: str | None) -> Choice:
    """``choose_backward`` for a device, remembered."""
    return choose_backward(problem, target_of(device), requested)


@cache
def find_config(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    ordered: bool,
    device: torch.device,
    backend: str | None = None,
) -> KernelConfig:
    """``select_for_head_dims`` for a device, remembered; by default of the backend that is the fastest there."""
    capability = target_of(device).capability
    chosen = backend or ("hopper" if capability == HOPPER_CAPABILITY else "ampere")
    return select_for_head_dims(chosen, capability, dtype, head_dim, head_dim_v, causal, ordered)


def find_kernels(config: KernelConfig) -> tuple[Kernel, Kernel, Kernel]:
    """What is launched, in this order; compiled or loaded the first time."""
    prepare, finish = (BackwardStep(step, config) for step in ("prepare", "finish"))
    first, second, third = (compile_cache.get_backward(part) for part in (prepare, config, finish))
    return first, second, third


@cache
def count_multiprocessors(device_index: int) -> int:
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention on an NVIDIA GPU, on torch's current stream. No size may be 0.

    dQ is summed in the order in which key tiles finish, so its last bits may differ between runs; those of dK and dV
    do not. With ``deterministic`` the order is fixed, and key tiles wait for each other. Needs float32 memory of the
    size of q, rounded up to whole tiles and to a head_dim that has a kernel of its own.

    Args:
        dout, out: (batch, seqlen_q, heads, head_dim_v).
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16.
        k, v: (batch, seqlen_k, kv_heads, head_dim) and (..., head_dim_v).
        lse: float32 (batch, heads, seqlen_q), natural log; -inf for rows without keys.
        dlse: gradient of lse, of its shape; None means zero. Ignored in rows without keys.
        backend: whose kernel, "hopper" or "ampere"; None: that of the GPU's own.

    Returns:
        dq, dk, dv with the shapes and dtype of q, k, v, contiguous.

    Raises:
        ValueError: a head dimension is larger than the kernel takes, or the GPU has none.
    """
    config = find_config(q.dtype, q.shape[3], v.shape[3], causal, deterministic, q.device, backend)
    rows = torch.empty((2, *lse_shape(config, q)), dtype=torch.float32, device=q.device)
    sums = zero_dq(config, q)
    dq, dk, dv = empty_gradients(q, k, v)
    dout, out, q, k, v = (make_addressable(x) for x in (dout, out, q, k, v))
    with torch.cuda.device(q.device):
        prepare, kernel, finish = find_kernels(config)
        prepare(out, dout, lse.contiguous(), rows[0], rows[1])
        if dlse is not None:
            subtract_lse_gradient(rows[1], lse, dlse)
        ctas = (count_multiprocessors(q.device.index),) if config.is_persistent else ()
        counter = backward_counter(config, sums)
        kernel(q, k, v, dout, rows[0], rows[1], sums, dk, dv, counter, softmax_scale, *ctas)
        finish(sums, dq, softmax_scale)
    return dq, dk, dv


def backward_counter(config: KernelConfig, sums: Tensor) -> Tensor:
    """int32 zeros: the two of ``tile_counter``, and if dQ is summed in a fixed order those of each query tile."""
    if not config.ordered and sums.is_cuda:
        return tile_counter(sums.device.index)
    counts = math.prod(sums.shape[:3]) * config.counts_per_tile if config.ordered else 0
    return torch.zeros(2 + counts, dtype=torch.int32, device=sums.device)


def subtract_lse_gradient(delta: Tensor, lse: Tensor, dlse: Tensor) -> None:
    """Let the gradient of the LSE take part, which is P for the scores of a row: dS = P (dP - delta + dlse).

    delta float32 (batch, heads, padded seqlen_q) is changed; lse and dlse are (batch, heads, seqlen_q). Rows without
    keys keep their delta of 0 whatever dlse holds.
    """
    delta[:, :, : lse.shape[2]] -= dlse.masked_fill(lse == -math.inf, 0.0)


def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    """New contiguous tensors of the shapes, dtype and device of the inputs; ``empty_like`` would keep strides."""
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)


def lse_shape(config: KernelConfig, q: Tensor) -> tuple[int, int, int]:
    """(batch, heads, seqlen_q rounded up to whole query tiles)."""
    batch, seqlen, heads, _ = q.shape
    return batch, heads, -(-seqlen // config.tile_m) * config.tile_m


def zero_dq(config: KernelConfig, q: Tensor) -> Tensor:
    """The float32 sums of dQ, (batch, heads, query tiles, parts, words)."""
    batch, seqlen, heads, _ = q.shape
    tiles = -(-seqlen // config.tile_m)
    shape = (batch, heads, tiles, config.dq_parts, config.dq_words)
    return torch.zeros(shape, dtype=torch.float32, device=q.device)
