"""Works out a user's functions in a kernel: each step once for all elements that share its value."""

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_kernels.integers import maximum, minimum
from cute_kernels.invariant import LoopInvariant
from cute_kernels.user_functions import BOOL, FLOAT, INT, NOTHING, Step, UserFunctions, dependencies

LOG2_E = math.log2(math.e)

Known = MutableMapping[int, Any]
"""Values of steps, by their numbers."""


@cute.jit
def select(condition: Boolean, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``, of one type: both are worked out."""
    return a if condition else b


class FunctionValues(LoopInvariant):
    """The functions for one head of one sequence.

    A thread holds two rows of a tile, here lines, since they are queries in a forward kernel and keys in a backward
    one: ``along`` is the input that has one value in a line, "q_idx" or "kv_idx". A step is worked out at one of four
    levels, by the inputs that it depends on:

    - "shared", once: on none, or on ``b`` and ``h`` alone, which ``place`` gives;
    - "line", by ``on_line``, once for a line: on ``along`` besides;
    - "across", by ``across``, once for what crosses the lines, so for both of them: on the other index besides;
    - "element", by ``at``: on both indices, or on the score.

    ``tensors`` are those that the steps load from. ``with_slope`` adds the derivative of the score function.
    """

    def __init__(
        self,
        functions: UserFunctions,
        tensors: tuple,
        place: tuple[Int32, Int32],
        along: str,
        with_slope: bool = False,
    ):
        self.functions = functions.with_slope() if with_slope else functions
        self.tensors, self.along = tensors, along
        self._across = "q_idx" if along == "kv_idx" else "kv_idx"
        self._order = self._sort_out()
        self._shared: Known = {}
        b, h = place
        self._work_out("shared", self._shared, {"b": b, "h": h})

    def without_mask(self) -> "FunctionValues":
        """The same without the mask function, for where all is seen."""
        values = copy(self)
        values.functions = replace(self.functions, mask=NOTHING)
        values._order = values._sort_out()
        return values

    @property
    def outputs(self) -> tuple[int, ...]:
        """Numbers of the steps that are asked for: new score, slope and mask, as far as there are any."""
        f = self.functions
        return tuple(step for step in (f.score, f.slope, f.mask) if step != NOTHING)

    def on_line(self, index: Int32) -> Known:
        """What depends on the line alone: that of query, or key, ``index``."""
        known: Known = {}
        self._work_out("line", ChainMap(known, self._shared), {self.along: index})
        return known

    def across(self, index: Int32) -> Known:
        """What depends on the other index alone: key, or query, ``index``."""
        known: Known = {}
        self._work_out("across", ChainMap(known, self._shared), {self._across: index})
        return known

    def at(self, line: Known, across: Known, score: Float32) -> Mapping[int, Any]:
        """All outputs at the element where both meet. ``score`` is scaled, in base e."""
        known = ChainMap({}, line, across, self._shared)
        self._work_out("element", known, {"score": score})
        return known

    def _sort_out(self) -> dict[str, list[int]]:
        """Numbers of the steps that outputs need, in order, by level."""
        steps = self.functions.steps
        wanted = set(self.outputs)
        for number in reversed(range(len(steps))):
            if number in wanted:
                wanted |= set(step_arguments(steps[number]))
        order: dict[str, list[int]] = {"shared": [], "line": [], "across": [], "element": []}
        for number, needs in enumerate(dependencies(self.functions)):
            beside = needs - {"b", "h"}
            level = {
                frozenset(): "shared",
                frozenset([self.along]): "line",
                frozenset([self._across]): "across",
            }
            if number in wanted:
                order[level.get(beside, "element")].append(number)
        return order

    def _work_out(self, level: str, known: Known, inputs: dict[str, Any]) -> None:
        for number in self._order[level]:
            known[number] = self._value(self.functions.steps[number], known, inputs)

    def _value(self, step: Step, known: Known, inputs: dict[str, Any]) -> Any:
        operation, kind, *arguments = step
        if operation == "input":
            return inputs[arguments[0]]
        if operation == "constant":
            return constant(kind, arguments[0])
        if operation == "load":
            return load(self.tensors[arguments[0]], [known[i] for i in arguments[1:]], kind)
        values = [known[i] for i in arguments]
        if operation == "cast":
            return cast(values[0], self.functions.steps[arguments[0]][1], kind)
        table = OF_FLOATS if kind == FLOAT else OF_INTS
        return table[operation](*values) if operation in table else OF_ALL[operation](*values)


def step_arguments(step: Step) -> tuple[int, ...]:
    """The numbers of the steps that a step needs."""
    operation, _, *arguments = step
    if operation in ("input", "constant"):
        return ()
    return tuple(arguments[1:] if operation == "load" else arguments)


def constant(kind: str, text: str) -> Any:
    if kind == BOOL:
        return Boolean(text == "True")
    return Int32(int(text)) if kind == INT else Float32(float.fromhex(text))


def load(tensor: cute.Tensor, indices: list[Int32], kind: str) -> Any:
    """An element; an index outside of the tensor is clamped to its first or last."""
    inside = tuple(
        maximum(minimum(i, size - 1), Int32(0)) for i, size in zip(indices, tensor.shape, strict=True)
    )
    element = tensor[inside]
    if kind == BOOL:
        return element != cutlass.Uint8(0)
    return Int32(element) if kind == INT else Float32(element)


def cast(value: Any, source: str, kind: str) -> Any:
    if kind == BOOL:
        return value != (Float32(0.0) if source == FLOAT else Int32(0))
    if source == BOOL:
        value = select(value, Int32(1), Int32(0))
    return Float32(value) if kind == FLOAT else Int32(value)


def floor_divide(a: Int32, b: Int32) -> Int32:
    """Rounded down, where the traced division truncates."""
    quotient = a // b
    rest = a - quotient * b
    return select((rest != 0) & ((rest ^ b) < 0), quotient - 1, quotient)


def divide(a: Float32, b: Float32) -> Float32:
    """``div.full``: within 2 units in the last place. The correctly rounded quotient takes several times as long."""
    return cute.arch.inline_ptx(
        "div.full.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def float_floor_divide(a: Float32, b: Float32) -> Float32:
    """Of the correctly rounded quotient, so that whole numbers give what they should."""
    return cute.math.floor(a / b)


def exp(x: Float32) -> Float32:
    return cute.math.exp2(x * Float32(LOG2_E), fastmath=True)


def tanh(x: Float32) -> Float32:
    """1 - 2 / (1 + e^2x): the absolute error is some last bits of 1, and so the relative one grows towards x = 0."""
    return Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(Float32(1.0) + exp(x + x))


def negate(condition: Any) -> Any:
    return condition ^ Boolean(True) if isinstance(condition, Boolean) else ~condition


OF_FLOATS: dict[str, Callable[..., Any]] = {
    "div": divide,
    "floordiv": float_floor_divide,
    "mod": lambda a, b: a - b * float_floor_divide(a, b),
    "min": cute.arch.fmin,
    "max": cute.arch.fmax,
    "abs": lambda x: cute.arch.fmax(x, -x),
    "exp": exp,
    "log": lambda x: cute.math.log2(x, fastmath=True) * Float32(math.log(2.0)),
    "sqrt": lambda x: cute.math.sqrt(x, fastmath=True),
    "tanh": tanh,
    "floor": lambda x: cute.math.floor(x),
}

OF_INTS: dict[str, Callable[..., Any]] = {
    "floordiv": floor_divide,
    "mod": lambda a, b: a - b * floor_divide(a, b),
    "min": minimum,
    "max": maximum,
    "abs": lambda x: maximum(x, -x),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": negate,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
}
"""Operations of integers and of truth values."""

OF_ALL: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda x: -x,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "where": select,
}
