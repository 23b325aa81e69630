"""Into how many parts query heads that share a head of K and V are divided, and what reaches the kernels that divide
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import SCHEDULER_WORDS, BackwardStep
from hopper.backward.config import can_walk_back
from hopper_attention import compile_cache, explain
from hopper_attention.backends import HOPPER_CAPABILITY
from hopper_attention.backward_rules import (
    BackwardProblem,
    in_faster_order,
    keys_within,
    packed_in_faster_order,
    select_config,
    select_for,
    walk_back,
)
from hopper_attention.head_parts import (
    MOST_COUNTED,
    KeyTiles,
    PackedSizes,
    packed_with_head_parts,
    with_head_parts,
)
from hopper_attention.launch import backward
from hopper_attention.launch.gradient_launchers import BackwardLauncher, DividedLauncher, StripLauncher
from hopper_attention.launch.gradients import differentiate
from hopper_attention.masks import FULL_SIDES, MaskSpec, Sides
from hopper_attention.model_kernels import ModelShape, kernels_of
from hopper_attention.problem import GradientProblem
from hopper_attention.scores import NO_SCORES, ScoreKind
from tests.python.fake_gpu import SMS, forget_launchers, pretend

BF16 = torch.bfloat16

# The rule


def problem(
    batch: int,
    seqlens: int | tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    causal: bool = True,
    dtype: torch.dtype = BF16,
    **features: Any,
) -> BackwardProblem:
    seqlen_q, seqlen_k = (seqlens, seqlens) if isinstance(seqlens, int) else seqlens
    q_shape = batch, seqlen_q, heads[0], head_dim
    k_shape = batch, seqlen_k, heads[1], head_dim
    return BackwardProblem(q_shape, k_shape, k_shape, dtype, causal, **features)


def parts_of(asked: BackwardProblem, sides: Sides = FULL_SIDES) -> int:
    return with_head_parts(asked, sides).head_parts


@pytest.mark.parametrize(
    "asked,parts",
    [
        (problem(1, 2048, (32, 8), 128), 2),
        (problem(1, 2048, (32, 8), 128, causal=False), 1),
        (problem(2, 2048, (32, 8), 128), 1),
        # Of which the last ones end unevenly.
        (problem(1, 5318, (64, 8), 128), 4),
        (problem(1, 6249, (24, 8), 128), 1),
        (problem(1, 6848, (16, 1), 128), 16),
        (problem(3, 2304, (28, 4), 128), 3),
        (problem(2, 2048, (71, 1), 64), 15),
        (problem(4, 1024, (28, 4), 128), 2),
        (problem(4, 4096, (32, 8), 128), 1),
        (problem(1, 2048, (28, 4), 128), 4),
        (problem(1, 2048, (28, 4), 128, causal=False, dtype=torch.float16), 7),
        (problem(1, 2289, (8, 1), 64), 8),
        (problem(1, 512, (32, 8), 128, causal=False), 4),
        (problem(1, 16384, (32, 8), 128, causal=False), 1),
        (problem(1, 300, (3, 1), 64), 3),
        # Half as many pairs of CTAs are under way.
        (problem(1, 1000, (8, 1), 256), 8),
        (problem(1, 2048, (16, 4), 256, causal=False), 1),
        # Few queries on many keys, and the reverse.
        (problem(1, (200, 4096), (32, 8), 128), 1),
        (problem(1, (4096, 200), (32, 8), 128, causal=False), 4),
        # Head_dims that have no kernel of their own.
        (problem(1, 2048, (28, 4), 72), 4),
        (problem(1, 2048, (28, 4), 200), 7),
    ],
)
def test_how_many_parts(asked: BackwardProblem, parts: int) -> None:
    found = with_head_parts(asked, FULL_SIDES)
    assert found == asked._replace(head_parts=parts) and found.kind.divides_heads == (parts > 1)
    config = select_config(asked, "hopper", HOPPER_CAPABILITY)
    expected = replace(config, divides_heads=parts > 1, walks_back=walk_back(found) and can_walk_back(config))
    assert select_config(found, "hopper", HOPPER_CAPABILITY) == expected


@pytest.mark.parametrize(
    ("heads", "head_parts", "changed", "walks"),
    [
        ((32, 8), 1, {}, True),
        ((28, 4), 1, {"head_dim": 64}, True),
        ((12, 1), 1, {"head_dim": 72, "dtype": torch.float16}, True),
        ((12, 1), 3, {}, True),
        # Fewer than four heads of Q in a CTA.
        ((32, 32), 1, {}, False),
        ((24, 8), 1, {}, False),
        ((12, 1), 4, {}, False),
        # What the kernel has not.
        ((32, 8), 1, {"causal": False}, False),
        ((32, 8), 1, {"deterministic": True}, False),
        ((32, 8), 1, {"has_window": True}, False),
        ((32, 8), 1, {"has_window": True, "has_chunk": True}, False),
        ((32, 8), 1, {"scores": ScoreKind(has_softcap=True)}, False),
        ((32, 8), 1, {"scores": ScoreKind(has_sinks=True)}, False),
        ((32, 8), 1, {"head_dim": 136}, False),
        ((32, 8), 1, {"one_tile": True, "seqlens": 128}, False),
    ],
)
def test_many_heads_that_share_keys_are_walked_over_together(
    heads: tuple[int, int], head_parts: int, changed: dict[str, Any], walks: bool
) -> None:
    options = {"batch": 2, "seqlens": 2048, "head_dim": 128} | changed
    asked = problem(heads=heads, **options)._replace(head_parts=head_parts)
    config = select_config(asked, "hopper", HOPPER_CAPABILITY)
    assert config.walks_back == walks and config.divides_heads == (head_parts > 1)
    packed = select_for(replace(asked.kind, is_packed=True), "hopper", HOPPER_CAPABILITY)
    assert not packed.walks_back


@pytest.mark.parametrize(
    "changed",
    [
        {"heads": (28, 28)},
        {"dtype": torch.float32},
        {"head_dim": 264},
        {"scores": ScoreKind(has_softcap=True)},
        {"scores": ScoreKind(has_alibi=True)},
        {"scores": ScoreKind(has_dropout=True)},
        {"one_tile": True, "seqlens": 128},
        {"heads": (65534, 1), "seqlens": 16},
    ],
)
def test_what_is_not_divided(changed: dict[str, Any]) -> None:
    options = {"batch": 1, "seqlens": 2048, "heads": (28, 4), "head_dim": 128} | changed
    asked = problem(**options)
    assert with_head_parts(asked, FULL_SIDES) == asked


@pytest.mark.parametrize(
    "sides,parts",
    [((1023, 0, 0), 7), ((255, 0, 0), 1), ((-1, 63, 0), 7), ((-1, -1, 512), 1), ((200, -1, 0), 7)],
)
def test_windows_and_chunks(sides: Sides, parts: int) -> None:
    """Narrow windows have too few rows of queries for what a part takes; with a chunk some kernels would spill."""
    asked = problem(1, 2048, (28, 4), 128, False, has_window=True, has_chunk=sides[2] > 0)
    assert parts_of(asked, sides) == parts
    config = select_config(with_head_parts(asked, sides), "hopper", HOPPER_CAPABILITY)
    assert (config.window, config.chunk, config.divides_heads) == (True, sides[2] > 0, parts > 1)


def test_tiles_that_wait_for_each_other_are_divided_sooner() -> None:
    """Where dQ is summed in a fixed order."""
    found = {
        asked.q_shape[:2]: [parts_of(asked._replace(deterministic=x)) for x in (False, True)]
        for asked in (problem(1, 2048, (32, 8), 128), problem(2, 2048, (32, 8), 128))
    }
    assert all(plain <= in_order for plain, in_order in found.values())
    assert any(plain < in_order for plain, in_order in found.values())


def packed_parts(
    lengths: list[int],
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    bounds: tuple[int, int] | None = None,
    **changed: Any,
) -> int:
    bounds = bounds or (max(lengths), max(lengths))
    dtype = changed.pop("dtype", BF16)
    given = {"causal": True, "is_packed": True, "keys": keys_within(bounds[1], False)} | changed
    asked = GradientProblem(dtype, dtype, head_dim, head_dim, **given)
    shapes = ((sum(lengths), of, head_dim) for of in heads)
    found, parts = packed_with_head_parts(asked, PackedSizes(*shapes, len(lengths), bounds), FULL_SIDES)
    assert found == replace(asked, divides_heads=parts > 1)
    return parts


def test_packed_sequences() -> None:
    assert packed_parts([2289], (8, 1), 64) == packed_parts([300, 1000, 989], (8, 1), 64) == 8
    # Many equal ones have enough tiles.
    assert packed_parts([256] * 8) == packed_parts([16384], causal=False) == 1
    # A bound that is no length may be that of one among short ones.
    assert packed_parts([256] * 8, bounds=(2048, 2048)) > 1 and packed_parts([1500, 500, 48]) > 1
    assert packed_parts([256] * 8, bounds=(8192, 8192)) == packed_parts([256] * 8, bounds=(2048, 2048))
    # A single one is divided as a dense one is.
    for length, heads in (
        (2048, (32, 8)),
        (10125, (32, 8)),
        (6072, (24, 8)),
        (15508, (56, 8)),
        (700, (28, 4)),
    ):
        assert packed_parts([length], heads) == parts_of(problem(1, length, heads, 128))


def test_packed_sequences_without_a_mask() -> None:
    """Of equal ones tiles come in rounds: 112 of eight heads leave 20 multiprocessors idle, 896 of one head fill seven
    rounds."""
    assert (
        packed_parts([3465] * 2, (16, 2), causal=False)
        == packed_parts([1886, 786], (16, 2), causal=False)
        == 8
    )
    assert packed_parts([1024] * 16, causal=False) == 1 == packed_parts([1024, 900, 30] * 16, causal=False)
    # The last sequence may not fill its room, and is counted as if it did.
    assert packed_parts([3465, 3400], (16, 2), causal=False) == 8


@pytest.mark.parametrize(
    ("heads", "lengths"), [((28, 4), [512] * 40), ((32, 8), [4096] * 4), ((8, 1), [1024] * 4)], ids=str
)
def test_room_for_more_sequences_than_there_are(heads: tuple[int, int], lengths: list[int]) -> None:
    """As graphs have: those that are empty change nothing here."""
    found = {packed_parts(lengths + [0] * room, heads) for room in (0, 8, 56, 120)}
    assert len(found) == 1 and found <= {1, 8}


def test_packed_sequences_of_which_one_is_long() -> None:
    """It is waited for, unless heads are divided; a bound alone is no such sequence."""
    lengths = [4104] + [256] * 26
    assert packed_parts(lengths, (28, 4)) == packed_parts(lengths, (28, 4), 64) == 2
    # Three heads of many long ones have tiles enough, and wait for the longest of 12.
    assert packed_parts([12000] + [4475] * 11, (3, 1), 64) == 3
    assert packed_parts([4475] * 12, (3, 1), 64) == 1
    # Of equal ones a bound that is none of their lengths does not change the number soon.
    bounds = 512, 900, 8192, 20480
    assert {packed_parts([512] * 40, (28, 4), bounds=(bound, bound)) for bound in bounds} == {1}
    # What is long is most of the work here.
    assert packed_parts([8192] + [512] * 26, (28, 4)) == 1


def test_packed_sequences_that_are_not_divided() -> None:
    lengths = [700, 300]
    assert packed_parts(lengths, (28, 4)) > 1
    assert packed_parts(lengths, (28, 28)) == packed_parts(lengths, (28, 4), 264) == 1
    assert packed_parts(lengths, (28, 4), dtype=torch.float32) == 1
    assert packed_parts(lengths, (28, 4), scores=ScoreKind(has_softcap=True)) == 1
    assert packed_parts(lengths, (28, 4), keys="few") == 1
    # There may be no tokens at all, and no sequence.
    empty = ([0, 0], []), (False, True)
    assert {packed_parts(x, (28, 4), bounds=(900, 900), causal=causal) for x, causal in product(*empty)} == {
        1
    }


def test_nothing_is_divided_where_there_is_nothing() -> None:
    assert parts_of(problem(0, 1000, (8, 2), 64)) == parts_of(problem(1, (1000, 0), (8, 2), 64)) == 1


def test_parts_of_very_many_heads() -> None:
    """No more than there are multiprocessors, and as many as are told apart exactly."""
    assert parts_of(problem(1, 600, (4096, 1), 64)) <= 132
    tiles = KeyTiles(1, 2**20, 64)
    assert tiles.most_parts == 3 and tiles.kv_heads * tiles.shared * 4**2 > MOST_COUNTED
    assert KeyTiles(1, 1, 71).most_parts == 71 and KeyTiles(1, 2**30, 2).most_parts == 1


# What is launched


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


def tensors(
    seqlens: tuple[int, int] = (200, 300), heads: tuple[int, int] = (8, 1), head_dim: int = 64
) -> tuple[Tensor, ...]:
    """q, k, v and the LSE."""
    q, k, v = (torch.zeros(2, seqlens[i > 0], heads[i > 0], head_dim, dtype=BF16) for i in range(3))
    return q, k, v, torch.zeros(2, heads[0], seqlens[0])


def found_for(asked: BackwardProblem, sides: Sides = FULL_SIDES, has_dlse: bool = False) -> Any:
    options = asked.dtype, torch.device("cpu"), asked.causal, asked.deterministic, None, sides, has_dlse
    return backward.find_for_call(asked.q_shape, asked.k_shape, asked.v_shape, *options)


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize(
    "head_dim,causal,deterministic", [(64, True, False), (128, False, True), (192, True, True)]
)
def test_three_launches(
    kernel_calls: list[Any], head_dim: int, causal: bool, deterministic: bool, has_dlse: bool
) -> None:
    q, k, v, lse = tensors(head_dim=head_dim)
    out, dout, dlse = torch.ones_like(q), torch.ones_like(q), torch.full_like(lse, 3.0)
    options = 0.5, MaskSpec(causal), NO_SCORES, None, deterministic
    gradients = differentiate(dout, dlse if has_dlse else None, q, k, v, out, lse, *options)
    parts = parts_of(problem(2, (200, 300), (8, 1), head_dim, causal, deterministic=deterministic))
    (prepare, before), (config, given), (finish, behind) = kernel_calls
    c = config
    assert parts > 1 and c.divides_heads and (c.causal, c.ordered) == (causal, deterministic)
    assert (prepare, finish) == (BackwardStep("prepare", c), BackwardStep("finish", c))

    tiles_q, tiles_k = -(-200 // c.tile_m), -(-300 // c.tile_n)
    lse_log2, delta, sums = before[3:]
    assert before[0] is out and before[1] is dout and before[2].data_ptr() == lse.data_ptr()
    assert lse_log2.shape == delta.shape == (2, 8, tiles_q * c.tile_m)
    assert sums.shape == (2, 8, tiles_q, c.dq_parts, c.dq_words)
    assert (delta[:, :, :200] == (-3.0 if has_dlse else 0.0)).all() and not delta[:, :, 200:].any()

    q_given, k_given, v_given, dout_given, *memory, counter, scale = given[:11]
    assert (q_given is q, k_given is k, v_given is v, dout_given is dout) == (True,) * 4
    assert all(x is y for x, y in zip(memory[:3], (lse_log2, delta, sums), strict=True))
    shape = 2, parts, tiles_k, c.dq_parts, c.dk_words
    key_sums, value_sums = memory[3:]
    assert key_sums.shape == value_sums.shape == shape
    assert key_sums.dtype == value_sums.dtype == torch.float32 and key_sums is not value_sums
    counts = 2 * 8 * tiles_q * c.counts_per_tile if deterministic else 0
    assert counter.shape == (SCHEDULER_WORDS + counts,) and not counter.any()
    assert (scale, given[11:]) == (0.5, (SMS,) if c.is_persistent else ())

    assert behind[0] is sums and behind[2] is key_sums and behind[3] is value_sums and behind[6] == 0.5
    assert all(x is y for x, y in zip((behind[1], *behind[4:6]), gradients, strict=True))
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_who_is_found(kernel_calls: list[Any]) -> None:
    asked = problem(1, 2048, (28, 4), 128)
    found = found_for(asked)
    assert isinstance(found, DividedLauncher) and found.head_parts == 4
    assert found.config.name == "hopper_bwd_bf16_d128_causal_m64n128s2_r240_24_divided"
    assert found_for(asked, has_dlse=True).head_parts == 4
    # Another number of parts has the same kernels and another launcher.
    other = found_for(problem(1, 2048, (32, 8), 128))
    assert other.head_parts == 2 and other.config == found.config and other is not found
    whole = found_for(problem(2, 2048, (32, 8), 128))
    assert isinstance(whole, BackwardLauncher) and not isinstance(whole, DividedLauncher)
    # Narrow windows have strips where each head has K and V of its own, and parts where not.
    window = problem(1, 2048, (28, 4), 128, has_window=True)
    assert found_for(window, (1023, 0, 0)).config.name.endswith("_window_divided")
    alone = problem(1, 2048, (28, 28), 128, has_window=True)
    assert isinstance(found_for(alone, (100, 0, 0)), StripLauncher)


def test_sums_of_dq_are_asked_of_a_kernel_that_divides_none(kernel_calls: list[Any]) -> None:
    """What adds to sums by several launches, as distributed calls do, and what changes scores."""
    asked = problem(1, 2048, (28, 4), 128)
    options = asked.dtype, torch.device("cpu"), True, False, None, FULL_SIDES
    plain = backward.find_plain(asked.q_shape, asked.k_shape, asked.v_shape, *options)
    assert type(plain) is BackwardLauncher and not plain.config.divides_heads
    assert not plain.adding.config.divides_heads
    q, k, v, lse = tensors()
    softcap = replace(NO_SCORES, softcap=2.0)
    differentiate(q, None, q, k, v, q, lse, 0.5, MaskSpec(True), softcap, None, False)
    assert all("divided" not in config.name for config, _ in kernel_calls) and len(kernel_calls) == 3


def test_other_gpus_divide_none(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = with_head_parts(problem(1, 2048, (28, 4), 128), FULL_SIDES).kind
    assert kind.divides_heads
    for capability in ((8, 0), (9, 0)):
        assert not select_for(kind, "ampere", capability).divides_heads


# What is told, and compiled ahead


@pytest.mark.parametrize("heads,is_divided", [((28, 4), True), ((28, 28), False)])
def test_it_is_told(heads: tuple[int, int], is_divided: bool) -> None:
    q, k, v = (
        torch.empty(1, 1024, n, 128, dtype=BF16, device="meta", requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    )
    note = explain(q, k, v, causal=True, device_capability=(9, 0)).notes[-1]
    assert ("_divided" in note) == is_divided and "hopper_bwd_bf16_d128" in note
    assert "divided" not in " ".join(explain(q, k, v, causal=True, device_capability=(8, 0)).notes)


MODELS = (
    ModelShape(BF16, 32, 8, 128, 128),
    ModelShape(BF16, 28, 4, 128, 128, causal=(False, True)),
    ModelShape(torch.float16, 64, 1, 128, 128),
    ModelShape(BF16, 48, 24, 64, 64, causal=(False, True)),
    ModelShape(BF16, 32, 8, 64, 64),
    ModelShape(torch.float16, 71, 1, 64, 64),
    ModelShape(BF16, 16, 2, 256, 256),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.heads} over {model.kv_heads}")
def test_what_calls_of_a_model_ask_for_is_compiled_ahead(model: ModelShape) -> None:
    """Of any length, dense and packed, with the order of sums that serves without being asked for."""
    ahead, asked = {c.name for c in kernels_of(model, "sm_90a", train=True)}, set()
    heads = model.heads, model.kv_heads
    for batch in (1, 2, 8, 32):
        for seqlen in (140, 384, 1000, 2048, 8192):
            for causal in model.causal:
                dense = problem(batch, seqlen, heads, model.head_dim, causal, model.dtype)
                asked.add(with_head_parts(in_faster_order(dense), FULL_SIDES).kind)
                for longest in (seqlen, 2 * seqlen):
                    keys = keys_within(longest, False)
                    packed = replace(dense.kind, is_packed=True, keys=keys)
                    shapes = ((batch * seqlen, of, model.head_dim) for of in heads)
                    sizes = PackedSizes(*shapes, batch, (longest, longest))
                    elements = batch * seqlen * heads[0] * model.head_dim
                    packed = packed_in_faster_order(packed, elements, sizes.bounds)
                    asked.add(packed_with_head_parts(packed, sizes, FULL_SIDES)[0])
    found = (select_for(kind, "hopper", HOPPER_CAPABILITY) for kind in asked)
    configs = [config for config in found if config.divides_heads or config.walks_back or config.ordered]
    steps = [BackwardStep(step, config) for config in configs for step in ("prepare", "finish")]
    assert configs and {c.name for c in (*configs, *steps)} <= ahead


def test_models_whose_heads_share_nothing_have_none() -> None:
    for heads, arch, train in (
        ((32, 32), "sm_90a", True),
        ((32, 8), "sm_80", True),
        ((32, 8), "sm_90a", False),
    ):
        found = kernels_of(ModelShape(BF16, *heads, 128, 128), arch, train=train)
        assert not any("_divided" in config.name for config in found)
