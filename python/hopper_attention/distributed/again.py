"""Calls of several ranks with tensors like those of an earlier one: what that found is used again.

A rank that finds its call here says nothing to the others, as one that reads and checks it anew does not: ranks agreed
on all that counts when the call was first made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hopper_attention.distributed.checks import FIRST, note_agreement
from hopper_attention.distributed.request import Mesh, Options, Request
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.like_calls import Remembered, may_be_like
from hopper_attention.plain_calls import PLAIN_TENSORS, saves_elsewhere
from hopper_attention.quantized import Fp8Quantization

Key = tuple[Any, ...]

WINDOW = list(Options.__dataclass_fields__).index("window_size")
"""Which of the arguments."""


class LikeCall(NamedTuple):
    """What serves calls like an earlier one of a single group, without sinks and documents."""

    method: str
    request: Request
    options: Options


remembered: Remembered[LikeCall] = Remembered(REMEMBERED_CALLS)

KINDS = frozenset((bool, int, float, str, tuple, type(None), Fp8Quantization))
"""Types of arguments that say all by their value."""


def key_of(q: Any, k: Any, mesh: Mesh, sinks: Tensor | None, given: tuple[Any, ...]) -> Key | None:
    """Under what calls are remembered; None for those that are not. ``given`` are the arguments of ``Options``."""
    if sinks is not None or type(q) not in PLAIN_TENSORS or type(k) not in PLAIN_TENSORS or not may_be_like():
        return None
    group = _group_of(mesh)
    # Equal numbers of other types are other arguments, which may not be allowed.
    kinds = (*map(type, given), *map(type, given[WINDOW])) if type(given[WINDOW]) is tuple else ()
    if group is None or not kinds or not KINDS.issuperset(kinds):
        return None
    # What a method may choose is another thing in a graph.
    is_captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
    moment = torch.is_grad_enabled(), is_captured, saves_elsewhere()
    return group, q.shape, k.shape, moment, given, kinds


def _group_of(mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks, if they are a single group."""
    if isinstance(mesh, DeviceMesh):
        return mesh.get_group() if mesh.ndim == 1 else None
    if mesh is None:
        return dist.group.WORLD
    return mesh if isinstance(mesh, dist.ProcessGroup) else None


def find(key: Key, q: Tensor, k: Tensor, v: Tensor) -> LikeCall | None:
    """What served a call like this one.

    Raises:
        ValueError: the group is there no more.
    """
    call = remembered.find(key, q, k, v)
    if call is not None:
        dist.get_rank(call.request.ring.group)
        if call.options.check == FIRST:
            note_agreement(call.request.ring)
    return call


def remember(key: Key, tensors: tuple[Tensor, Tensor, Tensor], call: LikeCall) -> None:
    """Keep a call that was checked; ``key`` is that of ``key_of``."""
    if not call.request.ulysses and remembered.comes_again(key):
        remembered.keep(key, call, *tensors)
