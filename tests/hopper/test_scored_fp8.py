"""FP8 kernels that cap scores or have sinks: what no kernel is built from, what is compiled, and what comes of it
without a GPU, against float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import DENSE, VARLEN
from cute_kernels.window import NO_LIMIT
from hopper.config import SMEM_BYTES, validate_forward_config
from hopper.forward.fp8.capped_tilings import (
    CAPPED_TILINGS,
    select_fp8_capped_config,
    shipped_fp8_capped_configs,
)
from hopper.forward.fp8.changes import NO_CHANGES, Changes
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.tilings import (
    select_fp8_few_queries_config,
    select_fp8_forward_config,
    with_lone_scales,
)
from hopper.forward.tilings import ANY_LENGTH, select_forward_config, with_group, with_parts
from hopper_attention.lengths import Lengths
from hopper_attention.masks import UNLIMITED
from hopper_attention.packed_quantization import from_packed_descales, transpose_packed
from hopper_attention.packed_quantized import PackedQuantizedQKV, PackedTransposedV
from hopper_attention.quantized import E4M3, QuantizedQKV
from hopper_attention.quantizers import from_descales
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.cute_kernels.packing import Packing
from tests.hopper.hopper_machine import AT_ONCE, Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.packed_fp8 import packed_fp8_forward_on_numpy, packed_fp8_parts_on_numpy
from tests.hopper.rules import Rules
from tests.hopper.split_on_numpy import fp8_parts_on_numpy, in_small_parts
from tests.hopper.test_fp8_packed import lengths_of
from tests.hopper.test_grouped import merged

LATE = Timing(is_late=True, seed=1)
SOFTCAP, SINKS, BOTH = Changes(softcap=True), Changes(sinks=True), Changes(softcap=True, sinks=True)
EVERYTHING = replace(BOTH, window=True)
ORDINARY = (0.5, -math.inf, 60.0, -3.0, 2.0)
"""Sinks of heads: of ordinary ones, none, and one that leaves keys next to nothing."""


@dataclass(frozen=True)
class Case:
    """What kernels are held to float64 on: ``heads`` of Q and of K and V, sides of a window, what is done to scores,
    and how much larger Q is than what is normally distributed. With ``longest_k`` the kernel is the one for so many
    keys."""

    head_dim: int
    v_rows: bool = False
    causal: bool = False
    seqlens: tuple[int, int] = (150, 330)
    heads: tuple[int, int] = (4, 2)
    sides: tuple[int, ...] = ()
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()
    peak: float = 1.0
    longest_k: int = 0

    @property
    def rules(self) -> Rules:
        heads = self.heads[0]
        sinks = torch.tensor(list(itertools.islice(itertools.cycle(self.sinks), heads)))
        return Rules(self.softcap, sinks=sinks if self.sinks else None)

    @property
    def changes(self) -> Changes:
        return Changes(bool(self.sides), len(self.sides) > 2, self.softcap > 0, bool(self.sinks))

    @property
    def options(self) -> dict[str, Any]:
        """Of ``attention_naive``."""
        left, right, chunk = (*self.sides, *((NO_LIMIT, NO_LIMIT, 0)[len(self.sides) :]))
        window_left, window_right = (UNLIMITED if side == NO_LIMIT else side for side in (left, right))
        named = {"window_left": window_left, "window_right": window_right, "attention_chunk": chunk}
        return named | {"causal": self.causal, "softcap": self.softcap, "sinks": self.rules.sinks}

    def config(self, layout: str = DENSE) -> Fp8ForwardConfig:
        dims, changes = (self.head_dim, self.head_dim), self.changes
        if self.softcap:
            return select_fp8_capped_config(dims, self.causal, "bfloat16", self.v_rows, changes, layout)
        return with_sinks(self.head_dim, self.causal, self.v_rows, changes, layout, self.longest_k)


def with_sinks(
    head_dim: int, causal: bool, v_rows: bool, changes: Changes, layout: str, longest_k: int
) -> Fp8ForwardConfig:
    """The config of codes of which nothing is promised, where nobody gets the LSE."""
    flags = {"v_rows": v_rows, "window": changes.window, "chunk": changes.chunk, "without_lse": True}
    sizes = head_dim, head_dim, causal, "bfloat16", longest_k
    found = select_fp8_forward_config(*sizes, layout=layout, **flags)
    return with_lone_scales(replace(found, sinks=changes.sinks))


def draw(case: Case, batch: int = 1) -> QuantizedQKV:
    generator, (rows, keys) = torch.Generator().manual_seed(0), case.seqlens
    heads, kv_heads = case.heads
    shapes = (rows, heads), (keys, kv_heads), (keys, kv_heads)
    codes = [torch.randn(batch, *shape, case.head_dim, generator=generator) for shape in shapes]
    descales = [torch.rand(batch, kv_heads, generator=generator) + 0.5 for _ in codes]
    codes[0] *= case.peak
    return from_descales(*(x.to(E4M3) for x in codes), *descales, torch.bfloat16)


def exact_of(case: Case, parts: QuantizedQKV, scale: float) -> tuple[Tensor, Tensor]:
    values = (x.dequantize(torch.float32) for x in (parts.q, parts.k, parts.v))
    return attention_naive(*values, softmax_scale=scale, **case.options)


def check(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    """Each head for itself: of some a sink leaves very little."""
    (out, lse), (exact_out, exact_lse) = found, exact
    seen, is_zero = exact_lse > -math.inf, (exact_out == 0).all(-1)
    assert torch.equal(lse > -math.inf, seen) and bool((out[is_zero] == 0).all())
    error, size = ((x.double().square().sum((0, 1, 3))).sqrt() for x in (out - exact_out, exact_out))
    assert bool((error <= 5e-2 * size).all()), (error / size).tolist()
    assert (lse.double() - exact_lse)[seen].abs().max() < 5e-2


WINDOW, CAUSAL_WINDOW, CHUNK = (70, 20), (70, NO_LIMIT), (NO_LIMIT, NO_LIMIT, 100)
DENSE_CASES = {
    "softcap": Case(128, softcap=15.0),
    "softcap, V in rows": Case(128, True, True, softcap=30.0),
    "softcap of peaky queries": Case(64, False, True, softcap=15.0, peak=6.0),
    "softcap of peaky queries, V in rows": Case(64, True, softcap=30.0, peak=6.0),
    "sinks": Case(128, sinks=ORDINARY, peak=6.0),
    "sinks, V in rows": Case(128, True, True, sinks=ORDINARY),
    "sinks, d64": Case(64, False, True, sinks=ORDINARY),
    "rows that see no key": Case(64, True, True, (150, 40), sinks=ORDINARY),
    "tiles that see no key": Case(128, False, True, (300, 20), sinks=(*ORDINARY[:3], -500.0)),
    "both": Case(128, False, True, softcap=15.0, sinks=ORDINARY, peak=6.0),
    "a window": Case(64, sides=WINDOW, softcap=15.0, sinks=ORDINARY),
    "a window, V in rows": Case(128, True, sides=WINDOW, softcap=30.0, sinks=ORDINARY, peak=6.0),
    "a causal window": Case(128, False, True, sides=CAUSAL_WINDOW, sinks=ORDINARY),
    "a window before all keys": Case(64, False, False, (300, 70), sides=(5, 0), sinks=(-500.0, 1.0)),
    "a chunk": Case(64, True, True, sides=CHUNK, softcap=15.0, sinks=ORDINARY),
    "d256": Case(256, False, True, (70, 150), (2, 1), softcap=30.0, sinks=(1.0, -math.inf)),
    "d256, V in rows": Case(256, True, False, (70, 150), (2, 1), (30, 40), 15.0, (1.0, 4.0), 6.0),
    "d80": Case(80, False, False, (70, 200), softcap=15.0, sinks=ORDINARY),
    "d192, V in rows": Case(192, True, True, (70, 150), (2, 2), softcap=30.0, sinks=ORDINARY),
    "scores in float16": Case(64, False, True, (150, 400), sinks=ORDINARY, longest_k=ANY_LENGTH),
    "peaky scores in float16": Case(128, False, sinks=ORDINARY, peak=6.0, longest_k=ANY_LENGTH),
    "scores in float16, V in rows": Case(128, True, True, sinks=ORDINARY, longest_k=ANY_LENGTH),
    "scores in float16 in a window": Case(64, sides=WINDOW, sinks=ORDINARY, longest_k=ANY_LENGTH),
    "scores in float16, d256": Case(
        256, False, True, (70, 150), (2, 1), sinks=(1.0, 4.0), longest_k=ANY_LENGTH
    ),
}


@pytest.mark.parametrize("case", DENSE_CASES.values(), ids=DENSE_CASES)
def test_numbers(case: Case) -> None:
    parts, scale = draw(case), case.head_dim**-0.5
    found = fp8_forward_on_numpy(case.config(), parts, scale, LATE, case.sides, rules=case.rules)
    check(found, exact_of(case, parts, scale))


def test_neither_the_order_of_warps_nor_a_second_launch_changes_a_bit() -> None:
    case = replace(DENSE_CASES["both"], seqlens=(70, 200), v_rows=True)
    parts, config = draw(case), case.config()
    timings = AT_ONCE, LATE, Timing(is_late=True, seed=7)
    first, *others = (fp8_forward_on_numpy(config, parts, 0.1, each, rules=case.rules) for each in timings)
    assert all(torch.equal(x, y) for found in others for x, y in zip(first, found, strict=True))
    check(first, exact_of(case, parts, 0.1))


def test_what_changes_nothing_gives_the_bits_of_others() -> None:
    """Sinks of -inf add 0, and bits of ``Softmax.EXACT`` and ``Softmax.EAGER`` are the same."""
    case = Case(64, True, True, (70, 200), sinks=(-math.inf,))
    parts, config = draw(case), case.config()
    found = fp8_forward_on_numpy(config, parts, 0.125, LATE, rules=case.rules)
    plain = fp8_forward_on_numpy(replace(config, sinks=False), parts, 0.125, LATE)
    other = fp8_forward_on_numpy(replace(config, softmax=Softmax.EXACT), parts, 0.125, LATE, rules=case.rules)
    for one in (plain, other):
        assert torch.equal(one[0], found[0]) and torch.allclose(one[1], found[1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("changes", [SOFTCAP, SINKS, BOTH], ids=["softcap", "sinks", "both"])
def test_nan_and_infinity(changes: Changes) -> None:
    """A NaN reaches the rows that see it, be there a sink or a cap; a negative scale of Q makes NaN of its head."""
    case = Case(64, False, True, (70, 150), (2, 2), softcap=9.0 * changes.softcap)
    case = replace(case, sinks=(50.0,) if changes.sinks else ())
    parts, config = draw(case), case.config()
    k = parts.k.data.clone()
    k[0, 100, 0, 3] = math.nan
    scale = parts.q.scale.clone()
    scale[:, 1] *= -1.0
    bad = replace(parts, k=replace(parts.k, data=k), q=replace(parts.q, scale=scale))
    out, _ = fp8_forward_on_numpy(config, bad, 0.125, LATE, rules=case.rules)
    assert bool(out[0, 20:, 0].isnan().all()) and bool(out[0, :20, 0].isfinite().all())
    assert bool(out[0, :, 1].isnan().all())


def test_a_descale_of_zero() -> None:
    """All scores are 0: each key has the same share."""
    case = Case(64, True, False, (20, 150), (2, 1), softcap=9.0, sinks=(1.0, -math.inf))
    parts = draw(case)
    parts = replace(parts, k=replace(parts.k, scale=torch.zeros_like(parts.k.scale)))
    found = fp8_forward_on_numpy(case.config(), parts, 0.125, LATE, rules=case.rules)
    check(found, exact_of(case, parts, 0.125))
    total = math.log(150 + math.e), math.log(150)
    assert torch.allclose(found[1][0], torch.tensor(total)[:, None], atol=1e-3)


LENGTHS = [(70, 200), (0, 40), (33, 0), (129, 131), (1, 1), (5, 330)]
TAIL = (37, 50)
PACKED_CASES = {
    "softcap": Case(128, causal=True, softcap=15.0, peak=6.0),
    "softcap, V in rows": Case(64, True, softcap=30.0),
    "sinks": Case(64, causal=True, sinks=ORDINARY),
    "sinks, V in rows": Case(128, True, True, sinks=ORDINARY, peak=6.0),
    "both and a window": Case(128, sides=WINDOW, softcap=15.0, sinks=ORDINARY),
    "both and a window, V in rows": Case(128, True, True, sides=CAUSAL_WINDOW, softcap=30.0, sinks=ORDINARY),
    "both and a chunk": Case(64, sides=CHUNK, softcap=15.0, sinks=ORDINARY, peak=6.0),
    "d256": Case(256, causal=True, softcap=30.0, sinks=ORDINARY, heads=(2, 1)),
    "d256 and a causal window": Case(256, True, True, (0, 0), (2, 1), (40, NO_LIMIT), 15.0, ORDINARY),
}


def draw_packed(case: Case, packing: Packing) -> PackedQuantizedQKV:
    """With NaN in rows of no sequence."""
    generator, (heads, kv_heads) = torch.Generator().manual_seed(0), case.heads
    rows = (packing.total_q, heads), (packing.total_k, kv_heads), (packing.total_k, kv_heads)
    codes = [torch.randn(*shape, case.head_dim, generator=generator) for shape in rows]
    codes[0] *= case.peak
    ends = packing.cu_seqlens_q[-1], packing.cu_seqlens_k[-1], packing.cu_seqlens_k[-1]
    for x, end in zip(codes, ends, strict=True):
        x[end:] = math.nan
    descales = tuple(torch.rand(packing.sequences - 1, kv_heads, generator=generator) + 0.5 for _ in codes)
    lengths: Lengths = lengths_of(packing)
    return from_packed_descales(*(x.to(E4M3) for x in codes), descales, lengths, torch.bfloat16)


def check_packed(case: Case, found: tuple[Tensor, Tensor], parts: PackedQuantizedQKV, scale: float) -> None:
    """Each sequence alone; one without keys has its sinks. Rows of none are 0, and the launcher sees to their LSE."""
    out, lse = found
    last, sinks = 0, case.rules.sinks
    empty = torch.full((case.heads[0],), -math.inf) if sinks is None else sinks
    for (rows, keys), one in parts.sequences():
        if rows.start == rows.stop:
            continue
        own, last = (out[None, rows.slice], lse[None, :, rows.slice]), rows.stop
        if keys.start < keys.stop:
            check(own, exact_of(case, one, scale))
            continue
        assert not own[0].any() and torch.allclose(own[1][0].float(), empty[:, None], rtol=1e-6)
    assert last < out.shape[0] and not out[last:].any()
    torch.testing.assert_close(lse[:, last:].float(), empty[:, None].expand_as(lse[:, last:]))


@pytest.mark.parametrize("case", PACKED_CASES.values(), ids=PACKED_CASES)
def test_packed_sequences(case: Case) -> None:
    packing, config, scale = Packing.of(LENGTHS, TAIL), case.config(VARLEN), case.head_dim**-0.5
    parts = draw_packed(case, packing)
    given = parts
    if not case.v_rows:
        data = transpose_packed(parts.v.data, parts.lengths)
        v = PackedTransposedV(data, parts.v.scale, parts.v.block, parts.k.shape[0])
        given = replace(parts, v=v)
    plan = packing.plan(config.tile_m)
    found = packed_fp8_forward_on_numpy(config, given, plan, scale, 2, LATE, case.sides, case.rules)
    check_packed(case, found, parts, scale)


def few_config(
    case: Case, group: int, rows: int, *, split: bool = False, layout: str = VARLEN
) -> Fp8ForwardConfig:
    """Of ``group`` heads in tiles of ``rows`` rows."""
    sizes = case.head_dim, case.head_dim, case.causal, "bfloat16", group, rows, split
    return select_fp8_few_queries_config(*sizes, layout, changes=case.changes)


FEW_LENGTHS = [(21, 200), (0, 40), (9, 0), (1, 1), (5, 330)]
FEW_CASES = {
    # Rows of a tile, and the case, whose heads are those of two K/V heads.
    "8 heads": (64, Case(128, causal=True, heads=(16, 2), sinks=ORDINARY)),
    "8 heads, all": (64, Case(64, heads=(16, 2), sides=WINDOW, softcap=15.0, sinks=ORDINARY, peak=6.0)),
    "5 heads": (64, Case(128, causal=True, heads=(10, 2), sinks=ORDINARY)),
    "5 heads, a window": (128, Case(128, heads=(10, 2), sides=(50, 3))),
    "7 heads, all": (
        192,
        Case(64, False, True, heads=(14, 2), sides=CAUSAL_WINDOW, softcap=30.0, sinks=ORDINARY),
    ),
    "12 heads, a chunk": (128, Case(128, heads=(24, 2), sides=CHUNK, sinks=ORDINARY)),
    "one head, all": (64, Case(128, heads=(2, 2), sides=WINDOW, softcap=30.0, sinks=ORDINARY)),
    "3 heads, a softcap": (64, Case(256, causal=True, heads=(6, 2), softcap=15.0, peak=6.0)),
    "4 heads, all": (128, Case(256, heads=(8, 2), sides=WINDOW, softcap=15.0, sinks=ORDINARY)),
}


@pytest.mark.parametrize(("rows", "case"), FEW_CASES.values(), ids=FEW_CASES)
def test_heads_in_a_tile_of_packed_sequences(rows: int, case: Case) -> None:
    packing, scale = Packing.of(FEW_LENGTHS, (7, 13)), case.head_dim**-0.5
    config = few_config(case, case.heads[0] // case.heads[1], rows)
    parts, plan = draw_packed(case, packing), packing.plan(config.tile_queries)
    found = packed_fp8_forward_on_numpy(config, parts, plan, scale, 3, LATE, case.sides, case.rules)
    check_packed(case, found, parts, scale)


@pytest.mark.parametrize(
    ("rows", "case"),
    [
        (64, Case(64, True, True, (21, 150), (16, 2), sinks=ORDINARY)),
        (64, Case(128, True, True, (40, 30), (10, 2), softcap=15.0, sinks=ORDINARY)),
        (192, Case(128, True, False, (50, 200), (6, 2), WINDOW, 15.0, ORDINARY, 6.0)),
    ],
    ids=["8 heads", "5 heads", "3 heads, all"],
)
def test_heads_in_a_tile(rows: int, case: Case) -> None:
    parts, config = draw(case, batch=2), few_config(case, case.heads[0] // case.heads[1], rows, layout=DENSE)
    found = fp8_forward_on_numpy(config, parts, 0.1, LATE, case.sides, rules=case.rules)
    check(found, exact_of(case, parts, 0.1))


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (Case(128, True, True, (21, 350), (16, 2), softcap=15.0, peak=6.0), 2),
        (Case(64, True, False, (9, 200), (10, 2), softcap=30.0), 5),
        (Case(128, True, True, (21, 350), (16, 2), sinks=ORDINARY), 3),
        (Case(128, True, True, (9, 520), (10, 2), sides=(300, 0)), 3),
        (Case(64, True, False, (21, 700), (4, 2), (450, 10), 30.0, ORDINARY, 6.0), 4),
        (Case(128, True, True, (30, 400), (4, 2), sides=CHUNK, sinks=ORDINARY), 2),
    ],
    ids=["8 heads", "5 heads, more parts than blocks", "sinks", "a window", "all", "a chunk"],
)
def test_changed_scores_in_parts(case: Case, splits: int) -> None:
    """Dense and packed."""
    group, parts = case.heads[0] // case.heads[1], draw(case, batch=2)
    config = few_config(case, group, 64, split=True, layout=DENSE)
    out, lse = merged(*fp8_parts_on_numpy(config, parts, 0.1, splits, 3, LATE, case.rules, case.sides))
    check((out, lse.transpose(1, 2)), exact_of(case, parts, 0.1))
    packing, config = Packing.of(FEW_LENGTHS, (7, 13)), few_config(case, group, 64, split=True)
    packed, in_parts = draw_packed(case, packing), in_small_parts(config, splits)
    plan = packing.plan(config.tile_queries, in_parts=in_parts)
    found = packed_fp8_parts_on_numpy(config, packed, plan, 0.1, splits, 3, LATE, case.rules, case.sides)
    out, lse = merged(*(x[:, 0] for x in found))
    check_packed(case, (out, lse.T), packed, 0.1)


def test_neither_the_grid_nor_the_order_of_warps_changes_a_bit() -> None:
    case = FEW_CASES["7 heads, all"][1]
    packing, config = Packing.of([(3, 250), (9, 60), (0, 7), (12, 190)], (4, 9)), few_config(case, 7, 64)
    parts, plan = draw_packed(case, packing), packing.plan(config.tile_queries)
    few, many = (
        packed_fp8_forward_on_numpy(config, parts, plan, 0.1, ctas, timing, case.sides, case.rules)
        for ctas, timing in ((1, Timing(is_late=True, seed=3)), (11, Timing()))
    )
    assert all(map(torch.equal, few, many)) and bool(few[0].isfinite().all())


# What kernels are built from


BUILT = Case(128, True, True).config()


@pytest.mark.parametrize("name", ["alibi", "dropout"])
def test_what_no_fp8_kernel_does(name: str) -> None:
    for config in (BUILT, replace(BUILT, v_rows=False), replace(BUILT, layout=VARLEN)):
        with pytest.raises(ValueError, match=rf"{name} is True, allowed for float8_e4m3fn: False"):
            validate_forward_config(replace(config, **{name: True}))


FEATURES = pytest.mark.parametrize("name", ["softcap", "sinks"])


@FEATURES
def test_what_takes_changed_scores(name: str) -> None:
    """Softmaxes that take the maximum of each block, with block scales too, and P V that is one sum."""
    for layout in (DENSE, VARLEN):
        for softmax in (Softmax.EXACT, Softmax.EAGER):
            config = replace(BUILT, softmax=softmax, layout=layout, **{name: True})
            validate_forward_config(config)
            validate_forward_config(replace(config, lone_scales=False))
            validate_forward_config(replace(config, window=True))
            assert not config.is_plain and name in config.name


@FEATURES
@pytest.mark.parametrize("kind", ["lagging", "half", "two levels", "wide codes"])
def test_what_refuses_changed_scores(name: str, kind: str) -> None:
    select = partial(select_fp8_forward_config, 128, 128, True, "bfloat16", 9000, 384)
    config = {
        "lagging": lambda: select(),
        "half": lambda: select(half_scores=True),
        "two levels": lambda: select(two_level=True),
        "wide codes": lambda: select(exact_lse=True),
    }[kind]()
    assert not config.takes_maxima
    is_stale = kind in ("lagging", "half")
    assert config.softmax.value == kind if is_stale else config.two_level
    assert config.wide_codes == (kind == "wide codes")
    validate_forward_config(config)
    changed = replace(config, **{name: True})
    if name == "sinks" and is_stale:
        validate_forward_config(changed)
        return
    reason = (
        "where a block does not take its maximum" if name == "softcap" else "with two_level and wide_codes"
    )
    with pytest.raises(ValueError, match=rf"{name} is True, allowed .*{reason}"):
        validate_forward_config(changed)


def test_parts_have_windows_and_sinks_in_e4m3_alone() -> None:
    for name in ("sinks", "window"):
        for softcap in (0.0, 15.0):
            of_name = {"sinks": ORDINARY} if name == "sinks" else {"sides": WINDOW}
            config = few_config(Case(128, True, True, softcap=softcap, **of_name), 4, 64, split=True)
            assert config.split and getattr(config, name) and config.softcap == (softcap > 0)
    plain = with_parts(select_forward_config("bfloat16", 128, 128, True, 1024), 4, 64)
    validate_forward_config(plain)
    for name in ("sinks", "window"):
        with pytest.raises(ValueError, match=r"split (is )?True, allowed"):
            validate_forward_config(replace(plain, **{name: True}))


def test_groups_have_sinks_in_e4m3_alone() -> None:
    for group in (1, 4, 5, 64):
        config = few_config(Case(128, True, True, sides=WINDOW, softcap=15.0, sinks=ORDINARY), group, 64)
        assert (config.group, config.sinks, config.softcap, config.window) == (group, True, True, True)
    plain = select_forward_config("bfloat16", 128, 128, True, 1024)
    validate_forward_config(replace(plain, sinks=True))
    validate_forward_config(with_group(plain, 4))
    with pytest.raises(ValueError, match=r"group is 4 and split False, allowed"):
        validate_forward_config(replace(with_group(plain, 4), sinks=True))


def test_what_is_selected() -> None:
    """Tiles in which each block takes its maximum under a softcap, for rows of any size; selecting validates. Sinks
    leave the tiles as they are."""
    for case in itertools.product((16, 80, 112, 192, 256), (64, 256), (False, True), (False, True)):
        head_dim, head_dim_v, causal, v_rows = case
        for layout, changes in itertools.product((DENSE, VARLEN), (SOFTCAP, EVERYTHING)):
            dims = head_dim, head_dim_v
            config = select_fp8_capped_config(dims, causal, "bfloat16", v_rows, changes, layout)
            assert config.takes_maxima and config.lone_scales and config.v_rows == v_rows
            assert (config.layout, config.causal, config.softcap) == (layout, causal, True)
            assert (config.sinks, config.window) == (changes.sinks, changes.window)
            assert config.head_dim >= head_dim and config.head_dim_v >= head_dim_v
    with pytest.raises(ValueError, match="head_dim 272 and head_dim_v 64: both may be at most 256"):
        select_fp8_capped_config((272, 64), False, "bfloat16", False, SOFTCAP)
    assert NO_CHANGES.of(BUILT) == BUILT
    softmaxes = [case.config().softmax for name, case in DENSE_CASES.items() if "float16" in name]
    assert len(softmaxes) == 5 and set(softmaxes) == {Softmax.HALF_SCORES}
    few, many = (
        select_fp8_capped_config((64, 64), True, "bfloat16", False, SOFTCAP, few_tiles=few)
        for few in (True, False)
    )
    assert (few.tile_m, many.tile_m) == (128, 192)


def compiled() -> dict[str, list[Fp8ForwardConfig]]:
    """What ships on dense tensors; a few of packed ones, with all at once; of several heads a tile; and with sinks
    where scores are in float16."""
    of_packed = [
        select_fp8_capped_config((head_dim, head_dim), causal, "bfloat16", v_rows, EVERYTHING, VARLEN)
        for head_dim, causal, v_rows in (
            (64, False, False),
            (128, True, True),
            (256, True, False),
            (256, False, True),
        )
    ]
    chunks = replace(EVERYTHING, chunk=True)
    of_packed += [select_fp8_capped_config((256, 256), False, "bfloat16", False, chunks, VARLEN)]
    of_heads = [
        few_config(
            Case(head_dim, True, causal, sides=sides, softcap=softcap, sinks=sinks), group, rows, split=split
        )
        for head_dim, causal, sides, softcap, sinks, group, rows, split in (
            (64, True, WINDOW, 15.0, ORDINARY, 5, 192, False),
            (128, False, (), 0.0, ORDINARY, 8, 64, False),
            (128, True, WINDOW, 15.0, ORDINARY, 1, 128, False),
            (256, True, WINDOW, 15.0, ORDINARY, 5, 128, False),
            (128, True, (), 15.0, (), 8, 192, True),
            (256, False, (), 15.0, (), 1, 128, True),
            (128, True, WINDOW, 15.0, ORDINARY, 8, 192, True),
            (256, True, WINDOW, 0.0, ORDINARY, 1, 128, True),
        )
    ]
    of_sinks = [
        with_sinks(head_dim, causal, v_rows, Changes(window, sinks=True), layout, ANY_LENGTH)
        for head_dim, causal, v_rows, window, layout in (
            (64, True, False, False, DENSE),
            (64, True, False, True, VARLEN),
            (128, False, False, False, DENSE),
            (128, True, True, False, VARLEN),
            (256, True, False, True, DENSE),
            (256, False, True, False, DENSE),
            (256, True, False, False, VARLEN),
        )
    ]
    # Whose producers have the fewest registers.
    of_sinks += [with_sinks(256, causal, True, Changes(sinks=True), DENSE, 512) for causal in (False, True)]
    of_dense = list(shipped_fp8_capped_configs())
    return {"dense": of_dense, "packed": of_packed, "heads": of_heads, "sinks": of_sinks}


COMPILED = compiled()
OF_ALL_KINDS = [config for configs in COMPILED.values() for config in configs]


@pytest.mark.parametrize("kind", COMPILED)
def test_no_register_is_spilled(kind: str) -> None:
    usages = usage_of_each(COMPILED[kind])
    assert {c.name: usage for c, usage in usages.items() if usage.spills or usage.stack_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values())
    assert len(usages) == {"dense": len(CAPPED_TILINGS) * 4, "packed": 5, "heads": 8, "sinks": 9}[kind]
