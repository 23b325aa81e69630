"""Backward kernels that divide the visits of some key tiles, run from their PTX on NumPy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from hopper.backward.batch import DenseBatch
from hopper.backward.config import BackwardConfig
from hopper.backward.parts import reciprocal_of
from hopper_attention.backward_rules import Division
from hopper_attention.launch.gradient_memory import backward_counter, divided_tile_pieces
from tests.hopper.backward_maps import backward_maps
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import Arguments, prepare_on_numpy, program_of


def gradients_in_pieces(
    config: BackwardConfig,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    softmax_scale: float,
    timing: Timing,
    division: Division,
    ctas: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of (dout, q, k, v) and (out, lse); results and work memory hold NaN, or numbers far off, before.
    CTAs run one after the other: the first of ``ctas`` claims all items but for the first one of each other."""
    dout, q, k, _ = inputs
    dq, dk, dv = (torch.full_like(x, math.nan) for x in inputs[1:])
    lse_log2, delta, sums = prepare_on_numpy(config, results[0], dout, results[1])
    shapes = divided_tile_pieces(config, config, q.shape, division)[3:]
    left = [torch.full(piece.shape, math.nan) for piece in shapes[:2]]
    places = torch.full(shapes[2].shape, -(2**20), dtype=torch.int32)

    arguments, c = Arguments(), config
    maps = backward_maps(config, inputs, (lse_log2, delta), (dk, dv))
    arguments.add(*maps)
    arguments.values += [b"\0" * 16] * len(maps)
    (batch, heads, tiles), (seqlen_k, kv_heads) = sums.shape[:3], k.shape[1:3]
    arguments.tensor(sums, (tiles * heads * batch,), (sums.stride(3), sums.stride(2)))
    counter = backward_counter(config, sums)
    arguments.tensor(counter, (len(counter),), ())
    n_blocks, m_blocks = -(-seqlen_k // c.tile_n), -(-q.shape[1] // c.tile_m)
    arguments.add(softmax_scale, q.shape[1], seqlen_k)
    arguments.add(*division, reciprocal_of(division.each))
    for x in left:
        arguments.tensor(x, tuple(x.shape[1::-1]), x.stride()[2::-1])
    arguments.tensor(places, tuple(places.shape), ())
    views = [x.permute(1, 3, 2, 0) for x in (q, k)]
    tail = DenseBatch(c).tail(*views) if c.shortens else ()
    arguments.add(heads // kv_heads, n_blocks, kv_heads, batch, *tail)
    arguments.add(n_blocks * kv_heads * batch, m_blocks)
    arguments.launch(program_of(config), (ctas, 1, 1), timing)
    assert not counter.any()

    arguments = Arguments()
    arguments.tensor(sums, (batch, heads, tiles), sums.stride()[:4])
    arguments.tensor(dq, tuple(dq.shape), dq.stride()[:3])
    for x in left:
        arguments.tensor(x, tuple(x.shape[:2]), x.stride()[:3])
    arguments.tensor(places, tuple(places.shape), ())
    for x in (dk, dv):
        arguments.tensor(x, tuple(x.shape), x.stride()[:3])
    arguments.add(softmax_scale)
    rows = -(-2 * division.tiles // (tiles * batch))
    arguments.launch(program_of(BackwardStep("finish", config)), (tiles, heads + rows, batch))
    return dq, dk, dv
