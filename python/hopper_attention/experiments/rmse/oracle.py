"""The two float64 computations that errors are held against: attention itself, and FP8 attention.

Both take bounded memory: some queries of one head at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hopper_attention.experiments.rmse.spec import Problem, RmseExperiment
from hopper_attention.quantization import QuantizedQKV, restore_values, to_e4m3
from hopper_attention.reference import attention_naive
from hopper_attention.reference.fp8 import P_EXPONENT
from hopper_attention.reference.tiles import LOG2_E, Mask, Span, default_scale, masked, masked_matmul

ORACLE_ROWS = 1024
"""Queries taken at once: a float64 score matrix of 1024 x seqlen is what the oracle holds."""

EMULATED_ROWS = 1 << 14
"""Queries that FP8 attention takes at once on a GPU, where it holds their scores of one tile of keys."""


def oracle_steps(experiment: RmseExperiment) -> int:
    """How many pieces of Q's rows ``compute_oracle`` takes one by one."""
    return experiment.batch * experiment.heads * math.ceil(experiment.seqlen_q / ORACLE_ROWS)


def _pieces(q: Tensor, rows: int) -> Iterator[tuple[int, int, Span]]:
    """(batch entry, head, so many rows) of q (batch, seqlen_q, heads, head_dim), covering it once."""
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for first in range(0, q.shape[1], rows):
                yield b, h, Span(first, min(first + rows, q.shape[1]))


def compute_oracle(problem: Problem, step: Callable[[], None] = lambda: None) -> Tensor:
    """Attention in float64, ``ORACLE_ROWS`` rows of a head at a time; calls ``step`` after each piece."""
    q, k, v = problem.q, problem.k, problem.v
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b, h, rows in _pieces(q, ORACLE_ROWS):
        # The causal mask is aligned bottom-right: cut the keys off behind the piece's last row.
        keys = rows.stop + k.shape[1] - q.shape[1] if problem.causal else k.shape[1]
        piece = (slice(b, b + 1), rows.slice, slice(h, h + 1))
        seen = (slice(b, b + 1), slice(keys), slice(h, h + 1))
        out[piece] = attention_naive(q[piece], k[seen], v[seen], causal=problem.causal)[0]
        step()
    return out


@torch.no_grad()
def attention_fp8_float64(
    parts: QuantizedQKV, *, causal: bool = False, softmax_scale: float | None = None, tile_n: int = 128
) -> Tensor:
    """FP8 attention of which only the roundings to e4m3 are left: everything between them is float64.

    Q, K and V are what ``parts`` holds. P is rounded as :func:`attention_tiled_fp8` rounds it: keys come in tiles
    of ``tile_n`` from the last to the first, and the largest P is 2^8. A kernel's error over the error of this one is
    what its accumulators and exponentials cost.

    Args:
        parts: from :func:`quantize_qkv`.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        softmax_scale: factor of the scores; 1/sqrt(head_dim) by default.
        tile_n: keys between two updates of the running maximum.

    Returns:
        out float64 (batch, seqlen_q, heads, head_dim_v). A query that sees no key gives 0.
    """
    q, k, v = parts.q.dequantize(), parts.k.dequantize(), parts.v.dequantize()
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    scale_log2 = default_scale(softmax_scale, q.shape[3]) * LOG2_E
    group = q.shape[2] // k.shape[2]
    mask = Mask(q.shape[1], k.shape[1], causal)
    for b, h, rows in _pieces(q, ORACLE_ROWS if q.device.type == "cpu" else EMULATED_ROWS):
        kv = h // group
        q_rows, keys = q[b, rows.slice, h].double() * scale_log2, k[b, :, kv].double()
        out[b, rows.slice, h] = _attend_rows(q_rows, keys, v[b, :, kv].double(), mask, rows, tile_n)
    return restore_values(out, parts, causal).double()


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, mask: Mask, rows: Span, tile_n: int) -> Tensor:
    """Some rows of one head: q (rows, d) and keys (seqlen_k, d) give base-2 scores; values are (seqlen_k, dv)."""
    row_max = q.new_full((q.shape[0], 1), -math.inf)
    row_sum = torch.zeros_like(row_max)
    acc_o = q.new_zeros(q.shape[0], values.shape[1])
    for cols in mask.key_tiles(rows, tile_n):
        visible = mask.visible(rows, cols, 1, q.device)
        x = masked(q @ keys[cols.slice].mT, visible)
        new_max = torch.maximum(row_max, x.amax(-1, keepdim=True))
        shift = new_max.masked_fill(new_max == -math.inf, 0.0)
        p = torch.exp2(x - shift + P_EXPONENT)
        rescale = torch.exp2(row_max - shift)
        row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
        acc_o = acc_o * rescale + masked_matmul(to_e4m3(p.float()).double(), values[cols.slice], visible)
        row_max = new_max
    return acc_o / row_sum.masked_fill(row_sum == 0, 1.0)
