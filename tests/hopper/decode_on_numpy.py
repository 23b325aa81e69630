"""The decode kernel, and the one that puts parts together, run from their PTX without a GPU."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import cache as kept

import torch
from torch import Tensor

from hopper.decode.config import PARTS_PER_CTA, DecodeConfig
from hopper.decode.schedule import heads_together
from hopper.mla.config import MlaConfig
from hopper.mla.schedule import tiles_together
from tests.hopper.hopper_machine import AT_ONCE, Program, TensorMap, Timing, parse
from tests.hopper.on_numpy import LOG2_E, NO_RULES, Arguments, Rules
from tests.hopper.paged_on_numpy import Cache
from tests.hopper.tensor_maps import elements_of, row_map
from tests.plans import Packed
from tests.ptx import ptx_of

UNLIMITED = 2**20
"""More parts than a tile can be in."""

ENTRY = ".visible .entry "


@dataclass(frozen=True)
class Queries:
    """q (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim) where the config is of such."""

    q: Tensor
    packed: Packed | None = None

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-3], self.heads, self.q.shape[-3])

    def of(self, number: int) -> Tensor:
        """Those of one sequence, (queries, heads, head_dim)."""
        return self.q[number] if self.packed is None else self.q[self._span(number)]

    def rows(self, out: Tensor, lse: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Theirs of out, (queries, heads, head_dim_v), and of lse, (heads, queries)."""
        if self.packed is None:
            return out[number], lse[number]
        return out[self._span(number)], lse[:, self._span(number)]

    def _span(self, number: int) -> slice:
        assert self.packed is not None
        return slice(*self.packed.cu_seqlens[number : number + 2])


@dataclass(frozen=True)
class Launch:
    """How the keys are shared out: CTAs that have a piece each, parts that a tile may be in, if the config limits
    them, and CTAs that add up rows of a tile."""

    ctas: int = 1
    max_splits: int = UNLIMITED
    row_ctas: int = 2
    timing: Timing = AT_ONCE


@kept
def programs_of(config: DecodeConfig | MlaConfig) -> tuple[Program, ...]:
    """Of the kernel, and of the one that puts parts together, if there is one."""
    entries = sorted(ptx_of(config).split(ENTRY)[1:], reverse=True)
    names = "kernel_cutlass_kernel_", "kernel_cutlass_combine_"
    assert all(entry.startswith(name) for entry, name in zip(entries, names, strict=False))
    return tuple(map(parse, entries))


@dataclass(frozen=True)
class Descales:
    """float32 (batch, kv_heads) factors of a cache of e4m3, and of such queries, or nothing; or with row_scales
    (pages, page_size, kv_heads) of the cache."""

    k: tuple[Tensor, ...] = ()
    v: tuple[Tensor, ...] = ()
    q: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Older:
    """int32 tensors as they are before what is before the kernel has ended, None for those that do not change: the rows
    of the cache that are filled, its table and left pads."""

    filled: Tensor | None = None
    table: Tensor | None = None
    leftpad: Tensor | None = None


NOT_OLDER = Older()


def decode_on_numpy(
    config: DecodeConfig,
    queries: Queries,
    cache: Cache,
    softmax_scale: float,
    launch: Launch,
    sides: tuple[int, ...] = (),
    rules: Rules = NO_RULES,
    descales: Descales = Descales(),
    filled: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
    older: Older = NOT_OLDER,
) -> tuple[Tensor, Tensor]:
    """out, of ``dtype`` or of that of q, and lse, which were NaN before as the partial results were.

    Of ``rules`` softcap and sinks are taken. ``filled`` are rows of the cache that the kernel is told of, where they
    are not those of ``cache``; ``older`` are what the kernel finds before it waits.
    """
    cache = cache if config.paged else in_order(cache)
    out = torch.full((*queries.q.shape[:-1], cache.v.shape[3]), math.nan, dtype=dtype or queries.q.dtype)
    step = Step(config, queries, cache, launch, sides, rules, filled, descales, older)
    lse = step.run(_maps(config, cache), (queries.q,), out, softmax_scale)
    return out, lse


