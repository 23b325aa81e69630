"""The peers of the FP8 forward benchmark, as rows of a registry.

All get the same N(0, 1) draws in 16 bits and make e4m3 of them outside the timing, each as finely as it can take
scales: ours by block and rotated, FlashAttention-3 by (batch, kv_head), cuDNN by tensor. Two more rows of ours say
what a user pays for that: FP8 from 16 bits to 16 bits, quantization included, and the 16-bit kernel. One that is
measured on request says what two-level accumulation costs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper.quantize.config import E4M3_MAX
from hopper_attention.api import flash_attn_func
from hopper_attention.experiments.bench.peers import (
    Inputs,
    Limits,
    Peer,
    Prepared,
    Setting,
    always_available,
    as_returned,
    fa3_version,
    needs_gpu,
    our_version,
    prepare_fa3,
    prepare_ours,
    why_no_fa3,
)
from hopper_attention.experiments.bench.results import (
    OURS,
    OURS_16_BIT,
    OURS_DROP_IN,
    OURS_DROP_IN_LSE,
    OURS_END_TO_END,
    OURS_TWO_LEVEL,
)
from hopper_attention.experiments.bench.spec import Problem
from hopper_attention.fp8 import DEFAULT_QUANTIZATION, flash_attn_fp8_func, flash_attn_quantized_func
from hopper_attention.fp8_rules import block_of
from hopper_attention.quantization import (
    E4M3,
    Fp8Quantization,
    QuantizedQKV,
    default_block_k,
    quantize_qkv,
    restore_values,
    to_e4m3,
)

KERNEL_LIMITS = Limits(6e-2, 1.5e-1)
"""Against float64 on the rounded inputs. Rounding P to e4m3 costs a head 2.5e-2 and its worst row up to 5e-2; rounding
the output as well, 3.7e-2 and 5.5e-2."""

END_TO_END_LIMITS = Limits(8e-2, 2.5e-1)
"""Against float64 on the inputs themselves: rounding those too costs a head 5.5e-2 and its worst row up to 1.3e-1."""


def kernel_limits(dtype: str) -> Limits:
    return KERNEL_LIMITS


def end_to_end_limits(dtype: str) -> Limits:
    return END_TO_END_LIMITS


# ours


def quantize_by_default(inputs: Inputs) -> QuantizedQKV:
    return quantize_qkv(inputs.q, inputs.k, inputs.v, quantization=DEFAULT_QUANTIZATION)


def rounded_by_quantization(quantization: Fp8Quantization) -> Callable[[Inputs], Inputs]:
    """What a quantization leaves of inputs, float32. Q and K stay rotated: their scores do not change."""

    def rounded(inputs: Inputs) -> Inputs:
        parts = quantize_qkv(inputs.q, inputs.k, inputs.v, quantization=quantization)
        v = restore_values(parts.v.dequantize(), parts, causal=False)
        return Inputs(parts.q.dequantize(), parts.k.dequantize(), v)

    return rounded


rounded_by_default = rounded_by_quantization(DEFAULT_QUANTIZATION)


def shipped_fp8_config(problem: Problem, two_level: bool = False) -> Fp8ForwardConfig:
    """The config that serves a problem quantized by ``quantize_qkv``, which knows neither its mask nor the levels."""
    p = problem
    block_k = block_of(default_block_k(p.head_dim, p.head_dim_v, p.seqlen_k), p.seqlen_k)
    sizes = p.head_dim, p.head_dim_v, p.causal, p.dtype, p.seqlen_k
    return select_fp8_forward_config(*sizes, block_k, two_level=two_level, half_scores=True)


def choose_backend(problem: Problem, setting: Setting, two_level: bool = False) -> tuple[str, str]:
    """The backend to ask for, and a note on what runs. On a GPU it must be the kernel: nothing else is ours."""
    if not setting.is_cuda:
        return "reference", "reference"
    return "hopper", shipped_fp8_config(problem, two_level).name


def prepare_ours_fp8(problem: Problem, inputs: Inputs, setting: Setting, two_level: bool = False) -> Prepared:
    """The public function on parts that were quantized before."""
    parts, causal = quantize_by_default(inputs), problem.causal
    backend, note = choose_backend(problem, setting, two_level)
    attend = partial(flash_attn_quantized_func, two_level_accumulation=two_level, backend=backend)
    return Prepared(lambda: attend(parts, causal=causal), note)


def prepare_ours_end_to_end(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    q, k, v, causal = inputs.q, inputs.k, inputs.v, problem.causal
    backend, note = choose_backend(problem, setting)
    return Prepared(lambda: flash_attn_fp8_func(q, k, v, causal=causal, backend=backend), note)


# peers that take one scale for many rows


class Scaled(NamedTuple):
    """e4m3 data (batch, seqlen, heads, head_dim), and what it is to be multiplied with.

    ``descale`` float32 (batch, 1, kv_heads, 1, 1), or 1 where a dimension shares it.
    """

    data: Tensor
    descale: Tensor

    def values(self) -> Tensor:
        """float32, of the shape of the data."""
        grouped = self.data.float().unflatten(2, (self.descale.shape[2], -1))
        return (grouped * self.descale).flatten(2, 3)


PER_HEAD = (1, 3, 4)
PER_TENSOR = (0, 1, 2, 3, 4)
"""Dimensions of (batch, seqlen, kv_heads, query heads of it, head_dim) that share a scale."""


def scale_inputs(inputs: Inputs, shared: tuple[int, ...]) -> tuple[Scaled, Scaled, Scaled]:
    """q, k and v in e4m3, each scaled so that its largest value is e4m3's."""

    def scale(x: Tensor) -> Scaled:
        grouped = x.float().unflatten(2, (inputs.k.shape[2], -1))
        descale = grouped.abs().amax(shared, keepdim=True) / E4M3_MAX
        return Scaled(to_e4m3(grouped / descale).flatten(2, 3), descale)

    return scale(inputs.q), scale(inputs.k), scale(inputs.v)


