"""Traces a user's score and mask functions into steps (``cute_kernels.user_functions``), tensors they read included.

A function is called once, with values (``Value``) that stand for what a kernel has at an element of S, and that record
what is done to them. It may use Python's operators, :mod:`hopper_attention.mods`, the functions of torch that mean the
same, and elements of tensors, wherever it has these from. So functions written for FlexAttention
(torch.nn.attention.flex_attention) are taken as they are.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cute_kernels.user_functions import BOOL, FLOAT, INPUTS, INT, Steps, TensorKind

TENSOR_KINDS = {
    torch.float32: FLOAT,
    torch.float16: FLOAT,
    torch.bfloat16: FLOAT,
    torch.int32: INT,
    torch.int64: INT,
    torch.bool: BOOL,
}
"""Dtypes of tensors that functions may read, and the kinds of their elements."""

LARGEST_INT = 2**31 - 1
BITS = 32
LARGEST_POWER = 16
"""The largest exponent of a power, which becomes so many products."""

OF_TRUTHS = {"add": "or", "max": "or", "mul": "and", "min": "and"}
"""What torch takes arithmetic between two truth values for."""

USE_INSTEAD = (
    "use + - * / // % ** with a constant, comparisons, & | ^ ~ << >>, tensor[indices], hopper_attention.mods"
)


class UntracedAttributeError(AttributeError, TypeError):
    """A traced value has no such attribute: a TypeError, as of all that cannot be traced, that ``hasattr`` knows."""


class Trace:
    """A score function and a mask function that are being traced: their steps so far, and the tensors they load from.

    Attributes:
        steps: of both functions.
        name: what the function being traced is called in messages, "score_mod" or "mask_mod".
        originals: the tensors as the functions have them, each once.
        tensors: the same detached and with 1 dimension or more, as kernels take them.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.name = ""
        self.originals: list[Tensor] = []
        self.tensors: list[Tensor] = []

    def input(self, name: str) -> Value:
        return Value(self, self.steps.add("input", INPUTS[name], name))

    @property
    def kinds(self) -> tuple[TensorKind, ...]:
        return tuple(TensorKind(str(x.dtype).removeprefix("torch."), x.dim()) for x in self.tensors)

    def value(self, x: Any) -> Value:
        """``x`` as a value: it may be one, a number, or a tensor of one element."""
        if isinstance(x, Value):
            return x
        if isinstance(x, PartlyIndexed):
            self.refuse(f"uses a tensor of shape {x.shape} as a number")
        if isinstance(x, (bool, float)):
            return Value(self, self.steps.constant(x))
        if isinstance(x, numbers.Integral):
            if abs(int(x)) > LARGEST_INT:
                self.refuse(f"uses {x}, which {BITS} bits do not hold")
            return Value(self, self.steps.constant(int(x)))
        if isinstance(x, numbers.Real):
            return Value(self, self.steps.constant(float(x)))
        if isinstance(x, Tensor):
            if x.numel() != 1:
                self.refuse(f"uses a tensor of shape {tuple(x.shape)} as a number")
            return self.load(x, (0,) * x.dim())
        self.refuse(f"uses a {type(x).__name__}")

    def refuse(self, what: str) -> NoReturn:
        raise TypeError(f"{self.name} {what}, which cannot be traced for a kernel; {USE_INSTEAD}")

    def call(self, name: str, arguments: Any, options: dict[str, Any]) -> Any:
        """One of ``METHODS``, for values among the arguments."""
        try:
            inspect.signature(METHODS[name]).bind(self, *arguments, **options)
        except TypeError as error:
            given = ", ".join([f"{len(arguments)} arguments", *options])
            self.refuse(f"calls {name} with {given} ({error})")
        return METHODS[name](self, *arguments, **options)

    def load(self, tensor: Tensor, indices: tuple[Any, ...]) -> Value:
        """The element of a captured tensor."""
        slot = self._slot(tensor)
        chosen = []
        for index, size in zip(indices, tensor.shape, strict=True):
            if (
                not isinstance(index, bool)
                and isinstance(index, numbers.Integral)
                and -size <= int(index) < 0
            ):
                index = int(index) + size
            value = self.value(index)
            if value.kind != INT:
                self.refuse(f"indexes a tensor with a {value.kind}")
            chosen.append(value.number)
        chosen = chosen or [self.steps.constant(0)]
        return Value(self, self.steps.add("load", TENSOR_KINDS[tensor.dtype], slot, *chosen))

    def _slot(self, tensor: Tensor) -> int:
        for slot, other in enumerate(self.originals):
            if other is tensor:
                return slot
        if tensor.dtype not in TENSOR_KINDS:
            allowed = ", ".join(str(dtype) for dtype in TENSOR_KINDS)
            raise TypeError(f"{self.name} reads a tensor of dtype {tensor.dtype}, allowed: {allowed}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.name} reads a tensor of shape {tuple(tensor.shape)} that requires a gradient, which is not "
                "implemented; use its detach(), or hopper_attention.reference.attention_naive, which torch "
                "differentiates"
            )
        if not tensor.numel():
            raise ValueError(
                f"{self.name} reads a tensor of shape {tuple(tensor.shape)}, allowed: with elements"
            )
        self.originals.append(tensor)
        # A kernel reads memory, where a lazy sign is not.
        values = tensor.detach().resolve_neg()
        self.tensors.append(values.reshape(1) if tensor.dim() == 0 else values)
        return len(self.originals) - 1

    def apply(self, operation: str, kind: str, *values: Value) -> Value:
        return Value(self, self.steps.add(operation, kind, *(x.number for x in values)))

    def cast(self, value: Value, kind: str) -> Value:
        if value.kind == kind:
            return value
        constant = self.steps.all[value.number]
        if constant[0] == "constant" and kind == FLOAT:
            return self.value(float(constant[2] == "True" if value.kind == BOOL else int(constant[2])))
        return self.apply("cast", kind, value)

    def arithmetic(self, operation: str, *arguments: Any, kinds: tuple[str, ...] = (INT, FLOAT)) -> Value:
        """An operation on arguments that are cast to one kind, that of the result: FLOAT if one of them is, else INT;
        the first of ``kinds`` where that is none of them. Of two truth values a sum is their or, as torch has it."""
        values = [self.value(x) for x in arguments]
        if operation in OF_TRUTHS and {x.kind for x in values} == {BOOL}:
            return self.logic(OF_TRUTHS[operation], *values)
        kind = FLOAT if FLOAT in [x.kind for x in values] else INT
        kind = kind if kind in kinds else kinds[0]
        if kind == INT and operation in ("floordiv", "mod") and self._constant_int(values[1]) == 0:
            self.refuse("divides an integer by 0")
        return self.apply(operation, kind, *(self.cast(x, kind) for x in values))

    def _constant_int(self, value: Value) -> int | None:
        operation, kind, *arguments = self.steps.all[value.number]
        return int(arguments[0]) if operation == "constant" and kind == INT else None

    def comparison(self, operation: str, a: Any, b: Any) -> Value:
        values = [self.value(x) for x in (a, b)]
        kinds = [x.kind for x in values]
        kind = FLOAT if FLOAT in kinds else INT
        return self.apply(operation, BOOL, *(self.cast(x, kind) for x in values))

    def logic(self, operation: str, *arguments: Any) -> Value:
        values = [self.value(x) for x in arguments]
        kinds = {x.kind for x in values}
        if FLOAT in kinds:
            self.refuse(f"uses & | ^ ~ or a shift on a {FLOAT}")
        is_shift = operation in ("shl", "shr")
        places = self._constant_int(values[1]) if is_shift else None
        if places is not None and not 0 <= places < BITS:
            self.refuse(f"shifts by {places}, which integers of {BITS} bits do not allow")
        kind = BOOL if kinds == {BOOL} and not is_shift else INT
        return self.apply(operation, kind, *(self.cast(x, kind) for x in values))

    def where(self, condition: Any, a: Any, b: Any) -> Value:
        values = [self.value(x) for x in (a, b)]
        kinds = [x.kind for x in values]
        kind = FLOAT if FLOAT in kinds else INT if INT in kinds else BOOL
        truth = self.cast(self.value(condition), BOOL)
        return self.apply("where", kind, truth, *(self.cast(x, kind) for x in values))

    def power(self, base: Any, exponent: Any) -> Value:
        if isinstance(exponent, (int, float)) and exponent == 0.5:
            return self.arithmetic("sqrt", base, kinds=(FLOAT,))
        if isinstance(exponent, Value):
            self.refuse("raises to a power that only the kernel knows, where there are exp2 and exp")
        if not isinstance(exponent, int) or not 1 <= abs(exponent) <= LARGEST_POWER:
            self.refuse(
                f"raises to the power of {exponent!r}; allowed are 0.5 and ints up to {LARGEST_POWER}"
            )
        value = self.value(base)
        value = self.cast(value, INT) if value.kind == BOOL else value
        result = value
        for _ in range(abs(exponent) - 1):
            result = self.arithmetic("mul", result, value)
        return result if exponent > 0 else self.arithmetic("div", 1.0, result, kinds=(FLOAT,))

    def clamp(self, x: Any, lowest: Any = None, highest: Any = None, **bounds: Any) -> Value:
        if not bounds.keys() <= {"min", "max"}:
            self.refuse(f"calls clamp with {', '.join(bounds)}")
        lowest, highest = bounds.get("min", lowest), bounds.get("max", highest)
        value = self.value(x)
        value = value if lowest is None else self.arithmetic("max", value, lowest)
        return value if highest is None else self.arithmetic("min", value, highest)


