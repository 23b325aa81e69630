"""Where the tensors of a ``QuantizedQKV`` lie in two of them, codes and float32, and what is made of these on demand.

To make seven tensors takes longer than to quantize a short sequence, and attention to it needs none of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from hopper_attention.device_memory import PIECE_BYTES, Facts, Pieces
from hopper_attention.launch.at_once import ListedPart, Part
from hopper_attention.quantized import E4M3, QuantizedTensor, TransposedV, padded_keys

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
            ends[dtype] += _rounded(piece.bytes)
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


FLOAT_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class LengthLayout:
    """``PartsLayout`` of one number of keys, which is made if someone asks for a tensor: ``of_any`` with its ``codes``,
    ``floats`` and ``lengthened`` offsets, those of K, V, their scales and the mean; ``listed`` has what launches with
    ``AnyLengthLayout.parts`` want of it."""

    of_any: AnyLengthLayout
    codes: Facts
    floats: Facts
    lengthened: tuple[Offset, ...]
    listed: array[int]
    seqlen_k: int

    def fields(self, codes: Tensor, floats: Tensor) -> dict[str, Any]:
        """As ``PartsLayout.fields``."""
        one, (k, v, of_k, of_v, mean) = self.of_any.one, self.lengthened
        q, of_q = one.offsets[0], one.offsets[3]
        offsets = (q, k, v, of_q, of_k, of_v, mean)[: len(one.offsets)]
        rows = one.rows_q, one.rows_k
        options = *rows, one.largest, self.seqlen_k, one.no_mean
        return PartsLayout(self.codes, self.floats, offsets, *options).fields(codes, floats)


@dataclass(frozen=True, slots=True, eq=False)
class AnyLengthLayout:
    """``PartsLayout`` of calls with any number of keys; ``one`` is that of one of them."""

    one: PartsLayout

    def of(self, seqlen_k: int) -> LengthLayout | None:
        """That of so many keys, at least one; None if the codes are too large to lie in one tensor."""
        one = self.one
        (batch, _, kv_heads, head_dim), _, at_k = one.offsets[1]
        head_dim_v = one.offsets[2][0][2]
        _, _, at_scales = one.offsets[4]
        keys, blocks = padded_keys(seqlen_k), -(-seqlen_k // one.rows_k)
        row, of_head, scales = kv_heads * head_dim, head_dim_v * keys, kv_heads * blocks
        at_v = at_k + _rounded(batch * seqlen_k * row)
        codes = at_v + _rounded(batch * kv_heads * of_head)
        if codes > MAX_BYTES:
            return None
        # In floats, of which as many are in a piece's step as in its bytes.
        step = _rounded(batch * scales * FLOAT_BYTES) // FLOAT_BYTES
        at_mean = at_scales + 2 * step
        has_mean = len(one.offsets) > 6
        of_mean = _rounded(batch * kv_heads * head_dim_v * FLOAT_BYTES) // FLOAT_BYTES if has_mean else 0
        shape, strides = (batch, kv_heads, blocks), (scales, blocks, 1)
        lengthened = (
            ((batch, seqlen_k, kv_heads, head_dim), (seqlen_k * row, row, head_dim, 1), at_k),
            ((batch, kv_heads, head_dim_v, keys), (kv_heads * of_head, of_head, keys, 1), at_v),
            (shape, strides, at_scales),
            (shape, strides, at_scales + step),
            ((batch, kv_heads, head_dim_v), (kv_heads * head_dim_v, head_dim_v, 1), at_mean),
        )
        facts = ((codes,), (1,), E4M3), ((at_mean + of_mean,), (1,), torch.float32)
        return LengthLayout(self, *facts, lengthened, _listed(lengthened), seqlen_k)

    def parts(self, codes: int, floats: int, listed: int) -> list[Part | ListedPart]:
        """As ``PartsLayout.parts``, for calls whose argument ``listed`` is the address of ``LengthLayout.listed``."""
        found: list[Part | ListedPart] = list(self.one.parts(codes, floats))
        word = 0
        for number in (1, 2, 4, 5, 6):
            if number < len(found):
                whole, dtype, dimensions = (codes, E4M3, 4) if number < 3 else (floats, torch.float32, 3)
                found[number] = ListedPart(whole, listed, word, dimensions, dtype)
                word += 1 + 2 * dimensions
        return found


def _listed(lengthened: tuple[Offset, ...]) -> array[int]:
    """Byte, sizes and strides of each."""
    (k, s_k, at_k), (v, s_v, at_v), (x, s_x, at_x), (y, s_y, at_y), (m, s_m, at_m) = lengthened
    at_x, at_y, at_m = at_x * FLOAT_BYTES, at_y * FLOAT_BYTES, at_m * FLOAT_BYTES
    codes = at_k, *k, *s_k, at_v, *v, *s_v
    return array("q", (*codes, at_x, *x, *s_x, at_y, *y, *s_y, at_m, *m, *s_m))


def _rounded(number: int) -> int:
    """Bytes from the beginning of a piece to the next one."""
    return -(-number // PIECE_BYTES) * PIECE_BYTES