def rounded_by(shared: tuple[int, ...]) -> Callable[[Inputs], Inputs]:
    """What is left of inputs that were scaled so, float32."""
    return lambda inputs: Inputs(*(scaled.values() for scaled in scale_inputs(inputs, shared)))


def scaled_by_head(inputs: Inputs, problem: Problem) -> tuple[Inputs, dict[str, Tensor]]:
    """e4m3 tensors and their descales, (batch, kv_heads) each, by the names of the arguments."""
    q, k, v = scale_inputs(inputs, PER_HEAD)
    of_head = (problem.batch, problem.heads_kv)
    descales = {
        f"{name}_descale": x.descale.reshape(of_head) for name, x in zip("qkv", (q, k, v), strict=True)
    }
    return Inputs(q.data, k.data, v.data), descales


def prepare_ours_drop_in(
    problem: Problem, inputs: Inputs, setting: Setting, with_lse: bool = False
) -> Prepared:
    """FlashAttention-3's call with our library: V in rows, no promise of what scores are, bfloat16 out. With the LSE,
    which takes another kernel, that is returned too, no more exact than theirs."""
    scaled, descales = scaled_by_head(inputs, problem)
    backend = "hopper" if setting.is_cuda else "reference"
    tensors = scaled.q, scaled.k, scaled.v
    options = {"causal": problem.causal, "return_attn_probs": with_lse, "backend": backend, **descales}
    attend = partial(flash_attn_func, *tensors, exact_lse=False, **options)
    read = itemgetter(0) if with_lse else as_returned
    return Prepared(attend, "a scale by (batch, kv_head), bfloat16 out", read)


def prepare_fa3_fp8(problem: Problem, inputs: Inputs, setting: Setting) -> Prepared:
    """FlashAttention-3's operator on e4m3 tensors; it writes bfloat16."""
    scaled, descales = scaled_by_head(inputs, problem)
    prepared = prepare_fa3(problem, scaled, setting, **descales)
    return Prepared(prepared.launch, "a scale by (batch, kv_head), bfloat16 out")


