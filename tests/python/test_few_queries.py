"""Dense calls of few queries: which the decode kernel serves, and what it is given, by a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import MAX_SEQLEN
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper_attention import (
    api,
    autograd,
    compile_cache,
    device_memory,
    explain,
    explain_varlen,
    few_queries,
    flash_attn_func,
    flash_attn_varlen_func,
    ops,
)
from hopper_attention.launch import decode, few_fp8, few_packed_fp8, forward, varlen
from hopper_attention.launch import few_packed_queries as packed_launch
from hopper_attention.launch import few_queries as launch
from hopper_attention.masks import NO_MASK
from hopper_attention.reference import attention_naive
from hopper_attention.scores import PLAIN
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.kvcache_cases import FP8
from tests.python.test_decode_launch import DecodeKernels

BF16 = torch.bfloat16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeKernels]:
    """Those of a pretended H200, which has no kernel of the forward pass."""
    fake = DecodeKernels()
    pretend(monkeypatch, forward, decode, few_fp8, few_packed_fp8, varlen)
    monkeypatch.setattr(decode, "index_of", lambda device: 0)
    for module in (few_fp8, few_packed_fp8):
        monkeypatch.setattr(module, "why_not_hopper", lambda target: "")
    monkeypatch.setattr(packed_launch, "kept_argument", lambda tensor: tensor)
    monkeypatch.setattr(compile_cache, "get_serving", fake.load)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    forget_launchers()
    yield fake
    forget_launchers()


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(
    seqlen_q: int, seqlen_k: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (2, seqlen_q, heads, 64), (2, seqlen_k, kv_heads, 64), (2, seqlen_k, kv_heads, 64)
    q, k, v = (draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    return q, k, v


def config_of(
    sizes: tuple[int, int, int],
    heads: tuple[int, int],
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    **given: Any,
) -> Any:
    """What ``explain`` says of a Hopper GPU."""
    batch, seqlen_q, seqlen_k = sizes
    q, k = (
        torch.empty(batch, rows, count, head_dim, dtype=dtype, device="meta")
        for rows, count in zip((seqlen_q, seqlen_k), heads, strict=True)
    )
    plan = explain(q, k, k, device_capability=(9, 0), **given)
    assert (few_queries.NOTE in plan.notes) == isinstance(plan.config, DecodeConfig)
    return plan.config


@pytest.mark.parametrize(
    ("sizes", "heads", "head_dim", "rows"),
    [
        # A step of decoding: of one sequence, of many, and with many heads.
        ((1, 1, 2000), (32, 8), 128, 32),
        ((64, 1, 4096), (32, 8), 128, 32),
        ((1, 1, 300), (8, 8), 256, 32),
        # A few tokens that were guessed ahead.
        ((8, 5, 3000), (32, 4), 128, 64),
        # Many keys of few heads, which fill no GPU.
        ((1, 64, 60_000), (2, 2), 128, 64),
    ],
)
def test_calls_that_the_decode_kernel_serves(
    sizes: tuple[int, int, int], heads: tuple[int, int], head_dim: int, rows: int
) -> None:
    for causal in (False, True):
        config = config_of(sizes, heads, head_dim, causal=causal)
        assert isinstance(config, DecodeConfig) and config.tile_m == rows
        # A single query sees all keys.
        assert config.causal == (causal and sizes[1] > 1)


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ((1, 257, 100_000), (8, 1)),
        ((1, 4096, 4096), (8, 8)),
        ((1, 20, 64), (8, 8)),
        # Heads with keys of their own that fill the GPU.
        ((64, 100, 2000), (16, 16)),
    ],
)
def test_calls_that_the_forward_kernel_serves(sizes: tuple[int, int, int], heads: tuple[int, int]) -> None:
    assert isinstance(config_of(sizes, heads), ForwardConfig)


def test_what_the_decode_kernel_does_not_do_is_the_forward_kernels() -> None:
    sizes, heads = (1, 1, 2000), (32, 8)
    slopes = torch.ones(32, device="meta")
    for given in (
        {"alibi_slopes": slopes},
        {"dropout_p": 0.5},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 1.0},
        {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx > q_idx},
    ):
        assert isinstance(config_of(sizes, heads, **given), ForwardConfig), given
    for given in (
        {"softcap": 2.0},
        {"sinks": torch.ones(32, device="meta")},
        {"window_size": (100, 0)},
        {"attention_chunk": 512, "causal": True},
        {"sm_margin": 8},
    ):
        assert isinstance(config_of(sizes, heads, **given), DecodeConfig), given
    assert config_of(sizes, heads, backend="reference").name.startswith("reference")


def test_codes_of_few_rows_are_always_the_decode_kernels_where_the_lse_is_exact() -> None:
    given = {"dtype": FP8, "return_attn_probs": True}
    for sizes, heads in (((1, 1, 30), (4, 4)), ((100, 2, 5000), (64, 8)), ((1, 16, 8000), (8, 8))):
        config = config_of(sizes, heads, **given)
        assert isinstance(config, DecodeConfig) and config.e4m3_queries
    # More rows are of a kernel in 16 bits, where many keys are shared out.
    config = config_of((1, 16, 60_000), (8, 2), **given)
    assert isinstance(config, DecodeConfig) and config.is_widened
    for sizes, heads in (((1, 16, 1000), (8, 2)), ((64, 64, 2000), (8, 8))):
        assert isinstance(config_of(sizes, heads, **given), ForwardConfig)


def test_lengths_that_are_served_alike() -> None:
    classes = [few_queries.longest_alike(n) for n in range(1, 5000)]
    assert all(n <= most for n, most in enumerate(classes, 1)) and classes == sorted(classes)
    assert all(few_queries.longest_alike(most) == most for most in classes) and len(set(classes)) == 14
    assert few_queries.longest_alike(MAX_SEQLEN) == MAX_SEQLEN
    # Keys of all packed sequences are counted by these too.
    assert all(few_queries.longest_alike(n) <= 1.5 * n for n in range(1100, 2**24, 10_007))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"softmax_scale": 0.3},
        {"window_size": (200, 0)},
        {"attention_chunk": 300, "causal": True},
        {"softcap": 1.5},
    ],
    ids=str,
)
def test_results(kernels: DecodeKernels, options: dict[str, Any]) -> None:
    q, k, v = qkv(3, 777)
    given = dict(options)
    left, right = given.pop("window_size", (-1, -1))
    exact, exact_lse = attention_naive(q, k, v, window_left=left, window_right=right, **given)
    for number in range(1, 5):
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        assert len(kernels.calls) == number and len(kernels.loaded) <= 3
        torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)
    out = flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)


def test_keys_that_grow_are_found_once(kernels: DecodeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(1, 1024)
    for rows in (800, 801):
        flash_attn_func(q, k[:, :rows], v[:, :rows])
    monkeypatch.setattr(api, "run_forward", None)
    for rows in (802, 1000, 769, 1024):
        out = flash_attn_func(q, k[:, :rows], v[:, :rows])
        exact, _ = attention_naive(q, k[:, :rows], v[:, :rows])
        torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
        assert kernels.calls[-1]["lengths"].tolist() == [MAX_SEQLEN] * 2
    assert len(kernels.calls) == 6


def test_no_cta_is_without_a_key_block(kernels: DecodeKernels) -> None:
    """So that work memory of many rows is kept, where keys are few."""
    for seqlen_k, most in ((2000, 2 * 22), (60_000, 128)):
        sizes = (1, 128, 2, 128), (1, seqlen_k, 2, 128), (1, seqlen_k, 2, 128)
        q, k, v = (few_queries.contiguous_spec(x, BF16, torch.device("cpu")) for x in sizes)
        few = few_queries.find_few(q, k, v, NO_MASK, PLAIN, 0)
        call = few.call if few.call is not None else decoded(q, k, v)
        launcher = launch.find_short_decode(call)
        assert launcher.config.tile_m == 128 and launcher.config.tile_n == 96
        assert launcher.pieces == most <= decode.find_decode(call).pieces == 128
        is_kept = sum(piece.bytes for piece in launcher.work) <= device_memory.KEPT_BYTES
        assert is_kept == (seqlen_k == 2000)


def decoded(q: Any, k: Any, v: Any) -> Any:
    """The call on a cache that a dense one is to the decode kernel, whatever is faster."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_queries, "fastest", lambda call, *_: found.append(call) or few_queries.NOT_FEW)
        few_queries._find_few.__wrapped__(q.shape, v.shape, q.dtype, q.device, NO_MASK, PLAIN, 0, True)
    return found[0]


