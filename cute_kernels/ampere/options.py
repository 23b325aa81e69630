"""What only some of the kernels without WGMMA are given, behind the scale."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import captured_arguments, philox_argument, strided
from cute_kernels.dropout import Dropout
from cute_kernels.key_score_tile import KeyRules
from cute_kernels.score_tile import SoftCap, scale_in_base_2
from cute_kernels.user_functions import UserFunctions
from cute_kernels.window import sides_of


class OptionalFeatures(Protocol):
    """What of a config decides on them."""

    @property
    def window(self) -> bool: ...

    @property
    def chunk(self) -> bool: ...

    @property
    def changes_scores(self) -> bool: ...

    @property
    def softcap(self) -> bool: ...

    @property
    def alibi(self) -> bool: ...

    @property
    def dropout(self) -> bool: ...

    @property
    def functions(self) -> UserFunctions: ...

    @property
    def block_lists(self) -> bool: ...


class KernelOptions(NamedTuple):
    """Of one launch, each as a tuple that is empty where there is no such thing.

    ``sides`` are those of a window and its chunk, ``factors`` softmax_scale / cap of a softcap, ``slopes`` the tensor
    (batch, heads) of ALiBi, ``sinks`` that of (heads,), ``dropout`` what ``Dropout.of`` takes, ``captured`` the tensors
    that a user's functions read, ``lists`` the tensor of lists of blocks.
    """

    sides: tuple
    factors: tuple
    slopes: tuple
    sinks: tuple
    dropout: tuple
    captured: tuple
    lists: tuple

    def softcaps(self, dtype: type[cutlass.Numeric]) -> tuple[SoftCap, ...]:
        return tuple(SoftCap(factor, dtype is cutlass.Float16) for factor in self.factors)

    def key_rules(
        self, scale_log2: Float32, dtype: type[cutlass.Numeric], functions: UserFunctions
    ) -> KeyRules:
        """What a backward kernel does to scores and P."""
        dropout = Dropout.all_of(self.dropout)
        return KeyRules(scale_log2, self.softcaps(dtype), self.slopes, dropout, functions, self.captured)


def read_options(
    config: OptionalFeatures, arguments: tuple, softmax_scale: Float32
) -> tuple[KernelOptions, Float32]:
    """The options, and the scale of exponents of 2, of what stands between the scale and the stream: the sides of the
    window and then the keys of a chunk, if the config has them, and if it changes scores (softcap, alibi_slopes), in a
    forward kernel sinks, and (philox, kept) of dropout, with None for what there is not, the tensors that a user's
    functions read, and with ``block_lists`` that of the lists."""
    number_of_sides = len(_sides(config))
    sides, terms = arguments[:number_of_sides], arguments[number_of_sides:]
    of_lists = len(terms) - config.block_lists
    terms, lists = terms[:of_lists], terms[of_lists:]
    of_functions = of_lists - len(config.functions.tensors)
    terms, captured = terms[:of_functions], terms[of_functions:]
    terms, dropout = terms[:-2], terms[-2:] if config.dropout else ()
    caps, slopes, sinks = (tuple(x for x in terms[i : i + 1] if x is not None) for i in range(3))
    factors = tuple(softmax_scale / cap for cap in caps)
    others = tuple(dropout), tuple(captured), tuple(lists)
    options = KernelOptions(tuple(sides), factors, slopes, sinks, *others)
    return options, scale_in_base_2(softmax_scale, caps)


def option_arguments(config: OptionalFeatures, *sinks: bool) -> tuple:
    """What a kernel is compiled for, in the order of ``read_options``; a forward kernel says whether it has sinks."""
    sides = tuple(Int32(0) for _ in _sides(config))
    if not config.changes_scores:
        return sides
    slopes = strided(Float32, (cute.sym_int(), cute.sym_int()), 1) if config.alibi else None
    sink_arguments = (strided(Float32, (cute.sym_int(),), 1) if is_there else None for is_there in sinks)
    dropout = (philox_argument(), Int32(0)) if config.dropout else (None, None)
    cap, captured = Float32(0.0) if config.softcap else None, captured_arguments(config.functions)
    return *sides, cap, slopes, *sink_arguments, *dropout, *captured


def _sides(config: OptionalFeatures) -> tuple[str, ...]:
    return sides_of(config, "left", "right", "chunk")
