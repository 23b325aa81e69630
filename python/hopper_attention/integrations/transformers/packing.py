"""Packed batches: sequences one after another in a row, as a data collator without padding makes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hopper_attention import compiled
from hopper_attention.lengths import Lengths


class Seen(NamedTuple):
    """What was read off position_ids, which all layers of a forward pass share.

    Attributes:
        offsets: of the sequences; None if there is one.
        version: of the tensor then; -1 under torch.inference_mode, where it has none.
        layer: the number of the layer that read it.
    """

    offsets: Tensor | None
    version: int
    layer: int


_seen_by_positions = WeakIdKeyDictionary()

GIVEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What a data collator may pass along, as for FlashAttention-2."""

Sizes = tuple[int, ...]


def find_offsets(sizes_q: Sizes, seqlen_k: int, options: dict[str, Any]) -> Lengths | None:
    """Where the sequences of a packed batch lie; None if there is one in each row.

    Either the caller says so, by the four of GIVEN, or the ``position_ids`` of the only row begin anew. Where there is
    padding this is not asked.
    """
    if all(options.get(name) is not None for name in GIVEN):
        starts_q, starts_k, longest_q, longest_k = (options[name] for name in GIVEN)
        starts_q, starts_k = (x.to(torch.int32).contiguous() for x in (starts_q, starts_k))
        return Lengths(starts_q, starts_k, None, None, int(longest_q), int(longest_k))
    positions = options.get("position_ids")
    batch, seqlen_q = sizes_q
    may_be_packed = batch == 1 and 1 < seqlen_q == seqlen_k
    if not may_be_packed or positions is None or positions.shape != (1, seqlen_q):
        return None
    offsets = read_positions(positions, options.get("layer"))
    return None if offsets is None else Lengths(offsets, offsets, None, None, seqlen_q, seqlen_k)


@compiled.disable
def read_positions(positions: Tensor, layer: int | None) -> Tensor | None:
    """int32 (sequences + 1,) offsets of the sequences in positions (1, tokens); None if there is one.

    A sequence begins where positions do not rise. They are read on the host, once for all layers: anew where the tensor
    was written since, or, if that cannot be known, where ``layer`` is not behind the one that read it last.
    """
    seen: Seen | None = _seen_by_positions.get(positions)
    version = -1 if positions.is_inference() else positions._version
    number = -1 if layer is None else layer
    if seen is None or seen.version != version or (version == -1 and number <= seen.layer):
        seen = Seen(_read(positions), version, number)
        _seen_by_positions[positions] = seen
    return seen.offsets


def _read(positions: Tensor) -> Tensor | None:
    begins = (positions[0].diff() <= 0).nonzero().flatten() + 1
    if not begins.numel():
        return None
    ends = begins.new_tensor([0]), begins, begins.new_tensor([positions.numel()])
    return torch.cat(ends).to(torch.int32)
