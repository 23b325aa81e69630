"""Whether the tensors of a call are like those of one that was made before: one question to torch in place of many.

Reading shape, strides, dtype and device of a tensor takes half a microsecond in Python. torch has the comparison ready
in C++, for the code that torch.compile made for tensors of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

IsLike = Callable[..., bool]
"""Of so many tensors, in their order."""

Call = TypeVar("Call")


def like(*tensors: Tensor) -> IsLike:
    """Whether tensors are of the class, dtype, device, shape, strides and requires_grad of these, each of its own.

    They are not, either, where autocast, inference mode, torch.jit.trace or a transform of torch.func is at work and
    was not when this was called, or the other way round. Storage, and where in it a tensor begins, does not count.
    """
    # Each a list a tensor, which is not what torch's declaration of it says.
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def may_be_like() -> bool:
    """Whether nothing changes a call that ``like`` does not see: torch.compile, dispatch modes, forward derivatives."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    )


class Remembered(Generic[Call]):
    """What was made of earlier calls, by what is cheap to read of them; all forgotten where they become too many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: dict[Hashable, Call] = {}
        self.get = self._calls.get
        """The call of a key, or None."""

    def put(self, key: Hashable, call: Call) -> None:
        if len(self._calls) >= self._limit:
            self._calls.clear()
        self._calls[key] = call

    def cache_clear(self) -> None:
        self._calls.clear()
