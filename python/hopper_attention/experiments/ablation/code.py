"""What the assembler made of a kernel, read from its compiled object: the very code that is timed.

The object of a kernel holds its cubin, an ELF file, whose ``.nv.info`` sections say how many registers and how much
stack a thread has. Instructions are counted in the disassembly, where ``nvdisasm`` is installed.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from hopper.config import ForwardConfig
from hopper_attention.compile_cache import cached_kernels, read_entry

NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"
INSTALL_NVDISASM = f"pip install {NVDISASM_PACKAGE}"

ELF_MAGIC = b"\x7fELF"
EM_CUDA = 190
NO_BITS = 8
"""Type of a section that takes no room in the file."""

NV_INFO = 0x7000_0000
REGISTER_COUNT, FRAME_SIZE = 0x2F, 0x11
"""Attributes of ``.nv.info``: registers a thread, and bytes of its stack, which is where spills go."""

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.M)
GROUPS = {
    "wgmma": re.compile(r"(H|Q)GMMA\b"),
    "exp2": re.compile(r"MUFU\.EX2\b"),
    "mufu": re.compile(r"MUFU\b"),
    "spill": re.compile(r"(STL|LDL)\b"),
    "all": re.compile(r""),
}
"""What is counted, by the names of the instructions in it; ``mufu`` includes ``exp2``."""


@dataclass(frozen=True)
class MachineCode:
    """A kernel's resources a thread, bytes of shared memory a CTA, and instructions by group (none: not counted).

    ``registers`` is what the kernel is launched with; ``setmaxnreg`` redistributes it between the roles.
    ``stack_bytes`` above 0 means that something was spilled or indexed in memory.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: dict[str, int]


def inspect_object(data: bytes, shared_bytes: int) -> MachineCode:
    """Read a kernel's object file.

    Raises:
        ValueError: there is no single cubin in it, or the cubin does not say what it needs.
    """
    cubin = find_cubin(data)
    attributes = kernel_attributes(cubin)
    missing = {REGISTER_COUNT, FRAME_SIZE} - set(attributes)
    if missing:
        raise ValueError(f"the cubin has no attributes {sorted(missing)} in .nv.info")
    counts = count_instructions(disassemble(cubin)) if find_nvdisasm() else {}
    return MachineCode(attributes[REGISTER_COUNT], attributes[FRAME_SIZE], shared_bytes, counts)


def find_cubin(data: bytes) -> bytes:
    """The cubin inside an object file.

    Raises:
        ValueError: there is none, or more than one.
    """
    starts = [match.start() for match in re.finditer(re.escape(ELF_MAGIC), data)]
    machines = {start: struct.unpack_from("<H", data, start + 18)[0] for start in starts}
    cubins = [start for start, machine in machines.items() if machine == EM_CUDA]
    if len(cubins) != 1:
        raise ValueError(f"expected one cubin in the object, found {len(cubins)}")
    tail = data[cubins[0] :]
    return tail[: elf_size(tail)]


@dataclass(frozen=True)
class Section:
    """A section header of an ELF file."""

    kind: int
    offset: int
    size: int


def sections(elf: bytes) -> list[Section]:
    (offset,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count = struct.unpack_from("<HH", elf, 58)
    headers = (struct.unpack_from("<IIQQQQ", elf, offset + i * entry_bytes) for i in range(count))
    return [Section(header[1], header[4], header[5]) for header in headers]


def elf_size(elf: bytes) -> int:
    """Bytes of an ELF file that starts here and may be followed by others."""
    program_headers, section_headers = struct.unpack_from("<QQ", elf, 32)
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from("<HHHH", elf, 54)
    ends = [section.offset + section.size for section in sections(elf) if section.kind != NO_BITS]
    ends += [program_headers + program_bytes * program_count, section_headers + section_bytes * section_count]
    return max(ends)


def kernel_attributes(cubin: bytes) -> dict[int, int]:
    """Attributes of the cubin's kernel in ``.nv.info`` that hold one number, the largest where there are several."""
    found: dict[int, int] = {}
    for section in sections(cubin):
        if section.kind == NV_INFO:
            position, end = section.offset, section.offset + section.size
            while position < end:
                form, attribute, size = struct.unpack_from("<BBH", cubin, position)
                if form == 4 and size == 8:  # (symbol, value); the other forms have no size or no symbol
                    value = struct.unpack_from("<I", cubin, position + 8)[0]
                    found[attribute] = max(found.get(attribute, 0), value)
                position += 4 + (size if form == 4 else 0)
    return found


@lru_cache(maxsize=1)
def find_nvdisasm() -> str:
    """Path of the disassembler: of the pip package, or on the PATH; empty if there is none."""
    try:
        files = metadata.files(NVDISASM_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [str(file.locate()) for file in files if file.name == "nvdisasm"]
    return found[0] if found else shutil.which("nvdisasm") or ""


def disassemble(cubin: bytes) -> str:
    """The machine code as text.

    Raises:
        OSError: the disassembler cannot be run, or refuses the cubin.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [find_nvdisasm(), "-c", str(path)]
        reply = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if reply.returncode:
        raise OSError(f"nvdisasm failed: {reply.stderr.strip()[:300]}")
    return reply.stdout


def count_instructions(sass: str) -> dict[str, int]:
    """Instructions in the text of a disassembly, by group."""
    names = Counter(INSTRUCTION.findall(sass))
    return {
        group: sum(count for name, count in names.items() if pattern.match(name))
        for group, pattern in GROUPS.items()
    }


def inspect_config(config: ForwardConfig) -> MachineCode:
    """What the compile cache holds of a config, which must have been compiled.

    Raises:
        OSError: the cache has no such kernel.
        ValueError: its object cannot be read.
    """
    paths = [path for path in cached_kernels() if path.stem == config.name]
    if not paths:
        raise OSError(f"the kernel cache has no {config.name}")
    return inspect_object(read_entry(paths[0]), config.smem_bytes)
