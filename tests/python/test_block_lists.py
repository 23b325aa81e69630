"""The lists by which kernels walk over a BlockMask: against brute force, and on their way to a kernel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from cute_kernels.problem import ENTRY_BITS, HIDDEN, PARTLY_SEEN, SEEN
from cute_kernels.query_range import ListedQueries
from hopper_attention import flash_attn_func
from hopper_attention.block_masks import BlockTable, is_divided

BLOCKS = [(128, 128), (64, 256), (100, 96), (32, 48)]
LENGTHS = [(330, 400), (64, 129), (1, 1)]


def draw_table(block: tuple[int, int], lengths: tuple[int, int]) -> BlockTable:
    """Of two heads, with some blocks more than there need be."""
    blocks = [-(-length // size) + 1 for length, size in zip(lengths, block, strict=True)]
    weights = torch.tensor([0.6, 0.2, 0.2])
    kinds = torch.multinomial(weights, 2 * blocks[0] * blocks[1], True, generator=torch.manual_seed(7))
    return BlockTable(kinds.view(1, 2, *blocks).int(), *block)


def kind_of_tile(table: BlockTable, head: int, tile: tuple[range, range], lengths: tuple[int, int]) -> int:
    """Element by element."""
    rows, keys = (
        of.start + torch.arange(min(of.stop, n) - of.start) for of, n in zip(tile, lengths, strict=True)
    )
    kinds = table.kinds[0, head][rows // table.rows][:, keys // table.keys].unique().tolist()
    return kinds[0] if len(kinds) == 1 else PARTLY_SEEN


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("block", BLOCKS)
def test_they_are_the_tiles_with_a_query_that_sees_a_key(
    block: tuple[int, int], lengths: tuple[int, int], least: int
) -> None:
    table, tile_m, tile_n = draw_table(block, lengths), 64, 128
    lists = table.query_lists((tile_m, tile_n), (3, 2, *lengths), least)
    tiles = [-(-n // size) for n, size in zip(lengths, (tile_m, tile_n), strict=True)]
    assert lists.shape == (3, 2, tiles[1], 1 + tiles[0], 2) and lists.dtype == torch.int32
    for head in range(2):
        added = [0] * tiles[0]
        for n in range(tiles[1]):
            listed = ListedQueries.of(lists[2, head, n])
            keys = range(n * tile_n, (n + 1) * tile_n)
            rows = [range(m * tile_m, (m + 1) * tile_m) for m in range(tiles[0])]
            kinds = [kind_of_tile(table, head, (of_tile, keys), lengths) for of_tile in rows]
            partly, fully = ([m for m, k in enumerate(kinds) if k == kind] for kind in (PARTLY_SEEN, SEEN))
            expected = [(m, PARTLY_SEEN) for m in partly] + [(m, SEEN) for m in fully]
            expected = expected or [(0, HIDDEN)] * least
            places = range(int(listed.begin), int(listed.end))
            assert [(int(listed.number(i)), int(listed.kind(i))) for i in places] == expected
            assert int(listed.unmasked) == len(expected) - len(fully)
            for i, (m, _) in enumerate(expected):
                assert int(listed.turn(i)) == added[m]
                added[m] += 1


def test_those_of_a_forward_kernel_have_the_same_tiles() -> None:
    lengths = 330, 400
    for block, tile in itertools.product(BLOCKS, [(128, 64), (64, 128), (128, 48)]):
        table = draw_table(block, lengths)
        lists = table.lists(tile, (3, 2, *lengths))
        counts = [-(-n // size) for n, size in zip(lengths, tile, strict=True)]
        assert lists.shape == (3, 2, counts[0], 1 + counts[1]) and lists.dtype == torch.int32
        for head, m in itertools.product(range(2), range(counts[0])):
            rows = range(m * tile[0], (m + 1) * tile[0])
            spans = [range(n * tile[1], (n + 1) * tile[1]) for n in range(counts[1])]
            kinds = [kind_of_tile(table, head, (rows, keys), lengths) for keys in spans]
            count, *entries = lists[1, head, m].tolist()
            expected = [(n << ENTRY_BITS) + kind for n, kind in enumerate(kinds) if kind != HIDDEN]
            assert entries[:count] == expected
            # One is visited all the same.
            assert count or entries[0] & ((1 << ENTRY_BITS) - 1) == HIDDEN


def mask_of_documents(documents: Tensor, block: int) -> Any:
    def in_documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] == documents[kv_idx]

    return create_block_mask(in_documents, None, None, 300, 300, device="cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize(
    ("backend", "options", "head_dim", "block", "is_listed"),
    [
        ("hopper", {}, 64, 128, True),
        ("hopper", {"deterministic": True}, 64, 128, True),
        ("hopper", {}, 192, 256, True),
        ("hopper", {}, 64, 64, True),
        ("hopper", {}, 64, 100, True),
        ("hopper", {"causal": True}, 64, 128, False),
        ("hopper", {"window_size": (200, 200)}, 64, 128, False),
        ("ampere", {}, 64, 128, True),
        ("ampere", {"causal": True}, 64, 128, False),
    ],
    ids=str,
)
def test_they_reach_the_kernels_that_go_by_them(
    backend: str,
    options: dict[str, Any],
    head_dim: int,
    block: int,
    is_listed: bool,
    kernel_calls: list[tuple[Any, ...]],
) -> None:
    """Where a tile has parts of several blocks, the functions read the table beside the documents."""
    documents, generator = torch.arange(300) // 130, torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, 300, heads, head_dim, generator=generator).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    )
    blocks = mask_of_documents(documents, block)
    out = flash_attn_func(q, k, v, block_mask=blocks, backend=backend, **options)
    torch.autograd.grad(out.sum(), (q, k, v))
    forward_call, _, backward_call, _ = kernel_calls
    table, sizes = BlockTable.of(blocks), (2, 4, 300, 300)
    for config, arguments in (forward_call, backward_call):
        assert config.block_lists == is_listed
        if not is_listed:
            continue
        tile = config.tile_m, config.tile_n
        least = getattr(config, "least_blocks", None)
        assert least in (None, 1 if backend == "hopper" and (options or head_dim > 128) else 0)
        wanted = table.lists(tile, sizes) if least is None else table.query_lists(tile, sizes, least)
        # The size of a persistent grid is behind them.
        *captured, lists = arguments[:-1] if isinstance(arguments[-1], int) else arguments
        assert lists.shape == wanted.shape and torch.equal(lists, wanted) and "listed" in config.name
        tensors = 1 if is_divided((block, block), tile) else 2
        assert len(config.functions.tensors) == tensors
        assert documents.data_ptr() in [x.data_ptr() for x in captured[-tensors:]]
