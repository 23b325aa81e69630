"""Several copies of 16-bit tensors on a GPU in one launch, also into the memory of its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.copies.config import MOST_COPIES, VECTOR, CopiesConfig
from cute_kernels.problem import MAX_TILES
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import target_of, why_not_ampere
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of

ANY_CTAS = 1 << 16


@dataclass(frozen=True)
class CopiesLauncher(Launcher):
    """Makes so many copies of one dtype, of any sizes."""

    config: CopiesConfig
    kernel: Kernel

    def __call__(self, targets: Sequence[Tensor], sources: Sequence[Tensor], most_ctas: int) -> None:
        """As ``copy_all``, of tensors that the kernel can address; so many CTAs a copy, at most."""
        if self.device_index != torch.cuda.current_device():
            return self.call_there(targets, sources, most_ctas)
        self.kernel(*targets, *sources, most_ctas)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(dtype: torch.dtype, copies: int, device: torch.device) -> CopiesLauncher | None:
    """The launcher, or None where there is no kernel; compiles or loads it the first time."""
    target = target_of(device)
    if dtype not in DTYPE_NAMES or not 1 <= copies <= MOST_COPIES or why_not_ampere(target):
        return None
    major, minor = target.capability
    config = CopiesConfig(ARCH_OF_CAPABILITY[major, minor], DTYPE_NAMES[dtype], copies)
    return CopiesLauncher(index_of(device), config, compile_cache.get_serving(config))


def is_addressable(x: Tensor) -> bool:
    """Whether the rows of a tensor (a, b, n, w) can be moved in vectors."""
    *strides, last = x.stride()
    in_vectors = not any(n % VECTOR for n in (x.shape[-1], *strides))
    fits = 0 < x.numel() // VECTOR < MAX_TILES
    return last == 1 and in_vectors and fits and not x.data_ptr() % (VECTOR * x.element_size())


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, on torch's current stream; no target overlaps another.

    Args:
        targets, sources: (a, b, n, w), each target of its source's shape and dtype. In one launch where all have the
            same dtype of 16 bits and rows of whole vectors.
    """
    is_one = all(x.dtype == targets[0].dtype and is_addressable(x) for x in (*targets, *sources))
    copy_known(targets, sources, is_one)


def copy_known(
    targets: Sequence[Tensor], sources: Sequence[Tensor], are_addressable: bool, most_ctas: int = ANY_CTAS
) -> None:
    """``copy_all`` of tensors of which a caller knows whether they all have one dtype and are addressable.

    ``most_ctas``, of each copy, leave SMs to a kernel that runs beside this one.
    """
    first = targets[0]
    launcher = find(first.dtype, len(targets), first.device) if are_addressable else None
    if launcher is not None:
        launcher(targets, sources, most_ctas)
        return
    for into, x in zip(targets, sources, strict=True):
        into.copy_(x)
