"""What every tiled computation of attention shares: shapes, tiles, the mask, and products that respect it.

Query heads that read the same key/value head are folded into one group: a tile of queries has
``group * rows`` rows and meets one tile of keys, so that Python loops run over tiles only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from hopper_attention.masks import UNLIMITED, MaskSpec

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tiles(**tiles: int) -> None:
    """Raise ValueError for a tile size below 1."""
    for name, size in tiles.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, allowed: 1 or more")


def default_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor of the scores: 1/sqrt(head_dim) unless given."""
    return 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the tiled passes compute in: float64 for float64 inputs, else float32.

    Products of 16-bit numbers are exact in float32, and a CPU multiplies float32 matrices far faster.

    Raises:
        TypeError: no tiled pass takes inputs of ``dtype``.
    """
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"q has dtype {dtype}, allowed: {', '.join(map(str, INPUT_DTYPES))}")
    return torch.float64 if dtype == torch.float64 else torch.float32


class Span(NamedTuple):
    """Positions ``start <= i < stop`` of a sequence: one tile's share of it."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


def spans(start: int, stop: int, tile: int) -> list[Span]:
    """Tiles that cover [start, stop), on a grid that begins at 0; the first and last may be cut."""
    if start >= stop:
        return []
    first = start - start % tile
    return [Span(max(start, at), min(stop, at + tile)) for at in range(first, stop, tile)]


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. It is aligned bottom-right: the last query stands at the last key.

    Query i sees the keys from i + shift - window_left to i + shift + window_right; -1 is no limit, and with ``causal``
    the right side is 0. With a chunk it sees none outside of the chunk of key i + shift, as in ``MaskSpec``.
    """

    seqlen_q: int
    seqlen_k: int
    causal: bool
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    attention_chunk: int = 0

    @cached_property
    def spec(self) -> MaskSpec:
        """This mask without the sides that hide nothing."""
        sides, lengths = (self.window_left, self.window_right), (self.seqlen_q, self.seqlen_k)
        return MaskSpec.canonical(self.causal, *sides, *lengths, self.attention_chunk)

    @cached_property
    def reach(self) -> tuple[int, int]:
        """(a, b): query i sees the keys from i + a to i + b, of those in its chunk."""
        spec, shift, most = self.spec, self.seqlen_k - self.seqlen_q, self.seqlen_q + self.seqlen_k
        left = most if spec.window_left == UNLIMITED else spec.window_left
        right = most if spec.window_right == UNLIMITED else spec.window_right
        return shift - left, shift if spec.causal else shift + right

    def key_tiles(self, rows: Span, tile: int) -> list[Span]:
        """The key tiles that some row sees, from the last down to the first, as the kernel visits them.

        The first and the last are cut to the keys that some row sees.
        """
        first, _ = self._keys_of(rows.start)
        _, end = self._keys_of(rows.stop - 1)
        return spans(max(0, first), min(self.seqlen_k, end), tile)[::-1]

    def query_tiles(self, cols: Span, tile: int) -> list[Span]:
        """The query tiles of which some row sees a key of ``cols``, without the rows that see none."""
        first, last = self.reach
        begin, end = cols.start - last, cols.stop - first
        if chunk := self.spec.attention_chunk:
            shift = self.seqlen_k - self.seqlen_q
            begin = max(begin, cols.start // chunk * chunk - shift)
            end = min(end, (cols.stop - 1) // chunk * chunk + chunk - shift)
        return spans(max(0, begin), min(self.seqlen_q, end), tile)

    def visible(self, rows: Span, cols: Span, group: int, device: torch.device) -> torch.Tensor | None:
        """Boolean (group * rows, cols): True where the query sees the key. None where every pair is seen."""
        if cols.stop <= self._keys_of(rows.start)[1] and cols.start >= self._keys_of(rows.stop - 1)[0]:
            return None
        first, last = self.reach
        i = torch.arange(*rows, device=device)[:, None]
        j = torch.arange(*cols, device=device)
        seen = (j >= i + first) & (j <= i + last)
        if chunk := self.spec.attention_chunk:
            seen &= (i + (self.seqlen_k - self.seqlen_q)) // chunk == j // chunk
        return seen.repeat(group, 1)

    def _keys_of(self, row: int) -> tuple[int, int]:
        """The first key that a row sees, and one past the last, without regard to the ends of the sequence."""
        first, last = self.reach
        begin, end = row + first, row + last + 1
        if chunk := self.spec.attention_chunk:
            of_chunk = (row + self.seqlen_k - self.seqlen_q) // chunk * chunk
            begin, end = max(begin, of_chunk), min(end, of_chunk + chunk)
        return begin, end


def fold_heads(x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """(b, s, h, d) -> contiguous (b, kv_heads, group, s, d) in ``dtype``."""
    return x.transpose(1, 2).unflatten(1, (kv_heads, -1)).to(dtype).contiguous()


def unfold_heads(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(b, kv_heads, group, s, d) -> contiguous (b, s, h, d) in ``dtype``."""
    return x.flatten(1, 2).transpose(1, 2).to(dtype).contiguous()


