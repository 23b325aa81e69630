"""Gradients where the query heads of a head of K and V are divided among CTAs, on a GPU: against float64 and kernels
that divide none, the same bits where an order is asked for, whoever asks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import steps_of
from hopper.backward.config import NATIVE_HEAD_DIMS, BackwardConfig, can_walk_back, select_backward_config
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention import flash_attn_func, flash_attn_varlen_func
from hopper_attention.backward_rules import MANY_KEYS
from hopper_attention.launch import backward, packed_backward
from hopper_attention.launch.gradient_launchers import DividedLauncher, PieceLauncher
from hopper_attention.launch.packed_backward import PackedBackwardLauncher
from hopper_attention.masks import FULL_SIDES, Sides
from tests.gpu.conftest import compile_together
from tests.gpu.gradients import find_gradient_errors, find_packed_errors, poison_work_memory
from tests.python.varlen_cases import Case, offsets

pytestmark = pytest.mark.gpu

DTYPES = torch.bfloat16, torch.float16
CASES = ((517, 517), (8, 1), 1), ((413, 203), (8, 2), 2), ((700, 301), (6, 2), 1), ((333, 1030), (12, 1), 1)
"""Lengths, heads and batch."""


def dividing() -> tuple[BackwardConfig, ...]:
    """Those of the calls below but for windows, which each test compiles."""
    kinds = product(("bfloat16", "float16"), NATIVE_HEAD_DIMS, (False, True), (False, True))
    dense = [select_backward_config(d, size, size, *options) for d, size, *options in kinds]
    packed = [
        select_backward_config("bfloat16", size, size, *options, layout="varlen")
        for size, *options in product(NATIVE_HEAD_DIMS, (False, True), (False, True))
    ]
    packed += [replace(c, clears_ahead=False) for c in packed if c.clears_ahead]
    divided = tuple(replace(c, divides_heads=True) for c in (*dense, *packed))
    walking = [replace(c, walks_back=True) for c in (*dense, *divided) if can_walk_back(c)]
    return *divided, *walking


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """All of them side by side, and what comes in front."""
    configs = dividing()
    compile_together((*shipped_forward_configs(), *configs, *steps_of(configs)))


@pytest.fixture(autouse=True)
def poisoned_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work memory holds NaN before it is given to a call, and counters that `prepare` clears hold something."""
    poison_work_memory(monkeypatch)


def parts_of(x: Any, causal: bool, deterministic: bool = False, sides: Sides = FULL_SIDES) -> int:
    """The parts into which heads are divided for inputs like these, or else visits; 1 where another kernel serves."""
    shapes = x.q.shape, x.k.shape, x.v.shape
    found = backward.find_for_call(*shapes, x.q.dtype, x.q.device, causal, deterministic, None, sides)
    if isinstance(found, PieceLauncher):
        return found.division.each
    return found.head_parts if isinstance(found, DividedLauncher) else 1


def leaves_of(x: Any) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v)]


