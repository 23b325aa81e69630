"""Runs a backward kernel that divides the visits of some key tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_kernels.backward.step import NUMBERS_OF_A_PLACE
from hopper.backward.config import BackwardConfig
from hopper_attention import device_memory
from hopper_attention.backward_rules import Division
from hopper_attention.device_memory import Piece, Pieces, Work
from hopper_attention.launch.at_once import Given, Step
from hopper_attention.launch.base import REMEMBERED_CALLS
from hopper_attention.launch.gradient_launchers import FinishedLauncher
from hopper_attention.launch.gradient_memory import DqTile, work_pieces


@dataclass(frozen=True)
class PieceLauncher(FinishedLauncher):
    """That of a kernel which leaves dK and dV of the key tiles of ``division`` in float32, in pieces. ``finish`` adds
    them up, and rounds dQ as well."""

    division: Division

    def pieces(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Pieces:
        return divided_tile_pieces(self.config, self.dq_tile, q_shape, self.division)

    def steps(self, softmax_scale: float, options: tuple[Any, ...], memory: tuple[Any, ...]) -> list[Step]:
        dout, q, k, v, out, lse, dq, dk, dv = map(Given, range(9))
        lse_log2, delta, sums, *left, counter = memory
        of_call = softmax_scale, self.division.first, *self.grid
        return [
            Step(self.prepare, (out, dout, lse, lse_log2, delta, sums)),
            Step(self.kernel, (q, k, v, dout, lse_log2, delta, sums, dk, dv, *left, counter, *of_call)),
            Step(self.finish, (sums, dq, *left, dk, dv, softmax_scale)),
        ]

    def launch(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor, ...],
        softmax_scale: float,
        dlse: Tensor | None,
        options: tuple[Any, ...],
    ) -> None:
        work = device_memory.work_memory(q.device, self.device_index, self.pieces(q.shape, k.shape))
        lse_log2, delta, sums, *left = work.arguments
        self._prepare(dout, out, lse, dlse, Work(work.tensors[:3], (lse_log2, delta, sums)))
        dq, dk, dv = gradients
        memory = lse_log2, delta, sums, dk, dv, *left
        counter = self._counter(work.tensors[2])
        self._start((q, k, v, dout), memory, counter, softmax_scale, (self.division.first,))
        self.finish(sums, dq, *left, dk, dv, softmax_scale)


@lru_cache(maxsize=REMEMBERED_CALLS)
def divided_tile_pieces(
    config: BackwardConfig, tile: DqTile, q_shape: tuple[int, ...], division: Division
) -> Pieces:
    """``work_pieces``, and what is left of dK and dV of divided tiles, and where these lie."""
    of_keys = Piece((division.tiles, division.each, config.dq_parts, config.dk_words))
    places = Piece((division.tiles * NUMBERS_OF_A_PLACE,), torch.int32)
    return *work_pieces(tile, q_shape), of_keys, of_keys, places
