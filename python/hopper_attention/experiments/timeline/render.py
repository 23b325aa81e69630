"""The timeline page: what overlaps what in each recorded kernel."""

from __future__ import annotations

from hopper_attention.experiments.ablation.variants import VARIANTS
from hopper_attention.experiments.reports import RENDERED, markdown_table, measured_on, method_text, page
from hopper_attention.experiments.timeline.spec import (
    TimelineReport,
    busy_share,
    clocks_of_a_block,
    hidden_share,
)


def render_timeline(report: TimelineReport) -> str:
    """docs/results/timeline.md."""
    head = report.head
    rows = [
        [
            recording.title,
            f"{100 * hidden_share(recording.events):.0f} %",
            f"{100 * busy_share(recording.events):.0f} %",
            f"{clocks_of_a_block(recording.events):.0f}",
            f"{recording.slowdown:.3f}",
            f"`{recording.config}`",
        ]
        for recording in report.recordings
    ]
    headings = ("softmax under a GEMM", "a GEMM in flight", "clocks a block", "slowdown", "kernel")
    parts = [
        "# Timeline",
        f"{RENDERED} `python benchmarks/timeline.py` records it on a Hopper GPU.",
        measured_on(head["date"], head["commit"], head["machine"]),
        f"`{head['problem']}`: some key blocks in the middle of one tile, by `clock64` of the SM, for the kernel that "
        "stands for each row of the [ablation](ablation.md). Q K^T begins when its keys are there and the warpgroup "
        "has its turn on the tensor cores; P V when it has been issued. A GEMM ends when the warpgroup's wait for it "
        "returns: that may be later than the tensor cores were done, and two GEMMs in flight take turns on them. "
        "Where several CTAs share an SM, one is shown. `slowdown`: what reading the clock costs, over a whole launch.",
        markdown_table(["kernel", *headings], rows),
    ]
    for recording in report.recordings:
        variant = VARIANTS.get(recording.variant)
        parts += [f"## {recording.title}", variant.differs] if variant else [f"## {recording.title}"]
        parts += [f"![Each warpgroup at work, over clocks]({recording.figure})"]
    parts += ["## Method", method_text(head["method"])]
    return page(parts)
