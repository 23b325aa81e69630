"""How far an FP8 kernel may be from float64: as far as its emulation, and what chance does."""

from __future__ import annotations

import math

from torch import Tensor

from hopper.forward.fp8.config import FP8_KEYS_PER_STEP, Fp8ForwardConfig, Softmax
from hopper_attention.launch.fp8 import EmulationLaunch
from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.quantization import QuantizedQKV
from hopper_attention.reference.fp8 import P_EXPONENT, ROUNDED_P_EXPONENT

LSE_ROUNDING = 5e-3
"""What the LSE may be off by beside the scores: exponentials and their sum."""

EXACT_LSE_ROUNDING = 4e-4
"""The same of kernels with ``split_scores``, with what tensor cores lose beyond ``split_product``: up to 3e-4 was seen
in rows of 3 keys, which average nothing out."""

LAGGING_LSE_ROUNDING = 1.1e-2
"""Of a kernel that lags: the only exponential that counts in a row may be one by chords, off by up to 1 %."""

COARSE_LSE_ROUNDING = 3e-2
"""The same with scores in float16, where chords have 32 steps an octave and are off by up to 3 %."""


def score_rounding(config: Fp8ForwardConfig, head_dim: int) -> float:
    """By how much of itself a score may be off that lies in float16: each WGMMA rounds it, and so is its scale, if that
    is 2^-9 or more."""
    if config.softmax is not Softmax.HALF_SCORES:
        return 0.0
    return (math.ceil(head_dim / FP8_KEYS_PER_STEP) + 1) * 2.0**-12


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


def allowed_ratio(out: Tensor, lagging: bool) -> float:
    """How many times the RMS error of the emulation that of ``out`` (batch, seqlen_q, heads, head_dim_v) may be.

    5 % more, and what chance does: an RMS over n independent errors varies by 1 / sqrt(2 n) of itself, the ratio of two
    by 1 / sqrt(n), since the roundings of kernel and emulation agree only in part. Allowed are two of these. Where the
    largest P of a row is rounded, the errors of a row go together, and n is the number of rows. Those that see no key
    have no error, and do not count.
    """
    rows = int((out != 0).any(-1).sum())
    return 1.05 + 2 / math.sqrt(max(rows * (1 if lagging else out.shape[-1]), 1))
