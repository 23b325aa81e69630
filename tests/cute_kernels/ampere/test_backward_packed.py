"""Packed sequences in the backward kernel without WGMMA, run from its PTX on a CPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.window import window_of
from tests.cute_kernels.ampere.test_backward_windows import check, exact_gradients, select
from tests.cute_kernels.ampere.test_forward_packed import packed_inputs
from tests.cute_kernels.ampere.test_forward_windows import LATE, NAMES, draw
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import NO_RULES, Rules, finish_on_numpy
from tests.hopper.packed_ampere import launch_packed_ampere_gradients

LOG2_E = math.log2(math.e)

LENGTHS = [(0, 0), (130, 150), (1, 70), (0, 40), (65, 0), (70, 31), (3, 3), (0, 0)]
PACKED = [
    (torch.bfloat16, 64, True, (2, 1), (), False),
    (torch.float16, 64, False, (1, 1), (), False),
    (torch.bfloat16, 64, True, (1, 1), (), True),
    (torch.bfloat16, 64, False, (2, 2), (50, 17), False),
    (torch.float16, 64, True, (1, 1), (20, 9), True),
    (torch.bfloat16, 256, True, (1, 1), (30, 0), False),
]


class PackedCase:
    """Packed inputs with NaN wherever no sequence has a row, exact results of each sequence, and the buffers."""

    def __init__(
        self,
        config: AmpereBackwardConfig,
        packing: Packing,
        heads: tuple[int, int],
        sides: tuple,
        rules: Rules = NO_RULES,
    ):
        c, dtype = config, next(t for t, name in NAMES.items() if name == config.dtype)
        self.config, self.packing, self.sides, self.rules = c, packing, sides, rules
        dims = c.head_dim, c.head_dim
        self.q, self.k, self.v = packed_inputs(packing, dtype, heads, dims)
        (self.dout,) = draw(5, dtype, tuple(self.q.shape))
        self.dout[self.q.isnan()] = math.nan
        tiles = packing.total_q // c.tile_m + packing.sequences
        self.lse, self.delta = (torch.full((heads[0], tiles * c.tile_m), math.nan) for _ in range(2))
        self.sums = torch.zeros(heads[0], tiles, c.dq_parts, c.dq_words)
        self.dk, self.dv = torch.full_like(self.k, math.nan), torch.full_like(self.v, math.nan)
        self.exact = [self._prepare(i) for i in range(packing.sequences)]

    def parts(self, i: int) -> tuple[slice, slice, slice]:
        """Rows of Q, rows of K and query tiles of a sequence."""
        rows, keys = self.packing.rows_q(i), self.packing.rows_k(i)
        first = rows.start // self.config.tile_m + i
        tiles = slice(first, first + -(-len(rows) // self.config.tile_m))
        return slice(rows.start, rows.stop), slice(keys.start, keys.stop), tiles

    def _prepare(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Fill LSE and delta of a sequence, as the step before the kernel does; the exact gradients."""
        if i == self.packing.sequences - 1:
            return self.q[:0], self.k[:0], self.v[:0]
        rows, keys, tiles = self.parts(i)
        inputs, dout = (self.q[rows], self.k[keys], self.v[keys]), self.dout[rows]
        exact, out, lse = exact_gradients(
            inputs, dout, window_of(self.config.causal, self.sides), self.rules, i
        )
        of_tiles = slice(tiles.start * self.config.tile_m, tiles.stop * self.config.tile_m)
        self.lse[:, of_tiles], self.delta[:, of_tiles] = math.inf, 0
        of_rows = slice(of_tiles.start, of_tiles.start + rows.stop - rows.start)
        empty = lse == -math.inf
        delta = (dout.double() * out.to(dout.dtype).double()).sum(-1).T
        self.lse[:, of_rows] = (lse * LOG2_E).masked_fill(empty, math.inf).float()
        self.delta[:, of_rows] = delta.masked_fill(empty, 0.0).float()
        return exact

    def run(self) -> None:
        c, scale = self.config, self.config.head_dim**-0.5
        counts = self.sums.shape[0] * self.sums.shape[1] * c.counts_per_tile if c.ordered else 0
        counter = torch.zeros(2 + counts, dtype=torch.int32)
        tensors = (self.q, self.k, self.v, self.dout, self.lse, self.delta, self.sums, self.dk, self.dv)
        plan = self.packing.plan(c.tile_n, of_keys=True)
        launch_packed_ampere_gradients(
            c, (*tensors, counter), plan, self.packing.sequences, (scale, *self.sides), LATE, self.rules
        )

    def gradients(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys, tiles = self.parts(i)
        dq = torch.full_like(self.q[rows], math.nan)[None]
        if tiles.stop > tiles.start:
            dense = replace(self.config, layout="dense")
            finish_on_numpy(dense, self.sums[None, :, tiles].contiguous(), dq, self.config.head_dim**-0.5)
        return dq[0], self.dk[keys], self.dv[keys]

    def check(self) -> None:
        """Every sequence; zeros for keys behind the last; nothing else written."""
        written = torch.zeros(self.packing.total_k, dtype=torch.bool)
        own_tiles = torch.zeros(self.sums.shape[1], dtype=torch.bool)
        for i, exact in enumerate(self.exact):
            _, keys, tiles = self.parts(i)
            written[keys] = True
            if i == self.packing.sequences - 1:
                assert bool((self.dk[keys] == 0).all()) and bool((self.dv[keys] == 0).all())
            else:
                own_tiles[tiles] = True
                check(self.gradients(i), exact)
        assert bool(self.dk[~written].isnan().all()) and bool(self.dv[~written].isnan().all())
        assert bool((self.sums[:, ~own_tiles] == 0).all())


@pytest.mark.parametrize("dtype,head_dim,causal,heads,sides,ordered", PACKED, ids=str)
def test_packed_sequences(dtype, head_dim, causal, heads, sides, ordered) -> None:
    config = select(dtype, head_dim, causal, ordered, bool(sides), "varlen")
    case = PackedCase(config, Packing.of(LENGTHS, tail=(70, 9)), heads, sides)
    case.run()
    case.check()


@pytest.mark.parametrize("ordered", [False, True])
def test_parts_of_sequences(ordered: bool) -> None:
    """Rows beyond those in use are neither read nor written."""
    used = {"seqused_q": (31, 140, 0), "seqused_k": (100, 0, 128)}
    packing = Packing.of([(100, 150), (140, 90), (130, 129)], **used)
    config = select(torch.bfloat16, 64, True, ordered, False, "varlen")
    case = PackedCase(config, packing, (2, 1), ())
    case.run()
    case.check()
