"""From the arguments of ``flash_attn_with_kvcache`` to a checked ``CacheCall`` and its tensors."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopper_attention import checks, features
from hopper_attention.autocast import cast_inputs
from hopper_attention.checks import FP8_DTYPE, TensorSpec
from hopper_attention.device_memory import filled
from hopper_attention.kvcache_checks import (
    NAMES,
    CacheCall,
    CacheOptions,
    CacheShape,
    CacheTensors,
    Specs,
    check_can_be_rotated,
    check_length,
    check_no_gradient,
    check_not_mapped,
    check_out,
    check_rotary_rows,
    read_shape,
)
from hopper_attention.kvcache_schedule import schedule_of
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.lengths import check_max_seqlen
from hopper_attention.plain_calls import are_plain_tensors, check_no_tangent, is_plain_call
from hopper_attention.qv import scale_with_qv
from hopper_attention.scores import NO_SCORES, ScoreKind, Scores, check_scores
from hopper_attention.scores import PLAIN as PLAIN_SCORES

CAST = ("q", "k", "v", "qv")
"""What autocast casts: never a cache, which is written in place."""

KINDS = {
    (cap, alibi, sinks): ScoreKind(cap, alibi, sinks) if cap or alibi or sinks else PLAIN_SCORES
    for cap, alibi, sinks in product((False, True), repeat=3)
}
"""By whether there is a softcap, slopes and sinks. Made ahead, as torch.compile of older torch cannot make one."""

MOST_SPLITS = 2**24
"""More than a GPU has CTAs, as which it counts. Kernels add key blocks of a sequence to it in 32 bits."""

Facts = tuple["tuple[Any, ...] | None", ...]
"""``TensorSpec`` of tensors as plain tuples, which are made and hashed sooner; None for what is not given."""


class CacheExtras(NamedTuple):
    """Tensors beside ``CacheTensors``, which FlashAttention-3 does not have."""

    sinks: Any = None
    alibi_slopes: Any = None
    out: Any = None


class CheckedCall(NamedTuple):
    """A call that may be launched; ``is_plain``: without torch's dispatcher."""

    call: CacheCall
    tensors: CacheTensors
    scores: Scores
    is_plain: bool


def read_call(given: CacheTensors, extras: CacheExtras, options: CacheOptions) -> CheckedCall:
    """The call that these arguments make; the cache_seqlens of ``given`` may be an int.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: a feature is not implemented.
    """
    tensors, length = _split_length(given)
    sinks, alibi_slopes, out = extras
    is_bare = sinks is None and alibi_slopes is None and out is None
    is_plain = (
        is_plain_call(*tensors[:3]) and are_plain_tensors(tensors) and (is_bare or are_plain_tensors(extras))
    )
    # A meta tensor has no numbers, and the operator knows its results without them.
    if not is_plain or tensors.q.is_meta:
        is_plain = False
        checks.check_are_tensors(q=tensors.q, k_cache=tensors.k_cache, v_cache=tensors.v_cache)
        more = {name: x for name, x in zip(CacheExtras._fields, extras, strict=True) if x is not None}
        more |= {name: x for name, x in zip(NAMES, tensors, strict=True) if x is not None}
        checks.check_are_tensors(**more)
        check_not_mapped(tensors)
        check_no_tangent("attention on a key/value cache", (*tensors, *extras))
    check_no_gradient(tensors)
    if not is_bare:
        check_no_gradient(extras)
    # What traces a call may not know how to ask.
    if not is_plain or torch._C._is_any_autocast_enabled():
        tensors = _cast(tensors)
    if not features.is_constant(options.window_size):
        options = options._replace(window_size=features.read_window(options.window_size))
    of_out = None if out is None else _facts((out,))[0]
    there = alibi_slopes is not None, sinks is not None
    # What traces a call sees the numbers of a schedule, and there are none.
    schedule = schedule_of(tensors.scheduler_metadata) if is_plain else None
    if schedule is not None:
        options = schedule.with_hints(options)
    call = _find_call(is_plain, _facts(tensors), of_out, length, *there, *options)
    if schedule is not None:
        schedule.check(call.shape, options)
    if length is not None:
        shape = call.shape
        most = shape.capacity if is_plain else -1
        lengths = filled(length, shape.batch, most, shape.device)
        tensors = tensors._replace(cache_seqlens=lengths)
    scores = NO_SCORES
    if call.scores != PLAIN_SCORES:
        scores = features.resolve_scores(options.softcap, alibi_slopes, sinks)
        check_scores(scores, call.shape.batch, call.shape.heads, call.shape.dtype, call.shape.device)
    return CheckedCall(call, tensors, scores, is_plain)


def _find_call(is_plain: bool, *arguments: Any) -> CacheCall:
    """``make_call``, remembered where that can be."""
    if is_plain:
        try:
            return remembered_call(*arguments)
        except TypeError:
            # An option that is not hashable, or not allowed, of which the same error comes below.
            pass
    return make_call(*arguments)


