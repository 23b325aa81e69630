"""Which problems torch's own fused attention serves: the backend "torch", for devices that have no kernel."""

from __future__ import annotations

from dataclasses import dataclass

from hopper_attention.backends import Target
from hopper_attention.problem import AttentionProblem, GradientProblem


@dataclass(frozen=True)
class TorchConfig:
    """torch's fused attention, which chooses its tiles by itself."""

    name: str = "torch_sdpa"


NOWHERE = "dropout_p", "score_mod", "mask_mod"
"""Scores' arguments that only the reference has where there is no kernel."""


def why_not_torch(problem: AttentionProblem, target: Target) -> str:
    """What keeps torch's attention from serving a problem; empty if nothing does.

    On a CPU its matrix products serve more than its fused attention does.
    """
    is_cpu = target.name == "cpu"
    given = [name for name in problem.scores.names if name != "sinks" and (not is_cpu or name in NOWHERE)]
    if problem.has_chunk and not is_cpu:
        given.append("attention_chunk")
    elif problem.has_window and not is_cpu:
        given.append("window_size")
    if problem.has_qv:
        given.append("qv")
    return f"torch's fused attention has no {' and no '.join(given)}" if given else ""


def why_not_torch_gradient(problem: GradientProblem, target: Target) -> str:
    """The same of a backward pass."""
    if problem.deterministic and target.name != "cpu":
        return "torch's fused attention does not promise gradients of the same bits in every run"
    return why_not_torch(problem, target)
