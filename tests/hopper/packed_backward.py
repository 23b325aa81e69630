"""The backward kernels on packed sequences, compiled to PTX and run on NumPy: no GPU takes part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.backward.step import CLEARING_WORDS, SCHEDULER_WORDS, BackwardStep, SteppedConfig
from cute_kernels.plan.config import plan_entries
from hopper.backward.config import CLUSTER_CTAS, BackwardConfig, PairedBackwardConfig
from hopper.backward.parts import divided_heads
from tests.hopper.backward_maps import backward_maps
from tests.hopper.hopper_machine import AT_ONCE, Timing
from tests.hopper.on_numpy import NO_RULES, Arguments, Rules, add_rules, program_of
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
    head_parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, which were NaN before, of (dout, q, k, v) and (out, lse), as the three kernels leave them.

    ``sequences`` are those of Q and of K; ``sides`` those of a window; ``ctas`` those of a persistent grid;
    ``head_parts`` those of divided heads.
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
    maps = backward_maps(c, inputs, (lse_log2, delta), (dk, dv))
    arguments.add(*maps)
    arguments.values += [b"\0" * 16] * len(maps)
    left: tuple[Tensor, ...] = ()
    if c.divides_heads:
        of_keys = plan_entries(k.shape[0], sequences[1].batch, c.tile_n)
        shape = k.shape[1] * head_parts, of_keys, c.dq_parts, c.dk_words
        left = tuple(torch.full(shape, math.nan) for _ in "kv")
        arguments.left(*left)
    if not c.clears_ahead:
        counts = q.shape[1] * tiles * (c.counts_per_tile if c.ordered else 0)
        counter = torch.zeros(SCHEDULER_WORDS + counts, dtype=torch.int32)
    given = (scale, *sides), rules, timing, ctas, head_parts
    _launch(c, arguments, k, (sums, counter), (plan, number), *given)
    assert not counter[:SCHEDULER_WORDS].any(), (
        "the next launch would begin with tiles that this one has counted"
    )

    finish_on_numpy(c, sums, dq, (plan, number), scale, left, (dk, dv) if left else ())
    return dq, dk, dv


def finish_on_numpy(
    config: SteppedConfig,
    sums: Tensor,
    dq: Tensor,
    plan_and_number: tuple[Tensor, int],
    softmax_scale: float,
    left: tuple[Tensor, ...] = (),
    of_keys: tuple[Tensor, ...] = (),
) -> None:
    """Fill dq from the sums of a backward kernel of ``config``, and ``of_keys``, dk and dv, from what was ``left`` of
    them, if it was."""
    arguments, (heads, tiles), (plan, number) = Arguments(), sums.shape[:2], plan_and_number
    for parts, gradients in (((sums,), (dq,)), (left, of_keys)):
        for x in parts:
            arguments.tensor(x, tuple(x.shape[:2]), x.stride()[:3])
        for x in gradients:
            arguments.tensor(x, tuple(x.shape), x.stride()[:2])
    if left:
        tiles, heads = max(tiles, left[0].shape[1]), heads + 2 * of_keys[0].shape[1]
    arguments.tensor(plan, tuple(plan.shape), ())
    arguments.add(number, softmax_scale)
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
    head_parts: int,
) -> None:
    """The kernel between prepare and finish, of k and (sums, counter), behind the maps in ``arguments``."""
    k, (sums, counter), (plan, number) = keys, results, plan_and_number
    heads, tiles, *_ = sums.shape
    kv_heads, program = k.shape[1] * head_parts, program_of(config)
    is_paired = isinstance(config, PairedBackwardConfig)
    arguments.tensor(sums, (tiles * heads,), (sums.stride(2), sums.stride(1)))
    of_counter = (
        (counter[SCHEDULER_WORDS:], (tiles * heads,), ()) if is_paired else (counter, (len(counter),), ())
    )
    arguments.tensor(*of_counter)
    arguments.add(*scale_and_sides)
    arguments.tensor(plan, tuple(plan.shape), ())
    arguments.add(number, heads // kv_heads, *(() if is_paired else (kv_heads,)), tiles)
    add_rules(arguments, rules)
    if config.divides_heads:
        arguments.add(*divided_heads(config, (heads, k.shape[1], kv_heads)))
    if is_paired:
        of_tiles = CLUSTER_CTAS * plan_entries(k.shape[0], number - 1, config.tile_n)
        arguments.launch(program, (of_tiles, kv_heads, 1), timing, CLUSTER_CTAS)
    else:
        arguments.launch(program, (ctas, 1, 1), timing)
