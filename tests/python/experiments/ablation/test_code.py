"""The ablation's machine code: what is read from a compiled object and counted in its disassembly."""

from __future__ import annotations

import contextlib
import io
import struct

import pytest

from hopper.forward.tilings import select_forward_config
from hopper_attention.experiments.ablation import code as ablation_code
from hopper_attention.experiments.ablation.code import MachineCode

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
        /*0020*/                   HGMMA.64x176x16.F32 R24, gdesc[UR8], !UPT ;
        /*0030*/              @!P1 MUFU.EX2 R4, R4 ;
        /*0040*/             @!UP2 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0050*/                   MUFU.RCP R5, R5 ;
        /*0060*/                   STL [R1+0x4], R9 ;
        /*0070*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, R8, gdesc[UR8], R24 ;
.L_x_0:
        /*1080*/                   LDL.64 R8, [R1] ;
"""


def test_instructions_are_counted_by_group() -> None:
    counts = ablation_code.count_instructions(SASS)
    assert counts == {"wgmma": 2, "exp2": 1, "mufu": 2, "spill": 2, "all": 9}


def fake_elf(machine: int, info: bytes) -> bytes:
    """An ELF file with one .nv.info section behind its header."""
    section_table = 64 + len(info)
    header = (
        b"\x7fELF"
        + bytes(12)
        + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, section_table, 0, 64, 56, 0, 64, 1, 0)
    )
    section = struct.pack("<IIQQQQIIQQ", 0, ablation_code.NV_INFO, 0, 0, 64, len(info), 0, 0, 4, 0)
    return header + info + section


def attribute(code: int, value: int) -> bytes:
    return struct.pack("<BBHII", 4, code, 8, 6, value)


def test_registers_and_stack_are_read_from_the_cubin_in_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_code, "find_nvdisasm", lambda: "")
    skipped = struct.pack("<BBH", 3, 0x50, 7)
    info = skipped + attribute(0x2F, 168) + attribute(0x11, 48)
    cubin = fake_elf(190, info)
    data = fake_elf(62, b"") + b"host code" + cubin + b"more of the host's"
    assert ablation_code.find_cubin(data) == cubin
    assert ablation_code.inspect_object(data, 1000) == MachineCode(168, 48, 1000, {})
    with pytest.raises(ValueError, match="expected one cubin in the object, found 0"):
        ablation_code.find_cubin(fake_elf(62, b""))
    with pytest.raises(ValueError, match="expected one cubin in the object, found 2"):
        ablation_code.find_cubin(cubin + cubin)
    with pytest.raises(ValueError, match=r"has no attributes \[17\]"):
        ablation_code.inspect_object(fake_elf(190, attribute(0x2F, 168)), 0)


def test_a_real_kernel_reads_as_ptxas_reported_it() -> None:
    from hopper.forward.compile import compile_forward
    from hopper.inspection import parse_ptxas
    from hopper.object_code import export_object

    config = select_forward_config("bfloat16", 64, 64, True, 512)
    report = io.StringIO()
    with contextlib.redirect_stderr(report):
        compiled = compile_forward(config, options="--gpu-arch sm_90a remarks{ptx}")
    usage = parse_ptxas(report.getvalue(), config.smem_bytes)
    code = ablation_code.inspect_object(export_object(compiled, config.name), config.smem_bytes)
    assert (code.registers, code.stack_bytes, code.shared_bytes) == (
        usage.registers, usage.stack_bytes, usage.shared_bytes,
    )  # fmt: skip
    if ablation_code.find_nvdisasm():
        # Three blocks: the first, and one in each loop, with and without a mask; 64 / 16 and 128 / 16 steps.
        assert code.instructions["wgmma"] == 3 * (64 // 16 + config.tile_n // 16)
        assert code.instructions["exp2"] >= 3 * 64 * config.tile_n // 128
        assert code.instructions["spill"] == 0
