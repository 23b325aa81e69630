"""The rows of the accuracy table: each a name, why it cannot run here if so, and what computes it.

A peer of another library is one more row: see :func:`peer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hopper_attention.experiments.bench.fp8_peers import (
    PER_HEAD,
    PER_TENSOR,
    CudnnForm,
    prepare_cudnn_fp8,
    scale_inputs,
    why_no_cudnn,
)
from hopper_attention.experiments.bench.peers import Inputs, Setting, prepare_fa3, why_no_fa3
from hopper_attention.experiments.bench.spec import Problem as BenchProblem
from hopper_attention.experiments.rmse.spec import RmseExperiment
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from hopper_attention.rotation import rotate_head_dim

HOPPER_KERNEL = "Hopper kernel"
AMPERE_KERNEL = "16-bit kernel without WGMMA"

OURS_FP8 = Fp8Quantization(smooth_v=False)
"""The paper's two techniques: V keeps its mean, but in the row of the library's default, which is what a user of
``flash_attn_fp8_func`` gets."""

DEFAULT = "fp8-smooth-v"
"""The row of the library's default."""

SIXTEEN_BIT, FP8, EMULATION, PEERS = "16 bit", "FP8", "emulation", "peers"
"""Groups of rows."""


@dataclass(frozen=True)
class Attended:
    """An output (batch, seqlen_q, heads, head_dim) and what computed it."""

    out: Tensor
    by: str


Run = Callable[[Tensor, Tensor, Tensor, bool], Attended]
"""(q, k, v, causal) -> output; q, k, v as in :class:`Problem`."""

Obstacle = Callable[[RmseExperiment, Setting], str]
"""Why a row cannot run, empty if it can."""


def none(experiment: RmseExperiment, setting: Setting) -> str:
    return ""


@dataclass(frozen=True)
class Method:
    """A row to be. ``paper`` is the figure of the paper's table 3 for it, None where it has none."""

    name: str
    label: str
    group: str
    run: Run
    paper: float | None = None
    why_unavailable: Obstacle = none


PeerRun = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""(q, k, v, causal), 16 bit -> output (batch, seqlen_q, heads, head_dim); quantizes by itself."""


def peer(
    name: str,
    label: str,
    by: str,
    run: PeerRun,
    why_unavailable: Callable[[Setting], str],
) -> Method:
    """Another library's FP8 attention as a row."""
    return Method(
        name,
        label,
        PEERS,
        lambda q, k, v, causal: Attended(run(q, k, v, causal), by),
        why_unavailable=lambda experiment, setting: why_unavailable(setting),
    )


# 16 bit