class Value:
    """What a traced function computes with in place of a number, which only the kernel will know: step ``number`` of
    ``trace``."""

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace, self.number = trace, number

    @property
    def kind(self) -> str:
        return self.trace.steps.kind(self.number)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_traced(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return lambda *arguments, **options: self.trace.call(name, (self, *arguments), options)
        if name == "device":
            # That of whatever the function makes for it: a value is in the kernel.
            return None
        raise UntracedAttributeError(
            f"{self.trace.name} uses .{name} of a value that is traced for a kernel; {USE_INSTEAD}"
        )

    def _unknown(self, *_: Any) -> NoReturn:
        self.trace.refuse(
            "asks in Python for a value that only the kernel knows (if, and, or, not, min, max, float, int, a chained "
            "comparison); with mods.where, & | ~, mods.minimum it is done in the kernel. That is something"
        )

    __bool__ = __int__ = __float__ = __index__ = __iter__ = __len__ = _unknown
    # Values compare to traced values, so that no dictionary may hold them; object's type says it has a function.
    __hash__ = None  # type: ignore[assignment]


class PartlyIndexed:
    """A captured tensor with fewer indices than dimensions so far."""

    def __init__(self, trace: Trace, tensor: Tensor, indices: tuple[Any, ...]) -> None:
        self._trace, self._tensor, self._indices = trace, tensor, indices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape[len(self._indices) :])

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return element_of(self._trace, self._tensor, (*self._indices, *more))