# cuDNN, through its own front end: torch's SDPA does not reach its FP8 attention

P_SCALE = 256.0
"""Factor of P before it is rounded: its largest value is 1, and this a power of two that e4m3 holds."""


def why_no_cudnn(setting: Setting) -> str:
    if needs_gpu(setting):
        return needs_gpu(setting)
    try:
        cudnn = importlib.import_module("cudnn")
        cudnn.backend_version()
    except Exception as error:  # absent, built for another Python, or without cuDNN itself
        return f"no cuDNN front end: pip install nvidia-cudnn-frontend ({error})"
    return (
        "" if hasattr(cudnn.pygraph, "sdpa_fp8") else f"cuDNN front end {cudnn.__version__} has no sdpa_fp8"
    )


def cudnn_fp8_version(setting: Setting) -> str:
    import cudnn

    return f"cuDNN {cudnn.backend_version_string()}, front end {cudnn.__version__}"


@dataclass(frozen=True)
class CudnnForm:
    """How cuDNN is asked: the order of its storage, and which side results it writes besides the output."""

    storage: str = "bhsd"
    side_outputs: tuple[str, ...] = ("amax_s", "amax_o")

    def store(self, x: Tensor) -> Tensor:
        """(batch, seqlen, heads, d) as (batch, heads, seqlen, d), in this order of storage."""
        transposed = x.transpose(1, 2)
        return transposed.contiguous() if self.storage == "bhsd" else transposed


@dataclass(frozen=True)
class CudnnPlan:
    """A graph that is built for one problem, and its tensors by name."""

    graph: Any
    tensors: dict[str, Any]
    workspace_bytes: int


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor."""

SCALARS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


@cache
def cudnn_handle() -> Any:
    import cudnn

    return cudnn.create_handle()


@lru_cache(maxsize=4)
def build_cudnn_plan(
    layouts: tuple[Layout, Layout, Layout, Layout], causal: bool, side_outputs: tuple[str, ...]
) -> CudnnPlan:
    """The plan that cuDNN's heuristics choose for q, k, v and out of these layouts. Built once for all input sets."""
    import cudnn

    real, e4m3 = cudnn.data_type.FLOAT, cudnn.data_type.FP8_E4M3
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=real, compute_data_type=real, handle=cudnn_handle()
    )
    one = (1, 1, 1, 1)
    tensors = {
        name: graph.tensor(dim=shape, stride=strides, data_type=e4m3, name=name)
        for name, (shape, strides) in zip("qkv", layouts, strict=False)
    }
    tensors |= {name: graph.tensor(dim=one, stride=one, data_type=real, name=name) for name in SCALARS}
    # Its causal mask is aligned top-left on Hopper. No statistics: they are for training.
    band = {"right_bound": 0} if causal else {}
    scale = 1 / math.sqrt(layouts[0][0][3])
    out, _, amax_s, amax_o = graph.sdpa_fp8(**tensors, attn_scale=scale, generate_stats=False, **band)
    shape, strides = layouts[3]
    out.set_output(True).set_dim(shape).set_stride(strides).set_data_type(e4m3)
    tensors["out"] = out
    for name, tensor in (("amax_s", amax_s), ("amax_o", amax_o)):
        if name in side_outputs:
            tensors[name] = tensor.set_output(True).set_dim(one).set_stride(one).set_data_type(real)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return CudnnPlan(graph, tensors, graph.get_workspace_size())


