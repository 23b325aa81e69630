"""Context parallelism: attention over a sequence that is shared out to the ranks of a group of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from hopper_attention import checks
from hopper_attention.api import Window, flash_attn_func
from hopper_attention.autocast import cast_inputs
from hopper_attention.checks import Result
from hopper_attention.distributed import again
from hopper_attention.distributed.auto import (
    ALL_GATHER,
    AUTO,
    DEFAULT_MACHINE,
    MESH,
    RING,
    ULYSSES,
    WITHOUT_PEERS,
    ContextPlan,
    Machine,
    Sizes,
    given_bytes,
    plan,
    plan_mesh,
    transport_of,
    why_not_ulysses,
)
from hopper_attention.distributed.division import AUTO_PARTS, bytes_in_parts
from hopper_attention.distributed.exchange import PeerError
from hopper_attention.distributed.function import Passes, SharedAttention
from hopper_attention.distributed.gather import gather_backward, gather_forward
from hopper_attention.distributed.layout import CONTIGUOUS, ZIGZAG
from hopper_attention.distributed.pieces import Problem
from hopper_attention.distributed.pushed import PushedExchange
from hopper_attention.distributed.request import Mesh, Options, Request, make_request
from hopper_attention.distributed.ring import ring_forward
from hopper_attention.distributed.ring_backward import ring_backward
from hopper_attention.distributed.store import who_speaks
from hopper_attention.distributed.tensors import is_dtensor, to_dtensor, to_local
from hopper_attention.distributed.ulysses import Fp8Options, Heads, exchange_for, parts_of
from hopper_attention.distributed.wire import ring_forward_fp8
from hopper_attention.masks import UNLIMITED
from hopper_attention.quantized import Fp8Quantization
from hopper_attention.varlen import flash_attn_varlen_func

PASSES = {RING: Passes(ring_forward, ring_backward), ALL_GATHER: Passes(gather_forward, gather_backward)}
"""By method, of those that keep rows of Q where they are."""


class ContextOptions(TypedDict, total=False):
    """Those of :func:`context_parallel_attention`, but for ``method``."""

    causal: bool
    window_size: Window
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None
    cu_seqlens: Tensor | Sequence[int] | None
    layout: str
    quantization: Fp8Quantization | None
    deterministic: bool
    sm_margin: int
    return_lse: bool
    backend: str | None
    timeout: float
    check: str
    memory: str


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh = None,
    *,
    method: str = AUTO,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: str = ZIGZAG,
    quantization: Fp8Quantization | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
    timeout: float = 0.0,
    check: str = "first",
    memory: str = AUTO,
) -> Result:
    """Attention over a sequence of which each rank of a group holds a part, differentiable.

    Every rank calls with its own rows of q, k and v and gets those of the output: what
    :func:`hopper_attention.flash_attn_func` would give for the whole sequence. Partial results are merged by their LSE
    in float32. All ranks make the same calls in the same order. A call under torch.compile is a break in the graph.

    Args:
        q: (batch, rows, heads, head_dim), float16 or bfloat16: rows of this rank, as :func:`shard_sequence` gives them.
            With ``cu_seqlens`` (rows, heads, head_dim). Or a DTensor whose sequence dimension is sharded over the mesh;
            then k, v and the output are too, and ``mesh`` is theirs.
        k: (batch, rows of k, kv_heads, head_dim); heads is a multiple of kv_heads.
        v: (batch, rows of k, kv_heads, head_dim_v).
        mesh: a process group, a DeviceMesh of one dimension, or None for all ranks. A mesh of two dimensions is (ring,
            ulysses): ranks of one row of it share heads, and rows are around the ring.
        method: "ring": K and V pass by while the kernel works. "all_gather": every rank gets all of K and V, some heads
            after the other. "ulysses": ranks exchange rows for heads, on one host and of short shards by writes into
            each other's memory; heads of q have to be a multiple of the ranks, those of k a multiple or divisor.
            "mesh": ulysses in the rows of a mesh, the ring over its columns. "auto": the least time by a model;
            :func:`explain_context_parallel` says which and why.
        causal: position i of the whole sequence sees the positions j <= i + seqlen_k - seqlen_q.
        window_size: (left, right), of positions of the whole sequence, as for ``flash_attn_func``. In the ring only
            ranks that share a window talk, which ``layout="contiguous"`` makes the fewest.
        softmax_scale, softcap, deterministic, backend: as for ``flash_attn_func``.
        sinks: (heads,) as there, the same on all ranks. The gradient on a rank is that of its own queries: sum it over
            the ranks, as those of weights.
        cu_seqlens: of packed documents: 0 and the end of each in positions of the whole sequence, the same on all
            ranks. A document may reach over any number of ranks. Ints or a CPU tensor; one on a GPU is waited for.
        layout: which rows a rank holds, "zigzag" or "contiguous"; see :mod:`hopper_attention.distributed.layout`.
            Zigzag shares out the work of a causal mask evenly.
        quantization: how Q, K and V become e4m3, for attention in FP8, forward only, without window, documents and
            softcap. In the ring, alone or in a mesh, K and V travel with half the bytes; with "ulysses" 16 bits travel,
            and the heads of a rank are quantized as one GPU would.
        sm_margin: streaming multiprocessors that the forward kernels leave to the transfers.
        return_lse: also return the LSE.
        timeout: seconds that a wait for other ranks may take before it raises ``PeerError`` and names them; on a GPU
            the host then waits for each transfer. 0: the group's own time-out, without such waits.
        check: "first": when a call differs from those before, ranks tell each other its shapes and options and raise
            where they differ. "never": a rank tells the others and does not wait for what they say, for calls known to
            be right, on a group that was in use before.
        memory: "auto": short shards are exchanged in the fastest way. "least": no more on a rank than two shards of K
            and V and the output, and dQ, dK and dV, at any length, some heads after the other: by ulysses where heads
            go over peer memory and keep to that, else by a ring; where there are too few heads for that, as little as
            a ring can. LSEs, and a buffer that earlier calls made larger, are not counted. With method "ulysses" heads
            go in parts over peer memory if they can, as little as these hold; messages, one key/value head a rank,
            and, with gradients, more than 128 columns or a narrow window hold what all heads at once do; not with
            sinks, documents and quantization. Not with "all_gather" and meshes.

    Returns:
        out (batch, rows, heads, head_dim_v) in the dtype of q, or (rows, heads, head_dim_v); with ``return_lse``,
        (out, lse), where lse is the natural log of the sum of exp(scores), float32 (batch, heads, rows) or (heads,
        rows).

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, what it was and what is allowed.
        NotImplementedError: a feature is not implemented; the message says what to use instead.
        DisagreementError: ranks differ in shapes or options, and in which.
        PeerError: a rank did not answer.
    """
    given = (
        method,
        softmax_scale,
        causal,
        window_size,
        softcap,
        cu_seqlens,
        layout,
        quantization,
        deterministic,
        sm_margin,
        backend,
        timeout,
        check,
        return_lse,
        memory,
    )
    key = again.key_of(q, k, mesh, sinks, given) if cu_seqlens is None else None
    like = None if key is None else again.find(key, q, k, v)
    if like is not None:
        out, lse = _run(like.method, q, k, v, None, like.request, like.options)
        return out if lse is None else (out, lse)
    causal, return_lse = checks.check_flag("causal", causal), checks.check_flag("return_lse", return_lse)
    options = replace(Options(*given), causal=causal, return_lse=return_lse)
    checks.check_are_tensors(q=q, k=k, v=v)
    if is_dtensor(q, k, v):
        local, of_mesh = to_local(q, k, v, mesh, is_packed=cu_seqlens is not None)
        out, lse = _attend(local, sinks, of_mesh, options, None)
        out = to_dtensor(out, q)
    else:
        out, lse = _attend((q, k, v), sinks, mesh, options, key)
    return out if lse is None else (out, lse)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh = None, **options: Unpack[ContextOptions]
) -> Result:
    """:func:`context_parallel_attention` with ``method="ring"``, whose arguments and results it has."""
    return context_parallel_attention(q, k, v, mesh, method=RING, **options)


def all_gather_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh = None, **options: Unpack[ContextOptions]
) -> Result:
    """:func:`context_parallel_attention` with ``method="all_gather"``, whose arguments and results it has."""
    return context_parallel_attention(q, k, v, mesh, method=ALL_GATHER, **options)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh = None, **options: Unpack[ContextOptions]
) -> Result:
    """:func:`context_parallel_attention` with ``method="ulysses"``, whose arguments and results it has."""
    return context_parallel_attention(q, k, v, mesh, method=ULYSSES, **options)


def explain_context_parallel(
    world: int,
    seqlen: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    batch: int = 1,
    head_dim_v: int | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    layout: str = ZIGZAG,
    fp8: bool = False,
    machine: Machine = DEFAULT_MACHINE,
    ulysses: int = 1,
    inside: Machine = DEFAULT_MACHINE,
) -> ContextPlan:
    """What ``method="auto"`` chooses for a whole sequence of ``seqlen`` on ``world`` ranks, and why.

    Needs no process group and no GPU, and computes nothing. ``machine`` is what the model knows of the hardware.
    With ``ulysses`` above 1 it is the plan of a mesh of world / ulysses places with so many ranks each: ``machine`` has
    the links between places then, and ``inside`` those in one.

    Raises:
        ValueError, TypeError: an argument is not allowed.
    """
    counts = {"world": world, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch}
    width = head_dim if head_dim_v is None else head_dim_v
    for name, count in (counts | {"head_dim_v": width, "ulysses": ulysses}).items():
        checks.check_count(name, count)
    checks.check_count("seqlen", seqlen, 0)
    checks.check_heads(heads, kv_heads)
    options = Options(causal=causal, window_size=window_size, layout=layout)
    if world % ulysses:
        raise ValueError(f"ulysses is {ulysses}, allowed: a divisor of the {world} ranks")
    problem = Problem(world // ulysses, seqlen, seqlen, layout, *options.sides)
    sizes = Sizes(batch, heads, kv_heads, head_dim, width, 1 if checks.check_flag("fp8", fp8) else 2)
    if ulysses > 1:
        return plan_mesh(problem, ulysses, sizes, (machine, inside))
    return plan(problem, sizes, machine)


@torch.compiler.disable
def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    mesh: Mesh,
    o: Options,
    key: again.Key | None,
) -> tuple[Tensor, Tensor | None]:
    """out of local tensors, and lse if it is wanted; with a key it is remembered what served them."""
    q, k, v = cast_inputs(*tensors)
    is_packed = o.cu_seqlens is not None
    if is_packed:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 3:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}, allowed with cu_seqlens: (rows, heads, head_dim)"
                )
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    request = make_request(q, k, v, sinks, mesh, o)
    method = _method_of(request, o, (q, k, v), sinks is not None)
    # Not where autocast made others of them.
    if key is not None and q is tensors[0] and k is tensors[1] and v is tensors[2]:
        again.remember(key, tensors, again.LikeCall(method, request, o))
    if method == MESH:
        heads = Heads.of(request.ulysses[0], q, k, v, CONTIGUOUS)
        out, lse = _run(RING, *heads.gather(q, k, v), heads.of_sinks(sinks), request, o)
        out, lse = heads.give_back(out, lse)
    else:
        out, lse = _run(method, q, k, v, sinks, request, o)
    if is_packed:
        out, lse = out[0], None if lse is None else lse[0]
    return out, lse


def _method_of(request: Request, o: Options, tensors: tuple[Tensor, Tensor, Tensor], has_sinks: bool) -> str:
    if request.ulysses:
        return MESH
    if o.method != AUTO:
        return o.method
    if request.call.is_least:
        is_plain = not has_sinks and o.quantization is None and not request.problem.documents
        return ULYSSES if is_plain and _keeps_to_the_aim(request, tensors) else RING
    return plan(request.problem, request.sizes, _machine_of(request, tensors[0].device)).method


def _keeps_to_the_aim(request: Request, tensors: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether heads in parts over peer memory hold no more than two shards of K and V and the output."""
    # As if there were a backward pass, for calls that are alike to take the same method.
    parts = parts_of(tensors, request.ring.size, request.problem, request.call, True)
    if parts is None or len(parts.backward.shares) > AUTO_PARTS:
        return False
    of_rank = request.sizes.of_rank(request.problem)
    held = bytes_in_parts(of_rank, request.ring.size)
    if held is None or held > of_rank.aim:
        return False
    return _may_have_peers(request) and _has_peers(request, tensors[0].device)


