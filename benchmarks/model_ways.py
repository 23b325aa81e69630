"""The ways of attention that ``benchmarks/models.py`` has take turns, by the names that Transformers knows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from hopper_attention.experiments.bench.peers import (
    Inputs,
    Setting,
    call_of_fa3,
    why_no_fa3,
)
from hopper_attention.integrations.transformers import FP8_NAME, NAME, fuse_rotary, unfuse_rotary

SDPA, NONE, FA2, FA3 = "sdpa", "none", "flash_attention_2", "fa3"

SDPA_BY = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_fa2": SDPBackend.FLASH_ATTENTION}
"""sdpa by one of its backends; torch's flash attention is FlashAttention-2. Without "flash" in their names, by which
Transformers would take them for packages of kernels."""

ROTARY = "+rotary"
"""Behind the name of a way: the same, with rotary embedding by our kernel."""


def base_of(way: str) -> str:
    """What Transformers knows a way by."""
    return way.removesuffix(ROTARY)


def usual_ways() -> list[str]:
    """All that can run here but FA3, which has no gradients there."""
    found = [SDPA, NAME, FP8_NAME, *([FA2] if is_flash_attn_2_available() else [])]
    found += [*SDPA_BY, f"{SDPA}{ROTARY}", f"{NAME}{ROTARY}"] if torch.cuda.is_available() else []
    return [*found, NONE]


def without_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Q + K + V, so that all of them have a gradient, as an attention function of Transformers."""
    group = query.shape[1] // key.shape[1]
    return (query + (key + value).repeat_interleave(group, 1)).transpose(1, 2), None


def by_backend(backend: SDPBackend, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """sdpa as Transformers calls it, by this backend or not at all."""
    with sdpa_kernel(backend):
        found: tuple[Tensor, None] = sdpa_attention_forward(*arguments, **options)
    return found


def by_fa3(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """FlashAttention-3's own forward kernel, causal, no gradients."""
    if torch.is_grad_enabled():
        raise NotImplementedError("FlashAttention-3's operator has no gradient here")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return call_of_fa3(Inputs(q, k, v), True)(), None


def register(fa3_library: str = "") -> None:
    """Make all ways known to Transformers.

    Raises:
        ValueError: the library of FA3 cannot be had.
    """
    functions: dict[str, Callable[..., Any]] = {NONE: without_attention}
    functions |= {name: partial(by_backend, backend) for name, backend in SDPA_BY.items()}
    if fa3_library:
        setting = Setting("cuda", fa3_library)
        if reason := why_no_fa3(setting):
            raise ValueError(f"fa3-library: {reason}")
        functions[FA3] = by_fa3
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask if name in SDPA_BY else lambda *_, **__: None)


def make_models(config: LlamaConfig, ways: Sequence[str], device: str) -> dict[str, LlamaForCausalLM]:
    """A model for each way of attention; they have the same parameters."""
    torch.manual_seed(0)
    with torch.device(device):
        first = LlamaForCausalLM(config).to(torch.bfloat16)
    models = {}
    for way in ways:
        models[way] = copy.deepcopy(first, {id(p): p for p in first.parameters()})
        models[way].set_attn_implementation(base_of(way))
    return models


@contextmanager
def rotating(way: str, model: LlamaForCausalLM) -> Iterator[None]:
    """With the rotary embedding of this way, which all models of a kind have in common."""
    if not way.endswith(ROTARY):
        yield
        return
    fuse_rotary(model)
    try:
        yield
    finally:
        unfuse_rotary(model)


def sdpa_backend(heads: int, kv_heads: int, head_dim: int, tokens: int, device: str) -> str:
    """Which of its backends sdpa takes for a causal call of these sizes by itself."""
    q, k = (
        torch.empty(1, n, tokens, head_dim, dtype=torch.bfloat16, device=device) for n in (heads, kv_heads)
    )
    q.requires_grad_()
    # Without a stub: what scaled_dot_product_attention asks first.
    choose: Callable[..., int] = torch._fused_sdp_choice
    return SDPBackend(choose(q, k, k, None, 0.0, True, enable_gqa=heads != kv_heads)).name.lower()
