"""Sequences of different lengths in one tensor: where each lies, and the checks of what says so."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopper_attention import checks
from hopper_attention.checks import TensorSpec
from hopper_attention.reference.tiles import Span

DIMENSIONS = {
    "q": "(total_q, heads, head_dim)",
    "k": "(total_k, kv_heads, head_dim)",
    "v": "(total_k, kv_heads, head_dim_v)",
}

COUNTS = {
    "cu_seqlens_q": "the batch size and 1 more",
    "cu_seqlens_k": "the batch size and 1 more",
    "seqused_q": "the batch size",
    "seqused_k": "the batch size",
}


class Lengths(NamedTuple):
    """Where the sequences of a batch lie, in the order in which launchers take it.

    Sequence b has the rows from cu_seqlens[b] up to cu_seqlens[b + 1]; where ``seqused`` is given, its length is
    seqused[b], and the other rows are of no sequence.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), which begin at 0 and do not fall.
        seqused_q, seqused_k: int32 (batch,), or None.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def different(self) -> list[Tensor]:
        """The tensors that are given, each once."""
        given = [self.cu_seqlens_q]
        if self.cu_seqlens_k is not self.cu_seqlens_q:
            given.append(self.cu_seqlens_k)
        if self.seqused_q is not None:
            given.append(self.seqused_q)
        if self.seqused_k is not None and self.seqused_k is not self.seqused_q:
            given.append(self.seqused_k)
        return given

    @property
    def pattern(self) -> tuple[bool, ...]:
        """Which of the tensors ``different`` are."""
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, _, _ = self
        of_used = seqused_q is None, seqused_k is None, seqused_q is seqused_k
        return cu_seqlens_q is cu_seqlens_k, *of_used


def specs_of(lengths: Lengths) -> tuple[TensorSpec | None, ...]:
    """Of the four tensors. No property of theirs, which torch.compile of older torch cannot trace."""
    return tuple(None if x is None else TensorSpec.of(x) for x in lengths[:4])


class Sequence(NamedTuple):
    """The rows of one sequence in q, and those in k and v."""

    rows: Span
    keys: Span


