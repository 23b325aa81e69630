"""The README's results: one small table of speeds, and why one problem has two figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopper_attention.experiments.ablation.results import AblationReport, Won
from hopper_attention.experiments.ablation.variants import FULL
from hopper_attention.experiments.bench.results import (
    NOT_SUSTAINED,
    OURS,
    OURS_DROP_IN,
    OURS_END_TO_END,
    Cell,
    ForwardReport,
    Measured,
    geometric_mean,
    grid_cells,
    is_ours,
)
from hopper_attention.experiments.bench.spec import PAPER_HEAD_DIMS
from hopper_attention.experiments.bench.words import measured_peers
from hopper_attention.experiments.reports import NOTHING, markdown_table, number, short_length

SEQLENS = (2048, 16_384)
COLUMNS = tuple((head_dim, seqlen) for head_dim in PAPER_HEAD_DIMS for seqlen in SEQLENS)

FP8_NOTE = (
    "\\* `flash_attn_fp8_func`, from bf16 to bf16, quantization included; in brackets over our own bf16 kernel. "
    "The FP8 kernel alone finds its inputs quantized, and V transposed."
)
DROP_IN_NOTE = (
    "† FlashAttention-3's own call: e4m3 tensors with descales, V in rows, which we transpose within the time "
    "shown. Without the LSE, which FlashAttention-3 always writes; [with it](docs/results/fp8_inputs.md) our kernel "
    "is a slower one, and slower still where it is to be exact, the default."
)
NO_DROP_IN_NOTE = (
    "FP8 from e4m3 tensors with descales, FlashAttention-3's own call, is in the report "
    "[by input](docs/results/fp8_inputs.md)."
)


@dataclass(frozen=True)
class Line:
    """A line of the table, for each mask: what it is, the row of its report, and what stands in brackets."""

    what: str
    kind: str
    peer: str
    ratio: Callable[[Cell], float]


LINES = (
    Line("bf16 forward", "forward", OURS, lambda cell: cell.ratio),
    Line("bf16 backward", "backward", OURS, lambda cell: cell.ratio),
    Line("FP8 kernel alone", "fp8", OURS, lambda cell: cell.ratio),
    Line("FP8 drop-in †", "fp8", OURS_DROP_IN, lambda cell: cell.drop_in),
    Line("FP8 end to end *", "fp8", OURS_END_TO_END, lambda cell: cell.gain),
)


def fp8_note(report: ForwardReport) -> str:
    """What the rows of FP8 are, of those that the report has."""
    has_drop_in = OURS_DROP_IN in measured_peers(report)
    return f"{FP8_NOTE} {DROP_IN_NOTE if has_drop_in else NO_DROP_IN_NOTE}"


def line_cells(line: Line, cells: Sequence[Cell]) -> list[str]:
    """Figures at the columns' sizes, then mean and range of the ratio over all lengths of this mask."""
    found = {(c.problem.head_dim, c.problem.seqlen_q): c for c in cells}
    figures = []
    for column in COLUMNS:
        cell = found.get(column)
        if cell is None or not cell.tflops(line.peer):
            figures.append(NOTHING)
        else:
            figures.append(f"{cell.tflops(line.peer):.0f} ({number(line.ratio(cell), 2)})")
    ratios = [line.ratio(cell) for cell in cells if line.ratio(cell) == line.ratio(cell)]
    whole = f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else NOTHING
    return [*figures, whole]


