"""What the assembler made of a kernel: registers, spills and stack, as ptxas reports them."""

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Any

from hopper.compile import compile_kernel

USED = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class ResourceUsage:
    """Per thread, except where it says otherwise.

    ``registers`` is what the kernel is launched with; ``setmaxnreg`` redistributes it between the roles.
    ``shared_bytes`` is shared memory of a CTA by the config's own account.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


def resource_usage(config: Any) -> ResourceUsage:
    """Compile ``config`` and read the assembler's report. Needs no GPU; takes seconds.

    Raises:
        RuntimeError: ptxas reported nothing that can be read.
    """
    # The report reaches Python's stderr among the DSL's remarks, and nowhere else.
    report = io.StringIO()
    with contextlib.redirect_stderr(report):
        compile_kernel(config, options="remarks{ptx}")
    return parse_ptxas(report.getvalue(), config.smem_bytes)


def parse_ptxas(report: str, shared_bytes: int) -> ResourceUsage:
    """The figures of a report of ``ptxas -v`` on one kernel."""
    used, spills = USED.findall(report), SPILLS.findall(report)
    if len(used) != 1 or len(spills) != 1:
        raise RuntimeError(
            f"expected ptxas to report on one kernel, found {len(used)} reports in: {report!r}"
        )
    stack, stores, loads = map(int, spills[0])
    return ResourceUsage(int(used[0]), stack, stores, loads, shared_bytes)
