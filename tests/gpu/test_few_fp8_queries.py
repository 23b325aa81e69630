"""Dense calls of few queries of e4m3 on a GPU, whose tiles have several heads or whose keys are in parts: against
float64, with NaN around."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention import explain, flash_attn_func
from tests.gpu.test_few_queries import E4M3, HEADS, PARTS, Case, kernel_of, wanted

pytestmark = pytest.mark.gpu
NAMES = ("q_descale", "k_descale", "v_descale")
OWN = "the forward kernel"
"""With tiles for few queries of one head."""

LSE_ERROR = 8e-2
"""Of an LSE that is not exact."""


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Few kernels are needed."""


def case(
    sizes: tuple[int, int, int], heads: tuple[int, int], head_dim: int, kernel: str, causal: bool
) -> Case:
    return Case(sizes, heads, (head_dim, head_dim), {"causal": causal}, E4M3, kernel)


CASES = {
    f"{kernel}, {sizes}, {heads}, {head_dim}, {causal}": case(sizes, heads, head_dim, kernel, causal)
    for sizes, heads, head_dim, kernel in (
        ((64, 16, 1000), (32, 4), 128, HEADS),
        ((70, 9, 530), (64, 1), 128, HEADS),
        ((64, 40, 1001), (32, 8), 128, HEADS),
        ((64, 8, 3000), (32, 4), 64, HEADS),
        ((40, 45, 1500), (64, 16), 64, HEADS),
        ((64, 8, 999), (16, 4), 256, HEADS),
        ((40, 60, 900), (16, 8), 256, HEADS),
        ((1, 40, 20_001), (8, 2), 128, PARTS),
        ((2, 33, 9000), (8, 2), 128, PARTS),
        ((3, 20, 4097), (8, 1), 128, PARTS),
        ((1, 200, 9999), (2, 2), 128, PARTS),
        ((4, 13, 7000), (8, 1), 64, PARTS),
        ((1, 46, 30_000), (16, 4), 64, PARTS),
        ((2, 7, 5000), (64, 1), 64, PARTS),
        ((2, 21, 5001), (16, 2), 256, PARTS),
        ((1, 100, 7777), (4, 4), 256, PARTS),
        ((1, 90, 5000), (8, 2), 80, PARTS),
        ((1, 40, 6000), (12, 1), 128, PARTS),
        ((128, 33, 700), (4, 4), 128, OWN),
        ((64, 50, 333), (8, 8), 64, OWN),
        ((30, 60, 301), (8, 8), 256, OWN),
    )
    for causal in (False, True)
} | {
    # Heads that do not divide a warpgroup's rows, of which some are nobody's.
    f"{kernel}, {sizes}, {heads}, {head_dim}, {causal}": case(sizes, heads, head_dim, kernel, causal)
    for sizes, heads, head_dim, kernel, causal in (
        ((64, 17, 1000), (28, 4), 128, HEADS, True),
        ((64, 40, 1001), (24, 8), 128, HEADS, False),
        ((70, 9, 530), (40, 1), 128, HEADS, True),
        ((64, 8, 3000), (40, 8), 64, HEADS, False),
        ((40, 45, 1500), (96, 8), 64, HEADS, True),
        ((64, 8, 999), (12, 2), 256, HEADS, True),
        ((1, 40, 20_001), (28, 4), 128, PARTS, True),
        ((2, 33, 9000), (12, 4), 128, PARTS, False),
        ((4, 13, 7000), (6, 1), 64, PARTS, True),
        ((2, 21, 5001), (24, 1), 256, PARTS, False),
        ((1, 90, 5000), (10, 2), 80, PARTS, True),
    )
}


def whole(given: Case, tensors: tuple[Tensor, ...], descales: dict[str, Tensor]) -> list[Tensor]:
    """What they stand for, float64."""
    batch, kv_heads = given.sizes[0], given.heads[1]
    ones = torch.ones(batch, kv_heads, device="cuda")
    of_each = [descales.get(name, ones).double()[:, None, :, None] for name in NAMES]
    of_each[0] = of_each[0].repeat_interleave(given.heads[0] // kv_heads, 2)
    return [x.double() * scale for x, scale in zip(tensors, of_each, strict=True)]


def check(given: Case, out: Tensor, tensors: tuple[Tensor, ...], descales: dict[str, Tensor]) -> Tensor:
    """Returns the exact LSE."""
    exact, lse = wanted(*whole(given, tensors, descales), given.options)
    assert out.dtype == torch.bfloat16 and out.shape == exact.shape and out.is_contiguous()
    assert (out.double() - exact).norm() <= 6e-2 * exact.norm()
    return lse


def draw_descales(given: Case) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)
    shape = given.sizes[0], given.heads[1]
    return {name: torch.rand(shape, generator=generator, device="cuda") + 0.5 for name in NAMES}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    given = CASES[name]
    descales = draw_descales(given)
    for seed in range(3):
        tensors = given.draw(seed)
        config = explain(*tensors, **given.options, **descales).config
        assert isinstance(config, Fp8ForwardConfig) and kernel_of(config) == given.kernel
        assert given.kernel != OWN or config.tile_m == 64
        out = flash_attn_func(*tensors, **given.options, **descales)
        check(given, out, tensors, descales)
        assert torch.equal(flash_attn_func(*tensors, **given.options, **descales), out)


