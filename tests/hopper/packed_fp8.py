"""The FP8 forward kernel on packed sequences, compiled to PTX and run on NumPy: no GPU takes part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hopper.forward.fp8.config import FP8_KEYS_PER_STEP, Fp8ForwardConfig
from hopper.tiles import ADDRESS_PART, RAGGED_ROWS
from hopper_attention.launch.widen import WIDE_CODES
from hopper_attention.packed_quantized import ONE_PER_SEQUENCE, PackedQuantizedQKV, PackedTransposedV
from tests.hopper.hopper_machine import AT_ONCE, TensorMap, Timing
from tests.hopper.on_numpy import LOG2_E, NO_RULES, Arguments, Rules, program_of
from tests.hopper.split_on_numpy import end_rows, unwritten_parts
from tests.hopper.tensor_maps import SWIZZLED_ROWS, elements_of, query_map, ragged_map


def transposed_map(tensor: Tensor, rows: int, keys: int) -> TensorMap:
    """Of V (kv_heads, head_dim_v, keys) whose sequences have whole steps of keys, as ``ragged_view`` has it."""
    head_stride, row_stride, _ = tensor.stride()
    width, step = next(w for w in SWIZZLED_ROWS if keys % w == 0), FP8_KEYS_PER_STEP
    sizes = (RAGGED_ROWS, tensor.shape[1], tensor.shape[0], RAGGED_ROWS // step + 1, 2**31 - 1)
    strides = (1, row_stride, head_stride, (ADDRESS_PART - 1) * step, step)
    return TensorMap(elements_of(tensor), sizes, strides, (width, rows, 1, 1, 1), SWIZZLED_ROWS[width])


def _scales(config: Fp8ForwardConfig, parts: PackedQuantizedQKV) -> tuple[Tensor, ...]:
    """Those of Q, of which the heads of a tile share one, of K, V and the output, as the kernel takes them."""
    (q, k, v), sequences, kv_heads = (parts.q, parts.k, parts.v), parts.batch + 1, parts.k.shape[1]
    ones = torch.ones(sequences, kv_heads, 1)
    if config.lone_scales:
        of_q, of_k, of_v = (x.scale.t()[:-1].contiguous() for x in (q, k, v))
        of_q = of_q[:, :: config.group].contiguous()
        return of_q.unflatten(1, (kv_heads, -1)), of_k[..., None], ones, of_v[..., None]
    if v.block == ONE_PER_SEQUENCE:
        return q.scale[None], k.scale[None], ones.view(1, kv_heads, -1), v.scale.t()[..., None].contiguous()
    return q.scale[None], k.scale[None], v.scale[None], ones


def packed_fp8_forward_on_numpy(
    config: Fp8ForwardConfig,
    parts: PackedQuantizedQKV,
    plan: Tensor,
    softmax_scale: float,
    ctas: int = 1,
    timing: Timing = AT_ONCE,
    sides: tuple[int, ...] = (),
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse, which were NaN before; ``plan`` is of query tiles, and of ``rules`` a softcap and sinks are taken.
    The counter of tiles has to be left zero."""
    c, q, v = config, parts.q, parts.v
    total_q, heads, _ = q.shape
    out = torch.full((total_q, heads, v.shape[2]), math.nan, dtype=parts.dtype)
    lse = torch.full((heads, total_q), math.nan)
    arguments = Arguments()
    arguments.add(*_operands(c, parts), query_map(c, out, c.head_dim_v))
    arguments.values += [b"\0" * 16] * 4
    arguments.tensor(lse, (total_q, heads), (lse.stride(0),))
    counter = _finish(c, arguments, parts, plan, softmax_scale, rules)
    arguments.add(*sides)
    arguments.softcap_and_slopes(rules, softmax_scale)
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    assert not counter.any()
    return out, lse


def packed_fp8_parts_on_numpy(
    config: Fp8ForwardConfig,
    parts: PackedQuantizedQKV,
    plan: Tensor,
    softmax_scale: float,
    splits: int,
    ctas: int = 1,
    timing: Timing = AT_ONCE,
    rules: Rules = NO_RULES,
    sides: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """The same in ``splits`` parts, (splits, 1, total_q, heads) of lse."""
    out, lse = unwritten_parts(splits, 1, parts.q.shape[0], parts.q.data, parts.v)
    arguments = Arguments()
    arguments.add(*_operands(config, parts))
    arguments.values += [b"\0" * 16] * 3
    arguments.parts(lse)
    counter = _finish(config, arguments, parts, plan, softmax_scale, rules)
    arguments.add(*sides)
    arguments.softcap_and_slopes(rules, softmax_scale)
    arguments.parts(out)
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    end_rows(out, lse)
    assert not counter.any()
    return out, lse


def _operands(config: Fp8ForwardConfig, parts: PackedQuantizedQKV) -> tuple[TensorMap, ...]:
    """Of Q, K and V."""
    c, v = config, parts.v
    q, k = (x.data.to(WIDE_CODES) if c.wide_codes else x.data for x in (parts.q, parts.k))
    values = (
        transposed_map(v.data, c.head_dim_v, c.tile_n)
        if isinstance(v, PackedTransposedV)
        else ragged_map(v.data, c.tile_n, c.head_dim_v)
    )
    return query_map(c, q, c.head_dim), ragged_map(k, c.tile_n, c.head_dim), values


def _finish(
    config: Fp8ForwardConfig,
    arguments: Arguments,
    parts: PackedQuantizedQKV,
    plan: Tensor,
    scale: float,
    rules: Rules,
) -> Tensor:
    """What comes behind the LSE, up to the number of heads; gives the counter of tiles."""
    c, (q, k), sequences = config, (parts.q, parts.k), parts.batch + 1
    heads, kv_heads = q.shape[1], k.shape[1]
    counter = torch.zeros(2, dtype=torch.int32)
    arguments.tensor(counter, (), ())
    has_mean = parts.mean_v.numel() > 0 and not parts.quantization.rotate_v
    mean = parts.mean_v if has_mean else torch.empty(sequences, kv_heads, 0)
    for i, of in enumerate((*_scales(c, parts), mean)):
        free = 3 if c.lone_scales and i == 0 else 2
        arguments.tensor(of, tuple(of.shape), of.stride()[:free])
    arguments.add(q.block, k.block)
    arguments.softcap_and_slopes(rules, scale)
    arguments.sinks(rules)
    arguments.add((rules.softcap or scale) * LOG2_E)
    arguments.tensor(plan, tuple(plan.shape), ())
    arguments.add(sequences, heads // (kv_heads * c.group))
    return counter
