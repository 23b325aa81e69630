"""The backward kernels that divide the query heads of a head of K and V, run from their PTX without a GPU, against
float64, and against the kernels that do not."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from cute_kernels.window import NO_LIMIT
from hopper.backward.config import (
    NATIVE_HEAD_DIMS,
    BackwardConfig,
    PairedBackwardConfig,
    select_backward_config,
    validate_backward_config,
)
from hopper.backward.parts import UnequalParts, head_of_part, reciprocal_of
from hopper.backward.written_configs import select_one_tile_config, select_strip_config
from hopper.config import SMEM_BYTES
from hopper_attention.head_parts import MOST_COUNTED
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import AT_ONCE
from tests.hopper.on_numpy import backward_on_numpy
from tests.hopper.packed_backward import packed_backward_on_numpy
from tests.hopper.test_backward_packed import ONE, UNEVEN, UNSEEN, USED
from tests.hopper.test_backward_packed import check as check_packed
from tests.hopper.test_backward_packed import draw as draw_packed
from tests.hopper.test_backward_windows import DTYPES, EPSILON, LATE, attend, draw, visible
from tests.hopper.wgmma_hazards import find_hazards
from tests.plans import Packed
from tests.ptx import ptx_of

EVERYTHING = 10**6
"""Keys on a side of a window that hides none."""


def dividing(config: BackwardConfig) -> BackwardConfig:
    return replace(config, divides_heads=True)


def compiled() -> tuple[BackwardConfig | BackwardStep, ...]:
    """Of every head_dim, mask and order, dense and packed; in bfloat16, and the tightest in float16, too."""
    found: list[BackwardConfig] = []
    for size, causal, ordered, window in product(NATIVE_HEAD_DIMS, *[(False, True)] * 3):
        for layout in ("dense", "varlen"):
            options = {"window": window, "layout": layout}
            config = select_backward_config("bfloat16", size, size, causal, ordered, **options)
            found += [config] if not config.clears_ahead else [config, replace(config, clears_ahead=False)]
    for size, ordered in ((64, False), (128, True), (256, True)):
        found.append(select_backward_config("float16", size, size, ordered, ordered, layout="varlen"))
    divided = [dividing(config) for config in found]
    finish = {step.name: step for step in (BackwardStep("finish", config) for config in divided)}
    return *divided, *finish.values()


COMPILED = compiled()


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.local_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 97
    # Those of a CTA of 1024 threads.
    assert all(usage.registers <= 64 for c, usage in usages.items() if isinstance(c, BackwardStep))


class Case:
    """Inputs, and what a kernel between `prepare` and `finish` makes of them."""

    def __init__(self, dtype, seqlens, heads, head_dim, batch, causal, sides=(), dlse=None) -> None:
        self.dtype, self.sides, self.dlse = DTYPES[dtype], sides, dlse
        self.inputs = tuple(draw(self.dtype, seqlens, heads, head_dim, batch))
        leaves = [x.double().requires_grad_() for x in self.inputs[1:]]
        left, right = sides or (EVERYTHING, EVERYTHING)
        out, lse = attend(*leaves, visible(*seqlens, left, 0 if causal else right))
        given = (out,) if dlse is None else (out, lse.masked_fill(lse == -math.inf, 0.0))
        of_outputs = self.inputs[:1] if dlse is None else (self.inputs[0], dlse)
        self.exact = torch.autograd.grad(given, leaves, [x.double() for x in of_outputs])
        self.rows = out.detach().to(self.dtype), lse.detach().float()

    def run(self, config: BackwardConfig, parts: int = 1, timing=LATE) -> tuple[Tensor, ...]:
        scale = self.inputs[1].shape[3] ** -0.5
        options = {"dlse": self.dlse, "sides": self.sides, "head_parts": parts}
        return backward_on_numpy(config, self.inputs, *self.rows, scale, timing, **options)

    def check(self, ours: tuple[Tensor, ...]) -> None:
        for name, a, e in zip(("dq", "dk", "dv"), ours, self.exact, strict=True):
            error = (a.double() - e).norm().item()
            assert error <= EPSILON[self.dtype] * e.norm().item() + 2e-7 * a.numel() ** 0.5, name


@pytest.mark.parametrize(
    "dtype,head_dim,causal,seqlens,heads,parts,batch,ordered",
    [
        ("bfloat16", 64, False, (200, 150), (4, 1), 2, 2, False),
        ("float16", 64, True, (131, 259), (6, 1), 3, 1, True),
        ("bfloat16", 96, True, (150, 77), (4, 2), 2, 1, False),
        ("float16", 96, False, (65, 129), (8, 2), 2, 1, True),
        ("float16", 128, True, (129, 257), (4, 2), 2, 1, False),
        ("bfloat16", 128, False, (70, 130), (8, 1), 4, 1, False),
        ("bfloat16", 128, True, (201, 131), (4, 1), 2, 2, True),
        ("bfloat16", 104, False, (33, 140), (8, 1), 8, 1, True),
        ("bfloat16", 192, True, (99, 203), (4, 1), 2, 1, False),
        ("float16", 256, False, (65, 131), (6, 2), 3, 2, False),
        ("bfloat16", 256, True, (130, 130), (4, 1), 2, 1, True),
        ("bfloat16", 64, True, (190, 150), (10, 2), 3, 2, False),
        ("float16", 96, False, (140, 257), (7, 1), 4, 1, False),
        ("bfloat16", 128, True, (129, 140), (7, 1), 2, 1, False),
        ("bfloat16", 192, True, (99, 131), (5, 1), 3, 1, False),
        ("float16", 256, False, (65, 131), (5, 1), 2, 2, True),
    ],
)
def test_gradients_of_divided_heads(dtype, head_dim, causal, seqlens, heads, parts, batch, ordered) -> None:
    """Results and work memory are NaN before; there are key tiles of several CTAs, and parts of several heads, some of
    one more than others."""
    config = dividing(select_backward_config(dtype, head_dim, head_dim, causal, ordered))
    case = Case(dtype, seqlens, heads, head_dim, batch, causal)
    case.check(case.run(config, parts))


@pytest.mark.parametrize("head_dim,ordered", [(64, False), (96, True), (128, True), (192, False)])
def test_of_one_part_they_are_those_of_the_kernel_that_divides_none(head_dim: int, ordered: bool) -> None:
    config = select_backward_config("bfloat16", head_dim, head_dim, True, ordered)
    case = Case("bfloat16", (140, 200), (4, 2), head_dim, 1, True)
    whole, one, two = case.run(config), case.run(dividing(config)), case.run(dividing(config), 2)
    assert all(map(torch.equal, whole, one))
    case.check(two)
    for a, b in zip(whole, two, strict=True):
        # Sums in another order, which are rounded once in either way.
        torch.testing.assert_close(a, b, rtol=2 * EPSILON[torch.bfloat16], atol=1e-3)


@pytest.mark.parametrize(
    "head_dim,sides,ordered",
    [(128, (40, 20), False), (64, (90, NO_LIMIT), False), (96, (NO_LIMIT, 25), True), (128, (70, 0), True)],
)
def test_gradients_in_a_window(head_dim: int, sides: tuple[int, int], ordered: bool) -> None:
    """Some keys are seen by no query, and have zeros of each part."""
    config = dividing(select_backward_config("bfloat16", head_dim, head_dim, False, ordered, window=True))
    case = Case("bfloat16", (100, 300), (4, 1), head_dim, 1, False, sides)
    ours = case.run(config, 2)
    case.check(ours)
    if sides[0] < 100:
        unseen = 300 - 100 - sides[0]
        assert not ours[1][:, :unseen].any() and not ours[2][:, :unseen].any()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_gradient_of_the_lse(head_dim: int) -> None:
    config = dividing(select_backward_config("bfloat16", head_dim, head_dim, False))
    dlse = torch.randn(1, 4, 100, generator=torch.Generator().manual_seed(3))
    case = Case("bfloat16", (100, 140), (4, 1), head_dim, 1, False, dlse=dlse)
    case.check(case.run(config, 2, AT_ONCE))


@pytest.mark.parametrize(
    "dtype,head_dim,causal,sequences,heads,parts,sides,ordered,ctas",
    [
        ("bfloat16", 64, True, UNEVEN, (4, 1), 2, None, False, 3),
        ("float16", 64, False, USED, (4, 2), 2, None, True, 1),
        ("bfloat16", 96, True, UNSEEN, (2, 1), 2, None, True, 3),
        ("float16", 128, True, USED, (4, 1), 2, None, False, 1),
        ("bfloat16", 128, False, UNEVEN, (3, 1), 3, None, True, 2),
        ("bfloat16", 128, False, UNEVEN, (4, 2), 2, (40, 20), False, 1),
        ("bfloat16", 72, False, ONE, (4, 1), 4, (50, NO_LIMIT), True, 2),
        ("bfloat16", 192, False, USED, (4, 2), 2, None, False, 1),
        ("float16", 136, True, UNEVEN, (2, 1), 2, None, True, 1),
        ("bfloat16", 64, True, UNEVEN, (10, 2), 3, None, False, 3),
        ("bfloat16", 128, True, USED, (7, 1), 2, None, False, 1),
        ("bfloat16", 256, True, UNEVEN, (5, 1), 2, None, False, 1),
    ],
)
def test_gradients_of_packed_sequences(
    dtype, head_dim, causal, sequences, heads, parts, sides, ordered, ctas
) -> None:
    """Sequences without queries or keys, rows that are not used, and rows behind the last sequence."""
    check_packed(dtype, head_dim, causal, *sequences, heads, ordered, sides, ctas=ctas, head_parts=parts)


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("sequences,head_dim,heads", [(UNEVEN, 64, (5, 1)), (USED, 128, (4, 1))])
def test_a_warp_of_the_kernel_clears_sums_ahead(sequences, head_dim: int, heads, ctas: int) -> None:
    check_packed(
        "bfloat16", head_dim, False, *sequences, heads, False, ctas=ctas, clears_ahead=True, head_parts=2
    )


def test_a_gradient_of_the_lse_of_packed_sequences() -> None:
    check_packed("bfloat16", 64, True, *UNEVEN, (4, 1), False, has_dlse=True, head_parts=2)


def test_rows_in_front_of_the_first_sequence_have_no_gradient() -> None:
    """dK and dV are not written there, whether heads are divided or not."""
    rows = Packed((140, 210, 300), 310)
    config = select_backward_config("bfloat16", 128, 128, True, layout="varlen")
    dout, q, k, v = draw_packed(torch.bfloat16, rows, rows, (2, 1), 128)
    given = (dout, q, k, v), (q, torch.zeros(2, 310)), (rows, rows)
    for parts, kernel in ((1, config), (2, dividing(config))):
        _, *of_keys = packed_backward_on_numpy(kernel, *given, LATE, head_parts=parts)
        for gradient in of_keys:
            assert gradient[:140].isnan().all() and not gradient[140:].isnan().any()


@pytest.mark.parametrize("head_dim,layout", [(128, "dense"), (64, "varlen"), (256, "dense"), (192, "varlen")])
def test_it_has_no_hazards_and_no_store_by_tma(head_dim: int, layout: str) -> None:
    config = select_backward_config("bfloat16", head_dim, head_dim, True, layout=layout)
    whole, divided = ptx_of(config), ptx_of(dividing(config))
    count, hazards = find_hazards(divided)
    assert count == find_hazards(whole)[0] and hazards == []
    # dQ alone leaves by additions, but for a pair's through shared memory.
    adds = "red.global" if head_dim > 128 else "cp.reduce.async.bulk"
    store = "cp.async.bulk.tensor.{}d.global.shared::cta"
    stores = [text.count(store.format(5 if layout == "varlen" else 4)) for text in (whole, divided)]
    assert stores[0] > 0 and stores[1] == 0 and adds in divided
    # Four words of each of 128 threads at a time; the warpgroups of a pair have code of their own.
    by_gradient = dividing(config).dk_words // (4 * 128) * (2 if head_dim > 128 else 1)
    assert [text.count("st.global.v4") for text in (whole, divided)] == [0, 2 * by_gradient]


def test_the_head_of_a_part_is_found_without_a_division() -> None:
    heads = {
        (kv_heads, parts) for kv_heads in (1, 2, 3, 8, 127, 4096) for parts in (1, 2, 3, 5, 7, 8, 64, 129)
    }
    for kv_heads, parts in {*heads, (1, 30000), (30000, 1)}:
        reciprocal = reciprocal_of(parts)
        assert reciprocal < 2**31
        for part in {
            0,
            parts - 1,
            parts,
            kv_heads * parts // 2,
            kv_heads * parts - parts,
            kv_heads * parts - 1,
        }:
            assert head_of_part(part, reciprocal) == part // parts


def test_parts_of_query_heads_are_all_of_them_in_order() -> None:
    for shared, parts, kv_heads in (
        (7, 3, 4),
        (71, 18, 2),
        (5, 5, 3),
        (8, 1, 5),
        (128, 37, 500),
        (12, 4, 3),
        (127, 1, 65532),
    ):
        heads, ends = UnequalParts(shared, reciprocal_of(parts)), []
        assert kv_heads * shared * parts**2 <= MOST_COUNTED
        for part in range(kv_heads * parts):
            first, count = heads.first(part), heads.count(part)
            assert first == (ends[-1] if ends else 0) and count in (shared // parts, -(-shared // parts))
            assert (
                heads.head_of_keys(part) == part // parts == first // shared == (first + count - 1) // shared
            )
            ends.append(first + count)
        assert ends[-1] == kv_heads * shared


def test_words_of_a_part_of_dk() -> None:
    """Each warpgroup has 64 keys and all columns, or in a pair of CTAs half of the columns."""
    for head_dim in (64, 96, 128):
        config = dividing(select_backward_config("bfloat16", head_dim, head_dim, False))
        assert (config.tile_columns, config.dk_words) == (head_dim, 64 * head_dim)
        assert [config.dk_order.row_and_column(part, 0) for part in range(2)] == [(0, 0), (64, 0)]
    for head_dim in (192, 256):
        pair = dividing(select_backward_config("bfloat16", head_dim, head_dim, False))
        assert isinstance(pair, PairedBackwardConfig)
        assert (pair.tile_columns, pair.dk_words) == (head_dim // 2, 32 * head_dim)
        first = [pair.dk_order.row_and_column(part, 0) for part in range(4)]
        assert first == [(0, 0), (64, 0), (0, head_dim // 2), (64, head_dim // 2)]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_words_of_dk_are_every_element_once(head_dim: int) -> None:
    config = dividing(select_backward_config("float16", head_dim, head_dim, True))
    places = {
        config.dk_order.row_and_column(part, word)
        for part in range(config.dq_parts)
        for word in range(config.dk_words)
    }
    assert places == {(row, column) for row in range(config.tile_n) for column in range(head_dim)}


def test_what_it_cannot_have_is_named() -> None:
    message = "divides_heads is True in hopper_bwd_.*, allowed: without strips and one_tile"
    for config in (
        select_strip_config("bfloat16", 128, 128, True),
        select_one_tile_config("float16", 64, 64, False),
    ):
        with pytest.raises(ValueError, match=message):
            validate_backward_config(dividing(config))
    for head_dim in (64, 128, 256):
        for layout in ("dense", "varlen"):
            config = select_backward_config("bfloat16", head_dim, head_dim, True, layout=layout, window=True)
            validate_backward_config(dividing(config))
            pair = "_pair" if head_dim == 256 else ""
            assert dividing(config).name == f"{config.name.removesuffix('_pair')}_divided{pair}"
            assert not config.divides_heads and dividing(config).smem_bytes == config.smem_bytes
