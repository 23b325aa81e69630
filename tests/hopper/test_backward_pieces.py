"""The backward kernels that divide the visits of some key tiles among CTAs, run from their PTX without a GPU, against
float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from cute_kernels.backward.step import BackwardStep
from cute_kernels.query_range import Visit
from hopper.backward.config import BackwardConfig, select_backward_config, validate_backward_config
from hopper.backward.parts import reciprocal_of
from hopper.backward.pieces import DividedTiles, blocks_between
from hopper.backward.written_configs import select_one_tile_config
from hopper.config import SMEM_BYTES
from hopper_attention.backward_rules import Division
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import AT_ONCE
from tests.hopper.pieces_on_numpy import gradients_in_pieces
from tests.hopper.test_backward_divided_heads import Case
from tests.hopper.test_backward_windows import LATE
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import ptx_of

HEAD_DIMS = 64, 96, 128


def dividing(dtype: str, head_dim: int, causal: bool) -> BackwardConfig:
    return replace(select_backward_config(dtype, head_dim, head_dim, causal), divides_visits=True)


KERNELS = tuple(
    itertools.starmap(dividing, itertools.product(("bfloat16", "float16"), HEAD_DIMS, (False, True)))
)
COMPILED = *KERNELS, *(BackwardStep("finish", config) for config in KERNELS[::2])


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.local_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 18
    # Those of a CTA of 1024 threads.
    assert all(usage.registers <= 64 for c, usage in usages.items() if isinstance(c, BackwardStep))


@pytest.mark.parametrize(("timing", "ctas"), [(AT_ONCE, 1), (LATE, 2), (LATE, 20)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal", "seqlens", "heads", "batch", "division"),
    [
        ("bfloat16", 128, False, (300, 300), (2, 2), 1, (4, 2, 2)),
        ("float16", 64, False, (260, 200), (2, 1), 1, (0, 2, 3)),
        ("bfloat16", 96, False, (150, 300), (2, 2), 2, (9, 3, 3)),
        # Neither at the beginning nor at the end; and pieces of the queries of several heads.
        ("float16", 128, False, (130, 500), (4, 1), 2, (2, 5, 4)),
        ("bfloat16", 72, False, (100, 130), (2, 2), 1, (3, 1, 2)),
        ("bfloat16", 128, True, (300, 300), (2, 2), 1, (0, 3, 2)),
        ("float16", 128, True, (200, 300), (3, 1), 1, (0, 3, 3)),
        ("bfloat16", 64, True, (390, 200), (2, 2), 1, (0, 4, 2)),
        # The last key tiles have fewer query tiles than pieces.
        ("float16", 64, True, (300, 300), (2, 2), 1, (0, 6, 3)),
        ("bfloat16", 96, True, (200, 260), (1, 1), 2, (0, 6, 4)),
    ],
)
def test_gradients(dtype, head_dim, causal, seqlens, heads, batch, division, timing, ctas) -> None:
    """By one CTA, by two that share a key tile, and by more than there are items."""
    case = Case(dtype, seqlens, heads, head_dim, batch, causal)
    native = next(size for size in HEAD_DIMS if size >= head_dim)
    given = case.inputs, case.rows, head_dim**-0.5, timing, Division(*division)
    case.check(gradients_in_pieces(dividing(dtype, native, causal), *given, ctas=ctas))


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_that_are_not_divided_have_the_bits_of_the_kernel_that_divides_none(causal: bool) -> None:
    case = Case("bfloat16", (200, 300), (2, 2), 128, 1, causal)
    whole = case.run(select_backward_config("bfloat16", 128, 128, causal))
    given = case.inputs, case.rows, 128**-0.5, AT_ONCE, Division(3, 2, 2)
    ours = gradients_in_pieces(dividing("bfloat16", 128, causal), *given)
    # By the order of a launch of two heads: under a causal mask it takes them in turns.
    divided = [(1, 1), (0, 2)] if causal else [(1, 0), (1, 1)]
    for a, b in zip(whole[1:], ours[1:], strict=True):
        for head, n_block in itertools.product(range(2), range(3)):
            keys = slice(128 * n_block, 128 * n_block + 128)
            assert torch.equal(a[:, keys, head], b[:, keys, head]) or (head, n_block) in divided


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_has_as_many_products_and_no_hazards(head_dim: int) -> None:
    for causal in (False, True):
        config = dividing("bfloat16", head_dim, causal)
        text = ptx_of(config)
        count, hazards = find_hazards(text)
        assert hazards == [] and count == find_hazards(ptx_of(replace(config, divides_visits=False)))[0]
        # Of dK and dV, four words of each of 128 threads at a time.
        assert text.count("st.global.v4") == 2 * config.dk_words // (4 * 128)


@pytest.mark.parametrize(
    ("tiles", "division"),
    [(7, (3, 4, 5)), (7, (0, 7, 2)), (300, (264, 36, 3)), (9, (2, 3, 33)), (5, (1, 1, 1))],
)
def test_items_of_a_launch(tiles: int, division: tuple[int, int, int]) -> None:
    """Tiles come in their order, and the pieces of each in theirs."""
    pieces = DividedTiles(*division, reciprocal_of(division[2]))
    items = range(pieces.items(tiles))
    found = [(pieces.tile(i), pieces.piece(i) if pieces.is_piece(i) else None) for i in items]
    first, count, each = division
    expected = [
        (tile, piece)
        for tile in range(tiles)
        for piece in (range(each) if first <= tile < first + count else (None,))
    ]
    assert found == expected


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("each", [2, 3, 7, 33])
@pytest.mark.parametrize("visit", [(0, 0, 5, 5), (2, 4, 9, 9), (3, 9, 9, 9), (0, 0, 700, 700)])
def test_pieces_visit_all_blocks_once(visit: tuple[int, ...], each: int, heads: int) -> None:
    """In their order, each about as many, and with a mask where the tile has one."""
    tile, pieces = Visit(*visit), DividedTiles(0, 1, each, reciprocal_of(each))
    blocks, seen, counts = (tile.end - tile.begin) * heads, [], []
    for piece in range(each):
        span = pieces.begin(piece, blocks), pieces.begin(piece + 1, blocks)
        counts.append(span[1] - span[0])
        for head in range(heads):
            between = blocks_between(span, head, tile)
            assert between.left_masked == between.end
            seen += [(head, m, True) for m in range(between.begin, between.unmasked)]
            seen += [(head, m, False) for m in range(between.unmasked, between.end)]
    assert seen == [(h, m, m < tile.unmasked) for h in range(heads) for m in range(tile.begin, tile.end)]
    assert sum(counts) == blocks and max(counts) - min(counts) <= 1


def test_what_it_cannot_have_is_named() -> None:
    message = "divides_visits is True in hopper_bwd_.*, allowed: plain, in any order, to head_dim 128"
    plain = select_backward_config("bfloat16", 128, 128, True)
    for config in (
        select_backward_config("bfloat16", 128, 128, True, ordered=True),
        select_backward_config("bfloat16", 128, 128, True, window=True),
        select_backward_config("bfloat16", 64, 64, False, layout="varlen"),
        select_backward_config("bfloat16", 64, 64, True, softcap=True),
        select_backward_config("bfloat16", 256, 256, True),
        select_one_tile_config("float16", 64, 64, True),
        replace(plain, divides_heads=True),
        replace(plain, walks_back=True),
    ):
        with pytest.raises(ValueError, match=message):
            validate_backward_config(replace(config, divides_visits=True))
    config = dividing("bfloat16", 128, True)
    validate_backward_config(config)
    assert config.name == plain.name + "_pieces" and config.smem_bytes == plain.smem_bytes
    assert [BackwardStep(step, config).name.endswith("_pieces") for step in ("prepare", "finish")] == [
        False,
        True,
    ]
