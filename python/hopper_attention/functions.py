"""A user's score and mask functions, traced, with the tensors that they read: values of one call."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels.user_functions import BOOL, FLOAT, INPUTS, NO_FUNCTIONS, NOTHING, UserFunctions
from hopper_attention import compiled
from hopper_attention.block_masks import BlockTable, is_divided, is_no_mask
from hopper_attention.tracing import TensorReads, Trace, Value

ScoreMod = Callable[..., Any]
"""(score, b, h, q_idx, kv_idx) -> score, as FlexAttention's (torch.nn.attention.flex_attention): of a scaled score."""

MaskMod = Callable[..., Any]
"""(b, h, q_idx, kv_idx) -> whether the query sees the key, as FlexAttention's."""

ListedKind = tuple[tuple[UserFunctions, tuple[int, int]], ...]
"""What of a BlockMask decides on a kernel that visits lists of blocks: the functions for blocks that are seen in part,
and the queries and keys of a block. Empty without a BlockMask."""


@dataclass(frozen=True, eq=False)
class CapturedFunctions:
    """What was traced, and the tensors that its steps load from, by number. ``bool`` is False where nothing was.

    ``functions`` do on any kernel: the table of a BlockMask, if there is one, is part of their mask function.
    ``listed`` is empty, or of one: the functions without that table, and the table, for a kernel that visits listed
    blocks alone.
    """

    functions: UserFunctions = NO_FUNCTIONS
    tensors: tuple[Tensor, ...] = ()
    listed: tuple[tuple[CapturedFunctions, BlockTable], ...] = ()

    def __bool__(self) -> bool:
        # Written out: torch.compile does not follow bool() of a frozen dataclass in every release.
        return self.functions.steps != ()

    @property
    def for_kernel(self) -> tuple[Tensor, ...]:
        """The tensors as kernels take them: truth values as bytes."""
        return tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in self.tensors)

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """All tensors that a backward pass needs, as ``with_saved`` takes them."""
        of_lists = (x for captured, table in self.listed for x in (table.kinds, *captured.tensors))
        return *self.tensors, *of_lists

    def with_saved(self, saved: tuple[Tensor, ...]) -> CapturedFunctions:
        """The same with these in place of its own."""
        own, of_lists = saved[: len(self.tensors)], saved[len(self.tensors) :]
        listed = tuple(
            (replace(captured, tensors=of_lists[1:]), replace(table, kinds=of_lists[0]))
            for captured, table in self.listed
        )
        return replace(self, tensors=own, listed=listed)

    def for_tiles(self, tile: tuple[int, int]) -> CapturedFunctions:
        """Those that say what is seen of a tile, (queries, keys), which a list calls seen in part: without the table
        where a tile is a part of one block."""
        for captured, table in self.listed:
            if is_divided(table.block, tile):
                return captured
        return self

    @property
    def listed_kind(self) -> ListedKind:
        return tuple((captured.functions, table.block) for captured, table in self.listed)


NO_CAPTURED = CapturedFunctions()


@compiled.disable
def trace_block_mask(score_mod: ScoreMod | None, block_mask: Any) -> CapturedFunctions:
    """``trace_functions`` with FlexAttention's BlockMask as the mask.

    Raises:
        TypeError: ``block_mask`` is no BlockMask, or as ``trace_functions``.
        NotImplementedError: as ``trace_functions``.
    """
    table = BlockTable.of(block_mask)
    mask_mod = (lambda *place: True) if is_no_mask(block_mask.mask_mod) else block_mask.mask_mod
    everywhere = trace_functions(score_mod, table.with_mask(mask_mod))
    return replace(everywhere, listed=((trace_functions(score_mod, mask_mod), table),))


@compiled.disable
def trace_functions(score_mod: ScoreMod | None, mask_mod: MaskMod | None) -> CapturedFunctions:
    """Call each function once, on values that stand for those of an element of S.

    This is done at every call of attention, so that a number or a tensor that a function captures counts as it is now.
    What was traced is data: functions that do the same share a kernel, whoever made them and however often.

    Raises:
        TypeError: a function does what cannot be traced, or gives no value.
        NotImplementedError: it reads a tensor that requires a gradient.
        ValueError: it reads a tensor without elements.
        IndexError: it gives more indices to a tensor than that has dimensions.
    """
    trace = Trace()
    b, h, q_idx, kv_idx = (trace.input(name) for name in ("b", "h", "q_idx", "kv_idx"))
    score = mask = NOTHING
    with TensorReads():
        if score_mod is not None:
            given = trace.input("score"), b, h, q_idx, kv_idx
            score = _call(trace, "score_mod", score_mod, given, FLOAT).number
        if mask_mod is not None:
            mask = _call(trace, "mask_mod", mask_mod, (b, h, q_idx, kv_idx), BOOL).number
    functions = UserFunctions(tuple(trace.steps.all), score, mask, NOTHING, trace.kinds)
    return CapturedFunctions(functions, tuple(trace.tensors))


def _call(trace: Trace, name: str, function: Any, given: tuple[Value, ...], kind: str) -> Value:
    names = tuple(INPUTS)[-len(given) :]
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, allowed: a function of {names}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some functions that are not written in Python have none.
        signature = inspect.Signature([inspect.Parameter("given", inspect.Parameter.VAR_POSITIONAL)])
    try:
        signature.bind(*given)
    except TypeError as error:
        raise TypeError(f"{name} takes {signature} ({error}), allowed: a function of {names}") from None
    trace.name = name
    result = function(*given)
    if not isinstance(result, (Value, numbers.Real, Tensor)):
        raise TypeError(
            f"{name} gives a {type(result).__name__}, allowed: what it worked out of its arguments"
        )
    return trace.cast(trace.value(result), kind)


def check_functions(captured: CapturedFunctions, device: torch.device) -> None:
    """Raise ValueError unless the captured tensors are on the device of q."""
    for x in captured.tensors:
        if x.device != device:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} that score_mod or mask_mod reads is on {x.device}, allowed: the "
                f"device of q, {device}"
            )
