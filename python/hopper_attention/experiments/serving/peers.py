"""The peers of the serving benchmark, as rows of a registry.

For a workload and one set of inputs a peer gives launches by name, one for each way to call it that is worth trying:
the fastest is measured. A new peer is one more row in ``SERVING_PEERS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hopper.quantize.config import E4M3_MAX
from hopper_attention import flash_attn_with_kvcache
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench.peers import ListedPeer, Setting
from hopper_attention.experiments.bench.results import OURS
from hopper_attention.experiments.bench.timing import Launch
from hopper_attention.experiments.serving import flashmla
from hopper_attention.experiments.serving.inputs import CacheInputs, plain_of
from hopper_attention.experiments.serving.results import OURS_FP8_QUERIES, OURS_KNOWN, OURS_PLAIN
from hopper_attention.experiments.serving.spec import KNOWN, ServingWorkload
from hopper_attention.kvcache_plan import explain_kvcache
from hopper_attention.quantization import to_e4m3

Ways = dict[str, Launch]
"""Launches on one set of inputs, by what is particular of them; all have the same result."""

FA3_SPLITS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of splits that are tried; 0 is its own choice."""

FA3_PREFILL_SPLITS = (0, 1, 2, 4)
"""Partial results of many queries are large, and there are tiles enough."""


def every_workload(workload: ServingWorkload) -> bool:
    return True


def as_returned(out: Tensor) -> Tensor:
    return out


def heads_third(out: Tensor) -> Tensor:
    """(batch, queries, heads, head_dim) of what SDPA returns."""
    return out.transpose(1, 2)


def nothing_to_note(workload: ServingWorkload, inputs: CacheInputs, setting: Setting) -> str:
    return ""


@dataclass(frozen=True)
class ServingPeer(ListedPeer):
    """A row.

    Attributes:
        bind: its ways to compute a workload on one set of inputs.
        takes: which workloads it is meant for; of the others it is no row.
        note: what will run, where the peer can tell.
        leave: from what a launch returns to (batch, queries, heads, head_dim).
        rounds_queries: queries become e4m3 where the cache is.
        context: entered once around a batch of launches.
    """

    bind: Callable[[ServingWorkload, CacheInputs, Setting], Ways]
    takes: Callable[[ServingWorkload], bool] = field(default=every_workload)
    note: Callable[[ServingWorkload, CacheInputs, Setting], str] = field(default=nothing_to_note)
    leave: Callable[[Any], Tensor] = field(default=as_returned)
    rounds_queries: bool = False
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def quantized_queries(workload: ServingWorkload, q: Tensor) -> tuple[Tensor, Tensor]:
    """q in e4m3, and float32 (batch, heads_kv) descales."""
    groups = q.float().unflatten(2, (workload.heads_kv, -1))
    descale = groups.abs().amax((1, 3, 4)) / E4M3_MAX
    return to_e4m3(groups / descale[:, None, :, None, None]).flatten(2, 3), descale


# ours


