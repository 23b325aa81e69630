"""What the kernel that makes codes of e4m3 wider is built from, as data. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from hopper.forward.fp8.config import WIDE_CODES_DTYPE

VECTOR = 8
"""Codes of a thread: 8 bytes, which become 16, so that a warp writes whole sectors."""

AT_A_TIME = 8
"""Vectors that a thread has under way together."""

THREADS = 256
VECTORS_OF_CTA = THREADS * AT_A_TIME
MAX_VECTORS = 2**31 - 2**16
"""Of Q, and of K."""


@dataclass(frozen=True)
class WidenConfig:
    """There is one kernel."""

    @property
    def smem_bytes(self) -> int:
        """None."""
        return 0

    @property
    def name(self) -> str:
        """Unique among kernels."""
        return f"hopper_widen_{WIDE_CODES_DTYPE}"
