"""What only some backward kernels are given, and what they do to scores with it."""

from dataclasses import dataclass

import cutlass
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
    """Each is empty for kernels that have no use for it.

    ``window`` are its sides, 0 or more, and NO_LIMIT for one without an end; with ``causal`` the right one is not read.
    The keys of a chunk, 1 or more, come behind them.
    ``plan`` is that of key tiles and the number of its sequences, one more than the caller's. ``softcap`` is the cap,
    ``slopes`` those of ALiBi, float32 (batch, heads), ``dropout`` what ``Dropout.of`` takes.
    """

    window: tuple = ()
    plan: tuple = ()
    softcap: tuple = ()
    slopes: tuple = ()
    dropout: tuple = ()

    @property
    def changes(self) -> tuple:
        """What ``key_rules`` takes."""
        return self.softcap, self.slopes, self.dropout

    @staticmethod
    def of(
        config: BackwardConfig,
        window: tuple[Int32 | None, Int32 | None, Int32 | None],
        plan: tuple[cute.Tensor | None, Int32 | None],
        softcap: Float32 | None,
        slopes: cute.Tensor | None,
        dropout: tuple[cute.Tensor | None, Int32 | None],
    ) -> "BackwardOptions":
        """Of arguments, those that the config has a use for."""
        return BackwardOptions(
            sides_of(config, *window),
            plan if config.layout == VARLEN else (),
            (softcap,) if config.softcap else (),
            (slopes,) if config.alibi else (),
            dropout if config.dropout else (),
        )


NO_OPTIONS = BackwardOptions()


def key_rules(softmax_scale: Float32, changes: tuple, dtype: type[cutlass.Numeric]) -> KeyRules:
    """What a kernel on inputs of ``dtype`` does to scores and P; ``changes`` are those of ``BackwardOptions``."""
    caps, slopes, dropout = changes
    softcap = tuple(SoftCap(softmax_scale / cap, dtype is cutlass.Float16) for cap in caps)
    return KeyRules(scale_in_base_2(softmax_scale, caps), softcap, slopes, Dropout.all_of(dropout))
