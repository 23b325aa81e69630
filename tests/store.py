"""What tests make of kernels, kept under ``.pytest_cache`` for all workers and later runs."""

from __future__ import annotations

import fcntl
import hashlib
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hopper.compile import module_of
from tests.shipped_usage import fingerprint

FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "kernels"
KEPT_SECONDS = 7 * 24 * 3600


def kept(kind: str, config: Any, make: Callable[[Any], str]) -> str:
    """``make(config)``, or what it gave before for the kernel of ``config`` if that is made of these sources; ``kind``
    says what it is. Not for kernels that a test has patched."""
    key = hashlib.sha256(f"{kind} {fingerprint(module_of(config))} {config.name}".encode()).hexdigest()
    path = FOLDER / key
    with _locked(key):
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_bytes(zlib.compress(make(config).encode(), 1))
            partial.rename(path)
        return zlib.decompress(path.read_bytes()).decode()


@contextmanager
def _locked(key: str) -> Iterator[None]:
    """No other process makes the same meanwhile."""
    _clean_up(FOLDER)
    with (FOLDER / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _clean_up(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.stat().st_mtime < time.time() - KEPT_SECONDS:
            path.unlink(missing_ok=True)
