"""What a call would run and why: ``explain`` for one problem, ``describe_machine`` for all of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.ampere.config import AmpereForwardConfig
from hopper.config import ForwardConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper_attention import backward_rules, checks, fp8_rules
from hopper_attention.backends import Choice, Target, choose_backend, target_of
from hopper_attention.backward_rules import BackwardProblem
from hopper_attention.checks import FULL_WINDOW, TensorSpec
from hopper_attention.forward_rules import Config, ReferenceConfig, select_config
from hopper_attention.layout import copy_reason
from hopper_attention.machine import BackendStatus, Gpu, Machine, Missing, describe_machine

__all__ = [
    "BackendStatus",
    "Gpu",
    "Machine",
    "Missing",
    "Plan",
    "ReferenceConfig",
    "describe_machine",
    "explain",
    "select_config",
]


GRADIENT_KERNELS = {"hopper": "Hopper kernel", "ampere": "kernel without WGMMA"}


@dataclass(frozen=True)
class Plan:
    """What a call runs. Printing it gives one line a fact.

    Attributes:
        backend: "hopper", "ampere" or "reference".
        config: what the kernel was compiled from, or how the reference walks.
        reason: why this backend.
        copies: a sentence for each input that is copied first, or for all.
        notes: what else is worth knowing.
    """

    backend: str
    config: Config
    reason: str
    copies: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("backend", self.backend), ("reason", self.reason), ("config", self.config.name)]
        rows += [("tile", f"{self.config.tile_m} queries x {self.config.tile_n} keys")]
        if isinstance(self.config, ForwardConfig):
            rows += _kernel_rows(self.config)
        if isinstance(self.config, AmpereForwardConfig):
            rows += _ampere_rows(self.config)
        rows += [("copies", text) for text in self.copies or ("none",)]
        rows += [("note", text) for text in self.notes]
        return "\n".join(f"{label:<11}{text}" for label, text in rows)


def _kernel_rows(c: ForwardConfig) -> list[tuple[str, str]]:
    overlaps = [
        "softmax under its own GEMMs" if c.pipelined else "",
        "warpgroups in ping-pong" if c.ping_pong else "",
        "O rescaled under the next Q K^T" if c.late_rescale else "",
        "P V added to O in float32" if isinstance(c, Fp8ForwardConfig) and c.two_level else "",
        "persistent grid",
        "longest causal tiles first" if c.causal else "",
    ]
    return [
        (
            "head dims",
            f"{c.head_dim} and {c.head_dim_v} in the kernel; shorter rows are filled with zeros by TMA",
        ),
        ("stages", f"{c.stages} of K and of V, {c.smem_bytes} bytes of shared memory"),
        ("warpgroups", f"{c.consumers} consumers and 1 producer, {c.threads} threads"),
        ("registers", f"{c.registers.consumer} a consumer thread, {c.registers.producer} a producer thread"),
        ("schedule", ", ".join(text for text in overlaps if text)),
    ]


def _ampere_rows(c: AmpereForwardConfig) -> list[tuple[str, str]]:
    overlaps = [
        "P made between its own products with V" if c.fused_exponentials else "",
        "O rescaled where a maximum is new",
        "longest causal tiles first" if c.causal else "",
    ]
    where = "registers" if c.q_in_registers else "shared memory"
    return [
        ("head dims", f"{c.head_dim} and {c.head_dim_v} in the kernel; shorter rows are filled with zeros"),
        ("compiled", f"for {c.arch}, with cp.async and mma.sync"),
        ("stages", f"{c.stages} that K and V take in turns, {c.smem_bytes} bytes of shared memory"),
        ("warps", f"{c.warps} of {c.rows_per_warp} queries each, Q in {where}; {c.ctas_per_sm} CTAs an SM"),
        ("schedule", ", ".join(text for text in overlaps if text)),
    ]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = FULL_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    two_level_accumulation: bool = False,
    backend: str | None = None,
    device_capability: tuple[int, int] | None = None,
) -> Plan:
    """What ``flash_attn_func`` with these arguments would run, and why. Computes and compiles nothing.

    Args:
        q, k, v and all others up to ``backend``: as for :func:`hopper_attention.flash_attn_func`. Meta
            tensors will do, as nothing is read.
        device_capability: answer for a GPU of this compute capability, with everything installed, instead
            of for the device of q; (9, 0) is a Hopper GPU.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would.
    """
    checks.check_are_tensors(q=q, k=k, v=v)
    checks.check_features(
        qv=qv,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )
    checks.check_backend(backend)
    checks.check_sm_margin(sm_margin)
    checks.check_two_level_accumulation(two_level_accumulation)
    specs = {"q": TensorSpec.of(q), "k": TensorSpec.of(k), "v": TensorSpec.of(v)}
    checks.check_qkv(**specs)
    checks.check_descales(q, k, q_descale, k_descale, v_descale)
    if softmax_scale is not None:
        checks.check_scale(softmax_scale)
    target = target_of(q.device) if device_capability is None else imagined_target(device_capability)
    if q.dtype == checks.FP8_DTYPE:
        checks.check_fp8_has_no_grad(q, k, v, q_descale, k_descale, v_descale)
        choice, config = _plan_fp8(specs, bool(causal), two_level_accumulation, target, backend)
    else:
        choice = choose_backend(target, q.dtype, backend)
        config = select_config(choice.backend, target.capability, **specs, causal=bool(causal))
    copies = _copies(config, specs, {"q": q, "k": k, "v": v})
    notes = _notes(choice.advice, {"q": q, "k": k, "v": v})
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    if choice.backend != "reference" and wants_grad and q.numel() and k.numel() and v.numel():
        shapes = specs["q"].shape, specs["k"].shape, specs["v"].shape
        in_order = bool(deterministic) or torch.are_deterministic_algorithms_enabled()
        problem = BackwardProblem(*shapes, q.dtype, bool(causal), in_order)
        notes += (_note_on_gradients(problem, target, backend),)
    return Plan(choice.backend, config, choice.reason, copies, notes)


def _copies(config: Config, specs: dict[str, TensorSpec], tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """What is made of the inputs before the kernel of ``config`` reads them."""
    if isinstance(config, ReferenceConfig):
        return ()
    if isinstance(config, AmpereForwardConfig) and specs["q"].dtype == checks.FP8_DTYPE:
        return (f"q, k and v are dequantized to {config.dtype} by PyTorch",)
    reasons = ((name, copy_reason(specs[name], _address(tensors[name]))) for name in specs)
    copies = tuple(f"{name} is copied to contiguous memory: {why}" for name, why in reasons if why)
    if isinstance(config, Fp8ForwardConfig) and not config.v_rows:
        copies += ("v is transposed by PyTorch, which is faster with so many queries at this head_dim",)
    return copies


def _plan_fp8(
    specs: dict[str, TensorSpec], causal: bool, two_level: bool, target: Target, backend: str | None
) -> tuple[Choice, Config]:
    """Backend and config of e4m3 tensors with a descale for each head."""
    shapes = specs["q"].shape, specs["k"].shape, specs["v"].shape
    blocks = fp8_rules.ONE_BLOCK, fp8_rules.ONE_BLOCK, fp8_rules.ONE_BLOCK
    problem = fp8_rules.Fp8Problem(
        *shapes, *blocks, checks.FP8_OUT_DTYPE, causal, v_rows=True, two_level=two_level
    )
    choice = fp8_rules.choose_fp8_backend(problem, target, backend)
    if choice.backend == "hopper":
        return choice, fp8_rules.select_config(problem)
    if choice.backend == "ampere":
        dequantized = {name: spec._replace(dtype=problem.out_dtype) for name, spec in specs.items()}
        return choice, select_config(choice.backend, target.capability, **dequantized, causal=causal)
    return choice, ReferenceConfig(fp8=True)


def imagined_target(capability: Any) -> Target:
    """A GPU of this compute capability that is not here, with everything installed.

    Raises:
        ValueError: it is no pair of numbers.
    """
    valid = (
        isinstance(capability, tuple) and len(capability) == 2 and all(isinstance(n, int) for n in capability)
    )
    if not valid:
        raise ValueError(f"device_capability is {capability!r}, allowed: (major, minor), for instance (9, 0)")
    return Target("the given GPU", capability, assume_installed=True)


def _address(tensor: Tensor) -> int:
    """Where the tensor lies; 0, which is aligned to anything, for meta and fake tensors."""
    has_memory = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
    return tensor.data_ptr() if has_memory else 0


def _notes(advice: str, tensors: dict[str, Tensor]) -> tuple[str, ...]:
    notes = [advice] if advice else []
    sizes = {
        "batch": tensors["q"].shape[0],
        "seqlen_q": tensors["q"].shape[1],
        "seqlen_k": tensors["k"].shape[1],
    }
    return *notes, *(f"{name} is 0: no kernel runs" for name, size in sizes.items() if size == 0)


def _note_on_gradients(problem: BackwardProblem, target: Target, requested: str | None) -> str:
    choice = backward_rules.choose_backward(problem, target, requested)
    if choice.backend == "reference":
        return f"the backward pass runs on the tiled reference, which is slow: {choice.reason}"
    name = backward_rules.select_config(problem, choice.backend, target.capability).name
    return f"the backward pass runs on the {GRADIENT_KERNELS[choice.backend]} {name}"
