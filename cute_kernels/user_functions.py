"""A user's score and mask functions as data: steps, each of which works out one value from those before it.

Nothing here imports the DSL or torch. What traces a Python function into this is on the host; ``function_values``
works it out in a kernel.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache

FLOAT, INT, BOOL = "float", "int", "bool"
"""Kinds of values: float32, int32, and a truth value."""

INPUTS = {"score": FLOAT, "b": INT, "h": INT, "q_idx": INT, "kv_idx": INT}
"""Arguments of FlexAttention's score_mod (score, b, h, q_idx, kv_idx) and mask_mod (b, h, q_idx, kv_idx), and their
kinds. q_idx and kv_idx count from the first of their sequence."""

NOTHING = -1
"""Stands for the number of a step that is not there."""

Step = tuple
"""(operation, kind, *arguments). Arguments are numbers of earlier steps, but for

- "input": a name of ``INPUTS``;
- "constant": the value as text, of a float as ``float.hex`` gives it, so that 1, 1.0 and True differ, and so do zeros;
- "load": the number of a tensor, then those of the steps of its indices.
"""


@dataclass(frozen=True)
class TensorKind:
    """What of a captured tensor decides on a kernel: the name of its dtype, and how many dimensions it has, 1 or
    more."""

    dtype: str
    dimensions: int


@dataclass(frozen=True)
class UserFunctions:
    """A score function, a mask function, or both. ``bool`` is False where there is neither.

    Attributes:
        steps: what both functions do, each step after those that it needs.
        score: number of the step that gives the new score; NOTHING without a score function.
        mask: number of the step that says whether the query sees the key; NOTHING without a mask function.
        slope: number of the step that gives the derivative of the new score by the old one; NOTHING before
            ``with_slope``.
        tensors: kinds of the tensors that the steps load from, by number.
    """

    steps: tuple[Step, ...] = ()
    score: int = NOTHING
    mask: int = NOTHING
    slope: int = NOTHING
    tensors: tuple[TensorKind, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def has_score(self) -> bool:
        return self.score != NOTHING

    @property
    def has_mask(self) -> bool:
        return self.mask != NOTHING

    @property
    def bends(self) -> bool:
        """Whether dS needs a factor: the derivative of the score function is not 1 everywhere, as that of a bias is."""
        return self.has_score and slope_step(self) != ONE

    @property
    def name(self) -> str:
        """A short digest of these functions, part of a config's name; empty for none."""
        return _digest(self) if self else ""

    def with_slope(self) -> UserFunctions:
        """These with the step of the derivative, if there is a score function."""
        return _differentiated(self) if self.has_score else self


NO_FUNCTIONS = UserFunctions()
ONE: Step = ("constant", FLOAT, (1.0).hex())
ZERO: Step = ("constant", FLOAT, (0.0).hex())


@lru_cache(maxsize=256)
def _digest(functions: UserFunctions) -> str:
    return "fn" + hashlib.sha256(repr(functions).encode()).hexdigest()[:20]


def slope_step(functions: UserFunctions) -> Step:
    """The step with the derivative of the score function."""
    differentiated = functions.with_slope()
    return differentiated.steps[differentiated.slope]


@lru_cache(maxsize=256)
def _differentiated(functions: UserFunctions) -> UserFunctions:
    steps = Steps(list(functions.steps))
    slope = Derivative(steps).of(functions.score)
    return replace(functions, steps=tuple(steps.all), slope=slope)


@dataclass
class Steps:
    """Steps that are being written, none of them twice."""

    all: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = {step: number for number, step in enumerate(self.all)}

    def add(self, operation: str, kind: str, *arguments: int | str) -> int:
        """The number of a step, which is written if it is not there yet."""
        step = (operation, kind, *arguments)
        if step not in self._numbers:
            self._numbers[step] = len(self.all)
            self.all.append(step)
        return self._numbers[step]

    def kind(self, number: int) -> str:
        return str(self.all[number][1])

    def constant(self, value: float | int | bool) -> int:
        if isinstance(value, bool):
            return self.add("constant", BOOL, str(value))
        if isinstance(value, int):
            return self.add("constant", INT, str(value))
        return self.add("constant", FLOAT, float(value).hex())

    # For derivatives: arithmetic that leaves out factors of 1 and terms of 0.

    def product(self, a: int, b: int) -> int:
        for one, other in ((a, b), (b, a)):
            if self.all[one] == ZERO:
                return one
            if self.all[one] == ONE:
                return other
        return self.add("mul", FLOAT, a, b)

    def total(self, a: int, b: int) -> int:
        for zero, other in ((a, b), (b, a)):
            if self.all[zero] == ZERO:
                return other
        return self.add("add", FLOAT, a, b)

    def negative(self, a: int) -> int:
        return a if self.all[a] == ZERO else self.add("neg", FLOAT, a)

    def choice(self, condition: int, a: int, b: int) -> int:
        return a if a == b else self.add("where", FLOAT, condition, a, b)