def gradients(leaves: list[Tensor], douts: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    """dq, dk and dv from gradients of the output, or of the output and the LSE."""
    results = flash_attn_func(*leaves, return_attn_probs=True, **options)
    return torch.autograd.grad(results[: len(douts)], leaves, douts)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_gradients(draw, head_dim: int, causal: bool) -> None:
    """Of the output, and of the LSE beside it; calls that are found again have those of the first."""
    failures = {}
    for dtype, (seqlens, heads, batch) in product(DTYPES, CASES):
        x = draw(dtype, batch, seqlens, heads, head_dim)
        leaves, dout = leaves_of(x), torch.randn_like(x.q)
        dlse = torch.randn(batch, heads[0], seqlens[0], device="cuda")
        wrong = [] if parts_of(x, causal) > 1 else ["not divided"]
        passes = [gradients(leaves, (dout,), causal=causal) for _ in range(4)]
        wrong += find_gradient_errors(x, passes[0], dout, causal)
        wrong += find_gradient_errors(x, passes[3], dout, causal)
        # Of dQ the order of sums is free.
        wrong += [n for n in (1, 2) if not all(torch.equal(passes[0][n], other[n]) for other in passes[1:])]
        both = gradients(leaves, (dout, dlse), causal=causal)
        wrong += find_gradient_errors(x, both, dout, causal, dlse)
        if wrong:
            failures[dtype, seqlens, heads, batch] = wrong
    assert failures == {}


@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_heads_that_are_walked_over_together(draw, head_dim: int) -> None:
    """In two parts, and undivided, with more and fewer keys than queries."""
    failures = {}
    shapes = (
        ((700, 700), (32, 4), 6),
        ((515, 1300), (28, 4), 6),
        ((1300, 515), (12, 1), 50),
        ((1100, 1100), (10, 2), 12),
    )
    for dtype, (seqlens, heads, batch) in product(DTYPES, shapes):
        x = draw(dtype, batch, seqlens, heads, head_dim)
        sizes = x.q.shape, x.k.shape, x.v.shape
        found = backward.find_for_call(*sizes, dtype, x.q.device, True, False, None, FULL_SIDES)
        assert found.config.walks_back
        leaves, dout = leaves_of(x), torch.randn_like(x.q)
        passes = [gradients(leaves, (dout,), causal=True) for _ in range(4)]
        wrong = find_gradient_errors(x, passes[0], dout, True)
        # Of dQ the order of sums is free.
        wrong += [n for n in (1, 2) if not all(torch.equal(passes[0][n], other[n]) for other in passes[1:])]
        if wrong:
            failures[dtype, seqlens, heads, batch] = wrong
    assert failures == {}


@pytest.mark.parametrize("window", [(300, 0), (150, 100), (-1, 40)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_in_a_window(draw, head_dim: int, window: tuple[int, int]) -> None:
    x = draw(torch.bfloat16, 1, (1000, 1130), (16, 2), head_dim)
    assert parts_of(x, False, sides=(*window, 0)) > 1
    leaves, dout = leaves_of(x), torch.randn_like(x.q)
    dlse = torch.randn(1, 16, 1000, device="cuda")
    ours = gradients(leaves, (dout, dlse), window_size=window)
    assert find_gradient_errors(x, ours, dout, False, dlse, window) == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_fixed_order_gives_the_same_bits(draw, head_dim: int, causal: bool) -> None:
    x = draw(torch.bfloat16, 1, (1023, 1023), (16, 2), head_dim)
    assert parts_of(x, causal, deterministic=True) > 1
    leaves, dout = leaves_of(x), torch.randn_like(x.q)
    runs = [gradients(leaves, (dout,), causal=causal, deterministic=True) for _ in range(4)]
    assert all(torch.equal(*pair) for other in runs[1:] for pair in zip(runs[0], other, strict=True))
    assert find_gradient_errors(x, runs[0], dout, causal) == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_are_those_of_the_kernel_that_divides_none(draw, head_dim: int) -> None:
    """But for the rounding of float32 sums."""
    x = draw(torch.float16, 1, (2289, 2289), (8, 1), head_dim)
    assert parts_of(x, True) > 1
    out, lse = flash_attn_func(x.q, x.k, x.v, causal=True, return_attn_probs=True)
    given = torch.randn_like(x.q), x.q, x.k, x.v, out, lse, head_dim**-0.5
    whole = backward.run_backward(*given, True)
    shapes = x.q.shape, x.k.shape, x.v.shape
    launcher = backward.find_for_call(*shapes, x.q.dtype, x.q.device, True, False, None, FULL_SIDES)
    for ours, theirs in zip(launcher(*given, None), whole, strict=True):
        assert ((ours - theirs).float().norm() / theirs.float().norm()).item() < 1e-3


# Packed


@pytest.fixture
def packed_parts(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The numbers of parts of the launchers that make passes of packed sequences."""
    seen: set[int] = set()
    pieces = packed_backward.PackedBackwardLauncher.pieces

    def note(launcher: PackedBackwardLauncher, *given: Any) -> Any:
        seen.add(launcher.head_parts)
        return pieces(launcher, *given)

    monkeypatch.setattr(packed_backward.PackedBackwardLauncher, "pieces", note)
    return seen


def random_case(seed: int, head_dim: int) -> Case:
    """Sequences without rows, of one, short and long ones, of which not all rows may be used."""
    rng = random.Random(seed)
    rooms = [[rng.choice((0, 1, rng.randrange(200), rng.randrange(900))) for _ in range(6)] for _ in "qk"]
    used = [[rng.randrange(room + 1) for room in of] if seed % 2 else None for of in rooms]
    rows = [tuple(x) if x is not None else None for x in (*rooms, *used)]
    heads = ((8, 1), (8, 2), (6, 2))[seed % 3]
    return Case(*rows, behind=77 * (seed % 2), heads=heads, head_dims=(head_dim, head_dim))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_gradients_of_packed_sequences(packed_parts: set[int], head_dim: int, deterministic: bool) -> None:
    failures = {}
    for seed, causal in product(range(4), (False, True)):
        case = random_case(seed, head_dim)
        lengths = [x.cuda() if isinstance(x, Tensor) else x for x in case.lengths]
        leaves = [x.cuda().requires_grad_() for x in case.tensors(torch.bfloat16, seed=seed)]
        options = {"causal": causal, "deterministic": deterministic, "return_attn_probs": True}
        packed_parts.clear()
        passes = []
        for _ in range(3):
            out, lse = flash_attn_varlen_func(*leaves, *lengths, **options)
            torch.manual_seed(seed)
            douts = torch.randn_like(out), torch.randn_like(lse)
            passes.append(torch.autograd.grad((out, lse), leaves, douts))
        wrong = find_packed_errors(case, leaves, passes[2], douts, causal)
        wrong += [] if packed_parts and min(packed_parts) > 1 else ["not divided"]
        compared = range(3) if deterministic else (1, 2)
        if not all(torch.equal(passes[0][n], other[n]) for other in passes[1:] for n in compared):
            wrong.append("other bits")
        if wrong:
            failures[seed, causal] = wrong
    assert failures == {}


@pytest.mark.parametrize("lengths", [(9000,), (3000, 10, 0, 5990)], ids=str)
def test_sums_that_the_kernel_clears(packed_parts: set[int], lengths: tuple[int, ...]) -> None:
    """Calls without a gradient of the LSE, found again at the third."""
    assert max(lengths) >= MANY_KEYS
    case = Case(lengths, lengths, heads=(4, 1), head_dims=(128, 128))
    bounds = offsets(lengths).cuda()
    leaves = [x.cuda().requires_grad_() for x in case.tensors(torch.bfloat16)]
    for _ in range(4):
        out, lse = flash_attn_varlen_func(
            *leaves, bounds, bounds, max(lengths), max(lengths), return_attn_probs=True
        )
        dout = torch.randn_like(out)
        ours = torch.autograd.grad(out, leaves, dout)
    assert find_packed_errors(case, leaves, ours, (dout, torch.zeros_like(lse)), False) == []
    assert min(packed_parts) > 1


def test_bounds_decide_on_the_parts(packed_parts: set[int]) -> None:
    """Of the same tensors; what they give is the same but for the rounding of float32 sums."""
    case = Case((256,) * 8, (256,) * 8, heads=(32, 8), head_dims=(128, 128))
    bounds = offsets(case.rooms_q).cuda()
    leaves = [x.cuda().requires_grad_() for x in case.tensors(torch.bfloat16)]
    dout, zeros = torch.randn_like(leaves[0]), torch.zeros(32, 2048, device="cuda")
    found, parts = {}, {256: set(), 2048: set()}
    for bound in (256, 2048) * 4:
        packed_parts.clear()
        out = flash_attn_varlen_func(*leaves, bounds, bounds, bound, bound, causal=True)
        found[bound] = torch.autograd.grad(out, leaves, dout)
        parts[bound] |= packed_parts
        assert find_packed_errors(case, leaves, found[bound], (dout, zeros), True) == []
    assert parts[256] == {1} and min(parts[2048]) > 1
    for one, other in zip(found[256], found[2048], strict=True):
        assert ((one - other).float().norm() / one.float().norm()).item() < 5e-3


# Streams, graphs, torch


def on_a_side_stream(run: Callable[[], Any]) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_side_stream_is_the_one_that_is_used(draw, deterministic: bool) -> None:
    x = draw(torch.bfloat16, 1, (1000, 1000), (8, 1), 128)
    leaves, dout = leaves_of(x), torch.randn_like(x.q)
    options = {"causal": True, "deterministic": deterministic}
    expected = gradients(leaves, (dout,), **options)

    def late() -> tuple[Tensor, ...]:
        out = flash_attn_func(*leaves, **options)
        given = torch.full_like(dout, math.nan)
        torch.cuda._sleep(100_000_000)  # about 50 ms: a launch on another stream would read NaN
        given.copy_(dout)
        return torch.autograd.grad(out, leaves, given)

    for _ in range(3):
        ours = on_a_side_stream(late)
        assert (
            all(map(torch.equal, ours[1:], expected[1:])) and find_gradient_errors(x, ours, dout, True) == []
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_graph_computes_on_what_its_inputs_hold_then(draw, deterministic: bool) -> None:
    x = draw(torch.bfloat16, 1, (1000, 1000), (8, 2), 128)
    leaves, dout = leaves_of(x), torch.randn_like(x.q)
    assert parts_of(x, True, deterministic) > 1

    def step() -> tuple[Tensor, ...]:
        return gradients(leaves, (dout,), causal=True, deterministic=deterministic)

    for _ in range(3):
        on_a_side_stream(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        fresh = draw(torch.bfloat16, 1, (1000, 1000), (8, 2), 128)
        with torch.no_grad():
            for target, source in zip(leaves, (fresh.q, fresh.k, fresh.v), strict=True):
                target.copy_(source)
        for gradient in captured:
            gradient.fill_(math.nan)
        graph.replay()
        assert find_gradient_errors(fresh, captured, dout, True) == []


def test_a_graph_takes_other_lengths_at_each_replay(packed_parts: set[int]) -> None:
    total, batch, heads = 2000, 5, (8, 1)
    leaves = [torch.randn(total, n, 64, device="cuda").bfloat16().requires_grad_() for n in (8, 1, 1)]
    bounds = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    dout = torch.randn_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        out = flash_attn_varlen_func(*leaves, bounds, bounds, total, total, causal=True)
        return torch.autograd.grad(out, leaves, dout)

    on_a_side_stream(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    rng, zeros = random.Random(0), torch.zeros(8, total, device="cuda")
    for _ in range(4):
        cuts = sorted(rng.randrange(total + 1) for _ in range(batch))
        bounds.copy_(torch.tensor([0, *cuts], dtype=torch.int32))
        for gradient in captured:
            gradient.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        rooms = tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))
        case = Case(rooms, rooms, behind=total - cuts[-1], heads=heads, head_dims=(64, 64))
        assert find_packed_errors(case, leaves, captured, (dout, zeros), True) == []
    assert min(packed_parts) > 1


def test_torch_compile_takes_the_whole_graph(draw) -> None:
    x = draw(torch.bfloat16, 1, (517, 600), (8, 1), 128)
    assert parts_of(x, True) > 1

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True).float().square().sum()

    torch._dynamo.reset()
    eager, traced = leaves_of(x), leaves_of(x)
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True)(*traced).backward()
    for one, other in zip(eager, traced, strict=True):
        assert ((other.grad - one.grad).float().norm() / one.grad.float().norm()).item() < 5e-3


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_strides_and_addresses_are_free(draw, head_dim: int) -> None:
    x = draw(torch.bfloat16, 1, (400, 517), (8, 1), head_dim)
    dout = torch.randn_like(x.q)
    expected = gradients(leaves_of(x), (dout,), deterministic=True)
    for spread in (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.nn.functional.pad(t, (0, 3))[..., :head_dim],
        lambda t: torch.cat((t, t), 3)[..., head_dim:],
    ):
        moved = [spread(t).detach().requires_grad_() for t in (x.q, x.k, x.v)]
        ours = gradients(moved, (spread(dout),), deterministic=True)
        assert all(map(torch.equal, ours, expected))
