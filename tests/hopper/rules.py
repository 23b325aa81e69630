"""What a kernel that runs on NumPy is told to do to scores and P."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hopper_attention.functions import NO_CAPTURED, CapturedFunctions


@dataclass(frozen=True)
class Rules:
    """What is done to scores: a cap, slopes of ALiBi (batch, heads), a user's functions, sinks (heads,); to P: the seed
    and offset of a mask of dropout, int64 (2,), and how many of 256 elements it keeps; and lists of the blocks that
    are visited (``BlockTable.lists``)."""

    softcap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    philox: Tensor | None = None
    kept: int = 256
    captured: CapturedFunctions = NO_CAPTURED
    lists: Tensor | None = None


NO_RULES = Rules()
