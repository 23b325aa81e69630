"""The attention kernels, compiled to PTX and run on NumPy: no GPU takes part."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.backward.step import BackwardStep, SteppedConfig
from hopper.backward.batch import DenseBatch
from hopper.backward.config import CLUSTER_CTAS, BackwardConfig, PairedBackwardConfig
from hopper.backward.pair_batch import PAIRS_UNDER_WAY
from hopper.backward.parts import divided_heads
from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention.launch.fp8 import ALL_ROWS, adds_mean
from hopper_attention.launch.gradient_memory import (
    backward_counter,
    divided_shape,
    dq_shape,
    lse_shape,
    subtract_lse_gradient,
)
from hopper_attention.launch.widen import WIDE_CODES
from hopper_attention.quantization import QuantizedQKV, TransposedV
from hopper_attention.quantized import transpose_for_kernel
from tests.hopper.backward_maps import backward_maps
from tests.hopper.edges import memory_of_runs
from tests.hopper.hopper_machine import AT_ONCE, Cta, Program, Timing, parse, run
from tests.hopper.led import first_rows_of, lengths_of
from tests.hopper.rules import NO_RULES, Rules
from tests.hopper.tensor_maps import (
    query_map,
    ragged_map,
    row_map,
    storage_of,
    tile_map,
)
from tests.ptx import ptx_of

BUFFER_STEP = 1 << 40
"""Buffers lie so far apart that an address cut to 32 bits misses all of them."""

LOG2_E = math.log2(math.e)


@cache
def program_of(config: Any) -> Program:
    return parse(ptx_of(config))


class Arguments:
    """Parameters of a kernel as the DSL packs them, and the memory that they point into, of which ``older`` has what a
    relaxed load finds in place of some."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.memory: dict[int, np.ndarray] = {}
        self.older: dict[int, np.ndarray] = {}

    def add(self, *values: Any) -> None:
        """Tensor maps, floats and integers as they are."""
        packing = {float: "<f", int: "<i"}
        self.values += [struct.pack(packing[type(v)], v) if type(v) in packing else v for v in values]

    def divisors(self, *numbers: int) -> None:
        """Numbers that are divided by, each with what makes its division a multiplication and two shifts (Granlund and
        Montgomery, "Division by invariant integers using multiplication", figure 4.1)."""
        for number in numbers:
            bits = (number - 1).bit_length()
            factor = ((2**bits - number) << 32) // number + 1
            shifts = min(bits, 1), max(bits - 1, 0)
            self.values += [struct.pack("<2I2B2x", number, factor, *shifts), struct.pack("<i", number)]

    def tensor(
        self, tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], older: Tensor | None = None
    ) -> None:
        """A pointer with the sizes and strides that are not fixed when compiling."""
        base = BUFFER_STEP * (len(self.memory) + 1)
        self.memory[base] = storage_of(tensor).view(np.uint8)
        if older is not None:
            self.older[base] = storage_of(older).view(np.uint8)
        first = base + tensor.storage_offset() * tensor.element_size()
        head = struct.pack(f"<Q{len(sizes)}i", first, *sizes)
        self.values.append(head + b"\0" * (-len(head) % 8) + struct.pack(f"<{len(strides)}q", *strides))

    def parts(self, tensor: Tensor) -> None:
        """Partial results."""
        self.tensor(tensor, tuple(tensor.shape), tensor.stride()[:-1])

    def left(self, *tensors: Tensor) -> None:
        """dK and dV of parts of heads, from the last mode to the first."""
        for tensor in tensors:
            self.tensor(tensor, tuple(tensor.shape[-3::-1]), tensor.stride()[-2::-1])

    def rows_of(self, tensor: Tensor) -> None:
        """A tensor (batch, seqlen, heads, head_dim) as (seqlen, head_dim, heads, batch)."""
        rows = tensor.permute(1, 3, 2, 0)
        self.tensor(tensor, tuple(rows.shape), (rows.stride(0), *rows.stride()[2:]))

    def heads_in_rows(self, tensor: Tensor) -> None:
        """The same as ((heads, seqlen), head_dim, batch)."""
        rows = tensor.permute(2, 1, 3, 0)
        self.tensor(tensor, tuple(rows.shape), (*rows.stride()[:2], rows.stride(3)))

    def asked(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """What a forward kernel asks for before it waits for the one in front, last."""
        self.rows_of(q)
        self.rows_of(k)
        self.tensor(v, tuple(v.permute(3, 1, 2, 0).shape), (v.stride(1), v.stride(2), v.stride(0)))

    def rules(self, rules: Rules, softmax_scale: float) -> None:
        """What a kernel without WGMMA takes of them, last."""
        self.softcap_and_slopes(rules, softmax_scale)
        self.sinks(rules)
        self.dropout_and_functions(rules)

    def softcap_and_slopes(self, rules: Rules, softmax_scale: float) -> None:
        if rules.softcap:
            self.add(softmax_scale / rules.softcap)
        self.slopes(rules)

    def slopes(self, rules: Rules) -> None:
        if rules.slopes is not None:
            self.tensor(rules.slopes, tuple(rules.slopes.shape), rules.slopes.stride()[:1])

    def sinks(self, rules: Rules) -> None:
        if rules.sinks is not None:
            self.tensor(rules.sinks, tuple(rules.sinks.shape), ())

    def dropout_and_functions(self, rules: Rules) -> None:
        """What every kernel takes of it, behind the rest."""
        if rules.philox is not None:
            self.tensor(rules.philox, (), ())
            self.add(rules.kept)
        for tensor in rules.captured.for_kernel:
            self.tensor(tensor, tuple(tensor.shape), tensor.stride())
        if rules.lists is not None:
            self.tensor(rules.lists, tuple(rules.lists.shape)[:4], rules.lists.stride()[:3])

    def packed(
        self,
        lse: Tensor,
        plan: Tensor,
        numbers: tuple[int, int],
        softmax_scale: float,
        sides: tuple[int, ...],
        rules: Rules = NO_RULES,
    ) -> Tensor:
        """What a kernel of packed sequences takes behind its maps, up to what is done to scores; ``numbers`` are those
        of sequences and of the heads of a K/V head. Gives the counter of tiles, which the kernel is to leave zero."""
        self.values += [b"\0" * 16] * len(self.values)
        if lse.dim() == 4:
            self.parts(lse)
        else:
            self.tensor(lse, tuple(lse.shape[::-1]), (lse.stride(0),))
        counter = torch.zeros(2, dtype=torch.int32)
        self.tensor(counter, (), ())
        self.sinks(rules)
        self.add((rules.softcap or softmax_scale) * LOG2_E)
        self.tensor(plan, tuple(plan.shape), ())
        self.add(*numbers, *sides)
        self.softcap_and_slopes(rules, softmax_scale)
        return counter

    def launch(
        self, program: Program, grid: tuple[int, int, int], timing: Timing = AT_ONCE, cluster: int = 1
    ) -> None:
        """Clusters, of neighbours along x, run one after the other."""
        parameters = dict(zip(program.parameters, self.values, strict=True))
        for z, y, x in product(range(grid[2]), range(grid[1]), range(0, grid[0], cluster)):
            ctas = (
                Cta(parameters, self.memory, (x + i, y, z), grid, timing, older=self.older)
                for i in range(cluster)
            )
            run(program, *ctas)


def unwritten(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of dense or packed tensors, all NaN."""
    *batch, rows, heads, _ = q.shape
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype)
    return out, torch.full((*batch, heads, rows), math.nan)


def forward_on_numpy(
    config: ForwardConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    ctas: int = 1,
    timing: Timing = AT_ONCE,
    sides: tuple[int, int] = (),
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse as the 16-bit kernel of ``config`` leaves them; ``sides`` are those of a window."""
    c = config
    arguments, out, lse = _forward_arguments(config, q, v.shape[3], q.dtype)
    arguments.values[:4] = (
        query_map(c, q, c.head_dim),
        row_map(k, c.tile_n, c.head_dim),
        row_map(v, c.tile_n, c.head_dim_v),
        query_map(c, out, c.head_dim_v),
    )
    arguments.sinks(rules)
    finish_forward(c, arguments, q, k, rules.softcap or softmax_scale)
    arguments.add(*sides)
    arguments.softcap_and_slopes(rules, softmax_scale)
    arguments.dropout_and_functions(rules)
    if c.o_from_registers:
        arguments.rows_of(out)
    if c.asks_early:
        arguments.asked(q, k, v)
    if rows := first_rows_of(c, q, k):
        arguments.values += [row_map(out[:, :rows], WARPGROUP_ROWS, c.head_dim_v), b"\0" * 16]
    if c.few_keys:
        for rows, columns in ((k, c.head_dim), (v, c.head_dim_v)):
            arguments.values += [row_map(rows, c.few_keys, columns), b"\0" * 16]
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    return out, lse


def packed_forward_on_numpy(
    config: ForwardConfig,
    tensors: tuple[Tensor, Tensor, Tensor],
    plan: Tensor,
    sequences: int,
    softmax_scale: float,
    ctas: int = 1,
    timing: Timing = AT_ONCE,
    sides: tuple[int, int] = (),
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse of packed q, k and v, which were NaN before; ``sequences`` counts that of rows of no sequence, and of
    ``rules`` dropout is taken."""
    c, (q, k, v) = config, tensors
    out, lse = unwritten(q, v)
    arguments = Arguments()
    arguments.add(
        query_map(c, q, c.head_dim),
        ragged_map(k, c.tile_n, c.head_dim),
        ragged_map(v, c.tile_n, c.head_dim_v),
        query_map(c, out, c.head_dim_v),
    )
    heads = q.shape[1] // (k.shape[1] * c.group)
    counter = arguments.packed(lse, plan, (sequences, heads), softmax_scale, sides)
    arguments.dropout_and_functions(rules)
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    assert not counter.any(), "the next launch would begin with tiles that this one has counted"
    return out, lse


def ampere_forward_on_numpy(
    config: AmpereForwardConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    timing: Timing = AT_ONCE,
    sides: tuple[int, ...] = (),
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse as the kernel of ``config`` without WGMMA leaves them, which works on all heads of a batch together;
    ``sides`` are those of its window."""
    batch, seqlen_q, heads, _ = q.shape
    out, lse = unwritten(q, v)
    arguments = Arguments()
    for tensor in (q, k, v, out):
        arguments.tensor(tensor, tuple(tensor.shape), tensor.stride()[:3])
    arguments.tensor(lse, tuple(lse.shape), lse.stride()[:2])
    arguments.add((rules.softcap or softmax_scale) * LOG2_E, heads // k.shape[2], heads, batch - 1, *sides)
    arguments.rules(rules, softmax_scale)
    tiles = -(-seqlen_q // config.tile_m) * heads * batch
    arguments.launch(program_of(config), (tiles, 1, 1), timing)
    return out, lse


def fp8_forward_on_numpy(
    config: Fp8ForwardConfig,
    parts: QuantizedQKV,
    softmax_scale: float,
    timing: Timing = AT_ONCE,
    sides: tuple[int, ...] = (),
    runs: tuple[Tensor, Tensor] | None = None,
    rules: Rules = NO_RULES,
) -> tuple[Tensor, Tensor]:
    """out and lse as the FP8 kernel leaves them; ``sides`` of its window, ``runs`` means of V's and ``changes``."""
    c, q, k, v = config, parts.q, parts.k, parts.v
    arguments, out, lse = _forward_arguments(config, q.data, v.shape[3], parts.dtype)
    arguments.values[:4] = *fp8_maps(c, parts), query_map(c, out, c.head_dim_v)
    add_scales(c, arguments, parts)
    if c.run_blocks:
        mean_v = mean_of(parts)
        means, changes = runs or (mean_v[:, :0, None], torch.zeros(len(mean_v), 0, 4, dtype=torch.int32))
        for x, n in memory_of_runs(c, means, changes):
            arguments.tensor(x, tuple(x.shape[:n]), x.stride()[:-1])
    arguments.softcap_and_slopes(rules, softmax_scale)
    arguments.sinks(rules)
    finish_forward(c, arguments, q.data, k.data, rules.softcap or softmax_scale)
    arguments.add(*sides)
    arguments.softcap_and_slopes(rules, softmax_scale)
    asked = (q.data, k.data, v.row_major().data) if c.asks_early else ()
    if c.o_from_registers:
        (arguments.heads_in_rows if c.group > 1 else arguments.rows_of)(out)
    for rows in asked:
        arguments.rows_of(rows)
    arguments.launch(program_of(config), (1, 1, 1), timing)
    return out, lse


def fp8_maps(config: Fp8ForwardConfig, parts: QuantizedQKV) -> tuple[Any, Any, Any]:
    """Of Q, K and V."""
    c, v = config, parts.v
    if c.v_rows:
        v_map = row_map(v.row_major().data, c.tile_n, c.head_dim_v)
    else:
        vt = v.data if isinstance(v, TransposedV) else transpose_for_kernel(v.data)
        v_map = tile_map(vt, (3, 2, 1, 0), c.head_dim_v, c.tile_n)
    q, k = (x.data.to(WIDE_CODES) if c.wide_codes else x.data for x in (parts.q, parts.k))
    return query_map(c, q, c.head_dim), row_map(k, c.tile_n, c.head_dim), v_map


def mean_of(parts: QuantizedQKV) -> Tensor:
    """That of V which the kernel adds."""
    return parts.mean_v if adds_mean(parts) else torch.empty(*parts.v.scale.shape[:2], 0)


def add_scales(config: Fp8ForwardConfig, arguments: Arguments, parts: QuantizedQKV) -> None:
    """Those of Q, of which the heads of a tile share lone ones, of K, V and the output; the mean of V; rows that share
    one."""
    c, q, k, v = config, parts.q, parts.k, parts.v
    v_scales = v.scale, torch.ones(*v.scale.shape[:2], 1)
    of_q, free = q.scale, 2
    if c.lone_scales:
        of_q, free = q.scale[:, :: c.group].unflatten(1, (k.scale.shape[1], -1))[..., 0], 3
    of_others = k.scale, *v_scales[:: -1 if v.scale.shape[2] == 1 else 1], mean_of(parts)
    arguments.tensor(of_q.clone(), tuple(of_q.shape), of_q.contiguous().stride()[:free])
    for scale in of_others:
        arguments.tensor(scale.clone(), tuple(scale.shape), scale.contiguous().stride()[:2])
    (arguments.divisors if c.has_block_divisor else arguments.add)(min(q.block, ALL_ROWS))
    arguments.add(ALL_ROWS if v.scale.shape[2] == 1 else k.block)


def _forward_arguments(
    config: ForwardConfig, q: Tensor, head_dim_v: int, dtype: torch.dtype
) -> tuple[Arguments, Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    out = torch.full((batch, seqlen_q, heads, head_dim_v), math.nan, dtype=dtype)
    lse = torch.full((batch, heads, seqlen_q), math.nan)
    arguments = Arguments()
    arguments.values += [b"\0" * 128] * 4 + [b"\0" * 16] * 4
    arguments.tensor(lse, (seqlen_q, heads, batch), (lse.stride(1), lse.stride(0)))
    arguments.tensor(torch.zeros(2, dtype=torch.int32), (), ())
    return arguments, out, lse


def finish_forward(
    config: ForwardConfig, arguments: Arguments, q: Tensor, k: Tensor, softmax_scale: float
) -> None:
    """The heads are in sections of one key/value head, and the last of two, where there are several. Of several tiles
    of a head that may come behind all sections, one does."""
    (batch, seqlen_q, heads, _), kv_heads = q.shape, k.shape[2] * q.shape[0]
    heads //= config.group
    group = heads * batch // kv_heads
    arguments.add(softmax_scale * LOG2_E, *lengths_of(config, q, k), group, group, max(kv_heads - 2, 0))
    if config.has_divisors:
        m_blocks = -(-seqlen_q // config.tile_queries)
        short = min(m_blocks - 1, 1) if config.ends_with_short_tiles else 0
        tiles = (m_blocks - short) * (group if config.causal else 1)
        arguments.divisors(tiles, group, min(2, kv_heads) * group, heads, group)
        if config.ends_with_short_tiles:
            arguments.add(short)
            arguments.divisors(heads * batch)


def backward_on_numpy(
    config: BackwardConfig | AmpereBackwardConfig,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    timing: Timing = AT_ONCE,
    dlse: Tensor | None = None,
    sides: tuple[int, ...] = (),
    rules: Rules = NO_RULES,
    key_tiles: int = 1,
    head_parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, as the three backward kernels of ``config`` leave them for (dout, q, k, v); ``sides`` are
    those of a window, ``key_tiles`` those of a strip where there are strips, ``head_parts`` those of divided heads."""
    dout, q, k, v = inputs
    has_strips = isinstance(config, BackwardConfig) and config.strips
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    if isinstance(config, BackwardConfig) and config.one_tile:
        _launch_one_tile(config, inputs, (out, lse), (dq, dk, dv), softmax_scale, timing)
        return dq, dk, dv
    lse_log2, delta, sums = prepare_on_numpy(config, out, dout, lse)
    left: tuple[Tensor, ...] = ()
    if dlse is not None:
        subtract_lse_gradient(delta, lse, dlse)

    if isinstance(config, AmpereBackwardConfig):
        tensors = (q, k, v, dout, lse_log2, delta, sums, dk, dv, backward_counter(config, sums))
        _launch_ampere_gradients(config, tensors, (softmax_scale, *sides), timing, rules)
    else:
        arguments = Arguments()
        maps = backward_maps(config, (dout, q, k, v), (lse_log2, delta), (dk, dv))
        maps += [row_map(dq, WARPGROUP_ROWS, config.dq_columns)] if has_strips else []
        arguments.add(*maps)
        arguments.values += [b"\0" * 16] * len(maps)
        if has_strips:
            _launch_strips(config, arguments, (q, k, dq), (softmax_scale, *sides), timing, key_tiles)
            return dq, dk, dv
        if config.divides_heads:
            left = tuple(torch.full(divided_shape(config, k.shape, head_parts), math.nan) for _ in "kv")
            arguments.left(*left)
        given = softmax_scale, *sides
        _launch_gradients(config, arguments, (q, k), sums, given, timing, rules, head_parts)

    finish_on_numpy(config, sums, dq, softmax_scale, left, (dk, dv) if left else ())
    return dq, dk, dv


def finish_on_numpy(
    config: SteppedConfig,
    sums: Tensor,
    dq: Tensor,
    softmax_scale: float,
    left: tuple[Tensor, ...] = (),
    of_keys: tuple[Tensor, ...] = (),
) -> None:
    """Fill dq from the sums of a backward kernel of ``config``, and ``of_keys``, dk and dv, from what was ``left`` of
    them, if it was."""
    arguments, (batch, heads, tiles) = Arguments(), sums.shape[:3]
    for parts, gradients in (((sums,), (dq,)), (left, of_keys)):
        for x in parts:
            arguments.tensor(x, tuple(x.shape[:3]), x.stride()[:4])
        for x in gradients:
            arguments.tensor(x, tuple(x.shape), x.stride()[:3])
    if left:
        tiles, heads = max(tiles, left[0].shape[2]), heads + 2 * of_keys[0].shape[2]
    arguments.add(softmax_scale)
    arguments.launch(program_of(BackwardStep("finish", config)), (tiles, heads, batch))


def prepare_on_numpy(
    config: SteppedConfig, out: Tensor, dout: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp in base 2, delta and sums of dQ, as they are given to a backward kernel of ``config``."""
    lse_log2, delta = (torch.full(lse_shape(config, out.shape), math.nan) for _ in range(2))
    sums = torch.full(dq_shape(config, out.shape), math.nan)
    arguments = Arguments()
    for tensor in (out, dout):
        arguments.tensor(tensor, tuple(tensor.shape), tensor.stride()[:3])
    for tensor in (lse, lse_log2, delta):
        arguments.tensor(tensor, tuple(tensor.shape), tensor.stride()[:2])
    arguments.tensor(sums, tuple(sums.shape), sums.stride()[:4])
    batch, heads, padded = delta.shape
    arguments.launch(program_of(BackwardStep("prepare", config)), (padded // config.tile_m, heads, batch))
    return lse_log2, delta, sums


def _launch_ampere_gradients(
    config: AmpereBackwardConfig,
    tensors: tuple[Tensor, ...],
    scale_and_sides: tuple[float | int, ...],
    timing: Timing,
    rules: Rules,
) -> None:
    """The kernel between prepare and finish, of its arguments in their order; all CTAs beside each other if they may
    wait for each other."""
    softmax_scale, *sides = scale_and_sides
    q, k = tensors[:2]
    arguments = Arguments()
    for tensor in tensors:
        # Dq's parts and words are fixed when compiling.
        sizes = tensor.shape[:3] if tensor.dim() == 5 else tensor.shape
        arguments.tensor(tensor, tuple(sizes), tensor.stride()[:-1])
    scale = rules.softcap or softmax_scale
    arguments.add(softmax_scale, scale * LOG2_E, q.shape[2] // k.shape[2], *sides)
    arguments.rules(replace(rules, sinks=None), softmax_scale)
    ctas = -(-k.shape[1] // config.tile_n) * k.shape[2] * k.shape[0]
    arguments.launch(program_of(config), (ctas, 1, 1), timing, ctas if config.ordered else 1)


def _launch_gradients(
    config: BackwardConfig,
    arguments: Arguments,
    inputs: tuple[Tensor, Tensor],
    sums: Tensor,
    scale_and_sides: tuple[float | int, ...],
    timing: Timing,
    rules: Rules,
    head_parts: int,
) -> None:
    """The kernel between prepare and finish, of (q, k), behind the maps that are in ``arguments``."""
    c, (q, k) = config, inputs
    batch, heads, tiles, *_ = sums.shape
    kv_heads, program = k.shape[2] * head_parts, program_of(config)
    n_blocks, m_blocks = (-(-x.shape[1] // tile) for x, tile in ((k, c.tile_n), (q, c.tile_m)))
    sizes = *scale_and_sides, q.shape[1], k.shape[1], heads // kv_heads
    views = [x.permute(1, 3, 2, 0) for x in (q, k.repeat_interleave(head_parts, 2))]
    divisor = divided_heads(c, (heads, k.shape[2], kv_heads)) if c.divides_heads else ()
    if isinstance(c, PairedBackwardConfig):
        arguments.tensor(sums, (tiles * heads, batch), (sums.stride(3), sums.stride(2), sums.stride(0)))
        counter = backward_counter(config, sums)
        counts = (tiles * heads, batch), (c.counts_per_tile * tiles * heads,)
        arguments.tensor(counter[2:], *counts)
        arguments.add(*sizes)
        add_rules(arguments, rules)
        grid = (CLUSTER_CTAS * n_blocks, kv_heads, batch)
        if c.has_sections or c.shortens:
            sections = DenseBatch(c).even_sections(*views, PAIRS_UNDER_WAY)
            order = sections if c.has_sections else DenseBatch(c).tail(*views)
            arguments.add(n_blocks, kv_heads, batch, *order)
            grid = (CLUSTER_CTAS * n_blocks * kv_heads * batch, 1, 1)
        arguments.add(*divisor)
        arguments.launch(program, grid, timing, CLUSTER_CTAS)
        return
    arguments.tensor(sums, (tiles * heads * batch,), (sums.stride(3), sums.stride(2)))
    counter = backward_counter(config, sums)
    arguments.tensor(counter, (len(counter),), ())
    tail: tuple[int, ...] = ()
    if c.shortens:
        tail = DenseBatch(c).tail(*views, (int(scale_and_sides[1]),) if c.window else ())
    if c.has_sections:
        tail = DenseBatch(c).even_sections(*views, 1)
    if c.has_late_heads:
        tail = tail[0], DenseBatch(c).late_heads(*views)
    arguments.add(*sizes, n_blocks, kv_heads, batch, *tail, n_blocks * kv_heads * batch, m_blocks)
    add_rules(arguments, rules)
    arguments.add(*divisor)
    arguments.launch(program, (1, 1, 1), timing)


def _launch_one_tile(
    config: BackwardConfig,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    softmax_scale: float,
    timing: Timing,
) -> None:
    """A kernel with ``one_tile``, of (dout, q, k, v), (out, lse) and (dq, dk, dv)."""
    c, (_, q, k, _), (out, lse), (dq, dk, dv) = config, inputs, results, gradients
    batch, seqlen, heads, columns = q.shape
    kv_heads = k.shape[2]
    maps = backward_maps(c, inputs, (lse,), (dk, dv))
    maps.insert(5, row_map(out, c.tile_m, c.head_dim_v))
    maps.append(row_map(dq, WARPGROUP_ROWS, c.dq_columns))
    arguments = Arguments()
    arguments.add(*maps)
    arguments.values += [b"\0" * 16] * len(maps)
    arguments.tensor(dq, (seqlen, columns, heads, batch), (dq.stride(1), dq.stride(2), dq.stride(0)))
    counter = torch.zeros(2, dtype=torch.int32)
    arguments.tensor(counter, (len(counter),), ())
    sizes = seqlen, k.shape[1], heads // kv_heads, 1, kv_heads, batch
    arguments.add(softmax_scale, *sizes, kv_heads * batch, -(-seqlen // c.tile_m))
    arguments.launch(program_of(config), (1, 1, 1), timing)


def _launch_strips(
    config: BackwardConfig,
    arguments: Arguments,
    tensors: tuple[Tensor, Tensor, Tensor],
    scale_and_sides: tuple[float | int, ...],
    timing: Timing,
    key_tiles: int,
) -> None:
    """The same of a kernel with strips of ``key_tiles`` key tiles, of (q, k, dq)."""
    c, (q, k, dq) = config, tensors
    batch, seqlen, heads, columns = q.shape
    n_blocks, m_blocks = -(-k.shape[1] // c.tile_n), -(-seqlen // c.tile_m)
    counter = torch.zeros(2, dtype=torch.int32)
    strides = dq.stride(1), dq.stride(2), dq.stride(0)
    arguments.tensor(dq, (seqlen, columns, heads, batch), strides)
    arguments.tensor(counter, (len(counter),), ())
    strips = -(-n_blocks // key_tiles) * heads * batch
    arguments.add(
        *scale_and_sides, seqlen, k.shape[1], 1, n_blocks, heads, batch, key_tiles, strips, m_blocks
    )
    arguments.launch(program_of(config), (1, 1, 1), timing)


def add_rules(arguments: Arguments, rules: Rules) -> None:
    if rules.softcap:
        arguments.add(rules.softcap)
    arguments.slopes(rules)
    arguments.dropout_and_functions(rules)
