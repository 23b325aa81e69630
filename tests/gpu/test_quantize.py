"""The fused quantizer against its twin in PyTorch, to the bit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from hopper.quantize.config import QuantizeConfig, default_block_sizes
from hopper_attention import flash_attn_fp8_func, quantizers
from hopper_attention.launch import quantize
from hopper_attention.launch.quantize import (
    Outputs,
    empty_outputs,
    quantize_fused,
    select_quantize_config,
    why_not_fused_here,
)
from hopper_attention.quantization import Fp8Quantization, QuantizedTensor, TransposedV, quantize_qkv
from hopper_attention.quantization_rules import means_of, quantize_by_torch
from hopper_attention.quantized import Means
from tests.gpu.conftest import compile_together
from tests.gpu.test_memory import needs_memory, with_gap

fused_qkv = partial(quantize_qkv, backend="fused")

pytestmark = pytest.mark.gpu

POISON = 0xA5
GUARD = 4096
"""Bytes before and after an output that no kernel may touch."""

LENGTHS = [(1, 1), (31, 33), (1000, 223), (223, 1000), (129, 640)]
Parts = tuple[QuantizedTensor, QuantizedTensor, TransposedV]


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as garbage in place of what memory held, which may well be the right answer of a test before."""

    def poisoned(*arguments: object) -> Outputs:
        outputs = empty_outputs(*arguments)
        for tensor in outputs:
            tensor.view(torch.uint8).fill_(POISON)
        return outputs

    monkeypatch.setattr(quantize, "empty_outputs", poisoned)


def difference(parts: Parts, twins: Parts) -> list[str]:
    """Where two results are not the same bits."""
    wrong = []
    for name, part, twin in zip("qkv", parts, twins, strict=True):
        if part.shape != twin.shape or part.block != twin.block:
            wrong.append(f"{name} has shape {part.shape}, block {part.block}")
            continue
        differing = part.data.view(torch.uint8) != twin.data.to(part.data.device).view(torch.uint8)
        if bool(differing.any()):
            wrong.append(f"{int(differing.sum())} of {differing.numel()} bytes of {name}")
        if not torch.equal(part.scale.view(torch.int32), twin.scale.to(part.scale.device).view(torch.int32)):
            wrong.append(f"scales of {name}")
    return wrong


def resolved(c: Fp8Quantization, k: Tensor, v: Tensor) -> Fp8Quantization:
    return replace(c, block_k=c.keys_per_block(k.shape[3], v.shape[3], k.shape[1]))


def find_differences(q: Tensor, k: Tensor, v: Tensor, c: Fp8Quantization) -> list[str]:
    """What the kernel makes of a problem and its twin does not."""
    c = resolved(c, k, v)
    assert why_not_fused_here(q, k, v, c) == ""
    means = means_of(k, v, c)
    return difference(quantize_fused(q, k, v, c, means), quantize_by_torch(q, k, v, c, means))


HEAD_DIMS = [64, 80, 96, 128, 192, 256]
DTYPES = [torch.float16, torch.bfloat16]
OPTIONS = {
    "default": {},
    "plain": {"rotate": False},
    "rotate_v": {"rotate_v": True},
    "smooth_k": {"smooth_k": True},
    "smooth_v": {"smooth_v": True},
    "everything": {"smooth_k": True, "rotate_v": True, "smooth_v": True},
}
BLOCK_HEAD_DIMS, BLOCKS_Q, BLOCKS_K = [64, 80, 128, 256], [1, 64, 128, 192], [64, 128, 192, 224]


def configs_of_the_grids() -> Iterator[QuantizeConfig]:
    """What the two tests with the most configs ask for."""
    for dtype, d, options, (_, seqlen_k) in product(DTYPES, HEAD_DIMS, OPTIONS.values(), LENGTHS):
        yield select_quantize_config(dtype, d, d, seqlen_k, Fp8Quantization(**options, seed=3))
    for d, block_q, block_k in product(BLOCK_HEAD_DIMS, BLOCKS_Q, BLOCKS_K):
        c = Fp8Quantization(block_q=block_q, block_k=block_k)
        with contextlib.suppress(ValueError):
            yield select_quantize_config(torch.bfloat16, d, d, 1500, c)


@pytest.fixture(scope="module", autouse=True)
def compiled_quantizers(device: str) -> None:
    """Compiled in parallel before the first test needs one."""
    compile_together(list({config.name: config for config in configs_of_the_grids()}.values()))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_has_the_bits_of_its_twin(draw, dtype: torch.dtype, head_dim: int, options: str) -> None:
    failures = {}
    for seqlens in LENGTHS:
        for heads in ((3, 3), (4, 1)):
            x = draw(dtype, 2, seqlens, heads, head_dim)
            wrong = find_differences(x.q, x.k, x.v, Fp8Quantization(**OPTIONS[options], seed=3))
            if wrong:
                failures[seqlens, heads] = wrong
    assert failures == {}


