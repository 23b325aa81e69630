"""Whether the tensors of a call are like those of one that was made before: one question to torch in place of many.

Reading shape, strides, dtype and device of a tensor takes half a microsecond in Python. torch has the comparison ready
in C++, for the code that torch.compile made for tensors of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.autograd import forward_ad

IsLike = Callable[..., bool]
"""Of so many tensors, in their order."""

Call = TypeVar("Call")


NO_LENGTHS: Mapping[int, int] = {}


def like(*tensors: Tensor, of_any_length: Mapping[int, int] = NO_LENGTHS) -> IsLike:
    """Whether tensors are of the class, dtype, device, shape, strides and requires_grad of these, each of its own.

    ``of_any_length`` has for the places of some the dimension whose size does not count, nor do strides before it.

    They are not, either, where autocast, inference mode, torch.jit.trace or a transform of torch.func is at work and
    was not when this was called, or the other way round. Storage, and where in it a tensor begins, does not count. Of
    no tensors is it said where two of them are one object.
    """
    # Each a list a tensor, which is not what torch's declaration of it says.
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    for place, dimension in of_any_length.items():
        sizes[place][dimension] = None
        strides[place][:dimension] = [None] * dimension
    make = vars(guards).get("TensorGuards")
    # A torch that has it no more: each call is read and checked.
    return (
        _is_not
        if make is None
        else make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    )


def _is_not(*tensors: Tensor) -> bool:
    return False


def may_be_like() -> bool:
    """Whether nothing changes a call that ``like`` does not see: torch.compile, dispatch modes, forward derivatives."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    )


@dataclass(frozen=True, slots=True)
class Kept(Generic[Call]):
    """What serves calls with tensors like those of an earlier one."""

    is_like: IsLike
    call: Call


KINDS = 4
"""Of tensors under one key. Those that came first stay, so that calls with more kinds do not drive each other out."""


class Remembered(Generic[Call]):
    """What serves calls, by what is cheap to read of them; all is forgotten where it becomes too much."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: dict[Hashable, list[Kept[Call]]] = {}
        self._latest: dict[Hashable, Kept[Call]] = {}
        self._once: set[Hashable] = set()

    def find_latest(self, group: Hashable, *tensors: Tensor) -> Call | None:
        """What served the latest call of a group, if it was kept for tensors like these; None if not, or the group has
        no hash.

        The calls of a model's layers are alike, and a group is less to read of a call than a key. Calls of one group
        have as many tensors each.
        """
        kept = self.latest(group)
        return kept.call if kept is not None and kept.is_like(*tensors) else None

    def latest(self, group: Hashable) -> Kept[Call] | None:
        """What served the latest call of a group, whose tensors are to be compared."""
        try:
            return self._latest.get(group)
        except TypeError:
            return None

    def find(self, key: Hashable, *tensors: Tensor, group: Hashable = None) -> Call | None:
        """What was kept under this key for tensors like these; None if nothing was, or the key has no hash.

        It becomes the latest of its ``group``, if that is not None.
        """
        kept = self.find_kept(key, *tensors)
        if kept is None:
            return None
        if group is not None:
            self._set_latest(group, kept)
        return kept.call

    def find_kept(self, key: Hashable, *tensors: Tensor) -> Kept[Call] | None:
        """The same with the comparison that found it."""
        try:
            kinds = self._calls.get(key)
        except TypeError:
            return None
        if kinds is not None:
            for kept in kinds:
                if kept.is_like(*tensors):
                    return kept
        return None

    def _set_latest(self, group: Hashable, kept: Kept[Call]) -> None:
        if len(self._latest) >= self._limit:
            self._latest.clear()
        self._latest[group] = kept

    def keep(
        self, key: Hashable, call: Call, *tensors: Tensor, of_any_length: Mapping[int, int] = NO_LENGTHS
    ) -> None:
        """Serve calls with tensors ``like`` these so. Nothing is like tensors of which two are one."""
        if len(self._calls) >= self._limit:
            self._calls.clear()
            self._latest.clear()
        if self.has_room(key, *tensors):
            kinds = self._calls.setdefault(key, [])
            kinds.append(Kept(like(*tensors, of_any_length=of_any_length), call))

    def has_room(self, key: Hashable, *tensors: Tensor) -> bool:
        """Whether ``keep`` would keep a call of these, which may be much work to make."""
        return len(self._calls.get(key, ())) < KINDS and len(set(map(id, tensors))) == len(tensors)

    def comes_again(self, key: Hashable) -> bool:
        """Whether this was asked of the key before: what ``keep`` takes is lost on sizes that are new in every call."""
        if key in self._once:
            return True
        if len(self._once) >= self._limit:
            self._once.clear()
        self._once.add(key)
        return False

    def cache_clear(self) -> None:
        self._calls.clear()
        self._latest.clear()
        self._once.clear()


class Latest(Generic[Call]):
    """What served the latest call, which is found without a hash: where most calls are like the one before."""

    def __init__(self) -> None:
        self._latest: tuple[tuple[Any, ...], tuple[type, ...], int, Kept[Call]] | None = None

    def find(self, options: tuple[Any, ...], *tensors: Tensor) -> Call | None:
        """That, if it was of these options, with their types, and of as many tensors, which are like these."""
        if self._latest is None:
            return None
        known, types, count, kept = self._latest
        try:
            # Options that are the very object have the same types.
            is_same = options is known or (tuple(map(type, options)) == types and options == known)
        except (TypeError, ValueError, RuntimeError):
            # What no call takes may not be comparable.
            return None
        return kept.call if is_same and len(tensors) == count and kept.is_like(*tensors) else None

    def keep(self, options: tuple[Any, ...], kept: Kept[Call], count: int) -> None:
        """``kept`` serves calls of these options and so many tensors."""
        self._latest = options, tuple(map(type, options)), count, kept

    def cache_clear(self) -> None:
        self._latest = None
