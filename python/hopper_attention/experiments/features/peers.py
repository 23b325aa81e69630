"""The peers of the features' benchmark, as rows of a registry.

For a workload a peer makes launches of its forward out of q, k and v, which come in the form that it takes. Backward,
the launch is ``torch.autograd.grad`` of what one of the forward returned. A new peer is one more row in
``FEATURE_PEERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hopper.quantize.config import E4M3_MAX
from hopper_attention import (
    autograd,
    explain,
    explain_varlen,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_quantized_func,
    flash_attn_varlen_func,
    quantize_qkv,
)
from hopper_attention.backends import KERNELS, target_of
from hopper_attention.backward_rules import BackwardProblem, choose_for, in_strips, select_for
from hopper_attention.checks import TensorSpec
from hopper_attention.experiments.bench import peers as bench_peers
from hopper_attention.experiments.bench.backward_peers import gradients_of, leaves_of
from hopper_attention.experiments.bench.backward_peers import why_no_fa3 as why_no_fa3_backward
from hopper_attention.experiments.bench.peers import Inputs, ListedPeer, Prepared, Setting
from hopper_attention.experiments.bench.results import AMPERE, OURS, OURS_16_BIT, OURS_END_TO_END
from hopper_attention.experiments.bench.timing import Launch
from hopper_attention.experiments.features import score_terms
from hopper_attention.experiments.features.checks import draw_output_gradient
from hopper_attention.experiments.features.functions import score_mod_of
from hopper_attention.experiments.features.results import OURS_DENSE
from hopper_attention.experiments.features.spec import DOCUMENTS, UNLIMITED, Workload
from hopper_attention.features import with_functions
from hopper_attention.forward_rules import ReferenceConfig, problem_of
from hopper_attention.launch.forward import find_config
from hopper_attention.masks import MaskSpec
from hopper_attention.quantization import to_e4m3
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores

Binding = Callable[[Tensor, Tensor, Tensor], Launch]
"""From q, k and v to a launch of the forward on them, which returns out."""


def every_workload(workload: Workload) -> bool:
    return True


def without_functions(workload: Workload) -> bool:
    return not workload.functions


def as_given(workload: Workload, x: Tensor) -> Tensor:
    """(tokens, heads, head_dim) of packed sequences, else (batch, seqlen, heads, head_dim)."""
    return x if workload.is_packed else as_batch(workload, x)


def as_batch(workload: Workload, x: Tensor) -> Tensor:
    return x.unflatten(0, (len(workload.lengths), -1))


def heads_second(workload: Workload, x: Tensor) -> Tensor:
    """(batch, heads, seqlen, head_dim); packed sequences are a batch of 1."""
    batched = x[None] if workload.is_packed else as_batch(workload, x)
    return batched.transpose(1, 2).contiguous()


def as_tokens(x: Tensor) -> Tensor:
    """(tokens, heads, head_dim) of what ``as_given`` or ``as_batch`` gave."""
    return x if x.dim() == 3 else x.flatten(0, 1)


def tokens_of_heads(x: Tensor) -> Tensor:
    """(tokens, heads, head_dim) of what ``heads_second`` gave."""
    return x.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class FeaturePeer(ListedPeer):
    """A row.

    Attributes:
        bind: its forward on a workload.
        takes: which workloads it is meant for; of the others it is no row.
        note: what will run, where the peer can tell.
        draws_mask: with dropout its mask is drawn by itself and not known, and its result is not compared.
        enter, leave: from (tokens, heads, head_dim) to what its forward takes, and back.
        context: entered once around a batch of launches.
    """

    bind: Callable[[Workload, Setting], Binding]
    takes: Callable[[Workload], bool] = field(default=every_workload)
    note: Callable[[Workload, Inputs, Setting], str] = field(default=lambda workload, inputs, setting: "")
    enter: Callable[[Workload, Tensor], Tensor] = field(default=as_given)
    leave: Callable[[Tensor], Tensor] = field(default=as_tokens)
    draws_mask: bool = False
    context: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def prepare(self, workload: Workload, inputs: Inputs, setting: Setting) -> Prepared:
        """A launch on inputs of (tokens, heads, head_dim). Its ``read`` gives a tuple: out, or dq, dk and dv."""
        note = self.note(workload, inputs, setting)
        bind = self.bind(workload, setting)
        q, k, v = (self.enter(workload, x) for x in (inputs.q, inputs.k, inputs.v))
        if not workload.is_backward:
            return Prepared(bind(q, k, v), note, lambda out: (self.leave(out),))
        leaves = leaves_of(q, k, v)
        out = bind(*leaves)()
        dout = self.enter(workload, draw_output_gradient(workload, setting.device))
        return Prepared(gradients_of(out, leaves, dout), note, lambda found: tuple(map(self.leave, found)))


@lru_cache(maxsize=4)
def offsets_of(workload: Workload, device: str) -> Tensor:
    """int32 (sequences + 1,): where each begins."""
    lengths = torch.tensor((0, *workload.lengths))
    return lengths.cumsum(0).to(torch.int32).to(device)


def in_fp8(workload: Workload) -> bool:
    return workload.is_fp8


def without_latent(workload: Workload, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rotary parts of q and k, and what of q meets the latent."""
    own = workload.head_dim
    return q[..., :own], k[..., :own], q[..., own:]


