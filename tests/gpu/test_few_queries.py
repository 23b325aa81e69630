"""Calls of few queries on a GPU, dense and packed, which the decode kernel serves, or the forward kernel with several
heads in a tile, or a tile's keys in parts: against float64, with NaN around."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper.decode.config import DecodeConfig
from hopper_attention import explain, explain_varlen, flash_attn_func, flash_attn_varlen_func
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu
BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
TOLERANCE = {BF16: 4e-3, F16: 8e-4, E4M3: 6e-2}
"""Of the output, by its norm."""


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Few kernels are needed."""


DECODE, HEADS, PARTS = "the decode kernel", "several heads in a tile", "keys in parts"


def kernel_of(config: Any) -> str:
    if isinstance(config, DecodeConfig):
        return DECODE
    return PARTS if config.split else HEADS if config.group > 1 else "the forward kernel"


@dataclass(frozen=True)
class Case:
    """Sizes (batch, seqlen_q, seqlen_k), heads and kv_heads, head_dim and head_dim_v, options of the call, and what
    serves it."""

    sizes: tuple[int, int, int]
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = BF16
    kernel: str = DECODE

    def draw(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each in the middle of a tensor of NaN."""
        generator = torch.Generator("cuda").manual_seed(seed)
        (batch, seqlen_q, seqlen_k), (heads, kv_heads), (d, dv) = self.sizes, self.heads, self.head_dims
        shapes = (seqlen_q, heads, d), (seqlen_k, kv_heads, d), (seqlen_k, kv_heads, dv)
        drawn = []
        for rows, count, columns in shapes:
            around = torch.full((batch, rows + 3, count, columns), math.nan, device="cuda").to(self.dtype)
            inner = around[:, 1 : 1 + rows]
            values = torch.randn(inner.shape, generator=generator, device="cuda")
            # Of e4m3 a copy into a part is a copy of bytes.
            inner.view(torch.uint8).copy_(values.to(self.dtype).view(torch.uint8))
            drawn.append(inner)
        q, k, v = drawn
        return q, k, v


CASES = {
    "one query": Case((2, 1, 1000), (16, 4), (128, 128), {"causal": True}),
    "one query of one head": Case((1, 1, 5000), (1, 1), (64, 64)),
    "one key/value head": Case((3, 2, 777), (16, 1), (128, 128), {"causal": True}, F16),
    "no group": Case((1, 33, 2500), (2, 2), (64, 64), {"causal": True}),
    "wide heads": Case((2, 7, 1501), (8, 2), (256, 256), {"causal": True}),
    "odd head_dims": Case((2, 3, 1100), (8, 4), (72, 40), {}, F16),
    "narrow keys, wide values": Case((1, 2, 1999), (4, 1), (64, 256)),
    "many sequences": Case((70, 2, 300), (24, 3), (128, 128), {"causal": True}),
    "a window": Case((2, 4, 3000), (8, 2), (128, 128), {"window_size": (900, 0)}),
    "a window to both sides": Case((1, 9, 2048), (4, 2), (64, 64), {"window_size": (700, 2)}),
    "chunks": Case((2, 6, 2222), (8, 2), (128, 128), {"attention_chunk": 1000, "causal": True}),
    "a softcap": Case((2, 3, 1500), (8, 2), (128, 128), {"softcap": 2.0, "causal": True}),
    "a scale": Case((2, 3, 1500), (8, 2), (128, 128), {"softmax_scale": 0.25}),
    "more queries than keys": Case((64, 6, 5), (64, 4), (128, 128), {"causal": True}, kernel=HEADS),
    "few keys of many heads": Case((60, 3, 64), (64, 8), (256, 256), {"causal": True}),
    "16 heads a tile": Case((40, 17, 333), (64, 4), (128, 128), {"causal": True}, kernel=HEADS),
    "8 heads a tile": Case((64, 30, 513), (32, 4), (64, 64), {"causal": True}, F16, HEADS),
    "4 heads a tile": Case((32, 50, 1000), (16, 4), (128, 128), kernel=HEADS),
    "2 heads a tile": Case((70, 33, 200), (16, 8), (256, 256), {"causal": True}, kernel=HEADS),
    "64 heads a tile": Case((70, 9, 130), (64, 1), (128, 128), {"causal": True}, kernel=HEADS),
    "heads a tile, odd head_dims": Case((64, 20, 400), (32, 8), (72, 40), {}, F16, HEADS),
    "heads a tile, a window": Case(
        (64, 21, 900), (32, 4), (128, 128), {"window_size": (300, 5)}, kernel=HEADS
    ),
    "heads a tile, chunks": Case(
        (64, 21, 900), (32, 4), (64, 64), {"attention_chunk": 256, "causal": True}, kernel=HEADS
    ),
    "heads a tile, a softcap": Case(
        (64, 21, 500), (32, 4), (128, 128), {"softcap": 2.0, "causal": True}, kernel=HEADS
    ),
    "parts of two tiles": Case((1, 40, 3001), (8, 2), (128, 128), {"causal": True}, kernel=PARTS),
    "parts of one key/value head": Case((3, 5, 777), (16, 1), (128, 128), {"causal": True}, F16, PARTS),
    "parts of wide heads": Case((2, 21, 5001), (16, 2), (256, 256), {"causal": True}, kernel=PARTS),
    "parts without a group": Case((1, 200, 9999), (2, 2), (128, 128), {"causal": True}, kernel=PARTS),
    "parts of 128 rows": Case((4, 13, 7000), (8, 1), (64, 64), {"causal": True}, kernel=PARTS),
    "parts of 192 rows": Case((1, 90, 20_001), (8, 4), (64, 64), {}, F16, PARTS),
    "parts, odd head_dims": Case((1, 90, 5000), (8, 2), (96, 72), {"causal": True}, kernel=PARTS),
    "parts, a softcap": Case(
        (2, 40, 6000), (8, 2), (128, 128), {"softcap": 2.0, "causal": True}, kernel=PARTS
    ),
    "parts, a scale": Case((2, 40, 6000), (8, 2), (128, 128), {"softmax_scale": 0.2}, kernel=PARTS),
    "parts, all heads of 64": Case((1, 7, 16_000), (64, 1), (128, 128), {"causal": True}, kernel=PARTS),
    # Heads that do not divide a warpgroup's rows, of which some are nobody's.
    "7 heads a tile": Case((64, 17, 513), (28, 4), (128, 128), {"causal": True}, kernel=HEADS),
    "5 heads a tile": Case((40, 21, 333), (40, 8), (64, 64), {"causal": True}, F16, HEADS),
    "6 heads a tile": Case((70, 33, 200), (12, 2), (256, 256), {"causal": True}, kernel=HEADS),
    "3 heads a tile": Case((64, 30, 401), (24, 8), (96, 96), kernel=HEADS),
    "12 heads a tile": Case((32, 15, 777), (96, 8), (128, 128), kernel=HEADS),
    "24 heads a tile": Case((70, 9, 130), (48, 2), (128, 128), {"causal": True}, kernel=HEADS),
    "40 heads a tile, odd head_dims": Case((70, 5, 130), (40, 1), (72, 40), kernel=HEADS),
    "7 heads a tile, a window": Case(
        (64, 21, 900), (28, 4), (128, 128), {"window_size": (300, 5)}, kernel=HEADS
    ),
    "3 heads a tile, a causal window": Case(
        (64, 21, 900), (24, 8), (64, 64), {"window_size": (300, 0)}, kernel=HEADS
    ),
    "5 heads a tile, a softcap": Case(
        (64, 21, 500), (40, 8), (128, 128), {"softcap": 2.0, "causal": True}, kernel=HEADS
    ),
    "parts of 7 heads": Case((1, 40, 6001), (28, 4), (128, 128), {"causal": True}, kernel=PARTS),
    "parts of 3 heads": Case((3, 33, 7000), (12, 4), (64, 64), {"causal": True}, F16, PARTS),
    "parts of 12 heads": Case((2, 33, 5000), (24, 2), (96, 96), {"causal": True}, kernel=PARTS),
    "parts of 24 heads": Case((2, 33, 5000), (24, 1), (128, 128), kernel=PARTS),
}


def is_decoded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> bool:
    return isinstance(explain(q, k, v, **options).config, DecodeConfig)


def wanted(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    left, right = options.get("window_size", (-1, -1))
    given = {name: x for name, x in options.items() if name != "window_size"}
    return attention_naive(q, k, v, window_left=left, window_right=right, **given)


def check(
    case: Case, found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> None:
    (out, lse), (exact, exact_lse) = found, wanted(q, k, v, options)
    assert out.shape == exact.shape and out.is_contiguous() and lse.shape == exact_lse.shape
    assert (out.double() - exact).norm() <= TOLERANCE[case.dtype] * exact.norm()
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    assert (lse.double() - exact_lse).nan_to_num(nan=0.0).abs().max() <= 1e-3


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    case = CASES[name]
    for seed in range(3):
        q, k, v = case.draw(seed)
        assert kernel_of(explain(q, k, v, **case.options).config) == case.kernel
        found = flash_attn_func(q, k, v, return_attn_probs=True, **case.options)
        check(case, found, q, k, v, case.options)
        # The third is one like earlier ones. Without an LSE the same kernel attends.
        assert torch.equal(flash_attn_func(q, k, v, **case.options), found[0])


def test_sinks() -> None:
    case, sinks = CASES["one query"], torch.randn(16, device="cuda")
    q, k, v = case.draw()
    options = {"causal": True, "sinks": sinks}
    assert is_decoded(q, k, v, **options)
    check(case, flash_attn_func(q, k, v, return_attn_probs=True, **options), q, k, v, options)


OF_CODES = {
    "widened": Case((1, 10, 9000), (8, 2), (128, 128), {"causal": True}, E4M3),
    "one query": Case((2, 1, 1000), (16, 4), (128, 128), {"causal": True}, E4M3),
    "sixteen rows": Case((3, 4, 2001), (8, 2), (64, 64), {"causal": True}, E4M3),
    "wide heads": Case((2, 2, 999), (8, 2), (256, 256), {"causal": True}, E4M3),
    "no group": Case((5, 9, 64), (3, 3), (128, 128), {}, E4M3),
    "a window": Case((2, 3, 3000), (8, 2), (128, 128), {"window_size": (900, 0)}, E4M3),
}


@pytest.mark.parametrize("given", ["no descales", "descales", "one tensor", "other strides"])
@pytest.mark.parametrize("name", OF_CODES)
def test_codes(name: str, given: str) -> None:
    """e4m3 tensors with descales. The LSE is exact, and the error that of their codes alone."""
    case = OF_CODES[name]
    q, k, v = case.draw()
    batch, kv_heads = case.sizes[0], case.heads[1]
    scales = [torch.rand(kv_heads, batch, device="cuda").t() + 0.5 for _ in range(3)]
    if given != "other strides":
        scales = [x.contiguous() for x in scales]
    if given == "one tensor":
        scales = [scales[0]] * 3
    names = ("q_descale", "k_descale", "v_descale")
    descales = {} if given == "no descales" else dict(zip(names, scales, strict=True))
    assert is_decoded(q, k, v, return_attn_probs=True, **case.options, **descales)
    is_same = is_decoded(q, k, v, **case.options, **descales)
    ones = torch.ones(batch, kv_heads, device="cuda")
    of_q, of_k, of_v = (descales.get(name, ones).double()[:, None, :, None] for name in names)
    of_q = of_q.repeat_interleave(case.heads[0] // kv_heads, 2)
    whole = q.double() * of_q, k.double() * of_k, v.double() * of_v
    for _ in range(3):
        found = flash_attn_func(q, k, v, return_attn_probs=True, **case.options, **descales)
        assert found[0].dtype == BF16
        check(case, found, *whole, case.options)
        out = flash_attn_func(q, k, v, **case.options, **descales)
        if is_same:
            assert torch.equal(out, found[0])
        else:
            # Without an exact LSE the FP8 kernel may be faster.
            check(case, (out, found[1]), *whole, case.options)


GRADIENTS = {
    DECODE: Case((2, 3, 1500), (8, 2), (128, 128), {"causal": True}),
    HEADS: Case((64, 16, 300), (16, 2), (128, 128), {"causal": True}, kernel=HEADS),
    PARTS: Case((2, 33, 3000), (8, 2), (128, 128), {"causal": True}, kernel=PARTS),
}


@pytest.mark.parametrize("kernel", GRADIENTS)
def test_gradients(kernel: str) -> None:
    case = GRADIENTS[kernel]
    leaves = [x.detach().clone().requires_grad_() for x in case.draw()]
    dout = torch.randn(leaves[0].shape, device="cuda", dtype=BF16)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    attention_naive(*exact, causal=True)[0].backward(dout.double())
    assert kernel_of(explain(*leaves, causal=True).config) == kernel
    for _ in range(3):
        found = torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout)
        for x, of_exact in zip(found, exact, strict=True):
            assert of_exact.grad is not None
            assert (x.double() - of_exact.grad).norm() <= 1e-2 * of_exact.grad.norm()


GROWING = {
    "16 bits": Case((2, 2, 700), (8, 2), (128, 128)),
    "codes": Case((2, 2, 700), (8, 2), (128, 128), {}, E4M3),
    HEADS: Case((64, 16, 500), (32, 4), (128, 128), kernel=HEADS),
    PARTS: Case((2, 33, 3000), (8, 2), (128, 128), kernel=PARTS),
}


@pytest.mark.parametrize("name", GROWING)
def test_keys_that_grow_and_tensors_that_move(name: str) -> None:
    """Of the bits of a call that is the first of its sizes."""
    case = GROWING[name]
    q, k, v = case.draw()
    most = case.sizes[2]
    for rows in (most - 100, most - 99, most - 98, most - 97, most, most - 98):
        seen = k[:, :rows], v[:, :rows]
        assert kernel_of(explain(q, *seen).config) == case.kernel
        out = flash_attn_func(q, *seen)
        copied = [x.clone() for x in seen]
        assert torch.equal(out, flash_attn_func(q, *copied))
        check(case, flash_attn_func(q, *seen, return_attn_probs=True), q, *seen, {})


def test_odd_addresses_and_strides() -> None:
    case = Case((2, 2, 700), (8, 2), (64, 64))
    q, k, v = case.draw()
    exact = wanted(q, k, v, {})[0]
    odd = [
        torch.zeros(x.numel() + 1, device="cuda", dtype=BF16)[1:].view(x.shape).copy_(x) for x in (q, k, v)
    ]
    wide = [torch.zeros(*x.shape[:3], 67, device="cuda", dtype=BF16)[..., :64].copy_(x) for x in (q, k, v)]
    in_turn = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for tensors in (odd, wide, in_turn, [q, k[:1].expand(2, -1, -1, -1), v]):
        of_call = exact if tensors[1].stride(0) else wanted(*tensors, {})[0]
        for _ in range(3):
            assert (flash_attn_func(*tensors).double() - of_call).norm() <= 4e-3 * of_call.norm()


@pytest.mark.parametrize("name", GROWING)
def test_graphs_streams_and_compiled_calls(name: str) -> None:
    case = GROWING[name]
    q, k, v = case.draw()
    expected = [flash_attn_func(q, k, v) for _ in range(3)][-1]
    compiled = torch.compile(lambda *x: flash_attn_func(*x), fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(flash_attn_func(q, k, v), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v)
    for seed in (3, 4):
        for x, new in zip((q, k, v), case.draw(seed), strict=True):
            x.view(torch.uint8).copy_(new.view(torch.uint8))
        graph.replay()
        assert torch.equal(out, flash_attn_func(q, k, v))


def test_all_rows_are_masked() -> None:
    q, k, v = CASES["more queries than keys"].draw()
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not out[:, :1].any() and bool((lse[:, :, :1] == -math.inf).all())
    assert out[:, 1:].isfinite().all() and lse[:, :, 1:].isfinite().all()


@dataclass(frozen=True)
class PackedCase:
    """Lengths of sequences in q and in k, heads and kv_heads, head_dim, and options."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 128
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = BF16
    kernel: str = DECODE
    behind: int = 5
    """Rows of no sequence."""

    def draw(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, whose rows of no sequence are NaN."""
        generator = torch.Generator("cuda").manual_seed(seed)
        drawn = []
        for lengths, heads in zip(
            (self.lengths_q, self.lengths_k, self.lengths_k),
            (self.heads[0], *[self.heads[1]] * 2),
            strict=True,
        ):
            x = torch.randn(
                sum(lengths) + self.behind, heads, self.head_dim, generator=generator, device="cuda"
            )
            x[sum(lengths) :] = math.nan
            drawn.append(x.to(self.dtype))
        q, k, v = drawn
        return q, k, v

    @property
    def lengths(self) -> tuple[Any, ...]:
        sums = [
            torch.tensor([0, *lengths]).cumsum(0).int().cuda() for lengths in (self.lengths_q, self.lengths_k)
        ]
        return *sums, max(self.lengths_q), max(self.lengths_k)

    def check(
        self,
        found: tuple[Tensor, Tensor],
        tensors: tuple[Tensor, Tensor, Tensor],
        used: tuple[int, ...] | None = None,
    ) -> None:
        (out, lse), (q, k, v) = found, tensors
        row = key = 0
        for n, m, seen in zip(self.lengths_q, self.lengths_k, used or self.lengths_k, strict=True):
            of_q, of_k, of_v = q[row : row + n], k[key : key + seen], v[key : key + seen]
            exact, exact_lse = wanted(of_q[None], of_k[None], of_v[None], self.options)
            error = out[row : row + n].double() - exact[0]
            assert error.norm() <= TOLERANCE[self.dtype] * exact.norm()
            of_lse = lse[:, row : row + n]
            assert torch.equal(of_lse == -math.inf, exact_lse[0] == -math.inf)
            assert n == 0 or (of_lse.double() - exact_lse[0]).nan_to_num(nan=0.0).abs().max() <= 1e-3
            row, key = row + n, key + m
        assert not out[row:].any() and bool((lse[:, row:] == -math.inf).all())


MANY = tuple(37 * n % 400 for n in range(90))
SHORT = tuple(13 * n % 33 for n in range(90))
PACKED = {
    "a step of decoding": PackedCase((1, 1, 1), (3000, 5, 900), options={"causal": True}),
    "some are empty": PackedCase((3, 0, 1, 2), (2000, 100, 0, 1500), options={"causal": True}),
    "many": PackedCase((1,) * 90, MANY, (16, 2), 64, {"causal": True}),
    "tokens guessed ahead": PackedCase((5, 4, 7), (4000, 64, 2999), (16, 2), 128, {"causal": True}, F16),
    "wide heads": PackedCase((2, 2), (2000, 1), (8, 2), 256, {"causal": True}),
    "no group": PackedCase((30, 12), (5000, 3000), (2, 2), 64),
    "a window": PackedCase((2, 3), (3000, 2000), options={"window_size": (700, 0)}),
    "a softcap": PackedCase((1, 2), (3000, 2000), options={"softcap": 3.0}),
    "codes": PackedCase((1, 2, 2), (3000, 7, 2000), options={"causal": True}, dtype=E4M3),
    "heads in tiles": PackedCase(
        tuple(13 * n % 40 for n in range(90)), MANY, (32, 4), 128, {"causal": True}, kernel=HEADS
    ),
    "heads in tiles, a window": PackedCase(
        tuple(13 * n % 40 for n in range(90)), MANY, (16, 4), 64, {"window_size": (50, 3)}, F16, HEADS
    ),
    "parts": PackedCase((33, 0, 16, 40), (5000, 40, 0, 2999), (16, 2), 128, {"causal": True}, kernel=PARTS),
    "parts of wide heads": PackedCase((20, 32), (4000, 9), (16, 2), 256, kernel=PARTS),
    "parts without a group": PackedCase((70, 100), (9000, 9000), (2, 2), 64, {"causal": True}, F16, PARTS),
    "parts, a softcap": PackedCase((33, 40), (5000, 6000), (16, 2), 128, {"softcap": 3.0}, kernel=PARTS),
    # Heads that do not divide a warpgroup's rows.
    "7 heads in tiles": PackedCase(SHORT, MANY, (28, 4), 128, {"causal": True}, kernel=HEADS),
    "3 heads in tiles": PackedCase(SHORT, MANY, (24, 8), 96, kernel=HEADS),
    "40 heads in tiles": PackedCase(SHORT, MANY, (40, 1), 256, {"causal": True}, kernel=HEADS),
    "6 heads in tiles, a window": PackedCase(SHORT, MANY, (12, 2), 64, {"window_size": (50, 3)}, F16, HEADS),
    "parts of 7": PackedCase(
        (33, 0, 16, 40), (5000, 40, 0, 2999), (28, 4), options={"causal": True}, kernel=PARTS
    ),
    "parts of 12": PackedCase(
        (33, 0, 16, 40), (5000, 40, 0, 2999), (24, 2), 64, {"causal": True}, kernel=PARTS
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name: str) -> None:
    case = PACKED[name]
    tensors = case.draw()
    plan = explain_varlen(*tensors, *case.lengths, **case.options)
    assert kernel_of(plan.config) == case.kernel
    for _ in range(3):
        found = flash_attn_varlen_func(*tensors, *case.lengths, return_attn_probs=True, **case.options)
        case.check(found, tensors)
        assert torch.equal(flash_attn_varlen_func(*tensors, *case.lengths, **case.options), found[0])


def test_packed_sequences_of_which_some_keys_are_used() -> None:
    case, used = PACKED["a step of decoding"], (2500, 5, 0)
    q, k, v = case.draw()
    for first, n in ((2500, 500), (3005, 900)):
        k[first : first + n] = math.nan
        v[first : first + n] = math.nan
    seqused_k = torch.tensor(used).int().cuda()
    found = flash_attn_varlen_func(
        q, k, v, *case.lengths, seqused_k=seqused_k, return_attn_probs=True, **case.options
    )
    case.check(found, (q, k, v), used)


def test_packed_gradients() -> None:
    case = PackedCase((3, 1), (1500, 800), options={"causal": True}, behind=0)
    leaves = [x.requires_grad_() for x in case.draw()]
    dout = torch.randn(4, 8, 128, device="cuda", dtype=BF16)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    parts = zip(
        *(x.split(n) for x, n in zip(exact, ((3, 1), (1500, 800), (1500, 800)), strict=True)), strict=True
    )
    outs = [attention_naive(*(x[None] for x in part), causal=True)[0][0] for part in parts]
    torch.cat(outs).backward(dout.double())
    for _ in range(3):
        out = flash_attn_varlen_func(*leaves, *case.lengths, causal=True)
        for x, of_exact in zip(torch.autograd.grad(out, leaves, dout), exact, strict=True):
            assert of_exact.grad is not None
            assert (x.double() - of_exact.grad).norm() <= 1e-2 * of_exact.grad.norm()


def test_packed_graphs_take_the_lengths_that_they_find() -> None:
    case = PACKED["a step of decoding"]
    tensors, (cu_seqlens_q, cu_seqlens_k, *longest) = case.draw(), case.lengths
    attend = partial(flash_attn_varlen_func, *tensors, cu_seqlens_q, cu_seqlens_k, *longest, causal=True)
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for lengths_k in ((3000, 5, 900), (100, 2900, 905)):
        cu_seqlens_k.copy_(torch.tensor([0, *lengths_k]).cumsum(0).int())
        graph.replay()
        moved = PackedCase(case.lengths_q, lengths_k, options=case.options)
        lse = flash_attn_varlen_func(*tensors, *moved.lengths, causal=True, return_attn_probs=True)[1]
        moved.check((out, lse), tensors)
