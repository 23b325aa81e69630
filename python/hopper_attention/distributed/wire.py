"""FP8 on the wire: K and V become e4m3 once, where they live, and travel with their scales; attention runs on these.

Half the bytes of 16 bits travel. The rows of a rank are quantized as one piece where they can be, of which a rank that
needs the first keys alone gets no more, and a step is one call, as in 16 bits. Else each chunk of the layout is a piece
by itself, so that blocks which share a scale end where chunks do. Forward only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hopper_attention.device_memory import PIECE_BYTES
from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.exchange import (
    Message,
    Ranks,
    Transfer,
    exchange,
    give_head_start,
)
from hopper_attention.distributed.gradients import Part
from hopper_attention.distributed.layout import CHUNKS_A_RANK, CONTIGUOUS, chunk_numbers
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.pieces import Piece, Problem, groups_between
from hopper_attention.distributed.ring import Results, joined_heads
from hopper_attention.distributed.schedule import FEW_MERGES, RowBytes, fp8_parts
from hopper_attention.fp8 import flash_attn_quantized_func
from hopper_attention.quantization import quantize_qkv
from hopper_attention.quantized import (
    E4M3,
    Fp8Quantization,
    QuantizedQKV,
    QuantizedTensor,
    TransposedV,
    padded_keys,
)
from hopper_attention.reference.tiles import Span

Chunk = QuantizedQKV
"""Q, K and V of a piece of the rows of a rank, of which K and V may have come from another rank."""

KEYS_TOGETHER = 32
"""Keys whose order in a transposed V is changed among themselves: a run of keys ends behind some of these."""

WORD = 8
"""Bytes that a copy moves at a time."""

Visible = list[tuple[int, int, Piece]]
"""Numbers of a piece of queries and of one of keys, and which of their rows meet."""


def check_quantization_travels(quantization: Fp8Quantization) -> None:
    """Raise NotImplementedError for means of K, which belong to the whole sequence."""
    if quantization.smooth_k:
        raise NotImplementedError(
            "quantization has smooth_k, whose mean would be another one on each rank and is not implemented; use "
            "smooth_k=False, or subtract the mean of K over the whole sequence first, which changes no output"
        )


def pieces_of(problem: Problem, quantization: Fp8Quantization) -> int:
    """Pieces that the rows of a rank are quantized in, the same on all ranks: one, or the chunks of the layout."""
    chunks = CHUNKS_A_RANK[problem.layout]
    rows = problem.seqlen_q // (problem.world * chunks)
    is_cut_between_blocks = not rows % KEYS_TOGETHER and not rows % quantization.block_q
    is_square = problem.seqlen_q == problem.seqlen_k
    return 1 if quantization.granularity == "block" and is_square and is_cut_between_blocks else chunks


def quantize_chunks(
    tensors: tuple[Tensor, Tensor, Tensor], count: int, quantization: Fp8Quantization, backend: str | None
) -> list[Chunk]:
    """The rows of this rank in ``count`` pieces, each with its own scales."""
    parts = (x.chunk(count, 1) for x in tensors)
    quantizer = "torch" if backend == "reference" else None
    return [
        quantize_qkv(q, k, v, quantization=quantization, backend=quantizer)
        for q, k, v in zip(*parts, strict=True)
    ]


def travelling(chunk: Chunk, keys: int) -> tuple[Tensor, ...]:
    """What of its first keys goes to another rank."""
    k, v = chunk.k, chunk.v
    return (
        k.data[:, :keys],
        k.scale[:, :, : -(-keys // k.block)],
        v.data[..., : padded_keys(keys)],
        v.scale[:, :, : -(-keys // v.block)],
        chunk.mean_v,
    )


def packed(tensors: tuple[Tensor, ...]) -> Tensor:
    """All of them as bytes in one tensor, so that a piece is one message."""
    buffer = _room_for(tensors)
    for room, x in zip(buffer.split(_rooms(tensors)), map(_in_words, tensors), strict=True):
        room[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    return buffer


def _in_words(x: Tensor) -> Tensor:
    """e4m3 as words of eight where it lies so, for copies byte by byte are slow."""
    if x.dtype != E4M3:
        return x
    *strides, last = x.stride()
    places = x.shape[-1], x.storage_offset(), *strides
    return x.view(torch.int64 if last == 1 and not any(n % WORD for n in places) else torch.uint8)


def unpacked(buffer: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors that were packed, of the shapes and dtypes of others, in the memory of the buffer."""
    rooms = buffer.split(_rooms(like))
    return tuple(room[: x.nbytes].view(x.dtype).view(x.shape) for room, x in zip(rooms, like, strict=True))