def make_call(
    facts: Facts,
    out: tuple[Any, ...] | None,
    length: int | None,
    has_alibi: bool,
    has_sinks: bool,
    *given: Any,
) -> CacheCall:
    """The call with tensors like these, checked but for the values of slopes and sinks.

    Args:
        facts: of ``CacheTensors``.
        out: of out, or None.
        length: cache_seqlens where it is an int.
        given: ``CacheOptions``.
    """
    options = CacheOptions(*given)
    specs = tuple(None if x is None else TensorSpec(*x) for x in facts)
    shape = _shape_of(specs, options.max_seqlen_q, length)
    causal = checks.check_flag("causal", options.causal)
    window, chunk = options.window_size, options.attention_chunk
    hides = features.hides_keys(causal, window, chunk)
    cos = specs[NAMES.index("rotary_cos")]
    if length is not None and cos is not None and specs[NAMES.index("rotary_seqlens")] is None:
        check_rotary_rows(length, cos.shape[0], shape, hides)
    features.check_hints(options.num_splits, options.pack_gqa)
    checks.check_backend(options.backend)
    softcap = checks.check_softcap(options.softcap)
    if out is not None:
        check_out(TensorSpec(*out), shape)
    if shape.has_new:
        for name, cache in zip(("k_cache", "v_cache"), shape.caches, strict=True):
            checks.check_can_be_written(name, cache)
    hadamard = checks.check_flag("hadamard", options.hadamard)
    if hadamard:
        check_can_be_rotated(shape)
    return CacheCall(
        shape,
        # A single query is the last, and sees all keys under a causal mask.
        features.resolve_packed_mask(
            causal and shape.seqlen_q > 1, window, chunk, shape.seqlen_q, shape.seqlen_k
        ),
        scale_with_qv(options.softmax_scale, shape.head_dim, shape.head_dim_v if shape.has_qv else 0),
        KINDS[softcap != 0.0, has_alibi, has_sinks],
        rotary_interleaved=checks.check_flag("rotary_interleaved", options.rotary_interleaved),
        rotates_each_query=hides,
        num_splits=0 if options.num_splits is None else min(int(options.num_splits), MOST_SPLITS),
        pack_gqa=None if options.pack_gqa is None else bool(options.pack_gqa),
        backend=options.backend,
        sm_margin=checks.check_sm_margin(options.sm_margin),
        wants_lse=checks.check_flag("return_softmax_lse", options.return_softmax_lse),
        hadamard=hadamard,
        length_is_int=length is not None,
    )


@lru_cache(maxsize=REMEMBERED_CALLS, typed=True)
def remembered_call(*arguments: Any) -> CacheCall:
    """``make_call`` of plain tensors, in one look-up; typed, as True is no number of splits where 1 is."""
    return _first_like(make_call(*arguments))


@lru_cache(maxsize=REMEMBERED_CALLS)
def _first_like(call: CacheCall) -> CacheCall:
    """Of all calls that equal this one the first, so that what is remembered of it is found without comparing them."""
    return call


def _facts(tensors: tuple[Tensor | None, ...]) -> Facts:
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def _cast(given: CacheTensors) -> CacheTensors:
    """With q and new tokens as autocast wants them, where they are not e4m3."""
    names = [name for name in CAST if getattr(given, name) is not None]
    if any(getattr(given, name).dtype == FP8_DTYPE for name in names):
        return given
    cast = cast_inputs(*(getattr(given, name) for name in names))
    return given._replace(**dict(zip(names, cast, strict=True)))


def _split_length(given: CacheTensors) -> tuple[CacheTensors, Any]:
    """The tensors without cache_seqlens where that is an int, and the int, or None."""
    length: Any = given.cache_seqlens
    if length is None or isinstance(length, Tensor):
        return given, None
    length = checks.python_int(length)
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
        raise TypeError(
            f"cache_seqlens is a {type(length).__name__}, {length!r}, allowed: an int or an int32 (batch,) tensor"
        )
    return given._replace(cache_seqlens=None), length


def _shape_of(specs: Specs, max_seqlen_q: Any, length: int | None) -> CacheShape:
    """The shape, checked; ``length`` is that of all sequences where cache_seqlens is an int."""
    q, k = (specs[NAMES.index(name)] for name in ("q", "k"))
    assert q is not None
    longest = q.shape[0] if q.shape else 0
    if max_seqlen_q is not None:
        longest = min(longest, check_max_seqlen("max_seqlen_q", max_seqlen_q))
    if length is None:
        return read_shape(specs, longest, -1)
    new = 0 if k is None or len(k.shape) < 3 else k.shape[-3]
    shape = read_shape(_with_length(specs), longest, max(0, length + new))
    check_length(length, shape)
    return shape


def _with_length(specs: Specs) -> Specs:
    """With what cache_seqlens will be."""
    q, cu_seqlens_q = (specs[NAMES.index(name)] for name in ("q", "cu_seqlens_q"))
    assert q is not None
    batch = q.shape[0] if q.shape else 0
    if cu_seqlens_q is not None:
        batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q.shape else 0
    lengths = TensorSpec((batch,), (1,), torch.int32, q.device)
    return tuple(lengths if name == "cache_seqlens" else x for name, x in zip(NAMES, specs, strict=True))