def render_speed(reports: Iterable[ForwardReport]) -> str:
    """TFLOP/s of every kind of report at two lengths, no mask and causal."""
    by_kind = {report.kind: report for report in reports}
    rows = []
    for causal in (False, True):
        for line in LINES:
            if line.kind in by_kind and line.peer in measured_peers(by_kind[line.kind]):
                cells = [c for c in grid_cells(by_kind[line.kind]) if c.problem.causal == causal]
                rows.append([f"{line.what}, {'causal' if causal else 'full'}", *line_cells(line, cells)])
    forward = by_kind["forward"]
    heading = [f"d{head_dim}, {short_length(seqlen)}" for head_dim, seqlen in COLUMNS]
    pages = ", ".join(f"[{kind}](docs/results/{kind}.md)" for kind in by_kind)
    compared = "; ".join(map(name_peers, by_kind.values()))
    return "\n\n".join(
        [
            f"TFLOP/s on one {forward.machine['gpu']}; **inputs {forward.method.get('inputs', NOTHING)}**, 16384 "
            "tokens, heads × head_dim = 2048. In brackets: over the fastest other library in the same run "
            f"({compared}). Last column: geometric mean of that over 512 to 16k keys and all three head dimensions, "
            "and its range.",
            markdown_table(["what, mask", *heading, "512 to 16k keys"], rows),
            *([fp8_note(by_kind["fp8"])] if "fp8" in by_kind else []),
            f"Every length, library and clock, and the method: {pages}.",
        ]
    )


def name_peers(report: ForwardReport) -> str:
    """What a kind of report compares with."""
    names = [report.peers[name].title for name in measured_peers(report) if not is_ours(name)]
    return f"{report.kind}: {', '.join(names)}"


@dataclass(frozen=True)
class Run:
    """The full kernel in one of the two reports."""

    measured: Measured
    commit: str
    machine: Mapping[str, Any]

    @property
    def conditions(self) -> str:
        """Clock and power."""
        limit = self.machine.get("power_limit_w")
        of_limit = f" of {limit:.0f} W" if limit else ""
        return f"{number(self.measured.clock_mhz)} MHz and {number(self.measured.power_w)} W{of_limit}"

    @property
    def without_a_pause(self) -> str:
        """Speed and clock where launches follow each other for long; empty where that was not measured."""
        sustained = self.measured.sustained
        if sustained == NOT_SUSTAINED:
            return ""
        return (
            f" In {sustained.seconds:.0f} s without a pause it has **{sustained.tflops:.0f}** there, at "
            f"{number(sustained.clock_mhz)} MHz."
        )

    @property
    def flops_a_cycle(self) -> float:
        """Operations a cycle and SM; 0.0 where the report has no clock or no number of SMs."""
        cycles = (self.measured.clock_mhz or 0.0) * 1e6 * self.machine.get("sms", 0)
        return self.measured.tflops * 1e12 / cycles if cycles else 0.0


def render_two_figures(forward: ForwardReport, ablation: AblationReport) -> str:
    """Why the ablation's problem has another figure in the forward report; empty where one of them is missing."""
    cell, full = forward.cell(ablation.problem), ablation.row(FULL)
    measured = cell.peers.get(OURS) if cell is not None else None
    if full is None or not isinstance(full.outcome, Won) or not isinstance(measured, Measured):
        return ""
    there = Run(measured, forward.commit[:7], forward.machine)
    here = Run(full.outcome.measured, ablation.commit[:7], ablation.machine)
    names = [f"`{name}`" for name in dict.fromkeys((there.measured.note, here.measured.note))]
    kernels = names[0] if len(names) == 1 else f"{names[0]} there and {names[1]} here"
    sentences = [
        f"Beside other libraries this problem has **{there.measured.tflops:.0f} TFLOP/s**, the full kernel has "
        f"**{here.measured.tflops:.0f}** here.",
        f"The kernel is {kernels}, at commits `{there.commit}` and `{here.commit}`.",
        f"The clock differs, as the driver reports it: there {there.measured.rounds} measurements took turns with the "
        f"other libraries, at {there.conditions}; here {here.measured.rounds} took turns with our own kernels, at "
        f"{here.conditions}.{there.without_a_pause}",
    ]
    if there.flops_a_cycle and here.flops_a_cycle:
        sentences.append(
            f"Per cycle of that clock and SM it is {there.flops_a_cycle:.0f} and {here.flops_a_cycle:.0f} FLOP."
        )
    return " ".join(sentences)
