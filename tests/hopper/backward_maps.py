"""What TMA is told of the tensors of a backward kernel that runs on NumPy."""

from __future__ import annotations

from torch import Tensor

from hopper.backward.config import CLUSTER_CTAS, BackwardConfig, PairedBackwardConfig
from hopper.config import WARPGROUP_ROWS
from tests.hopper.hopper_machine import TensorMap
from tests.hopper.tensor_maps import elements_of, ragged_map, row_map, vector_map


def backward_maps(
    config: BackwardConfig,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    vectors: tuple[Tensor, ...],
    gradients: tuple[Tensor, Tensor],
) -> list[TensorMap]:
    """Of the kernel between prepare and finish, for (dout, q, k, v), (lse, delta) and (dk, dv), dense or packed. One
    that ``divides_heads`` stores dK and dV without TMA."""
    c, (dout, q, k, v), (dk, dv) = config, inputs, gradients
    of_rows, of_vector = (ragged_map, number_map) if q.dim() == 3 else (row_map, vector_map)
    is_paired = isinstance(c, PairedBackwardConfig)
    keys, rows = (c.keys, c.tile_m // CLUSTER_CTAS) if is_paired else (c.tile_n // c.key_parts, c.tile_m)
    # Swizzles are as wide as the columns that are an operand by themselves.
    part, part_v = (size // (c.consumers if is_paired else 1) for size in (c.head_dim, c.head_dim_v))
    loads = [
        of_rows(q, rows, part),
        of_rows(k, keys, c.k_columns),
        of_rows(v, keys, part_v),
        of_rows(dout, rows, part_v),
        *(of_vector(vector, c.tile_m) for vector in vectors),
        *([of_rows(k, keys, c.k_columns)] if is_paired else []),
    ]
    if c.divides_heads:
        return loads
    columns = c.k_columns if is_paired else c.head_dim
    return [*loads, of_rows(dk, WARPGROUP_ROWS, columns), of_rows(dv, WARPGROUP_ROWS, part_v)]


def number_map(tensor: Tensor, rows: int) -> TensorMap:
    """Of (heads, rows), a number for each row."""
    return TensorMap(elements_of(tensor), tensor.shape[::-1], tensor.stride()[::-1], (rows, 1), 0)
