"""Which key tiles of a backward pass CTAs share by what they visit, and what reaches the kernels that do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import SCHEDULER_WORDS, BackwardStep
from hopper.backward.config import select_backward_config
from hopper_attention import compile_cache, device_memory, explain, flash_attn_func
from hopper_attention.backends import HOPPER_CAPABILITY
from hopper_attention.backward_rules import BackwardProblem, Division, select_for
from hopper_attention.launch import backward, forward
from hopper_attention.launch.gradient_launchers import BackwardLauncher, DividedLauncher, PieceLauncher
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import FULL_SIDES, MaskSpec
from hopper_attention.model_kernels import ModelShape, kernels_of
from hopper_attention.scores import NO_SCORES, ScoreKind
from hopper_attention.visit_pieces import MOST_COUNTED, MOST_PIECES, with_shares
from tests.python.fake_gpu import SMS, forget_launchers, made_anew, noting, pretend
from tests.python.test_divided_heads import found_for, problem
from tests.python.test_divided_heads_again import named
from tests.python.test_packed_again import described

BF16 = torch.bfloat16

# The rule


@pytest.mark.parametrize(
    ("asked", "division"),
    [
        # 2.18, 1.27 and 1.55 rounds of 132 tiles: the last round is shared.
        (problem(4, 1105, (8, 8), 128, False), (264, 24, 4)),
        (problem(1, 3000, (7, 7), 128, False), (132, 36, 3)),
        (problem(1, 5248, (5, 5), 64, False, torch.float16), (132, 73, 5)),
        # Half a round, and a quarter of one whose heads are shared as well.
        (problem(1, 1024, (8, 8), 128, False), (0, 64, 2)),
        (problem(1, 2289, (24, 2), 128, False), (0, 36, 7)),
        # Rounds that are nearly full, walks that are short, and many rounds.
        (problem(1, 2048, (16, 16), 128, False), None),
        (problem(3, 795, (12, 12), 64, False), None),
        (problem(32, 512, (16, 16), 128, False), None),
        (problem(1, 16384, (32, 32), 64, False), None),
        (problem(1, 16896, (1, 1), 128, False), None),
        # Under a causal mask the longest tile is waited for.
        (problem(1, 2048, (8, 8), 128), (0, 128, 2)),
        (problem(1, 4096, (4, 4), 128), (0, 128, 2)),
        (problem(1, 4096, (1, 1), 96), (0, 32, 4)),
        (problem(1, 6000, (4, 4), 128), None),
        (problem(1, 2048, (16, 16), 128), None),
        (problem(1, 1024, (16, 16), 128), None),
        (problem(8, 2048, (16, 16), 128), None),
        # Few queries on many keys, and the reverse.
        (problem(1, (200, 9000), (3, 3), 128, False), None),
        (problem(1, (9000, 200), (3, 3), 128, False), (0, 6, 14)),
        (problem(1, (9000, 200), (3, 3), 128), None),
        # Head_dims that have no kernel of their own.
        (problem(1, 3000, (7, 7), 104, False), (132, 36, 3)),
        # More query tiles than are divided exactly among all CTAs.
        (problem(1, (2**24, 128), (1, 1), 128, False), (0, 1, 63)),
    ],
)
def test_what_is_divided(asked: BackwardProblem, division: tuple[int, ...] | None) -> None:
    found = with_shares(asked, FULL_SIDES)
    assert found == asked._replace(division=division and Division(*division))
    config = select_for(found.kind, "hopper", HOPPER_CAPABILITY)
    assert config.divides_visits == (division is not None) and not config.walks_back
    usual = select_for(asked.kind, "hopper", HOPPER_CAPABILITY)
    assert config == replace(usual, divides_visits=config.divides_visits, walks_back=False)


@pytest.mark.parametrize(
    "asked",
    [
        problem(4, 1105, (8, 8), 256, False),
        problem(4, 1105, (8, 8), 128, False, deterministic=True),
        problem(4, 1105, (8, 8), 128, False, has_window=True),
        problem(4, 1105, (8, 8), 128, False, scores=ScoreKind(has_softcap=True)),
        problem(4, 1105, (8, 8), 128, False, torch.float32),
        problem(4, 1105, (8, 8), 128, False, one_tile=True),
        problem(1, 3000, (40000, 40000), 64, False),
        problem(1, 0, (8, 8), 128, False),
        # Heads that share K and V are divided under a causal mask.
        problem(1, 2048, (32, 8), 128),
    ],
)
def test_what_is_not(asked: BackwardProblem) -> None:
    assert with_shares(asked, FULL_SIDES).division is None


def test_every_division_is_one_of_the_launch() -> None:
    drawn, found = random.Random(3), 0
    for _ in range(2000):
        causal, kv_heads = drawn.random() < 0.5, drawn.choice((1, 2, 3, 8, 16, 40))
        heads = kv_heads * drawn.choice((1, 1, 4, 7)), kv_heads
        seqlens = tuple(int(2 ** drawn.uniform(0, 18)) for _ in "qk")
        asked = problem(drawn.choice((1, 1, 2, 9)), seqlens, heads, drawn.choice((64, 96, 128)), causal)
        division = with_shares(asked, FULL_SIDES).division
        if division is not None:
            found += 1
            first, tiles, pieces = division
            all_tiles = asked.q_shape[0] * kv_heads * -(-seqlens[1] // 128)
            assert first + tiles <= all_tiles and tiles > 0 and first >= 0
            assert pieces > 1 and tiles * pieces <= MOST_PIECES
            assert first + tiles == all_tiles or first == 0
            blocks = -(-seqlens[0] // 64) * heads[0] // kv_heads
            assert blocks * pieces * pieces <= MOST_COUNTED
    assert found > 300


# The launches


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Configs of backward kernels and what they are called with, on a Hopper GPU by name."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    pretend(monkeypatch, backward)

    def run(config: Any, *arguments: Any) -> None:
        if isinstance(config, BackwardStep) and config.step == "prepare":
            # Delta, which a gradient of the LSE is taken from.
            arguments[4].zero_()
        calls.append((config, arguments))

    monkeypatch.setattr(compile_cache, "get_backward", lambda config: partial(run, config))
    yield calls
    forget_launchers()


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True)])
def test_three_launches(kernel_calls: list[Any], head_dim: int, causal: bool, has_dlse: bool) -> None:
    heads = (2, 2) if causal else (8, 1)
    sizes = (700, heads[0]), (600, heads[1]), (600, heads[1])
    q, k, v = (torch.zeros(2, seqlen, n, head_dim, dtype=BF16) for seqlen, n in sizes)
    lse = torch.zeros(2, heads[0], 700)
    out, dout, dlse = torch.ones_like(q), torch.ones_like(q), torch.full_like(lse, 3.0)
    options = 0.5, MaskSpec(causal), NO_SCORES, None, False
    gradients = differentiate(dout, dlse if has_dlse else None, q, k, v, out, lse, *options)
    division = with_shares(problem(2, (700, 600), heads, head_dim, causal), FULL_SIDES).division
    (prepare, before), (config, given), (finish, behind) = kernel_calls
    c = config
    assert division is not None and c.divides_visits and c.causal == causal
    assert (prepare, finish) == (BackwardStep("prepare", c), BackwardStep("finish", c))

    lse_log2, delta, sums = before[3:]
    assert (delta[:, :, :700] == (-3.0 if has_dlse else 0.0)).all()
    q_given, k_given, v_given, dout_given, *memory, counter, scale, first, ctas = given
    assert (q_given is q, k_given is k, v_given is v, dout_given is dout) == (True,) * 4
    key_sums, value_sums, places = memory[5:]
    known = (lse_log2, delta, sums, *gradients[1:], key_sums, value_sums, places)
    assert all(x is y for x, y in zip(memory, known, strict=True))
    shape = division.tiles, division.each, c.dq_parts, c.dk_words
    assert key_sums.shape == value_sums.shape == shape and key_sums is not value_sums
    assert key_sums.dtype == value_sums.dtype == torch.float32
    assert places.shape == (3 * division.tiles,) and places.dtype == torch.int32
    assert counter.shape == (SCHEDULER_WORDS,) and not counter.any()
    assert (scale, first, ctas) == (0.5, division.first, SMS)

    dq, dk, dv = gradients
    expected = sums, dq, key_sums, value_sums, places, dk, dv
    assert all(x is y for x, y in zip(behind[:7], expected, strict=True)) and behind[7:] == (0.5,)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_passes_that_are_made_again_get_what_the_first_got(
    causal: bool, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that is kept for a pass, and in such that is given to each."""
    seen: list[tuple[Any, ...]] = []
    pretend(monkeypatch, backward, forward)
    monkeypatch.setattr(compile_cache, "get_forward", lambda config: noting([]))
    monkeypatch.setattr(compile_cache, "get_backward", lambda config: noting(seen, config))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(device_memory, "made_of_memory", made_anew if is_kept else lambda *given: None)
    passes = []
    for _ in range(5):
        seen.clear()
        leaves = [torch.zeros(1, 1024, 4, 128, dtype=BF16, requires_grad=True) for _ in "qkv"]
        out = flash_attn_func(*leaves, softmax_scale=0.25, causal=causal)
        dout = torch.ones_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
        (prepare, *before), (config, *given), (finish, *behind) = seen
        of_work = "lse_log2", "delta", "sums", "dk", "dv", "key_sums", "value_sums", "places"
        left = dict(zip(of_work, given[4:12], strict=True))
        left = {name: x for name, x in left.items() if name not in ("dk", "dv")}
        names = named(leaves, grads, out=out, dout=dout, lse=before[2], **left)
        passes.append([described(x, names) for launch in (before, given, behind) for x in launch])
    assert passes[1:] == [passes[0]] * 4 and config.divides_visits and finish.config.divides_visits
    assert not prepare.config.name.endswith("clears")
    left_of_keys = ["key_sums", "value_sums", "places"]
    assert passes[0][10:18] == ["lse_log2", "delta", "sums", "dk", "dv", *left_of_keys]
    assert passes[0][-8:] == ["sums", "dq", *left_of_keys, "dk", "dv", 0.25]
    forget_launchers()


