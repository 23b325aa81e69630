"""What a GPU can do with a workload, and workloads by name. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from hopper_attention.experiments.roofline.units import HBM_BYTES_PER_S

H200 = "H200"

PEAK_FLOPS = 989e12
"""Of an H100 SXM or an H200 in 16 bits, a second."""

PEAK_FP8_FLOPS = 2 * PEAK_FLOPS

COPY_BYTES = 4.25e12
"""What a copy moves on an H200, a second."""


class AnyWorkload(Protocol):
    """A workload, as far as its figures go."""

    @property
    def name(self) -> str: ...

    def limit_us(self, gpu: str = H200) -> float: ...


WorkloadT = TypeVar("WorkloadT", bound=AnyWorkload)


def bytes_of(dtype: str) -> int:
    """Of an element of 16 or 32 bits."""
    return 4 if dtype == "float32" else 2


def copy_bytes(gpu: str) -> float:
    """What a copy moves a second on the GPU of a name: on others than an H200 the same share of what the data sheet
    says of their memory; on those that are not known as on an H200."""
    known = next((name for name in HBM_BYTES_PER_S if name in gpu), H200)
    return COPY_BYTES * HBM_BYTES_PER_S[known] / HBM_BYTES_PER_S[H200]


def limit_us_of(flops: float, moved_bytes: float, is_fp8: bool, gpu: str) -> float:
    """Microseconds below which a GPU cannot go: the larger of operations and bytes at their peak rates. Reading alone
    can be some percent faster than a copy, whose rate this is."""
    peak = PEAK_FP8_FLOPS if is_fp8 else PEAK_FLOPS
    return 1e6 * max(flops / peak, moved_bytes / copy_bytes(gpu))


def limit_method(gpu: str) -> str:
    """What ``limit_us_of`` is, for a report's method."""
    return (
        f"the larger of FLOP over {PEAK_FLOPS * 1e-12:.0f} TFLOP/s, in FP8 twice that, and bytes over "
        f"{copy_bytes(gpu) * 1e-12:.2f} TB/s"
    )


def pick_workloads(pattern: str, workloads: Sequence[WorkloadT]) -> tuple[WorkloadT, ...]:
    """Those with ``pattern`` in their name, as a shell has it: ``*`` stands for anything, ``?`` for a character.

    Raises:
        ValueError: there is none.
    """
    found = tuple(workload for workload in workloads if fnmatchcase(workload.name, f"*{pattern}*"))
    if not found:
        names = ", ".join(workload.name for workload in workloads)
        raise ValueError(f"only is {pattern!r}, allowed: a part of a name, * for anything; names are {names}")
    return found
