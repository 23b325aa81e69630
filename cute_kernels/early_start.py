"""Programmatic dependent launch: CTAs of a kernel that start while the kernel in front of it still runs."""

FIRST_WITH_EARLY_STARTS = 90
"""Compute capability of the first GPUs on which a kernel may start early, times 10."""


def starts_early_on(arch: str) -> bool:
    """Whether kernels compiled for ``arch`` ("sm_90a") may start early."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= FIRST_WITH_EARLY_STARTS
