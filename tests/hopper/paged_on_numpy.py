"""The forward kernel on the pages of a cache, run from its PTX without a GPU, and caches to run it on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hopper.config import WARPGROUP_ROWS, ForwardConfig
from tests.hopper.hopper_machine import AT_ONCE, Timing
from tests.hopper.on_numpy import NO_RULES, Arguments, Rules, program_of, unwritten
from tests.hopper.tensor_maps import ragged_map
from tests.plans import Packed, plan_of


@dataclass(frozen=True)
class Cache:
    """Keys and values of sequences in pages, (pages, page_size, kv_heads, ...), all else NaN.

    ``rows`` are the keys of each sequence in order, ``table`` its pages, ``leftpad`` where it begins in its only page.
    """

    k: Tensor
    v: Tensor
    rows: list[tuple[Tensor, Tensor]]
    table: Tensor
    leftpad: Tensor

    @staticmethod
    def draw(
        lengths: tuple[int, ...],
        page_size: int,
        kv_heads: int,
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        pads: tuple[int, ...] = (),
        spare_pages: int = 2,
    ) -> Cache:
        """Pages in a random order, two more than are used; entries that no key needs are out of range."""
        generator = torch.Generator().manual_seed(page_size + sum(lengths))
        pads = pads or (0,) * len(lengths)
        counts = [-(-(n + pad) // page_size) for n, pad in zip(lengths, pads, strict=True)]
        order = torch.randperm(sum(counts) + spare_pages, generator=generator).tolist()
        table = torch.full((len(lengths), max(1, *counts)), 2**31 - 1, dtype=torch.int32)
        k, v = (
            torch.full((len(order), page_size, kv_heads, dim), math.nan, dtype=dtype) for dim in head_dims
        )
        rows = []
        for number, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
            new = [torch.randn(length, kv_heads, d, generator=generator).to(dtype) for d in head_dims]
            rows.append((new[0], new[1]))
            pages = [order.pop() for _ in range(counts[number])]
            table[number, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            for i in range(length):
                page, row = divmod(i + pad, page_size)
                for cache, x in zip((k, v), new, strict=True):
                    cache[pages[page], row] = x[i]
        leftpad = torch.tensor(pads if any(pads) else (), dtype=torch.int32)
        return Cache(k, v, rows, table, leftpad)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(k.shape[0] for k, _ in self.rows)

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        return self.table.shape[1] * self.k.shape[1]


def paged_forward_on_numpy(
    config: ForwardConfig,
    q: Tensor,
    cache: Cache,
    rows_q: Packed,
    softmax_scale: float,
    ctas: int = 1,
    timing: Timing = AT_ONCE,
    sides: tuple[int, ...] = (),
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse of packed q, which were NaN before; of ``rules`` all but dropout and functions are taken."""
    c, (k, v), batch = config, (cache.k, cache.v), len(cache.rows)
    out, lse = unwritten(q, v)
    keys = Packed.of((cache.capacity,) * batch)
    plan = plan_of(rows_q, replace(keys, used=cache.lengths), c.tile_m)
    arguments = Arguments()
    arguments.add(
        ragged_map(q, WARPGROUP_ROWS, c.head_dim),
        ragged_map(k[0], c.page_box, c.head_dim),
        ragged_map(v[0], c.page_box, c.head_dim_v),
        ragged_map(out, WARPGROUP_ROWS, c.head_dim_v),
    )
    counter = arguments.packed(lse, plan, (batch + 1, q.shape[1] // k.shape[2]), softmax_scale, sides, rules)
    arguments.tensor(cache.table, tuple(cache.table.shape), cache.table.stride()[:1])
    arguments.tensor(cache.leftpad, tuple(cache.leftpad.shape), ())
    arguments.add(k.shape[0], k.stride(0) // k.stride(1))
    arguments.divisors(k.shape[1])
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    assert not counter.any()
    return out, lse
