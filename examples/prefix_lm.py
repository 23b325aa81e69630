"""Prefix language model: all tokens see the prefix, those behind it see what came before them too."""

from __future__ import annotations

import torch
from common import DEVICE, check

SEQLEN = 200
PREFIXES = torch.tensor([50, 120], device=DEVICE)  # of each sequence of the batch


def prefix_lm(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) | (kv_idx < PREFIXES[b])


def plain(scores):
    position = torch.arange(SEQLEN, device=DEVICE)
    seen = (position <= position[:, None]) | (position < PREFIXES[:, None, None, None])
    return scores.masked_fill(~seen, -torch.inf)


if __name__ == "__main__":
    check("prefix LM", plain, SEQLEN, mask_mod=prefix_lm)
