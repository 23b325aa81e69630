"""Calls on a cache like an earlier one that ``kvcache_again`` leaves out: by tiles of the forward kernels, with queries
of e4m3, with sinks, and with one tensor for both descales of a cache.

Tiles, of several heads or of one, are a plan, attention and what adds up parts, which are one script here. The decode
kernel is one launch, and gets its arguments without the call being read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from cute_kernels.plan.config import check_packed_size
from hopper.decode.config import DecodeConfig
from hopper_attention import device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.cache_tiles import pages_of_a_sequence
from hopper_attention.checks import FP8_DTYPE, Result, TensorSpec
from hopper_attention.descaled_again import Places, distinct, scale_at
from hopper_attention.device_memory import Facts, Pieces
from hopper_attention.features import is_constant
from hopper_attention.kvcache_again import WINDOW
from hopper_attention.kvcache_call import CheckedCall
from hopper_attention.kvcache_checks import CacheCall
from hopper_attention.launch import at_once
from hopper_attention.launch.at_once import Given, Part, Script, Step
from hopper_attention.launch.base import REMEMBERED_CALLS, current_device, no_vectors
from hopper_attention.launch.cache_tiles import CacheTilesLauncher, find_tiles
from hopper_attention.launch.decode import DecodeLauncher, find_decode, is_aligned
from hopper_attention.launch.kvcache import find_way
from hopper_attention.launch.paged_forward import CacheSpecs, find_paged_launch
from hopper_attention.launch.split_forward import SplitSizes, merge_in_script
from hopper_attention.layout import TMA_BYTES, make_addressable, make_packed_addressable, new_layout
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.packed_descaled_again import may_serve
from hopper_attention.packed_quantized import ONE_PER_SEQUENCE

Q, K, V, OUT, COUNTER, FIRST = range(6)
"""Arguments of a script. From ``FIRST`` on come the other tensors of the call, and behind them work memory."""


class CacheGiven(NamedTuple):
    """The tensors of a call that has no others, None for what it has not; cache_seqlens may be an int."""

    q: Any
    k_cache: Any
    v_cache: Any
    page_table: Any
    cache_seqlens: Any
    cu_seqlens_q: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    sinks: Any

    @property
    def descales(self) -> tuple[Any, Any, Any]:
        return self.q_descale, self.k_descale, self.v_descale


class CacheLists(NamedTuple):
    """Of a call's tensors those behind descales: lengths, and what else there is."""

    page_table: Any
    cache_seqlens: Any
    cu_seqlens_q: Any
    sinks: Any

    @property
    def present(self) -> tuple[Any, ...]:
        return tuple([x for x in self if x is not None])


@dataclass(frozen=True, slots=True)
class TilesCall:
    """What serves calls like an earlier one by tiles: ``script`` makes its launches, in memory for ``work``."""

    device_index: int
    script: Script
    work: Pieces
    out: Facts

    def __call__(self, tensors: tuple[Any, ...], lists: CacheLists) -> Result:
        index = self.device_index
        out = device_memory.empty_on_gpu(*self.out)
        counter = device_memory.tile_counter(index)
        q, k, v, *descales = tensors
        work = device_memory.work_memory(out.device, index, self.work).arguments
        self.script.run(q, k, v, out, counter, *descales, *lists.present, *work)
        return out


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """The same by the decode kernel, whose descales are at ``places`` among the tensors. ``ones`` stand for those that
    are not given; they are None for a cache of 16 bits, which has none."""

    launcher: DecodeLauncher
    places: Places
    ones: Tensor | None
    softcap: float | None

    @property
    def device_index(self) -> int:
        return self.launcher.device_index

    def __call__(self, tensors: tuple[Any, ...], lists: CacheLists) -> Result:
        q, k, v = tensors[:3]
        descales: tuple[Any, ...] = (None, None, None)
        if self.ones is not None:
            descales = tuple([self.ones if place is None else tensors[place] for place in self.places])
            if not self.launcher.takes_e4m3_queries:
                descales = None, *descales[1:]
        table, lengths, starts, sinks = lists
        of_lists = lengths, table, None, starts
        out, lse = self.launcher.launch((q,), k, v, *of_lists, self.softcap, sinks, descales)
        return (out, lse) if self.launcher.wants_lse else out


remembered: Remembered[TilesCall | DecodedCall] = Remembered(REMEMBERED_CALLS)


def attend(given: CacheGiven, options: tuple[Any, ...]) -> Result | None:
    """The results, if an earlier call was like this one; None if it has to be read and checked. ``options`` are all
    other arguments of the call, which count with their types."""
    q, k = given[:2]
    if type(q) is not Tensor or type(k) is not Tensor or not may_be_like():
        return None
    tensors, places = distinct(*given[:3], given.descales)
    lists = CacheLists(*given[3:6], given.sinks)
    compared, group = (*tensors, *lists.present), _group_of(places, lists, options)
    call = remembered.find_latest(group, *compared)
    if call is None:
        call = remembered.find((q.shape, k.shape, *group), *compared, group=group)
    if call is None or (q.data_ptr() | k.data_ptr() | tensors[V].data_ptr()) % TMA_BYTES:
        return None
    # A graph would outlive constants that are kept with a call.
    if current_device() != call.device_index or device_memory.records_graph(call.device_index):
        return None
    return call(tensors, lists)