def element_of(trace: Trace, tensor: Tensor, indices: tuple[Any, ...]) -> Any:
    """An element of a captured tensor; a ``PartlyIndexed`` while indices are lacking."""
    for index in indices:
        is_number = isinstance(index, (Value, numbers.Integral)) and not isinstance(index, bool)
        if not is_number and not (isinstance(index, Tensor) and index.numel() == 1):
            trace.refuse(f"indexes a tensor with a {type(index).__name__}")
    if len(indices) > tensor.dim():
        raise IndexError(
            f"{trace.name} gives {len(indices)} indices to a tensor of shape {tuple(tensor.shape)}"
        )
    if len(indices) < tensor.dim():
        return PartlyIndexed(trace, tensor, indices)
    return trace.load(tensor, indices)


class TensorReads(TorchFunctionMode):
    """While it is active, tensors give traced elements for traced indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_traced(args) or is_traced((kwargs or {}).values()):
            return call_traced(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def is_traced(arguments: Any) -> bool:
    """Whether a value is among the arguments, or among those of a tuple or list among them."""
    return any(isinstance(x, Value) or (isinstance(x, (tuple, list)) and is_traced(x)) for x in arguments)


def first_value(arguments: Any) -> Value:
    for x in arguments:
        if isinstance(x, Value):
            return x
        if isinstance(x, (tuple, list)) and is_traced(x):
            return first_value(x)
    raise AssertionError("no value is traced")


def call_traced(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function of torch means for values."""
    trace = first_value((*args, *kwargs.values())).trace
    name = getattr(func, "__name__", str(func)).strip("_")
    if name == "getitem":
        tensor, index = args
        return element_of(trace, tensor, index if isinstance(index, tuple) else (index,))
    if name not in METHODS:
        trace.refuse(f"calls torch.{name}")
    return trace.call(name, args, kwargs)