def test_tensors_that_tma_cannot_address(kernels: DecodeKernels) -> None:
    q, k, v = qkv(2, 700)
    exact, _ = attention_naive(q, k, v)
    odd = [torch.zeros(x.numel() + 1, dtype=BF16)[1:].view(x.shape).copy_(x) for x in (q, k, v)]
    for tensors in ([q, k, v], odd, [q, k, v], odd):
        out = flash_attn_func(*tensors)
        torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
        assert all(kernels.calls[-1][name].data_ptr() % 16 == 0 for name in ("q", "k", "v"))
    # Keys that have to be copied whole are, so that no bit depends on strides.
    of_one = k[:1].expand(2, -1, -1, -1)
    exact, _ = attention_naive(q, of_one, v)
    for _ in range(3):
        torch.testing.assert_close(flash_attn_func(q, of_one, v).double(), exact, atol=1e-2, rtol=1e-2)
        assert kernels.calls[-1]["k"].is_contiguous()


def test_gradients_are_recorded(kernels: DecodeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [x.requires_grad_() for x in qkv(2, 700)]
    seen: list[Any] = []

    def differentiate(
        dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *o: Any
    ) -> Any:
        seen.append(lse)
        return q.clone(), k.clone(), v.clone()

    monkeypatch.setattr(ops, "differentiate", differentiate)
    out = autograd.forward(*leaves, 0.125, False, None, 0, False, -1, -1, 0, *forward.NO_SCORES.values)[0]
    out.sum().backward()
    exact_lse = attention_naive(*leaves, softmax_scale=0.125)[1]
    torch.testing.assert_close(seen[0].double(), exact_lse.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seqlens", [(2, 300), (10, 60_000)], ids=["codes", "widened"])
@pytest.mark.parametrize("has_descales", [False, True])
def test_codes(kernels: DecodeKernels, seqlens: tuple[int, int], has_descales: bool) -> None:
    q, k, v = qkv(*seqlens, dtype=FP8)
    names = ("q_descale", "k_descale", "v_descale")
    scales = [torch.rand(2, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3)]
    descales = dict(zip(names, scales, strict=True)) if has_descales else {}
    ones = torch.ones(2, 2)
    of_q, of_k, of_v = (descales.get(name, ones)[:, None, :, None].double() for name in names)
    whole = q.double() * of_q.repeat_interleave(2, 2), k.double() * of_k, v.double() * of_v
    exact, exact_lse = attention_naive(*whole)
    for number in range(1, 5):
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **descales)
        assert out.dtype == BF16 and len(kernels.calls) == number
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-2, rtol=1e-2)
    assert kernels.loaded[0].is_widened == (seqlens[0] == 10)


