"""Kernels of chosen configs as rows of a benchmark: what tuning and the ablation share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from hopper.config import ForwardConfig, Registers, validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention.compile_cache import Compilation, cached_kernels, compile_all, get_forward
from hopper_attention.experiments.bench.fp8_peers import kernel_limits, rounded_by_quantization
from hopper_attention.experiments.bench.peers import (
    Inputs,
    Peer,
    Prepared,
    Setting,
    as_drawn,
    limits_of_dtype,
    needs_gpu,
)
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.launch.base import ResultSpec, index_of
from hopper_attention.launch.forward import ForwardLauncher
from hopper_attention.launch.fp8 import ALL_ROWS, Fp8HopperLauncher
from hopper_attention.quantization import Fp8Quantization, quantize_qkv

BASE = "shipped"
MAX_MESSAGE = 120
LABELS = {"tile_m": "m", "tile_n": "n", "stages": "s", "registers": "r"}


def label(config: ForwardConfig, base: ForwardConfig) -> str:
    """What a variant changes, such as ``n144 s3``; ``shipped`` for none."""
    parts = []
    for field in type(base).__dataclass_fields__:
        value = getattr(config, field)
        if value != getattr(base, field):
            if isinstance(value, Registers):
                value = f"{value.consumer}/{value.producer}"
            elif isinstance(value, Enum):
                value = value.value
            parts.append(f"{LABELS[field]}{value}" if field in LABELS else f"{field}={value}")
    return " ".join(parts) or BASE


def why_invalid(config: ForwardConfig) -> str:
    """Why no kernel can be built from a config; empty if one can."""
    try:
        validate_forward_config(config)
    except ValueError as error:
        return str(error)
    return ""


def compile_missing(
    configs: Iterable[ForwardConfig],
    jobs: int,
    on_progress: Callable[[Compilation], None] = lambda compilation: None,
) -> dict[str, str]:
    """Compile each config that the cache on disk lacks, in parallel; returns why some failed, by config name."""
    cached = {path.stem for path in cached_kernels()}
    missing = {config.name: config for config in configs if config.name not in cached}
    if not missing:
        return {}
    results = compile_all(list(missing.values()), jobs, on_progress)
    return {result.config.name: plain_text(result.error) for result in results if result.error}


def plain_text(error: str) -> str:
    """The first line of a compiler's message without its colours, and no more of it than a table can hold."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", error).strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= MAX_MESSAGE else f"{lines[0][:MAX_MESSAGE]}..."


@dataclass(frozen=True, kw_only=True)
class KeptResult(ResultSpec):
    """Always the same output, NaN until a kernel writes it: memory from the allocator may still hold what another
    kernel wrote there, which would pass for the output of one that wrote nothing."""

    out: Tensor

    def empty_out(self, q: Tensor) -> Tensor:
        return self.out


def keep_result(problem: Problem, dtype: torch.dtype, device: torch.device) -> KeptResult:
    p = problem
    shape = (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
    return KeptResult(
        dtype=dtype,
        head_dim_v=p.head_dim_v,
        out=torch.full(shape, float("nan"), dtype=dtype, device=device),
    )


def count_ctas(config: ForwardConfig, device: torch.device | int) -> int:
    """Size of the persistent grid on a GPU."""
    return config.ctas_per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def prepare_16_bit(config: ForwardConfig, problem: Problem, inputs: Inputs) -> Prepared:
    """The kernel of ``config`` as the public function launches it, into a buffer made before."""
    q, k, v = inputs.q, inputs.k, inputs.v
    index = index_of(q.device)
    launch = ForwardLauncher(
        kernel=get_forward(config),
        result=keep_result(problem, q.dtype, q.device),
        device_index=index,
        num_ctas=count_ctas(config, index),
        repairs=(),
        default_scale=problem.head_dim**-0.5,
    )
    return Prepared(lambda: launch(q, k, v, None, False)[0], config.name)


def prepare_fp8(config: Fp8ForwardConfig, problem: Problem, inputs: Inputs) -> Prepared:
    """The same in FP8, on inputs quantized before, in blocks of K and V as wide as the tile."""
    parts = quantize_qkv(inputs.q, inputs.k, inputs.v, quantization=quantization_for(config.tile_n))
    device = inputs.q.device
    index = index_of(device)
    launch = Fp8HopperLauncher(
        kernel=get_forward(config),
        causal=problem.causal,
        result=keep_result(problem, inputs.q.dtype, device),
        device_index=index,
        num_ctas=count_ctas(config, index),
        repairs=(),
        block_k=parts.k.block if parts.k.block < problem.seqlen_k else ALL_ROWS,
        transposes=False,
        widens=config.wide_codes,
    )
    scale = problem.head_dim**-0.5
    return Prepared(lambda: launch(parts, scale, False)[0], config.name)


@lru_cache(maxsize=64)
def quantization_for(tile_n: int) -> Fp8Quantization:
    """Its V keeps its mean, so that what is timed adds none."""
    return Fp8Quantization(block_k=tile_n, smooth_v=False)


@lru_cache(maxsize=64)
def rounding_for(tile_n: int) -> Callable[[Inputs], Inputs]:
    """What FP8 leaves of the inputs of a kernel with ``tile_n`` keys in a tile: one function for each, so that its
    oracle is computed once."""
    return rounded_by_quantization(quantization_for(tile_n))


def variant_peer(name: str, config: ForwardConfig) -> Peer:
    """A row that calls the compiled kernel of ``config`` itself."""

    def prepare(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
        if isinstance(config, Fp8ForwardConfig):
            return prepare_fp8(config, problem, inputs)
        return prepare_16_bit(config, problem, inputs)

    is_fp8 = isinstance(config, Fp8ForwardConfig)
    return Peer(
        name,
        config.name,
        needs_gpu,
        lambda setting: "",
        prepare,
        rounding=rounding_for(config.tile_n) if is_fp8 else as_drawn,
        limits=kernel_limits if is_fp8 else limits_of_dtype,
    )


def peers_of(configs: Sequence[ForwardConfig]) -> list[Peer]:
    """A row a config, each once, named as the config."""
    return [variant_peer(name, config) for name, config in {c.name: c for c in configs}.items()]
