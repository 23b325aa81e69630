"""What benchmarks/stalls.py reads of a profile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import stalls

COLUMNS = (
    "Address",
    "Source",
    "# Samples",
    "Instructions Executed",
    "stall_selected",
    "stall_wait",
    "stall_wait (Not Issued)",
)
ROWS = (
    ("0x0", "      LDC R1, c[0x0][0x28]", 9, 4, 1, 8, 8),
    ("0x10", "      HFMA2 R0, R0, R1, R2", 40, 100, 10, 30, 25),
    ("0x20", "@!P0  MOV R3, R4", 20, 100, 10, 10, 10),
    ("0x30", "@P1   BRA 0x10", 100, 99, 10, 0, 0),
)


def page(*rows: tuple[object, ...]) -> str:
    lines = [("Kernel Name", "attention"), COLUMNS, *rows]
    return "\n".join(",".join(f'"{x}"' for x in line) for line in lines) + "\n"


def test_the_inner_loop_and_its_cycles() -> None:
    ((name, instructions),) = stalls.read_kernels(page(*ROWS))
    loop = stalls.Loop.of(instructions)
    assert name == "attention" and len(instructions) == 4 and len(loop.instructions) == 3
    # Three instructions were met 30 times while they were issued, in 100 rounds: a cycle is a tenth of a sample.
    assert loop.rounds == 100 and loop.unit == pytest.approx(0.1)
    assert loop.by_reason == pytest.approx({stalls.OTHER: 9.0, "wait": 4.0, "selected": 3.0})
    assert list(loop.by_reason) == [stalls.OTHER, "wait", "selected"]
    assert loop.described() == {
        "instructions": 3,
        "moves": 1,
        "cycles": 16,
        "cycles_by_stall": {stalls.OTHER: 9.0, "wait": 4.0, "selected": 3.0},
    }


def test_two_kernels_and_what_is_said_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = stalls.read_kernels(page(*ROWS) + page(*ROWS[1:]))
    assert [len(instructions) for _, instructions in kernels] == [4, 3]
    stalls.print_loop("attention", stalls.Loop.of(kernels[1][1]), 1)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "attention: 3 instructions, 1 of them moves, 16 cycles"
    assert printed[1].split()[:2] == ["9", "no"] and "BRA" in printed[-1] and len(printed) == 5


def test_a_profile_without_samples_is_refused() -> None:
    rows = [(*row[:4], 0, *row[5:]) for row in ROWS]
    with pytest.raises(ValueError, match="the profile has no samples of a loop, allowed: one of a kernel"):
        stalls.Loop.of(stalls.read_kernels(page(*rows))[0][1])
    with pytest.raises(ValueError, match="no samples of a loop"):
        stalls.Loop.of([])


def test_a_profiler_that_fails_says_why(tmp_path: Path) -> None:
    failing = tmp_path / "ncu"
    failing.write_text(f"#!{sys.executable}\nimport sys\nprint('not here')\nsys.exit(3)\n")
    failing.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"ended with 3: not here"):
        stalls.run_profiler(str(failing), [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seqlen", "0"], "--seqlen is 0, allowed: 1 or more"),
        (["--ncu", "no-such-program"], "--ncu is 'no-such-program', which is no program here"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stalls.py", *arguments])
    with pytest.raises(SystemExit):
        stalls.main()
    assert message in capsys.readouterr().err
