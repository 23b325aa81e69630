"""The quantizer's kernel on packed sequences, run from its PTX without a GPU: the bits of PyTorch's rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hopper.quantize.config import QuantizeConfig, validate_quantize_config
from hopper_attention.launch.packed_quantize import empty_packed
from hopper_attention.launch.quantize import sign_masks
from hopper_attention.packed_quantization import packed_mean_worth_subtracting, quantize_packed_by_torch
from hopper_attention.packed_quantized import PackedQuantizedQKV
from hopper_attention.quantization import Fp8Quantization
from tests.cute_kernels.packing import Packing
from tests.hopper import ptx_machine
from tests.hopper.quantize_on_numpy import POISON, Arguments, program_of
from tests.hopper.test_fp8_packed import draw, lengths_of

POISONED_SCALE = -7.0
USED = {"seqused_q": (50, 0, 30, 129, 1), "seqused_k": (170, 40, 0, 99, 1)}
PACKINGS = {
    "every length": Packing.of([(70, 200), (0, 40), (33, 0), (129, 131), (1, 1), (5, 64)], (37, 50)),
    "used": Packing.of([(70, 200), (0, 40), (33, 0), (129, 131), (1, 1)], **USED),
}


def quantize_on_numpy(
    config: QuantizeConfig, q: Tensor, k: Tensor, v: Tensor, packing: Packing, ctas: int, seed: int = 0
) -> PackedQuantizedQKV:
    """What the kernel leaves in memory that was poisoned."""
    lengths = lengths_of(packing)
    c = Fp8Quantization(block_k=config.block_k, smooth_v=config.smooth_v)
    parts = empty_packed(config, q, k, v, lengths, c)
    if config.smooth_v:
        parts.mean_v.copy_(packed_mean_worth_subtracting(v, lengths))
    arguments = Arguments()
    for x in (q, k, v):
        arguments.tensor(x[None], (0, 1, 2))
    written = []
    for part, dynamic in ((parts.q, (0, 1, 2)), (parts.k, (0, 1, 2)), (parts.v, (0, 1, 3))):
        part.data.view(torch.uint8).fill_(POISON)
        written.append((part.data, arguments.tensor(part.data.view(torch.uint8)[None], dynamic)))
    for part in (parts.q, parts.k, parts.v):
        part.scale.fill_(POISONED_SCALE)
        written.append((part.scale, arguments.tensor(part.scale[None], (0, 1, 2))))
    for head_dim in (config.head_dim, config.head_dim_v):
        arguments.tensor(sign_masks(head_dim, seed, q.device), (0,))
    unused = torch.zeros(1, dtype=torch.int32)
    arguments.tensor(unused, (0,))
    arguments.tensor(parts.mean_v if config.smooth_v else unused, (0, 1) if config.smooth_v else (0,))
    batch, heads, kv_heads = packing.sequences - 1, q.shape[1], k.shape[1]
    items_q = heads * (q.shape[0] // config.q.rows + batch + 1)
    items_k = kv_heads * (k.shape[0] // config.k.rows + batch + 1)
    for bound in (items_q, items_q + items_k, items_q + 2 * items_k):
        arguments.integer(bound)
    for divisor in (heads, kv_heads):
        arguments.divisor(divisor)
    for numbers in (packing.cu_seqlens_q, packing.cu_seqlens_k, packing.seqused_q, packing.seqused_k):
        arguments.tensor(torch.tensor(numbers, dtype=torch.int32), (0,))
    program = program_of(config)
    memory = ptx_machine.Memory(arguments.buffers)
    ptx_machine.run(program, arguments.packed, ctas, memory, config.smem_bytes, False)
    for tensor, storage in written:
        tensor.view(torch.uint8).copy_(
            torch.from_numpy(storage.view(np.uint8)).view(tensor.view(torch.uint8).shape)
        )
    return parts


@pytest.mark.parametrize(("block_q", "ctas", "smooth_v"), [(1, 3, True), (32, 200, False)])
@pytest.mark.parametrize("name", PACKINGS)
def test_it_gives_the_bits_of_the_rules(name: str, block_q: int, ctas: int, smooth_v: bool) -> None:
    packing = PACKINGS[name]
    q, k, v = draw(packing, (2, 1))
    v = v + 1
    config = QuantizeConfig("bfloat16", 64, 64, block_q, 64, layout="varlen", smooth_v=smooth_v)
    ours = quantize_on_numpy(config, q, k, v, packing, ctas)
    c = Fp8Quantization(block_q=block_q, block_k=64, smooth_v=smooth_v)
    exact = quantize_packed_by_torch(q, k, v, lengths_of(packing), c)
    for (_, found), (_, one) in zip(ours.sequences(), exact.sequences(), strict=True):
        for a, b in ((found.q, one.q), (found.k, one.k), (found.v, one.v)):
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
            assert torch.equal(a.scale, b.scale)
    check_what_attention_looks_at(ours, packing)


def check_what_attention_looks_at(parts: PackedQuantizedQKV, packing: Packing) -> None:
    """Scales of the first block of keys of every sequence, and of queries behind the last one, are valid ones."""
    for i in range(packing.sequences):
        (start_q, length_q), (start_k, _) = packing.q.rows(i), packing.k.rows(i)
        for part in (parts.k, parts.v):
            assert bool((part.scale[:, start_k // part.block + i] > 0).all())
        blocks = -(-length_q // parts.q.block)
        first = start_q // parts.q.block + i
        scales = parts.q.scale[:, first : first + blocks]
        assert bool((scales > 0).all()) and not scales.isinf().any()


def test_what_is_of_no_sequence_is_not_written() -> None:
    packing = PACKINGS["used"]
    q, k, v = draw(packing, (2, 1))
    parts = quantize_on_numpy(QuantizeConfig("bfloat16", 64, 64, 1, 64, layout="varlen"), q, k, v, packing, 7)
    for part, side in ((parts.q, packing.q), (parts.k, packing.k)):
        used = torch.zeros(part.shape[0], dtype=torch.bool)
        for i in range(packing.sequences - 1):
            offset, length = side.rows(i)
            used[offset : offset + length] = True
        assert bool((part.data.view(torch.uint8)[~used] == POISON).all())
        assert not bool((part.data.view(torch.uint8)[used] == POISON).all())


def test_offsets_without_sense_touch_nothing_outside() -> None:
    """Memory of the simulation ends where tensors do."""
    packing = Packing((0, 90, 20, 500), (0, -3, 70, 64), 100, 80)
    generator = torch.Generator().manual_seed(0)
    rows = (100, 2), (80, 1), (80, 1)
    q, k, v = (torch.randn(*shape, 64, generator=generator).bfloat16() for shape in rows)
    quantize_on_numpy(QuantizeConfig("bfloat16", 64, 64, 1, 64, layout="varlen"), q, k, v, packing, 5)


def test_a_mean_of_k_is_not_subtracted_from_packed_sequences() -> None:
    config = QuantizeConfig("bfloat16", 64, 64, 1, 64, layout="varlen", smooth_k=True)
    with pytest.raises(ValueError, match="smooth_k is True, allowed for packed sequences: False"):
        validate_quantize_config(config)
    with pytest.raises(ValueError, match="layout is 'paged', allowed: dense, varlen"):
        validate_quantize_config(replace(config, layout="paged"))
