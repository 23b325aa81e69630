"""FlexAttention's BlockMask: which blocks of keys a block of queries sees, none, some or all of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.problem import ENTRY_BITS, HIDDEN, PARTLY_SEEN, SEEN
from hopper_attention.checks import check_device

ATTRIBUTES = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "BLOCK_SIZE",
    "mask_mod",
)


@dataclass(frozen=True, eq=False)
class BlockTable:
    """What a BlockMask says of each block of queries and keys.

    Attributes:
        kinds: int32 (batch or 1, heads or 1, query blocks, key blocks), each HIDDEN, PARTLY_SEEN or SEEN.
        rows, keys: queries and keys of a block.
    """

    kinds: Tensor
    rows: int
    keys: int

    @staticmethod
    def of(block_mask: Any) -> BlockTable:
        """The table of a ``torch.nn.attention.flex_attention.BlockMask``. Nothing is read on the host.

        Raises:
            TypeError: it is no such thing.
        """
        if not all(hasattr(block_mask, name) for name in ATTRIBUTES):
            raise TypeError(
                f"block_mask is a {type(block_mask).__name__}, allowed: a torch.nn.attention.flex_attention.BlockMask"
            )
        rows, keys = block_mask.BLOCK_SIZE
        partly = are_listed(block_mask.kv_num_blocks, block_mask.kv_indices)
        kinds = torch.where(partly, PARTLY_SEEN, HIDDEN)
        if block_mask.full_kv_num_blocks is not None:
            fully = are_listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
            kinds = kinds.masked_fill(fully, SEEN)
        return BlockTable(kinds.int(), rows, keys)

    @property
    def block(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.rows, self.keys

    def check(self, q: Tensor, k: Tensor) -> None:
        """Raise ValueError unless it fits these (batch, seqlen, heads, head_dim)."""
        check_device("block_mask", self.kinds.device, q.device)
        batch, heads, query_blocks, key_blocks = self.kinds.shape
        if batch not in (1, q.shape[0]) or heads not in (1, q.shape[2]):
            raise ValueError(
                f"block_mask is for batch {batch} and {heads} heads, allowed: 1 or {q.shape[0]}, and 1 or {q.shape[2]}"
            )
        reach = query_blocks * self.rows, key_blocks * self.keys
        if reach[0] < q.shape[1] or reach[1] < k.shape[1]:
            raise ValueError(
                f"block_mask is for {reach[0]} queries and {reach[1]} keys, allowed: at least those of q and k, "
                f"{q.shape[1]} and {k.shape[1]}"
            )

    def with_mask(self, mask_mod: Callable[..., Any]) -> Callable[..., Any]:
        """A mask function for all blocks: what ``mask_mod`` says in those that are seen in part, else what the table
        says."""
        kinds, rows, keys = self.kinds, self.rows, self.keys

        def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            # A batch or heads of 1 are for all: indices outside of a tensor are taken for the nearest inside.
            kind = kinds[b, h, q_idx // rows, kv_idx // keys]
            return ((kind == PARTLY_SEEN) & mask_mod(b, h, q_idx, kv_idx)) | (kind == SEEN)

        return visible

    def lists(self, tile: tuple[int, int], sizes: tuple[int, int, int, int]) -> Tensor:
        """What a kernel walks by: int32 (batch, heads, query tiles, 1 + key tiles), how many key tiles the query tile
        visits and then which, in ascending order, as ``ListedBlocks`` has them.

        Args:
            tile: queries and keys of a tile, which need not divide those of a block.
            sizes: batch, heads, seqlen_q and seqlen_k.
        """
        batch, heads, seqlen_q, seqlen_k = sizes
        kinds = self._kinds_for_keys(tile, (seqlen_q, seqlen_k)).mT
        are_visited = kinds != HIDDEN
        order = are_visited.int().argsort(dim=-1, descending=True, stable=True)
        entries = (order << ENTRY_BITS) + kinds.gather(-1, order)
        lists = torch.cat([are_visited.sum(-1, keepdim=True), entries], -1)
        return lists.int().expand(batch, heads, -1, -1)

    def query_lists(self, tile: tuple[int, int], sizes: tuple[int, int, int, int], least: int) -> Tensor:
        """What a backward kernel walks by: int32 (batch, heads, key tiles, 1 + query tiles, 2), as ``ListedQueries``
        has them: how many tiles are listed that are not fully seen, and how many in all; then of each its entry and its
        turn. Those that are seen in part come first, and both kinds in ascending order.

        Args:
            tile: queries and keys of a tile, which need not divide those of a block.
            sizes: batch, heads, seqlen_q and seqlen_k.
            least: 1 where a key tile that no query sees has to visit one all the same, which is hidden; else 0.
        """
        kinds = self._kinds_for_keys(tile, sizes[2:])
        are_seen = kinds != HIDDEN
        seen, fully = (each.sum(-1, keepdim=True) for each in (are_seen, kinds == SEEN))
        places = (~are_seen).int() * 2 + (kinds == SEEN)
        order = places.argsort(dim=-1, stable=True)
        count = seen.clamp(min=least)
        # A hidden tile that is visited is the first of all.
        are_visited = are_seen.long()
        are_visited[..., :1] += count - seen
        turns = are_visited.cumsum(-2) - are_visited
        entries = (order << ENTRY_BITS) + kinds.gather(-1, order)
        header = torch.stack([count - fully, count], -1)
        lists = torch.cat([header, torch.stack([entries, turns.gather(-1, order)], -1)], -2)
        return lists.int().expand(*sizes[:2], -1, -1, -1)

    def _kinds_for_keys(self, tile: tuple[int, int], lengths: tuple[int, int]) -> Tensor:
        """``kinds`` of tiles of any size, (..., key tiles, query tiles). One that has parts of blocks of several kinds
        is seen in part."""
        if is_divided(self.block, tile):
            tiles = self.kinds.repeat_interleave(self.rows // tile[0], -2).repeat_interleave(
                self.keys // tile[1], -1
            )
            return tiles[..., : -(-lengths[0] // tile[0]), : -(-lengths[1] // tile[1])].mT
        is_hidden, is_seen = self.kinds == HIDDEN, self.kinds == SEEN
        for block, size, length in ((self.keys, tile[1], lengths[1]), (self.rows, tile[0], lengths[0])):
            # The last dimension has blocks of keys, and transposed those of queries.
            is_hidden, is_seen = (are_all(x, block, size, length).mT for x in (is_hidden, is_seen))
        return torch.where(is_seen, SEEN, torch.where(is_hidden, HIDDEN, PARTLY_SEEN)).mT


def is_divided(block: tuple[int, int], tile: tuple[int, int]) -> bool:
    """Whether no tile has parts of several blocks; both are (queries, keys)."""
    return block[0] % tile[0] == 0 and block[1] % tile[1] == 0


def are_all(blocks: Tensor, block: int, tile: int, length: int) -> Tensor:
    """(..., tiles), whether all of the boolean ``blocks`` (..., blocks) are True that a tile has a part of. Blocks and
    tiles are ``block`` and ``tile`` elements long, of which there are ``length``."""
    starts = torch.arange(0, length, tile, device=blocks.device)
    first, last = starts // block, (starts + (tile - 1)).clamp(max=length - 1) // block
    counts = torch.nn.functional.pad(blocks.long().cumsum(-1), (1, 0))
    found = counts.index_select(-1, last + 1) - counts.index_select(-1, first)
    return found == last - first + 1


def are_listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Boolean, of the shape of ``indices`` (..., blocks): which blocks are among the first ``counts`` of them."""
    blocks = indices.shape[-1]
    counted = torch.arange(blocks, device=indices.device) < counts[..., None]
    # What is not counted goes to a column of its own.
    targets = torch.where(counted, indices, blocks).long()
    found = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    return found.scatter(-1, targets, True)[..., :blocks]


def is_no_mask(mask_mod: Any) -> bool:
    """Whether it is the ``noop_mask`` that torch gives a BlockMask without one: it hides nothing and cannot be
    traced."""
    return getattr(mask_mod, "__name__", "") == "noop_mask"
