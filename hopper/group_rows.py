"""Where the query heads of a K/V head stand in the rows of a tile: on the host.

A warpgroup has 64 rows. Where the heads divide them a tile has no others. Where they do not, as 7 do not, each
warpgroup has whole queries, 9 of them in 63 rows, and its last rows are nobody's. (FlashAttention-3 takes such heads
row by row, without TMA.)
"""

from hopper.config import WARPGROUP_ROWS


def used_rows(group: int) -> int:
    """Of a warpgroup with ``group`` heads of each query."""
    return WARPGROUP_ROWS // group * group


def rows_of_queries(queries: int, group: int) -> int:
    """Rows up to the last one of so many queries, those that are nobody's among them."""
    full, rest = divmod(queries, WARPGROUP_ROWS // group)
    return full * WARPGROUP_ROWS + rest * group


def queries_of_rows(rows: int, group: int) -> int:
    """Queries that ``rows`` of tiles, a multiple of a warpgroup's, have room for."""
    return rows // WARPGROUP_ROWS * (WARPGROUP_ROWS // group)
