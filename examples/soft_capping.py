"""Soft-capping of scores, which flash_attn_func has as an argument too: softcap=20.0."""

from __future__ import annotations

import torch
from common import check

from hopper_attention import mods

CAP = 20.0


def soft_cap(score, b, h, q_idx, kv_idx):
    return CAP * mods.tanh(score / CAP)


def plain(scores):
    return CAP * torch.tanh(scores / CAP)


if __name__ == "__main__":
    check("soft-capping", plain, score_mod=soft_cap)