def remember(given: CacheGiven, options: tuple[Any, ...], checked: CheckedCall) -> None:
    """Keep a call that was made, if ``attend`` can make others like it."""
    call, read, scores, _ = checked
    shape = call.shape
    tensors, places = distinct(*given[:3], given.descales)
    lists = CacheLists(*given[3:6], given.sinks)
    compared, group = (*tensors, *lists.present), _group_of(places, lists, options)
    if read.q is not given.q or not is_constant(options[WINDOW]) or scores.alibi_slopes is not None:
        return
    if any(type(x) is not Tensor or x.requires_grad or not x.numel() for x in compared):
        return
    table, key = given.page_table, (given.q.shape, given.k_cache.shape, *group)
    is_odd = (
        given.cache_seqlens is None or (table is not None and table.stride(1) != 1) or not given.q.is_cuda
    )
    if is_odd or call.hadamard or shape.has_scales_of_rows or not may_serve((scores.softcap, given.sinks)):
        return
    if not remembered.comes_again(key) or not remembered.has_room(key, *compared):
        return
    if device_memory.is_capturing(shape.device) or not is_aligned(read):
        return
    way, has_one = find_way(call).path, given.k_descale is not None and given.k_descale is given.v_descale
    is_left_out = given.q.dtype == FP8_DTYPE or given.sinks is not None or has_one
    found: TilesCall | DecodedCall | None = None
    if way == "decode" and is_left_out:
        found = _decoded(call, tensors, places, scores.softcap or None)
    elif way in ("tiles", "paged") and not call.wants_lse and call.shape.seqlen_q:
        launcher = find_tiles(call) if way == "tiles" else _paged(call, tensors, lists)
        found = _scripted(call, launcher, tensors, places, lists, scores.softcap or None)
    if found is not None:
        remembered.keep(key, found, *compared)


