"""The backward kernels of keys that are one tile, run from their PTX without a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hopper.backward.config import select_backward_config, validate_backward_config
from hopper.backward.written_configs import fit_one_tile, select_one_tile_config
from tests.hopper.on_numpy import backward_on_numpy
from tests.hopper.test_backward_windows import DTYPES, EPSILON, LATE, attend, draw, visible
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import ptx_of

EVERYTHING = 10**6
"""Keys on a side of a window that hides none."""


@pytest.mark.parametrize(
    "dtype,head_dim,causal,seqlens,heads,batch",
    [
        ("bfloat16", 128, False, (128, 128), (2, 2), 1),
        ("float16", 128, True, (100, 128), (2, 1), 2),
        ("bfloat16", 64, False, (200, 77), (4, 2), 1),
        ("float16", 64, True, (60, 60), (1, 1), 2),
        ("bfloat16", 96, False, (68, 3), (2, 1), 1),
    ],
)
def test_one_tile(dtype, head_dim, causal, seqlens, heads, batch) -> None:
    config = select_one_tile_config(dtype, head_dim, head_dim, causal)
    assert fit_one_tile(config, seqlens)
    inputs = draw(DTYPES[dtype], seqlens, heads, head_dim, batch)
    leaves = [x.double().requires_grad_() for x in inputs[1:]]
    out, lse = attend(*leaves, visible(*seqlens, EVERYTHING, 0 if causal else EVERYTHING))
    exact = torch.autograd.grad(out, leaves, inputs[0].double())
    rows = out.detach().to(DTYPES[dtype]), lse.detach().float()
    ours = backward_on_numpy(config, tuple(inputs), *rows, head_dim**-0.5, LATE)
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        error = (a.double() - e).norm().item()
        assert error <= EPSILON[DTYPES[dtype]] * e.norm().item() + 2e-7 * a.numel() ** 0.5, name


def test_dq_and_rows_have_the_memory_of_sums() -> None:
    for head_dim in (64, 96, 128):
        config = select_one_tile_config("bfloat16", head_dim, head_dim, False)
        sums = replace(config, one_tile=False)
        # Two vectors of each warpgroup in the place of two stages of delta.
        assert config.smem_bytes == sums.smem_bytes + 4 * 2 * 64
        assert (config.name, config.tile_m) == (f"{sums.name}_tile", 64)
        assert (config.fetches_sums, config.shortens, config.writes_dq) == (False, False, True)


def test_it_has_no_hazards() -> None:
    config = select_one_tile_config("bfloat16", 128, 128, True)
    ptx = ptx_of(config)
    count, hazards = find_hazards(ptx)
    # As of the kernel that adds to sums: with a mask, without one, and dQ alone where keys are hidden.
    dq = config.tile_n // 16
    assert count == 2 * (2 * 128 // 16 + 2 * config.tile_m // 16 + dq) + dq
    assert hazards == []
    assert "cp.reduce" not in ptx and "cp.async.bulk.prefetch.L2" not in ptx


@pytest.mark.parametrize(
    "causal,seqlens,fits",
    [
        (False, (128, 128), True),
        (False, (4096, 77), True),
        (True, (100, 128), True),
        (False, (4, 1), True),
        (False, (128, 129), False),
        (True, (128, 124), False),
        (False, (127, 127), False),
        (False, (128, 0), False),
    ],
)
def test_lengths_that_fit(causal, seqlens, fits) -> None:
    assert fit_one_tile(select_one_tile_config("float16", 64, 64, causal), seqlens) == fits


@pytest.mark.parametrize(
    "change",
    [{"ordered": True}, {"window": True}, {"layout": "varlen"}, {"softcap": True}, {"dropout": True}],
)
def test_what_it_cannot_have_is_named(change) -> None:
    config = select_one_tile_config("float16", 128, 128, False)
    with pytest.raises(ValueError, match="one_tile is True with is_plain="):
        validate_backward_config(replace(config, **change))
    with pytest.raises(ValueError, match="one_tile is True"):
        validate_backward_config(replace(select_backward_config("float16", 256, 256, False), one_tile=True))
