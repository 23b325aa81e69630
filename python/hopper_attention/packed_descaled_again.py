"""FP8 attention to packed e4m3 tensors with descales like those of an earlier call: what that found serves again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, float32

from hopper_attention import checks, device_memory
from hopper_attention._kernels import kept_argument
from hopper_attention.backends import target_of
from hopper_attention.descaled_again import Descales, Places, distinct, scale_at
from hopper_attention.device_memory import Piece, Pieces
from hopper_attention.features import with_mask
from hopper_attention.few_packed_queries import served_alike
from hopper_attention.fp8_rules import classes_of_lengths, packed_problem, serves_in_e4m3
from hopper_attention.launch import transpose
from hopper_attention.launch.at_once import Given, Part, Step
from hopper_attention.launch.base import REMEMBERED_CALLS, index_of, no_vectors
from hopper_attention.launch.few_packed_fp8 import FewPackedFp8Launcher, find_packed_with_descales
from hopper_attention.launch.few_packed_queries import FewPackedLaunch, ReadyFewPacked
from hopper_attention.launch.packed_fp8 import PackedFp8Launcher, find_packed_fp8
from hopper_attention.launch.split_forward import merge_in_script
from hopper_attention.layout import make_packed_addressable
from hopper_attention.lengths import Lengths
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.masks import MaskSpec, Sides
from hopper_attention.packed_quantized import ONE_PER_SEQUENCE
from hopper_attention.packed_scripts import (
    FIRST,
    LSE,
    OUT,
    STARTS_K,
    K,
    PackedSteps,
    Q,
    ScriptedCall,
    V,
    find_again,
    serve,
)
from hopper_attention.packing_rules import MOST_QUERIES
from hopper_attention.plain_calls import is_plain_call
from hopper_attention.quantized import E4M3
from hopper_attention.scores import PLAIN, ScoreKind, Scores
from hopper_attention.value_parts import needs_parts

OfScores = tuple[Any, Any]
"""softcap and sinks of a call."""

NO_CHANGES: OfScores = (0.0, None)

Flags = tuple[Any, ...]
"""causal, deterministic, backend, sm_margin, return_attn_probs and exact_lse of a call, and their types count."""

Window = tuple[Any, Any]
"""window_size and attention_chunk of a call."""

Checked = tuple[MaskSpec, "str | None", int, bool, bool]
"""The mask, backend, sm_margin, whether the LSE is wanted, and whether exact."""


@dataclass(frozen=True, slots=True)
class FewPackedDescaledCall:
    """What serves calls like an earlier one, by the decode kernel; ``places`` are those of descales among tensors,
    ``window`` is that of their mask."""

    device_index: int
    launch: FewPackedLaunch | ReadyFewPacked
    places: Places
    window: Sides
    default_scale: float
    softcap: float = 0.0
    has_sinks: bool = False

    def __call__(
        self, tensors: tuple[Tensor, ...], lengths: Lengths, scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        q, k, v = tensors[:3]
        of_q, of_k, of_v = (None if place is None else tensors[place] for place in self.places)
        descales = of_q, of_k, of_v
        of_call = *lengths, scale, *self.window, wants_lse
        if isinstance(self.launch, ReadyFewPacked):
            return self.launch(q, k, v, *of_call, descales=descales)
        scores = Scores.of(self.softcap, None, tensors[-1] if self.has_sinks else None)
        return self.launch(q, k, v, *of_call, descales=descales, scores=scores)


def may_serve(of_scores: OfScores) -> bool:
    """Whether calls with such a softcap and sinks are kept, which have to be as the kernel takes them."""
    softcap, sinks = of_scores
    if type(softcap) not in (int, float):
        return False
    return sinks is None or (type(sinks) is Tensor and sinks.dtype == float32 and sinks.is_contiguous())


def with_sinks(tensors: tuple[Any, ...], of_scores: OfScores) -> tuple[Any, ...]:
    """``tensors`` of a call, and its sinks, if there are any."""
    return tensors if of_scores[1] is None else (*tensors, of_scores[1])


def _kind_of(of_scores: OfScores) -> tuple[float, bool]:
    return float(of_scores[0]), of_scores[1] is not None


remembered: Remembered[ScriptedCall | FewPackedDescaledCall] = Remembered(REMEMBERED_CALLS)


def attend(
    q: Any,
    k: Any,
    v: Any,
    descales: Descales,
    lengths: Lengths,
    softmax_scale: Any,
    flags: Flags,
    window: Window,
    of_scores: OfScores = NO_CHANGES,
) -> tuple[Tensor, Tensor] | None:
    """out and lse of a call, if one like it was made and ``serve`` can; else None."""
    longest_q, longest_k = lengths[4:]
    if not (type(q) is type(k) is Tensor and type(longest_q) is type(longest_k) is int and may_be_like()):
        return None
    if longest_q < 1 or longest_k < 1 or k.dim() != q.dim() or k.dim() != 3:
        return None
    masked = with_mask(flags, window, longest_q, longest_k)
    if masked is None:
        return None
    tensors, places = distinct(q, k, v, descales)
    if of_scores is not NO_CHANGES:
        if not may_serve(of_scores):
            return None
        masked, tensors = (*masked, *_kind_of(of_scores)), with_sinks(tensors, of_scores)
    group = _group_of(places, lengths, k.shape[0], masked)
    call = find_again(remembered, group, *tensors, *lengths.different)
    return serve(call, tensors, lengths, softmax_scale, bool(flags[4]))


def remember(
    tensors: tuple[Tensor, Tensor, Tensor],
    descales: Descales,
    lengths: Lengths,
    flags: Flags,
    window: Window,
    checked: Checked,
    of_scores: OfScores = NO_CHANGES,
) -> None:
    """Keep a call that was made, of e4m3 tensors, if the kernels take these as they are."""
    q, k, v = tensors
    if not is_plain_call(q, k, v) or not q.is_cuda or device_memory.is_capturing(q.device):
        return
    given, places = distinct(q, k, v, descales)
    softcap, has_sinks = 0.0, False
    if of_scores is not NO_CHANGES:
        if not may_serve(of_scores):
            return
        softcap, has_sinks = of_scores[0], of_scores[1] is not None
        given = with_sinks(given, of_scores)
    compared = *given, *lengths.different
    # One that requires a gradient gets none without gradients, and may be asked for one in a call that is like this.
    if any(type(x) is not Tensor or x.requires_grad for x in compared):
        return
    is_empty = 0 in (*q.shape, *k.shape, *v.shape) or lengths.cu_seqlens_q.shape[0] < 2
    if is_empty or lengths.seqused_q is not None or 0 in lengths[4:]:
        return
    masked = with_mask(flags, window, *lengths[4:])
    if masked is None:
        return
    if of_scores is not NO_CHANGES:
        masked = *masked, *_kind_of(of_scores)
    key = q.shape, k.shape, *_group_of(places, lengths, k.shape[0], masked)
    if not remembered.comes_again(key) or not remembered.has_room(key, *compared):
        return
    if any(make_packed_addressable(x) is not x for x in (q, k, v)):
        return
    mask, backend, sm_margin, wants_lse, exact_lse = checked
    scores = ScoreKind(has_softcap=softcap != 0.0, has_sinks=has_sinks)
    of_kernel = target_of(q.device), mask, scores, backend, exact_lse
    if scores != PLAIN and not serves_in_e4m3(q.shape, v.shape, *of_kernel):
        return
    if has_sinks and wants_lse:
        # Rows of no sequence are looked for, to have none in their LSE.
        return
    few = find_packed_with_descales((q, k, v), lengths, mask, backend, sm_margin, not exact_lse, scores)
    of_call, kind = (mask.sides, wants_lse), (softcap, has_sinks)
    call: ScriptedCall | FewPackedDescaledCall
    if isinstance(few, FewPackedFp8Launcher):
        call = _call_of(few.attention, given, places, lengths, *of_call, kind, (few,))
    elif few is not None:
        ready = ReadyFewPacked.of(few, tensors, lengths, descales) if scores == PLAIN else None
        made = index_of(q.device), ready or few, places, mask.sides, few.call.softmax_scale
        call = FewPackedDescaledCall(*made, *kind)
    elif needs_parts(v.shape[2]):
        return
    else:
        asked = mask, lengths[4:], exact_lse, not wants_lse, scores
        problem = packed_problem(q.shape, v.shape, *asked)
        launch = find_packed_fp8(problem, q.device, backend, sm_margin)
        if not isinstance(launch, PackedFp8Launcher) or not launch.config.lone_scales:
            return
        if not launch.config.v_rows and not transpose.are_packed_counted(v, lengths):
            return
        call = _call_of(launch, given, places, lengths, *of_call, kind)
    remembered.keep(key, call, *compared)


def _group_of(places: Places, lengths: Lengths, total_k: int, flags: Flags) -> tuple[Any, ...]:
    """Of calls that one would serve, but for the sizes of tensors; k has ``total_k`` rows, and ``flags``
    are those ``with_mask``. Bounds of lengths decide on the kernel."""
    longest_q, longest_k = lengths[4:]
    few = served_alike(longest_q, longest_k, total_k) if longest_q <= MOST_QUERIES and total_k else None
    classes = few, classes_of_lengths(longest_q, longest_k)
    return places, flags, tuple(map(type, flags)), classes, lengths.pattern


def _call_of(
    launcher: PackedFp8Launcher,
    tensors: tuple[Tensor, ...],
    places: Places,
    lengths: Lengths,
    window: Sides,
    wants_lse: bool,
    kind: tuple[float, bool],
    few: tuple[FewPackedFp8Launcher, ...] = (),
) -> ScriptedCall:
    """That of calls with tensors like these, of which the kernel reads the descales at ``places``; ``kind`` is a
    softcap, 0 for none, and whether the last tensor are sinks. ``few`` is empty, or has the launcher of few queries
    that ``launcher`` is of."""
    q, _, v, *descales = tensors
    (_, heads, _), (total_k, kv_heads, columns), device = q.shape, v.shape, q.device
    config = launcher.config
    shared = PackedSteps.of(launcher, q, v.shape, lengths)
    steps, batch = [shared.plan()], shared.batch
    work: Pieces = ()
    values: Given = Given(V)
    if not config.v_rows:
        keys = transpose.keys_of_packed(v, lengths)
        values = Given(FIRST + len(descales))
        work = (Piece((kv_heads, columns, keys), E4M3),)
        strides = total_k * v.stride(0), *v.stride()
        of_v = Part(V, 0, ((1, *v.shape), strides, v.dtype))
        transposed = Part(values.number, 0, Piece((1, kv_heads, columns, keys), E4M3).facts)
        kernel = transpose.find_packed(columns, device).kernel
        steps.append(Step(kernel, (of_v, transposed, Given(STARTS_K), shared.used_k)))
    filled: tuple[Given, Given] = Given(OUT), Given(LSE)
    behind: list[Step] = []
    for each in few:
        sizes = each.sizes(q.shape, columns)
        first = FIRST + len(descales) + len(work)
        filled, behind, of_parts = merge_in_script(
            each.combine, sizes, filled, checks.FP8_OUT_DTYPE, wants_lse, first
        )
        work = *work, *of_parts
    of_heads = heads // (kv_heads * config.group), 1, 1
    of_q, of_k, of_v_scale = (
        scale_at(place, tensors, (batch, kv_heads, n), FIRST)
        for place, n in zip(places, of_heads, strict=True)
    )
    ones = kept_argument(device_memory.unit_scales(batch, kv_heads, device))
    no_mean = kept_argument(no_vectors(batch, kv_heads, device))
    scales, blocks = (of_q, of_k, ones, of_v_scale), (ONE_PER_SEQUENCE, ONE_PER_SEQUENCE)
    softcap, has_sinks = kind
    sinks = Given(FIRST + len(descales) - 1) if has_sinks else None
    changes = (softcap or None, sinks) if config.softcap or config.sinks else ()
    of_tensors = (Given(Q), Given(K), values), filled, scales, no_mean, blocks
    steps.append(shared.attention(*of_tensors, window, changes))
    return shared.call([*steps, *behind], work, checks.FP8_OUT_DTYPE)