# ours


def bind_ours(workload: Workload, setting: Setting, backend: str | None = None) -> Binding:
    if workload.is_fp8:
        return bind_quantized(workload, setting)
    return bind_16_bits(workload, setting, backend)


def bind_16_bits(workload: Workload, setting: Setting, backend: str | None = None) -> Binding:
    options: dict[str, Any] = {"causal": workload.causal, "window_size": workload.window, "backend": backend}
    if workload.functions == DOCUMENTS:
        blocks = flex_mask(workload, setting.device)
        return lambda q, k, v: partial(attend_as_one, q, k, v, block_mask=blocks, backend=backend)
    if workload.functions:
        options["score_mod"] = score_mod_of(workload, setting.device)
    options |= score_terms.our_terms(workload, setting.device)
    if workload.dropout:
        return bind_dropout(workload, setting, backend)
    if workload.latent:

        def bind(q: Tensor, k: Tensor, v: Tensor) -> Launch:
            q, k, qv = without_latent(workload, q, k)
            return partial(flash_attn_func, q, k, v, qv=qv, **options)

        return bind
    if not workload.is_packed:
        return lambda q, k, v: partial(flash_attn_func, q, k, v, **options)
    offsets, longest = offsets_of(workload, setting.device), workload.longest
    lengths = offsets, offsets, longest, longest
    return lambda q, k, v: partial(flash_attn_varlen_func, q, k, v, *lengths, **options)


def attend_as_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """All tokens (tokens, heads, head_dim) as one sequence."""
    return flash_attn_func(q[None], k[None], v[None], **options)[0]


def bind_dropout(workload: Workload, setting: Setting, backend: str | None) -> Binding:
    """Our operator with a mask that is known. The public function draws it, in a launch of a few microseconds."""
    scores = Scores.of(workload.softcap, None, None, workload.dropout, score_terms.philox_of(setting.device))
    if workload.alibi or workload.sinks:
        raise NotImplementedError("dropout is measured without ALiBi and sinks")
    mask = MaskSpec.canonical(workload.causal, *workload.window, workload.longest, workload.longest)
    scale = workload.head_dim**-0.5
    options = scale, mask.causal, backend, 0, False, *mask.sides, *scores.values

    def bind(q: Tensor, k: Tensor, v: Tensor) -> Launch:
        def launch() -> Tensor:
            out: Tensor = autograd.forward(q, k, v, *options)[0]
            return out

        return launch

    return bind


def lengths_by_name(workload: Workload, setting: Setting) -> dict[str, Any]:
    """What the FP8 functions take for packed sequences."""
    if not workload.is_packed:
        return {}
    offsets, longest = offsets_of(workload, setting.device), workload.longest
    bounds = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **bounds}


