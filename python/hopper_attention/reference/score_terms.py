"""Softcap, ALiBi and sinks on tiles of folded heads, as every computation of the reference uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention.reference.tiles import LOG2_E, Span
from hopper_attention.shapes import AttentionShape


@dataclass(frozen=True)
class ScoreTerms:
    """What is done to the scores of one problem. Tiles are (batch, kv_heads, group * rows, cols).

    Attributes:
        scale: factor of the products Q K^T.
        softcap: c of c tanh(score / c); 0 is none.
        slopes: (batch or 1, kv_heads, group, 1, 1), or None.
        sinks: (1, kv_heads, group, 1, 1), or None.
        shift: seqlen_k - seqlen_q: query i stands at key i + shift.
    """

    scale: float
    softcap: float
    slopes: Tensor | None
    sinks: Tensor | None
    shift: int

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        dtype: torch.dtype,
        scale: float,
        softcap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None = None,
    ) -> ScoreTerms:
        """With (heads,) or (batch, heads) slopes and (heads,) sinks, computed with in ``dtype``."""

        def fold(x: Tensor | None) -> Tensor | None:
            """(heads,) or (batch, heads) -> (batch or 1, kv_heads, group, 1, 1)."""
            return None if x is None else x.to(dtype).reshape(-1, shape.kv_heads, shape.group, 1, 1)

        return cls(scale, softcap, fold(alibi_slopes), fold(sinks), shape.seqlen_k - shape.seqlen_q)

    @property
    def changes_scores(self) -> bool:
        """Whether a score is more than its scaled product."""
        return self.softcap != 0.0 or self.slopes is not None

    def capped(self, scaled: Tensor) -> Tensor:
        """Scaled scores under the softcap, if there is one."""
        return self.softcap * torch.tanh(scaled / self.softcap) if self.softcap else scaled

    def biased(self, scores: Tensor, rows: Span, cols: Span) -> Tensor:
        """Scores of these queries and keys with the bias of ALiBi, if there is one."""
        if self.slopes is None:
            return scores
        own = torch.arange(*rows, device=scores.device)[:, None] + self.shift
        distance = (own - torch.arange(*cols, device=scores.device)).abs().to(scores.dtype)
        return scores - (self.slopes * distance).flatten(2, 3)

    def scores(self, products: Tensor, rows: Span, cols: Span) -> Tensor:
        """From the products Q K^T of these queries and keys to what the softmax takes, natural log."""
        return self.biased(self.capped(products * self.scale), rows, cols)

    def scores_log2(self, products: Tensor, rows: Span, cols: Span) -> Tensor:
        """``scores`` in base 2."""
        if not self.changes_scores:
            return products * (self.scale * LOG2_E)
        return self.scores(products, rows, cols) * LOG2_E

    def through_cap(self, ds: Tensor, products: Tensor) -> Tensor:
        """The gradient of scaled scores from that of capped ones: times 1 - tanh(score / c)^2."""
        if not self.softcap:
            return ds
        return ds * (1.0 - torch.tanh(products * self.scale / self.softcap).square())

    def sink_column(self, like: Tensor) -> Tensor:
        """The sinks as one more column of scores, for a tile of queries (batch, kv_heads, group * rows, d).

        -inf, which changes nothing, where there are none.
        """
        batch, kv_heads, rows, _ = like.shape
        if self.sinks is None:
            return like.new_full((batch, kv_heads, rows, 1), -torch.inf)
        group = self.sinks.shape[2]
        return self.sinks.expand(batch, kv_heads, group, rows // group, 1).flatten(2, 3)
