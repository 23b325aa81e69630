"""Dropout of P: the mask by its definition, the reference against the formula, and the public functions."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import hopper_attention as h
from hopper.backward.config import select_backward_config, validate_backward_config
from hopper.config import validate_forward_config
from hopper.forward.tilings import select_forward_config, with_dropout
from hopper_attention import compile_cache, explain
from hopper_attention.dropout import draw_philox, kept_steps
from hopper_attention.launch import backward, forward
from hopper_attention.reference import attention_naive, attention_standard, attention_tiled, dropout_mask
from hopper_attention.reference import dropout as mask_of
from hopper_attention.scores import Scores
from tests.python.fake_gpu import SMS, forget_launchers, pretend
from tests.python.score_formula import seen_pairs
from tests.python.varlen_cases import CASES

PHILOX = torch.tensor([0x123456789ABCDEF, 0x7EDCBA9876543210])
P = 0.3
LOW = 0xFFFFFFFF


def words_of(counter: tuple[int, ...], key: tuple[int, int], rounds: int) -> tuple[int, ...]:
    """Philox4x32 in plain integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(rounds):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y & LOW, (x >> 32) ^ d ^ m, x & LOW
        k, m = (k + 0x9E3779B9) & LOW, (m + 0xBB67AE85) & LOW
    return a, b, c, d


