"""Which tensors the kernels can address as they are, and what is done with the others.

TMA and cp.async want a base address in multiples of 16 bytes and strides in multiples of 16 bytes, which
is 8 elements of 16 bits or 16 of e4m3; the elements of a row stand next to each other. The stride of a dimension of
size 1 is never used, so it is replaced. Anything else is copied.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from torch import Tensor

from hopper_attention.checks import TensorSpec

TMA_BYTES = 16


class Repair(Enum):
    """What makes a tensor addressable."""

    NONE = "none"
    RESTRIDE = "restride"
    """Other strides for dimensions of size 1."""
    COPY = "copy"

    def apply(self, tensor: Tensor) -> Tensor:
        if self is Repair.COPY:
            return contiguous_copy(tensor)
        if self is Repair.RESTRIDE:
            return tensor.as_strided(tensor.shape, _fixed_strides(TensorSpec.of(tensor)))
        return tensor


def new_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a new tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def new_layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the strides of a new tensor, as ``device_memory.empty_on_gpu`` takes them."""
    return tuple(shape), new_strides(shape)


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A copy in fresh memory, which is aligned; ``contiguous()`` may return a misaligned tensor as it is."""
    fresh = tensor.new_empty(tensor.shape)
    return fresh.copy_(tensor)


def repair_for(spec: TensorSpec) -> Repair:
    """What a tensor of this shape and these strides needs, wherever it lies."""
    first, second, third, last = spec.strides
    # The usual case first, at the price of one test.
    if last == 1 and first > 0 and second > 0 and third > 0 and not (first | second | third) % _step(spec):
        return Repair.NONE
    if _bad_strides(spec) or _has_gaps(spec):
        return Repair.COPY
    return Repair.RESTRIDE


def repairs_for(*specs: TensorSpec) -> tuple[Repair, ...]:
    """``repair_for`` of each tensor; empty if none needs anything."""
    repairs = tuple(map(repair_for, specs))
    return () if repairs == (Repair.NONE,) * len(repairs) else repairs


def _fixed_strides(spec: TensorSpec) -> tuple[int, ...]:
    """The strides, with addressable ones for dimensions of size 1."""
    step = _step(spec)
    fixed = (
        step if size == 1 and not _addressable(stride, step) else stride
        for size, stride in zip(spec.shape[:-1], spec.strides[:-1], strict=True)
    )
    return (*fixed, 1)


def make_addressable(tensor: Tensor) -> Tensor:
    """The tensor with what it needs done to it."""
    first, second, third, last = tensor.stride()
    steps = first | second | third
    if (
        last == 1
        and first > 0
        and second > 0
        and third > 0
        and not (tensor.data_ptr() | steps * tensor.itemsize) % TMA_BYTES
    ):
        return tensor
    repaired = repair_for(TensorSpec.of(tensor)).apply(tensor)
    return contiguous_copy(repaired) if repaired.data_ptr() % TMA_BYTES else repaired


def make_packed_addressable(tensor: Tensor) -> Tensor:
    """``make_addressable`` of packed rows (total, heads, head_dim)."""
    first, second, last = tensor.stride()
    steps = first | second
    if (
        last == 1
        and first > 0
        and second > 0
        and not (tensor.data_ptr() | steps * tensor.itemsize) % TMA_BYTES
    ):
        return tensor
    return make_addressable(tensor.unsqueeze(0)).squeeze(0)


def lies_in_vectors(x: Tensor, elements: int) -> bool:
    """Whether rows of ``x`` can be moved so many elements at a time."""
    *strides, last = x.stride()
    in_vectors = not any(n % elements for n in (x.shape[-1], *strides))
    return last == 1 and in_vectors and not x.data_ptr() % (elements * x.element_size())


def copy_reason(spec: TensorSpec, address: int) -> str:
    """Why a tensor is copied before a launch; empty if it is not."""
    if _has_gaps(spec):
        return f"its stride in the last dimension is {spec.strides[-1]}, and the kernel needs 1"
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
    dims = enumerate(zip(spec.shape[:-1], spec.strides[:-1], strict=True))
    return [(dim, stride) for dim, (size, stride) in dims if size > 1 and not _addressable(stride, step)]


def _has_gaps(spec: TensorSpec) -> bool:
    """Whether the elements of a row do not stand next to each other."""
    return spec.shape[-1] > 1 and spec.strides[-1] != 1


def _step(spec: TensorSpec) -> int:
    """Elements in 16 bytes."""
    return TMA_BYTES // spec.dtype.itemsize


def _addressable(stride: int, step: int) -> bool:
    return stride > 0 and stride % step == 0