LENGTHS_Q, LENGTHS_K = (3, 1, 0, 2), (400, 0, 90, 777)


def packed(dtype: torch.dtype = BF16) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Any, ...]]:
    """q, k and v of four sequences, and where they lie."""
    q, k, v = (
        draw(sum(lengths), heads, 64, dtype=dtype, seed=i)
        for i, (lengths, heads) in enumerate(((LENGTHS_Q, 8), (LENGTHS_K, 2), (LENGTHS_K, 2)))
    )
    sums = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_K)]
    return (q, k, v), (*sums, max(LENGTHS_Q), max(LENGTHS_K))


def in_float64(
    tensors: tuple[Tensor, Tensor, Tensor], used: tuple[int, ...] = LENGTHS_K, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse of each sequence alone."""
    q, k, v = (
        x.split(lengths) for x, lengths in zip(tensors, (LENGTHS_Q, LENGTHS_K, LENGTHS_K), strict=True)
    )
    found = [
        attention_naive(of_q[None], of_k[None, :n], of_v[None, :n], **options)
        for of_q, of_k, of_v, n in zip(q, k, v, used, strict=True)
    ]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


@pytest.mark.parametrize("is_used", [False, True], ids=["whole", "seqused_k"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(kernels: DecodeKernels, is_used: bool, causal: bool) -> None:
    tensors, lengths = packed()
    used = (300, 0, 90, 500) if is_used else LENGTHS_K
    options = {"causal": causal, "seqused_k": torch.tensor(used).int() if is_used else None}
    exact, exact_lse = in_float64(tensors, used, causal=causal)
    config = explain_varlen(*tensors, *lengths, **options, device_capability=(9, 0)).config
    assert isinstance(config, DecodeConfig) and config.layout == "varlen" and config.leftpad
    for number in range(1, 4):
        out, lse = flash_attn_varlen_func(*tensors, *lengths, return_attn_probs=True, **options)
        assert len(kernels.calls) == number
        torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)


def test_bounds_of_lengths_decide_on_what_is_found_again(kernels: DecodeKernels) -> None:
    """One query each sees all of its keys under a causal mask; four of one sequence do not."""
    q, k, v = draw(4, 8, 64), draw(1200, 2, 64, seed=1), draw(1200, 2, 64, seed=2)
    single = torch.arange(5, dtype=torch.int32), 300 * torch.arange(5, dtype=torch.int32), 1, 300
    of_one = torch.tensor([0, 4, 4, 4, 4]).int(), torch.tensor([0, 6, 406, 806, 1200]).int(), 4, 400
    exact, _ = attention_naive(q[None], k[None, :6], v[None, :6], causal=True)
    for _ in range(4):
        flash_attn_varlen_func(q, k, v, *single, causal=True)
        assert kernels.calls[-1]["cu_seqlens_q"].tolist() == [0, 1, 2, 3, 4]
        out = flash_attn_varlen_func(q, k, v, *of_one, causal=True)
        torch.testing.assert_close(out.double(), exact[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_nothing_is_launched_without_keys(kernels: DecodeKernels, dtype: torch.dtype) -> None:
    q, k = draw(2, 1, 4, 64, dtype=dtype), draw(2, 0, 2, 64, dtype=dtype)
    out, lse = flash_attn_func(q, k, k, return_attn_probs=True)
    assert not out.any() and bool((lse == -torch.inf).all())
    steps, none = torch.arange(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    flat = q.flatten(0, 1), *[k.flatten(0, 1)] * 2
    for longest_k in (0, 5):
        out, lse = flash_attn_varlen_func(*flat, steps, none, 1, longest_k, return_attn_probs=True)
        assert not out.any() and bool((lse == -torch.inf).all())
        plan = explain_varlen(*flat, steps, none, 1, longest_k, device_capability=(9, 0))
        assert not isinstance(plan.config, DecodeConfig)
    assert not isinstance(explain(q, k, k, device_capability=(9, 0)).config, DecodeConfig)
    assert not kernels.calls


def test_wide_values() -> None:
    """Above 256 columns they are attended to in parts, which the decode kernel serves in dense calls of 16 bits."""
    for dtype in (BF16, FP8):
        q, k, v = (
            torch.empty(1, n, h, d, dtype=dtype, device="meta")
            for n, h, d in ((1, 8, 128), (2000, 2, 128), (2000, 2, 512))
        )
        found = explain(q, k, v, device_capability=(9, 0)).config
        assert isinstance(found, DecodeConfig) == (dtype is BF16)
        bounds = torch.empty(2, dtype=torch.int32, device="meta")
        packed = [x[0] for x in (q, k, v)]
        found = explain_varlen(*packed, bounds, bounds, 1, 2000, device_capability=(9, 0)).config
        assert not isinstance(found, DecodeConfig)


def test_packed_codes(kernels: DecodeKernels) -> None:
    tensors, lengths = packed(FP8)
    scales = [torch.rand(4, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3)]
    out, lse = flash_attn_varlen_func(
        *tensors, *lengths, None, None, None, True, None, *scales, return_attn_probs=True
    )
    rows_q, rows_k = (torch.arange(4).repeat_interleave(torch.tensor(x)) for x in (LENGTHS_Q, LENGTHS_K))
    of_q = scales[0][rows_q].repeat_interleave(4, 1)
    factors = of_q, scales[1][rows_k], scales[2][rows_k]
    q, k, v = (x.double() * factor[..., None] for x, factor in zip(tensors, factors, strict=True))
    exact, exact_lse = in_float64((q, k, v), causal=True)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-2, rtol=1e-2)
    assert len(kernels.calls) == 1


def test_packed_calls_that_the_forward_kernel_serves() -> None:
    (q, k, v), (cu_seqlens_q, cu_seqlens_k, *longest) = packed()
    for given in (
        {"seqused_q": torch.tensor(LENGTHS_Q).int()},
        {"alibi_slopes": torch.ones(8)},
        {"dropout_p": 0.5},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 1.0},
    ):
        plan = explain_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **given, device_capability=(9, 0)
        )
        assert isinstance(plan.config, ForwardConfig), given
    plan = explain_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 257, longest[1], device_capability=(9, 0))
    assert isinstance(plan.config, ForwardConfig)