def check_kinds(lengths: Lengths) -> Lengths:
    """These with bounds that are ints; raise TypeError or ValueError unless they are tensors, and bounds from 0."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k = lengths
    checks.check_are_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if seqused_q is not None:
        checks.check_are_tensors(seqused_q=seqused_q)
    if seqused_k is not None:
        checks.check_are_tensors(seqused_k=seqused_k)
    bounds = check_max_seqlen("max_seqlen_q", max_seqlen_q), check_max_seqlen("max_seqlen_k", max_seqlen_k)
    return Lengths(*lengths[:4], *bounds)


def check_max_seqlen(name: str, max_seqlen: Any) -> int:
    """A bound of lengths as an int; raise unless it is one, 0 or more."""
    max_seqlen = checks.python_int(max_seqlen)
    is_int = isinstance(max_seqlen, (int, torch.SymInt)) and not isinstance(max_seqlen, bool)
    if not is_int:
        raise TypeError(
            f"{name} is a {type(max_seqlen).__name__}, {max_seqlen!r}, allowed: an int, as no tensor is read"
        )
    if max_seqlen < 0:
        raise ValueError(f"{name} is {max_seqlen}, allowed: 0 or more, the length of the longest sequence")
    return max_seqlen


def check_packed(q: TensorSpec, k: TensorSpec, v: TensorSpec, lengths: tuple[TensorSpec | None, ...]) -> None:
    """Raise ValueError or TypeError unless these make one problem; ``lengths`` are those of ``specs_of``."""
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if len(spec.shape) != 3:
            raise ValueError(
                f"{name} has {len(spec.shape)} dimensions, shape {tuple(spec.shape)}, allowed: 3, {DIMENSIONS[name]}"
            )
    checks.check_dtypes(q.dtype, k.dtype, v.dtype)
    checks.check_device("k", k.device, q.device)
    checks.check_device("v", v.device, q.device)
    _check_shapes(q.shape, k.shape, v.shape)
    named = {name: spec for name, spec in zip(COUNTS, lengths, strict=True) if spec is not None}
    for name, spec in named.items():
        _check_vector(name, spec, q.device)
    _check_counts({name: spec.shape[0] for name, spec in named.items()})


def _check_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    (_, heads, head_dim), (total_k, kv_heads, _) = q, k
    checks.check_head_dims(head_dim, v[2])
    if k[2] != head_dim:
        raise ValueError(
            f"k has shape {tuple(k)}, allowed with q of shape {tuple(q)}: (total_k, kv_heads, {head_dim})"
        )
    if v[:2] != k[:2]:
        raise ValueError(
            f"v has shape {tuple(v)}, allowed with k of shape {tuple(k)}: ({total_k}, {kv_heads}, head_dim_v)"
        )
    checks.check_heads(heads, kv_heads)


def _check_vector(name: str, spec: TensorSpec, device_of_q: torch.device) -> None:
    if spec.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {spec.dtype}, allowed: torch.int32")
    if len(spec.shape) != 1:
        raise ValueError(f"{name} has shape {tuple(spec.shape)}, allowed: one dimension, {COUNTS[name]}")
    checks.check_device(name, spec.device, device_of_q)
    checks.check_is_dense(name, spec)


def _check_counts(counts: dict[str, int]) -> None:
    """Of the elements in each tensor that is given."""
    if counts["cu_seqlens_q"] < 1:
        raise ValueError("cu_seqlens_q is empty, allowed: the batch size and 1 more, 1 or more elements")
    batch = counts["cu_seqlens_q"] - 1
    for name, count in counts.items():
        wanted = batch + 1 if name.startswith("cu_") else batch
        if count != wanted:
            raise ValueError(
                f"{name} has {count} elements, allowed with the {batch + 1} of cu_seqlens_q: {wanted}, {COUNTS[name]}"
            )


def read_sequences(lengths: Lengths, total_q: int, total_k: int) -> list[Sequence]:
    """The sequences, read off the tensors: on a GPU this waits for it.

    Raises:
        ValueError: the rows of sequences overlap or lie outside of q or k, or a bound does not hold.
    """
    rows = _read_side("q", lengths.cu_seqlens_q, lengths.seqused_q, lengths.max_seqlen_q, total_q)
    keys = _read_side("k", lengths.cu_seqlens_k, lengths.seqused_k, lengths.max_seqlen_k, total_k)
    return [Sequence(*spans) for spans in zip(rows, keys, strict=True)]


def _read_side(side: str, cu_seqlens: Tensor, seqused: Tensor | None, longest: int, total: int) -> list[Span]:
    """The rows of each sequence in q, or in k and v."""
    name = f"cu_seqlens_{side}"
    starts = cu_seqlens.tolist()
    if starts[0] != 0:
        raise ValueError(f"{name} begins with {starts[0]}, allowed: 0")
    if starts[-1] > total:
        raise ValueError(f"{name} ends with {starts[-1]}, allowed: at most the {total} rows of {side}")
    rooms = [stop - start for start, stop in pairwise(starts)]
    for i, room in enumerate(rooms):
        if room < 0:
            raise ValueError(f"{name} falls from {starts[i]} to {starts[i + 1]}, allowed: no falling")
    used = rooms if seqused is None else seqused.tolist()
    for i, (length, room) in enumerate(zip(used, rooms, strict=True)):
        if not 0 <= length <= room:
            raise ValueError(
                f"seqused_{side}[{i}] is {length}, allowed: 0 to {room}, the rows that {name} gives sequence {i}"
            )
        if length > longest:
            raise ValueError(
                f"max_seqlen_{side} is {longest}, allowed: at least the length of every sequence, and sequence {i} has "
                f"{length}"
            )
    return [Span(start, start + length) for start, length in zip(starts, used, strict=False)]


def rows_of_sequences(cu_seqlens: Tensor, seqused: Tensor | None, total: int) -> Tensor:
    """Boolean (total,): which rows are of some sequence. Nothing is read on the host."""
    rows = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    if cu_seqlens.shape[0] == 1:
        return torch.zeros_like(rows, dtype=torch.bool)
    if seqused is None:
        return rows < cu_seqlens[-1]
    # The last sequence that begins at or before a row; empty ones before it begin there too.
    at = torch.searchsorted(cu_seqlens, rows, right=True, out_int32=True) - 1
    at = at.clamp(max=seqused.shape[0] - 1)
    return rows < cu_seqlens[at] + seqused[at]
