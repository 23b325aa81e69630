"""Rotates queries and keys by their positions on a GPU, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from cute_kernels.problem import MAX_TILES
from cute_kernels.rotation.config import VECTOR, RotationConfig
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.autocast import ignores_autocast
from hopper_attention.backends import target_of, why_not_ampere
from hopper_attention.checks import DTYPE_NAMES
from hopper_attention.launch.base import REMEMBERED_LAUNCHERS, Launcher, index_of
from hopper_attention.layout import contiguous_copy, lies_in_vectors

TABLE_NAMES = DTYPE_NAMES | {torch.float32: "float32"}


class Angles(NamedTuple):
    """Cosines and sines of the two columns of each pair, (batch, seqlen, rotary_dim / 2) each."""

    low_cos: Tensor
    low_sin: Tensor
    high_cos: Tensor
    high_sin: Tensor

    @property
    def transposed(self) -> Angles:
        """Those which, with the other sign, have the transpose of the matrix that these have."""
        return Angles(self.low_cos, self.high_sin, self.high_cos, self.low_sin)


@dataclass(frozen=True)
class RotationLauncher(Launcher):
    """Rotates tensors of one dtype, of all sizes."""

    config: RotationConfig
    kernel: Kernel

    def __call__(self, q: Tensor, k: Tensor, angles: Angles, sign: float) -> tuple[Tensor, Tensor]:
        """As ``rotate``, of tensors that the kernel can address."""
        if self.device_index != torch.cuda.current_device():
            there: tuple[Tensor, Tensor] = self.call_there(q, k, angles, sign)
            return there
        new_q, new_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        self.kernel(q, k, *angles, new_q, new_k, sign)
        return new_q, new_k


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(dtype: torch.dtype, table_dtype: torch.dtype, device: torch.device) -> RotationLauncher | None:
    """The launcher, or None where there is no kernel; compiles or loads it the first time."""
    target = target_of(device)
    if dtype not in DTYPE_NAMES or table_dtype not in TABLE_NAMES or why_not_ampere(target):
        return None
    major, minor = target.capability
    names = DTYPE_NAMES[dtype], TABLE_NAMES[table_dtype]
    config = RotationConfig(ARCH_OF_CAPABILITY[major, minor], *names)
    return RotationLauncher(index_of(device), config, compile_cache.get_serving(config))


def rotate(q: Tensor, k: Tensor, angles: Angles, sign: float) -> tuple[Tensor, Tensor]:
    """Q and K rotated, new contiguous tensors, in float32 and rounded once: by the kernel where there is one.

    Args:
        q, k: (batch, seqlen, heads, head_dim) and (..., kv_heads, head_dim), of one dtype.
        angles: of one dtype, rotary_dim at most head_dim.
        sign: of the sines, 1.0 or -1.0.
    """
    launcher = find(q.dtype, angles.low_cos.dtype, q.device)
    if launcher is None or not _fits(q, k, angles):
        return _rotate_one(q, angles, sign), _rotate_one(k, angles, sign)
    tables = Angles(*map(_addressable, angles))
    return launcher(_addressable(q), _addressable(k), tables, sign)


def _fits(q: Tensor, k: Tensor, angles: Angles) -> bool:
    """Whether the kernel can do it once tensors are copied that lie badly."""
    in_vectors = not q.shape[3] % VECTOR and not angles.low_cos.shape[2] % VECTOR
    return in_vectors and all(0 < x.numel() // VECTOR < MAX_TILES for x in (q, k))


def _addressable(x: Tensor) -> Tensor:
    return x if lies_in_vectors(x, VECTOR) else contiguous_copy(x)


@ignores_autocast
def _rotate_one(x: Tensor, angles: Angles, sign: float) -> Tensor:
    """In plain torch, on any device; what is not float64 in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    low_cos, low_sin, high_cos, high_sin = (table.to(wide)[:, :, None] for table in angles)
    half = low_cos.shape[3]
    low, high = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
    turned = low * low_cos - high * low_sin * sign, high * high_cos + low * high_sin * sign
    return torch.cat((*(part.to(x.dtype) for part in turned), x[..., 2 * half :]), -1)
