"""Softcap, ALiBi, a user's functions and sinks on tiles of folded heads, for every computation of the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention.reference.function_terms import NO_FUNCTION_TERMS, NoFunctions
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
        functions: the user's, for the scores that the others leave.
    """

    scale: float
    softcap: float
    slopes: Tensor | None
    sinks: Tensor | None
    shift: int
    functions: NoFunctions = NO_FUNCTION_TERMS

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        dtype: torch.dtype,
        scale: float,
        softcap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None = None,
        functions: NoFunctions = NO_FUNCTION_TERMS,
    ) -> ScoreTerms:
        """With (heads,) or (batch, heads) slopes and (heads,) sinks, computed with in ``dtype``."""

        def fold(x: Tensor | None) -> Tensor | None:
            """(heads,) or (batch, heads) -> (batch or 1, kv_heads, group, 1, 1)."""
            return None if x is None else x.to(dtype).reshape(-1, shape.kv_heads, shape.group, 1, 1)

        shift = shape.seqlen_k - shape.seqlen_q
        return cls(scale, softcap, fold(alibi_slopes), fold(sinks), shift, functions)

    @property
    def changes_scores(self) -> bool:
        """Whether a score is more than its scaled product."""
        return self.softcap != 0.0 or self.slopes is not None or self.functions.changes_scores

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
        return self.functions.changed(self._before_functions(products, rows, cols), rows, cols)

    def _before_functions(self, products: Tensor, rows: Span, cols: Span) -> Tensor:
        return self.biased(self.capped(products * self.scale), rows, cols)

    def scores_log2(self, products: Tensor, rows: Span, cols: Span) -> Tensor:
        """``scores`` in base 2."""
        if not self.changes_scores:
            return products * (self.scale * LOG2_E)
        return self.scores(products, rows, cols) * LOG2_E

    def visible(self, visible: Tensor | None, rows: Span, cols: Span) -> Tensor | None:
        """Of what a mask lets these queries see of these keys, None being all, what the user's function does too."""
        return self.functions.visible(visible, rows, cols)

    def through_changes(self, ds: Tensor, products: Tensor, rows: Span, cols: Span) -> Tensor:
        """The gradient of scaled scores from that of what the softmax takes: times the slope of a score function, and
        under a softcap times 1 - tanh(score / c)^2. ``products`` are Q K^T."""
        if self.functions.changes_scores:
            ds = ds * self.functions.slope(self._before_functions(products, rows, cols), rows, cols)
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
