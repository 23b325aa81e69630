"""The forward kernel on packed sequences, run from its PTX without a GPU: tiles of any number of blocks."""

from __future__ import annotations

import math

import pytest
import torch

from hopper.forward.tilings import select_forward_config
from hopper_attention.reference import attention_naive
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import packed_forward_on_numpy
from tests.plans import Packed, plan_of

LATE = Timing(is_late=True, seed=1)

Q = Packed.of((200, 0, 40, 5), behind=9)
K = Packed.of((310, 33, 0, 96), behind=3)
"""Tiles of 0 to 4 blocks of 96 keys, more of them than CTAs."""


@pytest.mark.parametrize("head_dim,causal,ctas", [(64, True, 3), (128, False, 1)])
def test_tiles_of_any_number_of_blocks(head_dim: int, causal: bool, ctas: int) -> None:
    config = select_forward_config("bfloat16", head_dim, head_dim, causal, 0, layout="varlen")
    generator = torch.Generator().manual_seed(0)
    shapes = (Q.total, 2, head_dim), (K.total, 1, head_dim), (K.total, 1, head_dim)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    plan, scale = plan_of(Q, K, config.tile_m), head_dim**-0.5
    out, lse = packed_forward_on_numpy(config, (q, k, v), plan, Q.batch + 1, scale, ctas, LATE)
    for sequence in range(Q.batch):
        (row, rows), (key, keys) = Q.rows(sequence), K.rows(sequence)
        own = (slice(row, row + rows), slice(key, key + keys))
        if rows and keys:
            exact, exact_lse = attention_naive(
                q[None, own[0]], k[None, own[1]], v[None, own[1]], causal=causal
            )
            seen = exact_lse[0] > -math.inf
            assert (out[own[0]].double() - exact[0]).norm() < 2.0**-8 * exact.norm()
            assert (lse[:, own[0]] - exact_lse[0])[seen].abs().max() < 3e-6
        elif rows:
            assert not out[own[0]].any() and bool((lse[:, own[0]] == -math.inf).all())
