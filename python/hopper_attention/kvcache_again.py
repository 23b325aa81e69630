"""Decoding with tensors like those of an earlier call: what that found, its checks among it, is used again.

A decode step makes the same call in every layer, with other tensors. One comparison in C++ (``like_calls``) says that
they are like those that were checked, and the launch follows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hopper_attention.checks import Result
from hopper_attention.device_memory import is_capturing
from hopper_attention.features import is_constant
from hopper_attention.kvcache_call import CheckedCall
from hopper_attention.kvcache_checks import CacheOptions
from hopper_attention.kvcache_schedule import ATTRIBUTE, Schedule, schedule_of
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.decode import find_decode
from hopper_attention.launch.decode_call import DecodeCall, Decoded, is_launched_as_it_is
from hopper_attention.launch.kvcache import find_way
from hopper_attention.like_calls import Kept, Latest, Remembered, may_be_like

remembered: Remembered[DecodeCall] = Remembered(REMEMBERED_CALLS)
"""By the shapes of q and k_cache, and ``_key_of``."""

WINDOW = CacheOptions._fields.index("window_size")

latest: Latest[DecodeCall] = Latest()
"""Of calls without a schedule, whose q, k_cache, v_cache and cache_seqlens have at most a page table beside them."""


def decode_again(tensors: Decoded, options: tuple[Any, ...]) -> Result | None:
    """The results, if an earlier call was like this one; None if it has to be read and checked.

    Args:
        options: all other arguments of the call. They count with their types, as True is no number of splits.
    """
    if not may_be_like():
        return None
    q, k_cache, v_cache, lengths, table, cu_seqlens_q, k_descale, v_descale, metadata = tensors
    schedule = metadata.__dict__.get(ATTRIBUTE) if type(metadata) is Tensor else None
    before = latest if schedule is None else schedule.latest
    call = None
    is_common = cu_seqlens_q is k_descale is v_descale is None and (metadata is None or schedule is not None)
    if is_common:
        # In the order of ``tensors``.
        given: tuple[Any, ...] = (q, k_cache, v_cache, lengths)
        if table is not None:
            given += (table,)
        call = before.find(options, *given)
    if call is None:
        kept = _find(tensors, options, schedule)
        if kept is None:
            return None
        if is_common:
            before.keep(options, kept, len(given))
        call = kept.call
    return call(tensors)


def _find(tensors: Decoded, options: tuple[Any, ...], schedule: Schedule | None) -> Kept[DecodeCall] | None:
    """What was kept of calls like this one."""
    q, k_cache = tensors[:2]
    if type(q) is not Tensor or type(k_cache) is not Tensor:
        return None
    key, given = _key_of(tensors, options), [x for x in tensors if x is not None]
    if schedule is not None:
        return schedule.calls.find_kept(key, *given[:-1])
    return remembered.find_kept((q.shape, k_cache.shape, key), *given)


def _key_of(tensors: Decoded, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is compared of a call beside its tensors: which are given, and all else with its type."""
    return tuple(map(type, tensors + options)), options


def remember(tensors: Decoded, options: tuple[Any, ...], checked: CheckedCall) -> None:
    """Keep a call that was made, if ``decode_again`` can make others like it."""
    call, read, scores, _ = checked
    # Queries that are to be rotated are not what the kernel gets. A window of a list or of tensors may change in place.
    if find_way(call).path != "decode" or call.hadamard or not is_constant(options[WINDOW]):
        return
    key, schedule = _key_of(tensors, options), schedule_of(tensors[-1])
    sizes = tensors[0].shape, tensors[1].shape, key
    if schedule is None and not remembered.comes_again(sizes):
        return
    # What serves in a graph that is captured may not be what serves elsewhere.
    if is_capturing(call.shape.device):
        return
    if is_launched_as_it_is(call.shape, read, tensors):
        given = [x for x in tensors if x is not None]
        found = DecodeCall.of(find_decode(call), scores.softcap or None)
        if schedule is None:
            remembered.keep(sizes, found, *given)
        else:
            # Without the schedule itself, as it is its own that is asked.
            schedule.calls.keep(key, found, *given[:-1])