def _may_have_peers(request: Request) -> bool:
    """Whether heads would go over peer memory, if the ranks have some."""
    ring, sizes, rows = request.ring, request.sizes, request.problem.seqlen_q // request.problem.world
    return (
        not why_not_ulysses(sizes, ring.size)
        and transport_of(rows, ring.size, sizes, DEFAULT_MACHINE) == PushedExchange.name
    )


def _has_peers(request: Request, device: torch.device) -> bool:
    """Whether they do. All ranks ask together."""
    rows = request.problem.seqlen_q // request.problem.world
    given = given_bytes(rows, request.ring.size, request.sizes)
    return exchange_for(request.ring, given, device).name == PushedExchange.name


def _machine_of(request: Request, device: torch.device) -> Machine:
    """The assumptions of ``auto``, and what was found of the group. Asks it once, where the answer counts."""
    return WITHOUT_PEERS if _may_have_peers(request) and not _has_peers(request, device) else DEFAULT_MACHINE


def _run(
    method: str, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, request: Request, o: Options
) -> tuple[Tensor, Tensor | None]:
    try:
        return _run_by(method, q, k, v, sinks, request, o)
    except PeerError as error:
        ranks = request.ring
        others = ", ".join(map(ranks.name, who_speaks(ranks)))
        if not others:
            raise
        raise PeerError(
            f"{error}; meanwhile {others} came to another call, whose shapes or options are new there"
        ) from error


