"""A table of biases by the distance of query and key, one for each head, as T5 has it; far ones share the last."""

from __future__ import annotations

import torch
from common import DEVICE, check

from hopper_attention import mods

FARTHEST = 32
TABLE = torch.randn(4, 2 * FARTHEST + 1, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))


def relative_bias(score, b, h, q_idx, kv_idx):
    distance = mods.maximum(mods.minimum(kv_idx - q_idx, FARTHEST), -FARTHEST)
    return score + TABLE[h, distance + FARTHEST]


def plain(scores):
    position = torch.arange(scores.shape[-1], device=DEVICE)
    distance = (position - position[:, None]).clamp(-FARTHEST, FARTHEST)
    return scores + TABLE[:, distance + FARTHEST]


if __name__ == "__main__":
    check("relative bias", plain, score_mod=relative_bias)
