"""Tables at 80 columns: no line is longer, no cell is cut, and what is left out is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from hopper_attention.cli_views import fp8_plan_view, machine_view, plan_view
from hopper_attention.experiments.ablation.results import load_ablation
from hopper_attention.experiments.ablation.tables import ablation_table
from hopper_attention.experiments.bench.compare import compare, compare_table
from hopper_attention.experiments.bench.machine import repository_root
from hopper_attention.experiments.bench.results import load_forward
from hopper_attention.experiments.bench.tables import forward_table, latency_table
from hopper_attention.experiments.bench.targets import latency_targets, throughput_targets
from hopper_attention.experiments.prepass.run import load_quantize, quantize_targets
from hopper_attention.experiments.prepass.tables import quantize_table
from hopper_attention.experiments.reports import load_figures
from hopper_attention.experiments.scaling.run import load_scaling
from hopper_attention.experiments.scaling.tables import scaling_table
from hopper_attention.experiments.tables import (
    Column,
    FittedTable,
    broken,
    figures,
    names,
    spare,
    target_table,
    texts,
)

WIDTH = 80
RESULTS = repository_root() / "benchmarks" / "results"


def text_of(renderable: RenderableType, width: int = WIDTH) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def committed(name: str) -> str:
    return (RESULTS / f"{name}_nvidia_h200.json").read_text(encoding="utf-8")


def forward(kind: str) -> Any:
    return load_forward(committed(kind), kind)


TABLES: dict[str, Callable[[], FittedTable]] = {
    "forward": lambda: forward_table(forward("forward")),
    "fp8": lambda: forward_table(forward("fp8")),
    "backward": lambda: forward_table(forward("backward")),
    "forward targets": lambda: target_table(throughput_targets(forward("forward"))),
    "fp8 targets": lambda: target_table(throughput_targets(forward("fp8"))),
    "backward targets": lambda: target_table(throughput_targets(forward("backward"))),
    "latency": lambda: latency_table(load_figures(committed("latency"), "latency")),
    "latency targets": lambda: target_table(latency_targets(load_figures(committed("latency"), "latency"))),
    "scaling": lambda: scaling_table(load_scaling(committed("scaling"))),
    "prepass": lambda: quantize_table(load_quantize(committed("prepass"))),
    "prepass targets": lambda: target_table(quantize_targets(load_quantize(committed("prepass")))),
    "ablation": lambda: ablation_table(load_ablation(committed("ablation"))),
    "compare": lambda: compare_table(compare(committed("forward"), committed("forward"))),
    "compare latency": lambda: compare_table(compare(committed("latency"), committed("latency"))),
}


def plain(cell: str | Text) -> str:
    return (Text.from_markup(cell) if isinstance(cell, str) else cell).plain


@pytest.mark.parametrize("width", [WIDTH, 100, 120, 200])
@pytest.mark.parametrize("name", TABLES)
def test_no_table_of_a_committed_report_is_cut(name: str, width: int) -> None:
    table = TABLES[name]()
    text = text_of(table, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    last = lines[-1]
    left_out = last if last.startswith("No room") else ""
    shown = "".join(text.split())
    for index, column in enumerate(table.columns):
        if column.is_spare and column.heading in left_out:
            continue
        for row in (row for rows in table.groups for row in rows):
            cell = plain(row[index])
            # A cell that does not wrap stands in one line as it is; one that does has all of its words.
            found = any(cell in line for line in lines)
            assert found if not column.wraps else all(word[:12] in shown for word in cell.split()), cell


def test_a_wide_terminal_shows_everything() -> None:
    for name, make in TABLES.items():
        assert "No room" not in text_of(make(), 200), name


def test_spare_columns_go_one_by_one_from_the_last() -> None:
    columns = (*names("problem"), *figures("TFLOP/s"), *spare(*figures("MHz", "W")))
    table = FittedTable("Speed", columns, [[("bf16-b1-s128", "402", "1965", "171")]])
    assert "No room" not in text_of(table, 40)
    # 12 + 7 + 4 + 3 columns and a space between each two.
    assert "No room" not in text_of(table, 29)
    assert "No room at this width for: W." in " ".join(text_of(table, 28).split())
    assert "1965" in text_of(table, 28) and "171" not in text_of(table, 28)
    narrow = text_of(table, 22)
    assert "402" in narrow and "1965" not in narrow and "MHz, W" in " ".join(narrow.split())


def test_words_take_several_lines_and_the_longest_cells_get_the_room() -> None:
    table = FittedTable(
        "", texts("what", "why"), [[("one two three", "short"), ("four", "a b c d e f g h i j")]]
    )
    lines = [line.split("  ") for line in text_of(table, 24).splitlines() if line.strip()]
    assert max(len("  ".join(line)) for line in lines) <= 24
    assert "one two" in text_of(table, 24) and "…" not in text_of(table, 24)


def test_a_word_without_room_is_broken_but_whole() -> None:
    word = "a" * 100
    text = text_of(FittedTable("", texts("what"), [[(word,)]]), 30)
    assert text.count("a") >= 100 and max(map(len, text.splitlines())) <= 30


def test_a_rule_stands_between_groups_and_markup_has_no_width() -> None:
    table = FittedTable("", names("who"), [[("[red]a[/red]",)], [("b",)]])
    lines = [line.strip() for line in text_of(table).splitlines()]
    assert lines.index("b") - lines.index("a") == 2
    assert Column("x").is_left is False


@pytest.mark.parametrize(
    ("heading", "width", "lines"),
    [
        ("ours_two_level", 4, ["ours_", "two_", "level"]),
        ("call and wait", 5, ["call", "and", "wait"]),
        ("call and wait", 8, ["call and", "wait"]),
        ("TFLOP/s", 3, ["TFLOP/s"]),
        ("kernel over\nemulation", 5, ["kernel", "over", "emulation"]),
        ("", 4, [""]),
    ],
)
def test_headings_are_broken_at_spaces_and_underscores(
    heading: str, width: int, lines: Sequence[str]
) -> None:
    assert broken(heading, width).split("\n") == list(lines)


# info and explain


def test_info_at_80_columns_is_whole() -> None:
    from hopper_attention.machine import describe_machine

    folder = "/" + "/".join(["a long name of a folder", "x" * 90, "kernels"])
    machine = replace(describe_machine(), cache_dir=folder)
    text = text_of(machine_view(machine))
    assert max(map(len, text.splitlines())) <= WIDTH and "…" not in text
    assert "".join(folder.split()) in "".join(text.split())


@pytest.mark.parametrize("capability", [(9, 0), (8, 6), (7, 5)])
def test_explain_at_80_columns_is_whole(capability: tuple[int, int]) -> None:
    import torch

    from hopper_attention import explain, explain_fp8

    q = torch.empty(1, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
    plan = explain(q, q, q, device_capability=capability)
    fp8 = explain_fp8(q, q, q, device_capability=capability)
    for text, name, reason in (
        (text_of(plan_view(plan)), plan.config.name, plan.reason),
        (text_of(fp8_plan_view(fp8)), fp8.attention.config.name, fp8.quantizer_reason),
    ):
        assert max(map(len, text.splitlines())) <= WIDTH and "…" not in text
        shown = "".join(text.split())
        assert name in shown and "".join(reason.split()) in shown
