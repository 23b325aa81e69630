"""What runs after a backward kernel that divides heads, on NumPy: dK and dV are sums of what its CTAs have left, and dQ
is what it is without them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from cute_kernels.backward.word_order import WordOrder
from cute_kernels.plan.config import plan_entries
from hopper.backward.config import BackwardConfig, select_backward_config
from tests.hopper.on_numpy import finish_on_numpy
from tests.hopper.packed_backward import finish_on_numpy as finish_packed
from tests.hopper.test_backward_packed import UNEVEN, UNSEEN, USED
from tests.plans import Packed, plan_of

SCALE = 0.5


def dividing(dtype: str, head_dim: int, layout: str = "dense", **options: bool) -> BackwardConfig:
    config = select_backward_config(dtype, head_dim, head_dim, False, layout=layout, **options)
    return replace(config, divides_heads=True)


def tiles_of(words: Tensor, order: WordOrder, rows: int, columns: int) -> Tensor:
    """(..., parts, words) as (..., rows, columns)."""
    places = [
        order.row_and_column(part, word) for part in range(words.shape[-2]) for word in range(words.shape[-1])
    ]
    at = torch.tensor([row * columns + column for row, column in places])
    flat = torch.full((*words.shape[:-2], rows * columns), math.nan)
    flat[..., at] = words.flatten(-2)
    return flat.unflatten(-1, (rows, columns))


def added_up(parts: Tensor) -> Tensor:
    """Over the first dimension, one behind the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Left:
    """What a kernel has left of dQ, dK and dV; ``leading`` are sizes in front of the heads."""

    def __init__(
        self, config: BackwardConfig, leading: tuple, heads: tuple[int, int], tiles: tuple[int, int], parts
    ):
        c, (of_q, of_kv) = config, heads
        generator = torch.Generator().manual_seed(parts)
        of_dq = *leading, of_q, tiles[0], c.dq_parts, c.dq_words
        of_keys = *leading, of_kv * parts, tiles[1], c.dq_parts, c.dk_words
        self.sums, *self.keys = (torch.randn(x, generator=generator) for x in (of_dq, of_keys, of_keys))
        dtype, head = getattr(torch, c.dtype), len(leading)
        of_tiles = tiles_of(self.sums, c.dq_order, c.tile_m, c.head_dim)
        self.dq = (of_tiles * SCALE).to(dtype)
        """(..., heads, tiles, rows, columns), as dK and dV."""
        self.of_keys = []
        for words in self.keys:
            of_parts = tiles_of(words, c.dk_order, c.tile_n, c.head_dim).unflatten(head, (of_kv, parts))
            self.of_keys.append(added_up(of_parts.movedim(head + 1, 0)).to(dtype))


@pytest.mark.parametrize(
    "dtype,head_dim,parts,lengths",
    [
        ("bfloat16", 40, 2, (300, 70)),
        ("float16", 64, 7, (70, 300)),
        ("float16", 72, 3, (65, 257)),
        ("bfloat16", 96, 8, (200, 5)),
        ("bfloat16", 128, 4, (129, 128)),
        ("float16", 128, 5, (1, 260)),
        ("bfloat16", 192, 6, (64, 129)),
        ("bfloat16", 200, 2, (140, 3)),
        ("float16", 256, 3, (40, 140)),
    ],
)
def test_parts_are_added_up(dtype: str, head_dim: int, parts: int, lengths: tuple[int, int]) -> None:
    """In the order of the heads, in float32, which is rounded once; columns past head_dim are left out."""
    config, (batch, heads) = dividing(dtype, head_dim), (2, (2, 2))
    tiles = -(-lengths[0] // config.tile_m), -(-lengths[1] // config.tile_n)
    left = Left(config, (batch,), heads, tiles, parts)
    shapes = ((batch, length, of, head_dim) for length, of in zip(lengths, heads, strict=True))
    dq, dk = (torch.full(shape, math.nan, dtype=left.dq.dtype) for shape in shapes)
    dv = dk.clone()
    finish_on_numpy(config, left.sums, dq, SCALE, tuple(left.keys), (dk, dv))
    for found, expected in zip((dq, dk, dv), (left.dq, *left.of_keys), strict=True):
        rows = expected.flatten(2, 3)[:, :, : found.shape[1], :head_dim]
        assert torch.equal(found, rows.transpose(1, 2))


@pytest.mark.parametrize(
    "dtype,head_dim,parts,sequences",
    [
        ("bfloat16", 40, 8, UNEVEN),
        ("float16", 64, 2, USED),
        ("bfloat16", 72, 3, UNSEEN),
        ("float16", 128, 5, UNEVEN),
        ("bfloat16", 200, 4, USED),
        ("float16", 256, 2, (Packed.of((3, 0)), Packed.of((0, 300), behind=1))),
        ("bfloat16", 128, 2, (Packed.of((500,), behind=9), Packed.of((3,)))),
    ],
)
def test_parts_of_packed_sequences_are_added_up(dtype: str, head_dim: int, parts: int, sequences) -> None:
    """Rows of keys that are not used are left alone, and those behind the last sequence are written."""
    config, heads, (q, k) = dividing(dtype, head_dim, "varlen"), (4, 2), sequences
    tiles = plan_entries(q.total, q.batch, config.tile_m), plan_entries(k.total, k.batch, config.tile_n)
    left = Left(config, (), heads, tiles, parts)
    dq, dk = (
        torch.full((x.total, of, head_dim), math.nan, dtype=left.dq.dtype)
        for x, of in zip(sequences, heads, strict=True)
    )
    dv = dk.clone()
    plan = plan_of(q, k, tile=config.tile_n, of_keys=True), q.batch + 1
    finish_packed(config, left.sums, dq, plan, SCALE, tuple(left.keys), (dk, dv))
    for found, of_tiles in zip((dk, dv), left.of_keys, strict=True):
        expected = torch.full_like(found, math.nan)
        for i in range(k.batch + 1):
            (offset, length), first = k.rows(i), k.rows(i)[0] // config.tile_n + i
            rows = of_tiles[:, first:].flatten(1, 2)[:, :length, :head_dim]
            expected[offset : offset + length] = rows.transpose(0, 1)
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert not dq.isnan().any()
    for i in range(q.batch):
        (offset, length), first = q.rows(i), q.rows(i)[0] // config.tile_m + i
        rows = left.dq[:, first:].flatten(1, 2)[:, :length, :head_dim]
        assert torch.equal(dq[offset : offset + length], rows.transpose(0, 1))


def test_it_is_another_step_than_without_parts() -> None:
    for layout in ("dense", "varlen"):
        config = dividing("bfloat16", 128, layout)
        whole = replace(config, divides_heads=False)
        names = [BackwardStep("finish", c).name for c in (whole, config)]
        assert names[1] == f"{names[0]}_divided"
        assert BackwardStep("prepare", config).name == BackwardStep("prepare", whole).name
