"""What only some backward kernels are given, and what they do to scores with it."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dropout import Dropout
from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_score_tile import KeyRules
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import SoftCap, scale_in_base_2
from cute_kernels.window import sides_of
from hopper.backward.config import BackwardConfig


@dataclass(frozen=True)
class BackwardOptions(LoopInvariant):
    """Arguments that only some backward kernels take; each is empty where the config has no use for it.

    Attributes:
        window: the sides, 0 or more, and NO_LIMIT for one without an end; with ``causal`` the right one is not read.
            With a chunk its keys come last, 1 or more.
        plan: that of key tiles, and the number of its sequences, one more than the caller's; or the fields of
            ``DividedTiles``.
        softcap: the cap.
        slopes: those of ALiBi, float32 (batch, heads).
        dropout: the arguments of ``Dropout.of``.
        captured: the tensors that the functions of the config read.
        lists: those of ``BackwardWork``.
    """

    window: tuple = ()
    plan: tuple = ()
    softcap: tuple = ()
    slopes: tuple = ()
    dropout: tuple = ()
    captured: tuple = ()
    lists: tuple = ()

    @property
    def changes(self) -> tuple:
        """What ``key_rules`` takes."""
        return self.softcap, self.slopes, self.dropout, self.captured

    @staticmethod
    def of(
        config: BackwardConfig,
        window: tuple[Int32 | None, Int32 | None, Int32 | None],
        plan: tuple[cute.Tensor | None, Int32 | None],
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        dropout: tuple[cute.Tensor | None, Int32 | None],
        captured_and_lists: tuple,
    ) -> "BackwardOptions":
        """Of arguments, those that the config has a use for. The tensors that its functions read come before lists."""
        of_functions = len(config.functions.tensors)
        return BackwardOptions(
            sides_of(config, *window),
            plan if config.layout == VARLEN else (),
            (softcap,) if config.softcap else (),
            (slopes,) if config.alibi else (),
            dropout if config.dropout else (),
            captured_and_lists[:of_functions],
            captured_and_lists[of_functions:],
        )


NO_OPTIONS = BackwardOptions()


def key_rules(config: BackwardConfig, softmax_scale: Float32, changes: tuple) -> KeyRules:
    """What a kernel does to scores and P; ``changes`` are those of ``BackwardOptions``."""
    caps, slopes, dropout, captured = changes
    is_precise = config.dtype == "float16"
    softcap = tuple(SoftCap(softmax_scale / cap, is_precise) for cap in caps)
    scale_log2 = scale_in_base_2(softmax_scale, caps)
    return KeyRules(scale_log2, softcap, slopes, Dropout.all_of(dropout), config.functions, captured)
