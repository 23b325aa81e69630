"""What a call of torch's attention is of beside its tensors, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.reference.tiles import Mask, Span


@dataclass(frozen=True, eq=False)
class Terms:
    """Mask, scale, and what is done to scores.

    Attributes:
        causal: whether the mask is, aligned bottom-right.
        scale: factor of the scores.
        sides: window_left, window_right and attention_chunk, as ``MaskSpec.sides``.
        softcap, alibi_slopes, sinks: as in ``Scores``.
    """

    causal: bool
    scale: float
    sides: Sides = FULL_SIDES
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention can do it, in pieces: no window, and scores as they are."""
        return self.sides == FULL_SIDES and self.has_plain_scores

    @property
    def has_plain_scores(self) -> bool:
        """Whether nothing but a mask is done to them."""
        return not self.softcap and self.alibi_slopes is None

    @property
    def options(self) -> dict[str, Any]:
        """By the names that ``tiled_backward`` takes them; ``tiled_forward`` takes ``sinks`` too."""
        sides = dict(zip(("window_left", "window_right", "attention_chunk"), self.sides, strict=True))
        changes = {"softcap": self.softcap, "alibi_slopes": self.alibi_slopes}
        return {"causal": self.causal, "softmax_scale": self.scale, **sides, **changes}

    def keys_of_one(self, seqlen_k: int) -> slice:
        """The keys that the only query sees, of so many."""
        spans = Mask(1, seqlen_k, self.causal, *self.sides).key_tiles(Span(0, 1), seqlen_k)
        return spans[0].slice if spans else slice(0, 0)

    @property
    def without_mask(self) -> Terms:
        """The same, with every key seen."""
        return replace(self, causal=False, sides=FULL_SIDES)

    def of_sequence(self, b: int) -> Terms:
        """Those of one sequence of a batch: slopes of (batch, heads) become its own."""
        if self.alibi_slopes is None or self.alibi_slopes.ndim == 1:
            return self
        return replace(self, alibi_slopes=self.alibi_slopes[b])