SOME = [name for i, name in enumerate(CASES) if i % 5 == 1 and i < 42]


@pytest.mark.parametrize("which", ["none", "one tensor", "of keys", "other strides"])
@pytest.mark.parametrize("name", SOME)
def test_descales(name: str, which: str) -> None:
    given = CASES[name]
    tensors, descales = given.draw(), draw_descales(given)
    if which == "none":
        descales = {}
    elif which == "one tensor":
        descales = dict.fromkeys(NAMES, descales["q_descale"])
    elif which == "of keys":
        descales = {"k_descale": descales["k_descale"]}
    else:
        descales = {key: x.t().contiguous().t() for key, x in descales.items()}
    outs = [flash_attn_func(*tensors, **given.options, **descales) for _ in range(4)]
    check(given, outs[0], tensors, descales)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("name", SOME)
def test_an_lse_that_is_not_exact(name: str) -> None:
    given = CASES[name]
    tensors, descales = given.draw(), draw_descales(given)
    options = given.options | descales
    for _ in range(3):
        out, lse = flash_attn_func(*tensors, return_attn_probs=True, exact_lse=False, **options)
        exact = check(given, out, tensors, descales)
        assert torch.equal(lse == -math.inf, exact == -math.inf)
        assert (lse.double() - exact).abs().max() <= LSE_ERROR and lse.is_contiguous()
        assert torch.equal(flash_attn_func(*tensors, **options), out)


@pytest.mark.parametrize("name", SOME)
def test_graphs_streams_and_compiled_calls(name: str) -> None:
    given = CASES[name]
    tensors, descales = given.draw(), draw_descales(given)

    def attend(*x: Tensor) -> Any:
        return flash_attn_func(*x, **given.options, **descales)

    expected = [attend(*tensors) for _ in range(3)][-1]
    assert torch.equal(torch.compile(attend, fullgraph=True)(*tensors), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(attend(*tensors), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors)
    for seed in (3, 4):
        for x, new in zip(tensors, given.draw(seed), strict=True):
            x.view(torch.uint8).copy_(new.view(torch.uint8))
        graph.replay()
        assert torch.equal(out, attend(*tensors))


@pytest.mark.parametrize("name", SOME)
def test_odd_addresses(name: str) -> None:
    given = CASES[name]
    tensors, descales = given.draw(), draw_descales(given)
    expected = flash_attn_func(*tensors, **given.options, **descales)
    odd = []
    for x in tensors:
        flat = torch.zeros(x.numel() + 1, device="cuda", dtype=torch.uint8)[1:].view(x.shape)
        odd.append(flat.copy_(x.view(torch.uint8)).view(E4M3))
    for _ in range(3):
        assert torch.equal(flash_attn_func(*odd, **given.options, **descales), expected)
        assert torch.equal(flash_attn_func(*tensors, **given.options, **descales), expected)


def test_more_queries_than_keys() -> None:
    given = case((64, 60, 50), (32, 4), 128, HEADS, causal=True)
    tensors = given.draw()
    out = flash_attn_func(*tensors, causal=True)
    check(given, out, tensors, {})
    assert not out[:, :10].any()


def test_keys_that_grow() -> None:
    given = case((2, 33, 9000), (8, 2), 128, PARTS, causal=True)
    q, k, v = given.draw()
    for rows in (8900, 8901, 8902, 9000, 8901):
        tensors = q, k[:, :rows], v[:, :rows]
        check(given, flash_attn_func(*tensors, causal=True), tensors, {})


def test_other_calls_on_the_same_memory() -> None:
    """Partial results of calls in turn, whose memory is kept, do not meet."""
    names = [name for name in CASES if PARTS in name]
    drawn = [(CASES[name], CASES[name].draw(1)) for name in names]
    firsts = [flash_attn_func(*tensors, **given.options) for given, tensors in drawn]
    for _ in range(5):
        for (given, tensors), first in zip(drawn, firsts, strict=True):
            assert torch.equal(flash_attn_func(*tensors, **given.options), first)