def _run_by(
    method: str, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, request: Request, o: Options
) -> tuple[Tensor, Tensor | None]:
    ring, problem, call = request.ring, request.problem, request.call
    if o.quantization is not None and method == ULYSSES:
        heads = Heads.of(ring, q, k, v, problem.layout)
        # Without a window, but that a right side of 0 is a causal mask.
        options = Fp8Options(o.quantization, problem.right == 0)
        return heads.attend_in_fp8((q, k, v), sinks, call, options, o.return_lse)
    if o.quantization is not None:
        out, lse = ring_forward_fp8(ring, problem, call, (q, k, v), sinks, o.quantization, o.return_lse)
    elif method == ULYSSES:
        return _ulysses((q, k, v), sinks, request, o)
    else:
        out, lse = SharedAttention.apply(q, k, v, sinks, PASSES[method], ring, problem, call)
    return out, lse if o.return_lse else None


def _ulysses(
    tensors: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, request: Request, o: Options
) -> tuple[Tensor, Tensor | None]:
    """One GPU's attention of some heads, between two exchanges."""
    problem = request.problem
    heads = Heads.of(request.ring, *tensors, problem.layout)
    if sinks is None and not problem.documents:
        found = heads.attend(tensors, problem, request.call, o.return_lse)
        if found is not None:
            return found
    q, k, v = heads.gather(*tensors)
    window = problem.left, UNLIMITED if o.causal else problem.right
    options: dict[str, Any] = {
        "softmax_scale": request.call.softmax_scale,
        "causal": o.causal,
        "window_size": window,
        "softcap": o.softcap,
        "sinks": heads.of_sinks(sinks),
        "deterministic": o.deterministic,
        "backend": o.backend,
        "return_attn_probs": o.return_lse,
    }
    if not problem.documents:
        found = flash_attn_func(q, k, v, **options)
        out, lse = found if o.return_lse else (found, None)
        return heads.give_back(out, lse)
    starts = torch.tensor(problem.documents, dtype=torch.int32, device=q.device)
    longest = max(b - a for a, b in pairwise(problem.documents))
    lengths = starts, starts, longest, longest
    found = flash_attn_varlen_func(q[0], k[0], v[0], *lengths, **options)
    out, lse = found if o.return_lse else (found, None)
    return heads.give_back(out[None], None if lse is None else lse[None])
