"""Products of float32 matrices on a CPU, by the fastest of torch's libraries that can do them.

torch multiplies float32 matrices with BLAS. Where that does not use all of a CPU's vector units, as MKL does on CPUs
that are not Intel's, oneDNN does. Products of P and dS with 16-bit tensors, which kernels round to 16 bits, are done in
bfloat16 where the CPU has instructions for it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LEAST_WORK = 2**21
"""Multiplications from which oneDNN's kernel, which is made for each shape, is worth while."""


@cache
def has_onednn() -> bool:
    """Whether this CPU has vectors that BLAS may leave unused, and torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available()) and torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own."""
    return has_onednn() and bool(torch.cpu._is_avx512_bf16_supported())


@cache
def has_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (AMX), several times as fast as vectors. It is Intel's, whose BLAS
    leaves no vectors unused."""
    return bool(torch.cpu._is_amx_tile_supported())


def rows_by_rows(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.mT of float32 (heads, m, columns) and (heads, n, columns)."""
    _, m, columns = a.shape
    if m * b.shape[1] * columns < LEAST_WORK or a.device.type != "cpu" or not has_onednn():
        return a @ b.mT
    multiply = torch.ops.mkldnn._linear_pointwise
    products = [multiply(x, y, None, "none", [], "") for x, y in zip(a, b, strict=True)]
    return torch.stack(products) if len(products) > 1 else products[0][None]


def weigh(weights: Tensor, rows: Tensor) -> Tensor:
    """weights @ rows of float32 (heads, m, n) and (heads, n, columns), in the dtype of ``rows``.

    The weights are rounded to bfloat16 where that is the dtype.
    """
    if rows.dtype == torch.bfloat16:
        return weights.bfloat16() @ rows
    return rows_by_rows(weights, rows.mT)


def weigh_columns(weights: Tensor, rows: Tensor) -> Tensor:
    """rows.mT @ weights of (heads, m, columns) and (heads, m, n); the weights are rounded as in ``weigh``."""
    if rows.dtype == torch.bfloat16:
        return rows.mT @ weights.bfloat16()
    return rows_by_rows(rows.mT, weights.mT)
