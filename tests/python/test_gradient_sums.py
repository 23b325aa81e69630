"""Sums of dQ over parts of the keys: cleared once for the whole pass, however many launches add to them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from hopper.backward.config import BackwardConfig, select_backward_config
from hopper_attention import compile_cache
from hopper_attention.device_memory import Piece
from hopper_attention.distributed.attend import Call, Saved
from hopper_attention.distributed.gradients import EVERYTHING, KernelGradients, row_gradients
from hopper_attention.distributed.pieces import Problem, groups_between
from hopper_attention.launch import backward, gradient_launchers
from hopper_attention.launch.gradient_launchers import BackwardLauncher
from hopper_attention.launch.gradient_memory import DqTile
from hopper_attention.launch.gradient_sums import GradientSums, share_sums
from hopper_attention.masks import MaskSpec
from tests.python.fake_gpu import pretend

ROWS, HEADS, TILE = 70, 2, DqTile(tile_m=32, dq_parts=2, dq_words=64)


class Adding:
    """A launcher whose kernel adds 1 to the sums that it is given, and whose last step hands them out."""

    dq_tile, device_index, config = TILE, 0, SimpleNamespace(tile_m=TILE.tile_m)

    def __init__(self) -> None:
        self.cleared: list[tuple[int, ...]] = []
        self.finished = torch.empty(0)

    @property
    def adding(self) -> Adding:
        return self

    def prepare(self, *arguments: Tensor) -> None:
        *_, lse_log2, delta, sums = arguments
        for x in (lse_log2, delta, sums):
            x.zero_()
        self.cleared.append(tuple(sums.shape))

    def start(self, inputs: tuple[Tensor, ...], memory: tuple[Tensor, ...], *_: Any) -> None:
        assert len(inputs) == 4
        memory[2].add_(1.0)

    def finish(self, sums: Tensor, dq: Tensor, softmax_scale: float) -> None:
        self.finished = sums.clone()


@pytest.mark.parametrize("batch", [1, 2])
def test_sums_are_cleared_once_and_whole(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(Piece, "empty", lambda piece, device: torch.full(piece.shape, math.nan))
    adding = Adding()
    launcher = cast(BackwardLauncher, adding)
    q, out, dout = (torch.zeros(batch, ROWS, HEADS, 64, dtype=torch.bfloat16) for _ in range(3))
    sums = GradientSums(launcher, q, out, torch.zeros(batch, HEADS, ROWS), dout, None)
    k, v, dk, dv = (torch.zeros(batch, 40, HEADS, 64, dtype=torch.bfloat16) for _ in range(4))
    # Three parts of the keys; of the third the last entry of two alone, or the last head of the only one.
    everything, last = (slice(None), slice(None)), (slice(batch - 1, None), slice(2 - batch, None))
    for part in (everything, everything, last):
        given = tuple(x[part[0], :, part[1]] for x in (k, v, dk, dv))
        tensors = cast(tuple[Tensor, Tensor, Tensor, Tensor], given)
        sums.add(launcher, part, tensors, 0.125, MaskSpec(causal=False))
    if batch > 1:
        with pytest.raises(AssertionError, match="one behind the other"):
            sums.add(launcher, (slice(None), slice(1, None)), (k, v, dk, dv), 0.125, MaskSpec(causal=False))
    # Other sums of rows that begin with a tile are taken over; of others they are not.
    rest = GradientSums(
        launcher, q[:, 32:], out[:, 32:], torch.zeros(batch, HEADS, ROWS - 32), dout[:, 32:], None
    )
    rest.add(launcher, (slice(0, batch), slice(0, HEADS)), (k, v, dk, dv), 0.125, MaskSpec(causal=False))
    assert sums.take(rest, everything, 32) and not sums.take(rest, everything, 33)
    sums.finish(torch.empty_like(q), 0.125)

    assert adding.cleared == [(batch, HEADS, 3, 2, 64), (batch, HEADS, 2, 2, 64)]
    expected = torch.full((batch, HEADS, 3, 2, 64), 2.0)
    expected[last] += 1
    expected[:, :, 1:] += 1
    assert torch.equal(adding.finished, expected)


def test_sums_of_several_launches_are_added_to_by_a_kernel_that_stores_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs: list[BackwardConfig | BackwardStep] = []
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: configs.append(config))
    monkeypatch.setattr(gradient_launchers, "count_ctas", lambda index: 132)
    config = select_backward_config("bfloat16", 64, 64, True, ordered=True)
    launcher = BackwardLauncher(0, config, print, (132,), print, print)
    adding = launcher.adding
    assert config.stores_first and not adding.config.stores_first
    assert adding.adding is adding and adding.finish is launcher.finish and adding.dq_tile == launcher.dq_tile
    assert [x.name for x in configs] == [
        "hopper_bwd_prepare_bf16_d64_m128n128",
        "hopper_bwd_bf16_d64_causal_m128n128s2_r240_24_ordered",
    ]


def test_narrow_heads_in_a_window_and_without_one_add_to_the_same_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a ring some groups of keys are in a window, whose kernels multiply all columns. The others do so then."""
    pretend(monkeypatch, backward)
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: lambda *given: None)
    for head_dim, multiplied in ((40, 0), (80, 80)):
        q, k, v, dout = (torch.zeros(1, 200, 2, head_dim, dtype=torch.bfloat16) for _ in range(4))
        saved, call = Saved(q, dout, torch.zeros(1, 2, 200), dout, None), Call(0.5, backend="hopper")
        problem = Problem(2, 400, 400, "contiguous", 250, 0)
        groups = [group for other in (0, 1) for group in groups_between(problem, 1, other)]
        assert [group.pieces[0].mask.has_window for group in groups] == [True, False]
        rows = row_gradients(saved, (k, v), [(group, EVERYTHING) for group in groups], call)
        assert isinstance(rows, KernelGradients)
        windowed, plain = (rows.launchers[group] for group in groups)
        assert share_sums([windowed, plain]) and windowed.config.window and not plain.config.window
        assert (windowed.config.used_head_dim, plain.config.used_head_dim) == (0, multiplied)
        assert plain.with_all_columns.config.used_head_dim == 0 and windowed.with_all_columns is windowed
        # Without a window zeros are left out.
        alone = row_gradients(saved, (k, v), [(groups[1], EVERYTHING)], call)
        assert isinstance(alone, KernelGradients)
        assert [x.config.used_head_dim for x in alone.launchers.values()] == [head_dim]