def test_who_is_found(kernel_calls: list[Any]) -> None:
    asked = problem(1, 3000, (7, 7), 128, False)
    found = found_for(asked)
    assert isinstance(found, PieceLauncher) and found.division == (132, 36, 3)
    assert found.config.name == "hopper_bwd_bf16_d128_full_m64n128s2_r240_24_pieces"
    assert found_for(asked, has_dlse=True).division == found.division
    # Another division has the same kernels and another launcher.
    other = found_for(problem(1, 1024, (8, 8), 128, False))
    assert other.division == (0, 64, 2) and other.config == found.config and other is not found
    assert type(found_for(problem(1, 2048, (16, 16), 128, False))) is BackwardLauncher
    assert type(found_for(problem(1, 2048, (28, 4), 128))) is DividedLauncher
    # What adds to sums by several launches asks for a kernel that divides nothing.
    options = asked.dtype, torch.device("cpu"), False, False, None, FULL_SIDES
    plain = backward.find_plain(asked.q_shape, asked.k_shape, asked.v_shape, *options)
    assert type(plain) is BackwardLauncher and not plain.config.divides_visits


# What is told, and compiled ahead


@pytest.mark.parametrize(("seqlen", "is_divided"), [(3000, True), (16384, False)])
def test_it_is_told(seqlen: int, is_divided: bool) -> None:
    q, k, v = (torch.empty(1, seqlen, 7, 128, dtype=BF16, device="meta", requires_grad=True) for _ in "qkv")
    note = explain(q, k, v, device_capability=(9, 0)).notes[-1]
    assert ("_pieces" in note) == is_divided and "hopper_bwd_bf16_d128" in note


