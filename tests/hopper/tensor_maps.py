"""What TMA is told of the tensors of a kernel that runs on NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.tiles import ADDRESS_PART, RAGGED_ROWS
from tests.hopper.hopper_machine import TensorMap

SWIZZLED_ROWS = {128: 3, 64: 2, 32: 1}
"""Bytes of a swizzled row -> address bits that are flipped."""


def storage_of(tensor: Tensor) -> np.ndarray:
    """The memory that a tensor lies in, as unsigned integers of its width; shared, not copied."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.numpy().view(f"u{tensor.element_size()}")


def elements_of(tensor: Tensor) -> np.ndarray:
    """The same from the tensor's first element on, where TMA is told that it begins."""
    return storage_of(tensor)[tensor.storage_offset() :]


def tile_map(tensor: Tensor, order: tuple[int, ...], rows: int, columns: int) -> TensorMap:
    """TMA on tiles of (rows, columns); ``order`` are the dimensions from the columns on outwards."""
    width = next(w for w in SWIZZLED_ROWS if columns * tensor.element_size() % w == 0)
    box = (width // tensor.element_size(), rows, *(1 for _ in order[2:]))
    sizes, strides = (tuple(of[i] for i in order) for of in (tensor.shape, tensor.stride()))
    return TensorMap(elements_of(tensor), sizes, strides, box, SWIZZLED_ROWS[width])


def ragged_map(tensor: Tensor, rows: int, columns: int) -> TensorMap:
    """Of packed rows (total, heads, head_dim), as ``ragged_view`` has them."""
    row_stride, head_stride, _ = tensor.stride()
    width = next(w for w in SWIZZLED_ROWS if columns * tensor.element_size() % w == 0)
    sizes = (tensor.shape[2], RAGGED_ROWS, tensor.shape[1], RAGGED_ROWS + 1, 2**31 - 1)
    back = ADDRESS_PART // tensor.element_size() - row_stride
    strides = (1, row_stride, head_stride, back, row_stride)
    box = (width // tensor.element_size(), rows, 1, 1, 1)
    return TensorMap(elements_of(tensor), sizes, strides, box, SWIZZLED_ROWS[width])


def row_map(tensor: Tensor, rows: int, columns: int) -> TensorMap:
    """Of (batch, seqlen, heads, head_dim)."""
    return tile_map(tensor, (3, 1, 2, 0), rows, columns)


def query_map(config: ForwardConfig, tensor: Tensor, columns: int) -> TensorMap:
    """Of Q or O, dense or packed: of a warpgroup's rows, which may be those of several heads."""
    is_packed = tensor.dim() == 3
    if config.group == 1:
        return (ragged_map if is_packed else row_map)(tensor, WARPGROUP_ROWS, columns)
    whole = ragged_map(tensor, 1, columns) if is_packed else row_map(tensor, 1, columns)
    (column, row, head, *others), strides = whole.sizes, whole.strides
    return replace(
        whole,
        sizes=(column, head, row, *others),
        strides=(strides[0], strides[2], strides[1], *strides[3:]),
        box=(whole.box[0], config.group, WARPGROUP_ROWS // config.group, *whole.box[3:]),
    )


def vector_map(tensor: Tensor, rows: int) -> TensorMap:
    """Of (batch, heads, seqlen), a number for each row."""
    sizes, strides = tensor.shape[::-1], tensor.stride()[::-1]
    return TensorMap(elements_of(tensor), tuple(sizes), tuple(strides), (rows, 1, 1), 0)
