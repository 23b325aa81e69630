"""A user's score and mask functions on tiles of folded heads, on any torch device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cute_kernels.user_functions import BOOL, FLOAT, INT, UserFunctions
from hopper_attention.functions import CapturedFunctions, MaskMod, ScoreMod
from hopper_attention.reference.tiles import Span
from hopper_attention.shapes import AttentionShape


class Positions(NamedTuple):
    """int32 tensors that broadcast to a tile, (batch, kv_heads, group * rows, cols)."""

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor


@dataclass(frozen=True)
class Places:
    """Numbers of head, query, key and sequence in the tiles of a problem; ``first`` is that of its first sequence."""

    shape: AttentionShape
    device: torch.device
    first: int = 0

    def of(self, rows: Span, cols: Span) -> Positions:
        s = self.shape

        def count(*bounds: int) -> Tensor:
            return torch.arange(*bounds, dtype=torch.int32, device=self.device)

        heads = (
            count(s.heads).reshape(1, s.kv_heads, s.group, 1, 1).expand(-1, -1, -1, rows.stop - rows.start, 1)
        )
        return Positions(
            count(self.first, self.first + s.batch).reshape(-1, 1, 1, 1),
            heads.flatten(2, 3),
            count(*rows).repeat(s.group)[None, None, :, None],
            count(*cols)[None, None, None, :],
        )


class NoFunctions:
    """Scores stay as they are, and hide nothing."""

    changes_scores = False

    def changed(self, scores: Tensor, rows: Span, cols: Span) -> Tensor:
        """Scores, natural units, as the score function has them."""
        return scores

    def slope(self, scores: Tensor, rows: Span, cols: Span) -> Tensor | float:
        """The derivative of the score function at these scores."""
        return 1.0

    def visible(self, visible: Tensor | None, rows: Span, cols: Span) -> Tensor | None:
        """What is seen, None if all, less what the mask function hides."""
        return visible


@dataclass(frozen=True)
class TracedFunctions(NoFunctions):
    """Works out the steps that kernels do, in the dtype of the scores."""

    captured: CapturedFunctions
    places: Places

    @property  # in the place of a class attribute, which mypy does not take
    def changes_scores(self) -> bool:  # type: ignore[override]
        return self.captured.functions.has_score

    def changed(self, scores: Tensor, rows: Span, cols: Span) -> Tensor:
        f = self.captured.functions
        if not f.has_score:
            return scores
        # A function that leaves the score out gives what only broadcasts to it.
        return self._value(f, f.score, scores, rows, cols).expand_as(scores)

    def slope(self, scores: Tensor, rows: Span, cols: Span) -> Tensor | float:
        f = self.captured.functions.with_slope()
        return self._value(f, f.slope, scores, rows, cols) if f.has_score else 1.0

    def visible(self, visible: Tensor | None, rows: Span, cols: Span) -> Tensor | None:
        f = self.captured.functions
        if not f.has_mask:
            return visible
        s, like = self.places.shape, torch.empty((), dtype=torch.float32, device=self.places.device)
        seen = self._value(f, f.mask, like, rows, cols)
        seen = seen.expand(s.batch, s.kv_heads, s.group * (rows.stop - rows.start), cols.stop - cols.start)
        return seen if visible is None else seen & visible

    def _value(self, functions: UserFunctions, step: int, scores: Tensor, rows: Span, cols: Span) -> Tensor:
        inputs = {"score": scores, **self.places.of(rows, cols)._asdict()}
        return work_out(functions, step, inputs, self.captured.tensors)


@dataclass(frozen=True)
class PartOfTensor:
    """A tensor with fewer indices than dimensions so far, of which one is that of a tile."""

    tensor: Tensor
    indices: tuple[Any, ...]

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return self.tensor[(*self.indices, *more)]


class IndicesInTurn(TorchFunctionMode):
    """While it is active, ``tensor[i][j]`` is ``tensor[i, j]`` for indices of tiles, as it is for single numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            indices = index if isinstance(index, tuple) else (index,)
            of_tile = any(isinstance(x, Tensor) and x.dim() == len(Positions._fields) for x in indices)
            if of_tile and len(indices) < tensor.dim():
                return PartOfTensor(tensor, indices)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class PlainFunctions(NoFunctions):
    """Calls the functions themselves, on tensors. torch can differentiate that."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    places: Places

    @property  # in the place of a class attribute, which mypy does not take
    def changes_scores(self) -> bool:  # type: ignore[override]
        return self.score_mod is not None

    def changed(self, scores: Tensor, rows: Span, cols: Span) -> Tensor:
        if self.score_mod is None:
            return scores
        with IndicesInTurn():
            changed = self.score_mod(scores, *_long(self.places.of(rows, cols)))
        return torch.as_tensor(changed, device=scores.device).to(scores.dtype).expand_as(scores)

    def visible(self, visible: Tensor | None, rows: Span, cols: Span) -> Tensor | None:
        if self.mask_mod is None:
            return visible
        s = self.places.shape
        with IndicesInTurn():
            said = self.mask_mod(*_long(self.places.of(rows, cols)))
        seen = torch.as_tensor(said, device=self.places.device)
        seen = seen.expand(s.batch, s.kv_heads, s.group * (rows.stop - rows.start), cols.stop - cols.start)
        return seen if visible is None else seen & visible


NO_FUNCTION_TERMS = NoFunctions()


def terms_of(
    captured: CapturedFunctions, shape: AttentionShape, device: torch.device, sequence: int
) -> NoFunctions:
    """Of traced functions, if there are any; ``sequence`` is the number of the first."""
    return TracedFunctions(captured, Places(shape, device, sequence)) if captured else NO_FUNCTION_TERMS


def _long(positions: Positions) -> tuple[Tensor, ...]:
    """As torch indexes with them everywhere."""
    return tuple(x.long() for x in positions)


def work_out(
    functions: UserFunctions, wanted: int, inputs: dict[str, Tensor], tensors: tuple[Tensor, ...]
) -> Tensor:
    """The value of a step, a tensor that broadcasts with the inputs; floats in the dtype of ``inputs["score"]``."""
    score = inputs["score"]
    dtypes = {FLOAT: score.dtype, INT: torch.int32, BOOL: torch.bool}
    known: list[Tensor] = []
    for operation, kind, *arguments in functions.steps[: wanted + 1]:
        if operation == "input":
            value = inputs[arguments[0]]
        elif operation == "constant":
            value = torch.tensor(_number(kind, arguments[0]), dtype=dtypes[kind], device=score.device)
        elif operation == "load":
            value = _load(tensors[arguments[0]], [known[i] for i in arguments[1:]]).to(dtypes[kind])
        elif operation == "cast":
            value = known[arguments[0]].to(dtypes[kind])
        else:
            value = OPERATIONS[operation](*(known[i] for i in arguments))
        known.append(value)
    return known[wanted]


def _number(kind: str, text: str) -> float | int | bool:
    return float.fromhex(text) if kind == FLOAT else int(text) if kind == INT else text == "True"


def _load(tensor: Tensor, indices: list[Tensor]) -> Tensor:
    """Elements; an index outside of the tensor is clamped to its first or last."""
    sizes = zip(indices, tensor.shape, strict=True)
    return tensor[tuple(index.clamp(0, size - 1).long() for index, size in sizes)]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "floor": torch.floor,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "where": torch.where,
}
