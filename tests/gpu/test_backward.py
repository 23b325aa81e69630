"""The backward kernels against float64, beside the same formula in PyTorch at the inputs' dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from cute_kernels.ampere.backward.config import select_ampere_backward_config
from hopper_attention import device_memory
from hopper_attention.launch.backward import run_backward
from tests.gpu.gradients import find_gradient_errors

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "ampere")


@pytest.fixture
def differentiate(backend: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """``run_backward`` on the backend under test."""
    return partial(run_backward, backend=backend)


LENGTHS = [(1, 1), (113, 203), (203, 113), (640, 640), (1023, 1024), (64, 300)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 96, 104, 128, 136, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients(draw, attend, differentiate, dtype, head_dim: int, causal: bool) -> None:
    failures = {}
    for seqlens in LENGTHS:
        for heads in ((2, 2), (4, 2), (8, 1)):
            x = draw(dtype, 2, seqlens, heads, head_dim)
            out, lse = attend(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
            dout = torch.randn_like(out)
            ours = differentiate(dout, x.q, x.k, x.v, out, lse, head_dim**-0.5, causal)
            wrong = find_gradient_errors(x, ours, dout, causal)
            if wrong:
                failures[seqlens, heads] = wrong
    assert failures == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", range(8, 264, 8))
def test_every_head_dim(draw, attend, differentiate, head_dim: int, causal: bool) -> None:
    failures = {}
    for seqlens in ((113, 203), (331, 129)):
        x = draw(torch.bfloat16, 1, seqlens, (4, 2), head_dim)
        out, lse = attend(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        ours = differentiate(dout, x.q, x.k, x.v, out, lse, head_dim**-0.5, causal, dlse)
        wrong = find_gradient_errors(x, ours, dout, causal, dlse)
        if wrong:
            failures[seqlens] = wrong
    assert failures == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_deterministic_gradients(draw, attend, differentiate, head_dim: int, causal: bool) -> None:
    """Right, and of the same bits again and again, also while another stream keeps some of the GPU busy."""
    failures, noise = {}, torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for seqlens in (*LENGTHS, (300, 2500), (2500, 300)):
        for heads in ((2, 2), (4, 2), (8, 1)):
            x = draw(torch.bfloat16, 2, seqlens, heads, head_dim)
            out, lse = attend(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
            dout = torch.randn_like(out)
            arguments = (dout, x.q, x.k, x.v, out, lse, head_dim**-0.5, causal)
            ours = differentiate(*arguments, deterministic=True)
            wrong = find_gradient_errors(x, ours, dout, causal)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    noise @ noise
            for _ in range(3):
                again = differentiate(*arguments, deterministic=True)
                wrong += [
                    name for name, a, b in zip("qkv", ours, again, strict=True) if not torch.equal(a, b)
                ]
            if wrong:
                failures[seqlens, heads] = wrong
    assert failures == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("batch", "seqlen"), [(16, 1024), (1, 8192), (1, 40_000)])
def test_deterministic_gradients_where_key_tiles_queue(
    draw, attend, differentiate, batch, seqlen, head_dim, causal
) -> None:
    """More key tiles than multiprocessors, of one head or of many."""
    x = draw(torch.bfloat16, batch, (seqlen, seqlen), (4, 4), head_dim)
    out, lse = attend(x.q, x.k, x.v, causal=causal, return_attn_probs=True)
    arguments = (torch.randn_like(out), x.q, x.k, x.v, out, lse, head_dim**-0.5, causal)
    first = differentiate(*arguments, deterministic=True)
    for _ in range(3):
        assert all(map(torch.equal, first, differentiate(*arguments, deterministic=True)))
    unordered = differentiate(*arguments)
    assert ((first[0] - unordered[0]).float().norm() / unordered[0].float().norm()).item() < 2e-3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("head_dim", "native"), [(64, 64), (72, 96), (128, 128), (256, 256)])
def test_extra_memory_is_the_sums_of_dq_and_two_numbers_a_row(
    draw, attend, differentiate, backend, head_dim, native, deterministic, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That of a short call would be kept, and found by the next one.
    monkeypatch.setattr(device_memory, "KEPT_BYTES", 0)
    monkeypatch.setattr(device_memory, "_work_memory", device_memory.WorkMemory())
    x = draw(torch.bfloat16, 2, (1000, 1200), (4, 2), head_dim)
    out, lse = attend(x.q, x.k, x.v, return_attn_probs=True)
    arguments = (torch.randn_like(out), x.q, x.k, x.v, out, lse, head_dim**-0.5, False)
    differentiate(*arguments, deterministic=deterministic)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    gradients = differentiate(*arguments, deterministic=deterministic)
    extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - sum(g.nbytes for g in gradients)
    tile_m, counts_per_tile = 128 if native == 64 else 64, 4 if native > 128 else 1
    if backend == "ampere":
        config = select_ampere_backward_config("bfloat16", head_dim, head_dim, False, "sm_90a")
        assert config.head_dim == native
        tile_m, counts_per_tile = config.tile_m, config.warps
    query_tiles = 2 * 4 * -(-1000 // tile_m)
    padded_rows = query_tiles * tile_m
    counts = 2 + query_tiles * counts_per_tile if deterministic else 0
    assert extra == 4 * (padded_rows * (native + 2) + counts)


def test_a_long_sequence_and_its_repeats_agree(draw, attend, differentiate) -> None:
    x = draw(torch.bfloat16, 1, (4096, 4096), (4, 4), 128)
    out, lse = attend(x.q, x.k, x.v, causal=True, return_attn_probs=True)
    dout = torch.randn_like(out)
    first = differentiate(dout, x.q, x.k, x.v, out, lse, 128**-0.5, True)
    for _ in range(5):
        again = differentiate(dout, x.q, x.k, x.v, out, lse, 128**-0.5, True)
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        # dQ is summed in the order in which key tiles finish.
        assert ((first[0] - again[0]).float().norm() / first[0].float().norm()).item() < 2e-3
