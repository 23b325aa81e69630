"""The kernels without WGMMA on packed sequences, run from their PTX on NumPy."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.plan.config import ENTRY, PLAN_HEADER, RECORD
from tests.hopper.hopper_machine import AT_ONCE, Timing
from tests.hopper.on_numpy import LOG2_E, NO_RULES, Arguments, Rules, program_of


def packed_ampere_forward_on_numpy(
    config: AmpereForwardConfig,
    inputs: tuple[Tensor, Tensor, Tensor],
    plan: Tensor,
    sequences: int,
    softmax_scale: float,
    timing: Timing = AT_ONCE,
    sides: tuple[int, ...] = (),
    wants_lse: bool = True,
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse of packed (q, k, v) by the kernel of ``config`` without WGMMA, NaN where it writes nothing."""
    q, k, v = inputs
    total_q, heads, _ = q.shape
    out = torch.full((total_q, heads, v.shape[2]), math.nan, dtype=q.dtype)
    lse = torch.full((heads, total_q if wants_lse else 0), math.nan)
    arguments = Arguments()
    for tensor in (q, k, v, out, lse, plan):
        arguments.tensor(tensor, tuple(tensor.shape), tensor.stride()[:-1])
    arguments.add(sequences, (rules.softcap or softmax_scale) * LOG2_E, *sides)
    arguments.rules(rules, softmax_scale)
    tiles = (len(plan) - PLAN_HEADER - RECORD * sequences) // ENTRY * heads
    arguments.launch(program_of(config), (tiles, 1, 1), timing)
    return out, lse


def launch_packed_ampere_gradients(
    config: AmpereBackwardConfig,
    tensors: tuple[Tensor, ...],
    plan: Tensor,
    sequences: int,
    scale_and_sides: tuple[float | int, ...],
    timing: Timing = AT_ONCE,
    rules: Rules = NO_RULES,
) -> None:
    """Run the backward kernel of ``config`` on packed ``tensors``, from q to the counter, and a plan of key
    tiles."""
    softmax_scale, *sides = scale_and_sides
    arguments = Arguments()
    for tensor in tensors:
        sizes = tensor.shape[:2] if tensor.dim() == 4 else tensor.shape
        arguments.tensor(tensor, tuple(sizes), tensor.stride()[:-1])
    arguments.tensor(plan, (len(plan),), ())
    arguments.add(sequences, softmax_scale, (rules.softcap or softmax_scale) * LOG2_E, *sides)
    arguments.rules(replace(rules, sinks=None), softmax_scale)
    ctas = (len(plan) - PLAN_HEADER - RECORD * sequences) // ENTRY * tensors[1].shape[1]
    arguments.launch(program_of(config), (ctas, 1, 1), timing, ctas if config.ordered else 1)