@dataclass(frozen=True)
class Step:
    """What ``decode_on_numpy`` and ``mla_on_numpy`` run: the kernel, and then the one that puts parts together."""

    config: DecodeConfig | MlaConfig
    queries: Queries
    cache: Cache
    launch: Launch
    sides: tuple[int, ...]
    rules: Rules
    filled: tuple[int, ...] = ()
    descales: Descales = Descales()
    older: Older = NOT_OLDER

    def run(
        self,
        maps: list[TensorMap],
        given: tuple[Tensor, ...],
        out: Tensor,
        softmax_scale: float,
        cluster: int = 1,
        columns: int = 1,
        boxed: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """lse; ``given`` are the tensors of queries, ``columns`` the CTAs that share out those of a row, ``boxed`` the
        tensors of rows whose maps are the last ones."""
        c, cache, launch, rules = self.config, self.cache, self.launch, self.rules
        lse = torch.full(self.queries.lse_shape, math.nan)
        parts = torch.full((PARTS_PER_CTA * launch.ctas, c.part_floats), math.nan)
        row_scales = isinstance(c, DecodeConfig) and c.row_scales
        of_rows = (*self.descales.k, *self.descales.v) if row_scales else ()
        factors = ((), ()) if row_scales else (self.descales.k, self.descales.v)
        outputs = out, lse, *([] if rules.sinks is None else [rules.sinks]), *factors[1]
        kernel, *combines = programs_of(c)

        arguments = Arguments()
        arguments.add(*maps)
        arguments.values += [
            struct.pack("<4i", *(x.shape[i] for i in (1, 3, 2, 0))) for x in (cache.k, cache.v)
        ]
        arguments.values += [struct.pack("<4i", *(x.shape[i] for i in (2, 3, 1, 0))) for x in boxed]
        add_tensors(arguments, *given)
        if c.paged:
            add_tensors(arguments, cache.table, older=self.older.table)
        self._add_lists_and_outputs(arguments, outputs, parts)
        arguments.add((rules.softcap or softmax_scale) * LOG2_E)
        if rules.softcap:
            arguments.add(softmax_scale / rules.softcap)
        add_tensors(arguments, *self.descales.q, *factors[0])
        for scales in of_rows:
            arguments.tensor(scales, tuple(scales.shape), scales.stride())
        cluster_of_pieces = c.cluster if isinstance(c, DecodeConfig) else cluster
        together, pieces = self._together, launch.ctas // self._together
        grid: tuple[int, ...] = (cluster * together, pieces, 1)
        if isinstance(c, DecodeConfig) and c.cluster > 1:
            grid = (cluster * launch.ctas, 1, 1)
        arguments.launch(kernel, grid, launch.timing, cluster_of_pieces)

        for combine in combines:
            arguments = Arguments()
            add_tensors(arguments, self.queries.q)
            self._add_lists_and_outputs(arguments, outputs, parts)
            arguments.add(pieces)
            ctas = min(self._combining_ctas(), pieces * together)
            grid = (together, ctas // together, launch.row_ctas)
            if isinstance(c, MlaConfig):
                arguments.add(together)
                grid = (ctas, launch.row_ctas, columns)
            arguments.launch(combine, grid)
        return lse

    @property
    def _together(self) -> int:
        """K/V heads that are visited at the same time, or tiles of one."""
        c = self.config
        if isinstance(c, MlaConfig):
            is_apart = c.cluster == 1 or self.queries.packed is not None
            return 1 if is_apart else tiles_together(self._row_tiles, self.launch.ctas)
        return 1 if c.cluster > 1 else heads_together(self.cache.k.shape[2], self.launch.ctas)

    @property
    def _row_tiles(self) -> int:
        """Tiles of a K/V head, where all sequences have as many queries."""
        rows = self.queries.q.shape[1] * self.queries.heads // self.cache.k.shape[2]
        return -(-rows // self.config.tile_m)

    def _add_lists_and_outputs(
        self, arguments: Arguments, outputs: tuple[Tensor, ...], parts: Tensor
    ) -> None:
        """``CacheLists`` and ``Outputs``."""
        c, cache, packed = self.config, self.cache, self.queries.packed
        pads = cache.leftpad.tolist() if c.leftpad else [0] * len(cache.rows)
        filled = self.filled or [n + pad for n, pad in zip(cache.lengths, pads, strict=True)]
        add_tensors(arguments, torch.tensor(filled, dtype=torch.int32), older=self.older.filled)
        if c.leftpad:
            add_tensors(arguments, cache.leftpad, older=self.older.leftpad)
        if packed is not None:
            add_tensors(arguments, torch.tensor(packed.cu_seqlens, dtype=torch.int32))
        kv_heads = cache.k.shape[2]
        of_row = kv_heads // self._together if isinstance(c, DecodeConfig) else kv_heads
        arguments.add(cache.capacity, kv_heads, of_row)
        if c.limits_splits:
            arguments.add(self.launch.max_splits)
        arguments.add(*self.sides)
        add_tensors(arguments, *outputs)
        arguments.tensor(parts, (parts.shape[0],), (parts.stride(0),))

    def _combining_ctas(self) -> int:
        """One for each piece, or for each tile if these are fewer: as ``DecodeKernel`` launches them."""
        if self.queries.packed is not None:
            return self.launch.ctas
        kv_heads, batch = self.cache.k.shape[2], self.queries.q.shape[0]
        return min(self.launch.ctas, batch * kv_heads * self._row_tiles)


def in_order(cache: Cache) -> Cache:
    """A cache whose sequence b has page b. A sequence without a page gets one that none has."""
    (wanted,) = cache.table.T.tolist()
    spare = sorted(set(range(cache.k.shape[0])) - set(wanted))
    pages = [page if page < cache.k.shape[0] else spare.pop() for page in wanted]
    return replace(cache, k=cache.k[pages], v=cache.v[pages], table=torch.arange(len(pages)).int()[:, None])


def _maps(config: DecodeConfig, cache: Cache) -> list[TensorMap]:
    """TMA on boxes of K and of V."""
    c = config
    if not c.is_widened:
        columns = c.box_columns(c.head_dim), c.box_columns(c.head_dim_v)
        return [row_map(x, c.box_rows, box) for x, box in zip((cache.k, cache.v), columns, strict=True)]
    found = []
    for x, columns in ((cache.k, c.head_dim), (cache.v, c.head_dim_v)):
        order = (3, 1, 2, 0)
        sizes, strides = (tuple(of[i] for i in order) for of in (x.shape, x.stride()))
        found.append(TensorMap(elements_of(x), sizes, strides, (columns, c.box_rows, 1, 1), 0))
    return found


def add_tensors(arguments: Arguments, *tensors: Tensor, older: Tensor | None = None) -> None:
    """Whose last strides are 1."""
    for tensor in tensors:
        arguments.tensor(tensor, tuple(tensor.shape), tensor.stride()[:-1], older)
