"""Head dimensions that have FP8 kernels of their own, and what of the tiles of others serves them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cute_kernels.problem import MAX_HEAD_DIM
from hopper.config import TWO_CONSUMERS, TWO_CONSUMERS_OF_WIDE_ROWS, WARPGROUP_ROWS
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.tilings import Tiling

SIZES = 64, 128, MAX_HEAD_DIM
"""Head dimensions that tables of tiles are for."""


class Native(NamedTuple):
    """Columns that rows of Q and K, and of V, have room for in a kernel, and the head_dim by which its tiles are
    found."""

    head_dim: int
    head_dim_v: int
    tiles: int


NARROW_VALUES = Native(192, 128, 128)
"""For V that is narrower, as of latent attention that is not absorbed: where O is no wider than at head_dim 128, there
are registers for its tiles, and 1.4 times the speed of those of head_dim 256 (`fp8_head_dims.json`)."""

BETWEEN = Native(192, 192, 256)
"""Rows that leave room for one stage more than those of head_dim 256, and products short enough for more exponentials
by polynomial (`fp8_head_dims.json`)."""


def native_size(head_dim: int) -> Native:
    """That of the tiles that serve this one.

    Raises:
        ValueError: it is too large.
    """
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}, allowed: at most {MAX_HEAD_DIM}")
    size = min(size for size in SIZES if size >= head_dim)
    return Native(size, size, size)


def native_of(head_dim: int, head_dim_v: int, in_float32: bool) -> Native:
    """What serves these, both at most ``MAX_HEAD_DIM``; ``in_float32`` says that P V is added up so."""
    widest = native_size(max(head_dim, head_dim_v))
    is_between = widest.tiles == BETWEEN.tiles and not in_float32
    for native in (NARROW_VALUES, BETWEEN) if is_between else ():
        if head_dim <= native.head_dim and head_dim_v <= native.head_dim_v:
            return native
    return widest


def fitted(tiling: Tiling, native: Native) -> Tiling:
    """``tiling`` for rows of another size than those that it is made for."""
    fields = dict(tiling.fields)
    if native == NARROW_VALUES and 3 * WARPGROUP_ROWS in (tiling.tile_m, tiling.tile_n):
        return replace(tiling, stages=tiling.stages - 1)
    if native == BETWEEN and fields.get("softmax") is Softmax.HALF_SCORES:
        tiling = replace(tiling, fields=tuple((fields | {"polynomial_pairs": 3}).items()))
    if native == BETWEEN and not fields.get("v_rows"):
        return replace(tiling, stages=tiling.stages + 1)
    return tiling


def with_used_columns(config: Fp8ForwardConfig, head_dim: int, head_dim_v: int) -> Fp8ForwardConfig:
    """``config``, whose products leave out the columns of zeros that rows of these are filled up with, if there is such
    a kernel."""
    of_qk, of_v = config.used_steps
    used, used_v = -(-head_dim // of_qk) * of_qk, -(-head_dim_v // of_v) * of_v
    if (used, used_v) == (config.head_dim, config.head_dim_v) or not config.takes_used_columns:
        return config
    registers = config.registers
    if config.v_rows and registers == TWO_CONSUMERS and 2 * used_v <= config.head_dim_v:
        # What transposes half of the columns has other addresses at hand, and spills one with 24 registers.
        registers = TWO_CONSUMERS_OF_WIDE_ROWS
    return replace(config, used_head_dim=used, used_head_dim_v=used_v, registers=registers)