@pytest.mark.parametrize("block_k", BLOCKS_K)
@pytest.mark.parametrize("block_q", BLOCKS_Q)
@pytest.mark.parametrize("head_dim", BLOCK_HEAD_DIMS)
def test_blocks_of_every_size(draw, head_dim: int, block_q: int, block_k: int) -> None:
    x = draw(torch.bfloat16, 2, (1000, 1500), (4, 2), head_dim)
    c = Fp8Quantization(block_q=block_q, block_k=block_k)
    reason = why_not_fused_here(x.q, x.k, x.v, c)
    if reason:
        assert "registers" in reason and max(block_q, block_k) * head_dim > 192 * 192
        pytest.skip(f"the fused quantizer does not do these blocks: {reason}")
    assert find_differences(x.q, x.k, x.v, c) == []


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128), (128, 16), (16, 256), (48, 32)])
def test_head_dim_v_differs(draw, head_dim: int, head_dim_v: int) -> None:
    x = draw(torch.float16, 2, (333, 517), (4, 2), head_dim, head_dim_v)
    for rotate_v in (False, True):
        assert find_differences(x.q, x.k, x.v, Fp8Quantization(rotate_v=rotate_v, block_k=128)) == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_items_for_every_cta(draw, head_dim: int) -> None:
    for block_k in default_block_sizes(head_dim, head_dim):
        x = draw(torch.bfloat16, 2, (8192, 8000), (2048 // head_dim, 2048 // head_dim), head_dim)
        for block_q in (1, 128):
            assert find_differences(x.q, x.k, x.v, Fp8Quantization(block_q=block_q, block_k=block_k)) == []


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("rotate", [False, True])
def test_the_twin_has_the_same_bits_on_the_cpu(draw, head_dim: int, rotate: bool) -> None:
    x = draw(torch.bfloat16, 2, (300, 500), (4, 2), head_dim)
    c = Fp8Quantization(rotate=rotate, rotate_v=rotate, block_k=160)
    means = means_of(x.k, x.v, c)
    there = quantize_by_torch(x.q, x.k, x.v, c, means)
    on_cpu = Means(means.k.cpu(), means.v.cpu())
    here = quantize_by_torch(x.q.cpu(), x.k.cpu(), x.v.cpu(), c, on_cpu)
    assert difference(there, here) == []
    public = fused_qkv(x.q, x.k, x.v, quantization=c)
    assert difference((public.q, public.k, public.v), here) == []


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_that_are_no_numbers_or_hardly_any(draw, dtype: torch.dtype, rotate: bool) -> None:
    x = draw(dtype, 1, (300, 500), (2, 1), 128)
    q, k, v = x.q, x.k, x.v
    q[0, 5, 0, 3], q[0, 200, 1, 77], q[0, 201, 1, 78] = math.inf, -math.inf, math.nan
    q[0, 130:256, 0], q[0, 128:130, 0] = 0.0, -0.0
    k[0, :192], k[0, 200], k[0, 201, 0, 5] = 0.0, math.inf, -math.nan
    k[0, 384:] *= 2.0**-126 if dtype == torch.bfloat16 else 2.0**-20
    v[0, 0], v[0, 230, 0, 9], v[0, 499, 0, 127] = -math.inf, math.inf, math.nan
    v[0, 256:384] = torch.finfo(dtype).max
    for block_q, block_k in product((1, 128), (64, 192)):
        c = Fp8Quantization(rotate=rotate, rotate_v=rotate, block_q=block_q, block_k=block_k)
        assert find_differences(q, k, v, c) == []
        assert find_differences(q, k, -v.sign(), c) == []
        assert find_differences(q * math.nan, k * 0, v * 0, c) == []


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside_nan(x: Tensor) -> Tensor:
    """The same values in the middle of a larger tensor of NaN."""
    larger = torch.full(
        [size + 2 for size in x.shape[:3]] + [x.shape[3]], math.nan, dtype=x.dtype, device=x.device
    )
    middle = larger[1:-1, 1:-1, 1:-1]
    middle.copy_(x)
    return middle


def misaligned(x: Tensor) -> Tensor:
    memory = torch.full((x.numel() + 8,), math.nan, dtype=x.dtype, device=x.device)
    moved = memory[1 : 1 + x.numel()].view(x.shape)
    return moved.copy_(x)


def columns_apart(x: Tensor) -> Tensor:
    """The same values, with a last stride that is not 1."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("relay", [with_gap, heads_first, inside_nan, misaligned, columns_apart])
def test_strides_and_addresses_do_not_change_a_bit(draw, relay: Callable[[Tensor], Tensor]) -> None:
    for head_dim, seqlens in ((64, (113, 203)), (128, (517, 300))):
        x = draw(torch.bfloat16, 2, seqlens, (4, 2), head_dim)
        c = resolved(Fp8Quantization(), x.k, x.v)
        means = means_of(x.k, x.v, c)
        expected = quantize_by_torch(x.q, x.k, x.v, c, means)
        assert difference(quantize_fused(relay(x.q), relay(x.k), relay(x.v), c, means), expected) == []


def test_expanded_tensors(draw) -> None:
    x = draw(torch.float16, 3, (130, 190), (4, 1), 64)
    assert (
        find_differences(x.q, x.k.expand(-1, -1, 4, -1), x.v.expand(-1, -1, 4, -1), Fp8Quantization()) == []
    )
    one = x.q[:1].expand(3, -1, -1, -1)
    assert find_differences(one, one, one, Fp8Quantization(block_k=128)) == []


def guarded(like: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor of this shape and dtype, and the poisoned bytes that it lies in the middle of."""
    size = like.numel() * like.element_size()
    memory = torch.full((2 * GUARD + size,), POISON, dtype=torch.uint8, device=like.device)
    return memory[GUARD : GUARD + size].view(like.dtype).view(like.shape), memory


@pytest.mark.parametrize("seqlens", [(1, 1), (129, 33), (300, 500)])
@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("block_q", [1, 128])
def test_all_outputs_are_written_and_nothing_else(
    draw, block_q: int, head_dim: int, seqlens: tuple[int, int]
) -> None:
    x = draw(torch.bfloat16, 2, seqlens, (4, 2), head_dim)
    c = Fp8Quantization(rotate_v=True, smooth_v=True, block_q=block_q, block_k=96)
    config = select_quantize_config(x.q.dtype, head_dim, head_dim, seqlens[1], c)
    tensors, memories = zip(*map(guarded, empty_outputs(config, x.q, x.k, x.v)), strict=True)
    outputs = Outputs(*tensors)
    means = means_of(x.k, x.v, c)
    launcher = quantize.find(config, x.q.device)
    launcher.fill(outputs, x.q, x.k, x.v, launcher.extras(c.seed, means, x.q.device))
    parts = (
        QuantizedTensor(outputs.q8, outputs.q_scale, config.block_q),
        QuantizedTensor(outputs.k8, outputs.k_scale, config.block_k),
        TransposedV(outputs.vt8, outputs.v_scale, config.block_k, seqlens[1]),
    )
    assert difference(parts, quantize_by_torch(x.q, x.k, x.v, c, means)) == []
    for memory in memories:
        assert bool((memory[:GUARD] == POISON).all()) and bool((memory[-GUARD:] == POISON).all())


@pytest.mark.parametrize("block_q", [1, 128])
def test_twenty_runs_give_the_same_bits(draw, block_q: int) -> None:
    x = draw(torch.bfloat16, 2, (4000, 5000), (16, 4), 128)
    c = resolved(Fp8Quantization(block_q=block_q), x.k, x.v)
    means = means_of(x.k, x.v, c)
    first = quantize_fused(x.q, x.k, x.v, c, means)
    assert all(difference(quantize_fused(x.q, x.k, x.v, c, means), first) == [] for _ in range(19))


def test_the_current_stream_is_the_one_that_is_used(draw) -> None:
    x = draw(torch.bfloat16, 2, (512, 512), (4, 4), 64)
    expected = fused_qkv(x.q, x.k, x.v)
    late = torch.full_like(x.q, math.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms: a launch on another stream would read NaN
        late.copy_(x.q)
        parts = fused_qkv(late, x.k, x.v)
    stream.synchronize()
    assert difference((parts.q, parts.k, parts.v), (expected.q, expected.k, expected.v)) == []


def test_a_captured_graph_quantizes_what_its_inputs_hold_then(draw) -> None:
    static, fresh = (draw(torch.bfloat16, 2, (300, 517), (4, 2), 128) for _ in range(2))
    c = Fp8Quantization(smooth_k=True, smooth_v=True)
    expected = fused_qkv(fresh.q, fresh.k, fresh.v, quantization=c)
    fused_qkv(static.q, static.k, static.v, quantization=c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = fused_qkv(static.q, static.k, static.v, quantization=c)
    for target, source in ((static.q, fresh.q), (static.k, fresh.k), (static.v, fresh.v)):
        target.copy_(source)
    graph.replay()
    assert difference((parts.q, parts.k, parts.v), (expected.q, expected.k, expected.v)) == []
    assert torch.equal(parts.shift, expected.shift) and torch.equal(parts.mean_v, expected.mean_v)


def test_a_graph_that_would_have_to_copy_the_signs_is_refused(draw) -> None:
    x = draw(torch.bfloat16, 1, (300, 517), (2, 2), 128)
    c = Fp8Quantization(seed=987)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="make the same call once"), torch.cuda.graph(graph):
        quantize_qkv(x.q, x.k, x.v, quantization=c)
    torch.cuda.synchronize()
    assert find_differences(x.q, x.k, x.v, c) == []


def test_the_kernel_is_the_default(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    c = Fp8Quantization(smooth_v=False)
    by_torch = quantize_qkv(x.q, x.k, x.v, quantization=c, backend="torch")
    monkeypatch.setattr(quantizers, "quantize_by_torch", None)
    parts = quantize_qkv(x.q, x.k, x.v, quantization=c)
    assert difference((parts.q, parts.k, parts.v), (by_torch.q, by_torch.k, by_torch.v)) == []


def test_a_captured_graph_quantizes_and_attends(draw) -> None:
    static, fresh = (draw(torch.bfloat16, 2, (300, 517), (4, 2), 128) for _ in range(2))
    expected = flash_attn_fp8_func(fresh.q, fresh.k, fresh.v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_fp8_func(static.q, static.k, static.v, causal=True)
    for target, source in ((static.q, fresh.q), (static.k, fresh.k), (static.v, fresh.v)):
        target.copy_(source)
    graph.replay()
    assert torch.equal(out, expected)


def test_torch_compile_quantizes_and_attends(draw) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash_attn_fp8_func(q, k, v, causal=True), fullgraph=True)
    assert torch.equal(compiled(x.q, x.k, x.v), flash_attn_fp8_func(x.q, x.k, x.v, causal=True))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2,
    reason="needs a second GPU",
)
def test_another_device_index(draw) -> None:
    x = draw(torch.bfloat16, 2, (300, 517), (4, 2), 128)
    expected = fused_qkv(x.q, x.k, x.v)
    there = fused_qkv(*(t.to("cuda:1") for t in (x.q, x.k, x.v)))
    assert there.q.data.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert difference((there.q, there.k, there.v), (expected.q, expected.k, expected.v)) == []


BIG = {
    "batch": (1_060, (1024, 1024), (32, 32)),
    "seqlen_q": (1, (1_060_000, 64), (32, 32)),
    "seqlen_k": (1, (64, 1_060_000), (32, 32)),
}
"""Batch, lengths and heads at head_dim 64 of tensors above 2^31 elements, by the dimension that does it."""


@pytest.mark.parametrize("dimension", BIG)
def test_tensors_above_two_to_the_31_elements(draw, device: str, dimension: str) -> None:
    needs_memory(device, 60)
    batch, seqlens, heads = BIG[dimension]
    x = draw(torch.bfloat16, batch, seqlens, heads, 64)
    assert max(x.q.numel(), x.k.numel()) > 2**31
    c = resolved(Fp8Quantization(), x.k, x.v)
    means = means_of(x.k, x.v, c)
    q, k, v = quantize_fused(x.q, x.k, x.v, c, means)
    # The last rows and blocks of the last batch entry lie beyond what 32 bits can address.
    block = int(c.block_k)
    from_q, from_k = (max(seqlens[0] - 1, 0) // 128 * 128, max(seqlens[1] - 1, 0) // block * block)
    of_last = Means(means.k[-1:], means.v[-1:])
    twins = quantize_by_torch(x.q[-1:, from_q:], x.k[-1:, from_k:], x.v[-1:, from_k:], c, of_last)
    parts = (
        QuantizedTensor(q.data[-1:, from_q:], q.scale[-1:, :, from_q:], 1),
        QuantizedTensor(k.data[-1:, from_k:], k.scale[-1:, :, from_k // block :], block),
        TransposedV(
            v.data[-1:, :, :, from_k:], v.scale[-1:, :, from_k // block :], block, seqlens[1] - from_k
        ),
    )
    contiguous = (
        QuantizedTensor(parts[0].data.contiguous(), parts[0].scale.contiguous(), 1),
        QuantizedTensor(parts[1].data.contiguous(), parts[1].scale.contiguous(), block),
        TransposedV(parts[2].data.contiguous(), parts[2].scale.contiguous(), block, parts[2].seqlen),
    )
    assert difference(contiguous, twins) == []
    # Every scale of N(0, 1) inputs is about as large, so that none was left out; that of one row is the smallest.
    assert bool((v.scale == 2.0**-4).all())
    for tensor, least, largest in ((q, 0.5, q.largest), (k, 2.0, k.largest)):
        assert bool((tensor.scale > least / largest).all()) and bool((tensor.scale < 8.0 / largest).all())
