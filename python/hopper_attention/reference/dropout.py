"""The mask of dropout, bit by bit as the kernels make it (``cute_kernels/philox.py`` says how)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention.dropout import kept_steps, scale_of_kept
from hopper_attention.reference.tiles import Span

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
LOW = 0xFFFFFFFF

BLOCK = 16
"""Queries and keys of a block. One call of Philox is for four of its rows, two pairs 8 apart, and four such columns."""

PAIRS = 4
"""Pairs of rows, or of columns, in half a block."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32 with 7 rounds; every word is in the low 32 bits of an int64, and they broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = (_multiply(c, m) for c, m in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = ((k + step) & LOW for k, step in zip((k0, k1), KEY_STEPS, strict=True))
    return c0, c1, c2, c3


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product, which in an int64 wraps around to the same bits."""
    product = x * factor
    return (product >> 32) & LOW, product & LOW


@dataclass(frozen=True)
class DropoutMask:
    """Which elements of P are kept.

    Attributes:
        key: of Philox, two words made of seed and offset.
        kept: how many of 256 are kept.
        factor: what of P is kept is multiplied by this.
        batch, heads: of Q.
        first_batch: the number of the first one of the batch.
        first_head: the number of the first one of the heads.
    """

    key: tuple[Tensor, Tensor]
    kept: int
    factor: float
    batch: int
    heads: int
    first_batch: int = 0
    first_head: int = 0

    @classmethod
    def of(
        cls, dropout_p: float, philox_words: Tensor | None, batch: int, heads: int, first_batch: int = 0
    ) -> DropoutMask | None:
        """That of the words (seed, offset), or None without dropout.

        Raises:
            ValueError: there is dropout, and no words.
        """
        if dropout_p == 0.0:
            return None
        if philox_words is None:
            raise ValueError(
                f"philox is None, allowed with dropout_p {dropout_p}: int64 (2,), seed and offset"
            )
        (seed, seed_high), (offset, offset_high) = ((word & LOW, (word >> 32) & LOW) for word in philox_words)
        zero = torch.zeros_like(seed)
        key = philox((offset, offset_high, zero, zero), (seed, seed_high))[:2]
        return cls(key, kept_steps(dropout_p), scale_of_kept(dropout_p), batch, heads, first_batch)

    def tile(self, rows: Span, cols: Span) -> Tensor:
        """Boolean (batch, heads, rows, cols): True for what is kept."""
        (first_i, blocks_i), (first_j, blocks_j) = _blocks(rows), _blocks(cols)
        words = self._words(first_i, blocks_i, first_j, blocks_j)
        odd_i, odd_j = (
            (torch.arange(first, first + count, device=words.device) % 2 == 1)
            for first, count in ((first_i, blocks_i), (first_j, blocks_j))
        )
        # (row of the pair, column of the pair, batch, heads, block, pair, block, pair), as the parities of blocks say.
        words = torch.where(odd_j[:, None], words.flip(0), words)
        words = torch.where(odd_i[:, None, None, None], words.flip(1), words)
        shifts = torch.arange(0, 32, 8, device=words.device).reshape(2, 2, *[1] * words.dim())
        kept = ((words >> shifts) & 0xFF) < self.kept
        # To (batch, heads, block, half, pair, row, block, half, pair, column).
        whole = kept.permute(4, 5, 6, 0, 7, 2, 8, 1, 9, 3)
        whole = whole.reshape(self.batch, self.heads, BLOCK * blocks_i, BLOCK * blocks_j)
        return whole[:, :, _within(rows, first_i), _within(cols, first_j)]

    def _words(self, first_i: int, blocks_i: int, first_j: int, blocks_j: int) -> Tensor:
        """(2, 2, batch, heads, blocks of queries, pairs, blocks of keys, pairs)."""
        device = self.key[0].device

        def numbers(first: int, count: int, *shape: int) -> Tensor:
            return torch.arange(first, first + count, device=device).reshape(shape)

        counter = (
            numbers(PAIRS * first_j, PAIRS * blocks_j, blocks_j, PAIRS),
            numbers(PAIRS * first_i, PAIRS * blocks_i, blocks_i, PAIRS, 1, 1),
            numbers(self.first_head, self.heads, self.heads, 1, 1, 1, 1),
            numbers(self.first_batch, self.batch, self.batch, 1, 1, 1, 1, 1),
        )
        words = torch.stack(torch.broadcast_tensors(*philox(counter, self.key)))
        return words.unflatten(0, (2, 2))

    def of_group(self, rows: Span, cols: Span, kv_heads: int) -> Tensor:
        """``tile`` of folded heads: (batch, kv_heads, group * rows, cols)."""
        return self.tile(rows, cols).unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _blocks(span: Span) -> tuple[int, int]:
    """The first block of a span, and how many it touches."""
    first = span.start // BLOCK
    return first, -(-span.stop // BLOCK) - first


def _within(span: Span, first_block: int) -> slice:
    return slice(span.start - BLOCK * first_block, span.stop - BLOCK * first_block)


def dropped(x: Tensor, kept: Tensor | None, factor: float = 1.0) -> Tensor:
    """x times ``factor`` where it is kept, else 0; x itself if everything is."""
    return x if kept is None else torch.where(kept, x * factor, 0.0)


def dropout_mask(
    philox: Tensor, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int, first_batch: int = 0
) -> Tensor:
    """Which elements of P ``dropout_p=p`` keeps, on every backend.

    Args:
        philox: int64 (2,), seed and offset: what the operators of this package are given.
        p: from 0 on, below 1. An element is kept with the probability that is the multiple of 1/256 nearest to 1 - p,
            and at least 1/256; kept ones are multiplied by 1 over that.
        batch, heads: of Q. A head of K has a mask for each head of Q that reads it.
        seqlen_q, seqlen_k: how many queries and keys; those of longer sequences have the same mask and more.
        first_batch: the number of the first entry of the batch, or of a packed sequence.

    Returns:
        Boolean (batch, heads, seqlen_q, seqlen_k) on the device of ``philox``: True for what is kept.
    """
    mask = DropoutMask.of(p, philox, batch, heads, first_batch)
    if mask is None:
        return torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=philox.device)
    return mask.tile(Span(0, seqlen_q), Span(0, seqlen_k))
