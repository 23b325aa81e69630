"""Windows by the reference: masks against brute force, results and gradients against the float64 oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from hopper_attention.masks import MAX_WINDOW_LENGTH, MaskSpec, check_window_lengths
from hopper_attention.reference import attention_naive, attention_tiled, tiled_backward, tiled_forward
from hopper_attention.reference.tiles import Mask
from tests.python.dense_cases import (
    assert_defined,
    assert_nan_reaches,
    assert_tiles_hold,
    by_definition,
    sees,
)

LENGTHS = ((1, 1), (1, 6), (6, 1), (5, 5), (4, 9), (9, 4))
SIDES = (-1, 0, 1, 2, 3, 8, 100)
CPU = torch.device("cpu")


def of_spec(spec: MaskSpec, seqlen_q: int, seqlen_k: int) -> Tensor:
    return sees(seqlen_q, seqlen_k, spec.causal, spec.window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_the_canonical_form_hides_the_same_keys(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    full = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    for left, right in itertools.product(SIDES, SIDES):
        wanted = sees(seqlen_q, seqlen_k, causal, (left, right))
        spec = MaskSpec.canonical(causal, left, right, seqlen_q, seqlen_k)
        assert torch.equal(of_spec(spec, seqlen_q, seqlen_k), wanted), (left, right)
        assert spec.window_right != 0 and not (spec.causal and spec.window_right != -1)
        # A side that is left hides something: without it there would be no window.
        for side, alone in (("left", (spec.window_left, -1)), ("right", (-1, spec.window_right))):
            if alone != (-1, -1):
                assert not torch.equal(sees(seqlen_q, seqlen_k, False, alone), full), side
        if torch.equal(wanted, full) and not causal:
            assert spec == MaskSpec(False)


@pytest.mark.parametrize("causal", [False, True])
def test_bounds_of_lengths_keep_what_a_shorter_sequence_needs(causal: bool) -> None:
    for (seqlen_q, seqlen_k), more, left, right in itertools.product(LENGTHS, (0, 3), SIDES, SIDES):
        spec = MaskSpec.canonical(causal, left, right, seqlen_q + more, seqlen_k + more)
        wanted = sees(seqlen_q, seqlen_k, causal, (left, right))
        assert torch.equal(of_spec(spec, seqlen_q, seqlen_k), wanted)


def test_long_sequences_have_no_window() -> None:
    most = MAX_WINDOW_LENGTH
    check_window_lengths(MaskSpec(True, 5), most, most)
    check_window_lengths(MaskSpec(True), most + 1, most + 1)
    for lengths in ((most + 1, 1), (1, most + 1)):
        with pytest.raises(NotImplementedError, match=r"windows are implemented up to 536870912"):
            check_window_lengths(MaskSpec(False, -1, 5), *lengths)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(1, 1), (2, 3), (4, 2), (16, 16)])
def test_tiles_hold_every_pair_that_is_seen_and_skip_the_others(
    tile_m: int, tile_n: int, causal: bool
) -> None:
    for (seqlen_q, seqlen_k), left, right in itertools.product(LENGTHS, SIDES, SIDES):
        mask = Mask(seqlen_q, seqlen_k, causal, left, right)
        wanted = sees(seqlen_q, seqlen_k, causal, (left, right))
        assert_tiles_hold(mask, wanted, tile_m, tile_n)


def draw(
    seqlen_q: int, seqlen_k: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seqlen_q + seqlen_k)
    shapes = (2, seqlen_q, heads[0], 8), (2, seqlen_k, heads[1], 8), (2, seqlen_k, heads[1], 5)
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 7), (7, 1), (13, 13), (9, 21), (21, 9)])
def test_oracle_and_tiles_give_the_definition(
    seqlen_q: int, seqlen_k: int, heads: tuple[int, int], causal: bool
) -> None:
    q, k, v = draw(seqlen_q, seqlen_k, heads)
    for left, right in itertools.product((-1, 0, 1, 4, 11), (-1, 0, 2, 7)):
        sides = {"causal": causal, "window_left": left, "window_right": right, "softmax_scale": 0.3}
        seen = sees(seqlen_q, seqlen_k, causal, (left, right))
        wanted = by_definition(q, k, v, seen, 0.3)
        for results in (
            attention_naive(q, k, v, **sides),
            tiled_forward(q, k, v, **sides, tile_m=4, tile_n=3),
            tiled_forward(q, k, v, **sides),
        ):
            assert_defined(results, wanted, seen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(13, 13), (9, 21), (21, 9)])
def test_gradients_of_windows(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    for left, right in itertools.product((-1, 0, 3), (-1, 0, 2)):
        inputs = [x.requires_grad_() for x in draw(seqlen_q, seqlen_k)]
        sides = {"causal": causal, "window_left": left, "window_right": right}
        seen = sees(seqlen_q, seqlen_k, causal, (left, right))
        out, lse = attention_naive(*inputs, **sides)
        dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
        # What an unseen row has for a gradient of its LSE goes nowhere.
        live = dlse.masked_fill(~seen.any(1), 0.0)
        wanted = torch.autograd.grad((out, lse), inputs, (dout, live))
        ours = attention_tiled(*inputs, **sides, tile_m=4, tile_n=5)
        got = torch.autograd.grad(ours, inputs, (dout, dlse))
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
        unseen_keys = ~seen.any(0)
        assert (got[0][:, ~seen.any(1)] == 0).all()
        assert (got[1][:, unseen_keys] == 0).all() and (got[2][:, unseen_keys] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_at_16_bits_over_many_tiles(dtype: torch.dtype) -> None:
    q, k, v = draw(301, 290, dtype=dtype)
    sides = {"causal": False, "window_left": 70, "window_right": 33}
    out, lse = tiled_forward(q, k, v, **sides)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = attention_naive(*leaves, **sides)
    eps = torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() < 2 * eps * exact.abs().max()
    torch.testing.assert_close(lse.double(), exact_lse.detach(), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(exact, leaves, dout.double())
    got = tiled_backward(dout, None, q, k, v, out, lse, **sides)
    for x, y in zip(got, wanted, strict=True):
        assert (x.double() - y).abs().max() < 4 * eps * y.abs().max()


def test_what_a_window_hides_may_be_nan() -> None:
    q, k, v = draw(40, 40, dtype=torch.float32)
    sides = {"window_left": 6, "window_right": 3, "tile_m": 16, "tile_n": 16}
    clean = tiled_forward(q, k, v, **sides)
    k[:, 20], v[:, 20] = math.nan, math.nan
    assert_nan_reaches(tiled_forward(q, k, v, **sides), clean, 17, 27)
