"""The quantizer's kernel, compiled to PTX and run on NumPy: no GPU takes part."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from hopper.quantize.config import QuantizeConfig
from hopper_attention.launch.quantize import sign_masks
from hopper_attention.quantized import Means, padded_keys
from tests.hopper import ptx_machine
from tests.ptx import ptx_of

POISON = 0xA5
BUFFER_STEP = 1 << 40
"""Buffers lie so far apart that an address cut to 32 bits misses all of them."""


@cache
def program_of(config: QuantizeConfig) -> ptx_machine.Program:
    return ptx_machine.parse(ptx_of(config))


class Arguments:
    """Parameters of a kernel as the DSL packs them, and the memory that they point into."""

    def __init__(self) -> None:
        self.buffers: dict[int, np.ndarray] = {}
        self.packed: list[bytes] = []

    def tensor(self, tensor: Tensor, dynamic: Sequence[int]) -> np.ndarray:
        """Add a tensor whose sizes ``dynamic`` are read when running; returns the bytes of its storage."""
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().copy()
        base = BUFFER_STEP * (len(self.buffers) + 1)
        self.buffers[base] = storage
        address = base + tensor.storage_offset() * tensor.element_size()
        sizes = struct.pack(f"<Q{len(dynamic)}i", address, *(tensor.shape[i] for i in dynamic))
        strides = struct.pack(f"<{tensor.dim() - 1}q", *tensor.stride()[:-1])
        self.packed.append(sizes + b"\0" * (-len(sizes) % 8) + strides)
        return storage

    def integer(self, value: int) -> None:
        self.packed.append(struct.pack("<i", value))

    def divisor(self, value: int) -> None:
        """A number to divide by, with the multiplier and the shifts that do it, and once more as it is."""
        log2 = (value - 1).bit_length()
        multiplier = (((1 << log2) - value) << 32) // value + 1
        self.packed.append(struct.pack("<IIBB2x", value, multiplier, min(log2, 1), max(log2 - 1, 0)))
        self.integer(value)


def quantize_on_numpy(
    config: QuantizeConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: int,
    means: Means,
    ctas: int,
    by_warp: bool = False,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(bytes of q8, k8 and vt8, bits of their scales), as the kernel leaves them in contiguous tensors.

    ``by_warp`` is that of ``ptx_machine.run``.
    """
    (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, head_dim_v) = q.shape, v.shape
    arguments = Arguments()
    for tensor in (q, k, v):
        arguments.tensor(tensor, (0, 1, 2))
    codes = torch.int16 if config.wide_codes else torch.uint8
    shapes = (q.shape, (0, 1, 2), codes), (k.shape, (0, 1, 2), codes)
    transposed = (batch, kv_heads, head_dim_v, padded_keys(seqlen_k)), (0, 1, 3), torch.uint8
    data = [
        arguments.tensor(torch.full(shape, POISON, dtype=torch.uint8).to(dtype), dynamic)
        for shape, dynamic, dtype in (*shapes, transposed)
    ]
    blocks_q, blocks_k = -(-seqlen_q // config.block_q), -(-seqlen_k // config.block_k)
    scales = [
        arguments.tensor(torch.full(shape, float("nan")), (0, 1, 2))
        for shape in ((batch, heads, blocks_q), *2 * [(batch, kv_heads, blocks_k)])
    ]
    for head_dim in (config.head_dim, config.head_dim_v):
        arguments.tensor(sign_masks(head_dim, seed, q.device), (0,))
    for mean, is_subtracted in ((means.k, config.smooth_k), (means.v, config.smooth_v)):
        unused = torch.zeros(1, dtype=torch.int32)
        arguments.tensor(mean if is_subtracted else unused, (0, 1) if is_subtracted else (0,))
    of_q, of_kv = -(-seqlen_q // config.q.rows), -(-seqlen_k // config.k.rows)
    of_k = batch * kv_heads * of_kv
    bounds = [batch * heads * of_q + i * of_k for i in range(3)]
    for bound in bounds:
        arguments.integer(bound)
    for divisor in (heads, of_q, kv_heads, of_kv):
        arguments.divisor(divisor)
    ctas = min(ctas, bounds[2])
    counter = np.zeros(0)
    if config.claims_items:
        counter = arguments.tensor(torch.zeros(2, dtype=torch.int32), ())
        arguments.integer(max(2 * (bounds[2] // ctas) // 3, 2))
        arguments.divisor(ctas)
    program = program_of(config)
    memory = ptx_machine.Memory(arguments.buffers)
    ptx_machine.run(program, arguments.packed, ctas, memory, config.smem_bytes, by_warp)
    assert not counter.any()
    return data, [scale.view(np.int32) for scale in scales]
