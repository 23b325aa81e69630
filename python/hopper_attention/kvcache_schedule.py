"""``get_scheduler_metadata``: what a decode step finds once, for the calls of all its layers.

The kernels share out keys by themselves, from lengths on the GPU, so a schedule holds no list of work. It holds what
the host has to find: that the calls are allowed, which kernel serves them, on how many CTAs, in which memory. The first
call finds it and leaves it in the schedule, and the others take it from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hopper_attention import checks, features
from hopper_attention.api import Window
from hopper_attention.checks import FULL_WINDOW
from hopper_attention.kvcache_checks import CacheOptions, CacheShape
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.decode_call import DecodeCall
from hopper_attention.like_calls import Latest, Remembered
from hopper_attention.plain_calls import PLAIN_TENSORS, is_plain_moment

ATTRIBUTE = "_hopper_attention_schedule"
"""Of the tensor that ``get_scheduler_metadata`` gives. Copies and views of it do not have it."""

MAX_CALLS = 64
"""Of different options that a schedule keeps."""

INSTEAD = "make one with get_scheduler_metadata for this call, or leave scheduler_metadata out"


@dataclass(frozen=True, eq=False)
class Schedule:
    """The calls that a schedule is for, and what was found for some of them.

    Attributes:
        all up to ``sm_margin``: arguments of ``get_scheduler_metadata``; window_size as two ints, page_size 0 for a
            cache without pages.
        has_cu_seqlens_q, has_cu_seqlens_k_new, has_leftpad: whether these are given.
        device: of cache_seqlens, so that what was found on one GPU is not asked of another one's schedule, which calls
            do not compare.
        calls, latest: what serves those that were made, of each kind one, and the latest of them.
    """

    batch_size: int
    max_seqlen_q: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    headdim_v: int
    qkv_dtype: torch.dtype
    page_size: int
    max_seqlen_k_new: int
    causal: bool
    window_size: tuple[int, int]
    attention_chunk: int
    has_softcap: bool
    num_splits: int
    pack_gqa: bool | None
    sm_margin: int
    has_cu_seqlens_q: bool
    has_cu_seqlens_k_new: bool
    has_leftpad: bool
    device: torch.device
    calls: Remembered[DecodeCall] = field(
        default_factory=lambda: Remembered(MAX_CALLS), init=False, repr=False
    )
    latest: Latest[DecodeCall] = field(default_factory=Latest, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, in this process or another, is the schedule of the same arguments there."""
        return schedule_for, tuple(getattr(self, x.name) for x in fields(self) if x.init)

    def with_hints(self, options: CacheOptions) -> CacheOptions:
        """The options of a call, with the schedule's own where the call has none.

        Raises:
            ValueError: both have one, and they differ.
        """
        changed = {}
        for name, default in (("num_splits", 0), ("pack_gqa", None), ("sm_margin", 0)):
            own, given = getattr(self, name), getattr(options, name)
            if given is not None and given is not default:
                given = checks.python_int(given)
            if given is None or (type(given) is int and given == default):
                changed[name] = own
            elif own != default and given != own:
                raise _unfit(name, given, f"{own}, or {default}, which takes it from there")
        if options.max_seqlen_q is None and self.has_cu_seqlens_q:
            changed["max_seqlen_q"] = self.max_seqlen_q
        return options._replace(**changed)

    def check(self, shape: CacheShape, options: CacheOptions) -> None:
        """Raise ValueError unless this schedule is for a call with this shape and these options."""
        for name, given, own in self._pairs(shape, options):
            if given != own:
                raise _unfit(name, given, own)
        # Of packed tokens the host knows no more than whether there are any.
        new = shape.seqlen_new or min(shape.total_new, 1)
        for name, given, most in (
            ("queries", shape.seqlen_q, self.max_seqlen_q),
            ("new tokens", new, self.max_seqlen_k_new),
        ):
            if given > most:
                raise _unfit(f"the number of {name} of a sequence", given, f"up to {most}")

    def _pairs(self, shape: CacheShape, options: CacheOptions) -> Iterator[tuple[str, Any, Any]]:
        """Names, and values of the call and of the schedule that are to be the same."""
        yield "the batch size", shape.batch, self.batch_size
        yield "the number of query heads", shape.heads, self.num_heads_q
        yield "the number of K/V heads", shape.kv_heads, self.num_heads_kv
        yield "head_dim", shape.head_dim, self.headdim
        yield "head_dim_v", shape.head_dim_v, self.headdim_v
        yield "the dtype of q", shape.dtype, self.qkv_dtype
        yield "the page size", shape.page_size, self.page_size
        yield "causal", checks.check_flag("causal", options.causal), self.causal
        yield "window_size", features.read_window(options.window_size), self.window_size
        yield "attention_chunk", options.attention_chunk, self.attention_chunk
        yield "whether there is a softcap", options.softcap != 0.0, self.has_softcap
        yield "whether there is cu_seqlens_q", shape.is_packed_q, self.has_cu_seqlens_q
        yield "whether there is cu_seqlens_k_new", shape.is_packed_new, self.has_cu_seqlens_k_new
        yield "whether there is cache_leftpad", shape.has_leftpad, self.has_leftpad


def _unfit(name: str, given: Any, allowed: Any) -> ValueError:
    return ValueError(
        f"scheduler_metadata does not fit: {name} is {given} in the call, allowed with this schedule: {allowed}; "
        f"{INSTEAD}"
    )


