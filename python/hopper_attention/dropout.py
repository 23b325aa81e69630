"""Dropout of P: how much of it is kept, and the two words that its mask is made of (``cute_kernels/philox.py``)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS = 256
"""A random byte decides whether an element is kept, so that probabilities are multiples of 1 / STEPS."""

WORDS = 2
"""Of ``philox``: seed and offset."""


def kept_steps(dropout_p: float) -> int:
    """For how many of the ``STEPS`` values of its byte an element is kept: (1 - dropout_p) STEPS rounded, at least 1.

    What is kept is multiplied by STEPS / kept_steps, so that the mean of P is right in spite of the rounding.
    """
    return max(1, math.floor(STEPS * (1.0 - dropout_p) + 0.5))


def scale_of_kept(dropout_p: float) -> float:
    """The factor of what is kept."""
    return STEPS / kept_steps(dropout_p)


def draw_philox(device: torch.device) -> Tensor:
    """int64 (2,), seed and offset, from torch's generator of ``device``, which moves on.

    They stay on the device: nothing waits for them, and a CUDA graph draws new ones at each replay.
    """
    return torch.randint(0, torch.iinfo(torch.int64).max, (WORDS,), dtype=torch.int64, device=device)


def no_draw(device: torch.device) -> Tensor:
    """A tensor as ``draw_philox`` gives it, with any values: no generator moves."""
    return torch.empty(WORDS, dtype=torch.int64, device=device)
