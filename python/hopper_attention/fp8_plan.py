"""What ``flash_attn_fp8_func`` would run and why: the quantizer, what shares a scale, and the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.quantize.config import QuantizeConfig
from hopper_attention import checks, fp8_rules
from hopper_attention.backends import Choice, Target, target_of
from hopper_attention.checks import FULL_WINDOW, TensorSpec
from hopper_attention.dispatch import Plan, cast_by_autocast, describe_window, imagined_target
from hopper_attention.features import is_full, is_given, resolve_packed_mask
from hopper_attention.few_blocks import find_few, kind_of
from hopper_attention.few_queries import NOT_FEW, FewQueries
from hopper_attention.forward_rules import Config, ReferenceConfig, select_config
from hopper_attention.fp8_at_once import blocks_of_a_mean, leaves_work_to_pytorch, loses_means_of_runs
from hopper_attention.fp8_pays import describe_gain
from hopper_attention.fp8_rules import Fp8Problem
from hopper_attention.fp8_training import quantizer_of, with_blocks_of_the_tile
from hopper_attention.launch.fp8 import problem_of
from hopper_attention.launch.quantize import select_quantize_config, why_not_fused
from hopper_attention.packed_fp8_plan import PackedCall, PackedPlan, plan_packed
from hopper_attention.packed_quantization import resolve_lengths
from hopper_attention.plain_calls import needs_gradient
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, QuantizedTensor, quantize_qkv
from hopper_attention.quantized import DEFAULT_QUANTIZATION, check_quantization
from hopper_attention.shapes import attention_shape


@dataclass(frozen=True)
class Fp8Plan:
    """What a call of ``flash_attn_fp8_func`` runs. Printing it gives one line a fact.

    Attributes:
        quantizer: "fused", one kernel, or "torch", several passes.
        quantizer_reason: why this quantizer.
        quantizer_config: what the fused kernel is compiled from; None for "torch".
        quantization: what is done to q, k and v, with ``block_k`` as a number.
        scales: what shares a scale, a sentence for q and one for k and v.
        attention: backend, config and reason of the attention on the quantized tensors.
        pays: whether all this takes less time than 16 bits, and why; empty where that is not known: without the fused
            quantizer and the FP8 kernel, and for packed sequences, whose lengths are not read.
    """

    quantizer: str
    quantizer_reason: str
    quantizer_config: QuantizeConfig | None
    quantization: Fp8Quantization
    scales: tuple[str, ...]
    attention: Plan
    pays: str = ""

    def __str__(self) -> str:
        rows = [("quantizer", self.quantizer), ("because", self.quantizer_reason)]
        if self.quantizer_config is not None:
            rows.append(("kernel", self.quantizer_config.name))
        rows += [("scales", text) for text in self.scales]
        rows.append(("options", describe_options(self.quantization)))
        rows += [("pays", self.pays)] if self.pays else []
        lines = [f"{label:<11}{text}" for label, text in rows]
        return "\n".join([*lines, str(self.attention)])


def describe_options(quantization: Fp8Quantization) -> str:
    """What is done to q, k and v before they become e4m3, in words."""
    c = quantization
    done = [
        "q and k rotated" if c.rotate else "",
        "v rotated" if c.rotate_v else "",
        "the mean of k subtracted" if c.smooth_k else "",
        "the mean of v subtracted" if c.smooth_v else "",
    ]
    return ", ".join(text for text in done if text) or "none"


def explain_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool | int = False,
    return_attn_probs: bool = False,
    *,
    quantization: Fp8Quantization = DEFAULT_QUANTIZATION,
    two_level_accumulation: bool = False,
    exact_lse: bool | None = None,
    window_size: Any = FULL_WINDOW,
    attention_chunk: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    backend: str | None = None,
    device_capability: tuple[int, int] | None = None,
) -> Fp8Plan:
    """What ``flash_attn_fp8_func`` with these arguments would run, and why. Computes and compiles nothing.

    Args:
        q, k, v and all others up to ``backend``: as for :func:`hopper_attention.flash_attn_fp8_func`. Meta tensors will
            do, as nothing is read.
        device_capability: answer for a GPU of this compute capability, with everything installed, instead of for the
            device of q; (9, 0) is a Hopper GPU.

    Raises:
        ValueError, TypeError: as the call itself would.
    """
    checks.check_are_tensors(q=q, k=k, v=v)
    check_quantization(quantization)
    causal = checks.check_flag("causal", causal)
    returns_lse = checks.check_flag("return_attn_probs", return_attn_probs)
    exact_lse, without_lse = checks.check_exact_lse(exact_lse, returns_lse), not returns_lse
    checks.check_backend(backend)
    checks.check_two_level_accumulation(two_level_accumulation)
    if softmax_scale is not None:
        checks.check_scale(softmax_scale)
    device = q.device
    tensors, casts = cast_by_autocast({"q": q, "k": k, "v": v})
    q, k, v = tensors.values()
    two_level, masked = two_level_accumulation, (causal, window_size, attention_chunk)
    target = target_of(device) if device_capability is None else imagined_target(device_capability)
    lengths = resolve_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    if lengths is not None:
        packed_mask = resolve_packed_mask(*masked, lengths.max_seqlen_q, lengths.max_seqlen_k)
        call = PackedCall(two_level, packed_mask, backend, exact_lse, without_lse)
        return _of_packed(plan_packed((q, k, v), lengths, quantization, call, target), target, casts)
    shape = attention_shape(q, k, v)
    mask = resolve_packed_mask(*masked, shape.seqlen_q, shape.seqlen_k)
    head_dims = q.shape[3], v.shape[3]
    chosen = with_blocks_of_the_tile(quantization, head_dims, k.shape[1], two_level, mask)
    parts = quantize_nothing(q, k, v, chosen)
    chosen = replace(chosen, block_k=parts.quantization.block_k)
    specs = TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v)
    is_torch_asked = quantizer_of(backend) == "torch"
    reason = f"backend is {backend!r}" if is_torch_asked else why_not_fused(*specs, chosen, target)
    config = None
    problem = problem_of(parts, mask.causal, two_level, mask.sides, exact_lse, without_lse)
    is_alone = not (reason or leaves_work_to_pytorch(chosen) or needs_gradient(q, k, v))
    is_alone = is_alone and is_full(window_size) and not is_given(attention_chunk, 0)
    may_be_few = not (is_alone and loses_means_of_runs(chosen, k.shape[1]))
    attention = plan_attention(problem, target, backend, may_be_few)
    attention = replace(attention, notes=attention.notes + describe_window(mask))
    if not reason:
        # Where nobody else reads the codes, the quantizer stores them as the kernel of an exact LSE takes them.
        widens = is_alone and exact_lse and attention.backend == "hopper"
        of_kernel = attention.config
        mean_blocks = 0
        if is_alone and isinstance(of_kernel, Fp8ForwardConfig):
            mean_blocks = blocks_of_a_mean(of_kernel, chosen)
        config = select_quantize_config(q.dtype, *head_dims, k.shape[1], chosen, widens, mean_blocks)
    return Fp8Plan(
        quantizer="torch" if reason else "fused",
        quantizer_reason=reason or f"{target.name} has compute capability 9.0",
        quantizer_config=config,
        quantization=chosen,
        scales=describe_scales(parts),
        attention=replace(attention, copies=casts + attention.copies),
        pays="" if reason or attention.backend != "hopper" else describe_gain(shape, mask),
    )


def _of_packed(found: PackedPlan, target: Target, casts: tuple[str, ...]) -> Fp8Plan:
    """The plan of packed sequences, in the same words."""
    c, reason, attention = found.quantization, found.why_no_kernel, found.attention
    scales = "q: a scale for each sequence and head", "k and v: a scale for each sequence and head"
    if c.granularity == "tensor":
        scales = "q: one scale", "k and v: one scale each"
    elif c.granularity == "block":
        of_q = "a scale for each row" if c.block_q == 1 else f"a scale for each {c.block_q} rows of a head"
        scales = f"q: {of_q}", f"k and v: a scale for each {c.block_k} keys of a head, none for two sequences"
    return Fp8Plan(
        quantizer="torch" if reason else "fused",
        quantizer_reason=reason or f"{target.name} has compute capability 9.0",
        quantizer_config=found.quantizer,
        quantization=c,
        scales=scales,
        attention=replace(attention, copies=casts + attention.copies),
    )


def quantize_nothing(q: Tensor, k: Tensor, v: Tensor, quantization: Fp8Quantization) -> QuantizedQKV:
    """What ``quantize_qkv`` makes of tensors like these, without their data: sizes, blocks and largest codes.

    None of them depends on rotations and means, which are left out for the sake of speed.
    """
    like = (torch.empty_like(x, device="meta", requires_grad=False) for x in (q, k, v))
    plain = replace(quantization, rotate=False, rotate_v=False, smooth_k=False, smooth_v=False)
    return quantize_qkv(*like, quantization=plain, backend="torch")


def describe_scales(parts: QuantizedQKV) -> tuple[str, str]:
    if parts.quantization.granularity == "tensor":
        return "q: one scale", "k and v: one scale each"
    if parts.quantization.granularity == "head":
        return "q: a scale for the query heads of each key/value head", "k and v: a scale for each head"
    return f"q: {rows_text(parts.q, 'row')}", f"k and v: {rows_text(parts.k, 'key')}"


def rows_text(part: QuantizedTensor, what: str) -> str:
    return (
        f"a scale for each {what}" if part.block == 1 else f"a scale for each {part.block} {what}s of a head"
    )


def plan_attention(problem: Fp8Problem, target: Target, backend: str | None, may_be_few: bool = True) -> Plan:
    """Backend and config of the attention on quantized tensors; ``may_be_few`` is that of ``find_fp8_launch``."""
    choice = fp8_rules.choose_fp8_backend(problem, target, backend)
    copies: tuple[str, ...] = ()
    if choice.backend == "ampere":
        copies = (f"q, k and v are dequantized to {problem.out_dtype} by PyTorch",)
    few = find_few(problem) if choice.backend == "hopper" and may_be_few else NOT_FEW
    config = config_of(problem, few, choice, target)
    notes = ((choice.advice,) if choice.advice else ()) + fp8_rules.describe_lse(config)
    notes += few.notes
    return Plan(choice.backend, config, choice.reason, copies, notes)


def config_of(problem: Fp8Problem, few: FewQueries, choice: Choice, target: Target) -> Config:
    if choice.backend == "hopper":
        return fp8_rules.select_for(kind_of(problem, few))
    if choice.backend == "reference":
        return ReferenceConfig(fp8=True)
    p = problem
    q, k, v = (
        TensorSpec(s, (), p.out_dtype, torch.device("meta")) for s in (p.q_shape, p.k_shape, p.v_shape)
    )
    return select_config(choice.backend, target.capability, q, k, v, p.causal, p.window)
