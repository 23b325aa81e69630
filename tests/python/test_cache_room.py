"""Calls on a cache by tiles: in how many parts keys may be, of sequences whose lengths only the GPU knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.combine.config import FEW_SPLITS
from hopper_attention import cache_tiles
from hopper_attention.cache_tiles import KEYS_OF_ROOM, MOST_ROOM
from hopper_attention.few_queries_times import COLUMNS
from tests.python.kvcache_cases import FP8
from tests.python.test_cache_tiles import BF16, plan


def parts_said(found: Any) -> int:
    """How many parts ``explain_kvcache`` says that there may be; one where tiles are in one."""
    said = [note for note in found.notes if "CTAs visit a part" in note]
    return int(said[0].split()[2]) if said else 1


@pytest.mark.parametrize("capacity", [1024, 8192, 12288, 65536])
def test_there_is_room_for_more_parts_in_a_long_cache(capacity: int) -> None:
    """One for ``KEYS_OF_ROOM`` keys, of those that the cache has room for."""
    found = plan(10, (16, 1), batch=10, capacity=capacity, page_size=64, head_dims=(256, 256), dtype=FP8)
    assert found.path == "tiles" and found.config.split
    assert parts_said(found) == min(max(capacity // KEYS_OF_ROOM, FEW_SPLITS), MOST_ROOM)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_few_long_tiles_may_be_in_parts_where_none_are_counted(dtype: torch.dtype) -> None:
    """As one sequence may be longer than others; not where tiles are many, or take little time."""
    usual: dict[str, Any] = {"batch": 40, "capacity": 9216, "dtype": dtype, "queries": 9, "heads": (32, 8)}
    if dtype == BF16:
        usual |= {"batch": 27, "heads": (64, 4), "queries": 8, "capacity": 2560}
    found = plan(**usual)
    assert found.path == "tiles" and found.config.split and parts_said(found) >= FEW_SPLITS
    for other in ({"batch": 200}, {"capacity": 256}, {"num_splits": 1}):
        found = plan(**(usual | other))
        assert found.path == "tiles" and not found.config.split


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_wide_rows_are_in_parts_only_where_these_are_counted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: dict[str, Any] = {"batch": 30, "capacity": 4096, "dtype": dtype, "head_dims": (256, 256)}
    for widest, is_split in ((COLUMNS, False), (256, True)):
        monkeypatch.setattr(cache_tiles, "COLUMNS", widest)
        cache_tiles._tiles_of.cache_clear()
        found = plan(16, (64, 4), **usual)
        assert found.path == "tiles" and found.config.split == is_split
    cache_tiles._tiles_of.cache_clear()
