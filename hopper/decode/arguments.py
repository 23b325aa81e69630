"""Arguments that all kernels which decode are compiled for, behind queries, keys and results."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.arguments import mask_arguments, sinks_argument, strided, words
from cute_kernels.problem import VARLEN


def cache_arguments(config: Any, batch: Any) -> tuple:
    """Those from ``lengths`` to ``parts`` of a kernel that decodes, in their order."""
    c = config
    return (
        words(batch),
        strided(Int32, (batch, cute.sym_int()), 1) if c.paged else None,
        words(batch) if c.leftpad else None,
        words(cute.sym_int()) if c.layout == VARLEN else None,
        strided(Float32, (cute.sym_int(), c.part_floats), 4),
    )


def score_arguments(config: Any) -> tuple:
    """Those from ``softmax_scale`` to ``sinks``."""
    c = config
    return (
        Float32(0.0),
        Int32(0) if c.limits_splits else None,
        *mask_arguments(c),
        Float32(0.0) if c.softcap else None,
        sinks_argument(c),
    )
