"""FP8 on the wire: K and V become e4m3 once, where they live, and travel with their scales; attention runs on these.

Half the bytes of 16 bits travel. Each chunk of the layout is quantized by itself, so that blocks which share a scale
end where chunks do, and a rank that needs one chunk of two gets no more. Forward only.
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
    as_bytes,
    exchange,
    give_head_start,
)
from hopper_attention.distributed.gradients import Part
from hopper_attention.distributed.layout import CHUNKS_A_RANK, CONTIGUOUS, chunk_numbers
from hopper_attention.distributed.merge import Merged
from hopper_attention.distributed.pieces import Piece, Problem, groups_between
from hopper_attention.distributed.ring import joined_heads
from hopper_attention.distributed.schedule import RowBytes, fp8_parts
from hopper_attention.fp8 import flash_attn_quantized_func
from hopper_attention.quantization import quantize_qkv
from hopper_attention.quantized import Fp8Quantization, QuantizedQKV, TransposedV
from hopper_attention.reference.tiles import Span

Chunk = QuantizedQKV
"""Q, K and V of a chunk, of which K and V may have come from another rank."""


def check_quantization_travels(quantization: Fp8Quantization) -> None:
    """Raise NotImplementedError for means of K, which belong to the whole sequence."""
    if quantization.smooth_k:
        raise NotImplementedError(
            "quantization has smooth_k, whose mean would be another one on each rank and is not implemented; use "
            "smooth_k=False, or subtract the mean of K over the whole sequence first, which changes no output"
        )


def quantize_chunks(
    tensors: tuple[Tensor, Tensor, Tensor], layout: str, quantization: Fp8Quantization, backend: str | None
) -> list[Chunk]:
    """The chunks of this rank, each with its own scales."""
    parts = (x.chunk(CHUNKS_A_RANK[layout], 1) for x in tensors)
    quantizer = "torch" if backend == "reference" else None
    return [
        quantize_qkv(q, k, v, quantization=quantization, backend=quantizer)
        for q, k, v in zip(*parts, strict=True)
    ]


def travelling(chunk: Chunk) -> tuple[Tensor, ...]:
    """What of it goes to another rank."""
    return chunk.k.data, chunk.k.scale, chunk.v.data, chunk.v.scale, chunk.mean_v


def packed(tensors: tuple[Tensor, ...]) -> Tensor:
    """All of them as bytes in one tensor, so that a chunk is one message."""
    sizes = _rooms(tensors)
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    for room, x in zip(buffer.split(sizes), tensors, strict=True):
        room[: x.nbytes].copy_(as_bytes(x.contiguous()))
    return buffer


def unpacked(buffer: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors that were packed, of the shapes and dtypes of others, in the memory of the buffer."""
    rooms = buffer.split(_rooms(like))
    return tuple(room[: x.nbytes].view(x.dtype).view(x.shape) for room, x in zip(rooms, like, strict=True))


