"""Sliding windows on the kernels, against float64."""

from __future__ import annotations

import pytest
import torch

from hopper_attention import flash_attn_func
from tests.gpu.conftest import Inputs
from tests.gpu.gradients import find_errors_of_call, find_gradient_errors

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")

DTYPES = (torch.float16, torch.bfloat16)
SEQLENS = ((1, 239), (113, 203), (203, 113), (1023, 1024), (2100, 1700))
WINDOWS = ((0, 0), (1, 0), (63, 0), (128, 0), (500, 0), (0, 1), (100, 30), (7, 400), (-1, 3), (200, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_every_window_on_odd_lengths(draw, check, head_dim: int, dtype: torch.dtype) -> None:
    failures = {}
    for seqlens in SEQLENS:
        for window in WINDOWS:
            for causal in (False, True):
                inputs = draw(dtype, 2, seqlens, (4, 2), head_dim)
                wrong = check(inputs, causal, window=window)
                if wrong:
                    failures[seqlens, window, causal] = wrong
    assert failures == {}


@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (8, 1)], ids=str)
def test_heads_and_a_wide_v(draw, check, heads: tuple[int, int]) -> None:
    for head_dims in ((192, 128), (64, 128), (64, 296)):
        inputs = draw(torch.bfloat16, 2, (300, 555), heads, *head_dims)
        assert check(inputs, True, window=(77, 0)) == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_long_sequences(draw, check, head_dim: int) -> None:
    for window in ((128, 0), (1000, 0), (4096, 0), (333, 444)):
        assert check(draw(torch.bfloat16, 1, (9001, 9001), (2, 1), head_dim), False, window=window) == []


@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, (-1, -1)), (True, (1999, 0)), (True, (4095, 0)), (False, (1999, 50))],
    ids=str,
)
def test_warpgroups_that_walk_apart(draw, check, causal: bool, window: tuple[int, int]) -> None:
    # Tiles of three warpgroups: a last one of one row, and rows without a key.
    for dtype in DTYPES:
        for seqlens in ((7681, 7681), (9001, 7000), (500, 8200)):
            assert check(draw(dtype, 1, seqlens, (2, 1), 64), causal, window=window) == []


def test_keys_outside_are_never_read(draw, backend: str) -> None:
    # NaN in keys that no query of the tile's rows sees, and so in blocks that are not loaded.
    x = draw(torch.bfloat16, 1, (128, 4096), (2, 2), 128)
    exact = flash_attn_func(x.q, x.k, x.v, window_size=(100, 0), backend=backend)
    for tensor in (x.k, x.v):
        tensor[:, : 4096 - 128 - 100 - 256] = torch.nan
    assert torch.equal(flash_attn_func(x.q, x.k, x.v, window_size=(100, 0), backend=backend), exact)


def test_the_sides_are_no_part_of_a_kernel(draw, backend: str) -> None:
    # One kernel for all windows of a kind: the sides change between replays of nothing but calls.
    x = draw(torch.bfloat16, 1, (700, 700), (2, 2), 64)
    wide = flash_attn_func(x.q, x.k, x.v, causal=True, backend=backend)
    nearly = flash_attn_func(x.q, x.k, x.v, causal=True, window_size=(698, 0), backend=backend)
    assert (wide[:, :699] == nearly[:, :699]).all() or (wide - nearly).abs().max() < 0.02
    assert not torch.equal(
        wide, flash_attn_func(x.q, x.k, x.v, causal=True, window_size=(5, 0), backend=backend)
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_gradients(draw, backend: str, head_dim: int, deterministic: bool) -> None:
    failures = {}
    for dtype in DTYPES:
        for seqlens in ((113, 203), (203, 113), (1023, 1024), (300, 2500), (2500, 300)):
            for causal, window in ((True, (100, 0)), (True, (500, 0)), (False, (30, 77)), (False, (0, 200))):
                x = draw(dtype, 1, seqlens, (4, 2), head_dim)
                options = {"backend": backend, "deterministic": deterministic}
                wrong = find_errors_of_call(x, causal, window, same_bits=deterministic, **options)
                if wrong:
                    failures[dtype, seqlens, causal, window] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_gradients_of_narrow_windows(draw, head_dim: int) -> None:
    # Whose dQ is finished by the CTA that has begun it: the same bits in every run, asked for or not.
    failures = {}
    for dtype in DTYPES:
        for seqlens in ((1, 1), (129, 129), (1000, 1000), (960, 1280), (5000, 5000)):
            for causal, window in ((True, (127, 0)), (True, (128, 0)), (True, (0, 0)), (False, (60, 64))):
                x = draw(dtype, 2, seqlens, (3, 3), head_dim)
                wrong = find_errors_of_call(x, causal, window, same_bits=seqlens[1] > 1)
                if wrong:
                    failures[dtype, seqlens, causal, window] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_strips_of_many_key_tiles(draw, head_dim: int) -> None:
    # As many heads as make one strip of several key tiles for each CTA, and as many as make several strips.
    for heads in (16, 48):
        x = draw(torch.bfloat16, 1, (8192, 8192), (heads, heads), head_dim)
        dout = torch.randn(*x.q.shape, device="cuda").to(torch.bfloat16)
        leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
        for window in ((127, 0), (40, 0)):
            ours = torch.autograd.grad(
                flash_attn_func(*leaves, causal=True, window_size=window), leaves, dout
            )
            of_two = [[t[:, :, [0, heads - 1]] for t in part] for part in ((x.q, x.k, x.v), ours, (dout,))]
            wrong = find_gradient_errors(Inputs(*of_two[0]), tuple(of_two[1]), *of_two[2], True, None, window)
            assert wrong == [], (heads, window)


def test_narrow_windows_need_no_sums_of_dq(draw) -> None:
    x = draw(torch.bfloat16, 1, (8192, 8192), (8, 8), 128)
    dout = torch.randn_like(x.q)
    leaves = [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]
    peaks = []
    for window in ((127, 0), (300, 0)):
        out = flash_attn_func(*leaves, causal=True, window_size=window)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, leaves, dout)
        peaks.append((torch.cuda.max_memory_allocated() - before) / (dout.numel() * dout.element_size()))
    # dQ, dK and dV, and two numbers a row; else float32 of the size of Q beside them.
    assert 3 <= peaks[0] < 3.1 and peaks[1] > 4.9, peaks
