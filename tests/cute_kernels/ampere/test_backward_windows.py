"""Windows and packed sequences in the backward kernel without WGMMA, run from its PTX on a CPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import AmpereBackwardConfig, select_ampere_backward_config
from cute_kernels.plan.config import plan_entries
from cute_kernels.window import NO_LIMIT, Window, window_of
from tests.cute_kernels.ampere.test_forward_windows import EPSILON, LATE, NAMES, draw, packed_inputs
from tests.cute_kernels.exact import attend
from tests.cute_kernels.packing import Packing
from tests.hopper.on_numpy import backward_on_numpy, launch_packed_ampere_gradients
from tests.hopper.packed_backward import finish_on_numpy, prepare_on_numpy


def select(
    dtype: torch.dtype, head_dim: int, causal: bool, ordered: bool, window: bool, layout: str = "dense"
) -> AmpereBackwardConfig:
    return select_ampere_backward_config(
        NAMES[dtype], head_dim, head_dim, causal, "sm_80", ordered, window, layout
    )


def exact_gradients(
    inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor, window: Window
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """(dq, dk, dv), out and lse of one sequence, in float64."""
    leaves = tuple(x.double().requires_grad_() for x in inputs)
    out, lse = attend(*leaves, window, inputs[0].shape[2] ** -0.5)
    gradients = torch.autograd.grad(out, leaves, dout.double(), allow_unused=True, materialize_grads=True)
    return gradients, out.detach(), lse.detach()


def check(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert a.shape == e.shape and bool(a.isfinite().all()), name
        # Twice what it is with many keys: with few, dP and delta, of a rounded O, nearly cancel each other.
        allowed = 2 * EPSILON[a.dtype] * e.norm().item() + 1e-4
        assert (a.double() - e).norm().item() <= allowed, (name, (a.double() - e).norm() / e.norm())


WINDOWS = [
    (torch.bfloat16, 64, False, (200, 150), (2, 1), (40, 20), False),
    (torch.bfloat16, 64, True, (150, 300), (1, 1), (33, 7), True),
    (torch.float16, 64, True, (140, 140), (1, 1), (0, 0), False),
    (torch.float16, 64, False, (300, 140), (2, 1), (20, 10), True),
    (torch.bfloat16, 64, False, (60, 450), (1, 1), (50, 5), True),
    (torch.bfloat16, 64, False, (150, 200), (1, 1), (NO_LIMIT, 3), True),
    (torch.bfloat16, 64, False, (150, 200), (1, 1), (3, NO_LIMIT), True),
    (torch.bfloat16, 128, True, (130, 200), (1, 1), (65, 0), False),
    (torch.bfloat16, 256, False, (70, 140), (1, 1), (31, 5), False),
]


@pytest.mark.parametrize("dtype,head_dim,causal,seqlens,heads,sides,ordered", WINDOWS, ids=str)
def test_windows(dtype, head_dim, causal, seqlens, heads, sides, ordered) -> None:
    config = select(dtype, head_dim, causal, ordered, window=True)
    (sq, sk), (h, hk) = seqlens, heads
    q, dout, k, v = draw(0, dtype, *[(sq, h, head_dim)] * 2, *[(sk, hk, head_dim)] * 2)
    exact, out, lse = exact_gradients((q, k, v), dout, window_of(causal, sides))
    batched = tuple(x[None] for x in (dout, q, k, v))
    rows = out[None].to(dtype), lse[None].float()
    ours = backward_on_numpy(config, batched, *rows, head_dim**-0.5, LATE, sides=sides)
    check(tuple(x[0] for x in ours), exact)


LENGTHS = [(0, 0), (130, 150), (1, 70), (0, 40), (65, 0), (140, 31), (3, 3), (40, 200), (0, 0)]
PACKED = [
    (torch.bfloat16, 64, True, (2, 1), (), False),
    (torch.float16, 64, False, (1, 1), (), False),
    (torch.bfloat16, 64, True, (2, 1), (), True),
    (torch.bfloat16, 64, False, (1, 1), (), True),
    (torch.bfloat16, 64, False, (2, 2), (50, 17), False),
    (torch.float16, 64, True, (1, 1), (20, 9), True),
    (torch.bfloat16, 128, True, (2, 1), (), False),
    (torch.bfloat16, 256, True, (1, 1), (30, 0), False),
]


class PackedCase:
    """Packed inputs with NaN wherever no sequence has a row, and exact results of each sequence."""

    def __init__(self, config: AmpereBackwardConfig, packing: Packing, heads: tuple[int, int], sides: tuple):
        dtype = next(t for t, name in NAMES.items() if name == config.dtype)
        self.config, self.packing, self.sides = config, packing, sides
        self.q, self.k, self.v = packed_inputs(packing, dtype, heads, (config.head_dim, config.head_dim))
        (self.dout,) = draw(5, dtype, tuple(self.q.shape))
        self.dout[self.q.isnan()] = math.nan
        self.out = torch.full_like(self.q, math.nan)
        self.lse = torch.full((heads[0], packing.total_q), math.nan)
        self.exact = [self._attend(i) for i in range(packing.sequences - 1)]

    def _parts(self, i: int) -> tuple[slice, slice]:
        """Rows of Q and of K of a sequence."""
        rows, keys = self.packing.rows_q(i), self.packing.rows_k(i)
        return slice(rows.start, rows.stop), slice(keys.start, keys.stop)

    def _attend(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Fill out and lse of a sequence; its gradients."""
        rows, keys = self._parts(i)
        inputs, window = (self.q[rows], self.k[keys], self.v[keys]), window_of(self.config.causal, self.sides)
        exact, out, lse = exact_gradients(inputs, self.dout[rows], window)
        self.out[rows], self.lse[:, rows] = out.to(self.out.dtype), lse.float()
        return exact

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, NaN where nothing is written."""
        c, scale, number = self.config, self.config.head_dim**-0.5, self.packing.sequences
        heads, tiles = self.q.shape[1], plan_entries(self.packing.total_q, number - 1, c.tile_m)
        plan = self.packing.plan(c.tile_n, of_keys=True)
        vectors = prepare_on_numpy(c, (self.out, self.lse, None), self.dout, (plan, number), tiles)
        sums = torch.zeros(heads, tiles, c.dq_parts, c.dq_words)
        counts = heads * tiles * c.counts_per_tile if c.ordered else 0
        counter = torch.zeros(2 + counts, dtype=torch.int32)
        dq, dk, dv = (torch.full_like(x, math.nan) for x in (self.q, self.k, self.v))
        tensors = (self.q, self.k, self.v, self.dout, *vectors, sums, dk, dv, counter)
        launch_packed_ampere_gradients(c, tensors, plan, number, (scale, *self.sides), LATE)
        finish_on_numpy(c, sums, dq, (plan, number), scale)
        return dq, dk, dv

    def check(self) -> None:
        """Every sequence; zeros for keys behind the last and for all queries of none; nothing else is written."""
        dq, dk, dv = self.run()
        has_query, has_key = (torch.zeros(x.shape[0], dtype=torch.bool) for x in (dq, dk))
        for i, exact in enumerate(self.exact):
            rows, keys = self._parts(i)
            has_query[rows], has_key[keys] = True, True
            check((dq[rows], dk[keys], dv[keys]), exact)
        _, behind = self._parts(self.packing.sequences - 1)
        assert bool((dk[behind] == 0).all()) and bool((dv[behind] == 0).all())
        has_key[behind] = True
        assert bool(dk[~has_key].isnan().all()) and bool(dv[~has_key].isnan().all())
        assert bool((dq[~has_query] == 0).all())


@pytest.mark.parametrize("dtype,head_dim,causal,heads,sides,ordered", PACKED, ids=str)
def test_packed_sequences(dtype, head_dim, causal, heads, sides, ordered) -> None:
    config = select(dtype, head_dim, causal, ordered, bool(sides), "varlen")
    case = PackedCase(config, Packing.of(LENGTHS, tail=(70, 9)), heads, sides)
    case.check()


@pytest.mark.parametrize("ordered", [False, True])
def test_parts_of_sequences(ordered: bool) -> None:
    """Rows beyond those in use are neither read nor written."""
    used = {"seqused_q": (31, 200, 0), "seqused_k": (100, 0, 128)}
    packing = Packing.of([(100, 150), (200, 90), (130, 129)], **used)
    config = select(torch.bfloat16, 64, True, ordered, False, "varlen")
    case = PackedCase(config, packing, (2, 1), ())
    case.check()
