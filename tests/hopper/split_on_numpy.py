"""Forward kernels whose tiles are in parts, run on NumPy (``on_numpy``)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cute_kernels.combine.config import END
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention.quantized import QuantizedQKV
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import (
    NO_RULES,
    Arguments,
    Rules,
    add_scales,
    finish_forward,
    fp8_maps,
    program_of,
)
from tests.hopper.tensor_maps import query_map, ragged_map, row_map
from tests.plans import InParts


def in_small_parts(config: ForwardConfig, splits: int) -> InParts:
    """A plan in which a sequence has a part for each of its key blocks, up to so many."""
    return InParts(config.tile_n, 1, 1, splits, each=1)


def unwritten_parts(splits: int, batch: int, rows: int, q: Tensor, v: Any) -> tuple[Tensor, Tensor]:
    """Parts of out and of lse, all NaN."""
    shape = splits, batch, rows, q.shape[-2]
    return torch.full((*shape, v.shape[-1]), math.nan), torch.full(shape, math.nan)


def end_rows(parts: Tensor, lse: Tensor) -> None:
    """Make LSE behind the end of each row -inf. Nothing is to be stored there."""
    splits, *_ = lse.shape
    is_end = lse.view(torch.int32) == END
    number = torch.where(is_end.any(0), is_end.int().argmax(0), splits)
    is_behind = torch.arange(splits).view(-1, 1, 1, 1) >= number
    assert bool(lse[is_behind].isnan().all()) and bool(parts[is_behind].isnan().all())
    assert bool((is_end.sum(0) <= 1).all())
    lse[is_behind] = -math.inf


def parts_on_numpy(
    config: ForwardConfig,
    tensors: tuple[Tensor, Tensor, Tensor],
    softmax_scale: float,
    splits: int,
    ctas: int,
    timing: Timing,
) -> tuple[Tensor, Tensor]:
    """``splits`` parts of out and lse of q, k and v, which were NaN before."""
    c, (q, k, v) = config, tensors
    parts, lse = unwritten_parts(splits, *q.shape[:2], q, v)
    arguments = Arguments()
    arguments.add(
        query_map(c, q, c.head_dim), row_map(k, c.tile_n, c.head_dim), row_map(v, c.tile_n, c.head_dim_v)
    )
    arguments.values += [b"\0" * 16] * 3
    arguments.parts(lse)
    arguments.tensor(torch.zeros(2, dtype=torch.int32), (), ())
    finish_forward(c, arguments, q, k, softmax_scale)
    arguments.parts(parts)
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    return parts, lse


def fp8_parts_on_numpy(
    config: Fp8ForwardConfig,
    inputs: QuantizedQKV,
    softmax_scale: float,
    splits: int,
    ctas: int,
    timing: Timing,
    rules: Rules = NO_RULES,
    sides: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """The same of e4m3; of ``rules`` a softcap and sinks are taken."""
    q, k, v = inputs.q.data, inputs.k.data, inputs.v
    parts, lse = unwritten_parts(splits, *q.shape[:2], q, v)
    arguments = Arguments()
    arguments.add(*fp8_maps(config, inputs))
    arguments.values += [b"\0" * 16] * 3
    arguments.parts(lse)
    arguments.tensor(torch.zeros(2, dtype=torch.int32), (), ())
    add_scales(config, arguments, inputs)
    arguments.softcap_and_slopes(rules, softmax_scale)
    arguments.sinks(rules)
    finish_forward(config, arguments, q, k, rules.softcap or softmax_scale)
    arguments.add(*sides)
    arguments.softcap_and_slopes(rules, softmax_scale)
    arguments.parts(parts)
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    return parts, lse


def packed_parts_on_numpy(
    config: ForwardConfig,
    tensors: tuple[Tensor, Tensor, Tensor],
    plan: Tensor,
    sequences: int,
    softmax_scale: float,
    splits: int,
    ctas: int,
    timing: Timing,
) -> tuple[Tensor, Tensor]:
    """The same of packed q, k and v; ``sequences`` counts that of rows of no sequence."""
    c, (q, k, v) = config, tensors
    parts, lse = unwritten_parts(splits, 1, q.shape[0], q, v)
    arguments = Arguments()
    arguments.add(
        query_map(c, q, c.head_dim),
        ragged_map(k, c.tile_n, c.head_dim),
        ragged_map(v, c.tile_n, c.head_dim_v),
    )
    heads = q.shape[1] // (k.shape[1] * c.group)
    counter = arguments.packed(lse, plan, (sequences, heads), softmax_scale, ())
    arguments.parts(parts)
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    end_rows(parts, lse)
    assert not counter.any(), "the next launch would begin with tiles that this one has counted"
    return parts, lse
