"""Q, K and V of sequences of different lengths in e4m3, with blocks that end where sequences do.

Sequences lie one after another (:class:`hopper_attention.lengths.Lengths`). Whatever comes in units of some rows, the
blocks that share a scale and the steps of a transposed V, is numbered so that no unit has rows of two sequences: those
of sequence b begin at unit cu_seqlens[b] // rows + b, of total // rows + batch + 1 in all. Behind the last one stand
units of the rows that belong to none. So no sum over lengths is needed, and none is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cute_kernels.plan.config import plan_entries
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP
from hopper.quantize.config import E4M3_MAX
from hopper_attention.checks import FP8_DTYPE, TensorSpec
from hopper_attention.lengths import Lengths, Sequence, check_packed, read_sequences, specs_of
from hopper_attention.quantized import (
    Fp8Quantization,
    QuantizedQKV,
    QuantizedTensor,
    TransposedV,
    check_mean_v,
    no_numbers,
    padded_keys,
)
from hopper_attention.reference.tiles import Span

ONE_PER_SEQUENCE = 2**31 - 1
"""``block`` of a tensor in which all rows of a sequence share a scale."""

PACKED_IN_TWO_STEPS = (
    "packed quantize_qkv and flash_attn_quantized_func under torch.compile, torch.func or on fake tensors are not "
    "implemented: use flash_attn_fp8_func with cu_seqlens_q, which is both in one"
)

count_units = plan_entries
"""(total, batch, rows) -> units of so many rows, those of no sequence among them."""


def first_units(cu_seqlens: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 (batch + 1,): the first unit of ``rows`` rows of each sequence, and of the rows behind the last."""
    return cu_seqlens // rows + torch.arange(cu_seqlens.shape[0], dtype=torch.int32, device=cu_seqlens.device)


@dataclass(frozen=True)
class RowPlaces:
    """Where each of ``total`` packed rows lies: (total,) each, on the device of the lengths.

    Attributes:
        sequence: the one that it follows the beginning of, ``batch`` behind the last.
        row: its number from there.
        is_used: whether it is of the sequence.
    """

    sequence: torch.Tensor
    row: torch.Tensor
    is_used: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int) -> RowPlaces:
        batch = cu_seqlens.shape[0] - 1
        rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
        # The last sequence that begins at or before a row; empty ones before it begin there too.
        sequence = (torch.searchsorted(cu_seqlens, rows, right=True) - 1).clamp(0, batch)
        row = rows - cu_seqlens[sequence]
        is_used = sequence < batch
        if seqused is not None and batch:
            is_used = is_used & (row < seqused[sequence.clamp(max=batch - 1)])
        return cls(sequence, row, is_used)

    def units(self, cu_seqlens: torch.Tensor, rows: int) -> torch.Tensor:
        """The unit of ``rows`` rows that each row is in."""
        return first_units(cu_seqlens, rows)[self.sequence] + self.row // rows


def _check(data: torch.Tensor, scale: torch.Tensor, block: int, dimensions: str) -> None:
    if data.dtype != FP8_DTYPE:
        raise TypeError(f"data has dtype {data.dtype}, allowed: {FP8_DTYPE}")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale has dtype {scale.dtype}, allowed: torch.float32")
    if data.dim() != 3:
        raise ValueError(f"data has shape {tuple(data.shape)}, allowed: {dimensions}")
    if scale.device != data.device:
        raise ValueError(f"scale is on {scale.device}, allowed: the device of its data, {data.device}")
    if block < 1:
        raise ValueError(f"block is {block}, allowed: 1 or more")


