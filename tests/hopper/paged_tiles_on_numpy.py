"""Forward kernels on the pages of a cache with several heads in a tile, keys in parts, or e4m3, run on NumPy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from tests.hopper.hopper_machine import AT_ONCE, Timing
from tests.hopper.on_numpy import LOG2_E, NO_RULES, Arguments, Rules, program_of
from tests.hopper.paged_on_numpy import Cache
from tests.hopper.split_on_numpy import end_rows, in_small_parts, unwritten_parts
from tests.hopper.tensor_maps import query_map, ragged_map
from tests.plans import Packed, plan_of


def plan_of_cache(config: ForwardConfig, cache: Cache, rows_q: Packed, splits: int) -> Tensor:
    """For tiles of queries, of sequences that have room for as many keys as each other."""
    in_parts = in_small_parts(config, splits) if config.split else None
    keys = replace(Packed.of((cache.capacity,) * len(cache.rows)), used=cache.lengths)
    return plan_of(rows_q, keys, config.tile_queries, in_parts=in_parts)


def paged_tiles_on_numpy(
    config: ForwardConfig,
    q: Tensor,
    cache: Cache,
    rows_q: Packed,
    softmax_scale: float,
    splits: int = 1,
    ctas: int = 1,
    timing: Timing = AT_ONCE,
    scales: tuple[Tensor, ...] = (),
    sides: tuple[int, ...] = (),
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out (splits, total_q, heads, head_dim_v) and lse (splits, total_q, heads), which were NaN before; ``scales`` are
    those of Q, K and V of e4m3, (batch, kv_heads); ``sides`` those of a window; of ``rules`` a softcap and, of e4m3,
    sinks are taken."""
    c, (k, v), batch = config, (cache.k, cache.v), len(cache.rows)
    total_q, heads, _ = q.shape
    arguments, plan = Arguments(), plan_of_cache(config, cache, rows_q, splits)
    arguments.add(
        query_map(c, q, c.head_dim),
        ragged_map(k[0], c.page_box, c.head_dim),
        ragged_map(v[0], c.page_box, c.head_dim_v),
    )
    if c.split:
        out, lse = unwritten_parts(splits, 1, total_q, q, v)
    else:
        out = torch.full((total_q, heads, v.shape[3]), torch.nan, dtype=getattr(torch, c.out_dtype))
        lse = torch.full((heads, total_q), torch.nan)
        arguments.add(query_map(c, out, c.head_dim_v))
    numbers = batch + 1, heads // (k.shape[2] * c.group)
    if isinstance(c, Fp8ForwardConfig):
        counter = _with_scales(c, arguments, (lse, plan), numbers, softmax_scale, scales, rules)
        arguments.add(*sides)
        arguments.softcap_and_slopes(rules, softmax_scale)
    else:
        counter = arguments.packed(lse, plan, numbers, softmax_scale, sides, rules)
    arguments.tensor(cache.table, tuple(cache.table.shape), cache.table.stride()[:1])
    arguments.tensor(cache.leftpad, tuple(cache.leftpad.shape), ())
    arguments.add(k.shape[0], k.stride(0) // k.stride(1))
    arguments.divisors(k.shape[1])
    if c.split:
        arguments.parts(out)
    arguments.launch(program_of(c), (ctas, 1, 1), timing)
    if c.split:
        end_rows(out, lse)
    assert not counter.any(), "the next launch would begin with tiles that this one has counted"
    return (out[:, 0], lse[:, 0]) if c.split else (out[None], lse.T[None])


def _with_scales(
    config: Fp8ForwardConfig,
    arguments: Arguments,
    lse_and_plan: tuple[Tensor, Tensor],
    numbers: tuple[int, int],
    softmax_scale: float,
    scales: tuple[Tensor, ...],
    rules: Rules,
) -> Tensor:
    """What a kernel of e4m3 takes behind its maps, up to the sides of a window; gives the counter of tiles.
    ``numbers`` are those of sequences and of tiles that share a K/V head."""
    lse, plan = lse_and_plan
    arguments.values += [b"\0" * 16] * len(arguments.values)
    if config.split:
        arguments.parts(lse)
    else:
        arguments.tensor(lse, tuple(lse.shape[::-1]), (lse.stride(0),))
    counter = torch.zeros(2, dtype=torch.int32)
    arguments.tensor(counter, (), ())
    of_q, of_k, of_v = (x[..., None] for x in scales)
    of_q = of_q.expand(*of_k.shape[:2], numbers[1])
    given = of_q, of_k, torch.ones(of_k.shape), of_v, torch.empty(*of_k.shape[:2], 0)
    for i, of in enumerate(given):
        arguments.tensor(of, tuple(of.shape), of.stride()[: 2 if i else 3])
    # Rows that share a scale are not counted.
    arguments.add(0, 0)
    arguments.softcap_and_slopes(rules, softmax_scale)
    arguments.sinks(rules)
    arguments.add((rules.softcap or softmax_scale) * LOG2_E)
    arguments.tensor(plan, tuple(plan.shape), ())
    arguments.add(*numbers)
    return counter
