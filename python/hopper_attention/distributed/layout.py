"""Which positions of a sequence each rank holds, and tensors cut and put together that way.

``"contiguous"``: rank r of N has the r-th of N equal parts. ``"zigzag"``: the sequence is cut into 2 N chunks, and
rank r has chunks r and 2 N - 1 - r, one after the other. Under a causal mask the work of a chunk grows with its number,
and each such pair of chunks has the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hopper_attention.checks import check_are_tensors, check_count
from hopper_attention.reference.tiles import Span

CONTIGUOUS = "contiguous"
ZIGZAG = "zigzag"
MOST_PARTS = 4
"""Of the heads, where some travel while others are attended to."""

CHUNKS_A_RANK = {CONTIGUOUS: 1, ZIGZAG: 2}


def check_layout(layout: str) -> None:
    """Raise ValueError unless it is one of the two."""
    if layout not in CHUNKS_A_RANK:
        raise ValueError(f"layout is {layout!r}, allowed: {', '.join(map(repr, CHUNKS_A_RANK))}")


def check_divides(seqlen: int, world: int, layout: str, name: str = "seqlen") -> int:
    """The length of a chunk.

    Raises:
        ValueError: the sequence cannot be cut into so many equal chunks.
    """
    check_layout(layout)
    chunks = check_count("world", world) * CHUNKS_A_RANK[layout]
    if seqlen % chunks:
        raise ValueError(
            f"{name} is {seqlen}, allowed with {world} ranks and layout {layout!r}: multiples of {chunks}; "
            f"pad the sequence to {seqlen + -seqlen % chunks}"
        )
    return seqlen // chunks


def chunk_numbers(rank: int, world: int, layout: str) -> tuple[int, ...]:
    """Those of a rank, in the order in which it holds them, which is that of their positions."""
    check_layout(layout)
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank}, allowed: 0 to {world - 1}")
    return (rank,) if layout == CONTIGUOUS else (rank, 2 * world - 1 - rank)


def spans_of(rank: int, world: int, seqlen: int, layout: str) -> tuple[Span, ...]:
    """The positions that a rank holds; ``seqlen`` is that of the whole sequence."""
    chunk = check_divides(seqlen, world, layout)
    return tuple(Span(i * chunk, (i + 1) * chunk) for i in chunk_numbers(rank, world, layout))


def length_of(x: Tensor, dim: int) -> int:
    """That of the sequence, which is dimension ``dim``.

    Raises:
        ValueError, TypeError: x is no tensor, or has no such dimension.
    """
    check_are_tensors(x=x)
    if not -x.dim() <= check_count("dim", dim, -x.dim()) < x.dim():
        raise ValueError(f"dim is {dim}, allowed with x of shape {tuple(x.shape)}: below {x.dim()}")
    return x.shape[dim]


def shard(x: Tensor, rank: int, world: int, layout: str, dim: int = 1) -> Tensor:
    """The part of a rank of a whole tensor, whose dimension ``dim`` is the sequence; a view where it can be."""
    spans = spans_of(rank, world, length_of(x, dim), layout)
    return join([x.narrow(dim, span.start, span.stop - span.start) for span in spans], dim)


def unshard(x: Tensor, world: int, layout: str, dim: int = 1) -> Tensor:
    """The whole tensor in the order of positions, from the parts of all ranks one after another along ``dim``."""
    chunk = check_divides(length_of(x, dim), world, layout)
    if world == 1 or layout == CONTIGUOUS:
        return x
    held = [number for rank in range(world) for number in chunk_numbers(rank, world, layout)]
    places = sorted(range(len(held)), key=held.__getitem__)
    return join([x.narrow(dim, place * chunk, chunk) for place in places], dim)


def shard_zigzag(x: Tensor, rank: int, world: int, dim: int = 1) -> Tensor:
    """Chunks ``rank`` and 2 ``world`` - 1 - ``rank`` of the 2 ``world`` that dimension ``dim`` is cut into.

    Raises:
        ValueError: the length of the dimension is no multiple of 2 ``world``, or there is no such rank or dimension.
    """
    return shard(x, rank, world, ZIGZAG, dim)


def unshard_zigzag(x: Tensor, world: int, dim: int = 1) -> Tensor:
    """The inverse for the parts of ranks 0, 1, ... one after another along ``dim``: everything in its order again."""
    return unshard(x, world, ZIGZAG, dim)


def positions_of(
    rank: int, world: int, seqlen: int, layout: str, device: torch.device | str = "cpu"
) -> Tensor:
    """int64 (seqlen / world,): the position of each row that a rank holds, as rotary embeddings want it."""
    spans = spans_of(rank, world, seqlen, layout)
    return torch.cat([torch.arange(*span, device=device) for span in spans])


def join(parts: Iterable[Tensor], dim: int) -> Tensor:
    """``torch.cat``, which copies nothing where there is one part."""
    parts = list(parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def parts_of(kv_heads: int) -> list[slice]:
    """Key/value heads of each part: as many equal ones as go, up to MOST_PARTS."""
    parts = max(n for n in range(1, MOST_PARTS + 1) if kv_heads % n == 0)
    each = kv_heads // parts
    return [slice(i * each, (i + 1) * each) for i in range(parts)]