OF_ONE = ("neg", "abs", "exp", "log", "sqrt", "tanh", "floor", "not")
"""Operations of one value; others have two."""


def _arithmetic(operation: str, *kinds: str) -> Callable[..., Value]:
    allowed = kinds or (INT, FLOAT)
    if operation in OF_ONE:
        return lambda trace, x: trace.arithmetic(operation, x, kinds=allowed)
    return lambda trace, a, b: trace.arithmetic(operation, a, b, kinds=allowed)


def _comparison(operation: str, swaps: bool = False) -> Callable[..., Value]:
    if swaps:
        return lambda trace, a, b: trace.comparison(operation, b, a)
    return lambda trace, a, b: trace.comparison(operation, a, b)


def _logic(operation: str) -> Callable[..., Value]:
    if operation in OF_ONE:
        return lambda trace, x: trace.logic(operation, x)
    return lambda trace, a, b: trace.logic(operation, a, b)


def _truth(operation: str) -> Callable[..., Value]:
    def truth(trace: Trace, x: Any) -> Value:
        return trace.cast(trace.value(x), BOOL)

    if operation in OF_ONE:
        return lambda trace, x: trace.logic(operation, truth(trace, x))
    return lambda trace, a, b: trace.logic(operation, truth(trace, a), truth(trace, b))


def _cast(kind: str) -> Callable[..., Value]:
    return lambda trace, x: trace.cast(trace.value(x), kind)


def _to(trace: Trace, x: Any, dtype: Any) -> Value:
    if dtype not in TENSOR_KINDS:
        trace.refuse(f"converts to {dtype}")
    return trace.cast(trace.value(x), TENSOR_KINDS[dtype])


def _new(truth: bool) -> Callable[..., Value]:
    """Of a truth value alone, as and_masks and or_masks of FlexAttention begin with."""

    def new(trace: Trace, x: Any, size: Any = None, dtype: Any = None, device: Any = None) -> Value:
        if size != () or dtype != torch.bool:
            trace.refuse(f"makes a tensor of shape {size} and dtype {dtype}")
        return trace.value(truth)

    return new


def _exp2(trace: Trace, x: Any) -> Value:
    return trace.arithmetic("exp", trace.arithmetic("mul", x, 0.6931471805599453), kinds=(FLOAT,))


def _log2(trace: Trace, x: Any) -> Value:
    logarithm = trace.arithmetic("log", x, kinds=(FLOAT,))
    return trace.arithmetic("mul", logarithm, 1.4426950408889634)


