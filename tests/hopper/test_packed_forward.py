"""The forward kernel on packed sequences, run from its PTX without a GPU: any number of blocks, tiles and CTAs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopper.forward.tilings import select_forward_config
from hopper_attention.reference import attention_naive
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import packed_forward_on_numpy
from tests.plans import Packed, plan_of

LATE = Timing(is_late=True, seed=1)

Q = Packed.of((200, 0, 40, 5), behind=9)
K = Packed.of((310, 33, 0, 96), behind=3)
"""Tiles of 0 to 4 blocks of 96 keys, more of them than CTAs."""


def draw(q: Packed, k: Packed, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (q.total, 2, head_dim), (k.total, 1, head_dim), (k.total, 1, head_dim)
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    q: Packed,
    k: Packed,
    ctas: int,
    timing: Timing,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """out and lse, which were NaN before. That the counter of tiles is zero again is checked there."""
    head_dim = inputs[0].shape[2]
    config = select_forward_config("bfloat16", head_dim, head_dim, causal, 0, layout="varlen")
    plan, scale = plan_of(q, k, config.tile_m), head_dim**-0.5
    return packed_forward_on_numpy(config, inputs, plan, q.batch + 1, scale, ctas, timing)


@pytest.mark.parametrize("head_dim,causal,ctas", [(64, True, 3), (128, False, 1)])
def test_tiles_of_any_number_of_blocks(head_dim: int, causal: bool, ctas: int) -> None:
    q, k, v = draw(Q, K, head_dim)
    out, lse = attend((q, k, v), Q, K, ctas, LATE, causal)
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


@pytest.mark.parametrize("ctas", [1, 4])
def test_a_launch_without_a_tile_ends_and_writes_nothing(ctas: int) -> None:
    """As a graph has it whose lengths have become zero: the first message is that there is no tile."""
    q, k = Packed.of((70, 3), used=(0, 0)), Packed.of((40, 40))
    out, lse = attend(draw(q, k, 64), q, k, ctas, LATE)
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_neither_the_grid_nor_the_order_of_warps_changes_a_bit(seed: int) -> None:
    """Tiles of 1, 2, 3 and 4 blocks of 96 keys, which ask for the next tile before their first block or later. The
    second grid is larger than there are tiles."""
    q, k = Packed.of((3, 3, 3, 3)), Packed.of((290, 96, 97, 193))
    inputs = draw(q, k, 64)
    one, many = attend(inputs, q, k, 1, Timing(is_late=True, seed=seed)), attend(inputs, q, k, 11, Timing())
    assert all(map(torch.equal, one, many)) and bool(one[0].isfinite().all())
