"""The softmax of the kernel for wide values, whose maximum may lag behind."""

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.lagging import Lagging
from cute_kernels.softmax import RoundingSoftmax, SinkSoftmax


class LaggingSoftmax(Lagging, RoundingSoftmax):
    """``RoundingSoftmax`` with a maximum that may lag behind."""


class LaggingSinkSoftmax(Lagging, SinkSoftmax):
    """``LaggingSoftmax`` with sinks."""


def make_softmax(scale_log2: Float32, sinks: tuple[cute.Tensor, ...], dtype: type) -> Lagging:
    """``sinks`` is empty or of one."""
    return LaggingSinkSoftmax(*sinks, scale_log2, dtype) if sinks else LaggingSoftmax(scale_log2, dtype)