def test_what_is_told_is_what_runs(kernel_calls: list[Any]) -> None:
    """Of calls of all sizes; with a gradient of the LSE a kernel of one tile does not serve."""
    drawn, names = random.Random(5), set()
    for _ in range(150):
        heads = drawn.choice(((8, 8), (3, 1), (32, 8), (5, 5), (16, 1)))
        sizes = (
            drawn.choice((1, 1, 2, 5)),
            int(2 ** drawn.uniform(5, 13)),
            heads,
            drawn.choice((64, 128, 256)),
        )
        asked = problem(*sizes, causal=drawn.random() < 0.5)
        q, k, v = (
            torch.empty(shape, dtype=BF16, device="meta", requires_grad=True)
            for shape in (asked.q_shape, asked.k_shape, asked.v_shape)
        )
        note = explain(q, k, v, causal=asked.causal, device_capability=(9, 0)).notes[-1]
        found = found_for(asked).config.name
        assert note.endswith(f" {found}") or f" {found}:" in note or f" {found}," in note, (note, found)
        names.add(found.partition("s2_r240_24")[2])
    assert {"", "_pieces", "_divided", "_tile", "_pair"} <= names


@pytest.mark.parametrize(
    ("heads", "head_dim", "causal", "count"),
    [((32, 8), 128, (False, True), 1), ((12, 12), 64, (False, True), 2), ((8, 8), 256, (False,), 0)],
)
def test_what_calls_of_a_model_ask_for_is_compiled_ahead(
    heads: tuple[int, int], head_dim: int, causal: tuple[bool, ...], count: int
) -> None:
    model = ModelShape(BF16, *heads, head_dim, head_dim, causal=causal)
    found = {config.name for config in kernels_of(model, "sm_90a", train=True) if "_pieces" in config.name}
    kernels = [select_backward_config("bfloat16", head_dim, head_dim, mask) for mask in causal[:count]]
    configs = [replace(config, divides_visits=True) for config in kernels]
    assert found == {each.name for c in configs for each in (c, BackwardStep("finish", c))}
    assert not any("_pieces" in config.name for config in kernels_of(model, "sm_90a", train=False))