def _rooms(tensors: tuple[Tensor, ...]) -> list[int]:
    """Bytes of each, up to where the next one begins."""
    return [-(-x.nbytes // PIECE_BYTES) * PIECE_BYTES for x in tensors]


def _room_for(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.empty(sum(_rooms(tensors)), dtype=torch.uint8, device=tensors[0].device)


def with_keys(chunk: Chunk, tensors: tuple[Tensor, ...], piece: Piece) -> Chunk:
    """Some rows of the Q of a piece with the K and V that travelled, or with the first of them."""
    (start, stop), k = piece.rows, replace(chunk.k, data=tensors[0], scale=tensors[1])
    q = QuantizedTensor.unchecked(
        chunk.q.data[:, start:stop],
        chunk.q.scale[:, :, start // chunk.q.block : -(-stop // chunk.q.block)],
        chunk.q.block,
        chunk.q.largest,
    )
    v = TransposedV.unchecked(tensors[2], tensors[3], chunk.v.block, k.shape[1])
    return replace(chunk, q=q, k=k, v=v, mean_v=tensors[4])


def visible_chunks(problem: Problem, rank: int, other: int, count: int) -> Visible:
    """Which piece of ``rank``'s queries meets which of ``other``'s keys, and how: numbers of local pieces, of which
    there are ``count``. Keys of a meeting are the first of their piece."""
    numbers: list[tuple[int, ...]] = [(rank,), (other,)]
    by_chunk = problem
    if count > 1:
        numbers = [chunk_numbers(r, problem.world, problem.layout) for r in (rank, other)]
        by_chunk = replace(problem, world=problem.world * count, layout=CONTIGUOUS)
    found = []
    for i, q_number in enumerate(numbers[0]):
        for j, k_number in enumerate(numbers[1]):
            for group in groups_between(by_chunk, q_number, k_number):
                found += [(i, j, piece) for piece in group.pieces]
    return found


def _needed(visible: Visible) -> dict[int, int]:
    """Of each piece that is met, in order, how many of its keys."""
    keys: dict[int, int] = {}
    for _, j, piece in sorted(visible, key=lambda met: met[1]):
        keys[j] = max(keys.get(j, 0), piece.keys.stop)
    return keys


def ring_forward_fp8(
    ranks: Ranks,
    problem: Problem,
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    quantization: Fp8Quantization,
    exact_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """out of q's dtype and lse, of the local rows; their keys come by as e4m3, some heads after the other. With
    ``exact_lse`` that of each step is, and so is their sum."""
    # A scale of a whole tensor is one of all heads.
    is_whole = quantization.granularity == "tensor"
    parts = 1 if is_whole else fp8_parts(problem, RowBytes.of(*tensors), call.is_least)
    given = ranks, problem, call, tensors, sinks, quantization
    return scheduled_fp8(*given, parts=parts, exact_lse=exact_lse)


def scheduled_fp8(
    ranks: Ranks,
    problem: Problem,
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    quantization: Fp8Quantization,
    *,
    parts: int,
    exact_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """``ring_forward_fp8`` in so many parts of the heads, the same on all ranks."""
    q, k, v = tensors
    count = pieces_of(problem, quantization)
    # What e4m3 costs in accuracy is ten times what a few roundings of the sums do.
    sums = q.dtype if sinks is None and problem.world <= FEW_MERGES else torch.float32

    def attend_to_all(part: Part) -> Merged:
        heads = part.of_rows(q), *part.of_keys((k, v))
        chunks = quantize_chunks(heads, count, quantization, call.backend)
        results = Results(heads[0], v.shape[3], sums)
        whole = _attend_along(ranks, problem, call, chunks, results, exact_lse)
        if sinks is not None:
            whole.add_sinks(sinks[part.heads])
        return whole

    return joined_heads(attend_to_all, q, k, v.shape[3], parts)


def _attend_along(
    ranks: Ranks, problem: Problem, call: Call, chunks: list[Chunk], results: Results, exact_lse: bool
) -> Merged:
    """The attention of this rank's pieces to the keys of all."""
    rows = chunks[0].q.shape[1]

    def attend(i: int, keys: tuple[Tensor, ...], piece: Piece) -> None:
        # Nothing of this is kept beyond the call.
        options = call.softmax_scale, piece.is_causal, True
        parts = with_keys(chunks[i], keys, piece)
        out, lse = flash_attn_quantized_func(parts, *options, exact_lse=exact_lse, backend=call.backend)
        results.put(Span(i * rows + piece.rows.start, i * rows + piece.rows.stop), out, lse)

    for visible, keys in _along(ranks, problem, chunks):
        for i, j, piece in visible:
            # That of the call before, now that the next transfer is posted.
            results.merge()
            attend(i, keys[j], piece)
        # Or they would be kept until the step after the next has room.
        del keys
    return results.finish()


def _along(
    ranks: Ranks, problem: Problem, chunks: list[Chunk]
) -> Iterator[tuple[Visible, dict[int, tuple[Tensor, ...]]]]:
    """At each distance what is visible and the keys for it; those of the next are on their way."""
    rank, size, count = ranks.rank, ranks.size, len(chunks)
    keys = {j: travelling(chunk, chunk.k.shape[1]) for j, chunk in enumerate(chunks)}
    given: dict[tuple[int, int], Tensor] = {}
    transfer = Transfer(ranks, [], [])
    for distance in range(size):
        transfer.wait()
        here = visible_chunks(problem, rank, (rank - distance) % size, count), keys
        if distance + 1 < size:
            before, after = (rank - distance - 1) % size, (rank + distance + 1) % size
            gives = _needed(visible_chunks(problem, after, rank, count))
            # Most ranks want the same as the one before.
            given = {x: given[x] for x in gives.items() if x in given}
            for j, number in gives.items():
                if (j, number) not in given:
                    given[j, number] = packed(travelling(chunks[j], number))
            likes = {
                j: travelling(chunks[j], number)
                for j, number in _needed(visible_chunks(problem, rank, before, count)).items()
            }
            takes = {j: _room_for(like) for j, like in likes.items()}
            keys = {j: unpacked(takes[j], like) for j, like in likes.items()}
            transfer = exchange(
                ranks,
                [Message(after, tuple(given[x] for x in gives.items()), "K and V in e4m3")],
                [Message(before, tuple(takes.values()), "K and V in e4m3")],
            )
            del takes
            give_head_start(chunks[0].q.data.device)
        yield here
