"""How FP8 WGMMA adds, and how far it may move the LSE of a row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hopper_attention.quantization import QuantizedQKV
from hopper_attention.quantized import row_scale
from tests.hopper.fp8_errors import LSE_ROUNDING

COLUMNS_PER_STEP = 32
"""Products that one FP8 WGMMA adds to an accumulator at once."""

FRACTION_BITS = 13
"""Bits that are kept of each term, below the leading bit of the largest, and of their sum."""

LOWEST = -60
"""Instead of an exponent of 0: with that of any e4m3 it is below those of all products that are not 0."""


def wgmma_product(q: Tensor, k: Tensor) -> Tensor:
    """Q K^T of e4m3 q (m, d) and k (n, d) as FP8 WGMMA adds it, float32 (m, n).

    A sum of many terms of one sign comes out too small.
    """
    total = torch.zeros(q.shape[0], k.shape[0], device=q.device)
    steps = zip(q.float().split(COLUMNS_PER_STEP, 1), k.float().split(COLUMNS_PER_STEP, 1), strict=True)
    for q_part, k_part in steps:
        total = wgmma_step(q_part, k_part, total)
    return total


def wgmma_step(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """total (m, n) + a (m, 32) b (n, 32)^T in float32, as one FP8 WGMMA adds it: its 32 products and the accumulator.

    Each of these terms is first truncated to a unit, 2^-13 of a power of two: the largest among that of the
    accumulator and, for a product, those of both factors multiplied. Their sum, which may have become larger, is then
    truncated to 13 bits below its own leading one, which others found as well ("e8m13", PyTorch's notes on FP8
    accumulation): a score of either sign loses half of 2^-13 of itself on average. With both, the LSE of N(0, 1) is
    2.7e-5 too small, as it is on a GPU (``fp8_exact_lse.json``); by units of products it would be 2.4e-5, and without
    the second truncation 2e-7.
    """
    products = a.unsqueeze(1) * b
    largest = (leading_exponent(a).unsqueeze(1) + leading_exponent(b)).amax(-1)
    unit = power_of_two(torch.maximum(largest, leading_exponent(total)) - FRACTION_BITS)
    terms = torch.cat([products, total.unsqueeze(-1)], -1) / unit.unsqueeze(-1)
    result = terms.trunc().sum(-1) * unit
    unit = power_of_two(leading_exponent(result) - FRACTION_BITS)
    return (result / unit).trunc() * unit


def leading_exponent(x: Tensor) -> Tensor:
    """Of the largest power of two in |x|; ``LOWEST`` of 0."""
    return torch.where(x == 0, LOWEST, x.frexp().exponent - 1)


def power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponent.shape, device=exponent.device), exponent)


def add_as_the_tensor_cores(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """``wgmma_step`` for the machine that runs kernels on NumPy; 16 bits, of which a WGMMA takes fewer columns, are
    added in float32."""
    if a.shape[1] != COLUMNS_PER_STEP:
        return total + a @ b.T
    return wgmma_step(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (a, b, total))).numpy()


def allowed_lse_error(
    parts: QuantizedQKV,
    softmax_scale: float,
    rounding: float = LSE_ROUNDING,
) -> Tensor:
    """How far the LSE of each row may be from that of exact scores: float32 (batch, heads, seqlen_q), finite.

    An LSE moves no further than the score of its row that moves most, and WGMMA moves a score by what
    ``wgmma_product`` loses. All keys are counted, also those behind a mask. ``rounding`` is for everything else.
    """
    q, k = parts.q, parts.k
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = q.shape, k.shape
    q_scale, k_scale = row_scale(q.scale, q.block, seqlen_q), row_scale(k.scale, k.block, seqlen_k)
    allowed = torch.empty(batch, heads, seqlen_q, device=q.data.device)
    for entry in range(batch):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            data = q.data[entry, :, head], k.data[entry, :, kv_head]
            lost = (data[0].float() @ data[1].float().T - wgmma_product(*data)).abs()
            largest = (lost * k_scale[entry, :, kv_head].abs().T).amax(-1)
            allowed[entry, head] = softmax_scale * largest * q_scale[entry, :, head, 0].abs()
    return rounding + allowed
