"""What is done to scores between Q K^T and P V beside scale and mask: softcap, ALiBi, functions, sinks, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.problem import SCORE_FEATURES
from cute_kernels.user_functions import NO_FUNCTIONS, UserFunctions
from hopper_attention import checks
from hopper_attention.checks import TensorSpec
from hopper_attention.dropout import WORDS, kept_steps
from hopper_attention.functions import NO_CAPTURED, CapturedFunctions, ListedKind, check_functions


class ScoreKind(NamedTuple):
    """What of it decides on a kernel: what there is, whatever its values. A tuple, as it is a part of keys.

    Attributes:
        has_softcap, has_alibi, has_sinks, has_dropout: whether ``Scores`` has each.
        functions: the user's, without the tensors that they read.
        listed: of lists of blocks, which only some kernels can go by; ``functions`` do without.
    """

    has_softcap: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    has_dropout: bool = False
    functions: UserFunctions = NO_FUNCTIONS
    listed: ListedKind = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that ask for what there is."""
        there = *self[:4], self.functions.has_score, self.functions.has_mask
        arguments = "softcap", "alibi_slopes", "sinks", "dropout_p", "score_mod", "mask_mod"
        named = zip(arguments, there, strict=True)
        return tuple(name for name, is_there in named if is_there)

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the config of a forward kernel."""
        return dict(zip((*SCORE_FEATURES, "functions"), self[:5], strict=True))


PLAIN = ScoreKind()
"""Scores go from Q K^T to the softmax as they are, but for scale and mask."""


@dataclass(frozen=True)
class ScoreSpec:
    """What can be known of ``Scores`` without reading a tensor.

    Attributes:
        softcap: c of c tanh(score / c); 0 is none.
        has_alibi, has_sinks: whether there are slopes and sinks.
        dropout_p: how much of P is dropped; 0 is nothing.
    """

    softcap: float = 0.0
    has_alibi: bool = False
    has_sinks: bool = False
    dropout_p: float = 0.0

    def __post_init__(self) -> None:
        checks.check_softcap(self.softcap)
        checks.check_dropout_p(self.dropout_p)

    @property
    def kind(self) -> ScoreKind:
        return ScoreKind(self.softcap != 0.0, self.has_alibi, self.has_sinks, self.dropout_p != 0.0)


@dataclass(frozen=True, eq=False)
class Scores:
    """Values of a call. A score s, scaled, becomes c tanh(s / c), then gets its bias; then the mask hides it or not.

    Attributes:
        softcap: c, above 0; 0 is none.
        alibi_slopes: float32 (heads,) or (batch, heads), or None: the bias of query i and key j is
            -slope |i + seqlen_k - seqlen_q - j|.
        sinks: (heads,), float32 or of q's dtype, of the output's where q is e4m3, or None: a logit of each head,
            natural log, that joins the sum of a row and has no value. The LSE includes it.
        dropout_p: how much of P is dropped, below 1; 0 is nothing. The LSE is that without dropout.
        philox: int64 (2,), seed and offset of the mask, or None without dropout.
    """

    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    philox: Tensor | None = None

    @classmethod
    def of(
        cls,
        softcap: float,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        dropout_p: float = 0.0,
        philox: Tensor | None = None,
    ) -> Scores:
        """These, or ``NO_SCORES`` itself where nothing is given, so that plain calls are told by identity."""
        if softcap == 0.0 and alibi_slopes is None and sinks is None and dropout_p == 0.0:
            return NO_SCORES
        return cls(softcap, alibi_slopes, sinks, dropout_p, philox)

    @property
    def captured(self) -> CapturedFunctions:
        """A user's functions."""
        return NO_CAPTURED

    @property
    def spec(self) -> ScoreSpec:
        return ScoreSpec(self.softcap, self.alibi_slopes is not None, self.sinks is not None, self.dropout_p)

    @property
    def kind(self) -> ScoreKind:
        return self.spec.kind._replace(functions=self.captured.functions, listed=self.captured.listed_kind)

    @property
    def options(self) -> dict[str, Any]:
        """By the names that the functions of ``reference`` take them."""
        of_scores = {"softcap": self.softcap, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        return of_scores | {"dropout_p": self.dropout_p, "philox": self.philox, "functions": self.captured}

    @property
    def values(self) -> tuple[float, Tensor | None, Tensor | None, float, Tensor | None]:
        """In the order in which operators take them, which take no functions."""
        return self.softcap, self.alibi_slopes, self.sinks, self.dropout_p, self.philox

    @property
    def changes(self) -> tuple[float, Tensor | None, Tensor | None]:
        """``values`` without those of dropout."""
        return self.softcap, self.alibi_slopes, self.sinks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are given."""
        own = (x for x in (self.alibi_slopes, self.sinks, self.philox) if x is not None)
        return *own, *self.captured.tensors

    def for_kernel(self, batch: int, heads: int) -> tuple[Any, ...]:
        """What a kernel takes: ``changes_for_kernel``, and of dropout ``philox``, contiguous, and ``kept_steps``. None
        for what there is not of these. Then the tensors that functions read."""
        return *self._without_functions(batch, heads), *self.captured.for_kernel

    def _without_functions(self, batch: int, heads: int) -> tuple[Any, ...]:
        philox = self.philox
        dropout = (None, None) if philox is None else (philox.contiguous(), kept_steps(self.dropout_p))
        return *self.changes_for_kernel(batch, heads), *dropout

    def changes_for_kernel(self, batch: int, heads: int) -> tuple[Any, ...]:
        """Softcap; the slopes, float32 (batch, heads), the last stride 1; and the sinks, float32 (heads,), contiguous.
        None for what there is not."""
        cap, slopes, sinks = self.softcap or None, self.alibi_slopes, self.sinks
        if slopes is not None:
            slopes = slopes.detach().contiguous().expand(batch, heads)
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        return cap, slopes, sinks

    def for_listed_kernel(self, tile: tuple[int, int], sizes: tuple[int, int, int, int]) -> tuple[Any, ...]:
        """``for_kernel`` of one that goes by lists of blocks, which come last: what is read is that of the functions
        ``for_tiles``. ``tile`` and ``sizes`` are those of ``BlockTable.lists``."""
        ((_, table),) = self.captured.listed
        read = self.captured.for_tiles(tile).for_kernel
        return *self._without_functions(*sizes[:2]), *read, table.lists(tile, sizes)

    def for_gradient(self, batch: int, heads: int) -> tuple[Any, ...]:
        """What a backward kernel takes of ``for_kernel``: it finds the sinks in the LSE."""
        cap, slopes, _, *others = self.for_kernel(batch, heads)
        return cap, slopes, *others

    def for_listed_gradient(
        self, tile: tuple[int, int], sizes: tuple[int, int, int, int], least: int
    ) -> tuple[Any, ...]:
        """``for_gradient`` of a kernel that goes by lists of query tiles, which come last. ``tile``, ``sizes`` and
        ``least`` are those of ``BlockTable.query_lists``."""
        ((_, table),) = self.captured.listed
        cap, slopes, _, *dropout = self._without_functions(*sizes[:2])
        read = self.captured.for_tiles(tile).for_kernel
        return cap, slopes, *dropout, *read, table.query_lists(tile, sizes, least)


@dataclass(frozen=True, eq=False)
class FunctionScores(Scores):
    """The same with a user's functions, which get the score with its bias. (A class of its own, as torch.compile
    traces the other.)"""

    functions: CapturedFunctions = NO_CAPTURED

    @property
    def captured(self) -> CapturedFunctions:
        return self.functions


NO_SLOPES_GRADIENT = (
    "alibi_slopes requires a gradient, which is not implemented; use alibi_slopes.detach(), or "
    "hopper_attention.reference.attention_naive, which torch differentiates"
)

NO_SCORES = Scores()
"""The plain ones."""


def check_scores(scores: Scores, batch: int, heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError or TypeError unless the values fit a q of these sizes, dtype and device."""
    checks.check_softcap(scores.softcap)
    check_functions(scores.captured, device)
    if scores.alibi_slopes is not None:
        slopes = TensorSpec.of(scores.alibi_slopes)
        if slopes.dtype != torch.float32:
            raise TypeError(f"alibi_slopes has dtype {slopes.dtype}, allowed: torch.float32")
        # Not "in" a tuple of both, which torch.compile decides without asking what sizes it does not know are.
        if slopes.shape != (heads,) and slopes.shape != (batch, heads):
            raise ValueError(
                f"alibi_slopes has shape {tuple(slopes.shape)}, allowed: (heads,) or (batch, heads), "
                f"({heads},) or ({batch}, {heads})"
            )
        checks.check_device("alibi_slopes", slopes.device, device)
    if scores.sinks is not None:
        sinks = TensorSpec.of(scores.sinks)
        is_fp8 = dtype == checks.FP8_DTYPE
        own, whose = (checks.FP8_OUT_DTYPE, "of the output") if is_fp8 else (dtype, "of q")
        if sinks.dtype not in (torch.float32, own):
            raise TypeError(
                f"sinks has dtype {sinks.dtype}, allowed: torch.float32 or the dtype {whose}, {own}"
            )
        if tuple(sinks.shape) != (heads,):
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}, allowed: (heads,), ({heads},)")
        checks.check_device("sinks", sinks.device, device)
    if checks.check_dropout_p(scores.dropout_p):
        _check_philox(scores, device)


