"""Speculative decoding checks a tree of drafts in one pass: a node sees its ancestors and itself."""

from __future__ import annotations

import torch
from common import DEVICE, check

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 4, 5, 5, 9]
CONTEXT = 100
"""Tokens before the tree, which all nodes see. They see each other causally."""

SEQLEN = CONTEXT + len(PARENTS)


def ancestors() -> torch.Tensor:
    """Boolean (nodes, nodes): whether the second is an ancestor of the first, or the first itself."""
    seen = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
    return seen.to(DEVICE)


ANCESTORS = ancestors()


def tree(b, h, q_idx, kv_idx):
    is_node = (q_idx >= CONTEXT) & (kv_idx >= CONTEXT)
    # Indices outside of the table are taken for the nearest inside, and count for nothing.
    return (is_node & ANCESTORS[q_idx - CONTEXT, kv_idx - CONTEXT]) | ((kv_idx < CONTEXT) & (kv_idx <= q_idx))


def plain(scores):
    seen = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=DEVICE).tril()
    seen[CONTEXT:, CONTEXT:] = ANCESTORS
    return scores.masked_fill(~seen, -torch.inf)


if __name__ == "__main__":
    check("tree mask", plain, SEQLEN, mask_mod=tree)
