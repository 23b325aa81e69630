"""From the arguments of ``flash_attn_with_kvcache`` to a checked ``CacheCall`` and its tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopper_attention import checks, features
from hopper_attention.autocast import cast_inputs
from hopper_attention.checks import FP8_DTYPE, FULL_WINDOW, TensorSpec
from hopper_attention.kvcache_checks import (
    NAMES,
    CacheCall,
    CacheShape,
    CacheTensors,
    Specs,
    check_length,
    check_no_gradient,
    check_out,
    check_rotary_rows,
    read_shape,
)
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.lengths import check_max_seqlen
from hopper_attention.plain_calls import are_plain_constants, is_plain_call
from hopper_attention.qv import scale_with_qv
from hopper_attention.scores import NO_SCORES, Scores, check_scores

CAST = ("q", "k", "v", "qv")
"""What autocast casts: never a cache, which is written in place."""

remembered_shape = lru_cache(maxsize=REMEMBERED_CALLS)(read_shape)


class CacheOptions(NamedTuple):
    """Arguments of ``flash_attn_with_kvcache`` that are no tensors of ``CacheTensors``, as they were given."""

    max_seqlen_q: Any = None
    softmax_scale: Any = None
    causal: Any = False
    window_size: Any = FULL_WINDOW
    attention_chunk: Any = 0
    softcap: Any = 0.0
    rotary_interleaved: Any = True
    num_splits: Any = 0
    pack_gqa: Any = None
    sm_margin: Any = 0
    return_softmax_lse: Any = False
    sinks: Any = None
    alibi_slopes: Any = None
    out: Any = None
    backend: Any = None


class CheckedCall(NamedTuple):
    """A call that may be launched; ``is_plain``: without torch's dispatcher."""

    call: CacheCall
    tensors: CacheTensors
    scores: Scores
    is_plain: bool


def read_call(given: CacheTensors, options: CacheOptions) -> CheckedCall:
    """The call that these arguments make; the cache_seqlens of ``given`` may be an int.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: a feature is not implemented.
    """
    checks.check_are_tensors(q=given.q, k_cache=given.k_cache, v_cache=given.v_cache)
    given, length = _split_length(given)
    others = given.given
    checks.check_are_tensors(**others)
    of_scores = {"sinks": options.sinks, "alibi_slopes": options.alibi_slopes, "out": options.out}
    extras = {name: x for name, x in of_scores.items() if x is not None}
    checks.check_are_tensors(**extras)
    every = (*others.values(), *extras.values())
    check_no_gradient(every)
    tensors = _cast(given)
    # A meta tensor has no numbers, and the operator knows its results without them.
    is_plain = is_plain_call(*tensors[:3]) and are_plain_constants(*every) and not tensors.q.is_meta
    causal = checks.check_flag("causal", options.causal)
    hides = features.hides_keys(causal, options.window_size, options.attention_chunk)
    shape = _shape_of(tensors, _longest_q(tensors, options.max_seqlen_q), length, is_plain)
    if length is not None:
        if tensors.rotary_cos is not None and tensors.rotary_seqlens is None:
            check_rotary_rows(length, tensors.rotary_cos.shape[0], shape, hides)
        lengths = torch.full((shape.batch,), length, dtype=torch.int32, device=shape.device)
        tensors = tensors._replace(cache_seqlens=lengths)
    # A single query is the last, and sees all keys under a causal mask.
    mask = features.resolve_packed_mask(
        causal and shape.seqlen_q > 1,
        options.window_size,
        options.attention_chunk,
        shape.seqlen_q,
        shape.seqlen_k,
    )
    scores = NO_SCORES
    if (
        options.sinks is not None
        or options.alibi_slopes is not None
        or features.is_given(options.softcap, 0.0)
    ):
        scores = features.resolve_scores(options.softcap, options.alibi_slopes, options.sinks)
        check_scores(scores, shape.batch, shape.heads, shape.dtype, shape.device)
    features.check_hints(options.num_splits, options.pack_gqa)
    checks.check_backend(options.backend)
    checks.check_sm_margin(options.sm_margin)
    call = CacheCall(
        shape,
        mask,
        _scale_of(options.softmax_scale, shape),
        scores.kind,
        rotary_interleaved=checks.check_flag("rotary_interleaved", options.rotary_interleaved),
        rotates_each_query=hides,
        num_splits=0 if options.num_splits is None else int(options.num_splits),
        pack_gqa=None if options.pack_gqa is None else bool(options.pack_gqa),
        backend=options.backend,
        sm_margin=options.sm_margin,
        wants_lse=checks.check_flag("return_softmax_lse", options.return_softmax_lse),
    )
    if options.out is not None:
        check_out(options.out, shape)
    return CheckedCall(call, tensors, scores, is_plain)


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
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
        raise TypeError(
            f"cache_seqlens is a {type(length).__name__}, {length!r}, allowed: an int or an int32 (batch,) tensor"
        )
    return given._replace(cache_seqlens=None), length


def _longest_q(tensors: CacheTensors, max_seqlen_q: Any) -> int:
    """What no sequence of a packed q has more queries than."""
    rows = tensors.q.shape[0] if tensors.q.dim() else 0
    if max_seqlen_q is None:
        return rows
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    return min(rows, max_seqlen_q)


def _shape_of(tensors: CacheTensors, longest_q: int, length: int | None, is_plain: bool) -> CacheShape:
    """The shape, checked; ``length`` is that of all sequences where cache_seqlens is an int."""
    read = remembered_shape if is_plain else read_shape
    specs = tensors.specs
    if length is None:
        return read(specs, longest_q, -1)
    shape = read(_with_length(specs), longest_q, max(0, length + _most_new(tensors.k)))
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


def _most_new(k: Tensor | None) -> int:
    """New tokens of a sequence, at most."""
    return 0 if k is None or k.dim() < 3 else k.shape[-3]


def _scale_of(softmax_scale: Any, shape: CacheShape) -> float:
    return scale_with_qv(softmax_scale, shape.head_dim, shape.head_dim_v if shape.has_qv else 0)
