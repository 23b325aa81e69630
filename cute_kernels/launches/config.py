"""Several launches as one function of TVM FFI, as data: the layout of a script, which says what each launch is given.

A caller such as XLA hands over a stream and tensors, inputs and then outputs; one that needs no tile counter of the
stream leaves out the stream. Kernels take tensors in an order of their own, numbers among them, None, and a tile
counter. A script maps one to the other, in words of 64 bits:

    number of launches, address of constants, address of counters, number of counters (0 where none is needed)
    for each launch: handle of the kernel's function, number of its arguments, place of each

A place p >= 0 is an argument of the caller, of which 0 is the stream, if it gives one. ``COUNTER_PLACE`` is the tile
counter of the stream. Those below are constants, from ``FIRST_CONSTANT`` down. A constant is TVM FFI's ``Any`` of two
words. A counter is a key, which is 1 + the stream or 0 while it has none, the number of its GPU, and a ``DLTensor``.

A constant whose first word is ``PIECE`` has as its second the address of a tensor that is a part of an argument of the
caller: the number of that argument, the byte at which the part begins, its number of dimensions and dtype as in a
``DLTensor``, and the addresses of its shape and of its strides. It is on the argument's device. One whose first word is
``LISTED`` is such a part too, of which byte, shape and strides are words of a list that the caller makes for each call:
its second word is the address of the number of the argument, of the number of an integer argument that is the address
of the list, of the word at which the part's begin, and of its number of dimensions and dtype.

Nothing here imports the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_WORDS, LAUNCH_WORDS, ANY_WORDS, COUNTER_WORDS = 4, 2, 2, 8

TENSOR_WORDS, OBJECT_WORDS = 6, 3
"""Of a ``DLTensor``, and of what lies before it in a tensor of TVM FFI."""

PIECE, LISTED = -1, -2
"""In place of a type index."""

DIMENSIONS_MASK = 2**32 - 1
"""Of the word with the number of dimensions and the dtype of a piece: the former."""

COUNTER_PLACE, FIRST_CONSTANT = -1, -2

MAX_ARGUMENTS = 64
"""Of one launch."""


@dataclass(frozen=True)
class LaunchesConfig:
    """There is one: no kernel is part of it. ``arch`` is what the compiler asks for."""

    arch: str = "sm_80"

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return "launches"
