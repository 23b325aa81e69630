"""The backward kernels with strips of key tiles, run from their PTX without a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.window import Window
from hopper.backward.config import validate_backward_config
from hopper.backward.strips import StripOrder, StripWork, length_of_strips
from hopper.backward.written_configs import fit_strips, select_strip_config
from tests.hopper.on_numpy import backward_on_numpy
from tests.hopper.test_backward_windows import DTYPES, EPSILON, LATE, attend, draw, visible


@pytest.mark.parametrize(
    "dtype,head_dim,causal,seqlens,heads,sides,key_tiles",
    [
        ("bfloat16", 128, True, (600, 600), 1, (127, 0), 2),
        ("float16", 128, True, (300, 428), 2, (90, 0), 1),
        ("bfloat16", 64, True, (600, 600), 1, (127, 0), 2),
        ("bfloat16", 128, False, (400, 400), 1, (64, 64), 3),
        ("float16", 96, True, (330, 330), 1, (0, 0), 2),
    ],
)
def test_strips(dtype, head_dim, causal, seqlens, heads, sides, key_tiles) -> None:
    config = select_strip_config(dtype, head_dim, head_dim, causal)
    assert fit_strips(config, sides, seqlens)
    inputs = draw(DTYPES[dtype], seqlens, (heads, heads), head_dim, 1)
    leaves = [x.double().requires_grad_() for x in inputs[1:]]
    out, lse = attend(*leaves, visible(*seqlens, sides[0], 0 if causal else sides[1]))
    exact = torch.autograd.grad(out, leaves, inputs[0].double())
    rows = out.detach().to(DTYPES[dtype]), lse.detach().float()
    ours = backward_on_numpy(
        config, tuple(inputs), *rows, head_dim**-0.5, LATE, sides=sides, key_tiles=key_tiles
    )
    for name, a, e in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        error = (a.double() - e).norm().item()
        assert error <= EPSILON[DTYPES[dtype]] * e.norm().item() + 2e-7 * a.numel() ** 0.5, name


def work_of(sides: tuple[int, int], seqlens: tuple[int, int], length: int) -> StripWork:
    """The walk of strips of so many key tiles, in one head."""
    config, key_tiles = select_strip_config("bfloat16", 128, 128, False), -(-seqlens[1] // 128)
    order = StripOrder(key_tiles, 1, 1, length)
    return StripWork(
        config, Window(*sides), None, order, order.strips, -(-seqlens[0] // 64), DenseSeqlens(*seqlens), 1
    )


@pytest.mark.parametrize("length", [1, 2, 3, 100])
@pytest.mark.parametrize("sides", [(127, 0), (128, 0), (63, 0), (0, 0), (0, 128), (60, 64), (1, 1)])
@pytest.mark.parametrize("seqlens", [(1000, 1000), (129, 129), (200, 968), (640, 704), (1, 1)])
def test_each_query_tile_is_finished_once(seqlens, sides, length) -> None:
    work = work_of(sides, seqlens, length)
    assert fit_strips(work.config, sides, seqlens)
    seqlens_of, finished = work.seqlens.of(0), []
    for tile in range(work.num_tiles):
        strip, waiting = work.strip(tile), set()
        for n_block in range(strip.first_visited, strip.end):
            visit = work.visit_in(strip, n_block)
            visited = set(range(visit.begin, visit.end))
            whole = set(range(work.queries.begin(n_block, seqlens_of), work.queries.end(n_block, seqlens_of)))
            if n_block >= strip.first:
                assert visited == whole
                # dQ of its queries that the key tile before sees too has been begun by it.
                assert {m for m in visited if m < visit.carried_end} == waiting
            final = {m for m in visited if m < visit.final_end}
            assert waiting <= final or n_block < strip.first
            waiting = visited - final
            assert len({m % 2 for m in waiting}) == len(waiting)
            finished += final
            # Each half of the keys is seen in a range of its own, and both between.
            assert visit.begin <= visit.second_begin <= visit.first_end <= max(visit.end, visit.begin)
    assert sorted(finished) == list(range(-(-seqlens[0] // 64)))


@pytest.mark.parametrize(
    "key_tiles,heads", [(128, 16), (128, 32), (16, 8), (1, 500), (7, 132), (512, 1), (40, 150)]
)
def test_strips_are_about_as_long_as_the_work_of_a_cta(key_tiles, heads) -> None:
    length = length_of_strips(key_tiles, heads, 132)
    most = -(-(-(-key_tiles // length) * heads) // 132) * (length + 0.5)
    assert 1 <= length <= key_tiles and most <= 1.2 * key_tiles * heads / 132 + 1.5


@pytest.mark.parametrize(
    "sides,seqlens",
    [
        ((129, 0), (512, 512)),
        ((65, 1), (512, 512)),
        ((-1, 0), (9, 9)),
        ((9, 0), (80, 79)),
        ((9, 0), (79, 80)),
    ],
)
def test_what_does_not_fit(sides, seqlens) -> None:
    assert not fit_strips(select_strip_config("float16", 64, 64, True), sides, seqlens)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"window": False}, "strips is True with window=False"),
        ({"ordered": True}, "ordered=True"),
        ({"layout": "varlen"}, "layout 'varlen'"),
        (
            {"tile_m": 128, "head_dim": 64, "head_dim_v": 64},
            "tile_m is 128 and stages 2, allowed with strips: 64",
        ),
    ],
)
def test_invalid_strips_are_named(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        validate_backward_config(replace(select_strip_config("bfloat16", 128, 128, True), **change))