def _sigmoid(trace: Trace, x: Any) -> Value:
    """(1 + tanh(x / 2)) / 2."""
    half = trace.arithmetic("tanh", trace.arithmetic("mul", x, 0.5), kinds=(FLOAT,))
    return trace.arithmetic("add", trace.arithmetic("mul", half, 0.5), 0.5)


def _rsqrt(trace: Trace, x: Any) -> Value:
    return trace.arithmetic("div", 1.0, trace.arithmetic("sqrt", x, kinds=(FLOAT,)))


METHODS: dict[str, Callable[..., Any]] = {
    **{name: _arithmetic(name) for name in ("add", "sub", "mul", "neg", "abs", "floordiv", "mod")},
    **{name: _arithmetic(name, FLOAT) for name in ("div", "exp", "log", "sqrt", "tanh", "floor")},
    **{name: _comparison(name) for name in ("lt", "le", "eq", "ne")},
    **{name: _logic(name) for name in ("and", "or", "xor")},
    "gt": _comparison("lt", swaps=True),
    "ge": _comparison("le", swaps=True),
    "subtract": _arithmetic("sub"),
    "multiply": _arithmetic("mul"),
    "divide": _arithmetic("div", FLOAT),
    "true_divide": _arithmetic("div", FLOAT),
    "truediv": _arithmetic("div", FLOAT),
    "floor_divide": _arithmetic("floordiv"),
    "remainder": _arithmetic("mod"),
    "negative": _arithmetic("neg"),
    "absolute": _arithmetic("abs"),
    "minimum": _arithmetic("min"),
    "maximum": _arithmetic("max"),
    "bitwise_and": _logic("and"),
    "bitwise_or": _logic("or"),
    "bitwise_xor": _logic("xor"),
    "bitwise_not": _logic("not"),
    "invert": _logic("not"),
    "lshift": _logic("shl"),
    "rshift": _logic("shr"),
    "logical_and": _truth("and"),
    "logical_or": _truth("or"),
    "logical_xor": _truth("xor"),
    "logical_not": _truth("not"),
    "where": lambda trace, condition, a, b: trace.where(condition, a, b),
    "clamp": lambda trace, *values, **bounds: trace.clamp(*values, **bounds),
    "pow": lambda trace, base, exponent: trace.power(base, exponent),
    "square": lambda trace, x: trace.power(x, 2),
    "relu": lambda trace, x: trace.arithmetic("max", x, 0),
    "exp2": _exp2,
    "log2": _log2,
    "sigmoid": _sigmoid,
    "rsqrt": _rsqrt,
    "float": _cast(FLOAT),
    "int": _cast(INT),
    "long": _cast(INT),
    "bool": _cast(BOOL),
    "to": _to,
    "new_ones": _new(True),
    "new_zeros": _new(False),
}
"""What functions and methods of torch do with values, by name; operators go by their names without underscores."""


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: METHODS[name](self.trace, self, *others)


def _refused(name: str) -> Callable[..., Any]:
    return lambda self, *others: self.trace.refuse(f"uses Python's {name}")


def _reflected(name: str) -> Callable[..., Any]:
    return lambda self, other: METHODS[name](self.trace, other, self)


REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
for _name in (*REFLECTED, "pow", "neg", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(_name))
for _name in REFLECTED:
    setattr(Value, f"__r{_name}__", _reflected(_name))
    METHODS[f"r{_name}"] = (lambda name: lambda trace, a, b: METHODS[name](trace, b, a))(_name)
for _name in ("round", "divmod", "matmul"):
    for _prefix in ("", "r"):
        setattr(Value, f"__{_prefix}{_name}__", _refused(_name))
# As those above, though the names are constants (B010): mypy knows no method that is assigned to a class.
setattr(Value, "__rpow__", _reflected("pow"))  # noqa: B010
setattr(Value, "__pos__", lambda self: self)  # noqa: B010
