"""Workloads as rows of a table: what they are, microseconds of every peer, and what is said of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from hopper_attention.experiments.bench.results import Failed
from hopper_attention.experiments.bench.words import FAILED, NO_KERNEL, failures
from hopper_attention.experiments.reports import (
    NOTHING,
    RENDERED,
    markdown_table,
    measured_on,
    number,
    section,
)
from hopper_attention.experiments.tables import FittedTable, figures, names, spare
from hopper_attention.experiments.workloads.results import CellT, WorkloadReport
from hopper_attention.experiments.workloads.spec import WorkloadT


def time_of(cell: CellT, peer: str) -> str:
    """Microseconds of a peer, or why there are none."""
    result = cell.peers.get(peer)
    if isinstance(result, Failed):
        return NO_KERNEL if result.lacks_kernel else FAILED
    return number(cell.us(peer), 1)


def share_text(cell: CellT, gpu: str) -> str:
    """What ours reaches of the limit, in percent."""
    share = cell.share_of_limit(gpu)
    return NOTHING if math.isnan(share) else f"{100 * share:.0f} %"


def failures_of(report: WorkloadReport[CellT]) -> list[str]:
    """What did not run and why, a line each: absent peers, then failures."""
    return failures(report.peers, ((cell.workload.name, cell.peers) for cell in report.cells))


def head_of_page(title: str, report: WorkloadReport[CellT], subject: str, figure: str) -> list[str]:
    """The start of a page; ``subject`` is what its figures are, ahead of the peers' titles and versions."""
    head = report.head
    infos = ((name, report.peers[name]) for name in report.available)
    titles = "; ".join(f"{name}: {info.title}, {info.version}" for name, info in infos)
    where = measured_on(head["date"], head["commit"], head["machine"])
    return [f"# {title}", RENDERED, where, f"{subject} {titles}.", f"![share of the limit]({figure})"]


@dataclass(frozen=True)
class Layout(Generic[WorkloadT, CellT]):
    """How the cells of a kind of report are shown.

    Attributes:
        headings: of what ``describe`` says of a workload.
        own_headings: of what ``own_figures`` says of ours on the GPU of a name.
        topics: the parts of a report, by title: which workloads each has.
    """

    headings: tuple[str, ...]
    describe: Callable[[WorkloadT], list[str]]
    own_headings: tuple[str, ...]
    own_figures: Callable[[CellT, str], list[str]]
    topics: Mapping[str, Callable[[WorkloadT], bool]]

    def cells_by_topic(self, report: WorkloadReport[CellT]) -> dict[str, list[CellT]]:
        """The cells of each part that has any."""
        found = {
            topic: [cell for cell in report.cells if belongs(cell.workload)]
            for topic, belongs in self.topics.items()
        }
        return {topic: cells for topic, cells in found.items() if cells}

    def row_of(self, cell: CellT, peers: Sequence[str], gpu: str) -> list[str]:
        times = (time_of(cell, peer) for peer in peers)
        return [*self.describe(cell.workload), *times, *self.own_figures(cell, gpu)]

    def table(self, title: str, report: WorkloadReport[CellT], peers: Sequence[str]) -> FittedTable:
        """For the terminal: a block of rows for each topic."""
        head, gauges = report.head, spare(*figures("MHz", "W"))
        columns = (*names(*self.headings), *figures(*peers, *self.own_headings), *gauges)
        rows = [
            [
                [*self.row_of(cell, peers, report.gpu), number(cell.clock_mhz), number(cell.power_w)]
                for cell in cells
            ]
            for cells in self.cells_by_topic(report).values()
        ]
        return FittedTable(f"{title} · {report.gpu} · {head['commit'][:12]}", columns, rows)

    def sections(
        self, report: WorkloadReport[CellT], peers_of: Callable[[list[CellT]], list[str]]
    ) -> list[str]:
        """For a page: a table for each topic, with the peers that ``peers_of`` finds for its cells."""
        parts = []
        for topic, cells in self.cells_by_topic(report).items():
            peers = peers_of(cells)
            headings = [*self.headings, *(f"{peer}, us" for peer in peers), *self.own_headings]
            parts.append(
                section(
                    topic, markdown_table(headings, [self.row_of(cell, peers, report.gpu) for cell in cells])
                )
            )
        return parts
