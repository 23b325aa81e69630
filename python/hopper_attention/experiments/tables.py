"""Tables of the terminal that more than one experiment shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hopper_attention.experiments.reports import Target

ACCENT = "bold green"
QUIET = "dim"


def quiet_table() -> Table:
    return Table(box=SIMPLE_HEAD, header_style=QUIET, border_style=QUIET, pad_edge=False)


def text_table(title: str, left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first columns are aligned left and whose others are aligned right."""
    table = Table(title=title, title_justify="left")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def target_table(targets: Sequence[Target]) -> Table:
    """Each promise, what was measured, and whether it is met."""
    table = Table(title="Targets", title_justify="left")
    for heading in ("what", "required", "measured", ""):
        table.add_column(heading)
    for target in targets:
        verdict = "[green]met[/green]" if target.met else "[red]missed[/red]"
        table.add_row(target.what, target.required, target.measured, verdict)
    return table
