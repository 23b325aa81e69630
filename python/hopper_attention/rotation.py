"""The rotation that spreads outliers along head_dim: random signs and a Hadamard matrix.

Each sum, difference and product is rounded to float32 by itself, which the fused quantizer follows to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from hopper.quantize.config import hadamard_blocks
from hopper_attention import device_memory
from hopper_attention.autocast import without_autocast


def rotation_signs(head_dim: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Random signs +-1, float32 (head_dim,), not to be written to; a seed gives the same ones on every device.

    Raises:
        RuntimeError: a CUDA graph is being captured, and they are not on ``device`` yet.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _draw_signs(head_dim, seed)
    return _constant(_draw_signs, head_dim, seed, device)


def sign_masks(head_dim: int, seed: int, device: torch.device) -> torch.Tensor:
    """The same signs as int32 (head_dim / 2,): XOR with a pair of 16-bit columns gives them their signs.

    Raises:
        RuntimeError: a CUDA graph is being captured, and they are not on ``device`` yet.
    """
    return _constant(_draw_masks, head_dim, seed, device)


def _constant(
    draw: Callable[[int, int], torch.Tensor], head_dim: int, seed: int, device: torch.device
) -> torch.Tensor:
    """What ``draw`` gives on the CPU, on ``device``."""
    key = draw, head_dim, seed, device
    found = device_memory.constants.get(key, device, partial(draw, head_dim, seed))
    if found is None:
        raise RuntimeError(
            f"a CUDA graph is being captured, and the signs of the rotation for head_dim {head_dim} and seed {seed} "
            f"are not on {device} yet: make the same call once before the capture"
        )
    return found


def _draw_signs(head_dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Not times 2.0, which makes them what torch's default dtype is.
    return (2 * torch.randint(0, 2, (head_dim,), generator=generator, device="cpu") - 1).float()


def _draw_masks(head_dim: int, seed: int) -> torch.Tensor:
    flips = (_draw_signs(head_dim, seed) < 0).long()
    return (flips[0::2] * 2**15 - flips[1::2] * 2**31).to(torch.int32)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """x H / sqrt(n) along the last dimension, whose size n is a power of two, by log2(n) butterflies."""
    size = x.shape[-1]
    half = 1
    while half < size:
        low, high = x.unflatten(-1, (size // (2 * half), 2, half)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return x * (1.0 / math.sqrt(size))


def rotate_head_dim(x: torch.Tensor, seed: int) -> torch.Tensor:
    """x diag(signs) H, float32, along the last dimension of x (..., head_dim).

    H is the normalised Hadamard matrix; where head_dim is not a power of two it is block-diagonal, one
    Hadamard matrix for each power of two in head_dim, the largest first (96 = 64 + 32). The product is
    orthogonal, so that Q K^T does not change when Q and K are both rotated. All heads share the signs.
    """
    return hadamard_of_blocks(x.float() * rotation_signs(x.shape[-1], seed, x.device))


def hadamard_of_blocks(x: torch.Tensor) -> torch.Tensor:
    """x H along the last dimension, of that block-diagonal H."""
    return torch.cat([_hadamard(part) for part in x.split(hadamard_blocks(x.shape[-1]), -1)], -1)


def rotate_back(x: torch.Tensor, seed: int) -> torch.Tensor:
    """The inverse of :func:`rotate_head_dim`, float32, by products with its transpose: a GPU reads x once for that, and
    nothing follows the bits of the result."""
    matrix = _matrix_back(x.shape[-1], seed, x.device)
    start, parts = 0, []
    with without_autocast(x.device):
        # By blocks, so that what is not finite stays within its own.
        for part in x.float().split(hadamard_blocks(x.shape[-1]), -1):
            end = start + part.shape[-1]
            parts.append(part @ matrix[start:end, start:end])
            start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def rotate_back_alike(x: torch.Tensor, seed: int) -> torch.Tensor:
    """:func:`rotate_back` of contiguous x (..., head_dim) in its dtype, rounded once: of 16 bits a GPU reads and writes
    a third of the memory that float32 between them takes. The matrix is exact, as its factor is taken apart."""
    matrix = _signs_back(x.shape[-1], seed, x.device, x.dtype)
    rows, start = x.reshape(-1, x.shape[-1]), 0
    parts = []
    with without_autocast(x.device):
        for part in rows.split(hadamard_blocks(x.shape[-1]), -1):
            size = part.shape[-1]
            block = matrix[start : start + size, start : start + size]
            # With a beta of 0 the first argument only has a dtype.
            parts.append(torch.addmm(part[:1], part, block, beta=0, alpha=1.0 / math.sqrt(size)))
            start += size
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).view(x.shape)


def _signs_back(head_dim: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """``_matrix_back`` without its factor: +-1."""
    draw = _DRAW_SIGNS_BACK[dtype]
    return draw(head_dim, seed) if device.type == "cpu" else _constant(draw, head_dim, seed, device)


def _draw_signs_back(dtype: torch.dtype, head_dim: int, seed: int) -> torch.Tensor:
    return _draw_back(head_dim, seed).sign().to(dtype)


FLOATS = torch.float16, torch.bfloat16, torch.float32
_DRAW_SIGNS_BACK = {dtype: partial(_draw_signs_back, dtype) for dtype in FLOATS}
"""One function each, as constants are kept by what draws them."""


def _matrix_back(head_dim: int, seed: int, device: torch.device) -> torch.Tensor:
    return (
        _draw_back(head_dim, seed) if device.type == "cpu" else _constant(_draw_back, head_dim, seed, device)
    )


def _draw_back(head_dim: int, seed: int) -> torch.Tensor:
    """H diag(signs): Hadamard matrices are symmetric, the signs their own inverse."""
    units = (torch.eye(size, dtype=torch.float32, device="cpu") for size in hadamard_blocks(head_dim))
    blocks = [_hadamard(unit) for unit in units]
    return torch.block_diag(*blocks) * _draw_signs(head_dim, seed)