@dataclass(frozen=True)
class PackedQuantizedTensor:
    """Packed rows in e4m3, and the scales that their blocks were divided by.

    Attributes:
        data: float8_e4m3fn (total, heads, head_dim).
        scale: float32 (heads, total // block + batch + 1); multiplies the data.
        block: rows that share a scale, or ONE_PER_SEQUENCE.
        largest: no code is larger in magnitude than this; 448 unless the quantizer promises less.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: int
    largest: float = E4M3_MAX

    def __post_init__(self) -> None:
        _check(self.data, self.scale, self.block, "(total, heads, head_dim)")

    @property
    def shape(self) -> tuple[int, ...]:
        """(total, heads, head_dim)."""
        return tuple(self.data.shape)

    def row_major(self, cu_seqlens: torch.Tensor) -> PackedQuantizedTensor:
        """Itself: its data have a row of head_dim elements for each position."""
        return self

    def dequantize(self, cu_seqlens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """data * scale, rounded to ``dtype`` once, contiguous (total, heads, head_dim).

        Rows of no sequence are anything. Nothing is read on the host.
        """
        places = RowPlaces.of(cu_seqlens, None, self.data.shape[0])
        scale = self.scale[:, places.units(cu_seqlens, self.block)].t().unsqueeze(-1)
        return self.data.to(dtype, memory_format=torch.contiguous_format).mul_(scale)

    def of_sequence(self, number: int, rows: Span) -> QuantizedTensor:
        """One sequence as a batch of its own."""
        length = rows.stop - rows.start
        scale, block = _scales_of_sequence(self.scale, self.block, number, rows)
        return QuantizedTensor(self.data[None, rows.start : rows.start + length], scale, block, self.largest)


@dataclass(frozen=True)
class PackedTransposedV:
    """V in e4m3 as the FP8 attention kernel reads it, contiguous along the keys.

    Attributes:
        data: float8_e4m3fn (kv_heads, head_dim_v, keys). Each sequence has whole steps of 32 keys to itself, in which
            they come in the order ``hopper.forward.fp8.config.FP8_KEY_ORDER``; those past its end are zeros. So keys is
            32 (total // 32 + batch + 1).
        scale: float32 (kv_heads, total // block + batch + 1), positive; multiplies the data.
        block: keys that share a scale, or ONE_PER_SEQUENCE.
        total: rows of V that are meant.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: int
    total: int

    def __post_init__(self) -> None:
        _check(self.data, self.scale, self.block, "(kv_heads, head_dim_v, keys)")

    @property
    def shape(self) -> tuple[int, ...]:
        """(total, kv_heads, head_dim_v)."""
        kv_heads, head_dim_v, _ = self.data.shape
        return self.total, kv_heads, head_dim_v

    def row_major(self, cu_seqlens: torch.Tensor) -> PackedQuantizedTensor:
        """The same bytes as (total, kv_heads, head_dim_v); nothing is read on the host."""
        places = RowPlaces.of(cu_seqlens, None, self.total)
        keys = places.units(cu_seqlens, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP
        keys = keys + slot_of_key(places.row % FP8_KEYS_PER_STEP)
        rows = self.data.view(torch.uint8)[:, :, keys].permute(2, 0, 1).contiguous()
        return PackedQuantizedTensor(rows.view(FP8_DTYPE), self.scale, self.block)

    def dequantize(self, cu_seqlens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """data * scale (total, kv_heads, head_dim_v), as that of ``PackedQuantizedTensor``."""
        return self.row_major(cu_seqlens).dequantize(cu_seqlens, dtype)

    def of_sequence(self, number: int, rows: Span) -> TransposedV:
        """One sequence as a batch of its own."""
        length = rows.stop - rows.start
        scale, block = _scales_of_sequence(self.scale, self.block, number, rows)
        first = (rows.start // FP8_KEYS_PER_STEP + number) * FP8_KEYS_PER_STEP
        data = self.data[None, :, :, first : first + padded_keys(length)]
        return TransposedV(data, scale, block, length)


def key_of_slot(slot: torch.Tensor) -> torch.Tensor:
    """``FP8_KEY_ORDER`` of slots from 0 to 31, without a table, which a GPU would have to be sent."""
    return slot // 16 * 16 + slot % 4 // 2 * 8 + slot % 16 // 4 * 2 + slot % 2


def slot_of_key(key: torch.Tensor) -> torch.Tensor:
    """The inverse of ``key_of_slot``."""
    return key // 16 * 16 + key % 8 // 2 * 4 + key % 16 // 8 * 2 + key % 2


def _scales_of_sequence(scale: torch.Tensor, block: int, number: int, rows: Span) -> tuple[torch.Tensor, int]:
    """Scales (1, heads, blocks) of one sequence, and the rows that share one, as ``QuantizedTensor`` has them."""
    length = rows.stop - rows.start
    first = rows.start // block + number
    blocks = -(-length // block)
    own = max(length, 1) if block == ONE_PER_SEQUENCE else block
    return scale[None, :, first : first + blocks], own


@dataclass(frozen=True)
class PackedQuantizedQKV:
    """Q, K and V of packed sequences in e4m3, where the sequences lie, how they were made, and the dtype of the output.

    ``v`` is transposed where :func:`hopper_attention.quantize_qkv` made it, and has rows where it came as FP8.
    ``mean_v`` float32 (batch + 1, kv_heads, head_dim_v) is what V lost, as in a :class:`hopper_attention.QuantizedQKV`,
    its last entry of no sequence; it may have no elements.
    """

    q: PackedQuantizedTensor
    k: PackedQuantizedTensor
    v: PackedTransposedV | PackedQuantizedTensor
    lengths: Lengths
    quantization: Fp8Quantization
    dtype: torch.dtype
    mean_v: torch.Tensor = field(default_factory=no_numbers)

    def __post_init__(self) -> None:
        q, k = TensorSpec.of(self.q.data), TensorSpec.of(self.k.data)
        v = TensorSpec.of(self.v.data)._replace(shape=self.v.shape)
        check_packed(q, k, v, specs_of(self.lengths))
        for name, part in (("q", self.q), ("k", self.k), ("v", self.v)):
            total, heads, _ = part.shape
            wanted = heads, count_units(total, self.batch, part.block)
            if part.scale.shape != wanted:
                raise ValueError(
                    f"the scale of {name} has shape {tuple(part.scale.shape)}, allowed with {total} rows in "
                    f"{self.batch} sequences and blocks of {part.block}: {wanted}"
                )
        if isinstance(self.v, PackedTransposedV):
            keys = count_units(self.v.total, self.batch, FP8_KEYS_PER_STEP) * FP8_KEYS_PER_STEP
            if self.v.data.shape[2] != keys:
                raise ValueError(
                    f"the data of v have {self.v.data.shape[2]} keys, allowed for {self.v.total} rows in {self.batch} "
                    f"sequences: {keys}"
                )

        if self.mean_v.numel():
            _, kv_heads, head_dim_v = self.v.shape
            check_mean_v(self.mean_v, self.q.data.device, (self.batch + 1, kv_heads, head_dim_v))

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.lengths.cu_seqlens_q.shape[0] - 1

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v in the dtype of the output. What was rotated stays so, and V without its mean; nothing is read on
        the host."""
        cu_seqlens_q, cu_seqlens_k = self.lengths[:2]
        k, v = (part.dequantize(cu_seqlens_k, self.dtype) for part in (self.k, self.v))
        return self.q.dequantize(cu_seqlens_q, self.dtype), k, v

    def sequences(self) -> list[tuple[Sequence, QuantizedQKV]]:
        """Each sequence with its rows of q, and of k and v: as a batch of its own. On a GPU this waits for it.

        Raises:
            ValueError: the rows of sequences overlap or lie outside of q or k, or a bound does not hold.
        """
        found = read_sequences(self.lengths, self.q.shape[0], self.k.shape[0])
        return [
            (
                Sequence(rows, keys),
                QuantizedQKV(
                    self.q.of_sequence(number, rows),
                    self.k.of_sequence(number, keys),
                    self.v.of_sequence(number, keys),
                    quantization=self.quantization,
                    dtype=self.dtype,
                    mean_v=self.mean_v[number : number + 1] if keys.stop > keys.start else self.mean_v[:0],
                ),
            )
            for number, (rows, keys) in enumerate(found)
        ]
