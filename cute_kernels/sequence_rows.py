"""The rows of one sequence in the tensors of a batch: each with a dimension for the batch, or all packed."""

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.integers import minimum
from cute_kernels.seqlen import SeqlenInfo


def query_rows(tensor: cute.Tensor, seqlens: SeqlenInfo, head: Int32) -> cute.Tensor:
    """(seqlen_q, columns) of a head of (batch, seqlen_q, heads, columns), or packed of (total_q, heads, columns)."""
    if seqlens.is_packed:
        return part_of(tensor[None, head, None], seqlens.offset_q, seqlens.seqlen_q)
    return tensor[seqlens.batch, None, head, None]


def key_rows(tensor: cute.Tensor, seqlens: SeqlenInfo, head: Int32) -> cute.Tensor:
    """The same of a tensor over the keys."""
    if seqlens.is_packed:
        return part_of(tensor[None, head, None], seqlens.offset_k, seqlens.seqlen_k)
    return tensor[seqlens.batch, None, head, None]


def query_vector(tensor: cute.Tensor, seqlens: SeqlenInfo, head: Int32) -> cute.Tensor:
    """(seqlen_q,) of a head of (batch, heads, seqlen_q), or packed of (heads, total_q); (0,) where that has none."""
    if seqlens.is_packed:
        numbers = tensor[head, None]
        return part_of(numbers, seqlens.offset_q, minimum(seqlens.seqlen_q, numbers.shape[0]))
    return tensor[seqlens.batch, head, None]


def part_of(rows: cute.Tensor, first: Int32, number: Int32) -> cute.Tensor:
    """``number`` rows from ``first`` on, as a tensor that ends there."""
    _, *columns = rows.shape
    start = cute.domain_offset((first, *(0 for _ in columns)), rows)
    return cute.make_tensor(start.iterator, cute.make_layout((number, *columns), stride=rows.stride))
