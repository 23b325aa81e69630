"""In which order the float32 sums of a dQ tile lie in global memory: as accumulators hold them, for no address to be
computed where they are added. Nothing here imports the DSL; what is computed is so of plain and of traced integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROWS_PER_BAND = 16
COLUMNS_PER_GROUP = 8
WORDS_PER_FRAGMENT = ROWS_PER_BAND * COLUMNS_PER_GROUP
"""float32 of a band of rows and a group of columns: what the 32 lanes of a warp hold, four elements each."""


@dataclass(frozen=True)
class WordOrder:
    """Where the words of a dQ tile lie, which is shared out among parts.

    A part has ``bands`` of 16 rows and ``groups`` of 8 columns. ``row_parts`` parts stand along the rows of the tile,
    ``column_parts`` along its columns, of which they take ``groups_in_turn`` groups in turns. The fragment of a band
    and a group begins at ``band * band_stride + group * group_stride``, and element e of a lane lies
    ``lane * lane_stride + e * element_stride`` behind that: row lane // 4 + 8 * (e // 2), column
    2 * (lane % 4) + e % 2.
    """

    bands: int
    groups: int
    row_parts: int
    column_parts: int
    groups_in_turn: int
    band_stride: int
    group_stride: int
    lane_stride: int
    element_stride: int

    def origin(self, part: Any, band: Any, group: Any) -> tuple[Any, Any]:
        """Row and column in the tile of the first element of a fragment."""
        row = (part % self.row_parts * self.bands + band) * ROWS_PER_BAND
        turn = part // self.row_parts + self.column_parts * (group // self.groups_in_turn)
        return row, (self.groups_in_turn * turn + group % self.groups_in_turn) * COLUMNS_PER_GROUP

    def row_and_column(self, part: int, word: int) -> tuple[int, int]:
        """Row and column in the tile of word ``word`` of a part."""
        strides = {
            "band": (self.bands, self.band_stride),
            "group": (self.groups, self.group_stride),
            "lane": (32, self.lane_stride),
            "element": (4, self.element_stride),
        }
        at = {name: word // stride % size for name, (size, stride) in strides.items()}
        row, column = self.origin(part, at["band"], at["group"])
        row += at["lane"] // 4 + 8 * (at["element"] // 2)
        return row, column + 2 * (at["lane"] % 4) + at["element"] % 2
