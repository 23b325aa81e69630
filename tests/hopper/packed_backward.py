"""The backward kernels on packed sequences, compiled to PTX and run on NumPy: no GPU takes part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.backward.step import CLEARING_WORDS, SCHEDULER_WORDS, BackwardStep, SteppedConfig
from cute_kernels.plan.config import plan_entries
from hopper.backward.config import CLUSTER_CTAS, BackwardConfig, PairedBackwardConfig
from hopper.config import WARPGROUP_ROWS
from tests.hopper.hopper_machine import AT_ONCE, TensorMap, Timing
from tests.hopper.on_numpy import NO_RULES, Arguments, Rules, add_rules, program_of
from tests.hopper.tensor_maps import elements_of, ragged_map
from tests.plans import Packed, plan_of


def packed_backward_on_numpy(
    config: BackwardConfig,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    sequences: tuple[Packed, Packed],
    timing: Timing = AT_ONCE,
    dlse: Tensor | None = None,
    sides: tuple[int, ...] = (),
    ctas: int = 1,
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, which were NaN before, of (dout, q, k, v) and (out, lse), as the three kernels leave them.

    ``sequences`` are those of Q and of K; ``sides`` those of a window; ``ctas`` those of a persistent grid.
    """
    c, (dout, q, k, v), scale = config, inputs, inputs[1].shape[2] ** -0.5
    plan = plan_of(*sequences, tile=c.tile_n, of_keys=True)
    number = sequences[0].batch + 1
    tiles = plan_entries(q.shape[0], sequences[0].batch, c.tile_m)
    # What an earlier call has left there, of other lengths.
    counter = torch.ones(SCHEDULER_WORDS + CLEARING_WORDS + q.shape[1] * tiles, dtype=torch.int32)
    lse_log2, delta, sums = prepare_on_numpy(c, (*rows, dlse), dout, (plan, number), tiles, counter)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))

    arguments = Arguments()
    maps = _maps(c, inputs, (lse_log2, delta), (dk, dv))
    arguments.add(*maps)
    arguments.values += [b"\0" * 16] * len(maps)
    if not c.clears_ahead:
        counts = q.shape[1] * tiles * (c.counts_per_tile if c.ordered else 0)
        counter = torch.zeros(SCHEDULER_WORDS + counts, dtype=torch.int32)
    _launch(c, arguments, k, (sums, counter), (plan, number), (scale, *sides), rules, timing, ctas)
    assert not counter[:SCHEDULER_WORDS].any(), (
        "the next launch would begin with tiles that this one has counted"
    )

    finish_on_numpy(c, sums, dq, (plan, number), scale)
    return dq, dk, dv


def finish_on_numpy(
    config: SteppedConfig, sums: Tensor, dq: Tensor, plan_and_number: tuple[Tensor, int], softmax_scale: float
) -> None:
    """Fill dq from the sums of a backward kernel of ``config``."""
    plan, number = plan_and_number
    arguments = Arguments()
    arguments.tensor(sums, tuple(sums.shape[:2]), sums.stride()[:3])
    arguments.tensor(dq, tuple(dq.shape), dq.stride()[:2])
    arguments.tensor(plan, tuple(plan.shape), ())
    arguments.add(number, softmax_scale)
    heads, tiles = sums.shape[:2]
    arguments.launch(program_of(BackwardStep("finish", config)), (tiles, heads, 1))


def prepare_on_numpy(
    config: SteppedConfig,
    rows: tuple[Tensor, Tensor, Tensor | None],
    dout: Tensor,
    plan_and_number: tuple[Tensor, int],
    tiles: int,
    counter: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp in base 2 and delta, (heads, rows of all query tiles), and sums of dQ, of out and lse and its
    gradient or None."""
    out, lse, dlse = rows
    plan, number = plan_and_number
    heads = out.shape[1]
    lse_log2, delta = (torch.full((heads, tiles * config.tile_m), math.nan) for _ in range(2))
    sums = torch.full((heads, tiles, config.dq_parts, config.dq_words), math.nan)
    arguments = Arguments()
    for tensor in (out, dout):
        arguments.tensor(tensor, tuple(tensor.shape), tensor.stride()[:2])
    for tensor in (lse, torch.empty(heads, 0) if dlse is None else dlse, lse_log2, delta):
        arguments.tensor(tensor, tuple(tensor.shape), tensor.stride()[:1])
    arguments.tensor(sums, tuple(sums.shape), sums.stride()[:3])
    arguments.tensor(plan, tuple(plan.shape), ())
    arguments.add(number)
    if config.clears_ahead:
        arguments.tensor(counter, (len(counter),), ())
    arguments.launch(program_of(BackwardStep("prepare", config)), (tiles, heads, 1))
    return lse_log2, delta, sums


def _launch(
    config: BackwardConfig,
    arguments: Arguments,
    keys: Tensor,
    results: tuple[Tensor, Tensor],
    plan_and_number: tuple[Tensor, int],
    scale_and_sides: tuple[float | int, ...],
    rules: Rules,
    timing: Timing,
    ctas: int,
) -> None:
    """The kernel between prepare and finish, of k and (sums, counter), behind the maps in ``arguments``."""
    k, (sums, counter), (plan, number) = keys, results, plan_and_number
    heads, tiles, *_ = sums.shape
    kv_heads, program, is_paired = k.shape[1], program_of(config), isinstance(config, PairedBackwardConfig)
    arguments.tensor(sums, (tiles * heads,), (sums.stride(2), sums.stride(1)))
    of_counter = (
        (counter[SCHEDULER_WORDS:], (tiles * heads,), ()) if is_paired else (counter, (len(counter),), ())
    )
    arguments.tensor(*of_counter)
    arguments.add(*scale_and_sides)
    arguments.tensor(plan, tuple(plan.shape), ())
    arguments.add(number, heads // kv_heads, *(() if is_paired else (kv_heads,)), tiles)
    add_rules(arguments, rules)
    if is_paired:
        of_tiles = CLUSTER_CTAS * plan_entries(k.shape[0], number - 1, config.tile_n)
        arguments.launch(program, (of_tiles, kv_heads, 1), timing, CLUSTER_CTAS)
    else:
        arguments.launch(program, (ctas, 1, 1), timing)


def _maps(
    config: BackwardConfig,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    vectors: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
) -> list[TensorMap]:
    """Of the kernel between prepare and finish, for (dout, q, k, v), (lse, delta) and (dk, dv)."""
    c, (dout, q, k, v), (dk, dv) = config, inputs, gradients
    is_paired = isinstance(c, PairedBackwardConfig)
    keys, rows = (c.keys, c.tile_m // CLUSTER_CTAS) if is_paired else (c.tile_n, c.tile_m)
    part, part_v = (size // (c.consumers if is_paired else 1) for size in (c.head_dim, c.head_dim_v))
    return [
        ragged_map(q, rows, part),
        ragged_map(k, keys, c.dq_columns),
        ragged_map(v, keys, part_v),
        ragged_map(dout, rows, part_v),
        *(number_map(vector, c.tile_m) for vector in vectors),
        *([ragged_map(k, keys, c.dq_columns)] if is_paired else []),
        ragged_map(dk, WARPGROUP_ROWS, c.dq_columns if is_paired else c.head_dim),
        ragged_map(dv, WARPGROUP_ROWS, part_v),
    ]


def number_map(tensor: Tensor, rows: int) -> TensorMap:
    """Of (heads, rows), a number for each row."""
    return TensorMap(elements_of(tensor), tensor.shape[::-1], tensor.stride()[::-1], (rows, 1), 0)