def _group_of(places: Places, lists: CacheLists, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of calls that one would serve, but for the sizes of tensors."""
    return places, tuple(map(type, lists)), options, tuple(map(type, options))


def _decoded(
    call: CacheCall, tensors: tuple[Any, ...], places: Places, softcap: float | None
) -> DecodedCall | None:
    """That of calls like ``call`` with these tensors, if the kernel gets them as they are."""
    shape, q, launcher = call.shape, tensors[Q], find_decode(call)
    is_e4m3 = shape.is_fp8_cache
    make = make_packed_addressable if shape.is_packed_q else make_addressable
    if not isinstance(launcher.config, DecodeConfig) or launcher.restrides or make(q) is not q:
        return None
    if q.dtype == FP8_DTYPE and not launcher.takes_e4m3_queries:
        return None
    if is_e4m3 and any(x.dim() != 2 or x.stride(1) != 1 for x in tensors[3:]):
        return None
    ones = device_memory.unit_scales(shape.batch, shape.kv_heads, shape.device)[:, :, 0] if is_e4m3 else None
    return DecodedCall(launcher, places, ones, softcap)


def _paged(call: CacheCall, tensors: tuple[Any, ...], lists: CacheLists) -> CacheTilesLauncher:
    """Tiles of a head each, in one part."""
    q, k, v = map(TensorSpec.of, tensors[:3])
    table, lengths, starts, _ = (None if x is None else TensorSpec.of(x) for x in lists)
    specs, mask = CacheSpecs(q, k, v, table, lengths, None, starts), call.mask
    window = mask.has_window, mask.attention_chunk > 0
    found, repairs = find_paged_launch(specs, mask.causal, window, call.scores, call.sm_margin)
    made = found.device_index, found.config, found.kernel, found.planner, found.num_ctas
    return CacheTilesLauncher(*made, splits=1, combine=(), repairs=repairs)


def _scripted(
    call: CacheCall,
    launcher: CacheTilesLauncher,
    tensors: tuple[Any, ...],
    places: Places,
    lists: CacheLists,
    softcap: float | None,
) -> TilesCall | None:
    """What serves calls like ``call`` with these tensors by ``launcher``, if its kernel gets them as they are."""
    q, *caches = (x if x.dim() == 3 else x.flatten(0, 1) for x in tensors[:3])
    is_as_given = all(x.data_ptr() == y.data_ptr() for x, y in zip((q, *caches), tensors[:3], strict=True))
    repaired = (repair.apply(x) is x for repair, x in zip(launcher.repairs, tensors[K : V + 1], strict=True))
    if not is_as_given or make_packed_addressable(q) is not q or not all(repaired):
        return None
    return _CacheScript(call, launcher, tensors, places, lists, softcap).made(q, caches)


@dataclass(frozen=True)
class _CacheScript:
    """What the steps of a script are made of; the fields are those of ``_scripted``."""

    call: CacheCall
    launcher: CacheTilesLauncher
    tensors: tuple[Any, ...]
    places: Places
    lists: CacheLists
    softcap: float | None

    @property
    def after_tensors(self) -> int:
        """The first argument behind q, k, v and descales."""
        return FIRST + len(self.tensors) - len((Q, K, V))

    @property
    def plan(self) -> Given:
        return Given(self.after_tensors + len(self.lists.present))

    def listed(self, name: str) -> Given | None:
        """The argument that is this tensor of the lists, if the call has it."""
        x = getattr(self.lists, name)
        if x is None:
            return None
        # By identity, as tensors that are equal are not the same.
        number = next(i for i, y in enumerate(self.lists.present) if y is x)
        return Given(self.after_tensors + number)

    def made(self, q: Tensor, caches: list[Tensor]) -> TilesCall:
        """``q`` and ``caches`` are those of the call, rows of all sequences and pages in one dimension."""
        shape, config, device = self.call.shape, self.launcher.config, self.call.shape.device
        totals, tile = (shape.total_q, shape.batch * shape.capacity), config.tile_queries
        planner, heads = self.launcher.planner, shape.heads
        check_packed_size("kernel", heads, shape.batch, totals, tile, self.launcher.splits)
        of_k = kept_argument(device_memory.multiples(shape.batch + 1, shape.capacity, device))
        of_q = self.listed("cu_seqlens_q") or kept_argument(
            device_memory.multiples(shape.batch + 1, shape.seqlen_q, device)
        )
        lengths, unused = self.listed("cache_seqlens"), kept_argument(device_memory.no_lengths(device))
        of_tiles = planner.options(tile, heads // config.group)
        steps = [Step(planner.kernel, (of_q, of_k, unused, lengths, self.plan, *totals, *of_tiles))]
        work: Pieces = (planner.memory(totals[0], shape.batch, tile),)
        rows = (shape.total_q, shape.heads, shape.head_dim_v)
        out = Part(OUT, 0, (*new_layout(rows), shape.out_dtype))
        no_lse = kept_argument(no_vectors(1, shape.heads, device)[0])
        sizes = SplitSizes(self.launcher.splits, 1, shape.total_q, shape.heads, shape.head_dim_v)
        first = self.plan.number + 1
        parts, behind, of_parts = merge_in_script(
            self.launcher.combine, sizes, (Given(OUT), Given(OUT)), shape.out_dtype, False, first
        )
        filled: tuple[Any, Any] = parts if behind else (out, no_lse)
        of_caches: tuple[Any, Any] = Given(K), Given(V)
        if not config.page_box:
            of_caches = Part(K, 0, _facts(caches[0])), Part(V, 0, _facts(caches[1]))
        read = Part(Q, 0, _facts(q)), *of_caches
        given = *read, *filled, Given(COUNTER), *self._options(), self.launcher.num_ctas
        steps += [Step(self.launcher.kernel, given), *behind]
        made = at_once.make_script(steps)
        facts = *new_layout(shape.out_shape), shape.out_dtype
        return TilesCall(self.launcher.device_index, made, (*work, *of_parts), facts)

    def _options(self) -> tuple[Any, ...]:
        """What the kernel takes between the counter of tiles and the number of CTAs, as ``CacheTilesLauncher`` has
        it."""
        call, shape, launcher = self.call, self.call.shape, self.launcher
        config, sides = launcher.config, launcher.sides_of(call)
        of_plan, scale = (self.plan, shape.batch + 1), float(call.softmax_scale)
        sinks = self.listed("sinks")
        if shape.dtype != FP8_DTYPE:
            return scale, *sides, *of_plan, *self._pages(), self.softcap, None, sinks, None, None
        groups = shape.heads // (config.group * shape.kv_heads)
        of_q, of_k, of_v = (
            scale_at(place, self.tensors, (shape.batch, shape.kv_heads, n), FIRST)
            for place, n in zip(self.places, (groups, 1, 1), strict=True)
        )
        ones = kept_argument(device_memory.unit_scales(shape.batch, shape.kv_heads, shape.device))
        no_mean = kept_argument(no_vectors(shape.batch, shape.kv_heads, shape.device))
        scales = of_q, of_k, ones, of_v, no_mean
        if config.page_box:
            return *scales, scale, *sides, *of_plan, *self._pages(), self.softcap, sinks
        changes = (self.softcap, sinks) if config.softcap or config.sinks else ()
        return *scales, ONE_PER_SEQUENCE, ONE_PER_SEQUENCE, scale, *sides, *of_plan, *changes

    def _pages(self) -> tuple[Any, Any]:
        """The table, and no left pads; None twice where sequences lie end to end."""
        if not self.launcher.config.page_box:
            return None, None
        device, table = self.call.shape.device, self.listed("page_table")
        if table is None:
            assert pages_of_a_sequence(self.call) == 1
            table = kept_argument(device_memory.multiples(self.call.shape.batch, 1, device)[:, None])
        return table, kept_argument(device_memory.no_lengths(device))


def _facts(x: Tensor) -> Facts:
    return tuple(x.shape), tuple(x.stride()), x.dtype
