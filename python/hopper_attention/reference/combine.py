"""Merging of attention to parts of the keys, in plain PyTorch on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def combine_parts(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention to all keys from that to each of some parts of them, by their log-sum-exp.

    Args:
        out_partial: float32 (num_splits, ..., head_dim_v).
        lse_partial: float32 (num_splits, ...), natural log; -inf of a part without keys, whose output may be anything.
        dtype: of the output.

    Returns:
        out (..., head_dim_v) and lse float32 (...): 0 and -inf where no part has keys.
    """
    largest = lse_partial.amax(0)
    weights = torch.exp(lse_partial - largest.masked_fill(largest == -math.inf, 0.0))
    total = weights.sum(0)
    shares = (weights / total.masked_fill(total == 0.0, 1.0)).unsqueeze(-1)
    out = torch.where(shares == 0.0, 0.0, shares * out_partial).sum(0)
    return out.to(dtype), largest + torch.log(total)
