"""The mask function: from the description of a mask that Transformers has to what the kernels take.

Transformers describes a mask as a function of indices, put together out of its own, and a padding mask of tokens. What
the kernels know becomes a tensor of ``visible``, which has a few numbers for each sequence, or None where there is
nothing to say. What they do not know becomes a boolean mask of all queries and keys, which they read as a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from hopper_attention import compiled
from hopper_attention.integrations.transformers.visible import BOTH_WAYS, CAUSAL, PACKED, WINDOW_ONLY, encode

Index = Any
"""An int, or a tensor where a static cache keeps it on the device."""


class Frame(NamedTuple):
    """The queries and keys that a mask is of: query i stands at position q_offset + i, key j at kv_offset + j."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    q_offset: Index
    kv_offset: Index

    @property
    def stop(self) -> Index:
        """Of positions: the one behind the last query."""
        return self.q_offset + self.seqlen_q

    @property
    def ends_at_last_key(self) -> bool:
        """Whether the last query is known to stand at the last key."""
        if isinstance(self.q_offset, Tensor) or isinstance(self.kv_offset, Tensor):
            return False
        return bool(self.seen_keys == self.seqlen_k)

    @property
    def seen_keys(self) -> Index:
        """Those up to the last query. On the device nothing is subtracted where there is nothing to subtract."""
        starts_at_0 = not isinstance(self.kv_offset, Tensor) and self.kv_offset == 0
        return self.stop if starts_at_0 else self.stop - self.kv_offset


