"""What queries see, as a small int32 tensor that a model passes through its layers in place of an attention mask.

What the GPU has to know are its values, so that nothing waits for them; what the host has to know is its shape,
(batch, kind, 1 + window, fields), of which the dimensions in the middle are expanded and take no memory.

The kind is CAUSAL, BOTH_WAYS, or PACKED, which is causal in each of several sequences and has their offsets as values,
(1, 2, 1 + window, sequences + 1): those of queries, and those of keys. A window is the number of keys that a query sees
to its left, itself among them, or in both directions where nothing is causal; 0 is none. By their fields the others are

    WINDOW_ONLY  0   all keys, the last query at the last key
    ENDS         1   the keys up to end of each sequence, the last query at end - 1
    KEYS         2   the keys from begin up to end, likewise
    ROWS         4   the queries from begin up to end, and the keys, their ends aligned

Masks of users are boolean or floating, so an int32 tensor is always one of these.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hopper_attention.device_memory import is_capturing
from hopper_attention.lengths import Lengths

WINDOW_ONLY, ENDS, KEYS, ROWS = 0, 1, 2, 4
"""Fields of a sequence."""


CAUSAL, PACKED, BOTH_WAYS = 1, 2, 3
"""Kinds."""

MASKS_OF_A_MODEL = 4
"""In use at a time: layers may differ in their windows."""


class Visible(NamedTuple):
    """What such a tensor says.

    Attributes:
        values: (batch, 0, 1, 2 or 4), or (2, sequences + 1) of packed sequences.
        window: keys to the left, the own one among them; 0 is no window.
        kind: CAUSAL, PACKED or BOTH_WAYS.
        columns: of values, each of a field of all sequences, contiguous.
    """

    values: Tensor
    window: int
    kind: int
    columns: tuple[Tensor, ...]

    @property
    def fields(self) -> int:
        """WINDOW_ONLY, ENDS, KEYS or ROWS, where nothing is packed."""
        return self.values.shape[-1]


def encode(values: Tensor, window: int, kind: int) -> Tensor:
    """The tensor of these values, as ``Visible`` has them. A field of all sequences is contiguous, so that no layer has
    to copy it."""
    values = values.to(torch.int32)
    if kind == PACKED:
        return values[None, :, None, :].expand(-1, -1, 1 + window, -1)
    by_field = values.t().contiguous().t() if values.shape[1] > 1 else values
    return by_field[:, None, None, :].expand(-1, kind, 1 + window, -1)


def decode(mask: Tensor) -> Visible:
    """What a tensor of ``encode`` says. All layers of a pass ask for it."""
    # A graph is replayed on other values of the same mask.
    if torch.compiler.is_compiling() or is_capturing(mask.device):
        return _decode(mask)
    return _decode_once(mask, -1 if mask.is_inference() else mask._version)


def _decode(mask: Tensor, version: int = -1) -> Visible:
    """``version``: of the mask, with its values another one; -1 under torch.inference_mode, where it has none."""
    kind, window = mask.shape[1], mask.shape[2] - 1
    values = mask[0, :, 0] if kind == PACKED else mask[:, 0, 0]
    # generate has made a mask contiguous, with the fields of a sequence side by side.
    columns = () if kind == PACKED else tuple(x.contiguous() for x in values.unbind(-1))
    return Visible(values, window, kind, columns)


_decode_once = lru_cache(maxsize=MASKS_OF_A_MODEL)(_decode)
"""A tensor is its own key, with its version, and what is kept are its fields: copied once for all layers, where they
have to be."""


def is_encoded(mask: object) -> bool:
    """Whether this is such a tensor, and no mask of a user."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4


def rows_of_keys(keys: Tensor, seqlen_q: int) -> Tensor:
    """ENDS or KEYS of each sequence as ROWS: queries that stand before the first key are left out."""
    end = keys[:, -1]
    begin = keys[:, 0] if keys.shape[1] == KEYS else torch.zeros_like(end)
    first = (seqlen_q - (end - begin)).clamp(0, seqlen_q)
    return torch.stack((first, torch.full_like(first, seqlen_q), begin, end), -1)


def lengths_of_rows(rows: Tensor, seqlen_q: int, seqlen_k: int) -> Lengths:
    """ROWS of (batch, seqlen) tensors as sequences of (batch * seqlen) ones.

    No token moves: each sequence is preceded by an empty one, which covers the padding on its left.
    """
    q_begin, q_end, k_begin, k_end = rows.unbind(-1)
    cu_seqlens_q, used_q = _side(q_begin, q_end, seqlen_q)
    cu_seqlens_k, used_k = _side(k_begin, k_end, seqlen_k)
    return Lengths(cu_seqlens_q, cu_seqlens_k, used_q, used_k, seqlen_q, seqlen_k)


def _side(begin: Tensor, end: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
    """Offsets (2 batch + 1,) and used lengths (2 batch,)."""
    base = torch.arange(begin.shape[0] + 1, dtype=torch.int32, device=begin.device) * seqlen
    starts = torch.stack((base[:-1], base[:-1] + begin), -1).flatten()
    used = torch.stack((torch.zeros_like(begin), (end - begin).clamp(min=0)), -1).flatten()
    return torch.cat((starts, base[-1:])), used
