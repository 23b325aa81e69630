"""What only some backward kernels are given, and what they do to scores with it."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.invariant import LoopInvariant
from cute_kernels.key_score_tile import KeyRules
from cute_kernels.problem import VARLEN
from cute_kernels.score_tile import SoftCap, scale_in_base_2
from hopper.backward.config import BackwardConfig


@dataclass(frozen=True)
class BackwardOptions(LoopInvariant):
    """Each is empty for kernels that have no use for it.

    ``window`` are its sides, 0 or more, and NO_LIMIT for one without an end; with ``causal`` the right one is not read.
    ``plan`` is that of key tiles and the number of its sequences, one more than the caller's. ``softcap`` is the cap,
    ``slopes`` those of ALiBi, float32 (batch, heads). ``captured`` are the tensors that the functions of the config
    read.
    """

    window: tuple = ()
    plan: tuple = ()
    softcap: tuple = ()
    slopes: tuple = ()
    captured: tuple = ()

    @staticmethod
    def of(
        config: BackwardConfig,
        window: tuple[Int32 | None, Int32 | None],
        plan: tuple[cute.Tensor | None, Int32 | None],
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        captured: tuple,
    ) -> "BackwardOptions":
        """Of arguments, those that the config has a use for."""
        return BackwardOptions(
            window if config.window else (),
            plan if config.layout == VARLEN else (),
            (softcap,) if config.softcap else (),
            (slopes,) if config.alibi else (),
            captured,
        )


NO_OPTIONS = BackwardOptions()


def key_rules(
    config: BackwardConfig, softmax_scale: Float32, caps: tuple, slopes: tuple, captured: tuple
) -> KeyRules:
    """What a kernel does to scores."""
    is_precise = config.dtype == "float16"
    softcap = tuple(SoftCap(softmax_scale / cap, is_precise) for cap in caps)
    return KeyRules(scale_in_base_2(softmax_scale, caps), softcap, slopes, config.functions, captured)
