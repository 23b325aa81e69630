"""What a forward kernel is given of lengths where query tiles are counted from the end of a sequence."""

from torch import Tensor

from cute_kernels.seqlen import CutSeqlens, lead_of_few_keys, lead_of_queries
from hopper.config import WARPGROUP_ROWS, ForwardConfig


def lengths_of(config: ForwardConfig, q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Those of Q and K, and the queries that lead."""
    seqlens = q.shape[1], k.shape[1]
    if config.few_keys:
        return *seqlens, lead_of_few_keys(seqlens, config.tile_m, WARPGROUP_ROWS, config.few_keys)
    return (*seqlens, lead_of_queries(seqlens, config.tile_m)) if config.counts_from_end else seqlens


def first_rows_of(config: ForwardConfig, q: Tensor, k: Tensor) -> int:
    """Rows of O that TMA stores for the first query tile by a map of its own, or 0."""
    return CutSeqlens(*lengths_of(config, q, k), config.tile_m).first_rows if config.stores_first_apart else 0