@pytest.mark.parametrize(
    "word,words",
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (LOW, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_published_words(
    word: int, words: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ten rounds, which the authors give; the mask takes seven."""
    given = torch.tensor(word)
    found = mask_of.philox((given,) * 4, (given,) * 2)
    assert tuple(map(int, found)) == words_of((word,) * 4, (word,) * 2, 7)
    monkeypatch.setattr(mask_of, "ROUNDS", 10)
    assert tuple(map(int, mask_of.philox((given,) * 4, (given,) * 2))) == words


def is_kept(p: float, batch: int, head: int, i: int, j: int) -> bool:
    """As ``cute_kernels/philox.py`` defines it, of ``PHILOX``."""
    seed, offset = ((int(x) & LOW, int(x) >> 32) for x in PHILOX)
    key = words_of((*offset, 0, 0), seed, 7)[:2]
    block_i, block_j = i // 16, j // 16
    counter = (4 * block_j + j % 8 // 2, 4 * block_i + i % 8 // 2, head, batch)
    word = words_of(counter, key, 7)[2 * (i % 2 ^ block_j % 2) + (j % 2 ^ block_i % 2)]
    byte = word >> 8 * (2 * (i // 8 % 2) + j // 8 % 2) & 0xFF
    return byte < kept_steps(p)


def test_the_mask_is_what_its_definition_says() -> None:
    mask = dropout_mask(PHILOX, 0.4, 2, 3, 70, 55)
    expected = [
        [[[is_kept(0.4, b, n, i, j) for j in range(55)] for i in range(0, 70, 3)] for n in range(3)]
        for b in range(2)
    ]
    assert torch.equal(mask[:, :, ::3], torch.tensor(expected))
    assert torch.equal(dropout_mask(PHILOX, 0.4, 1, 3, 40, 33, first_batch=1), mask[1:, :, :40, :33])
    whole = mask_of.DropoutMask.of(0.4, PHILOX, 2, 3)
    assert torch.equal(whole.tile(mask_of.Span(21, 50), mask_of.Span(17, 18)), mask[:, :, 21:50, 17:18])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_how_much_is_kept(p: float) -> None:
    mask = dropout_mask(PHILOX, p, 2, 2, 256, 320)
    expected = kept_steps(p) / 256
    assert abs(expected - (1 - p)) <= 1 / 512
    sigma = math.sqrt(expected * (1 - expected) / mask.numel())
    assert abs(mask.double().mean() - expected) < 4 * sigma
    # Heads, batches, seeds, offsets, neighbours: none goes with another.
    others = [
        dropout_mask(PHILOX + torch.tensor(d), p, 2, 2, 256, 320) for d in ((1, 0), (0, 1), (1 << 32, 0))
    ]
    others += [mask.roll(1, dim) for dim in range(4)] + [mask.roll(8, dim) for dim in (2, 3)]
    for other in others:
        together = (mask.double() - expected) * (other.double() - expected)
        # Of two heads, and of two entries, each product is there twice.
        assert abs(together.mean()) < 4 * expected * (1 - expected) / math.sqrt(mask.numel() / 2)


@pytest.mark.parametrize("p,kept", [(0.001, 256), (1 / 512, 256), (0.1, 230), (0.5, 128), (0.999, 1)])
def test_steps(p: float, kept: int) -> None:
    assert kept_steps(p) == kept


def formula(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: tuple[int, int], p: float
) -> tuple[Tensor, Tensor]:
    heads = q.shape[2]
    keys, values = (x.double().repeat_interleave(heads // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * q.shape[3] ** -0.5
    s = s.masked_fill(~seen_pairs(q.shape[1], k.shape[1], causal, window), -math.inf)
    lse = s.logsumexp(-1, keepdim=True)
    kept = dropout_mask(PHILOX, p, q.shape[0], heads, q.shape[1], k.shape[1])
    weights = torch.exp(s - lse).nan_to_num(0.0) * kept * (256 / kept_steps(p))
    return torch.einsum("bhij,bjhd->bihd", weights, values), lse.squeeze(-1)


def qkv(lengths: tuple[int, int], dtype: torch.dtype = torch.float64, head_dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, lengths[0], 4, head_dim), (2, lengths[1], 2, head_dim), (2, lengths[1], 2, 24)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("attention", [attention_naive, attention_tiled])
@pytest.mark.parametrize("lengths", [(37, 50), (50, 37), (5, 1)], ids=str)
@pytest.mark.parametrize("causal,window", [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 4))])
def test_results_and_gradients(
    attention: Any, lengths: tuple[int, int], causal: bool, window: tuple[int, int]
) -> None:
    leaves = [x.requires_grad_() for x in qkv(lengths)]
    options = {"dropout_p": P, "philox": PHILOX, "causal": causal}
    tiles = {"tile_m": 24, "tile_n": 9} if attention is attention_tiled else {}
    found = attention(*leaves, window_left=window[0], window_right=window[1], **options, **tiles)
    wanted = formula(*leaves, causal=causal, window=window, p=P)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    given = torch.randn(wanted[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dlse = torch.randn(wanted[1].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    dlse = dlse.masked_fill(wanted[1] == -math.inf, 0.0)
    mine = torch.autograd.grad(found, leaves, (given, dlse))
    seen = wanted[1].masked_fill(wanted[1] == -math.inf, 0.0)
    theirs = torch.autograd.grad((wanted[0], seen), leaves, (given, dlse))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0.0) if causal else b, rtol=1e-8, atol=1e-9)


def test_the_formula_at_the_dtype_of_its_inputs() -> None:
    inputs = qkv((40, 60), torch.float16)
    options = {"dropout_p": P, "philox": PHILOX}
    exact, standard = attention_naive(*inputs, **options)[0], attention_standard(*inputs, **options)
    assert standard.dtype == torch.float16 and (standard - exact).abs().max() < 0.01


def seeded(function: Any, *arguments: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    return function(*arguments, **options)


def test_a_seed_gives_a_mask_and_a_call_moves_on() -> None:
    inputs = [x.requires_grad_() for x in qkv((70, 90), torch.bfloat16, 16)]
    options = {"causal": True, "dropout_p": P, "return_attn_probs": True}
    out, lse = seeded(h.flash_attn_func, *inputs, **options)
    other, _ = h.flash_attn_func(*inputs, **options)
    torch.manual_seed(5)
    philox = draw_philox(torch.device("cpu"))
    exact, exact_lse = attention_naive(*inputs, causal=True, dropout_p=P, philox=philox)
    assert (out - exact).abs().max() < 0.02 and (lse - exact_lse).abs().max() < 1e-5
    assert (out - other).abs().max() > 0.1
    again, _ = seeded(h.flash_attn_func, *inputs, **options)
    assert torch.equal(out, again)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = torch.autograd.grad(exact, inputs, dout.double())
    for mine, theirs in zip(torch.autograd.grad(out, inputs, dout), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.03, atol=0.03)


def test_without_dropout_no_generator_moves() -> None:
    inputs = qkv((20, 30), torch.float16)
    state = torch.get_rng_state()
    plain = h.flash_attn_func(*inputs)
    assert torch.equal(plain, h.flash_attn_func(*inputs, dropout_p=0.0))
    assert torch.equal(plain, h.flash_attn_func(*inputs, dropout_p=0))
    plan = explain(*inputs, dropout_p=0.1)
    assert plan.notes == ("dropout_p: 26 of 256 elements of P are dropped",)
    with pytest.raises(ValueError):
        h.flash_attn_func(*inputs, dropout_p=2.0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("case", ["many tiles", "used", "empty ones", "rows behind"])
def test_a_sequence_has_the_mask_of_its_number(case: str) -> None:
    c = CASES[case]
    q, k, v = (x.requires_grad_() for x in c.tensors(torch.float16, poisoned=False))
    options = {"causal": True, "return_attn_probs": True}
    out, _ = seeded(h.flash_attn_varlen_func, q, k, v, *c.lengths, dropout_p=P, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    torch.manual_seed(5)
    philox = draw_philox(q.device)
    for number, (rows, keys) in enumerate(c.spans()):
        parts = [
            x.detach()[None, span].double().requires_grad_() for x, span in ((q, rows), (k, keys), (v, keys))
        ]
        kept = dropout_mask(philox, P, 1, q.shape[1], parts[0].shape[1], parts[1].shape[1], number)
        if not kept.numel():
            continue
        mask = mask_of.DropoutMask.of(P, philox, 1, q.shape[1], number)
        assert torch.equal(mask.tile(mask_of.Span(0, kept.shape[2]), mask_of.Span(0, kept.shape[3])), kept)
        alone = attention_tiled_of(parts, philox, number)
        torch.testing.assert_close(out[rows].double(), alone[0][0], rtol=0.01, atol=0.01)
        for whole, part, span in zip(gradients, alone[1](dout[None, rows]), (rows, keys, keys), strict=True):
            torch.testing.assert_close(whole[span].double(), part[0], rtol=0.02, atol=0.02)


def attention_tiled_of(parts: list[Tensor], philox: Tensor, number: int) -> tuple[Tensor, Any]:
    """out of one sequence in float64, and what gives its gradients."""
    q, k, v = parts
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, keys) * q.shape[3] ** -0.5
    s = s.masked_fill(~seen_pairs(q.shape[1], k.shape[1], True, (-1, -1)), -math.inf)
    nothing = (s == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    kept = dropout_mask(philox, P, 1, q.shape[2], q.shape[1], k.shape[1], number)
    out = torch.einsum("bhij,bjhd->bihd", p * kept * (256 / kept_steps(P)), values)
    return out, lambda dout: torch.autograd.grad(out, parts, dout.double())


def test_packed_forms() -> None:
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(2, 40, 3, 2, 16, generator=generator).half()
    q, k, v = qkv.unbind(2)
    kv = qkv[:, :, 1:]
    plain = seeded(h.flash_attn_func, q, k, v, dropout_p=P)
    assert torch.equal(plain, seeded(h.flash_attn_qkvpacked_func, qkv, dropout_p=P))
    assert torch.equal(plain, seeded(h.flash_attn_kvpacked_func, q, kv, dropout_p=P))
    cu = torch.tensor([0, 40, 80], dtype=torch.int32)
    flat = qkv.flatten(0, 1)
    packed = seeded(h.flash_attn_varlen_qkvpacked_func, flat, cu, 40, dropout_p=P)
    torch.testing.assert_close(packed.unflatten(0, (2, 40)), plain)
    both = seeded(h.flash_attn_varlen_kvpacked_func, flat[:, 0], flat[:, 1:], cu, cu, 40, 40, dropout_p=P)
    assert torch.equal(both, packed)


@pytest.mark.parametrize(
    "dropout_p,error,message",
    [
        (1.0, ValueError, "dropout_p is 1.0, allowed: 0, which drops nothing, or more, below 1"),
        (-0.1, ValueError, "dropout_p is -0.1, allowed"),
        (math.nan, ValueError, "dropout_p is nan, allowed"),
        (-(10**400), ValueError, "dropout_p is -10000"),
        (1 - Fraction(1, 2**60), ValueError, "dropout_p is 11529.*, allowed"),
        ("0.1", TypeError, "dropout_p is a str, '0.1', allowed: a number"),
        (None, TypeError, "dropout_p is a NoneType, None, allowed: a number"),
        (True, TypeError, "dropout_p is a bool, True, allowed: a number"),
        (False, TypeError, "dropout_p is a bool, False, allowed: a number"),
        (torch.zeros(2), TypeError, "dropout_p is a Tensor, .*, allowed: a number"),
    ],
)
def test_wrong_probabilities(dropout_p: Any, error: type[Exception], message: str) -> None:
    q, k, v = qkv((5, 6), torch.float16)
    for call in (h.flash_attn_func, explain):
        with pytest.raises(error, match=message):
            call(q, k, v, dropout_p=dropout_p)
    c = CASES["many tiles"]
    with pytest.raises(error, match=message):
        h.flash_attn_varlen_func(*c.tensors(torch.float16), *c.lengths, dropout_p=dropout_p)


def test_what_it_does_not_go_with() -> None:
    tensors = [x.to(torch.float8_e4m3fn) for x in qkv((5, 6), torch.float16)]
    with pytest.raises(
        NotImplementedError, match=r"dropout_p is 0\.1: dropout of P of torch\.float8_e4m3fn tensors"
    ):
        h.flash_attn_func(*tensors, dropout_p=0.1)
    with pytest.raises(ValueError, match="philox is None"):
        attention_tiled(*qkv((5, 6)), dropout_p=0.1)


@pytest.mark.parametrize(
    "philox,error,message",
    [
        (None, ValueError, r"philox is None, allowed with dropout_p 0\.3: int64 \(2,\)"),
        (torch.zeros(2), TypeError, r"philox has dtype torch\.float32, allowed: torch\.int64"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"philox has shape \(3,\), allowed: \(2,\)"),
    ],
)
def test_wrong_words(philox: Tensor | None, error: type[Exception], message: str) -> None:
    q, k, v = qkv((5, 6), torch.float16)
    with pytest.raises(error, match=message):
        torch.ops.hopper_attention.forward(
            q, k, v, 0.2, False, None, 0, False, -1, -1, 0, 0.0, None, None, P, philox
        )


def test_under_torch_compile_and_vmap() -> None:
    q, k, v = (x.requires_grad_() for x in qkv((20, 30), torch.float16))
    compiled = torch.compile(
        lambda *x: h.flash_attn_func(*x, dropout_p=P), backend="aot_eager", fullgraph=True
    )
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    assert torch.autograd.grad(first.sum(), v)[0].isfinite().all()
    samples = [x.detach()[None].expand(3, *x.shape) for x in (q, k, v)]
    mapped = torch.vmap(lambda *x: h.flash_attn_func(*x, dropout_p=P), randomness="different")(*samples)
    assert mapped.shape == (3, *first.shape) and not torch.equal(mapped[0], mapped[1])
    same = torch.vmap(lambda *x: h.flash_attn_func(*x, dropout_p=P), randomness="same")(*samples)
    assert torch.equal(same[0], same[1])


# Kernels


@pytest.mark.parametrize("backend", ["hopper", "ampere"])
def test_words_and_steps_reach_a_kernel(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, forward, backward)
    calls: list[tuple[Any, ...]] = []
    configs: list[Any] = []
    for name in ("get_forward", "get_backward"):
        monkeypatch.setattr(compile_cache, name, lambda c: configs.append(c) or (lambda *a: calls.append(a)))
    lasts = ((3 * SMS,), (SMS,)) if backend == "hopper" else ((), ())
    q, k, v = (x[..., :8] for x in qkv((20, 30), torch.bfloat16))
    scores = Scores(dropout_p=0.1, philox=PHILOX)
    out, lse = forward.run_forward(q, k, v, 0.5, False, backend, 0, scores=scores)
    backward.run_backward(out, q, k, v, out, lse, 0.5, False, backend=backend, scores=scores)
    of_forward, of_backward = calls[0], next(call for call in calls[1:] if len(call) > 6)
    for call, cap_and_slopes, last in zip((of_forward, of_backward), (3, 2), lasts, strict=True):
        *_, philox, kept = call[: len(call) - len(last)]
        assert philox is PHILOX and kept == 230 and call[len(call) - len(last) :] == last
        assert call[len(call) - len(last) - 2 - cap_and_slopes :][:cap_and_slopes] == (None,) * cap_and_slopes
    assert all(c.dropout for c in configs if hasattr(c, "dropout")) and configs[0].name.endswith("_dropout")
    forget_launchers()


def test_configs_with_dropout() -> None:
    for head_dim in (64, 96, 128, 192, 256):
        for causal in (False, True):
            plain = select_forward_config("bfloat16", head_dim, head_dim, causal, 16384)
            config = with_dropout(plain)
            validate_forward_config(config)
            assert config.tile_n % 32 == 0 and plain.tile_n - 32 < config.tile_n <= plain.tile_n
            assert not config.is_plain and config.name != plain.name
            backward_config = select_backward_config("bfloat16", head_dim, head_dim, causal, dropout=True)
            assert backward_config.tile_m == 64 and backward_config.name.count("dropout") == 1
    with pytest.raises(ValueError, match="tile_n is 112, allowed with dropout: multiples of 32"):
        validate_forward_config(
            replace(select_forward_config("bfloat16", 192, 192, False, 512), dropout=True)
        )
    with pytest.raises(ValueError, match="tile_m is 128, allowed with dropout: 64"):
        validate_backward_config(replace(select_backward_config("bfloat16", 64, 64, False), dropout=True))
