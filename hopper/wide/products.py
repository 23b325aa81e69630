"""The products of the two consumer warpgroups, each of 64 rows."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from hopper.config import WARPGROUP_ROWS
from hopper.forward.operands import Mmas

ONE_WARPGROUP = (1, 1, 1)


def tiled_mmas(config: Any, dtype: type) -> Mmas:
    """Of the first consumer warpgroup: S from shared memory, and P V with P in registers."""
    keys, tile = OperandMajorMode.K, (WARPGROUP_ROWS, config.tile_n)
    qk = hopper_helpers.make_trivial_tiled_mma(dtype, dtype, keys, keys, Float32, ONE_WARPGROUP, tile)
    return Mmas(qk, values_mma(config.half, dtype, warpgroup.OperandSource.RMEM))


def values_mma(columns: int, dtype: type, source: warpgroup.OperandSource) -> cute.TiledMma:
    """P V in some of the columns."""
    of_p, of_v, tile = OperandMajorMode.K, OperandMajorMode.MN, (WARPGROUP_ROWS, columns)
    return hopper_helpers.make_trivial_tiled_mma(
        dtype, dtype, of_p, of_v, Float32, ONE_WARPGROUP, tile, a_source=source
    )
