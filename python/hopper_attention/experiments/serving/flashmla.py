"""FlashMLA's operators, which lie beside FlashAttention-3's in the sglang-kernel package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench.peers import Setting
from hopper_attention.experiments.bench.timing import Launch
from hopper_attention.experiments.serving.inputs import CacheInputs
from hopper_attention.experiments.serving.spec import ServingWorkload

PLAN, ATTEND = "get_mla_decoding_metadata", "fwd_kvcache_mla"
"""The operators: a schedule for the lengths, and attention by it."""

ALIASES = {
    "seqlens_k": "cache_seqlens",
    "num_heads_per_head_k": "num_q_tokens_per_head_k",
    "num_heads_k": "h_k",
    "num_heads_q": "h_q",
    "kcache": "k_cache",
    "kv_cache": "k_cache",
    "head_dim_v": "head_size_v",
    "causal": "is_causal",
    "is_fp8": "is_fp8_kvcache",
}
"""Names that arguments have in some releases, and the one here."""


def find_flashmla_library(setting: Setting) -> Path | None:
    beside = bench_peers.find_fa3_library(setting)
    found = sorted(Path(beside).parent.glob("flashmla_ops*.so")) if beside else []
    return found[0] if found else None


def why_no_flashmla(setting: Setting) -> str:
    if bench_peers.needs_gpu(setting):
        return bench_peers.needs_gpu(setting)
    library = find_flashmla_library(setting)
    if library is None:
        return "no library: install sglang-kernel, or put its flashmla_ops.abi3.so beside what --fa3-library names"
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        return f"{library} does not load: {error}"
    missing = [name for name in (PLAN, ATTEND) if not hasattr(torch.ops.sgl_kernel, name)]
    return f"{library} registers no operator sgl_kernel::{missing[0]}" if missing else ""


def flashmla_version(setting: Setting) -> str:
    return f"of {bench_peers.fa3_version(setting)}"


def call_of_flashmla(workload: ServingWorkload, inputs: CacheInputs) -> Launch:
    """A launch of its operator, with a schedule that was made ahead.

    Raises:
        NotImplementedError: the cache has no pages.
        ValueError: an operator has arguments that are not known here; the message has its schema.
    """
    if inputs.table is None:
        raise NotImplementedError("the cache has no pages")
    w, (queries, cache) = workload, inputs.joined
    rows = w.queries * w.heads // w.heads_kv
    lengths = {"cache_seqlens": inputs.used, "is_fp8_kvcache": False}
    sizes = {"num_q_tokens_per_head_k": rows, "h_k": w.heads_kv}
    plan, splits = operator(PLAN)(*arguments_of(PLAN, {**lengths, **sizes}))
    given: dict[str, Any] = {
        "q": queries,
        "k_cache": cache,
        "head_size_v": w.latent,
        "block_table": inputs.table,
    }
    given |= {"softmax_scale": w.softmax_scale, "is_causal": w.is_causal}
    given |= {"tile_scheduler_metadata": plan, "num_splits": splits}
    attend, arguments = operator(ATTEND), arguments_of(ATTEND, {**lengths, **given})
    return lambda: attend(*arguments)[0]


def operator(name: str) -> Any:
    return getattr(torch.ops.sgl_kernel, name).default


def arguments_of(name: str, given: dict[str, Any]) -> list[Any]:
    """Values in the order of an operator, whatever its release calls them."""
    return fit(operator(name)._schema, given)


def fit(schema: Any, given: dict[str, Any]) -> list[Any]:
    """Values of ``given`` under the names that a schema has for them. What it has no name for is left out if it is
    False."""
    named = {argument.name: ALIASES.get(argument.name, argument.name) for argument in schema.arguments}
    values = {name: given[ours] for name, ours in named.items() if ours in given}
    unplaced = {name: x for name, x in given.items() if name not in named.values() and x is not False}
    return bench_peers.positional_arguments(schema, values | unplaced)
