"""How far an FP8 kernel may be from float64: as far as its emulation, and what chance does."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hopper.forward.fp8.config import FP8_KEYS_PER_STEP, Fp8ForwardConfig, Softmax
from hopper_attention.launch.fp8 import EmulationLaunch
from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.quantization import QuantizedQKV
from hopper_attention.reference.fp8 import P_EXPONENT, ROUNDED_P_EXPONENT

LSE_ROUNDING = 5e-3
"""What the LSE may be off by beside the scores: exponentials and their sum."""

EXACT_LSE_ROUNDING = 1e-4
"""What the LSE of kernels with ``wide_codes`` may be off by: exponentials, their sum and its logarithm in float32 are
within 2e-5 up to an LSE of 60, and the rest is for how tensor cores add products of 16 bits."""

LAGGING_LSE_ROUNDING = 1.1e-2
"""Of a kernel that lags: the only exponential that counts in a row may be one by chords, off by up to 1 %."""

COARSE_LSE_ROUNDING = 3e-2
"""The same with scores in float16, where chords have 32 steps an octave and are off by up to 3 %."""

OCTAVES_TO_CEILING = 14
"""What is less above the largest P of a row, at least 2^4, than there is in the distance that ``HalfScoresSoftmax``
rounds to float16: from 2^18."""


def score_rounding(config: Fp8ForwardConfig, head_dim: int) -> float:
    """By how much of itself a score is off that lies in float16: each WGMMA rounds it, and so is its scale, if that is
    2^-9 or more. By twice that at most: rounding to float16 takes up to 2^-11 of a power of two, 2^-12 of what is
    almost the next one."""
    if config.softmax is not Softmax.HALF_SCORES:
        return 0.0
    return (math.ceil(head_dim / FP8_KEYS_PER_STEP) + 1) * 2.0**-12


def lse_rounding(config: Fp8ForwardConfig, lse: Tensor) -> Tensor:
    """By how much the ``lse`` of a kernel may be off beside what WGMMA loses (``allowed_lse_error``); of its shape.

    An LSE is off by no more than the score, or the logarithm of P, of one of its keys is. In a row in which a single
    key counts, its P is one by chords, off by ``COARSE_LSE_ROUNDING`` with scores in float16, unless its block took a
    maximum. Then the sum counts it as e4m3 rounds it: as a power of two, from which it is as far as the shift is
    rounded, 2^-11 of the row's distance from 2^18. So one of the two, and what becomes of scores.
    """
    size = lse.abs().nan_to_num(posinf=0.0)
    if config.softmax is not Softmax.HALF_SCORES:
        return torch.full_like(
            size, LAGGING_LSE_ROUNDING if config.softmax is Softmax.LAGGING else LSE_ROUNDING
        )
    of_shift = 2.0**-11 * (size + OCTAVES_TO_CEILING * math.log(2))
    return of_shift.clamp(min=COARSE_LSE_ROUNDING) + 2 * score_rounding(config, config.head_dim) * size


def exact_lse_error(lse: Tensor) -> Tensor:
    """By how much an ``lse`` of a kernel with ``wide_codes`` may be off; of its shape. Scales, shift and logarithm are
    rounded to float32, within 10^-6 of the LSE together."""
    return EXACT_LSE_ROUNDING + 1e-6 * lse.abs().nan_to_num(posinf=0.0)


def emulate(
    parts: QuantizedQKV, causal: bool, lagging: bool, window: Sides = FULL_SIDES
) -> list[tuple[Tensor, Tensor]]:
    """out and lse of the emulation, what was done to V undone.

    For a kernel that lags they come a second time with largest P that are rounded. Of the kernel's some are, so that
    the worse of the two bounds its error.
    """
    exponents = (P_EXPONENT, ROUNDED_P_EXPONENT) if lagging else (P_EXPONENT,)
    return [
        EmulationLaunch(causal, exponent)(parts, parts.q.shape[3] ** -0.5, True, window)
        for exponent in exponents
    ]


def allowed_ratio(out: Tensor, lagging: bool, keys: float = math.inf) -> float:
    """How many times the RMS error of the emulation that of ``out`` (batch, seqlen_q, heads, head_dim_v) may be, where
    rows see up to so many ``keys``.

    5 % more, and what chance does: an RMS over n independent errors varies by 1 / sqrt(2 n) of itself, the ratio of two
    by 1 / sqrt(n), since the roundings of kernel and emulation agree only in part. Allowed are two of these. A row has
    no more independent errors than keys, whose P are rounded, however many its columns. Where the largest P of a row is
    rounded, the errors of a row go together, and n is the number of rows. Those that see no key have no error, and do
    not count.
    """
    rows = int((out != 0).any(-1).sum())
    return 1.05 + 2 / math.sqrt(max(rows * (1 if lagging else min(out.shape[-1], keys)), 1))
