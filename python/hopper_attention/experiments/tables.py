"""Tables of the terminal that fit its width: no cell is ever cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hopper_attention.experiments.reports import Target

ACCENT = "bold green"
QUIET = "dim"

WIDE_GAP, DENSE_GAP = 3, 1
"""Spaces between two columns; one more on either side of a table with wide gaps."""


@dataclass(frozen=True)
class Column:
    """A column of a :class:`FittedTable`: figures, unless it says otherwise.

    Attributes:
        heading: may be broken into lines at spaces, and behind "_".
        is_left: aligned left, else right.
        wraps: cells may take several lines.
        is_spare: can be left out where there is no room.
        style: of its cells.
    """

    heading: str
    is_left: bool = False
    wraps: bool = False
    is_spare: bool = False
    style: str = ""


def figures(*headings: str) -> tuple[Column, ...]:
    """Columns aligned right."""
    return tuple(map(Column, headings))


def names(*headings: str) -> tuple[Column, ...]:
    """Columns aligned left, each cell on one line."""
    return tuple(Column(heading, is_left=True) for heading in headings)


def texts(*headings: str) -> tuple[Column, ...]:
    """Columns aligned left, whose cells may take several lines."""
    return tuple(Column(heading, is_left=True, wraps=True) for heading in headings)


def spare(*columns: Column) -> tuple[Column, ...]:
    """The same columns, which may be left out."""
    return tuple(replace(column, is_spare=True) for column in columns)


Row = Sequence[str | Text]


@dataclass(frozen=True)
class FittedTable:
    """A table that adapts to the terminal when it is printed.

    Where it does not fit, columns move together and headings take several lines; then spare columns are left out, the
    last one first, and a line says which; and last, words are broken. ``groups`` are rows with a rule between two
    groups. A string may hold rich's markup.
    """

    title: str
    columns: Sequence[Column]
    groups: Sequence[Sequence[Row]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spare_columns = [i for i, column in enumerate(self.columns) if column.is_spare]
        chosen = Layout.of(self, console, [], is_dense=False)
        first = len(spare_columns)
        while first >= 0 and not chosen.fits(options.max_width):
            chosen = Layout.of(self, console, spare_columns[first:], is_dense=True)
            first -= 1
        if self.title:
            yield Text(self.title, style="bold")
        yield chosen.draw(self.groups, options.max_width)
        left_out = [column.heading for i, column in enumerate(self.columns) if i not in chosen.kept]
        if left_out:
            yield Text(f"No room at this width for: {', '.join(left_out)}.", style=QUIET)


@dataclass(frozen=True)
class Layout:
    """The columns of a table that are ``kept``, by number, and how wide each must be at least and may be at most."""

    columns: Sequence[Column]
    kept: Sequence[int]
    least: Sequence[int]
    most: Sequence[int]
    is_dense: bool

    @classmethod
    def of(cls, table: FittedTable, console: Console, left_out: Sequence[int], is_dense: bool) -> Layout:
        kept = [i for i in range(len(table.columns)) if i not in left_out]
        columns, least, most = [], [], []
        for i in kept:
            column = table.columns[i]
            cells = [as_text(console, row[i]) for rows in table.groups for row in rows]
            widths = [cell.cell_len for cell in cells]
            words = [len(word) for cell in cells for word in cell.plain.split()]
            needed = max(words if column.wraps else widths, default=0)
            if is_dense:
                column = replace(column, heading=broken(column.heading, needed))
            heading = max(map(len, column.heading.split("\n")))
            columns.append(column)
            least.append(max(needed, heading))
            most.append(max(*widths, heading) if widths else heading)
        return cls(columns, kept, least, most, is_dense)

    def fits(self, available: int) -> bool:
        """Whether no word has to be broken and, with wide gaps, no line."""
        return sum(self.least if self.is_dense else self.most) + self.gaps <= available

    @property
    def gaps(self) -> int:
        between = (len(self.kept) - 1) * (DENSE_GAP if self.is_dense else WIDE_GAP)
        return between if self.is_dense else between + 2

    def widths(self, available: int) -> list[int]:
        """What each column gets: those that wrap share what the others leave, by how many lines they would take."""
        widths = list(self.least)
        wrapping = [i for i, column in enumerate(self.columns) if column.wraps]
        left = available - sum(widths) - self.gaps
        while wrapping and left < 0 and max(widths[i] for i in wrapping) > 1:
            widest = max(wrapping, key=lambda i: widths[i])
            widths[widest] -= 1
            left += 1
        while wrapping and left > 0:
            tallest = max(wrapping, key=lambda i: self.most[i] / widths[i])
            if widths[tallest] >= self.most[tallest]:
                break
            widths[tallest] += 1
            left -= 1
        return widths

    def draw(self, groups: Sequence[Sequence[Row]], available: int) -> Table:
        table = Table(
            box=SIMPLE_HEAD,
            header_style=QUIET,
            border_style=QUIET,
            pad_edge=False,
            show_edge=not self.is_dense,
            padding=(0, 0) if self.is_dense else (0, 1),
        )
        for column, width in zip(self.columns, self.widths(available), strict=True):
            table.add_column(
                column.heading,
                justify="left" if column.is_left else "right",
                style=column.style,
                width=width,
                overflow="fold",
            )
        for rows in groups:
            for row in rows:
                table.add_row(*(row[i] for i in self.kept))
            table.add_section()
        return table


def as_text(console: Console, cell: str | Text) -> Text:
    return console.render_str(cell) if isinstance(cell, str) else cell


def broken(heading: str, width: int) -> str:
    """The heading in lines of ``width`` columns, or of its longest piece."""
    lines = []
    for line in heading.split("\n"):
        pieces = [piece for piece in re.split(r"(?<=_)| ", line) if piece]
        room = max([width, *map(len, pieces)])
        lines.append("")
        for piece in pieces:
            gap = "" if not lines[-1] or lines[-1].endswith("_") else " "
            if len(lines[-1] + gap + piece) > room:
                lines.append(piece)
            else:
                lines[-1] += gap + piece
    return "\n".join(lines)


def target_table(targets: Sequence[Target]) -> FittedTable:
    """Each promise, what was measured, and whether it is met."""
    verdicts = {True: "[green]met[/green]", False: "[red]missed[/red]"}
    rows = [(target.what, target.required, target.measured, verdicts[target.met]) for target in targets]
    return FittedTable("Targets", (*texts("what", "required", "measured"), *names("")), [rows])