class Pattern(NamedTuple):
    """What a mask function of Transformers says, beside padding.

    Attributes:
        is_causal: else every query sees every key.
        window: as in ``visible``; 0 is none.
        sequence: (batch, tokens), the number of the sequence in its row that a token belongs to, or None.
        unknown: the part that the kernels have no name for, or "".
    """

    is_causal: bool = False
    window: int = 0
    sequence: Tensor | None = None
    unknown: str = ""

    @property
    def kind(self) -> int:
        """As in ``visible``, where nothing is packed."""
        return CAUSAL if self.is_causal else BOTH_WAYS


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Index = 0,
    kv_offset: Index = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask of one kind of layers, as ``AttentionMaskInterface`` asks for it.

    Args:
        batch_size, q_length, kv_length: sizes of the queries and keys.
        q_offset, kv_offset: positions of the first query and the first key; tensors where a cache is static.
        mask_function: what a query sees by its position, of Transformers' own parts or of a user's.
        attention_mask: boolean (batch, positions), False for padding; None if there is none.
        device: where the mask has to be.
        options: what Transformers has for other implementations; ``use_vmap`` is passed on.

    Returns:
        None where a query sees all keys, or with a causal layer all up to its own; an int32 tensor of
        :mod:`~hopper_attention.integrations.transformers.visible`; or a boolean (batch, 1, q_length, kv_length).
    """
    frame = Frame(batch_size, q_length, kv_length, q_offset, kv_offset)
    if attention_mask is None:
        if mask_function is bidirectional_mask_function:
            return None
        if mask_function is causal_mask_function:
            return None if frame.ends_at_last_key else keys_up_to_queries(frame, 0, device)
    return read_mask(frame, mask_function, attention_mask, device, options.get("use_vmap", False))


@compiled.disable
def read_mask(
    frame: Frame,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    device: torch.device | str,
    use_vmap: bool,
) -> Tensor | None:
    """:func:`make_mask` where the parts of the function, or the values of padding, have to be looked at.

    Padding is read on the host, once for all layers. So torch.compile leaves this out.
    """
    pattern = read_pattern(mask_function)
    window = pattern.window if frame.seqlen_k > pattern.window else 0
    table = _Table(frame, mask_function, attention_mask, device, use_vmap)
    if pattern.unknown:
        return table.make()
    # Where it is traced, Transformers does not look whether there is more than one.
    if pattern.sequence is not None and pattern.sequence.any():
        return table.make() if attention_mask is not None else _packed(pattern.sequence, window)
    if attention_mask is not None:
        padding = read_padding(attention_mask, frame)
        if padding.has_holes:
            return table.make()
        if not padding.is_none(pattern.is_causal) or (pattern.is_causal and not frame.ends_at_last_key):
            return _padded(padding, pattern.is_causal, window, attention_mask.device)
    if pattern.is_causal and not frame.ends_at_last_key:
        return keys_up_to_queries(frame, window, device)
    if window:
        return encode(torch.empty(frame.batch, WINDOW_ONLY, device=device), window, pattern.kind)
    return None


class _Table(NamedTuple):
    """What a mask of all queries and keys is made of."""

    frame: Frame
    mask_function: Callable[..., Any]
    attention_mask: Tensor | None
    device: torch.device | str
    use_vmap: bool

    def make(self) -> Tensor:
        """Boolean (batch, 1, seqlen_q, seqlen_k)."""
        mask: Tensor = sdpa_mask(
            *self.frame,
            mask_function=self.mask_function,
            attention_mask=self.attention_mask,
            allow_is_causal_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )
        return mask


# The parts of a mask function


def read_pattern(mask_function: Callable[..., Any]) -> Pattern:
    """What the parts of a mask function say together."""
    is_causal, window, sequence = False, 0, None
    for name, captured in parts_of(mask_function):
        if name == "causal_mask_function":
            is_causal = True
        elif name == "sliding_window_overlay":
            window = captured["sliding_window"]
        elif name == "sliding_window_bidirectional_overlay":
            window = captured["sliding_window"] + 1
        elif name == "packed_sequence_mask_function":
            sequence = captured["packed_sequence_mask"]
        elif name != "bidirectional_mask_function":
            return Pattern(unknown=name)
    if sequence is not None and not is_causal:
        return Pattern(unknown="packed sequences that are not causal")
    return Pattern(is_causal, window, sequence)


def parts_of(mask_function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions of Transformers that a mask function is the intersection of: their names, and what they captured.

    Any other function has the name that it says it has, and nothing captured.
    """
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".")[0]
    if getattr(mask_function, "__module__", "") != masking_utils.__name__:
        yield f"{name} of {getattr(mask_function, '__module__', 'no module')}", {}
        return
    captured = dict(inspect.getclosurevars(mask_function).nonlocals)
    if name == "and_masks":
        for part in captured["mask_functions"]:
            yield from parts_of(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from parts_of(captured["mask_function"])
    else:
        yield name, captured


# Padding


class Padding(NamedTuple):
    """Which positions are tokens: those from ``first`` up to ``last`` of each sequence, known on the host.

    Attributes:
        frame: that of the mask, its offsets known as well.
        counts: tokens of each sequence.
    """

    frame: Frame
    first: list[int]
    last: list[int]
    counts: list[int]

    @property
    def has_holes(self) -> bool:
        """Whether there is padding between tokens, so that first and last do not say it."""
        spans = zip(self.first, self.last, self.counts, strict=True)
        return any(last - first != count for first, last, count in spans)

    def stop(self, is_causal: bool) -> int:
        """Where keys end. Where nothing is causal they end where they do, and queries may be others, as of a decoder on
        an encoder."""
        frame = self.frame
        return int(frame.stop if is_causal else frame.kv_offset + frame.seqlen_k)

    def reaches_end(self, is_causal: bool) -> bool:
        """Whether every sequence has a token where keys end."""
        stop = self.stop(is_causal)
        return all(last >= stop for last in self.last)

    def is_none(self, is_causal: bool) -> bool:
        """Whether all are tokens, up to where keys end."""
        return not any(self.first) and self.reaches_end(is_causal)


def read_padding(attention_mask: Tensor, frame: Frame) -> Padding:
    """What a padding mask, boolean (batch, positions), says.

    Each step of ``generate`` with padding asks for this, and the GPU waits meanwhile: so few kernels, and one read.
    """
    tokens = attention_mask.bool().view(torch.uint8)
    numbers = [tokens.argmax(-1), tokens.flip(-1).argmax(-1), tokens.sum(-1)]
    batch, positions = tokens.shape
    offsets = frame.q_offset, frame.kv_offset
    numbers += [x.reshape(1).to(tokens.device) for x in offsets if isinstance(x, Tensor)]
    found = torch.cat(numbers).tolist()
    of_device = iter(found[3 * batch :])
    q_offset, kv_offset = (next(of_device) if isinstance(x, Tensor) else x for x in offsets)
    first, behind, counts = (found[i * batch : (i + 1) * batch] for i in range(3))
    last = [positions - x if count else 0 for x, count in zip(behind, counts, strict=True)]
    return Padding(frame._replace(q_offset=q_offset, kv_offset=kv_offset), first, last, counts)


def _padded(padding: Padding, is_causal: bool, window: int, device: torch.device) -> Tensor:
    """Keys and queries without padding."""
    frame, first, last = padding.frame, padding.first, padding.last
    if is_causal:
        last = [min(x, frame.stop) for x in last]
    fields = [_within(x, frame.kv_offset, frame.seqlen_k) for x in (first, last)]
    if not is_causal or not padding.reaches_end(is_causal):
        queries = [[0] * len(first), [frame.seqlen_q] * len(first)]
        if is_causal or window:
            queries = [_within(x, frame.q_offset, frame.seqlen_q) for x in (first, last)]
        fields = queries + fields
    values = torch.tensor(fields, dtype=torch.int32).to(device).t()
    return encode(values, window, CAUSAL if is_causal else BOTH_WAYS)


def _within(positions: list[int], offset: int, length: int) -> list[int]:
    """As indices of so many, of which the first has this position."""
    return [min(max(0, position - offset), length) for position in positions]


def keys_up_to_queries(frame: Frame, window: int, device: torch.device | str) -> Tensor:
    """All keys up to the last query, of a cache that has room behind them."""
    end = torch.as_tensor(frame.seen_keys, device=device)
    return encode(end.expand(frame.batch, 1), window, CAUSAL)


def _packed(sequence: Tensor, window: int) -> Tensor:
    """Offsets of the sequences of all rows, which lie one after another."""
    offsets = offsets_of_sequences(sequence)
    return encode(torch.stack((offsets, offsets)), window, PACKED)


def offsets_of_sequences(sequence: Tensor) -> Tensor:
    """int32 (sequences + 1,) from the number of each token's sequence in its row, (batch, tokens)."""
    begins = torch.ones_like(sequence, dtype=torch.bool)
    begins[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([sequence.numel()]))).to(torch.int32)