def run_standard(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
    """16-bit standard attention, every intermediate rounded to 16 bits."""
    from hopper_attention.reference import attention_standard

    return Attended(attention_standard(q, k, v, causal=causal), f"plain PyTorch on {q.device.type}")


def run_fa2(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
    """FlashAttention-2 as torch has it, for GPUs and for CPUs."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
        )
    return Attended(out.transpose(1, 2), f"torch SDPA on {q.device.type}")


def why_not_fa2(experiment: RmseExperiment, setting: Setting) -> str:
    if experiment.causal and experiment.seqlen_q != experiment.seqlen:
        return "torch's causal mask is aligned top-left, which needs as many queries as keys"
    return ""


def run_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
    """16-bit attention through the public function, on the backend that the dispatcher picks."""
    from hopper_attention import explain, flash_attn_func

    plan = explain(q, k, v, causal=causal)
    out = flash_attn_func(q, k, v, causal=causal)
    return Attended(out, computed_by(plan.backend, q))


def computed_by(backend: str, q: Tensor) -> str:
    """What a row of ours says about ``backend``."""
    kernels = {"hopper": HOPPER_KERNEL, "ampere": AMPERE_KERNEL}
    return kernels.get(backend) or emulation_on(q)


def emulation_on(q: Tensor) -> str:
    return f"emulation on {q.device.type}"


# FP8: the paper's baseline, ours, and its emulations


def run_fp8_per_tensor(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
    """The paper's FP8 baseline: one scale a tensor, no rotation. No kernel of ours computes it."""
    from hopper_attention.reference import attention_fp8_per_tensor

    return Attended(attention_fp8_per_tensor(q, k, v, causal=causal), emulation_on(q))


def run_fp8(
    quantization: Fp8Quantization, backend: str | None = None, two_level_accumulation: bool = False
) -> Run:
    """Ours: quantize to e4m3 as told, and attend on what ``flash_attn_fp8_func`` would."""

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
        from hopper_attention.backends import target_of
        from hopper_attention.fp8 import flash_attn_quantized_func
        from hopper_attention.fp8_rules import choose_fp8_backend
        from hopper_attention.launch.fp8 import problem_of

        parts = quantize_qkv(q, k, v, quantization=quantization)
        chosen = choose_fp8_backend(problem_of(parts, causal), target_of(q.device), backend).backend
        out = flash_attn_quantized_func(
            parts, causal=causal, two_level_accumulation=two_level_accumulation, backend=chosen
        )
        return Attended(out, computed_by(chosen, q))

    return run


def why_not_emulated(experiment: RmseExperiment, setting: Setting) -> str:
    """Where there is no kernel, the row of ours is the emulation already."""
    from hopper_attention.backends import target_of, why_not_ampere

    reason = why_not_ampere(target_of(torch.device(experiment.device)))
    return f"ours is the emulation here: {reason}" if reason else ""


def why_not_two_level(experiment: RmseExperiment, setting: Setting) -> str:
    """Without the FP8 kernel it is the same row as with one level."""
    from hopper_attention.backends import target_of, why_not_hopper

    reason = why_not_hopper(target_of(torch.device(experiment.device)))
    return f"only the Hopper kernel has two levels of accumulation: {reason}" if reason else ""


def why_not_per_head(experiment: RmseExperiment, setting: Setting) -> str:
    one = experiment.batch * experiment.heads == 1
    return "with one head it is the same as per tensor" if one else ""


def run_fp8_float64(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attended:
    """Only the roundings to e4m3 are left."""
    from hopper_attention.experiments.rmse.oracle import attention_fp8_float64

    parts = quantize_qkv(q, k, v, quantization=OURS_FP8)
    out = attention_fp8_float64(parts, causal=causal, tile_n=parts.k.block)
    return Attended(out, f"float64 emulation on {q.device.type}")


# FP8 of other libraries, quantized with the scales that each takes


def as_benchmark(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> BenchProblem:
    """The sizes of a problem, as the benchmark's peers are told them."""
    dtype = str(q.dtype).removeprefix("torch.")
    return BenchProblem(
        dtype, q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], causal
    )


def maybe_rotated(q: Tensor, k: Tensor, v: Tensor, rotate: bool) -> Inputs:
    """With ``rotate``, q and k times the rotation that ours uses."""
    if not rotate:
        return Inputs(q, k, v)
    return Inputs(rotate_head_dim(q, OURS_FP8.seed), rotate_head_dim(k, OURS_FP8.seed), v)


def run_fa3_fp8(rotate: bool, shared: tuple[int, ...]) -> PeerRun:
    """FlashAttention-3's operator on e4m3 inputs with a scale a tensor, or a key/value head; writes bfloat16."""

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        scaled = scale_inputs(maybe_rotated(q, k, v, rotate), shared)
        of_head = (k.shape[0], 1, k.shape[2], 1, 1)
        descales = {
            f"{name}_descale": x.descale.expand(of_head).flatten(1).contiguous()
            for name, x in zip("qkv", scaled, strict=True)
        }
        data = Inputs(*(x.data for x in scaled))
        setting = Setting(str(q.device))
        return prepare_fa3(as_benchmark(q, k, v, causal), data, setting, **descales).launch()

    return run


def run_cudnn_fp8(rotate: bool) -> PeerRun:
    """cuDNN's FP8 attention, a scale a tensor; writes e4m3."""

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        inputs, setting = maybe_rotated(q, k, v, rotate), Setting(str(q.device))
        prepared = prepare_cudnn_fp8(as_benchmark(q, k, v, causal), inputs, setting, CudnnForm())
        return prepared.read(prepared.launch())

    return run


FA3, CUDNN = "FlashAttention-3 kernel", "cuDNN kernel"

PEER_METHODS = (
    peer("fa3-fp8-tensor", "FP8 FlashAttention-3, per tensor", FA3, run_fa3_fp8(False, PER_TENSOR), why_no_fa3),
    peer("fa3-fp8-head", "FP8 FlashAttention-3, per head", FA3, run_fa3_fp8(False, PER_HEAD), why_no_fa3),
    peer(
        "fa3-fp8-tensor-rotated", "FP8 FlashAttention-3, per tensor + rotation", FA3,
        run_fa3_fp8(True, PER_TENSOR), why_no_fa3,
    ),
    peer(
        "fa3-fp8-head-rotated", "FP8 FlashAttention-3, per head + rotation", FA3,
        run_fa3_fp8(True, PER_HEAD), why_no_fa3,
    ),
    peer("cudnn-fp8", "FP8 cuDNN, per tensor", CUDNN, run_cudnn_fp8(False), why_no_cudnn),
    peer("cudnn-fp8-rotated", "FP8 cuDNN, per tensor + rotation", CUDNN, run_cudnn_fp8(True), why_no_cudnn),
)  # fmt: skip
"""Other libraries, as they are and on inputs that our rotation was applied to before."""

METHODS: tuple[Method, ...] = (
    Method("standard", "16-bit standard attention", SIXTEEN_BIT, run_standard, 3.2e-4),
    Method("fa2", "16-bit FlashAttention-2", SIXTEEN_BIT, run_fa2, 1.9e-4, why_not_fa2),
    Method("flash", "16-bit ours", SIXTEEN_BIT, run_flash, 1.9e-4),
    Method("fp8-per-tensor", "FP8 baseline: per-tensor scales", FP8, run_fp8_per_tensor, 2.4e-2),
    Method("fp8-block", "FP8 ours without rotation", FP8, run_fp8(replace(OURS_FP8, rotate=False)), 2.4e-2),
    Method(
        "fp8-rotation", "FP8 ours without block scales: per tensor", FP8,
        run_fp8(replace(OURS_FP8, granularity="tensor")), 9.3e-3,
    ),
    Method(
        "fp8-rotation-head", "FP8 ours without block scales: per head", FP8,
        run_fp8(replace(OURS_FP8, granularity="head")), why_unavailable=why_not_per_head,
    ),
    Method("fp8-both", "FP8 ours: block scales and rotation", FP8, run_fp8(OURS_FP8), 9.1e-3),
    Method(
        "fp8-two-level", "FP8 ours: the same, two-level accumulation", FP8,
        run_fp8(OURS_FP8, two_level_accumulation=True), why_unavailable=why_not_two_level,
    ),
    Method(
        DEFAULT, "FP8 ours, the default: V less its mean too", FP8,
        run_fp8(replace(OURS_FP8, smooth_v=True)),
    ),
    Method(
        "fp8-emulated", "FP8 ours, emulated", EMULATION, run_fp8(OURS_FP8, "reference"),
        why_unavailable=why_not_emulated,
    ),
    Method("fp8-float64", "FP8 ours, emulated in float64", EMULATION, run_fp8_float64),
    *PEER_METHODS,
)  # fmt: skip
"""The rows, in the table's order. The paper's lines for them, from top to bottom: baseline FP16, FlashAttention-2
FP16, FlashAttention-3 FP16, baseline FP8, "no incoherent processing", "no block quant", FlashAttention-3 FP8."""


def parse_methods(text: str) -> tuple[Method, ...]:
    """Comma-separated names of rows, as rows in the table's order; all for an empty text.

    Raises:
        ValueError: a name is not one of a row.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [method.name for method in METHODS]
    if not set(names) <= set(known):
        raise ValueError(f"methods is {text!r}, allowed: comma-separated names out of {', '.join(known)}")
    return tuple(method for method in METHODS if not names or method.name in names)
