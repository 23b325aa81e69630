"""FP8 attention to e4m3 tensors with descales like those of an earlier call: what that found serves again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopper.widen.config import VECTOR
from hopper_attention import checks, device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.backends import target_of
from hopper_attention.device_memory import Facts, Piece, Pieces
from hopper_attention.fp8_rules import serves_in_e4m3
from hopper_attention.launch import at_once, fp8, transpose, widen
from hopper_attention.launch.at_once import Given, Part, Script, Step
from hopper_attention.launch.base import REMEMBERED_CALLS, current_device, index_of, no_vectors
from hopper_attention.launch.few_fp8 import FewFp8Launcher, find_with_descales
from hopper_attention.launch.few_queries import FewQueriesLaunch, ReadyFewQueries
from hopper_attention.launch.fp8 import ALL_ROWS, Fp8HopperLauncher
from hopper_attention.layout import TMA_BYTES, make_addressable
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import MaskSpec, Sides
from hopper_attention.plain_calls import is_plain_call
from hopper_attention.quantized import E4M3, padded_keys
from hopper_attention.quantizers import from_descales
from hopper_attention.scores import NO_SCORES, ScoreKind, Scores
from hopper_attention.value_parts import needs_parts

Descales = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of q, k and v."""

Places = tuple[int | None, int | None, int | None]
"""Of descales among the tensors of a call; one tensor may be that of several."""

Flags = tuple[bool, "str | None", bool, int, bool, bool, Sides]
"""causal, backend, two_level, sm_margin, wants_lse, exact_lse and the sides of a mask, all checked."""

OfScores = tuple[float, bool]
"""A softcap, 0 for none, and whether there are sinks, which are the last of a call's tensors."""

Q, K, V, OUT, LSE, COUNTER, SCALE, FIRST_DESCALE = range(8)
"""Arguments of a script. What the launches before attention fill comes behind the descales."""


