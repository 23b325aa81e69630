"""FP8 kernels for few queries of what the quantizer made, for ``sanitize.py``: tiles of several heads, and in parts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.few_tilings import FEW_QUERIES_OF_BLOCKS, IN_PARTS, select_fp8_few_blocks_config
from hopper_attention import compile_cache
from hopper_attention.launch.base import ResultSpec, index_of
from hopper_attention.launch.fp8 import Fp8HopperLauncher
from hopper_attention.launch.split_forward import find_combine
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.reference import attention_naive

HEADS, KV_HEADS, CTAS, SCALE = 4, 2, 2, 0.1
SPLITS = 4
"""More than there are blocks, so that some have no key."""


def few_blocks_configs() -> tuple[Fp8ForwardConfig, ...]:
    """Each tiling with a head a tile and with two, with a mask and without, in one part and in several."""
    return tuple(
        select_fp8_few_blocks_config((size, size), causal, "bfloat16", group, rows, split, tiling.tile_n)
        for split, table in ((False, FEW_QUERIES_OF_BLOCKS), (True, IN_PARTS))
        for size, tiles in table.items()
        for rows, tilings in tiles.items()
        for tiling in tilings
        for causal, group in itertools.product((False, True), (1, HEADS // KV_HEADS))
    )


def run_few_blocks_case(config: Fp8ForwardConfig, device: str) -> str:
    """Two sequences, of which a tile of queries and a block of keys are cut; what is wrong, or nothing."""
    generator, (seqlen_q, seqlen_k) = (
        torch.Generator().manual_seed(0),
        (config.tile_queries + 9, 2 * config.tile_n + 5),
    )
    shapes = (2, seqlen_q, HEADS, config.head_dim), *[(2, seqlen_k, KV_HEADS, config.head_dim)] * 2
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    q *= 2.0 ** torch.randint(-2, 3, (*q.shape[:3], 1), generator=generator)
    c = Fp8Quantization(block_k=config.tile_n, smooth_v=True)
    parts = replace(quantize_qkv(q, k, v + 3.0, quantization=c), dtype=torch.bfloat16)
    launcher = Fp8HopperLauncher(
        index_of(torch.device(device)),
        compile_cache.get_forward(config),
        ResultSpec(torch.bfloat16, config.head_dim_v),
        repairs=(),
        num_ctas=CTAS,
        causal=config.causal,
        block_k=config.tile_n,
        transposes=False,
        splits=SPLITS if config.split else 1,
        combine=find_combine(config, SPLITS if config.split else 1),
    )
    given = parts.q.data, parts.k.data, parts.v.data, parts.q.scale, parts.k.scale, parts.v.scale
    *tensors, q_scale, k_scale, v_scale = (x.to(device) for x in given)
    out = torch.full(q.shape, math.nan, dtype=torch.bfloat16).to(device)
    lse = torch.zeros(2, HEADS, 0).to(device)
    scales = q_scale, k_scale, v_scale, torch.ones(2, KV_HEADS, 1).to(device)
    launcher.queue((*tensors, out, lse), scales, parts.mean_v.to(device), 1, SCALE, (-1, -1, 0))
    torch.cuda.synchronize()
    values = (x.dequantize(torch.float64) for x in (parts.q, parts.k, parts.v))
    exact, lse = attention_naive(*values, causal=config.causal, softmax_scale=SCALE)
    mean = parts.mean_v.double().repeat_interleave(HEADS // KV_HEADS, 1)[:, None]
    exact += torch.where((lse > -math.inf).transpose(1, 2)[..., None], mean, 0.0)
    error = ((out.cpu().double() - exact).norm() / exact.norm()).item()
    return "" if error <= 2e-2 else f"error {error:.2e}, allowed 2e-2"
