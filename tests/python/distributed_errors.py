"""What ranks are told where something is wrong with a call: for the processes of ``distributed_ranks``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu

from hopper_attention.distributed import context_parallel_attention, sequence_positions, unshard_sequence
from hopper_attention.quantized import Fp8Quantization
from tests.python.distributed_ranks import DTYPE, error_of, groups

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "timeout": (20.0, 30.0),
    "memory": ("auto", "least"),
    "return_lse": (False, True),
    "deterministic": (False, True),
    "backend": (None, "reference"),
    "softmax_scale": (0.5, 0.25),
    "softcap": (0.0, 2.0),
    "layout": ("zigzag", "contiguous"),
    "method": ("ring", "all_gather"),
    "quantization": (Fp8Quantization(granularity="head"), Fp8Quantization()),
    "cu_seqlens": ((0, 4), (0, 5)),
}
"""Arguments of all ranks but the last, and of the last."""


def disagree(about: str, ranks: int = 2) -> str:
    """What a rank is told where the last one calls with something else."""
    odd = dist.get_rank() == ranks - 1
    rows, options = 8, {"timeout": 20.0}
    if about == "shape":
        rows = 12 if odd else 8
    if about == "causal":
        options["causal"] = odd
    if about == "sinks":
        options["sinks"] = torch.zeros(2) if odd else None
    if about == "gradient of sinks":
        options["sinks"] = torch.zeros(2, requires_grad=odd)
    if about in DIFFERENT:
        options[about] = DIFFERENT[about][odd]
    x = torch.zeros(1, rows, 2, 16, dtype=DTYPE)
    if about == "cu_seqlens":
        x = x[0]
    if about == "hooks":
        x.requires_grad_()
    options = {"method": "ring"} | options
    with save_on_cpu() if about == "hooks" and odd else nullcontext():
        return error_of(lambda: context_parallel_attention(x, x, x, groups()[ranks], **options))


def put_together(about: str) -> str:
    """What a rank is told where the parts of a sequence do not fit together, or the last rank asks for attention."""
    odd = dist.get_rank() == 1
    x, group = torch.zeros(2, 8, 3), groups()[2]
    if odd and about == "attention":
        q = torch.zeros(1, 20, 2, 16, dtype=DTYPE)
        return error_of(lambda: context_parallel_attention(q, q, q, group, method="ring"))
    parts = {"shape": x[:, :4], "dtype": x.long()}
    layout = "contiguous" if odd and about == "layout" else "zigzag"
    part = parts.get(about, x) if odd else x
    return error_of(
        lambda: unshard_sequence(part, group, layout=layout, dim=2 if about == "attention" else 1)
    )


def mistaken_sequences() -> list[str]:
    """What is said of arguments that are not allowed, before anything is sent."""
    x, group = torch.zeros(2, 8, 3), groups()[2]
    calls: list[Callable[[], Any]] = [
        lambda: unshard_sequence(None, group),
        lambda: unshard_sequence(x, group, dim=3),
        lambda: unshard_sequence(x, group, layout="rows"),
        lambda: unshard_sequence(x, 3),
        lambda: sequence_positions("8", group),
        lambda: sequence_positions(-4, group),
    ]
    return [error_of(call) for call in calls]


def mistaken_options() -> list[str]:
    """The same of options of attention."""
    x, group = torch.zeros(1, 8, 2, 16, dtype=DTYPE), groups()[2]
    given: list[dict[str, Any]] = [
        {"timeout": "3"},
        {"timeout": float("inf")},
        {"timeout": True},
        {"sinks": [0.0, 0.0]},
        {"mesh": [group]},
        {"cu_seqlens": [0, 7.6]},
        {"cu_seqlens": torch.tensor([0.0, 16.0])},
    ]
    return [
        error_of(
            lambda o=o: context_parallel_attention(
                *[x[0] if "cu_seqlens" in o else x] * 3, **{"mesh": group} | o
            )
        )
        for o in given
    ]


def check_or_not(number: int) -> str:
    """What rank 0, which checks, is told where rank 1 does not; rank 1 goes on until it has waited in vain."""
    odd, x = dist.get_rank() == 1, torch.zeros(1, 8, 2, 16, dtype=DTYPE)
    group = dist.new_group([0, 1], timedelta(seconds=30), use_local_synchronization=True)
    # Both calls before are harmless: nobody is asked what was agreed on, nor told it twice.
    for check in ("first", "first" if odd else "never")[:number]:
        context_parallel_attention(x, x, x, group, method="ring", check=check, timeout=0.5)
    options = {"method": "ring", "causal": True, "timeout": 0.5, "check": "never" if odd else "first"}
    return error_of(lambda: context_parallel_attention(x, x, x, group, **options))


def change() -> str:
    """What ranks are told where both have made a call, and rank 1 makes another one next."""
    odd, x = dist.get_rank() == 1, torch.zeros(1, 8, 2, 16, dtype=DTYPE)
    group = dist.new_group([0, 1], timedelta(seconds=30), use_local_synchronization=True)
    for _ in range(3):
        context_parallel_attention(x, x.clone(), x.clone(), group, method="ring", timeout=0.5)
    options = {"method": "ring", "timeout": 0.5, "causal": odd}
    return error_of(lambda: context_parallel_attention(x, x.clone(), x.clone(), group, **options))


def stay_away(method: str, check: str) -> str:
    """Rank 1 of a new group does not call: what rank 0 is told, and how soon."""
    group = dist.new_group([0, 1], timedelta(seconds=30))
    if dist.get_rank() != 0:
        return ""
    x, call = torch.zeros(1, 4, 2, 16, dtype=DTYPE), context_parallel_attention
    began = time.monotonic()
    told = error_of(lambda: call(x, x, x, group, method=method, check=check, timeout=0.3))
    return told if time.monotonic() - began < 10 else "it took too long"


def die() -> str:
    """Rank 1 ends after a first call: what rank 0 is told in the next."""
    x, call = torch.zeros(1, 4, 2, 16, dtype=DTYPE), context_parallel_attention
    call(x, x, x, groups()[2], method="ring", timeout=20.0)
    if dist.get_rank() == 1:
        # What it sent has arrived by then.
        time.sleep(0.2)
        os._exit(1)
    return error_of(lambda: call(x, x, x, groups()[2], method="ring", timeout=20.0))


def refuse(what: str) -> str:
    """What a call is refused with, before anything is sent."""
    x = torch.zeros(1, 8, 4, 16, dtype=DTYPE)
    mesh, fp8 = groups()[2], Fp8Quantization()
    odd, many = torch.zeros(1, 7, 4, 16, dtype=DTYPE), torch.zeros(1, 8, 3, 16, dtype=DTYPE)
    calls: dict[str, Callable[[], Any]] = {
        "rows": lambda: context_parallel_attention(odd, odd, odd, mesh),
        "heads": lambda: context_parallel_attention(many, many, many, mesh, method="ulysses"),
        "method": lambda: context_parallel_attention(x, x, x, mesh, method="sing"),
        "mesh": lambda: context_parallel_attention(x, x, x, mesh, method="mesh"),
        "documents": lambda: context_parallel_attention(x[0], x[0], x[0], mesh, cu_seqlens=(0, 9, 17)),
        "packed": lambda: context_parallel_attention(x, x, x, mesh, cu_seqlens=(0, 16)),
        "fp8 window": lambda: context_parallel_attention(
            x, x, x, mesh, quantization=fp8, window_size=(3, 0), method="ring"
        ),
        "fp8 gradient": lambda: context_parallel_attention(
            x.clone().requires_grad_(), x, x, mesh, quantization=fp8
        ),
        "fp8 mean": lambda: context_parallel_attention(
            x, x, x, mesh, quantization=Fp8Quantization(smooth_k=True)
        ),
        "fp8 lengths": lambda: context_parallel_attention(
            x, x.repeat(1, 3, 1, 1), x.repeat(1, 3, 1, 1), mesh, quantization=fp8, causal=True
        ),
        "timeout": lambda: context_parallel_attention(x, x, x, mesh, timeout=-1.0),
        "memory": lambda: context_parallel_attention(x, x, x, mesh, memory="little"),
        "memory of gathered keys": lambda: context_parallel_attention(
            x, x, x, mesh, method="all_gather", memory="least"
        ),
    }
    return error_of(calls[what])
