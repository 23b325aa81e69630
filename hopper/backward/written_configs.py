"""Configurations of the backward kernels that write dQ in 16 bits themselves, and which problems these serve."""

from __future__ import annotations

from dataclasses import replace

from hopper.backward.config import BackwardConfig, select_backward_config, validate_backward_config
from hopper.config import WARPGROUP_ROWS

LSE_ROWS = 4
"""float32 of which TMA can address multiples alone."""


def select_strip_config(dtype: str, head_dim: int, head_dim_v: int, causal: bool) -> BackwardConfig:
    """The config with ``strips``, whose dQ has the same bits in every run, for problems that ``fit_strips``.

    Raises:
        ValueError: a head dimension is larger than the kernel takes.
    """
    config = select_backward_config(dtype, head_dim, head_dim_v, causal, window=True)
    config = replace(config, strips=True, tile_m=WARPGROUP_ROWS)
    validate_backward_config(config)
    return config


def fit_strips(config: BackwardConfig, sides: tuple[int, int], seqlens: tuple[int, int]) -> bool:
    """Whether a config with strips serves a window of these sides, (left, right), for these lengths of Q and K: every
    query sees the key that it is level with, and dQ of a query tile has parts from two key tiles at most."""
    c, (seqlen_q, seqlen_k) = config, seqlens
    whole_tiles = (-(-side // c.tile_m) * c.tile_m for side in sides)
    is_level = seqlen_q <= seqlen_k and (seqlen_k - seqlen_q) % c.tile_m == 0
    return is_level and min(sides) >= 0 and sum(whole_tiles) <= c.tile_n


def select_one_tile_config(dtype: str, head_dim: int, head_dim_v: int, causal: bool) -> BackwardConfig:
    """The config with ``one_tile``, whose dQ has the same bits in every run, for problems that ``fit_one_tile``.

    Raises:
        ValueError: a head dimension is larger than the kernel takes.
    """
    config = select_backward_config(dtype, head_dim, head_dim_v, causal)
    config = replace(config, one_tile=True, tile_m=WARPGROUP_ROWS)
    validate_backward_config(config)
    return config


def fit_one_tile(config: BackwardConfig, seqlens: tuple[int, int]) -> bool:
    """Whether a config with ``one_tile`` serves these lengths of Q and K: its tile has all keys, every query tile sees
    one of them, and TMA can address an LSE whose rows lie one behind the other."""
    seqlen_q, seqlen_k = seqlens
    sees_keys = not config.causal or seqlen_q <= seqlen_k
    return 0 < seqlen_k <= config.tile_n and sees_keys and seqlen_q % LSE_ROWS == 0
