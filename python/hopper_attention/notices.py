"""Warnings that are given once a process."""

from __future__ import annotations

import warnings
from functools import lru_cache


@lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Warn with ``message`` unless this process has already done so."""
    # The caller of the public function is some frames up, and how many depends on the path taken.
    warnings.warn(message, stacklevel=3)
