"""A second query that multiplies V, as the reference has it: columns of Q and K beside their own."""

from __future__ import annotations

import torch

from hopper_attention.autocast import without_autocast


def join_qv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The q and k whose products are Q K^T + QV V^T: those of the inputs side by side; without ``qv`` themselves.

    Sequences may have a dimension for the batch or be packed. torch differentiates this.

    Raises:
        ValueError: the shape or the device of ``qv`` does not fit q and v.
        TypeError: its dtype is not that of q.
    """
    if qv is None:
        return q, k
    expected = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != expected:
        raise ValueError(
            f"qv has shape {tuple(qv.shape)}, allowed: that of q with the columns of v, {tuple(expected)}"
        )
    if qv.dtype != q.dtype:
        raise TypeError(f"qv has dtype {qv.dtype}, allowed: the dtype of q, {q.dtype}")
    if qv.device != q.device:
        raise ValueError(f"qv is on {qv.device}, allowed: the device of q, {q.device}")
    with without_autocast(q.device):
        return torch.cat([q, qv], -1), torch.cat([k, v], -1)
