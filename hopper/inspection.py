"""What the assembler made of a kernel: registers, spills and stack, as ptxas reports them, and its machine code."""

import contextlib
import hashlib
import io
import re
import struct
import tempfile
from dataclasses import dataclass, replace
from typing import Any

from hopper.compile import compile_kernel

USED = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

CODE_SECTIONS = re.compile(rb"\.(text|nv\.constant\d+)\.")
"""Names of the sections of a cubin with instructions, and with the constants that they read; a symbol follows."""

DIGEST_LETTERS = 16


@dataclass(frozen=True)
class ResourceUsage:
    """Per thread, except where it says otherwise.

    ``registers`` is what the kernel is launched with; ``setmaxnreg`` redistributes it between the roles.
    ``shared_bytes`` is shared memory of a CTA by the config's own account. ``code`` is a digest of the machine code,
    the same for two kernels exactly where their instructions are; empty where only a report was read.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    code: str = ""

    @property
    def local_bytes(self) -> int:
        """Of memory that stands for registers: the stack, and what is spilled and read back."""
        return self.stack_bytes + self.spill_store_bytes + self.spill_load_bytes

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


def resource_usage(config: Any) -> ResourceUsage:
    """Compile ``config``, read the assembler's report and digest the machine code. Needs no GPU; takes seconds.

    Raises:
        RuntimeError: ptxas reported nothing that can be read.
    """
    # The report reaches Python's stderr among the DSL's remarks, and nowhere else.
    report = io.StringIO()
    # The cubin passes through a file named after the kernel's class: side by side, two processes would mix up theirs.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(report):
        compiled = compile_kernel(config, options=f"remarks{{ptx}} --keep-cubin --dump-dir={folder}")
        cubin = compiled.__cubin__
    usage = parse_ptxas(report.getvalue(), config.smem_bytes)
    return replace(usage, code=digest_of_code(cubin))


def parse_ptxas(report: str, shared_bytes: int) -> ResourceUsage:
    """The figures of a report of ``ptxas -v``; of several kernels that one call launches, the largest of each."""
    used, spills = USED.findall(report), SPILLS.findall(report)
    if not used or len(used) != len(spills):
        raise RuntimeError(
            f"expected ptxas to report on a kernel or more, found {len(used)} reports in: {report!r}"
        )
    stack, stores, loads = (max(map(int, of_each)) for of_each in zip(*spills, strict=True))
    return ResourceUsage(max(map(int, used)), stack, stores, loads, shared_bytes)


def digest_of_code(cubin: bytes) -> str:
    """Of the instructions and constants of a cubin, a 64-bit ELF file, whatever its symbols are called.

    Raises:
        RuntimeError: it has no instructions.
    """
    sections = [
        (match[1], data) for name, data in _sections(cubin).items() if (match := CODE_SECTIONS.match(name))
    ]
    if not any(kind == b"text" for kind, _ in sections):
        raise RuntimeError(f"found no machine code in a cubin of {len(cubin)} bytes")
    digest = hashlib.sha256()
    for kind, data in sorted(sections):
        digest.update(b"%s %d " % (kind, len(data)) + data)
    return digest.hexdigest()[:DIGEST_LETTERS]


def _sections(elf: bytes) -> dict[bytes, bytes]:
    """Contents of a 64-bit ELF file by the name of their section."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<3H", elf, 0x3A)
    # Of each header: where its name starts, and where and how long its contents are.
    headers = [
        (*struct.unpack_from("<I", elf, at), *struct.unpack_from("<2Q", elf, at + 0x18))
        for at in range(table, table + size * count, size)
    ]
    names = headers[names_index][1]
    return {
        elf[names + name : elf.index(b"\0", names + name)]: elf[offset : offset + length]
        for name, offset, length in headers
    }
