"""Tiles of FP8 kernels with a softcap: each block takes its maximum, however many keys there are."""

from __future__ import annotations

from dataclasses import replace

from cute_kernels.problem import DENSE, MAX_HEAD_DIM
from hopper.config import TWO_CONSUMERS_TRANSPOSING, validate_forward_config
from hopper.forward.fp8.changes import Changes
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.native import native_of, native_size, with_used_columns
from hopper.forward.fp8.tilings import (
    BETWEEN,
    FEW_KEYS,
    FEW_ROWS,
    build,
    eager,
    rows,
    wide_rows,
    with_lone_scales,
)

CAPPED_TILINGS = FEW_KEYS | {64: eager(192, 128, 4, polynomial_pairs=3)}
"""By head_dim. A stale maximum would be one of scores before the cap (`fp8_softcap_tiles.json`)."""

CAUSAL_TILINGS = CAPPED_TILINGS | {256: eager(128, 96, 2, polynomial_pairs=3)}
"""The same under a causal mask or with chunks, which leave no registers for 128 keys at head_dim 256."""

FEW_CAPPED_TILES = {64: FEW_KEYS[64]}
"""The same where tiles are few (``are_few_tiles``)."""

CAPPED_ROW_TILINGS = FEW_ROWS | {
    256: wide_rows(eager, 128, 96, 2, registers=TWO_CONSUMERS_TRANSPOSING, polynomial_pairs=3)
}
"""The same for V in rows."""

PACKED_ROW_TILINGS = CAPPED_ROW_TILINGS | {256: rows(128, 64, 2)}
"""The same of packed sequences, where O has no way from registers."""


def select_fp8_capped_config(
    head_dims: tuple[int, int],
    causal: bool,
    output: str,
    v_rows: bool,
    changes: Changes,
    layout: str = DENSE,
    few_tiles: bool = False,
) -> Fp8ForwardConfig:
    """The config for e4m3 tensors with a descale for each head, where ``changes`` have a softcap. ``head_dims``
    are those of Q and V; ``v_rows`` and ``few_tiles`` are those of ``select_fp8_forward_config``.

    Raises:
        ValueError: a head dimension is too large.
    """
    if max(head_dims) > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dims[0]} and head_dim_v {head_dims[1]}: both may be at most {MAX_HEAD_DIM}"
        )
    native = native_of(*head_dims, False)
    if native == BETWEEN and v_rows:
        native = native_size(MAX_HEAD_DIM)
    tilings = CAUSAL_TILINGS if causal or changes.chunk else CAPPED_TILINGS
    tilings = tilings | FEW_CAPPED_TILES if few_tiles else tilings
    if v_rows:
        tilings = CAPPED_ROW_TILINGS if layout == DENSE else PACKED_ROW_TILINGS
    built = replace(with_lone_scales(build(tilings[native.tiles], native, causal, output)), layout=layout)
    config = with_used_columns(changes.of(built), *head_dims)
    validate_forward_config(config)
    return config


def shipped_fp8_capped_configs() -> tuple[Fp8ForwardConfig, ...]:
    """One for each head_dim, mask and way of V, of dense tensors without a window."""
    return tuple(
        select_fp8_capped_config((head_dim, head_dim), causal, "bfloat16", v_rows, Changes(softcap=True))
        for head_dim in CAPPED_TILINGS
        for causal in (False, True)
        for v_rows in (False, True)
    )
