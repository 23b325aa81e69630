"""What benchmarks/machine_code.py reads of a listing of nvdisasm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import machine_code

FIRST = "hopper_fwd_bf16_d64_full_m192n128s3_r160_32_nopingpong"

BLOCK = (
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT",
    "MUFU.EX2 R4, R5",
    "@P0 FADD.FTZ R6, R7, R8.reuse",
)


def listing(block: tuple[str, ...] = BLOCK) -> str:
    """A loop over tiles with one over blocks in it, in which something is awaited, and behind both what is seldom done,
    from where it goes back into the inner loop."""
    parts = [
        '\t.section\t.text.attention,"ax",@progbits',
        ".L_x_0:",
        "S2R R0, SR_TID.X",
        ".L_x_1:",
        ".L_x_2:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R9",
        "@!P1 BRA `(.L_x_2)",
        *block,
        ".L_x_3:",
        "@P2 BRA `(.L_x_4)",
        "@P0 BRA `(.L_x_1)",
        "STG.E desc[UR6][R2.64], R3",
        "@P3 BRA `(.L_x_0)",
        "EXIT",
        ".L_x_4:",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24",
        "BRA `(.L_x_3)",
        ".L_x_5:",
        "BRA `(.L_x_5)",
    ]
    at, lines = 0, []
    for part in parts:
        if part.startswith((".L", "\t")):
            lines.append(part)
        else:
            lines.append(f"        /*{at:04x}*/                   {part} ;")
            at += 16
    return "\n".join(lines) + "\n"


def test_the_loop_around_blocks_is_found_alone() -> None:
    (loop,) = machine_code.loops_of(listing())
    assert loop.instructions[0].startswith("SYNCS") and loop.instructions[-1] == "@P0 BRA `(.L_x_1)"
    assert loop.wgmmas == 1 and len(loop.instructions) == 7
    assert loop.described() == {
        "instructions": 7,
        "opcodes": {"BRA": 3, "SYNCS": 1, "HGMMA": 1, "MUFU": 1, "FADD": 1},
    }
    assert machine_code.loops_of(listing(BLOCK[1:])) == []


def test_registers_and_places_make_no_difference() -> None:
    (loop,) = machine_code.loops_of(listing())
    renamed = tuple(x.replace("R4", "R44").replace(".reuse", "").replace("@P0", "@P5") for x in BLOCK)
    (same,) = machine_code.loops_of(listing(renamed).replace(".L_x_", ".L_y_"))
    assert loop.likeness(same) == 1.0 and loop.opcodes == same.opcodes
    (swapped,) = machine_code.loops_of(listing((BLOCK[0], BLOCK[2], BLOCK[1])))
    assert loop.likeness(swapped) == pytest.approx(6 / 7) and loop.opcodes == swapped.opcodes


def test_opcodes_of_predicated_instructions() -> None:
    assert machine_code.opcode_of("@!UP0 UIADD3 UR4, UR4, 0x1, URZ") == "UIADD3"
    assert machine_code.opcode_of("@!PT LDS RZ, [RZ]") == "LDS"
    assert machine_code.alike("@P1 BRA `(.L_x_12)") == "@P BRA #"


def test_what_is_other_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (loop,) = machine_code.loops_of(listing())
    (longer,) = machine_code.loops_of(listing((*BLOCK, "MOV R1, R2")))
    assert machine_code.compare(0, longer, loop) == {"opcodes": {"MOV": (0, 1)}, "likeness": 0.933}
    assert machine_code.compare(1, loop, loop) == {"opcodes": {}, "likeness": 1.0}
    first, second = capsys.readouterr().out.splitlines()
    assert first == "loop 0: MOV 0 to 1; 0.933 of the order is kept"
    assert second == "loop 1: the same instructions; 1.0 of the order is kept"


def test_a_kernel_is_chosen_by_a_part_of_its_name() -> None:
    assert machine_code.choose("bf16_d96_full_m128n192").head_dim == 96
    # Others go on behind it.
    assert machine_code.choose(FIRST).name == FIRST
    with pytest.raises(ValueError, match=r"kernel is 'd64', which \d+ kernels have .* \.\.\.\), allowed"):
        machine_code.choose("d64")
    with pytest.raises(ValueError, match=r"kernel is 'd65', which 0 kernels have in their name \(none\)"):
        machine_code.choose("d65")


def test_a_report_and_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_code, "disassemble", lambda config, program: listing())
    kept, report = tmp_path / "kept.txt", tmp_path / "report.json"
    base = [FIRST, "--nvdisasm", sys.executable]
    machine_code.main([*base, "--keep", str(kept), "--listing"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{FIRST}: 1 loops around key blocks"
    assert printed[1].startswith("loop 0: 7 instructions, 1 WGMMAs; 3 BRA") and len(printed) == 9
    machine_code.main([*base, "--against", str(kept), "--json", str(report), "--loop", "0"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("1.0 of the order is kept")
    written = json.loads(report.read_text())
    assert written["kernel"] == FIRST and written["against"] == [{"opcodes": {}, "likeness": 1.0}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nvdisasm", "no-such-program"], "--nvdisasm is 'no-such-program', which is no program here"),
        (["--against", "/no/file"], "--against is '/no/file', allowed: a file that --keep has written"),
        (["--loop", "1"], f"--loop is 1, allowed for {FIRST}: 0 to 0"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine_code, "disassemble", lambda config, program: listing())
    with pytest.raises(SystemExit):
        machine_code.main([FIRST, "--nvdisasm", sys.executable, *arguments])
    assert message in capsys.readouterr().err
