"""PTX of kernels for tests."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hopper.compile import compile_kernel
from tests.store import kept

NOT_ASSEMBLED = "stop-before-assembling"
"""No option of ptxas, which refuses it once the PTX is written. Its work is a third of a compilation."""


def compile_ptx(config: Any) -> str:
    """The PTX of the kernel of ``config``, compiled now."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            compile_kernel(config, f"--keep-ptx --dump-dir {folder} --ptxas-options '--{NOT_ASSEMBLED}'")
        except Exception as error:  # the DSL has no public type for it
            if NOT_ASSEMBLED not in str(error):
                raise
        (path,) = Path(folder).glob("*.ptx")
        return path.read_text()


@cache
def ptx_of(config: Any) -> str:
    """The same, compiled once for all workers and runs of the tests. Not for kernels that a test has patched."""
    return kept("ptx", config, compile_ptx)