def our_arguments(workload: ServingWorkload, inputs: CacheInputs) -> dict[str, Any]:
    """Of ``flash_attn_with_kvcache``, by name."""
    found: dict[str, Any] = {"q": inputs.q, "k_cache": inputs.k_cache, "v_cache": inputs.v_cache}
    found |= {"cache_seqlens": inputs.used, "page_table": inputs.table, "causal": workload.is_causal}
    if inputs.qv is not None:
        found["qv"] = inputs.qv
    if inputs.new is not None:
        k, v, cos, sin = inputs.new
        found |= {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    if inputs.descales is not None:
        found |= {"k_descale": inputs.descales.k, "v_descale": inputs.descales.v}
    return found


def arguments_with_fp8_queries(workload: ServingWorkload, inputs: CacheInputs) -> dict[str, Any]:
    q, descale = quantized_queries(workload, inputs.q)
    return {**our_arguments(workload, inputs), "q": q, "q_descale": descale}


def plain_arguments(workload: ServingWorkload, inputs: CacheInputs) -> dict[str, Any]:
    return our_arguments(workload.plain, plain_of(workload, inputs))


def known_arguments(workload: ServingWorkload, inputs: CacheInputs) -> dict[str, Any]:
    return {**our_arguments(workload, inputs), "cache_seqlens": workload.longest}


def with_known_lengths(workload: ServingWorkload) -> bool:
    return workload in KNOWN


Arguments = Callable[[ServingWorkload, CacheInputs], dict[str, Any]]


def bind_ours(workload: ServingWorkload, inputs: CacheInputs, setting: Setting, arguments: Arguments) -> Ways:
    return {"": partial(flash_attn_with_kvcache, **arguments(workload, inputs))}


def describe_ours(
    workload: ServingWorkload, inputs: CacheInputs, setting: Setting, arguments: Arguments
) -> str:
    """What will run.

    Raises:
        NotImplementedError: on a GPU it is not a kernel, and nothing else is to be measured as ours.
    """
    plan = explain_kvcache(**arguments(workload, inputs))
    bench_peers.check_runs_kernel(setting, plan)
    return f"{plan.path}: {plan.config.name}"


def our_peer(
    name: str,
    title: str,
    arguments: Arguments,
    takes: Callable[[ServingWorkload], bool] = every_workload,
    rounds_queries: bool = False,
) -> ServingPeer:
    return ServingPeer(
        name,
        title,
        bench_peers.always_available,
        bench_peers.our_version,
        partial(bind_ours, arguments=arguments),
        takes,
        partial(describe_ours, arguments=arguments),
        rounds_queries=rounds_queries,
    )


# FlashAttention-3, the CUDA C++ library


def fa3_arguments(workload: ServingWorkload, inputs: CacheInputs) -> dict[str, Any]:
    """Of its forward operator, by name, without q, k, v and the mask."""
    found: dict[str, Any] = {"seqused_k": inputs.used, "page_table": inputs.table, "num_splits": 0}
    if inputs.new is not None:
        k, v, cos, sin = inputs.new
        found |= {"k_new": k, "v_new": v, "rotary_cos": cos, "rotary_sin": sin}
    if inputs.descales is not None:
        found |= {"k_descale": inputs.descales.k, "v_descale": inputs.descales.v}
    if inputs.qv is not None:
        found |= {"q_v": inputs.qv, "softmax_scale": workload.softmax_scale}
    return found


def fa3_inputs(workload: ServingWorkload, inputs: CacheInputs) -> tuple[bench_peers.Inputs, dict[str, Any]]:
    """q, K and V as its operator takes them, and the descale of q where there is one."""
    q, more = inputs.q, {}
    if workload.is_fp8:
        q, descale = quantized_queries(workload, q)
        more = {"q_descale": descale}
    return bench_peers.Inputs(q, inputs.k_cache, inputs.v_cache), more


def bind_fa3(workload: ServingWorkload, inputs: CacheInputs, setting: Setting) -> Ways:
    """Its operator, which chooses the number of splits."""
    tensors, more = fa3_inputs(workload, inputs)
    more |= fa3_arguments(workload, inputs)
    return {"": bench_peers.call_of_fa3(tensors, workload.is_causal, **more)}


def bind_best_fa3(workload: ServingWorkload, inputs: CacheInputs, setting: Setting) -> Ways:
    """Its operator with several numbers of splits, and a schedule that was made ahead."""
    tensors, more = fa3_inputs(workload, inputs)
    more |= fa3_arguments(workload, inputs)
    ways: Ways = {}
    for splits in FA3_PREFILL_SPLITS if workload.is_prefill else FA3_SPLITS:
        schedule = fa3_schedule(workload, inputs, tensors.q.dtype, splits)
        given = {**more, "num_splits": splits, "scheduler_metadata": schedule}
        ahead = "no schedule ahead" if schedule is None else "schedule ahead"
        ways[f"{splits} splits, {ahead}"] = bench_peers.call_of_fa3(tensors, workload.is_causal, **given)
    return ways


def fa3_schedule(
    workload: ServingWorkload, inputs: CacheInputs, dtype: torch.dtype, splits: int
) -> Tensor | None:
    """What its operator makes ahead for all layers of a step; None where the library has none."""
    if not hasattr(torch.ops.sgl_kernel, "get_scheduler_metadata"):
        return None
    w, paged = workload, inputs.table is not None
    operator = torch.ops.sgl_kernel.get_scheduler_metadata.default
    rows = inputs.k_cache.shape[1] * (inputs.table.shape[1] if inputs.table is not None else 1)
    given = {
        "batch_size": w.batch,
        "max_seqlen_q": w.queries,
        "max_seqlen_k": rows,
        "num_heads": w.heads,
        "num_heads_k": w.heads_kv,
        "headdim": w.head_dim,
        "headdim_v": w.value_columns,
        "qkv_dtype": dtype,
        "seqused_k": inputs.used,
        "page_size": inputs.k_cache.shape[1] if paged else None,
        "is_causal": w.is_causal,
        "num_splits": splits,
    }
    schedule: Tensor = operator(*bench_peers.positional_arguments(operator._schema, given))
    return schedule


def without_new_keys(workload: ServingWorkload) -> bool:
    return not workload.appends


# FlashMLA


def bind_flashmla(workload: ServingWorkload, inputs: CacheInputs, setting: Setting) -> Ways:
    return {"schedule ahead": flashmla.call_of_flashmla(workload, inputs)}


def over_a_latent(workload: ServingWorkload) -> bool:
    return workload.latent > 0


# FlashAttention-4, in the CuTe DSL


def bind_fa4(workload: ServingWorkload, inputs: CacheInputs, setting: Setting) -> Ways:
    """Without splits, and with as many as it chooses."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    function, tensors = flash_attn_func, (inputs.q, inputs.k_cache, inputs.v_cache)
    options: dict[str, Any] = {"causal": workload.is_causal}
    if workload.is_ragged or workload.page_size:
        function = flash_attn_varlen_func
        options |= {"seqused_k": inputs.used, "page_table": inputs.table}
        options |= {"max_seqlen_q": workload.queries, "max_seqlen_k": workload.longest}

    def launch(splits: int) -> Tensor:
        result = function(*tensors, num_splits=splits, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return {"1 split": partial(launch, 1), "its own splits": partial(launch, 0)}


def in_16_bits_without_new_keys(workload: ServingWorkload) -> bool:
    return not (workload.is_fp8 or workload.appends or workload.latent)


# cuDNN and FlashAttention-2, through torch's scaled_dot_product_attention


def bind_sdpa(workload: ServingWorkload, inputs: CacheInputs, setting: Setting, backend: SDPBackend) -> Ways:
    """Of one query a sequence: its causal mask is aligned top-left."""
    tensors, is_grouped = inputs.by_head, workload.heads != workload.heads_kv

    def launch() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*tensors, enable_gqa=is_grouped)

    return {"": launch}


def is_sdpas(workload: ServingWorkload) -> bool:
    """All keys of all sequences, seen by every query, without pages."""
    w = workload
    return w.is_plain and not (w.is_fp8 or w.is_ragged or w.is_causal or w.latent)


# the formula in plain PyTorch


def bind_torch(workload: ServingWorkload, inputs: CacheInputs, setting: Setting) -> Ways:
    """softmax(q k^T scale) v with the scores in memory, heads of q grouped over those of k and v."""
    q, k, v = inputs.by_head
    grouped = q.unflatten(1, (workload.heads_kv, -1)).flatten(2, 3)
    scale = 1 / math.sqrt(workload.head_dim)

    def launch() -> Tensor:
        return (torch.softmax(grouped @ k.mT * scale, -1) @ v).view(q.shape)

    return {"": launch}


def has_plain(workload: ServingWorkload) -> bool:
    return not workload.is_plain


def in_fp8(workload: ServingWorkload) -> bool:
    return workload.is_fp8


SERVING_PEERS: dict[str, ServingPeer] = {
    peer.name: peer
    for peer in (
        our_peer(OURS, "hopper-attention", our_arguments),
        our_peer(OURS_PLAIN, "hopper-attention without the pages or new keys", plain_arguments, has_plain),
        our_peer(
            OURS_KNOWN, "hopper-attention with lengths as an int", known_arguments, with_known_lengths
        ),
        our_peer(
            OURS_FP8_QUERIES, "hopper-attention with FP8 queries", arguments_with_fp8_queries, in_fp8,
            rounds_queries=True,
        ),
        ServingPeer(
            "fa3", "FlashAttention-3 (CUDA C++)", bench_peers.why_no_fa3, bench_peers.fa3_version, bind_fa3,
            rounds_queries=True,
        ),
        ServingPeer(
            "fa3_best", "FlashAttention-3, best number of splits, schedule made ahead", bench_peers.why_no_fa3,
            bench_peers.fa3_version, bind_best_fa3, takes=without_new_keys, rounds_queries=True,
        ),
        ServingPeer(
            "flashmla", "FlashMLA", flashmla.why_no_flashmla, flashmla.flashmla_version, bind_flashmla,
            takes=over_a_latent,
        ),
        ServingPeer(
            "fa4", "FlashAttention-4 (CuTe DSL)", bench_peers.why_no_fa4, bench_peers.fa4_version, bind_fa4,
            takes=in_16_bits_without_new_keys,
        ),
        ServingPeer(
            "cudnn", "cuDNN (torch SDPA)", bench_peers.needs_gpu, bench_peers.cudnn_version,
            partial(bind_sdpa, backend=SDPBackend.CUDNN_ATTENTION), takes=is_sdpas, leave=heads_third,
        ),
        ServingPeer(
            "fa2", "FlashAttention-2 (torch SDPA)", bench_peers.needs_gpu, bench_peers.torch_version,
            partial(bind_sdpa, backend=SDPBackend.FLASH_ATTENTION), takes=is_sdpas, leave=heads_third,
        ),
        ServingPeer(
            "torch", "plain PyTorch", bench_peers.always_available, bench_peers.torch_version, bind_torch,
            takes=is_sdpas, leave=heads_third,
        ),
    )
}  # fmt: skip

DEFAULT_SERVING_PEERS = tuple(name for name in SERVING_PEERS if name != "torch")

HOST_PEERS = (OURS, "fa3", "fa3_best")
"""Whose host time is measured."""
