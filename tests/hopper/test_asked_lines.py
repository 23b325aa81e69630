"""What a forward kernel asks of L2 before it waits for the kernel in front: lines of its inputs, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.key_blocks import BlockRange
from cute_kernels.seqlen import DenseSeqlens
from cute_kernels.window import window_of
from hopper.config import ForwardConfig
from hopper.forward.ahead import LINE_BYTES
from hopper.forward.tilings import select_plain_config
from tests.hopper import on_numpy
from tests.hopper.hopper_machine import Cta
from tests.hopper.on_numpy import BUFFER_STEP, forward_on_numpy

Sizes = tuple[int, int, int, int]


def inside(shape: Sizes) -> torch.Tensor:
    """A view of more memory: rows, heads and sequences lie apart, and something is in front of the first and behind the
    last."""
    batch, rows, heads, columns = shape
    room = torch.zeros(batch + 1, heads + 1, rows + 3, columns + 64, dtype=torch.bfloat16)
    return room[1:, :heads, 2 : 2 + rows, 64:].transpose(1, 2)


def lines(tensor: torch.Tensor, batch: int, head: int, rows: range) -> set[int]:
    """Bytes from the start of the memory to each line of these rows, those of ``rows`` that exist."""
    first = range(0, tensor.shape[3], LINE_BYTES // tensor.element_size())
    strides = tensor.stride()
    return {
        (tensor.storage_offset() + batch * strides[0] + row * strides[1] + head * strides[2] + column) * 2
        for row in rows
        if row < tensor.shape[1]
        for column in first
    }


def asked_of(
    config: ForwardConfig, qkv: list[torch.Tensor], ctas: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[set[int]]]:
    """For each CTA the lines of q, k and v that it asks for, which are tensors of their own."""
    ran: list[Cta] = []
    run = on_numpy.run

    def run_and_keep(program: Any, *given: Cta) -> None:
        run(program, *given)
        ran.extend(given)

    monkeypatch.setattr(on_numpy, "run", run_and_keep)
    forward_on_numpy(config, *qkv, 0.1, ctas)
    found = []
    for cta in ran:
        inputs = [*cta.memory][-3:]
        assert {at // BUFFER_STEP * BUFFER_STEP for at in cta.asked} <= set(inputs)
        found.append([{at - base for at in cta.asked if 0 <= at - base < BUFFER_STEP} for base in inputs])
    return found


@pytest.mark.parametrize(
    ("head_dim", "causal", "keys", "sizes"),
    [
        (128, False, 300, ((2, 131, 4), (2, 100, 2))),
        (128, False, 300, ((1, 1, 2), (1, 1, 1))),
        (128, False, 300, ((1, 3, 1), (1, 0, 1))),
        (128, False, 512, ((1, 130, 2), (1, 200, 1))),
        (128, True, 512, ((1, 300, 2), (1, 70, 2))),
        (64, False, 300, ((2, 70, 2), (2, 130, 1))),
        (64, True, 300, ((1, 140, 2), (1, 3, 1))),
        (256, True, 300, ((1, 70, 2), (1, 170, 1))),
        (256, False, 64, ((1, 5, 2), (1, 64, 1))),
    ],
)
def test_a_first_tile_is_asked_for_and_nothing_beside_it(head_dim, causal, keys, sizes, monkeypatch) -> None:
    """Of heads that share K and V, of rows that lie apart, of fewer keys than queries, and of none."""
    config = select_plain_config("bfloat16", head_dim, head_dim, causal, keys)
    assert config.asks_early
    (batch, seqlen_q, heads), (_, seqlen_k, kv_heads) = sizes
    qkv = [inside((*of, head_dim)) for of in (sizes[0], sizes[1], sizes[1])]
    m_blocks = -(-seqlen_q // config.tile_m)
    tiles = m_blocks * heads * batch
    block_range = BlockRange(config.tile_m, config.tile_n, window_of(causal, ()))
    found = asked_of(config, qkv, tiles, monkeypatch)
    assert len(found) == tiles
    q_lines: set[int] = set()
    begun: dict[tuple[int, int, int], set[int]] = {}
    for of_q, of_k, of_v in found:
        # The tile of a CTA is known by its rows of Q.
        (tile,) = [
            (b, h, m)
            for b in range(batch)
            for h in range(heads)
            for m in range(m_blocks)
            if of_q == lines(qkv[0], b, h, range(m * config.tile_m, (m + 1) * config.tile_m))
        ]
        b, h, m = tile
        q_lines |= of_q
        last = block_range.of(m, DenseSeqlens(seqlen_q, seqlen_k).of(b)).last
        rows = range(last * config.tile_n, (last + 1) * config.tile_n)
        head_kv = h // (heads // kv_heads)
        for x, asked in ((qkv[1], of_k), (qkv[2], of_v)):
            whole = lines(x, b, head_kv, rows)
            assert asked == whole if causal else asked <= whole
        begun.setdefault((b, h, head_kv), set()).update(of_k)
    assert len(q_lines) == seqlen_q * heads * batch * (head_dim * 2 // LINE_BYTES)
    if not causal:
        # The tiles of a head begin with the same keys, and ask for all of them together.
        last_rows = range((max(-(-seqlen_k // config.tile_n), 1) - 1) * config.tile_n, seqlen_k)
        for (b, _, head_kv), asked in begun.items():
            assert asked == lines(qkv[1], b, head_kv, last_rows)
