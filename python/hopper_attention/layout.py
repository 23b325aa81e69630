"""Which tensors the kernels can address as they are, and what is done with the others.

TMA and cp.async want a base address in multiples of 16 bytes and strides in multiples of 16 bytes, which
is 8 elements of 16 bits or 16 of e4m3. The stride of a dimension of size 1 is never used, so it is
replaced. Anything else is copied.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hopper_attention.checks import TensorSpec

TMA_BYTES = 16


class Repair(NamedTuple):
    """What makes one tensor addressable: ``copy`` it, or give it these ``strides``; empty to leave it."""

    copy: bool
    strides: tuple[int, ...]

    @property
    def is_needed(self) -> bool:
        return self.copy or bool(self.strides)

    def apply(self, tensor: Tensor) -> Tensor:
        if self.copy:
            return contiguous_copy(tensor)
        return tensor.as_strided(tensor.shape, self.strides) if self.strides else tensor


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A copy in fresh memory, which is aligned; ``contiguous()`` may return a misaligned tensor as it is."""
    fresh = tensor.new_empty(tensor.shape)
    return fresh.copy_(tensor)


def repair_for(spec: TensorSpec) -> Repair:
    """What a tensor of this shape and these strides needs, wherever it lies."""
    if _bad_strides(spec) or (spec.shape[3] > 1 and spec.strides[3] != 1):
        return Repair(copy=True, strides=())
    step = _step(spec)
    fixed = tuple(
        step if size == 1 and not _addressable(stride, step) else stride
        for size, stride in zip(spec.shape[:3], spec.strides[:3], strict=True)
    )
    return Repair(copy=False, strides=() if fixed == tuple(spec.strides[:3]) else (*fixed, 1))


def make_addressable(tensor: Tensor) -> Tensor:
    """The tensor with what it needs done to it."""
    repaired = repair_for(TensorSpec.of(tensor)).apply(tensor)
    return contiguous_copy(repaired) if repaired.data_ptr() % TMA_BYTES else repaired


def copy_reason(spec: TensorSpec, address: int) -> str:
    """Why a tensor is copied before a launch; empty if it is not."""
    bad = _bad_strides(spec)
    if bad:
        dim, stride = bad[0]
        wanted = f"a multiple of {_step(spec)} elements other than 0"
        return f"its stride in dimension {dim} is {stride}, and the kernel needs {wanted}"
    if address % TMA_BYTES:
        return f"its address is {address % TMA_BYTES} bytes past a multiple of {TMA_BYTES}"
    return ""


def _bad_strides(spec: TensorSpec) -> list[tuple[int, int]]:
    """(dimension, stride) of those that are used and that TMA cannot take."""
    step = _step(spec)
    dims = enumerate(zip(spec.shape[:3], spec.strides[:3], strict=True))
    return [(dim, stride) for dim, (size, stride) in dims if size > 1 and not _addressable(stride, step)]


def _step(spec: TensorSpec) -> int:
    """Elements in 16 bytes."""
    return TMA_BYTES // spec.dtype.itemsize


def _addressable(stride: int, step: int) -> bool:
    return stride > 0 and stride % step == 0
