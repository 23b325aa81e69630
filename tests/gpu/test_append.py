"""The kernel that appends to a cache on the GPU: against loops in float64, its reference, and in CUDA graphs."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from hopper_attention.kvcache_rotation import rotate_keys
from hopper_attention.launch.append import append, find
from hopper_attention.reference.append import Rotation, append_to_cache, rotate_queries
from tests.cute_kernels.append_cases import BF16, CASES, FP8, Draw
from tests.cute_kernels.appending import Case, check, cloned, poisoned
from tests.python.fake_gpu import forget_launchers

pytestmark = pytest.mark.gpu

TENSORS = ("k", "v", "k_cache", "v_cache", "cache_seqlens")


def on(device: str, case: Case) -> Case:
    """The same on another device, its tensors laid out alike."""

    def move(x: Tensor) -> Tensor:
        whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())

    changes = {}
    for field in fields(case):
        value = getattr(case, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = move(value)
        elif isinstance(value, Rotation):
            first = None if value.first_positions is None else move(value.first_positions)
            changes[field.name] = replace(
                value, cos=move(value.cos), sin=move(value.sin), first_positions=first
            )
    return replace(case, **changes)


def run(case: Case) -> tuple[Tensor, Tensor | None]:
    options = {field.name: getattr(case, field.name) for field in fields(case) if field.name not in TENSORS}
    return append(*(getattr(case, name) for name in TENSORS), **options)


@pytest.mark.parametrize("name", CASES)
def test_kernel_writes_what_it_should_and_nothing_else(name: str, device: str) -> None:
    before = CASES[name]
    case = on(device, before.copied())
    lengths, rotated = run(case)
    after = on("cpu", case)
    check(after, before, lengths.cpu(), None if rotated is None else rotated.cpu())


def large(seqlen_new: int, page_size: int, cache: torch.dtype) -> Case:
    """Many sequences with a prefill's tokens or one, in pages in any order."""
    draw, batch, width = Draw(page_size), 33, -(-2048 // page_size)
    pages = batch * width + 7
    lengths = torch.randint(0, 2048 - seqlen_new + 1, (batch,), generator=draw.generator).int()
    scales = {}
    if cache == FP8:
        scales = {"k_descale": draw.descale(batch, 8), "v_descale": draw.descale(batch, 8)}
    return Case(
        draw.normal(batch, seqlen_new, 8, 128),
        draw.normal(batch, seqlen_new, 8, 128),
        *(poisoned(pages, page_size, 8, 128, dtype=cache) for _ in "kv"),
        lengths,
        page_table=draw.table(batch, width, pages),
        rotation=draw.rotation(2048, 128, page_size == 16, BF16),
        q=draw.normal(batch, seqlen_new, 32, 128),
        **scales,
    )


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize(("seqlen_new", "page_size"), [(1, 16), (1, 1), (200, 16), (130, 64)])
def test_large_appends_are_those_of_the_reference(
    seqlen_new: int, page_size: int, cache: torch.dtype, device: str
) -> None:
    case = on(device, large(seqlen_new, page_size, cache))
    expected = case.k_cache.clone(), case.v_cache.clone()
    places = {"page_table": case.page_table, "k_descale": case.k_descale, "v_descale": case.v_descale}
    wanted = append_to_cache(case.k, case.v, *expected, case.cache_seqlens, **places, rotation=case.rotation)
    lengths, rotated = run(case)
    assert torch.equal(lengths, wanted)
    agrees(rotated, rotate_queries(case.q, case.rotation, case.cache_seqlens))
    agrees(case.k_cache, expected[0])
    assert torch.equal(case.v_cache.view(torch.uint8), expected[1].view(torch.uint8))


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(("seqlen_new", "page_size"), [(1, 16), (200, 64)])
def test_large_appends_with_scales_by_token(
    seqlen_new: int, page_size: int, hadamard: bool, device: str
) -> None:
    case = large(seqlen_new, page_size, FP8)
    case = replace(case, **dict.fromkeys(("k_descale", "v_descale")), hadamard=hadamard)
    case = on(device, case)
    scales = [torch.full(case.k_cache.shape[:3], float("nan"), device=device) for _ in range(4)]
    case = replace(case, k_descale=scales[0], v_descale=scales[1])
    expected = case.k_cache.clone(), case.v_cache.clone()
    mix = rotate_keys if hadamard else None
    places = {"page_table": case.page_table, "k_descale": scales[2], "v_descale": scales[3], "mix": mix}
    append_to_cache(case.k, case.v, *expected, case.cache_seqlens, **places, rotation=case.rotation)
    _, rotated = run(case)
    turned = rotate_queries(case.q.float(), case.rotation, case.cache_seqlens)
    agrees(rotated, (rotate_keys(turned) if hadamard else turned).to(case.q.dtype), most=0.02)
    for found, exact in zip(scales[:2], scales[2:], strict=True):
        torch.testing.assert_close(found, exact, rtol=4e-6, atol=0.0, equal_nan=True)
    for found, exact in zip((case.k_cache, case.v_cache), expected, strict=True):
        agrees(found, exact)


def agrees(found: Tensor, exact: Tensor, most: float = 0.01) -> None:
    """Where a product was rounded once less, a number may be the next one; NaN is where it was."""
    step = 2.0**-3 if found.dtype == FP8 else 2.0**-7
    a, b = (x.float() for x in (found, exact))
    assert torch.equal(a.isnan(), b.isnan())
    smallest = 2.0**-8 if found.dtype == FP8 else 1e-5
    assert bool(((a - b).abs() <= step * b.abs() + smallest).logical_or(b.isnan()).all())
    assert float((a != b)[~b.isnan()].float().mean()) < most


def test_a_graph_appends_at_the_lengths_of_its_replay(device: str) -> None:
    """And goes on where the step before it stopped, with lengths that are never on the host."""
    case = on(device, large(1, 16, BF16))
    seqlens = case.cache_seqlens.clamp(max=2040)

    def step() -> Tensor:
        return run(replace(case, cache_seqlens=seqlens))[0]

    before = seqlens.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    case.k_cache.view(torch.uint8).fill_(0xFF)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seqlens.copy_(step())
    for _ in range(5):
        case.k.normal_()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(seqlens, before + 5)
    written = ~case.k_cache.isnan().any(-1).any(-1)
    assert int(written.sum()) == 5 * len(seqlens)
    expected = cloned(case.k_cache).fill_(float("nan"))
    options = {"page_table": case.page_table, "rotation": case.rotation}
    append_to_cache(case.k, case.v, expected, case.v_cache, seqlens - 1, **options)
    last = ~expected.isnan().any(-1).any(-1)
    agrees(case.k_cache[last], expected[last])


def test_a_kernel_that_follows_sees_what_was_written(device: str) -> None:
    case = on(device, large(200, 16, BF16))
    copies = []
    for _ in range(20):
        case.k_cache.fill_(0.0)
        run(case)
        copies.append(case.k_cache.clone())
    assert all(torch.equal(copy, copies[0]) for copy in copies[1:])
    assert bool((copies[0] != 0).any())


def test_sizes_share_a_kernel(device: str) -> None:
    forget_launchers()
    for seqlen_new, page_size in ((1, 1), (3, 64), (200, 128)):
        run(on(device, large(seqlen_new, page_size, BF16)))
    assert find.cache_info().misses == 1