def bind_quantized(workload: Workload, setting: Setting) -> Binding:
    """On parts that were quantized before. On a GPU it must be the kernel: nothing else is ours."""
    options: dict[str, Any] = {"causal": workload.causal, "window_size": workload.window}
    options["backend"] = "hopper" if setting.is_cuda else None
    lengths = lengths_by_name(workload, setting)

    def bind(q: Tensor, k: Tensor, v: Tensor) -> Launch:
        parts = quantize_qkv(q, k, v, **lengths)
        return partial(flash_attn_quantized_func, parts, **options)

    return bind


def bind_end_to_end(workload: Workload, setting: Setting) -> Binding:
    """From 16 bits to 16 bits."""
    options: dict[str, Any] = {"causal": workload.causal, "window_size": workload.window}
    options |= lengths_by_name(workload, setting)
    return lambda q, k, v: partial(flash_attn_fp8_func, q, k, v, **options)


def bind_dense(workload: Workload, setting: Setting) -> Binding:
    """The batch of equal lengths, without the offsets that say so."""
    options: dict[str, Any] = {"causal": workload.causal, "window_size": workload.window}
    return lambda q, k, v: partial(flash_attn_func, q, k, v, **options)


def describe_ours(
    workload: Workload, inputs: Inputs, setting: Setting, backend: str | None = None, dense: bool = False
) -> str:
    """What will run.

    Raises:
        NotImplementedError: on a GPU it is not a kernel, and nothing else is to be measured as ours.
    """
    options: dict[str, Any] = {"causal": workload.causal, "window_size": workload.window, "backend": backend}
    if workload.is_fp8:
        return "FP8"
    if workload.functions:
        return describe_functions(workload, inputs, setting, backend)
    options |= score_terms.our_terms(workload, setting.device)
    if workload.is_packed and not dense:
        offsets, longest = offsets_of(workload, setting.device), workload.longest
        plan = explain_varlen(inputs.q, inputs.k, inputs.v, offsets, offsets, longest, longest, **options)
    else:
        q, k, v = (as_batch(workload, x) for x in (inputs.q, inputs.k, inputs.v))
        if workload.latent:
            q, k, options["qv"] = without_latent(workload, q, k)
        plan = explain(q, k, v, **options)
    bench_peers.check_runs_kernel(setting, plan)
    if not (setting.is_cuda and workload.is_backward):
        return plan.config.name
    kind = ScoreKind(bool(workload.softcap), workload.alibi, workload.sinks, bool(workload.dropout))
    return describe_gradient(workload, inputs, backend, workload.is_packed and not dense, kind)


def describe_functions(workload: Workload, inputs: Inputs, setting: Setting, backend: str | None) -> str:
    """The kernel of a workload with functions.

    Raises:
        NotImplementedError: on a GPU there is none.
    """
    is_documents = workload.functions == DOCUMENTS
    blocks = flex_mask(workload, setting.device) if is_documents else None
    scores = with_functions(NO_SCORES, score_mod_of(workload, setting.device), None, blocks).kind
    q, k, v = (x[None] if is_documents else as_batch(workload, x) for x in (inputs.q, inputs.k, inputs.v))
    causal = workload.causal and not is_documents
    problem = problem_of(TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v), causal, scores=scores)
    config = find_config(problem, inputs.q.device, backend)
    if setting.is_cuda and isinstance(config, ReferenceConfig):
        raise NotImplementedError("runs on the reference here")
    if not (setting.is_cuda and workload.is_backward):
        return config.name
    return describe_gradient(replace(workload, causal=causal), inputs, backend, False, scores)


def describe_gradient(
    workload: Workload, inputs: Inputs, backend: str | None, is_packed: bool, scores: ScoreKind = PLAIN
) -> str:
    """The kernel of the backward pass.

    Raises:
        NotImplementedError: there is none.
    """
    w = workload
    q_shape, k_shape = ((len(w.lengths), w.longest, of, w.head_dim) for of in (w.heads, w.heads_kv))
    shapes = q_shape, k_shape, k_shape
    asked = BackwardProblem(*shapes, inputs.q.dtype, w.causal, has_window=w.has_window, scores=scores)
    problem = replace(asked.kind, is_packed=True) if is_packed else in_strips(asked, (*w.window, 0)).kind
    target = target_of(inputs.q.device)
    choice = choose_for(problem, target, backend)
    if choice.backend not in KERNELS:
        raise NotImplementedError(choice.reason)
    return select_for(problem, choice.backend, target.capability).name


