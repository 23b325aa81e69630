"""Draws the tutorial's pictures: ``python docs/tutorial/drawings.py`` writes them beside this file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
INK, PALE, WHITE = "#222222", "#f3f1ec", "#ffffff"
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#dd9955")
MMA, SOFTMAX, COPY = "#4477aa", "#ee9966", "#228833"
STYLE = f"text {{font-family: sans-serif; text-anchor: middle; fill: {INK}}} rect {{stroke: {INK}}}"


class Drawing:
    """An SVG of boxes, texts and arrows."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self.parts = [f'<rect width="{width}" height="{height}" fill="{WHITE}"/>']

    def box(
        self, x: float, y: float, w: float, h: float, fill: str = PALE, text: str = "", size: int = 13
    ) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}"/>')
        if text:
            dark = fill not in (PALE, WHITE, COLOURS[1], COLOURS[3], COLOURS[6], SOFTMAX, COLOURS[7])
            lines = text.split("\n")
            for i, line in enumerate(lines):
                at = y + h / 2 + size * (0.35 + i - (len(lines) - 1) / 2)
                self.text(x + w / 2, at, line, size, WHITE if dark else INK)

    def text(
        self, x: float, y: float, text: str, size: int = 13, fill: str = INK, anchor: str = "middle"
    ) -> None:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        changes = "".join(
            f"{name}:{value};"
            for name, value, usual in (("fill", fill, INK), ("text-anchor", anchor, "middle"))
            if value != usual
        )
        style = f' style="{changes}"' if changes else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}"{style}>{escaped}</text>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float, text: str = "", up: float = 6) -> None:
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{INK}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )
        if text:
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - up, text, 12)

    def svg(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n'
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>\n<style>{STYLE}</style>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def draw_sm() -> Drawing:
    d = Drawing(860, 330)
    d.box(10, 20, 150, 290, WHITE)
    d.text(85, 40, "global memory, L2", 13)
    for i, name in enumerate(("Q", "K", "V", "O")):
        d.box(35, 60 + 62 * i, 100, 44, PALE, name, 15)
    d.box(290, 20, 240, 290, WHITE)
    d.text(410, 40, "shared memory", 13)
    d.box(310, 55, 200, 36, PALE, "Q: 2 × 64 rows; later O")
    d.text(410, 110, "rings of K and V, with mbarriers", 12)
    for i in range(2):
        d.box(310 + 102 * i, 120, 98, 56, COLOURS[1], f"K, stage {i}")
        d.box(310 + 102 * i, 182, 98, 56, COLOURS[3], f"V, stage {i}")
    d.box(310, 262, 200, 34, PALE, "mailbox: the next tile")
    d.arrow(138, 80, 306, 68, "TMA")
    d.arrow(138, 140, 306, 148, "TMA")
    d.arrow(138, 210, 306, 208, "TMA")
    d.arrow(306, 86, 140, 262, "")
    d.text(232, 256, "TMA, at the end", 12)
    d.box(640, 20, 205, 56, COPY, "producer warp, 24 registers:\nissues TMA, claims tiles", 12)
    for i in range(2):
        top = 92 + 112 * i
        d.box(640, top, 205, 100, WHITE)
        d.text(742, top + 18, f"consumer {i}: 240 registers", 12)
        d.box(650, top + 28, 58, 60, MMA, "S", 15)
        d.box(713, top + 28, 58, 60, SOFTMAX, "P", 15)
        d.box(776, top + 28, 60, 60, MMA, "O", 15)
        d.arrow(514, 150 + 40 * i, 646, top + 58, "WGMMA" if not i else "", 8)
    d.text(742, 322, "128 threads each; S, P, O in registers", 12)
    return d


def draw_swizzle() -> Drawing:
    d = Drawing(760, 330)
    for side, (title, swizzled) in enumerate((("as it is", False), ("swizzled: chunk XOR row", True))):
        left = 60 + 370 * side
        d.text(left + 148, 24, title, 14)
        for row in range(8):
            if not side:
                d.text(left - 8, 64 + 32 * row, f"row {row}", 12, anchor="end")
            for place in range(8):
                chunk = place ^ row if swizzled else place
                fill = COLOURS[chunk] if chunk == 2 else PALE
                d.box(left + 37 * place, 44 + 32 * row, 37, 32, fill, str(chunk), 13)
        d.text(left + 148, 318, "banks 0 to 31, four to a column", 12)
    return d


def draw_ring() -> Drawing:
    d = Drawing(820, 250)
    rows = ("producer", "TMA", "buffer 0", "buffer 1", "consumers")
    for i, name in enumerate(rows):
        d.text(84, 46 + 42 * i, name, 13, anchor="end")
        d.parts.append(f'<line x1="92" y1="{41 + 42 * i}" x2="810" y2="{41 + 42 * i}" stroke="#cccccc"/>')
    for n, start in enumerate((100, 186, 330, 480, 630)):
        d.box(start, 28, 34, 26, COPY, f"K{n}", 11)
        d.box(start + 36, 70, 84, 26, COLOURS[1], f"K{n} arrives", 11)
    for n, (start, end) in enumerate(((220, 330), (330, 480), (480, 630), (630, 770))):
        d.box(start, 196, end - start - 4, 26, MMA, f"read K{n}", 11)
        stage = n % 2
        arrived = (220, 306, 450, 600)[n]
        d.box(arrived, 112 + 42 * stage, end - arrived, 26, COLOURS[3], f"full: K{n}", 11)
    d.arrow(330, 196, 342, 56, "")
    d.arrow(480, 196, 492, 56, "")
    d.arrow(630, 196, 642, 56, "")
    d.text(450, 243, "empty: the producer may fill the stage again", 12)
    return d


def draw_layout() -> Drawing:
    d = Drawing(820, 250)
    d.text(
        410, 22, "16 rows of a warp, 16 columns of S: which lane holds which; lane 5 has the dark ones", 13
    )
    for row in range(16):
        for column in range(16):
            lane = 4 * (row % 8) + column % 8 // 2
            fill = COLOURS[0] if lane == 5 else (PALE if column % 4 < 2 else WHITE)
            d.box(60 + 28 * column, 34 + 13 * row, 28, 13, fill, str(lane), 9)
    for row in (0, 8, 15):
        d.text(52, 44 + 13 * row, str(row), 11, anchor="end")
    d.text(540, 70, "As an accumulator, and as operand A", 13, anchor="start")
    d.text(540, 90, "of the next product in 16 bits:", 13, anchor="start")
    for i, place in enumerate(("1, columns 2 3", "9, columns 2 3", "1, columns 10 11", "9, columns 10 11")):
        d.box(540, 104 + 28 * i, 250, 24, PALE, f"register {i}: row {place}", 12)
    return d


def draw_fp8_order() -> Drawing:
    d = Drawing(820, 200)
    d.text(10, 30, "held by lane 0 to 3 of S, keys:", 13, anchor="start")
    d.text(10, 184, "wanted of lane 0 to 3 as P, slots:", 13, anchor="start")
    for place in range(16):
        lane = place % 8 // 2
        d.box(20 + 48 * place, 42, 48, 30, COLOURS[lane], str(place), 13)
        d.box(20 + 48 * place, 132, 48, 30, COLOURS[place // 4], str(place), 13)
        key = 8 * (place % 4 // 2) + 2 * (place // 4) + place % 2
        d.arrow(44 + 48 * key, 74, 44 + 48 * place, 130)
    return d


def draw_overlap() -> Drawing:
    """By the program of the page that it stands on."""
    page = (FOLDER / "5-overlap.md").read_text()
    program = re.findall(r"^```python\n(.*?)^for case in", page, re.S | re.M)[0]
    names: dict[str, Any] = {}
    exec(program, names)
    cases = (
        ("two warpgroups, neither", (2, False, False)),
        ("ping-pong: two warpgroups, in turns", (2, False, True)),
        ("pipelining: one warpgroup", (1, True, True)),
    )
    d = Drawing(860, 430)
    top, scale = 24.0, 0.083
    for title, case in cases:
        d.text(20, top, title, 13, anchor="start")
        spans: dict[tuple[str, int], tuple[float, float]] = {}
        for what, wg, start, end in names["simulate"](*case, blocks=8):
            spans[what, wg] = spans.get((what, wg), (start, end))[0], end
        for wg in range(case[0]):
            for (what, of), (start, end) in spans.items():
                if of != wg or start * scale > 820:
                    continue
                is_softmax = what.startswith("softmax")
                y = top + 12 + 56 * wg + (24 if is_softmax else 0)
                width = min(end * scale, 830) - start * scale
                label = ("softmax " + what.split()[1] if is_softmax else what) if width > 20 else ""
                d.box(20 + start * scale, y, width, 20, SOFTMAX if is_softmax else MMA, label, 10)
        top += 26 + 56 * case[0] + 12
    d.text(
        20,
        420,
        "blue: on the tensor cores; where two are at once, each at half the speed",
        12,
        anchor="start",
    )
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "sm.svg": draw_sm,
    "swizzle.svg": draw_swizzle,
    "ring.svg": draw_ring,
    "layout.svg": draw_layout,
    "overlap.svg": draw_overlap,
    "fp8_order.svg": draw_fp8_order,
}


def draw_all() -> dict[str, str]:
    """Each file and what is in it."""
    return {name: draw().svg() for name, draw in DRAWINGS.items()}


if __name__ == "__main__":
    for name, text in draw_all().items():
        (FOLDER / name).write_text(text)
