"""The forward kernel for wide values, compiled to PTX and run on NumPy: no GPU takes part."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.tile_scheduler import Sections
from hopper.config import WARPGROUP_ROWS
from hopper.wide.config import WideForwardConfig
from tests.hopper.hopper_machine import AT_ONCE, Timing
from tests.hopper.on_numpy import LOG2_E, NO_RULES, Arguments, Rules, program_of, unwritten
from tests.hopper.tensor_maps import ragged_map, row_map

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def wide_on_numpy(
    config: WideForwardConfig,
    inputs: Inputs,
    softmax_scale: float,
    ctas: int = 1,
    timing: Timing = AT_ONCE,
    sides: tuple[int, ...] = (),
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse of (q, k, v, qv), NaN where the kernel writes nothing, by ``ctas`` clusters."""
    q, k, v, _ = inputs
    batch, seqlen_q, heads, _ = q.shape
    out, lse = unwritten(q, v)
    arguments = _maps(config, (*inputs, out), row_map)
    arguments.values += [b"\0" * 16] * len(arguments.values)
    arguments.tensor(lse, (seqlen_q, heads, batch), (lse.stride(1), lse.stride(0)))
    counter = torch.zeros(2, dtype=torch.int32)
    arguments.tensor(counter, (), ())
    arguments.sinks(rules)
    arguments.add((rules.softcap or softmax_scale) * LOG2_E, seqlen_q, k.shape[1])
    arguments.add(heads // k.shape[2], *Sections.even(heads, heads * batch), *sides)
    arguments.softcap_and_slopes(rules, softmax_scale)
    arguments.launch(program_of(config), (config.cluster * ctas, 1, 1), timing, config.cluster)
    assert not counter.any()
    return out, lse


def packed_wide_on_numpy(
    config: WideForwardConfig,
    inputs: Inputs,
    plan: Tensor,
    sequences: int,
    softmax_scale: float,
    ctas: int = 1,
    timing: Timing = AT_ONCE,
    sides: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """The same of packed tensors; ``sequences`` counts that of rows of no sequence."""
    q, k, v, _ = inputs
    out, lse = unwritten(q, v)
    arguments = _maps(config, (*inputs, out), ragged_map)
    counter = arguments.packed(lse, plan, (sequences, q.shape[1] // k.shape[1]), softmax_scale, sides)
    arguments.launch(program_of(config), (config.cluster * ctas, 1, 1), timing, config.cluster)
    assert not counter.any()
    return out, lse


def _maps(config: WideForwardConfig, tensors: tuple[Tensor, ...], map_of) -> Arguments:
    """Arguments that begin with the TMA of (q, k, v, qv, out)."""
    c, (q, k, v, qv, out) = config, tensors
    maps = [
        map_of(q, WARPGROUP_ROWS, c.head_dim),
        map_of(k, c.tile_n // c.cluster, c.head_dim),
        map_of(v, c.tile_n // c.cluster, c.half),
        map_of(out, WARPGROUP_ROWS, c.half),
    ]
    maps += [map_of(qv, WARPGROUP_ROWS, c.half)] if c.qv else []
    arguments = Arguments()
    arguments.add(*maps)
    return arguments