# FlashAttention-3, the CUDA C++ library


def bind_fa3(workload: Workload, setting: Setting) -> Binding:
    """Its operator, with the window and the offsets as further arguments."""
    if workload.is_backward:
        raise NotImplementedError(why_no_fa3_backward(setting))
    more: dict[str, Any] = score_terms.fa3_terms(workload, setting.device)
    if workload.has_window:
        left, right = workload.window
        more |= {"window_size_left": left, "window_size_right": 0 if workload.causal else right}
    if workload.is_packed:
        offsets, longest = offsets_of(workload, setting.device), workload.longest
        more |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        more |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    is_causal = workload.causal and not workload.has_window
    if workload.is_fp8:
        return lambda q, k, v: call_fp8_of_fa3(workload, Inputs(q, k, v), is_causal, more)
    if workload.latent:
        more["softmax_scale"] = workload.score_dim**-0.5

        def bind(q: Tensor, k: Tensor, v: Tensor) -> Launch:
            q, k, qv = without_latent(workload, q, k)
            return bench_peers.call_of_fa3(Inputs(q, k, v), is_causal, q_v=qv, **more)

        return bind
    return lambda q, k, v: bench_peers.call_of_fa3(Inputs(q, k, v), is_causal, **more)


def call_fp8_of_fa3(workload: Workload, inputs: Inputs, is_causal: bool, more: Mapping[str, Any]) -> Launch:
    """Its operator on e4m3 tensors with a descale for each sequence and key/value head."""
    e4m3, descales = [], {}
    for name, x in zip("qkv", (inputs.q, inputs.k, inputs.v), strict=True):
        sequences = x.split(workload.lengths) if workload.is_packed else x.unbind(0)
        scaled = [scale_sequence(sequence, workload.heads_kv) for sequence in sequences]
        data = [part for part, _ in scaled]
        e4m3.append(torch.cat(data) if workload.is_packed else torch.stack(data))
        descales[f"{name}_descale"] = torch.stack([descale for _, descale in scaled])
    return bench_peers.call_of_fa3(Inputs(*e4m3), is_causal, **more, **descales)


def scale_sequence(x: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    """x (rows, heads, head_dim) in e4m3, and the descale of each key/value head: (heads_kv,)."""
    groups = x.float().unflatten(1, (heads_kv, -1))
    descale = groups.abs().amax((0, 2, 3)) / E4M3_MAX
    return to_e4m3(groups / descale[:, None, None]).flatten(1, 2), descale


# FlashAttention-4, in the CuTe DSL


def bind_fa4(workload: Workload, setting: Setting) -> Binding:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"causal": workload.causal and not workload.has_window}
    options |= score_terms.fa4_terms(workload, setting.device)
    if workload.has_window:
        left, right = workload.window[0], 0 if workload.causal else workload.window[1]
        options["window_size"] = tuple(None if side == UNLIMITED else side for side in (left, right))
    function = flash_attn_func
    if workload.is_packed:
        function, offsets = flash_attn_varlen_func, offsets_of(workload, setting.device)
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= {"max_seqlen_q": workload.longest, "max_seqlen_k": workload.longest}

    def bind(q: Tensor, k: Tensor, v: Tensor) -> Launch:
        def launch() -> Tensor:
            result = function(q, k, v, **options)
            out: Tensor = result[0] if isinstance(result, tuple) else result
            return out

        return launch

    return bind


# cuDNN, through torch's scaled_dot_product_attention


def has_dropout(workload: Workload) -> bool:
    return bool(workload.dropout)


def bind_cudnn(workload: Workload, setting: Setting) -> Binding:
    """SDPA with dropout. The backward pass is that of the forward which ran."""
    options: dict[str, Any] = {"is_causal": workload.causal, "dropout_p": workload.dropout}
    options |= {"enable_gqa": workload.heads != workload.heads_kv}

    def bind(q: Tensor, k: Tensor, v: Tensor) -> Launch:
        def launch() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return functional.scaled_dot_product_attention(q, k, v, **options)

        return launch

    return bind


# torch's FlexAttention, compiled


