"""Which kernels run a backward pass."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.backward.step import BackwardStep
from hopper_attention import compile_cache
from hopper_attention._kernels import Kernel
from hopper_attention.backends import HOPPER_CAPABILITY, KERNELS, Choice, target_of
from hopper_attention.backward_rules import (
    BackwardProblem,
    Division,
    KernelConfig,
    choose_for,
    select_for,
    unless_too_large,
)
from hopper_attention.launch.base import REMEMBERED_CALLS, REMEMBERED_LAUNCHERS, index_of
from hopper_attention.launch.gradient_launchers import (
    BackwardLauncher,
    DividedLauncher,
    OneTileLauncher,
    PieceLauncher,
    PreparedLauncher,
    StripLauncher,
    find_parts,
)
from hopper_attention.masks import FULL_SIDES, Sides
from hopper_attention.problem import GradientProblem
from hopper_attention.scores import NO_SCORES, PLAIN, ScoreKind, Scores
from hopper_attention.value_parts import needs_parts
from hopper_attention.visit_pieces import as_served


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_choice(problem: BackwardProblem, device: torch.device, requested: str | None) -> Choice:
    """``choose_backward`` for a device, remembered."""
    kind = problem.kind
    choice = find_choice_for(kind, device, requested)
    if choice.backend not in KERNELS:
        return choice
    return unless_too_large(choice, problem, find_config(kind, device, choice.backend))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_choice_for(problem: GradientProblem, device: torch.device, requested: str | None) -> Choice:
    """``choose_for`` a device, remembered."""
    return choose_for(problem, target_of(device), requested)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_config(problem: GradientProblem, device: torch.device, backend: str | None = None) -> KernelConfig:
    """``select_for`` a device, remembered; by default of the backend that is the fastest there."""
    capability = target_of(device).capability
    chosen = backend or ("hopper" if capability == HOPPER_CAPABILITY else "ampere")
    return select_for(problem, chosen, capability)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find(problem: GradientProblem, device: torch.device, backend: str | None = None) -> BackwardLauncher:
    """The launcher of problems of a kind; compiles or loads its kernels the first time.

    Raises:
        ValueError: a head dimension is larger than the kernel takes, or the GPU has none.
    """
    config = find_config(problem, device, backend)
    prepare = compile_cache.get_backward(BackwardStep("prepare", config))
    parts = find_parts(config, index_of(device))
    return BackwardLauncher(*parts, prepare, compile_cache.get_backward(BackwardStep("finish", config)))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_with_strips(problem: GradientProblem, device: torch.device) -> StripLauncher:
    """The same of problems ``in_strips``, of the Hopper kernel."""
    config = find_config(problem, device, "hopper")
    prepare = compile_cache.get_backward(BackwardStep("prepare", config))
    return StripLauncher(*find_parts(config, index_of(device)), prepare)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_of_one_tile(problem: GradientProblem, device: torch.device) -> OneTileLauncher:
    """The same of problems ``in_one_tile``, of the Hopper kernel."""
    return OneTileLauncher(*find_parts(find_config(problem, device, "hopper"), index_of(device)))


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_divided(problem: GradientProblem, device: torch.device, head_parts: int) -> DividedLauncher:
    """The same of problems that have ``divides_heads``, of the Hopper kernel."""
    return DividedLauncher(*_find_all_parts(problem, device), head_parts)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def find_in_pieces(problem: GradientProblem, device: torch.device, division: Division) -> PieceLauncher:
    """The same of problems that have ``divides_visits``, of the Hopper kernel."""
    return PieceLauncher(*_find_all_parts(problem, device), division)


def _find_all_parts(
    problem: GradientProblem, device: torch.device
) -> tuple[int, KernelConfig, Kernel, tuple[int, ...], Kernel, Kernel]:
    """What a ``FinishedLauncher`` of the Hopper kernel has, in order."""
    config = find_config(problem, device, "hopper")
    before, behind = (
        compile_cache.get_backward(BackwardStep(step, config)) for step in ("prepare", "finish")
    )
    return (*find_parts(config, index_of(device)), before, behind)


@lru_cache(maxsize=REMEMBERED_LAUNCHERS)
def _find_flat(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    deterministic: bool,
    device: torch.device,
    backend: str | None,
    has_window: bool = False,
    has_chunk: bool = False,
    scores: ScoreKind = PLAIN,
) -> BackwardLauncher:
    """``find`` by the parts of a problem, which costs less than to make one at every call."""
    problem = GradientProblem(
        dtype,
        dtype,
        head_dim,
        head_dim_v,
        causal,
        has_window=has_window,
        has_chunk=has_chunk,
        scores=scores,
        deterministic=deterministic,
    )
    return find(problem, device, backend)


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_plain(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    deterministic: bool,
    backend: str | None,
    window: Sides,
) -> BackwardLauncher | None:
    """What serves a call with these sizes and plain scores by itself, in one look-up.

    None for what is served in another way: where there is no score, one key, values wider than a kernel, or no kernel.
    """
    found = _choose_plain((q_shape, k_shape, v_shape), dtype, device, causal, deterministic, backend, window)
    return None if found is None else find(found[0].kind, device, found[1])


def _choose_plain(
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    deterministic: bool,
    backend: str | None,
    window: Sides,
) -> tuple[BackwardProblem, str] | None:
    """The problem of such a call, and the backend whose kernel serves it."""
    q_shape, k_shape, v_shape = shapes
    seqlen_k, has_window = k_shape[1], window != FULL_SIDES
    if 0 in q_shape or seqlen_k < 2 or needs_parts(v_shape[3]):
        return None
    problem = BackwardProblem(*shapes, dtype, causal, deterministic, has_window, has_chunk=window[2] > 0)
    choice = find_choice(problem, device, backend)
    return (problem, choice.backend) if choice.backend in KERNELS else None


@lru_cache(maxsize=REMEMBERED_CALLS)
def find_for_call(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    deterministic: bool,
    backend: str | None,
    window: Sides,
    has_dlse: bool = False,
) -> PreparedLauncher | OneTileLauncher | None:
    """``find_plain``, but a kernel with strips, of one tile, or that divides heads or visits, where it is for the
    problem: for whole backward passes, which have no use for sums of dQ. ``has_dlse`` says that there is a gradient of
    the LSE."""
    given = dtype, device, causal, deterministic, backend, window
    found = _choose_plain((q_shape, k_shape, v_shape), *given)
    if found is None:
        return None
    problem, chosen = found
    if chosen == "hopper":
        problem = as_served(problem, window, has_dlse)
    if problem.one_tile:
        return find_of_one_tile(problem.kind, device)
    if problem.division is not None:
        return find_in_pieces(problem.kind, device, problem.division)
    if problem.head_parts > 1:
        return find_divided(problem.kind, device, problem.head_parts)
    return find_with_strips(problem.kind, device) if problem.in_strips else find(problem.kind, device, chosen)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    window: Sides = FULL_SIDES,
    scores: Scores = NO_SCORES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention on an NVIDIA GPU, on torch's current stream. No size may be 0.

    dQ is summed in the order in which key tiles finish, so its last bits may differ between runs; those of dK and dV
    do not. With ``deterministic`` the order is fixed, and key tiles wait for each other. Needs float32 memory of the
    size of q, rounded up to whole tiles and to a head_dim that has a kernel of its own.

    Args:
        dout, out: (batch, seqlen_q, heads, head_dim_v).
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16.
        k, v: (batch, seqlen_k, kv_heads, head_dim) and (..., head_dim_v).
        lse: float32 (batch, heads, seqlen_q), natural log; -inf for rows without keys.
        dlse: gradient of lse, of its shape; None means zero. Ignored in rows without keys.
        backend: whose kernel, "hopper" or "ampere"; None: that of the GPU's own.
        causal, window: those of a ``MaskSpec``, the latter its sides.

    Returns:
        dq, dk, dv with the shapes and dtype of q, k, v, contiguous.

    Raises:
        ValueError: a head dimension is larger than the kernel takes, or the GPU has none.
    """
    has_window = window != FULL_SIDES
    problem = q.dtype, q.shape[3], v.shape[3], causal, deterministic
    options = *problem, q.device, backend, has_window, window[2] > 0
    sides = window if has_window else ()
    if scores is not NO_SCORES:
        launch = _find_flat(*options, scores.kind)
        dq, dk, dv = launch(dout, q, k, v, out, lse, softmax_scale, dlse, *sides, scores=scores)
        return dq, dk, dv
    dq, dk, dv = _find_flat(*options)(dout, q, k, v, out, lse, softmax_scale, dlse, *sides)
    return dq, dk, dv
