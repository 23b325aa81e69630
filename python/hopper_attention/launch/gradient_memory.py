"""The memory of a backward pass: of what kind, how much, and what it has to hold before a kernel runs."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.backward.step import NUMBERS_OF_A_PLACE, SCHEDULER_WORDS
from hopper.backward.config import BackwardConfig
from hopper_attention import device_memory
from hopper_attention.backward_rules import Division, KernelConfig
from hopper_attention.device_memory import Piece, Pieces
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.layout import new_layout

FEWEST_WORDS = 4
"""That are cleared in each query tile, where the kernel adds nothing up."""


class DqTile(NamedTuple):
    """What of a config says how large the work memory of a launch is: query rows of a tile, and the parts and words of
    its sums of dQ."""

    tile_m: int
    dq_parts: int
    dq_words: int


def backward_counter(config: KernelConfig, sums: Tensor) -> Any:
    """int32 zeros: those of ``tile_counter``, and if dQ is summed in a fixed order those of each query tile."""
    if not config.ordered and sums.is_cuda:
        return device_memory.tile_counter(sums.device.index)
    counts = math.prod(sums.shape[:-2]) * config.counts_per_tile if config.ordered else 0
    return torch.zeros(SCHEDULER_WORDS + counts, dtype=torch.int32, device=sums.device)


def subtract_lse_gradient(delta: Tensor, lse: Tensor, dlse: Tensor) -> None:
    """Let the gradient of the LSE take part, which is P for the scores of a row: dS = P (dP - delta + dlse).

    delta float32 (batch, heads, padded seqlen_q) is changed; lse and dlse are (batch, heads, seqlen_q). Rows without
    keys keep their delta of 0 whatever dlse holds.
    """
    delta[:, :, : lse.shape[2]] -= dlse.detach().masked_fill(lse == -math.inf, 0.0)


def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    """New contiguous tensors of the shapes and dtypes of the inputs, on the current GPU."""
    make = device_memory.empty_on_gpu
    return tuple([make(*new_layout(x.shape), x.dtype) for x in inputs])


def lse_shape(config: KernelConfig | DqTile, q_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, heads, seqlen_q rounded up to whole query tiles)."""
    batch, seqlen, heads, _ = q_shape
    return batch, heads, -(-seqlen // config.tile_m) * config.tile_m


def dq_shape(config: KernelConfig | DqTile, q_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the float32 sums of dQ: (batch, heads, query tiles, parts, words)."""
    batch, seqlen, heads, _ = q_shape
    return batch, heads, -(-seqlen // config.tile_m), config.dq_parts, config.dq_words


def divided_shape(config: BackwardConfig, k_shape: tuple[int, ...], head_parts: int) -> tuple[int, ...]:
    """Of the float32 dK, or dV, of a kernel that ``divides_heads``: (batch, kv_heads times parts, key tiles, parts of a
    tile, words)."""
    batch, seqlen, kv_heads, _ = k_shape
    return batch, kv_heads * head_parts, -(-seqlen // config.tile_n), config.dq_parts, config.dk_words


@lru_cache(maxsize=REMEMBERED_CALLS)
def work_pieces(tile: DqTile, q_shape: tuple[int, ...]) -> Pieces:
    """LSE in base 2, delta and the sums of dQ, in whole query tiles."""
    rows = Piece(lse_shape(tile, q_shape))
    return rows, rows, Piece(dq_shape(tile, q_shape))


@lru_cache(maxsize=REMEMBERED_CALLS)
def divided_pieces(
    config: BackwardConfig, tile: DqTile, q_shape: tuple[int, ...], k_shape: tuple[int, ...], head_parts: int
) -> Pieces:
    """The same, and what a kernel that ``divides_heads`` leaves of dK and dV."""
    of_keys = Piece(divided_shape(config, k_shape, head_parts))
    return *work_pieces(tile, q_shape), of_keys, of_keys


@lru_cache(maxsize=REMEMBERED_CALLS)
def divided_tile_pieces(
    config: BackwardConfig, tile: DqTile, q_shape: tuple[int, ...], division: Division
) -> Pieces:
    """``work_pieces``, and what is left of dK and dV of divided tiles, and where these lie."""
    of_keys = Piece((division.tiles, division.each, config.dq_parts, config.dk_words))
    places = Piece((division.tiles * NUMBERS_OF_A_PLACE,), torch.int32)
    return *work_pieces(tile, q_shape), of_keys, of_keys, places