def prepare_cudnn_fp8(problem: Problem, inputs: Inputs, setting: Setting, form: CudnnForm) -> Prepared:
    """cuDNN's FP8 attention. On Hopper it takes a scale by tensor, and writes e4m3 only.

    The output is in units of V's scale: no weighted mean of V can be larger than V's largest value.
    """
    import cudnn

    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise NotImplementedError("cuDNN's mask is aligned top-left in FP8; seqlen_q must equal seqlen_k")
    q, k, v = scale_inputs(inputs, PER_TENSOR)
    p, device = problem, inputs.q.device
    out = form.store(torch.empty((p.batch, p.seqlen_q, p.heads, p.head_dim_v), dtype=E4M3, device=device))
    buffers = {"q": form.store(q.data), "k": form.store(k.data), "v": form.store(v.data), "out": out}
    scalars = (q.descale, k.descale, v.descale, 1 / P_SCALE, P_SCALE, 1 / v.descale)
    for name, value in (*zip(SCALARS, scalars, strict=True), *((name, 0.0) for name in form.side_outputs)):
        buffers[name] = torch.as_tensor(value, dtype=torch.float32, device=device).reshape(1, 1, 1, 1)
    layouts = tuple((tuple(buffers[name].shape), buffers[name].stride()) for name in ("q", "k", "v", "out"))
    plan = build_cudnn_plan(layouts, problem.causal, form.side_outputs)
    arguments = {tensor: buffers[name] for name, tensor in plan.tensors.items()}
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=device)
    handle = cudnn_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)

    def launch() -> Tensor:
        plan.graph.execute(arguments, workspace, handle=handle)
        return out.transpose(1, 2)

    note = f"a scale by tensor, e4m3 out, {form.storage}, with {' and '.join(form.side_outputs)}"
    return Prepared(launch, note, lambda result: result.float() * v.descale.item())


def cudnn_peer(name: str, title: str, form: CudnnForm) -> Peer:
    return Peer(
        name, title, why_no_cudnn, cudnn_fp8_version, partial(prepare_cudnn_fp8, form=form),
        rounding=ROUNDED_BY_TENSOR, limits=kernel_limits,
    )  # fmt: skip


ROUNDED_BY_HEAD = rounded_by(PER_HEAD)
ROUNDED_BY_TENSOR = rounded_by(PER_TENSOR)

FP8_PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            OURS, "hopper-attention FP8", always_available, our_version, prepare_ours_fp8,
            rounding=rounded_by_default, limits=kernel_limits,
        ),
        Peer(
            OURS_END_TO_END, "hopper-attention FP8, end to end", always_available, our_version,
            prepare_ours_end_to_end, limits=end_to_end_limits,
        ),
        Peer(OURS_16_BIT, "hopper-attention, 16 bits", always_available, our_version, prepare_ours),
        Peer(
            OURS_TWO_LEVEL, "hopper-attention FP8, two-level accumulation", always_available, our_version,
            partial(prepare_ours_fp8, two_level=True), rounding=rounded_by_default, limits=kernel_limits,
        ),
        Peer(
            OURS_DROP_IN, "hopper-attention FP8, e4m3 tensors with descales", always_available, our_version,
            prepare_ours_drop_in, rounding=ROUNDED_BY_HEAD, limits=kernel_limits,
        ),
        Peer(
            OURS_DROP_IN_LSE, "hopper-attention FP8, e4m3 tensors with descales, fast LSE returned", always_available,
            our_version, partial(prepare_ours_drop_in, with_lse=True), rounding=ROUNDED_BY_HEAD, limits=kernel_limits,
        ),
        Peer(
            "fa3", "FlashAttention-3 FP8 (CUDA C++)", why_no_fa3, fa3_version, prepare_fa3_fp8,
            rounding=ROUNDED_BY_HEAD, limits=kernel_limits,
        ),
        cudnn_peer("cudnn", "cuDNN FP8", CudnnForm()),
        cudnn_peer("cudnn_bshd", "cuDNN FP8, (b, s, h, d) storage", CudnnForm(storage="bshd")),
        cudnn_peer("cudnn_lean", "cuDNN FP8, no maximum of P", CudnnForm(side_outputs=("amax_o",))),
    )
}  # fmt: skip

DEFAULT_FP8_PEERS = (OURS, OURS_END_TO_END, OURS_16_BIT, OURS_DROP_IN, "fa3", "cudnn")
