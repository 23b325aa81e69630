"""From how many keys on FP8 takes less time than 16 bits, where q, k and v are quantized for one call."""

from __future__ import annotations

from hopper_attention.masks import UNLIMITED, MaskSpec
from hopper_attention.shapes import AttentionShape

EVEN_KEYS = 1536
"""Keys that each query sees when both take about as long, where q, k and v are of one size, whatever head_dim. From
``benchmarks/results/fp8_nvidia_h200.json``, rows ``ours_e2e`` and ``ours_bf16``: a test holds this number to it."""

ROWS_LOOKED_AT = 256


def describe_gain(shape: AttentionShape, mask: MaskSpec) -> str:
    """Whether FP8 pays for the pre-pass that makes q, k and v e4m3, and why: a sentence.

    The pre-pass takes time with the elements of q, k and v; what FP8 saves grows with the queries and the keys that
    each of them sees. So the number of keys at which both are even grows with the share of k and v in the elements.
    """
    seen, even = seen_keys(shape, mask), even_keys(shape)
    keys = f"a query sees {seen} keys on average, and the pre-pass is worth it from about {even} on"
    if seen >= even:
        return f"yes: {keys}"
    return f"no: {keys}; 16 bits, or parts that quantize_qkv made once for several calls, take less time"


def even_keys(shape: AttentionShape) -> int:
    """Keys seen by a query at which FP8 with its pre-pass and 16 bits take about as long."""
    of_q, of_kv = shape.seqlen_q * shape.heads, shape.seqlen_k * shape.kv_heads
    return round(EVEN_KEYS * (of_q + 2 * of_kv) / (3 * max(of_q, 1)))


def seen_keys(shape: AttentionShape, mask: MaskSpec) -> int:
    """Keys that a query sees, on average over some of them."""
    total, rows = 0, range(0, shape.seqlen_q, max(1, shape.seqlen_q // ROWS_LOOKED_AT))
    for row in rows:
        own = row + shape.seqlen_k - shape.seqlen_q
        first, end = 0, shape.seqlen_k
        if mask.window_left != UNLIMITED:
            first = max(first, own - mask.window_left)
        if mask.causal or mask.window_right != UNLIMITED:
            end = min(end, own + 1 + (0 if mask.causal else mask.window_right))
        if mask.attention_chunk:
            chunk = own // mask.attention_chunk * mask.attention_chunk
            first, end = max(first, chunk), min(end, chunk + mask.attention_chunk)
        total += max(end - first, 0)
    return round(total / max(len(rows), 1))
