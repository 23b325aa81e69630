"""The rows of one sequence in a tensor of all: with a dimension for the batch, or packed behind each other."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.integers import minimum
from cute_kernels.seqlen import PackedRows


def rows_of(tensor: cute.Tensor, place: Any, head: Int32) -> cute.Tensor:
    """(rows, columns) of a head of (batch, rows, heads, columns), or of packed (total, heads, columns).

    ``place`` says where the sequence lies: ``rows_q`` or ``rows_k`` of ``SeqlenInfo``.
    """
    if isinstance(place, PackedRows):
        return _part_of(tensor[None, head, None], place.offset, place.length)
    return tensor[place, None, head, None]


def numbers_of(tensor: cute.Tensor, place: Any, head: Int32) -> cute.Tensor:
    """(rows,) of a head of (batch, heads, rows), or of packed (heads, total); (0,) if the tensor has none at all."""
    if isinstance(place, PackedRows):
        numbers = tensor[head, None]
        return _part_of(numbers, place.offset, minimum(place.length, numbers.shape[0]))
    return tensor[place, head, None]


def _part_of(rows: cute.Tensor, first: Int32, number: Int32) -> cute.Tensor:
    """``number`` rows from ``first`` on, as a tensor that ends there."""
    if cute.rank(rows) == 1:
        start, shape = cute.domain_offset((first,), rows), (number,)
    else:
        start, shape = cute.domain_offset((first, 0), rows), (number, rows.shape[1])
    return cute.make_tensor(start.iterator, cute.make_layout(shape, stride=rows.stride))
