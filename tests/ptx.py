"""PTX of kernels for tests, kept under ``.pytest_cache`` for all workers and later runs."""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hopper.compile import compile_kernel, module_of
from tests.shipped_usage import fingerprint

FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "ptx"
KEPT_SECONDS = 7 * 24 * 3600

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
    """The same, from the store if these sources were compiled before. Not for kernels that a test has patched."""
    key = hashlib.sha256(f"{fingerprint(module_of(config))} {config.name}".encode()).hexdigest()
    path = FOLDER / key
    with _locked(key):
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_bytes(zlib.compress(compile_ptx(config).encode(), 1))
            partial.rename(path)
        return zlib.decompress(path.read_bytes()).decode()


@contextmanager
def _locked(key: str) -> Iterator[None]:
    """No other process compiles the same kernel meanwhile."""
    _clean_up()
    with (FOLDER / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _clean_up() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.iterdir():
        if path.stat().st_mtime < time.time() - KEPT_SECONDS:
            path.unlink(missing_ok=True)