def _rooms(tensors: tuple[Tensor, ...]) -> list[int]:
    """Bytes of each, up to where the next one begins."""
    return [-(-x.nbytes // PIECE_BYTES) * PIECE_BYTES for x in tensors]


def with_keys(chunk: Chunk, tensors: tuple[Tensor, ...]) -> Chunk:
    """The Q of a chunk with the K and V that travelled."""
    k_data, k_scale, v_data, v_scale, mean_v = tensors
    v: TransposedV = replace(chunk.v, data=v_data, scale=v_scale)  # type: ignore[assignment]  # quantize_qkv made it
    return replace(chunk, k=replace(chunk.k, data=k_data, scale=k_scale), v=v, mean_v=mean_v)


def visible_chunks(problem: Problem, rank: int, other: int) -> list[tuple[int, int, Piece]]:
    """Which chunk of ``rank``'s queries meets which of ``other``'s keys, and how: numbers of local chunks."""
    numbers = (
        chunk_numbers(rank, problem.world, problem.layout),
        chunk_numbers(other, problem.world, problem.layout),
    )
    by_chunk = replace(problem, world=problem.world * CHUNKS_A_RANK[problem.layout], layout=CONTIGUOUS)
    found = []
    for i, q_number in enumerate(numbers[0]):
        for j, k_number in enumerate(numbers[1]):
            for group in groups_between(by_chunk, q_number, k_number):
                found += [(i, j, piece) for piece in group.pieces]
    return found


def _needed(visible: list[tuple[int, int, Piece]]) -> list[int]:
    """Local numbers of the chunks of keys, in order."""
    return sorted({j for _, j, _ in visible})


def ring_forward_fp8(
    ranks: Ranks,
    problem: Problem,
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    quantization: Fp8Quantization,
) -> tuple[Tensor, Tensor]:
    """out of q's dtype and lse, of the local rows; their keys come by as e4m3, some heads after the other."""
    # A scale of a whole tensor is one of all heads.
    is_whole = quantization.granularity == "tensor"
    parts = 1 if is_whole else fp8_parts(problem, RowBytes.of(*tensors), call.is_least)
    return scheduled_fp8(ranks, problem, call, tensors, sinks, quantization, parts=parts)


def scheduled_fp8(
    ranks: Ranks,
    problem: Problem,
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    quantization: Fp8Quantization,
    *,
    parts: int,
) -> tuple[Tensor, Tensor]:
    """``ring_forward_fp8`` in so many parts of the heads, the same on all ranks."""
    q, k, v = tensors

    def attend_to_all(part: Part) -> Merged:
        heads = q[:, :, part.heads], *part.of_keys((k, v))
        chunks = quantize_chunks(heads, problem.layout, quantization, call.backend)
        whole = _attend_along(ranks, problem, call, chunks, Merged.empty(heads[0], v.shape[3]))
        if sinks is not None:
            whole.add_sinks(sinks[part.heads])
        return whole

    return joined_heads(attend_to_all, q, k, v.shape[3], parts)


def _attend_along(ranks: Ranks, problem: Problem, call: Call, chunks: list[Chunk], whole: Merged) -> Merged:
    """``whole`` with the attention of this rank's chunks to the keys of all."""
    rows = chunks[0].q.shape[1]
    for visible, keys in _along(ranks, problem, chunks):
        for i, j, piece in visible:
            parts = with_keys(chunks[i], keys[j])
            out, lse = flash_attn_quantized_func(
                parts, call.softmax_scale, piece.is_causal, True, backend=call.backend
            )
            whole.add(Span(i * rows, (i + 1) * rows), out, lse)
    return whole


def _along(
    ranks: Ranks, problem: Problem, chunks: list[Chunk]
) -> Iterator[tuple[list[tuple[int, int, Piece]], dict[int, tuple[Tensor, ...]]]]:
    """At each distance what is visible and the chunks of keys for it; those of the next are on their way."""
    rank, size = ranks.rank, ranks.size
    keys = {j: travelling(chunk) for j, chunk in enumerate(chunks)}
    like = travelling(chunks[0])
    given = [packed(travelling(chunk)) for chunk in chunks] if size > 1 else []
    transfer = Transfer(ranks, [], [])
    for distance in range(size):
        transfer.wait()
        here = visible_chunks(problem, rank, (rank - distance) % size), keys
        if distance + 1 < size:
            before, after = (rank - distance - 1) % size, (rank + distance + 1) % size
            gives = tuple(given[j] for j in _needed(visible_chunks(problem, after, rank)))
            takes = {j: torch.empty_like(given[j]) for j in _needed(visible_chunks(problem, rank, before))}
            keys = {j: unpacked(buffer, like) for j, buffer in takes.items()}
            sends = Message(after, gives, "K and V in e4m3")
            receives = Message(before, tuple(takes.values()), "K and V in e4m3")
            transfer = exchange(ranks, [sends], [receives])
            give_head_start(chunks[0].q.data.device)
        yield here