@lru_cache(maxsize=1)
def flex_mask(workload: Workload, device: str) -> Any:
    """The block mask: sequences, mask and window in one. None where nothing is hidden."""
    from torch.nn.attention.flex_attention import create_block_mask

    if not (workload.is_packed or workload.causal or workload.has_window):
        return None
    rows = workload.tokens if workload.is_packed else workload.longest
    left, right = workload.sides(workload.longest)
    lengths = torch.tensor(workload.lengths if workload.is_packed else (rows,), device=device)
    documents = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query - key <= left) & (key - query <= right)
        return near & (documents[query] == documents[key])

    return create_block_mask(sees, None, None, rows, rows, device=device)


def bind_flex(workload: Workload, setting: Setting) -> Binding:
    """What the backward reads is kept, since it runs many times."""
    attention, mask = bench_peers.compile_flex(workload), flex_mask(workload, setting.device)
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": workload.heads != workload.heads_kv}
    change = score_mod_of(workload, setting.device)
    options["score_mod"] = change or score_terms.flex_score(workload, setting.device)
    if not workload.is_backward:
        return lambda q, k, v: partial(attention, q, k, v, **options)

    def bind(q: Tensor, k: Tensor, v: Tensor) -> Launch:
        def launch() -> Tensor:
            with functorch_config.patch(donated_buffer=False):
                return attention(q, k, v, **options)

        return launch

    return bind


def is_fa4s(workload: Workload) -> bool:
    return in_16_bits_without_latent(workload) and not workload.functions


def in_16_bits_without_latent(workload: Workload) -> bool:
    return not (workload.is_fp8 or workload.latent)


def is_dense_batch(workload: Workload) -> bool:
    return workload.is_packed and workload.has_equal_lengths and not (workload.is_fp8 or workload.functions)


FEATURE_PEERS: dict[str, FeaturePeer] = {
    peer.name: peer
    for peer in (
        FeaturePeer(
            OURS, "hopper-attention", bench_peers.always_available, bench_peers.our_version, bind_ours,
            note=describe_ours,
        ),
        FeaturePeer(
            OURS_DENSE, "hopper-attention, equal lengths as a dense batch", bench_peers.always_available,
            bench_peers.our_version, bind_dense, takes=is_dense_batch, note=partial(describe_ours, dense=True),
            enter=as_batch,
        ),
        FeaturePeer(
            OURS_END_TO_END, "hopper-attention FP8, end to end", bench_peers.always_available,
            bench_peers.our_version, bind_end_to_end, takes=in_fp8,
        ),
        FeaturePeer(
            OURS_16_BIT, "hopper-attention, 16 bits", bench_peers.always_available, bench_peers.our_version,
            bind_16_bits, takes=in_fp8,
        ),
        FeaturePeer(
            "fa3", "FlashAttention-3 (CUDA C++)", bench_peers.why_no_fa3, bench_peers.fa3_version, bind_fa3,
            takes=without_functions,
        ),
        FeaturePeer(
            "fa4", "FlashAttention-4 (CuTe DSL)", bench_peers.why_no_fa4, bench_peers.fa4_version, bind_fa4,
            takes=is_fa4s,
        ),
        FeaturePeer(
            "cudnn", "cuDNN (torch SDPA), with dropout", bench_peers.needs_gpu, bench_peers.cudnn_version,
            bind_cudnn, takes=has_dropout, enter=heads_second, leave=tokens_of_heads, draws_mask=True,
        ),
        FeaturePeer(
            "flex", "FlexAttention (torch, compiled)", bench_peers.why_no_flex, bench_peers.torch_version,
            bind_flex, takes=in_16_bits_without_latent, enter=heads_second, leave=tokens_of_heads,
        ),
        FeaturePeer(
            AMPERE, "hopper-attention without WGMMA", bench_peers.needs_gpu, bench_peers.our_version,
            partial(bind_ours, backend="ampere"), takes=in_16_bits_without_latent,
            note=partial(describe_ours, backend="ampere"),
        ),
    )
}  # fmt: skip

DEFAULT_FEATURE_PEERS = (OURS, OURS_DENSE, OURS_END_TO_END, OURS_16_BIT, "fa3", "fa4", "cudnn")
