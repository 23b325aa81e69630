"""Documents packed into one sequence, each of which sees itself alone."""

from __future__ import annotations

import torch
from common import DEVICE, check

SEQLEN = 200
DOCUMENTS = torch.searchsorted(
    torch.tensor([0, 30, 90, 150], device=DEVICE), torch.arange(SEQLEN, device=DEVICE), right=True
)


def same_document(b, h, q_idx, kv_idx):
    return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (kv_idx <= q_idx)


def plain(scores):
    seen = (DOCUMENTS[:, None] == DOCUMENTS).tril()
    return scores.masked_fill(~seen, -torch.inf)


if __name__ == "__main__":
    check("document mask", plain, SEQLEN, mask_mod=same_document)