def query_tile(folded: torch.Tensor, rows: Span) -> torch.Tensor:
    """Rows of every head of a group, one below the other: (b, kv_heads, group * rows, d)."""
    return folded[:, :, :, rows.slice].flatten(2, 3)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to ``dtype`` and held in its own: what a GEMM with ``dtype`` operands multiplies."""
    return x if x.dtype == dtype else x.to(dtype).to(x.dtype)


def masked(scores: torch.Tensor, visible: torch.Tensor | None, fill: float = -math.inf) -> torch.Tensor:
    """``scores`` with ``fill`` wherever the key is not visible."""
    return scores if visible is None else scores.masked_fill(~visible, fill)


def masked_matmul(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """weights @ values, in which a masked pair contributes nothing even where ``values`` is not finite.

    ``weights`` must be 0 where ``visible`` is False; 0 * NaN would otherwise leak into the product. Under a
    mask, a visible NaN or infinity makes the result NaN.
    """
    if visible is None:
        return weights @ values
    finite = torch.isfinite(values)
    product = weights @ torch.where(finite, values, 0.0)
    poison = visible.to(values.dtype) @ (~finite).to(values.dtype)
    return product.masked_fill(poison > 0, math.nan)


class OnlineSoftmax:
    """Running maximum and sum of a tile's rows in base 2 (Algorithm 1 of the FlashAttention-3 paper)."""

    def __init__(self, like: torch.Tensor) -> None:
        """``like`` is a query tile (b, kv_heads, rows, d); both statistics are (b, kv_heads, rows, 1)."""
        self.row_max = torch.full_like(like[..., :1], -math.inf)
        self.row_sum = torch.zeros_like(self.row_max)

    def step(self, x: torch.Tensor, headroom: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in scores x (overwritten), already times log2(e).

        Returns P = exp2(x - row_max + headroom), where row_max is the largest x so far, and the factor by which what
        was accumulated so far shrinks. A row that has seen no key yet keeps maximum -inf; it is shifted by 0, so that
        P is 0 and not NaN.
        """
        row_max = torch.maximum(self.row_max, x.amax(-1, keepdim=True))
        shift = row_max.masked_fill(row_max == -math.inf, 0.0)
        rescale = torch.exp2(self.row_max - shift)
        self.row_max = row_max
        return x.sub_(shift - headroom).exp2_(), rescale

    def add(self, tile_sum: torch.Tensor, rescale: torch.Tensor) -> None:
        self.row_sum = self.row_sum * rescale + tile_sum

    def normalize(self, acc: torch.Tensor) -> torch.Tensor:
        """acc / row_sum; 0 for a row that saw no key."""
        return acc / self.row_sum.masked_fill(self.row_sum == 0, 1.0)

    def lse(self, exponent: float = 0.0) -> torch.Tensor:
        """Natural log of the sum of exp(score), (b, kv_heads, rows); -inf for a row that saw no key."""
        return ((self.row_max + self.row_sum.log2() - exponent) * LN_2).squeeze(-1)
