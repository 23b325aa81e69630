"""Runs the decode kernels, that of ``qv`` too: few queries a sequence, on a cache that they read where it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.append.config import BY_PAGE
from cute_kernels.problem import MAX_SEQLEN
from hopper.decode.config import PARTS_PER_CTA, DecodeConfig
from hopper.mla.config import MlaConfig
from hopper_attention import compile_cache, device_memory
from hopper_attention._kernels import Kernel
from hopper_attention.checks import FP8_DTYPE, TensorSpec
from hopper_attention.decode_rules import ctas_of_pieces, lasting_config, select_decode
from hopper_attention.device_memory import Piece, Pieces, constants, unit_scales
from hopper_attention.kvcache_checks import CacheCall, CacheShape, CacheTensors
from hopper_attention.launch.base import NO_SIDES, REMEMBERED_CALLS, Launcher, count_ctas, index_of
from hopper_attention.layout import (
    TMA_BYTES,
    make_addressable,
    make_packed_addressable,
    new_layout,
    repair_for,
    repairs_for,
)
from hopper_attention.masks import kernel_sides
from hopper_attention.mla_rules import pieces_of, select_mla
from hopper_attention.scores import NO_SCORES, Scores


@dataclass(frozen=True)
class DecodeLauncher(Launcher):
    """The decode kernel of one kind of call. All keys are shared out in ``pieces``, each for a CTA, with ``qv`` for a
    cluster; no tile of query rows is in more than ``max_splits`` parts, unless it is None; ``sides`` are those of a
    window as the kernel takes them. With ``restrides`` TMA wants other strides for dimensions of size 1 of the
    caches."""

    config: DecodeConfig | MlaConfig
    kernel: Kernel
    shape: CacheShape
    softmax_scale: float
    pieces: int
    max_splits: int | None
    sides: tuple[Any, ...]
    restrides: bool

    wants_lse: bool

    def __call__(self, tensors: CacheTensors, scores: Scores) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted is work memory."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(tensors, scores)
        shape, t = self.shape, tensors
        addressable = make_packed_addressable if shape.is_packed_q else make_addressable
        queries = (t.q,) if t.qv is None else (t.q, t.qv)
        k_cache, v_cache = t.k_cache, t.v_cache
        if self.restrides:
            k_cache, v_cache = _restrided(k_cache), _restrided(v_cache)
        cap, sinks = None, None
        if scores is not NO_SCORES:
            cap, _, sinks = scores.changes_for_kernel(shape.batch, shape.heads)
        lengths = full_lengths(shape) if t.cache_seqlens is None else t.cache_seqlens
        lists = lengths, table_of(t), t.cache_leftpad, t.cu_seqlens_q
        given = tuple(map(addressable, queries)), k_cache, v_cache, *lists
        return self.launch(*given, cap, sinks, _descales(shape, t, self.takes_e4m3_queries))

    @property
    def takes_e4m3_queries(self) -> bool:
        return isinstance(self.config, DecodeConfig) and self.config.e4m3_queries

    def launch(
        self,
        queries: tuple[Tensor, ...],
        k_cache: Tensor,
        v_cache: Tensor,
        lengths: Tensor,
        table: Tensor | None,
        leftpad: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cap: float | None,
        sinks: Tensor | None,
        descales: tuple[Tensor | None, ...],
    ) -> tuple[Tensor, Tensor]:
        """The call of tensors that the kernel can address, on the current GPU, which is that of this launcher.

        ``queries`` are q, or q and qv; ``descales`` are those of Q, K and V, or none for the kernel of qv.
        """
        out = device_memory.empty_on_gpu(*self.out_facts)
        work = device_memory.stream_memory(self.device_index, self.work).arguments
        lse = device_memory.empty_on_gpu(*self.lse_facts) if self.wants_lse else work[-1]
        self.kernel(
            *queries,
            k_cache,
            v_cache,
            out,
            lse,
            lengths,
            table,
            leftpad,
            cu_seqlens_q,
            work[0],
            self.softmax_scale,
            self.max_splits,
            *self.sides,
            cap,
            sinks,
            *descales,
            self.pieces,
        )
        return out, lse

    @cached_property
    def out_facts(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        return *new_layout(self.shape.out_shape), self.shape.out_dtype

    @cached_property
    def lse_facts(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        return *new_layout(self.shape.lse_shape), torch.float32

    @cached_property
    def work(self) -> Pieces:
        """Memory for partial results, and for an LSE that is not wanted."""
        # Clusters put tiles together in shared memory.
        is_clustered = isinstance(self.config, DecodeConfig) and self.config.cluster > 1
        parts = Piece((1 if is_clustered else PARTS_PER_CTA * self.pieces, self.config.part_floats))
        return (parts,) if self.wants_lse else (parts, Piece(self.shape.lse_shape))


class NotLastingError(Exception):
    """What serves a call in the graph that is captured is not what serves others like it."""


def find_decode(call: CacheCall) -> DecodeLauncher:
    """The launcher for calls like this one, whose kernel is compiled or loaded."""
    try:
        return _lasting_launcher(call)
    except NotLastingError:
        return _launcher(call, select_decode(call))


@lru_cache(maxsize=REMEMBERED_CALLS)
def _lasting_launcher(call: CacheCall) -> DecodeLauncher:
    """Raises NotLastingError, which is not remembered."""
    config = select_mla(call) if call.shape.has_qv else lasting_config(call)
    if config is None:
        raise NotLastingError
    return _launcher(call, config)


def find_short_decode(call: CacheCall) -> DecodeLauncher:
    """``find_decode`` with a CTA for each key block at most: the others would have none, and memory for parts."""
    launcher, shape = find_decode(call), call.shape
    config = launcher.config
    if isinstance(config, MlaConfig) or config.cluster > 1:
        return launcher
    tiles = shape.batch * shape.kv_heads * -(-shape.rows_a_kv_head // config.tile_m)
    blocks = tiles * -(-shape.seqlen_k // config.tile_n)
    return replace(launcher, pieces=min(launcher.pieces, blocks))


def _launcher(call: CacheCall, config: DecodeConfig | MlaConfig) -> DecodeLauncher:
    index = index_of(call.shape.device)
    multiprocessors = count_ctas(index, call.sm_margin)
    if isinstance(config, MlaConfig):
        pieces = pieces_of(config, call, multiprocessors)
    else:
        tiles = call.shape.batch * call.shape.kv_heads * -(-call.shape.rows_a_kv_head // config.tile_m)
        pieces = (
            ctas_of_pieces(multiprocessors, tiles, call.shape.kv_heads, call.has_one_length)
            if config.cluster == 1
            else tiles * config.cluster
        )
    return DecodeLauncher(
        index,
        config,
        compile_cache.get_serving(config),
        call.shape,
        call.softmax_scale,
        pieces,
        call.num_splits or None,
        kernel_sides(*call.mask.sides) if config.window else NO_SIDES,
        bool(repairs_for(*call.shape.caches)),
        call.wants_lse,
    )


def attend_by(
    launcher: DecodeLauncher, tensors: CacheTensors, scores: Scores = NO_SCORES
) -> tuple[Tensor, Tensor]:
    """out and lse by ``launcher``, of queries that its kernel may not take as they are."""
    if tensors.q.dtype == FP8_DTYPE and not launcher.takes_e4m3_queries:
        # 16 bits hold e4m3 as it is; both factors are one of the scores.
        given = [x for x in (tensors.q_descale, tensors.k_descale) if x is not None]
        factor = math.prod(given[1:], start=given[0]) if given else None
        tensors = tensors._replace(q=tensors.q.to(launcher.shape.out_dtype), k_descale=factor)
    return launcher(tensors, scores)


def _descales(shape: CacheShape, tensors: CacheTensors, of_queries: bool) -> tuple[Tensor | None, ...]:
    """Of Q, K and V, (batch, kv_heads), the last stride 1, or of K and V (pages, rows of a page, kv_heads); None for
    those of 16 bits. The kernel of ``qv`` has none."""
    if shape.has_qv:
        return ()
    if not shape.is_fp8_cache:
        return None, None, None
    of_cache = tensors.k_descale, tensors.v_descale
    if shape.has_scales_of_rows:
        of_rows = tuple(None if x is None else scales_of_rows(x, shape) for x in of_cache)
        of_q = _descales_of_sequences(shape, (tensors.q_descale,))[0] if of_queries else None
        return of_q, *of_rows
    given = (tensors.q_descale, *of_cache) if of_queries else of_cache
    found = _descales_of_sequences(shape, given)
    return found if of_queries else (None, *found)


def _descales_of_sequences(shape: CacheShape, given: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """(batch, kv_heads) each, ones for those that are not given."""
    is_missing = any(x is None for x in given)
    ones = unit_scales(shape.batch, shape.kv_heads, shape.device)[:, :, 0] if is_missing else None
    found = (ones if x is None else x if x.stride(1) == 1 else x.contiguous() for x in given)
    return tuple(x for x in found if x is not None)


def scales_of_rows(descale: Tensor, shape: CacheShape) -> Tensor:
    """(pages, rows of a page, kv_heads): those by page, for each of its rows."""
    return descale.expand(shape.caches[0].shape[:3]) if shape.scales == BY_PAGE else descale


def is_aligned(tensors: CacheTensors) -> bool:
    """Whether TMA can address the caches, by where they begin."""
    return not (tensors.k_cache.data_ptr() | tensors.v_cache.data_ptr()) % TMA_BYTES


def table_of(tensors: CacheTensors) -> Tensor | None:
    """int32 (batch, pages): the page of each page_size rows of a sequence, or None where sequence b has page b. Without
    a page table it is one each, which cache_batch_idx says."""
    table, chosen = tensors.page_table, tensors.cache_batch_idx
    if table is None:
        return None if chosen is None else chosen[:, None]
    if chosen is not None:
        table = table.index_select(0, chosen.clamp(0, table.shape[0] - 1))
    # Only that of one column has another stride, which is never used, but which the kernel's arguments do not allow.
    return table if table.stride(1) == 1 else table.as_strided(table.shape, (table.stride(0), 1))


def full_lengths(shape: CacheShape) -> Tensor:
    """int32 (batch,): all rows of a cache. A constant, which is kept; in a graph that finds none, one of its own."""
    return _constant_lengths(shape.capacity, shape.batch, shape.device)


def any_lengths(batch: int, device: torch.device) -> Tensor:
    """The same for caches of any size: more rows than there are, of which kernels that decode take those they find."""
    return _constant_lengths(MAX_SEQLEN, batch, device)


def any_sequence(batch: int, device: torch.device) -> Tensor:
    """int32 (batch,) zeros, the sequence of a cache that has one; likewise a constant."""
    return _constant_lengths(0, batch, device)


def _constant_lengths(length: int, batch: int, device: torch.device) -> Tensor:
    def make(where: torch.device) -> Tensor:
        return torch.full((batch,), length, dtype=torch.int32, device=where)

    kept = constants.get(("full", length, batch, device), device, lambda: make(torch.device("cpu")))
    return make(device) if kept is None else kept


def _restrided(cache: Tensor) -> Tensor:
    """With strides that TMA takes for dimensions of size 1; ``decode_rules`` lets no others pass that it does not."""
    return repair_for(TensorSpec.of(cache)).apply(cache)
