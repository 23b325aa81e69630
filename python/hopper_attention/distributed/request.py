"""What a call of several ranks asks for, checked: from arguments to groups, a problem and options of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hopper_attention import checks
from hopper_attention.api import Window
from hopper_attention.checks import FP8_DTYPE, FULL_WINDOW, TensorSpec
from hopper_attention.device_memory import is_capturing
from hopper_attention.distributed.attend import Call
from hopper_attention.distributed.auto import AUTO, MESH, METHODS, RING, ULYSSES, Sizes
from hopper_attention.distributed.checks import CHECKS, FIRST, check_agreement, read_documents
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.layout import CHUNKS_A_RANK, ZIGZAG, check_layout
from hopper_attention.distributed.pieces import Problem
from hopper_attention.distributed.ulysses import check_heads
from hopper_attention.distributed.wire import check_quantization_travels
from hopper_attention.features import read_window
from hopper_attention.masks import UNLIMITED
from hopper_attention.plain_calls import needs_gradient, saves_elsewhere
from hopper_attention.quantized import Fp8Quantization, check_quantization
from hopper_attention.scores import Scores, check_scores

LEAST = "least"
MEMORIES = AUTO, LEAST

LONGEST_TIMEOUT_S = 1e9
"""Thirty years, which clocks still count."""

Mesh = dist.ProcessGroup | DeviceMesh | None
"""A group, a mesh of one dimension, one of two (ring, ulysses), or None for all ranks."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``context_parallel_attention`` beside tensors and mesh; see there."""

    method: str = AUTO
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = FULL_WINDOW
    softcap: float = 0.0
    cu_seqlens: Tensor | Sequence[int] | None = None
    layout: str = ZIGZAG
    quantization: Fp8Quantization | None = None
    deterministic: bool = False
    sm_margin: int = 0
    backend: str | None = None
    timeout: float = 0.0
    check: str = FIRST
    return_lse: bool = False
    memory: str = AUTO

    def __post_init__(self) -> None:
        given = (
            ("method", self.method, METHODS),
            ("check", self.check, CHECKS),
            ("memory", self.memory, MEMORIES),
        )
        for name, value, words in given:
            if value not in words:
                raise ValueError(f"{name} is {value!r}, allowed: {', '.join(map(repr, words))}")
        check_layout(self.layout)
        for name in ("causal", "deterministic"):
            checks.check_flag(name, getattr(self, name))
        checks.check_softcap(self.softcap)
        checks.check_sm_margin(self.sm_margin)
        checks.check_backend(self.backend)
        if not checks.is_number(self.timeout):
            raise TypeError(f"timeout is a {type(self.timeout).__name__}, {self.timeout!r}, allowed: seconds")
        if not 0 <= self.timeout <= LONGEST_TIMEOUT_S:
            allowed = f"seconds, or 0 for that of the group; up to {LONGEST_TIMEOUT_S:.0e}"
            raise ValueError(f"timeout is {self.timeout}, allowed: {allowed}")
        if self.quantization is not None:
            check_quantization(self.quantization)

    @property
    def sides(self) -> tuple[int, int]:
        """(left, right) of the window, with ``causal`` in the right one."""
        left, right = read_window(self.window_size)
        return left, 0 if self.causal else right


def groups_of(mesh: Mesh, timeout: float) -> tuple[Ranks, ...]:
    """The ranks of a group, or of the two dimensions of a mesh: ring, then ulysses.

    Raises:
        TypeError: it is neither, nor None.
        ValueError: the mesh has more dimensions, or this rank is not of the group.
    """
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("mesh is a group without this rank, allowed: one that it is of")
    if not isinstance(mesh, (DeviceMesh, dist.ProcessGroup, type(None))):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}, {mesh!r}, allowed: a ProcessGroup, a DeviceMesh or None"
        )
    if not isinstance(mesh, DeviceMesh):
        return (Ranks.of(mesh, timeout),)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions, allowed: 1, or 2 for ring and ulysses; use mesh['name'] for a part of it"
        )
    return tuple(Ranks.of(mesh.get_group(i), timeout) for i in range(mesh.ndim))


@dataclass(frozen=True)
class Request:
    """A checked call.

    Attributes:
        ring: the ranks that the sequence is shared out to by ``problem``.
        ulysses: those that share the heads of a part of the ring; of size 1 where there is no such mesh.
        problem: of the whole sequence and the ring.
        sizes: of the tensors on this rank's part of the heads.
        call: options of every launch.
    """

    ring: Ranks
    ulysses: tuple[Ranks, ...]
    problem: Problem
    sizes: Sizes
    call: Call