@lru_cache(maxsize=REMEMBERED_CALLS)
def schedule_for(*arguments: Any) -> Schedule:
    """The one ``Schedule`` of these fields, so that a step takes up what the step before it found."""
    return Schedule(*arguments)


def schedule_of(scheduler_metadata: Any) -> Schedule | None:
    """What ``get_scheduler_metadata`` left in a tensor; None in any other."""
    if type(scheduler_metadata) is not Tensor:
        return None
    schedule: Schedule | None = vars(scheduler_metadata).get(ATTRIBUTE)
    return schedule


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool | int = False,
    window_size: Window = FULL_WINDOW,
    attention_chunk: int = 0,
    has_softcap: bool | int = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A schedule for the calls of ``flash_attn_with_kvcache`` of a decode step, made once for all layers.

    Hand it on as ``scheduler_metadata``. The first call leaves in it what the host found for it, and those after it,
    with tensors of the same shapes, strides and dtypes, are launched without finding it again; so are those of later
    steps, as a schedule of the same arguments takes up what was found. The numbers in the tensors may change: kernels
    share out keys by the lengths that they find on the GPU, also in a CUDA graph. Where a call leaves ``num_splits``,
    ``pack_gqa``, ``sm_margin`` or ``max_seqlen_q`` at its default, that of the schedule holds. A call that the schedule
    is not for raises ValueError. It does nothing more than an empty tensor in calls that torch.compile or a mode of
    torch sees, and none of it is in copies and views of the tensor.

    Args:
        batch_size, num_heads_q, num_heads_kv, headdim, headdim_v, page_size: those of the call;
            page_size None for a cache without pages.
        qkv_dtype: that of q.
        max_seqlen_q, max_seqlen_k, max_seqlen_k_new: upper bounds of queries, keys and new tokens of a sequence; the
            second decides nothing.
        cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad: those of the call, or others of their shapes.
        causal, window_size, attention_chunk, num_splits, pack_gqa, sm_margin: those of the call.
        has_softcap: whether the call has a softcap.

    Returns:
        int32 (0,) on the device of cache_seqlens.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
    """
    checks.check_are_tensors(cache_seqlens=cache_seqlens)
    sizes = {"batch_size": batch_size, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    sizes |= {"num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "headdim": headdim}
    sizes |= {"max_seqlen_k_new": max_seqlen_k_new}
    sizes |= {} if headdim_v is None else {"headdim_v": headdim_v}
    sizes |= {} if page_size is None else {"page_size": page_size}
    for name, size in sizes.items():
        _check_size(name, size)
    if page_size is not None and page_size < 1:
        raise ValueError(f"page_size is {page_size}, allowed: 1 or more, or None for a cache without pages")
    if not isinstance(qkv_dtype, torch.dtype):
        raise TypeError(f"qkv_dtype is a {type(qkv_dtype).__name__}, {qkv_dtype!r}, allowed: a torch.dtype")
    checks.check_dtypes(qkv_dtype, qkv_dtype, qkv_dtype)
    checks.check_head_dims(headdim, headdim if headdim_v is None else headdim_v)
    checks.check_heads(num_heads_q, num_heads_kv)
    is_causal, window = checks.check_flag("causal", causal), features.read_window(window_size)
    features.resolve_packed_mask(is_causal, window, attention_chunk, max_seqlen_q, max_seqlen_k)
    is_capped = checks.check_flag("has_softcap", has_softcap)
    features.check_hints(num_splits, pack_gqa)
    sm_margin = checks.check_sm_margin(sm_margin)
    vectors = {"cache_seqlens": (cache_seqlens, batch_size), "cache_leftpad": (cache_leftpad, batch_size)}
    vectors |= {"cu_seqlens_q": (cu_seqlens_q, batch_size + 1)}
    vectors |= {"cu_seqlens_k_new": (cu_seqlens_k_new, batch_size + 1)}
    for name, (vector, count) in vectors.items():
        if vector is not None:
            _check_int32(name, vector, count)
    metadata = cache_seqlens.new_empty(0)
    if is_plain_moment() and type(metadata) in PLAIN_TENSORS:
        vars(metadata)[ATTRIBUTE] = schedule_for(
            batch_size,
            max_seqlen_q,
            num_heads_q,
            num_heads_kv,
            headdim,
            headdim if headdim_v is None else headdim_v,
            qkv_dtype,
            page_size or 0,
            max_seqlen_k_new,
            is_causal,
            window,
            attention_chunk,
            is_capped,
            0 if num_splits is None else int(num_splits),
            None if pack_gqa is None else bool(pack_gqa),
            sm_margin,
            cu_seqlens_q is not None,
            cu_seqlens_k_new is not None,
            cache_leftpad is not None,
            metadata.device,
        )
    return metadata


def _check_size(name: str, size: Any) -> None:
    size = checks.python_int(size)
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        raise TypeError(f"{name} is a {type(size).__name__}, {size!r}, allowed: an int")
    if size < 0:
        raise ValueError(f"{name} is {size}, allowed: 0 or more")


def _check_int32(name: str, vector: Any, count: int) -> None:
    checks.check_are_tensors(**{name: vector})
    if vector.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {vector.dtype}, allowed: torch.int32")
    if tuple(vector.shape) != (count,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}, allowed: ({count},)")