class Derivative:
    """Derivatives by the score in forward mode: that of a step from those of its arguments, as further steps.

    Integers, truth values, constants, loads and the results of ``floor``, ``floordiv`` and ``cast`` have derivative 0.
    "where" has that of the argument that is chosen. "min" and "max" of equal numbers have that of the second one; "abs"
    has 0 at 0.
    """

    def __init__(self, steps: Steps):
        self.steps = steps
        self._known: dict[int, int] = {}

    def of(self, number: int) -> int:
        """The step with the derivative of step ``number``."""
        if number not in self._known:
            self._known[number] = self._work_out(number)
        return self._known[number]

    def _work_out(self, number: int) -> int:
        s = self.steps
        operation, kind, *arguments = s.all[number]
        if operation == "input" and arguments == ["score"]:
            return s.constant(1.0)
        if kind != FLOAT or operation in ("input", "constant", "load", "cast", "floor", "floordiv"):
            return s.constant(0.0)
        if operation == "where":
            condition, a, b = arguments
            return s.choice(condition, self.of(a), self.of(b))
        if len(arguments) == 2:
            return self._of_two(operation, *arguments)
        inner = self.of(arguments[0])
        # The outer derivative becomes no step where the inner one is 0.
        return (
            inner if s.all[inner] == ZERO else s.product(self._slope(operation, arguments[0], number), inner)
        )

    def _of_two(self, operation: str, a: int, b: int) -> int:
        s = self.steps
        da, db = self.of(a), self.of(b)
        if operation == "add":
            return s.total(da, db)
        if operation == "sub":
            return s.total(da, s.negative(db))
        if operation == "mul":
            return s.total(s.product(da, b), s.product(a, db))
        if operation == "mod":
            # a - b floor(a / b)
            return s.total(da, s.negative(s.product(s.add("floordiv", FLOAT, a, b), db)))
        if operation == "div":
            quotient = s.add("div", FLOAT, a, b)
            numerator = s.total(da, s.negative(s.product(quotient, db)))
            return numerator if s.all[numerator] == ZERO else s.add("div", FLOAT, numerator, b)
        if operation == "min":
            return s.choice(s.add("lt", BOOL, a, b), da, db)
        if operation == "max":
            return s.choice(s.add("lt", BOOL, b, a), da, db)
        raise NotImplementedError(f"the derivative of {operation}")

    def _slope(self, operation: str, x: int, result: int) -> int:
        """The derivative of a function of one number, at ``x``, where it is ``result``."""
        s = self.steps
        if operation == "neg":
            return s.constant(-1.0)
        if operation == "abs":
            zero = s.constant(0.0)
            signs = s.choice(s.add("lt", BOOL, x, zero), s.constant(-1.0), zero)
            return s.choice(s.add("lt", BOOL, zero, x), s.constant(1.0), signs)
        if operation == "exp":
            return result
        if operation == "log":
            return s.add("div", FLOAT, s.constant(1.0), x)
        if operation == "sqrt":
            return s.add("div", FLOAT, s.constant(0.5), result)
        if operation == "tanh":
            square = s.product(result, result)
            return s.add("sub", FLOAT, s.constant(1.0), square)
        raise NotImplementedError(f"the derivative of {operation}")


OPERATIONS = {
    "add": (FLOAT, INT),
    "sub": (FLOAT, INT),
    "mul": (FLOAT, INT),
    "div": (FLOAT,),
    "floordiv": (FLOAT, INT),
    "mod": (FLOAT, INT),
    "min": (FLOAT, INT),
    "max": (FLOAT, INT),
    "neg": (FLOAT, INT),
    "abs": (FLOAT, INT),
    "exp": (FLOAT,),
    "log": (FLOAT,),
    "sqrt": (FLOAT,),
    "tanh": (FLOAT,),
    "floor": (FLOAT,),
    "lt": (BOOL,),
    "le": (BOOL,),
    "eq": (BOOL,),
    "ne": (BOOL,),
    "and": (BOOL, INT),
    "or": (BOOL, INT),
    "xor": (BOOL, INT),
    "not": (BOOL, INT),
    "shl": (INT,),
    "shr": (INT,),
    "where": (FLOAT, INT, BOOL),
    "cast": (FLOAT, INT, BOOL),
}
"""Operations of steps beside "input", "constant" and "load", and the kinds that their results may be of.

Arguments are of the kind of the result, with three exceptions: those of a comparison are of one kind, the first of
"where" is a truth value, and that of "cast" is of another kind. "floordiv" and "mod" are Python's: a quotient is
rounded down, and a remainder has the sign of the divisor.
"""


def dependencies(functions: UserFunctions) -> tuple[frozenset[str], ...]:
    """Of each step, the names of the inputs that it depends on."""
    found: list[frozenset[str]] = []
    for operation, _, *arguments in functions.steps:
        if operation == "input":
            found.append(frozenset(arguments))
        elif operation == "constant":
            found.append(frozenset())
        else:
            steps = arguments[1:] if operation == "load" else arguments
            found.append(frozenset().union(*(found[step] for step in steps)))
    return tuple(found)
