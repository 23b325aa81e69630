"""FlashAttention-3's arguments for windows, scores and splits: what they ask of attention.

Many spellings ask for nothing more than attention with or without a causal mask, or are hints that change no result.
Windows become a ``MaskSpec``, what is done to scores ``Scores``. What no backend has raises NotImplementedError by
name.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hopper_attention import checks
from hopper_attention.checks import FP8_DTYPE, FP8_OUT_DTYPE, FULL_WINDOW
from hopper_attention.dropout import draw_philox
from hopper_attention.functions import MaskMod, ScoreMod, trace_block_mask, trace_functions
from hopper_attention.masks import (
    CAUSAL_MASK,
    NO_MASK,
    UNLIMITED,
    MaskSpec,
    check_window_lengths,
)
from hopper_attention.plain_calls import PLAIN_TENSORS, is_plain_moment, is_transformed
from hopper_attention.scores import FunctionScores, Scores, check_slopes_are_constant

MISSING_IN_FP8 = {
    "dropout_p": "dropout of P",
    "score_mod": "a function of the scores",
    "mask_mod": "a function as a mask",
}
"""Arguments for scores that e4m3 tensors do not go with, and what they ask for."""

REMEMBERED_MASKS = 4096
"""Windows and bounds of lengths whose masks are kept."""

ALLOWED_WINDOWS = (
    "a pair (left, right) of ints from -1, or None for a side without a limit; (-1, -1) is no window"
)


def resolve_mask(
    q: Any,
    k: Any,
    causal: bool,
    *,
    window_size: Any = FULL_WINDOW,
    attention_chunk: Any = 0,
    num_splits: Any = 1,
    pack_gqa: Any = None,
) -> MaskSpec:
    """The mask of dense attention with these arguments, in its canonical form.

    Args:
        q, k: (batch, seqlen, heads, head_dim); of both the sequence length is read, and nothing else.
        causal: what the caller asked for by name. A window with none of the keys after a query's own is causal as well.
        others: as for :func:`hopper_attention.flash_attn_func`.

    Raises:
        NotImplementedError: an argument asks for a feature that no backend has.
        ValueError, TypeError: an argument has no meaning.
    """
    check_hints(num_splits, pack_gqa)
    if is_full(window_size) and not is_given(attention_chunk, 0):
        return CAUSAL_MASK if causal else NO_MASK
    checks.check_are_tensors(q=q, k=k)
    checks.check_dimensions("q", q.shape)
    checks.check_dimensions("k", k.shape)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    chunk = _read_count("attention_chunk", attention_chunk)
    if chunk and seqlen_q <= seqlen_k <= chunk:
        # All keys are in a chunk, and so are all queries.
        chunk = 0
    return mask_of_window(window_size, causal, seqlen_q, seqlen_k, chunk)


def mask_of_window(
    window_size: Any, causal: bool, seqlen_q: int, seqlen_k: int, attention_chunk: int = 0
) -> MaskSpec:
    """The canonical mask of a ``window_size`` and a chunk, for sequences of at most these lengths.

    Raises:
        ValueError, TypeError: it is no pair of sides.
        NotImplementedError: the sequences are too long for a window.
    """
    window = read_window(window_size)
    mask = MaskSpec.canonical(causal, *window, seqlen_q, seqlen_k, attention_chunk)
    check_window_lengths(mask, seqlen_q, seqlen_k)
    return mask


def resolve_packed_mask(
    causal: bool, window_size: Any, attention_chunk: Any, max_seqlen_q: int, max_seqlen_k: int
) -> MaskSpec:
    """``resolve_mask`` of sequences of different lengths, which are at most these.

    Raises:
        NotImplementedError: a window or a chunk is given for too long ones.
        ValueError, TypeError: an argument has no meaning.
    """
    if is_full(window_size) and not is_given(attention_chunk, 0):
        return CAUSAL_MASK if causal else NO_MASK
    chunk = _read_count("attention_chunk", attention_chunk)
    return mask_of_window(window_size, causal, max_seqlen_q, max_seqlen_k, chunk)


def with_mask(
    options: tuple[Any, ...], window: tuple[Any, Any], max_seqlen_q: int, max_seqlen_k: int
) -> tuple[Any, ...] | None:
    """``options`` of a call that may be like an earlier one, with causal and sides of its ``resolve_packed_mask``,
    looked up: making a mask takes longer than all else that is read of such a call. As they are without a window.

    None if a window is said by other than plain numbers, or has no meaning, which is left to those who check it.

    Args:
        options: causal, which comes first, and others; sides that hide keys are put behind.
        window: window_size and attention_chunk.
    """
    window_size, attention_chunk = window
    if is_full(window_size) and not is_given(attention_chunk, 0):
        return options
    causal, *others = options
    if not is_constant(window_size) or type(attention_chunk) is not int:
        return None
    if type(causal) not in (bool, int) or causal not in (0, 1):
        return None
    mask = _mask_of_constants(bool(causal), window_size, attention_chunk, max_seqlen_q, max_seqlen_k)
    return None if mask is None else (mask[0], *others, *mask[1:])


@lru_cache(maxsize=REMEMBERED_MASKS)
def _mask_of_constants(causal: bool, window_size: Any, *numbers: int) -> tuple[Any, ...] | None:
    """causal, and sides if they hide keys."""
    try:
        mask = resolve_packed_mask(causal, window_size, *numbers)
    except (TypeError, ValueError, NotImplementedError):
        return None
    return (mask.causal, mask.sides) if mask.has_window else (mask.causal,)


def hides_keys(causal: bool, window_size: Any, attention_chunk: Any) -> bool:
    """Whether a causal mask, a window or a chunk is asked for, even one that hides nothing of short sequences.

    Raises:
        ValueError, TypeError: an argument has no meaning.
    """
    has_window = not is_full(window_size) and read_window(window_size) != FULL_WINDOW
    return causal or has_window or _read_count("attention_chunk", attention_chunk) > 0


def resolve_scores(softcap: Any, alibi_slopes: Any, sinks: Any) -> Scores:
    """What is done to scores with these arguments; ``check_scores`` says whether it fits a q.

    Raises:
        ValueError, TypeError: an argument has no meaning.
        NotImplementedError: the gradient of the slopes would be wanted.
    """
    given = {"alibi_slopes": alibi_slopes, "sinks": sinks}
    checks.check_are_tensors(**{name: x for name, x in given.items() if x is not None})
    check_slopes_are_constant(alibi_slopes)
    return Scores.of(checks.check_softcap(softcap), alibi_slopes, sinks)


def sinks_in_float32(q: Any, sinks: Any) -> Any:
    """Sinks as kernels take them: a copy of those of 16 bits, so that a call on ``q`` is found again.

    They stay what they are where their gradient is wanted, where tensors are no plain ones, and where their dtype does
    not go with q: such calls are read and checked as any other."""
    if type(sinks) not in PLAIN_TENSORS or type(q) not in PLAIN_TENSORS or not is_plain_moment():
        return sinks
    of_output = FP8_OUT_DTYPE if q.dtype == FP8_DTYPE else q.dtype
    if (sinks.requires_grad and torch.is_grad_enabled()) or sinks.dtype not in (torch.float32, of_output):
        return sinks
    return sinks if type(sinks) is Tensor and sinks.dtype == torch.float32 else sinks.detach().float()


def with_functions(
    scores: Scores,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    block_mask: Any = None,
    qv: Any = None,
) -> Scores:
    """The same with a user's functions, traced.

    Raises:
        NotImplementedError: torch.func transforms the call, a function reads a tensor that requires a gradient, or
            there is a second query.
        TypeError: a function cannot be traced, or block_mask is none.
        ValueError: there are a mask_mod and a block_mask.
    """
    if qv is not None:
        feature = "a second query with score_mod, mask_mod or block_mask"
        raise missing("qv", "given", feature, "qv=None, or concatenate it to q and v to k")
    if is_transformed():
        raise NotImplementedError(
            "score_mod and mask_mod under torch.func (vmap, grad, jvp) are not implemented; use Tensor.backward, or "
            "hopper_attention.reference.attention_naive, which torch differentiates in every mode"
        )
    if block_mask is None:
        return FunctionScores(*scores.values, trace_functions(score_mod, mask_mod))
    if mask_mod is not None:
        raise ValueError(
            "mask_mod is given beside block_mask, allowed: one of them; block_mask has a mask_mod"
        )
    return FunctionScores(*scores.values, trace_block_mask(score_mod, block_mask))


def check_lists(scores: Scores, q: Any, k: Any) -> None:
    """Raise ValueError or TypeError unless a block_mask fits these (batch, seqlen, heads, head_dim)."""
    for _, table in scores.captured.listed:
        checks.check_are_tensors(q=q, k=k)
        checks.check_dimensions("q", q.shape)
        checks.check_dimensions("k", k.shape)
        table.check(q, k)


def with_dropout(
    scores: Scores, dropout_p: Any, q: Any, draw: Callable[[torch.device], Tensor] = draw_philox
) -> Scores:
    """These with dropout of P, for tensors on the device of q; ``draw`` gives what the mask is made of.

    Raises:
        ValueError, TypeError: the argument has no meaning.
        NotImplementedError: q is e4m3.
    """
    p = checks.check_dropout_p(dropout_p)
    if not p:
        return scores
    if scores.captured:
        raise missing("dropout_p", p, "dropout with score_mod, mask_mod or block_mask", "dropout_p=0.0")
    checks.check_are_tensors(q=q)
    check_fp8_scores(q.dtype, replace(scores, dropout_p=p))
    return replace(scores, dropout_p=p, philox=draw(q.device))


def check_fp8_scores(dtype: torch.dtype, scores: Scores) -> None:
    """Raise NotImplementedError for e4m3 tensors with dropout or with functions of scores."""
    if dtype == FP8_DTYPE and (scores.dropout_p or scores.captured):
        name = next(name for name in scores.kind.names if name in MISSING_IN_FP8)
        value, default = (scores.dropout_p, 0.0) if name == "dropout_p" else ("given", None)
        feature = f"{MISSING_IN_FP8[name]} of {FP8_DTYPE} tensors"
        raise missing(name, value, feature, f"16-bit tensors, or {name}={default}")


def check_hints(num_splits: Any, pack_gqa: Any) -> None:
    """Raise for hints that have no meaning.

    They say how FlashAttention-3 shares out its work: none changes what is computed, and no kernel here needs one.
    """
    if num_splits is not None:
        _read_count("num_splits", num_splits)
    if pack_gqa is not None:
        checks.check_flag("pack_gqa", pack_gqa)


def are_plain_hints(num_splits: Any, pack_gqa: Any) -> bool:
    """Whether ``check_hints`` lets these pass, by their types alone; False says nothing."""
    is_count = num_splits is None or (type(num_splits) is int and num_splits >= 0)
    return is_count and (pack_gqa is None or type(pack_gqa) is bool)


def is_given(value: Any, default: float) -> bool:
    """Whether ``value`` is other than a number that asks for nothing, whose type it has. Nothing else is compared, as
    an array or a tensor may not give a truth value."""
    return type(value) is not type(default) or value != default


def is_full(window_size: Any) -> bool:
    """Whether a ``window_size`` is the default, which hides nothing."""
    return window_size is FULL_WINDOW or (is_constant(window_size) and window_size == FULL_WINDOW)


def is_constant(window_size: Any) -> bool:
    """Whether a ``window_size`` says all by its value: nothing of it can be another number in a later call."""
    if window_size is FULL_WINDOW:
        return True
    return type(window_size) is tuple and all(side is None or type(side) is int for side in window_size)


def read_window(window_size: Any) -> tuple[int, int]:
    """(left, right) of a ``window_size``, -1 for a side without a limit.

    Raises:
        ValueError, TypeError: it is no pair of sides.
    """
    if isinstance(window_size, Tensor) and (window_size.is_meta or window_size.layout != torch.strided):
        raise TypeError(
            f"window_size is a tensor on {window_size.device} of layout {window_size.layout}, which has no numbers to "
            f"read, allowed: {ALLOWED_WINDOWS}"
        )
    sides = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"window_size is {window_size!r}, allowed: {ALLOWED_WINDOWS}")
    left, right = (_read_side(side, window_size) for side in sides)
    return left, right


def _read_side(side: Any, window_size: Any) -> int:
    if side is None:
        return UNLIMITED
    try:
        side = side if isinstance(side, int) else operator.index(side)
    except TypeError:
        raise TypeError(f"window_size is {window_size!r}, allowed: {ALLOWED_WINDOWS}") from None
    if side < UNLIMITED:
        raise ValueError(f"window_size is {window_size!r}, allowed: {ALLOWED_WINDOWS}")
    return side


def _read_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral)):
        raise TypeError(f"{name} is a {type(value).__name__}, {value!r}, allowed: an int")
    count = int(value)
    if count < 0:
        raise ValueError(f"{name} is {count}, allowed: 0 or more")
    return count


def missing(name: str, value: Any, feature: str, instead: str) -> NotImplementedError:
    """The error for an argument whose feature no backend has yet."""
    return NotImplementedError(
        f"{name} is {value}: {feature} is not implemented yet, neither by the kernels nor by "
        f"'reference'; use {instead}"
    )