@dataclass(frozen=True, slots=True)
class DescaledCall:
    """What serves calls like an earlier one: ``script`` fills ``pieces`` and attends. Where query heads share descales,
    which are the tensor at ``shared``, the last piece has one for each head."""

    device_index: int
    script: Script
    pieces: Pieces
    shared: int | None
    out: Facts
    lse: Facts
    no_lse: Any
    default_scale: float

    def __call__(self, tensors: tuple[Tensor, ...], scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted has no elements. ``tensors`` are as ``distinct`` gives them."""
        make, index = device_memory.empty_on_gpu, self.device_index
        out, lse = make(*self.out), make(*self.lse) if wants_lse else self.no_lse
        counter = device_memory.tile_counter(index)
        q, k, v, *descales = tensors
        if not self.pieces:
            self.script.run(q, k, v, out, lse, counter, scale, *descales)
            return out, lse
        work = device_memory.work_memory(q.device, index, self.pieces)
        if self.shared is not None:
            work.tensors[-1].copy_(tensors[self.shared].unsqueeze(2))
        self.script.run(q, k, v, out, lse, counter, scale, *descales, *work.arguments)
        return out, lse


@dataclass(frozen=True, slots=True)
class FewDescaledCall:
    """The same where queries are few; ``places`` are those of descales among the tensors."""

    device_index: int
    launch: ReadyFewQueries | FewQueriesLaunch
    places: Places
    default_scale: float
    softcap: float = 0.0
    has_sinks: bool = False

    def __call__(self, tensors: tuple[Tensor, ...], scale: float, wants_lse: bool) -> tuple[Tensor, Tensor]:
        q, k, v = tensors[:3]
        batch, _, kv_heads, _ = k.shape
        of_q, of_k, of_v = (
            device_memory.unit_scales(batch, kv_heads, k.device)[:, :, 0] if place is None else tensors[place]
            for place in self.places
        )
        descales = of_q, of_k, of_v
        if isinstance(self.launch, ReadyFewQueries):
            return self.launch(q, k, v, scale, wants_lse, descales=descales)
        scores = Scores.of(self.softcap, None, tensors[-1] if self.has_sinks else None)
        return self.launch(q, k, v, scale, wants_lse, descales=descales, scores=scores)


remembered: Remembered[DescaledCall | FewDescaledCall] = Remembered(REMEMBERED_CALLS)


def may_serve(scores: Scores) -> bool:
    """Whether calls with such scores are kept: with a softcap, and sinks as the kernel takes them."""
    if scores is NO_SCORES:
        return True
    sinks = scores.sinks
    is_known = type(scores) is Scores and scores.alibi_slopes is None and scores.dropout_p == 0.0
    return is_known and (sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()))


def _of(scores: Scores) -> OfScores:
    return scores.softcap, scores.sinks is not None


def attend(
    q: Any, k: Any, v: Any, descales: Descales, softmax_scale: Any, flags: Flags, scores: Scores = NO_SCORES
) -> tuple[Tensor, Tensor] | None:
    """out and lse of a call whose scores ``may_serve``, if one like it was made, and its GPU is the current one; else
    None. None in a CUDA graph too, which would outlive constants that are kept with a call."""
    if not may_be_like():
        return None
    tensors, places = distinct(q, k, v, descales)
    if scores.sinks is not None:
        tensors = *tensors, scores.sinks
    group = places, flags, _of(scores)
    call = remembered.find_latest(group, *tensors)
    if call is None:
        # What is no tensor is like none.
        if type(q) is not Tensor or type(k) is not Tensor:
            return None
        call = remembered.find((q.shape, k.shape, *group), *tensors, group=group)
    if call is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES:
        return None
    index = call.device_index
    if current_device() != index or device_memory.records_graph(index):
        return None
    scale = call.default_scale if softmax_scale is None else checks.check_scale(softmax_scale)
    return call(tensors, scale, wants_lse=flags[4])


def remember(
    q: Tensor, k: Tensor, v: Tensor, descales: Descales, flags: Flags, scores: Scores = NO_SCORES
) -> None:
    """Keep a call that was made, of e4m3 tensors, if the kernels take these as they are."""
    if not is_plain_call(q, k, v) or not q.is_cuda or device_memory.is_capturing(q.device):
        return
    tensors, places = distinct(q, k, v, descales)
    if scores.sinks is not None:
        tensors = *tensors, scores.sinks
    # One that requires a gradient gets none without gradients, and may be asked for one in a call that is like this.
    if any(type(x) is not Tensor or x.requires_grad for x in tensors):
        return
    of_scores = _of(scores)
    key = q.shape, k.shape, places, flags, of_scores
    if not remembered.comes_again(key):
        return
    causal, backend, two_level, sm_margin, wants_lse, exact_lse, sides = flags
    mask, in_float32 = MaskSpec(causal, *sides), two_level or exact_lse
    of_kernel = target_of(q.device), mask, scores.kind, backend, in_float32
    if scores is not NO_SCORES and not serves_in_e4m3(q.shape, v.shape, *of_kernel):
        return
    few = find_with_descales(q, k, v, mask, backend, sm_margin, not in_float32, scores.kind)
    of_call = places, sides, wants_lse, of_scores
    if isinstance(few, FewFp8Launcher):
        if all(make_addressable(x) is x for x in (q, k, v)):
            remembered.keep(key, _call_of(few.attention, tensors, *of_call, few.group), *tensors)
        return
    if few is not None:
        is_ready = scores is NO_SCORES and all(x.stride(1) == 1 for x in tensors[3:])
        launch = (few.ready(q, k, v) if is_ready else None) or few
        made = index_of(q.device), launch, places, few.call.softmax_scale, *of_scores
        remembered.keep(key, FewDescaledCall(*made), *tensors)
        return
    launcher = None if needs_parts(v.shape[3]) else _find_launcher(q, k, v, descales, flags, scores.kind)
    if launcher is not None:
        remembered.keep(key, _call_of(launcher, tensors, *of_call), *tensors)


def distinct(q: Any, k: Any, v: Any, descales: Descales) -> tuple[tuple[Any, ...], Places]:
    """The tensors of a call, each descale once, and the places of descales among them."""
    of_q, of_k, of_v = descales
    tensors, at_q, at_k, at_v = [q, k, v], None, None, None
    if of_q is not None:
        at_q = len(tensors)
        tensors.append(of_q)
    if of_k is not None:
        at_k = at_q
        if of_k is not of_q:
            at_k = len(tensors)
            tensors.append(of_k)
    if of_v is not None:
        at_v = at_q if of_v is of_q else at_k
        if of_v is not of_q and of_v is not of_k:
            at_v = len(tensors)
            tensors.append(of_v)
    return tuple(tensors), (at_q, at_k, at_v)


def _find_launcher(
    q: Tensor, k: Tensor, v: Tensor, descales: Descales, flags: Flags, scores: ScoreKind
) -> Fp8HopperLauncher | None:
    """That of a call, if nothing has to be copied for its kernels, and they can count its tiles."""
    causal, backend, two_level, sm_margin, wants_lse, exact_lse, sides = flags
    parts = from_descales(q, k, v, *descales, checks.FP8_OUT_DTYPE)
    of_call = causal, backend, two_level, sm_margin, sides, exact_lse, not wants_lse, scores
    launcher = fp8.launch_for(parts, *of_call)
    if not isinstance(launcher, Fp8HopperLauncher) or launcher.repairs or launcher.note_floats:
        return None
    if launcher.widens and not (q.is_contiguous() and k.is_contiguous() and widen.are_counted(q, k)):
        return None
    is_counted = launcher.transposes or transpose.are_counted(v)
    return launcher if is_counted and make_addressable(v) is v else None


def _call_of(
    launcher: Fp8HopperLauncher,
    tensors: tuple[Tensor, ...],
    places: Places,
    sides: Sides,
    wants_lse: bool,
    of_scores: OfScores,
    group: int = 1,
) -> DescaledCall:
    """That of calls with tensors like these, of which kernels read the descales at ``places``; ``group`` heads
    are in a tile."""
    q, k, v, *descales = tensors
    (batch, seqlen_q, heads, head_dim), kv_heads, device = q.shape, k.shape[2], q.device
    first = FIRST_DESCALE + len(descales)
    before, read, pieces = _steps_before(launcher, q, k, v, first)
    out = Piece((batch, seqlen_q, heads, launcher.result.head_dim_v), launcher.result.dtype)
    results = (Given(OUT), Given(LSE)), wants_lse, first + len(pieces)
    filled, behind = launcher.merge_in_script(out.facts, *results)
    pieces = *pieces, *launcher.pieces_of(out.shape)
    of_q, of_k, of_v = (scale_at(place, tensors, (batch, kv_heads, 1)) for place in places)
    shared = None
    if launcher.lone_scales:
        of_q = scale_at(places[0], tensors, (batch, kv_heads, heads // (kv_heads * group)))
    elif places[0] is None:
        of_q = _ones(batch, heads, device)
    elif heads != kv_heads:
        shared, of_q = places[0], Part(first + len(pieces), 0, Piece((batch, heads, 1)).facts)
        pieces = *pieces, Piece((batch, kv_heads, heads // kv_heads))
    no_mean, no_lse = (kept_argument(no_vectors(batch, n, device)) for n in (kv_heads, heads))
    scales = of_q, of_k, of_v, _ones(batch, kv_heads, device)
    softcap, has_sinks = of_scores
    changes = (softcap or None, Given(first - 1) if has_sinks else None) if launcher.changes_scores else ()
    of_call = Given(COUNTER), scales, no_mean, ALL_ROWS, Given(SCALE), sides, (), changes
    attention = Step(launcher.kernel, launcher.arguments((*read, *filled), *of_call))
    script = at_once.make_script([*before, attention, *behind])
    made = out.facts, Piece((batch, heads, seqlen_q)).facts, no_lse
    return DescaledCall(launcher.device_index, script, pieces, shared, *made, head_dim**-0.5)


def _steps_before(
    launcher: Fp8HopperLauncher, q: Tensor, k: Tensor, v: Tensor, first: int
) -> tuple[list[Step], tuple[Given, Given, Given], Pieces]:
    """The launches before attention, what this then reads as q, k and v, and what they fill, from argument ``first``
    on: Q and K in wider codes, and V transposed, each if the kernel takes it so."""
    steps: list[Step] = []
    of_q, of_k, of_v = Given(Q), Given(K), Given(V)
    pieces: Pieces = ()
    if launcher.widens:
        of_q, of_k = Given(first), Given(first + 1)
        pieces = tuple(Piece(tuple(x.shape), widen.WIDE_CODES) for x in (q, k))
        given = ((Q, q), (K, k))
        vectors = [_vectors_at(place, x, x.dtype) for place, x in given]
        vectors += [_vectors_at(first + place, x, widen.WIDE_CODES) for place, (_, x) in enumerate(given)]
        steps.append(Step(widen.find(q.device).kernel, tuple(vectors)))
    if not launcher.transposes:
        batch, keys, kv_heads, columns = v.shape
        of_v = Given(first + len(pieces))
        pieces = *pieces, Piece((batch, kv_heads, columns, padded_keys(keys)), E4M3)
        steps.append(Step(transpose.find(columns, v.device).kernel, (Given(V), of_v)))
    return steps, (of_q, of_k, of_v), pieces


def _vectors_at(number: int, x: Tensor, dtype: torch.dtype) -> Part:
    """An argument as contiguous as ``x``, in the vectors that ``hopper.widen`` makes wider."""
    return Part(number, 0, Piece((x.numel() // VECTOR, VECTOR), dtype).facts)


def scale_at(
    place: int | None, tensors: tuple[Tensor, ...], shape: tuple[int, int, int], first: int = FIRST_DESCALE
) -> Any:
    """The descale of that place, as a kernel takes a scale for all rows: of this shape, (batch, kv_heads, heads of
    each), which share it. Ones where there is none. ``first`` is the script's first argument that is a descale."""
    batch, kv_heads, heads = shape
    if place is None:
        ones = device_memory.unit_scales(batch, kv_heads, tensors[Q].device)
        return kept_argument(ones if heads == 1 else ones.expand(shape))
    descale = tensors[place]
    facts = shape, (*descale.stride(), 1 if heads == 1 else 0), descale.dtype
    return Part(first + place - len((Q, K, V)), 0, facts)


def _ones(batch: int, heads: int, device: torch.device) -> Any:
    return kept_argument(device_memory.unit_scales(batch, heads, device))