def _check_philox(scores: Scores, device: torch.device) -> None:
    if scores.philox is None:
        raise ValueError(
            f"philox is None, allowed with dropout_p {scores.dropout_p}: int64 (2,), seed and offset"
        )
    philox = TensorSpec.of(scores.philox)
    if philox.dtype != torch.int64:
        raise TypeError(f"philox has dtype {philox.dtype}, allowed: torch.int64")
    if tuple(philox.shape) != (WORDS,):
        raise ValueError(f"philox has shape {tuple(philox.shape)}, allowed: (2,), seed and offset")
    checks.check_device("philox", philox.device, device)


def check_slopes_are_constant(alibi_slopes: Tensor | None) -> None:
    """Raise NotImplementedError for slopes whose gradient autograd would record."""
    if alibi_slopes is not None and torch.is_grad_enabled() and alibi_slopes.requires_grad:
        raise NotImplementedError(NO_SLOPES_GRADIENT)


def sinks_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, of their shape and dtype, from what a forward pass leaves.

    With p = exp(sink - lse), what the sink has of a row: -sum over rows of p (rowsum(dout * out) - dlse). It is
    computed in float32, or float64 if the LSE is. Rows whose LSE is -inf, as those of no sequence, give nothing.

    Args:
        dout, out: (..., seqlen_q, heads, head_dim_v).
        dlse, lse: (..., heads, seqlen_q); no ``dlse`` means zero.
        sinks: (heads,).
    """
    accum = lse.dtype
    delta = (dout.to(accum) * out.to(accum)).sum(-1).mT
    if dlse is not None:
        delta = delta - dlse
    shares = torch.exp(sinks.to(accum)[:, None] - lse)
    terms = (shares * delta).masked_fill(lse == -torch.inf, 0.0)
    return -terms.movedim(-2, 0).flatten(1).sum(1).to(sinks.dtype)
