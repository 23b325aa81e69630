"""V with more columns than a kernel takes: attention to its columns in parts, whose outputs stand side by side.

P does not depend on V, so each part has the same LSE, and is the attention to its own columns. What it costs is Q K^T,
once for each part. Gradients of Q and K are sums over the parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.problem import MAX_HEAD_DIM
from hopper_attention.autocast import without_autocast

COLUMN_STEP = 16
"""Columns of parts come in multiples of this many, so that TMA can address parts of one byte an element too."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk, dv."""


def needs_parts(head_dim_v: int) -> bool:
    return head_dim_v > MAX_HEAD_DIM


def part_widths(head_dim_v: int) -> tuple[int, ...]:
    """Columns of each part: as few parts as there can be, about as wide as each other."""
    count = -(-head_dim_v // MAX_HEAD_DIM)
    width = -(-head_dim_v // (count * COLUMN_STEP)) * COLUMN_STEP
    return *[width] * (count - 1), head_dim_v - width * (count - 1)


def attend_in_parts(v: Tensor, attend: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """out (..., dv) and lse of attention to v, where ``attend`` gives those of some of its columns."""
    results = [attend(part) for part in v.split(part_widths(v.shape[-1]), -1)]
    with without_autocast(v.device):
        return torch.cat([out for out, _ in results], -1), results[0][1]


def differentiate_in_parts(
    dout: Tensor,
    dlse: Tensor | None,
    v: Tensor,
    out: Tensor,
    differentiate: Callable[[Tensor, Tensor | None, Tensor, Tensor], Gradients],
) -> Gradients:
    """Gradients of attention to v, where ``differentiate`` gives those of a part from its dout, dlse, v and out.

    The LSE is one for all parts: its gradient goes with the first. dq and dk of the parts are added in float32.
    """
    parts = zip(*(x.split(part_widths(v.shape[-1]), -1) for x in (dout, v, out)), strict=True)
    gradients = [
        differentiate(dout_part, None if i else dlse, v_part, out_part)
        for i, (dout_part, v_part, out_part) in enumerate(parts)
    ]
    dqs, dks, dvs = zip(*gradients, strict=True)
    with without_autocast(v.device):
        dq, dk = (torch.stack(parts).sum(0, dtype=torch.float32).to(v.dtype) for parts in (dqs, dks))
        return dq, dk, torch.cat(dvs, -1)
