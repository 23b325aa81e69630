"""Where the tensors of a ``QuantizedQKV`` lie in two of them, codes and float32, and what is made of these on demand.

To make seven tensors takes longer than to quantize a short sequence, and attention to it needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from hopper_attention.device_memory import PIECE_BYTES, Facts, Pieces
from hopper_attention.launch.at_once import Part
from hopper_attention.quantized import E4M3, QuantizedTensor, TransposedV

MAX_BYTES = 2**22
"""Of codes that lie in one tensor. A tensor of theirs that is kept keeps the memory of all; and in longer calls the GPU
takes more time than the host."""

Offset = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides, and the element at which a tensor begins."""

_reinterpret = vars(guards).get("_reinterpret_tensor", torch.as_strided)
"""A tensor in the memory of another, without the dispatcher."""


@dataclass(frozen=True, eq=False)
class PartsLayout:
    """Of calls with tensors of the same shapes. ``codes`` and ``floats`` are the two tensors, ``offsets`` those of q, k
    and v, of their scales, and of the mean of V, if there is one.

    ``rows_q`` and ``rows_k`` share a scale, ``largest`` are the largest codes of q and k.
    """

    codes: Facts
    floats: Facts
    offsets: tuple[Offset, ...]
    rows_q: int
    rows_k: int
    largest: tuple[float, float]
    seqlen_k: int
    no_mean: Tensor

    @classmethod
    def of(
        cls,
        pieces: Pieces,
        rows: tuple[int, int],
        largest: tuple[float, float],
        seqlen_k: int,
        no_mean: Tensor,
    ) -> PartsLayout:
        """Of ``pieces`` in that order."""
        ends = {E4M3: 0, torch.float32: 0}
        offsets = []
        for piece in pieces:
            shape, strides, dtype = piece.facts
            offsets.append((shape, strides, ends[dtype] // dtype.itemsize))
            ends[dtype] += -(-piece.bytes // PIECE_BYTES) * PIECE_BYTES
        codes, floats = (((end // dtype.itemsize,), (1,), dtype) for dtype, end in ends.items())
        return cls(codes, floats, tuple(offsets), *rows, largest, seqlen_k, no_mean)

    def parts(self, codes: int, floats: int) -> list[Part]:
        """Those tensors for launches that get the two as arguments of these numbers."""
        found = []
        for number, (shape, strides, offset) in enumerate(self.offsets):
            whole, dtype = (codes, E4M3) if number < 3 else (floats, torch.float32)
            found.append(Part(whole, offset * dtype.itemsize, (shape, strides, dtype)))
        return found

    def fields(self, codes: Tensor, floats: Tensor) -> dict[str, Any]:
        """q, k, v and mean_v of a ``QuantizedQKV``."""
        # torch.compile knows no other way to cut tensors, nor to make an object.
        is_traced = torch.compiler.is_compiling()
        cut = torch.as_strided if is_traced else _reinterpret
        new: Callable[..., QuantizedTensor] = QuantizedTensor if is_traced else QuantizedTensor.unchecked
        new_v: Callable[..., TransposedV] = TransposedV if is_traced else TransposedV.unchecked
        q, k, v = (cut(codes, *offset) for offset in self.offsets[:3])
        of_q, of_k, of_v, *means = (cut(floats, *offset) for offset in self.offsets[3:])
        largest_q, largest_k = self.largest
        return {
            "q": new(q, of_q, self.rows_q, largest_q),
            "k": new(k, of_k, self.rows_k, largest_k),
            "v": new_v(v, of_v, self.rows_k, self.seqlen_k),
            "mean_v": means[0] if means else self.no_mean,
        }
