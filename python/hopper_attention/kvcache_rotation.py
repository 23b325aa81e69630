"""The rotation of keys in a cache that spreads their outliers over head_dim: fixed signs and a Hadamard matrix.

It follows rotary embedding, and queries get the same one, so that scores do not change. Its signs never do, as a cache
outlives a call.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.append.config import has_minus
from hopper.quantize.config import hadamard_blocks
from hopper_attention import device_memory
from hopper_attention.autocast import without_autocast
from hopper_attention.checks import FP8_DTYPE
from hopper_attention.reference.append import rounded
from hopper_attention.rotation import hadamard_of_blocks


def rotate_keys(x: Tensor) -> Tensor:
    """x diag(signs) H, float32, along the last dimension of x (..., head_dim): what ``hadamard=True`` does to keys.

    H is the normalised Hadamard matrix, or one for each power of two in head_dim, the largest first. For a cache that
    is filled by other means: rotate, then divide by the scale and round.
    """
    return hadamard_of_blocks(x.float() * _signs_on(x.shape[-1], x.device))


def rotate_queries_alike(q: Tensor) -> Tensor:
    """``rotate_keys`` of queries, rounded once to their dtype; of 16 bits a product with the matrix, which is exact as
    its factor is taken apart."""
    if q.dtype == FP8_DTYPE or not q.is_cuda or not q.numel():
        return rounded(rotate_keys(q), q.dtype)
    size, rows, parts, start = q.shape[-1], q.reshape(-1, q.shape[-1]), [], 0
    matrix = _on_device(size, q.dtype, q.device)
    with without_autocast(q.device):
        for part in rows.split(hadamard_blocks(size), -1):
            columns = slice(start, start + part.shape[-1])
            factor = 1.0 / math.sqrt(part.shape[-1])
            # With a beta of 0 the first argument only has a dtype.
            parts.append(torch.addmm(part[:1], part, matrix[columns, columns], beta=0, alpha=factor))
            start += part.shape[-1]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).view(q.shape)


@lru_cache(maxsize=64)
def _numbers(head_dim: int) -> tuple[float, ...]:
    return tuple(-1.0 if has_minus(column) else 1.0 for column in range(head_dim))


def _signs(head_dim: int) -> Tensor:
    """Made anew: a tensor that is kept would be of the mode in which it was made."""
    return torch.tensor(_numbers(head_dim), dtype=torch.float32, device="cpu")


def _signs_on(head_dim: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return _signs(head_dim)
    return _kept(("signs", head_dim), torch.float32, device)


def _on_device(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """diag(signs) H without its factor: +-1."""
    return _kept(("matrix", head_dim), dtype, device)


def _kept(what: tuple[str, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    kind, head_dim = what

    def make() -> Tensor:
        if kind == "signs":
            return _signs(head_dim)
        matrix = hadamard_of_blocks(torch.eye(head_dim, dtype=torch.float32, device="cpu"))
        return (_signs(head_dim)[:, None] * matrix).sign().to(dtype)

    found = device_memory.constants.get((what, dtype, device), device, make)
    if found is None:
        raise RuntimeError(
            f"a CUDA graph is being captured, and the rotation for head_dim {head_dim} is not on {device} yet: make "
            "the same call once before the capture"
        )
    return found