def make_request(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Mesh, o: Options) -> Request:
    """Check everything that one rank can know, and that ranks agree.

    q, k and v are (batch, rows, heads, head_dim), also of packed documents.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument is not allowed.
        DisagreementError, PeerError: the ranks do not make the same call.
    """
    checks.check_qkv(TensorSpec.of(q), TensorSpec.of(k), TensorSpec.of(v))
    if q.dtype == FP8_DTYPE:
        raise TypeError(
            f"q has dtype {FP8_DTYPE}, allowed: torch.float16, torch.bfloat16; with quantization=Fp8Quantization() "
            "16-bit tensors travel and are attended to in e4m3"
        )
    scale = q.shape[3] ** -0.5 if o.softmax_scale is None else checks.check_scale(o.softmax_scale)
    if sinks is not None:
        checks.check_are_tensors(sinks=sinks)
    check_scores(Scores.of(o.softcap, None, sinks), q.shape[0], q.shape[2], q.dtype, q.device)
    ring, *inner = groups_of(mesh, o.timeout)
    if (o.method == MESH) != bool(inner) and o.method != AUTO:
        raise ValueError(
            f"method is {o.method!r} and mesh has {1 + len(inner)} dimensions, allowed: 'mesh' or 'auto' with a mesh "
            "of 2 dimensions, ring and ulysses, and the others with a group or a mesh of 1"
        )
    parts = inner[0].size if inner else 1
    if inner or o.method == ULYSSES:
        check_heads(q.shape[2], k.shape[2], parts if inner else ring.size)
    _check_rows(q.shape[1], k.shape[1], parts, o.layout)
    seqlen_q, seqlen_k = (x.shape[1] * parts * ring.size for x in (q, k))
    documents = read_documents(o.cu_seqlens, seqlen_q)
    if documents and seqlen_q != seqlen_k:
        raise ValueError(
            f"q has {q.shape[1]} rows and k {k.shape[1]}, allowed with cu_seqlens: as many, those of the same documents"
        )
    problem = Problem(ring.size, seqlen_q, seqlen_k, o.layout, *o.sides, documents)
    if o.quantization is not None:
        _check_fp8(problem, o, needs_gradient(q, k, v))
    is_least = o.memory == LEAST
    if is_least and (inner or o.method not in (RING, ULYSSES, AUTO)):
        raise ValueError(
            f"memory is {LEAST!r} and method {o.method!r}, with a mesh of {1 + len(inner)} dimensions, allowed: "
            f"{RING!r}, {ULYSSES!r} and {AUTO!r} on a group or a mesh of 1; the others hold what they have to"
        )
    if is_least and o.method == ULYSSES:
        _check_parts(sinks, problem, o)
    call = Call(scale, float(o.softcap), o.backend, bool(o.deterministic), o.sm_margin, is_least)
    for ranks in (ring, *inner):
        _check_agreement(ranks, (q, k, v), sinks, problem, call, o)
    heads, kv_heads = (max(1, n // parts) for n in (q.shape[2], k.shape[2]))
    sizes = Sizes(q.shape[0], heads, kv_heads, q.shape[3], v.shape[3], 1 if o.quantization else 2)
    return Request(ring, tuple(inner), problem, sizes, call)


def _check_rows(rows_q: int, rows_k: int, parts: int, layout: str) -> None:
    chunks = CHUNKS_A_RANK[layout]
    for name, rows in (("q", rows_q), ("k", rows_k)):
        if rows * parts % chunks:
            raise ValueError(
                f"{name} has {rows} rows on this rank, allowed with layout {layout!r}: multiples of {chunks}, its "
                "chunks; pad the whole sequence, or use layout='contiguous'"
            )


def _check_fp8(problem: Problem, o: Options, wants_gradient: bool) -> None:
    """Raise for what e4m3 on the wire does not go with."""
    assert o.quantization is not None
    if o.method != ULYSSES:
        check_quantization_travels(o.quantization)
    given = {
        f"method {o.method!r}": o.method not in (RING, ULYSSES, MESH, AUTO),
        "a window": problem.left != UNLIMITED or problem.right > 0,
        "cu_seqlens": bool(problem.documents),
        "another length of q than of k under a causal mask in a ring": o.method != ULYSSES
        and problem.right == 0
        and problem.seqlen_q != problem.seqlen_k,
        "softcap": o.softcap != 0.0,
        "a gradient": wants_gradient,
    }
    for name, is_given in given.items():
        if is_given:
            raise NotImplementedError(
                f"quantization goes with the ring and ulysses, causal or not, forward only, and not with {name}; use "
                "quantization=None, which sends 16 bits"
            )


def _check_parts(sinks: Tensor | None, problem: Problem, o: Options) -> None:
    """Raise for what heads do not go in parts with."""
    given = {
        "sinks": sinks is not None,
        "cu_seqlens": bool(problem.documents),
        "quantization": o.quantization is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise NotImplementedError(
                f"memory={LEAST!r} with method={ULYSSES!r} is not implemented with {name}; use method={RING!r} or "
                f"{AUTO!r}, or memory={AUTO!r}"
            )


def _check_agreement(
    ranks: Ranks,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    problem: Problem,
    call: Call,
    o: Options,
) -> None:
    q, k, v = tensors
    given = tensors if sinks is None else (*tensors, sinks)
    said: dict[str, Any] = {
        "the shape of q": tuple(q.shape),
        "the shape of k": tuple(k.shape),
        "the shape of v": tuple(v.shape),
        "the dtype of q": str(q.dtype),
        "whether there are sinks": sinks is not None,
        "whether a gradient is wanted": needs_gradient(*given),
        # What heads are attended to stays in the buffer of all ranks or of none.
        "whether hooks save tensors": needs_gradient(*given) and saves_elsewhere(),
        "method": o.method,
        "memory": o.memory,
        "layout": o.layout,
        "the window, with causal,": (problem.left, problem.right),
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
        "quantization": str(o.quantization),
        "return_lse": o.return_lse,
        "cu_seqlens, as a hash,": hash(problem.documents),
        "deterministic": call.deterministic or torch.are_deterministic_algorithms_enabled(),
        "backend": call.backend,
        # Heads go by messages where there is one, and where a graph is captured.
        "timeout": float(o.timeout),
        "whether a CUDA graph is captured": is_capturing(q.device),
    }
    check_agreement(ranks, said, o.check, q.device)
