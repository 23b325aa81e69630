"""Processes that stay alive for many calls, and what they do: attention of a shard. Eight on CPUs, with gloo."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hopper_attention.distributed import (
    api,
    attention_interface,
    context_parallel_attention,
    over_peers,
    ring,
    ring_backward,
    sequence_positions,
    shard_sequence,
    ulysses,
    unshard_sequence,
    wire,
)
from hopper_attention.distributed import peers as peers_module
from hopper_attention.distributed import (
    schedule as schedules,
)
from hopper_attention.distributed.division import Division
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.heads import HeadExchange, MessageExchange
from hopper_attention.distributed.parts_over_peers import PartedExchange
from hopper_attention.distributed.pushed import PushedExchange, bytes_for
from hopper_attention.distributed.schedule import Schedule
from hopper_attention.launch import copies
from tests.python.file_memory import FileMemory, copies_by_torch

WORLD = 8
SIZES = (2, 3, 4, 8)
MESHES = {"2x2": ((0, 1), (2, 3)), "2x4": ((0, 1, 2, 3), (4, 5, 6, 7))}
DTYPE = torch.float16

ANSWER_S = 120
"""That a call may take, kernels compiled among it."""


@dataclass(frozen=True)
class Case:
    """A whole problem. ``ranks`` are the size of a group or the name of a mesh."""

    ranks: int | str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    seqlen: int = 48
    seqlen_k: int = 48
    heads: tuple[int, int] = (4, 2)
    batch: int = 2
    has_sinks: bool = False
    with_gradient: bool = True
    head_dim_v: int = 8

    @property
    def documents(self) -> tuple[int, ...]:
        return self.options.get("cu_seqlens", ())

    def tensors(self) -> list[Tensor]:
        """q, k, v, dout, dlse and sinks of the whole sequence, the same in every process."""
        g = torch.Generator().manual_seed(7)
        heads, kv_heads = self.heads
        n, n_k = self.seqlen, self.seqlen_k
        sizes = (
            (n, heads, 16),
            (n_k, kv_heads, 16),
            (n_k, kv_heads, self.head_dim_v),
            (n, heads, self.head_dim_v),
        )
        whole = [torch.randn(self.batch, *size, generator=g).to(DTYPE) for size in sizes]
        dlse = torch.randn(self.batch, self.seqlen, heads, generator=g)
        return [*whole, dlse, torch.randn(heads, generator=g)]


@cache
def groups() -> dict[int | str, Any]:
    """By size or name; all processes make all of them."""
    world, kind = dist.get_world_size(), device().type
    sizes = (n for n in SIZES if n <= world)
    found: dict[int | str, Any] = {n: dist.new_group(list(range(n)), timedelta(seconds=60)) for n in sizes}
    meshes = {name: torch.tensor(rows) for name, rows in MESHES.items()}
    return found | {name: DeviceMesh(kind, rows) for name, rows in meshes.items() if rows.numel() <= world}


def device() -> torch.device:
    """Where this process has its tensors."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def members(ranks: int | str) -> int:
    return ranks if isinstance(ranks, int) else len(MESHES[ranks]) * len(MESHES[ranks][0])


def attend(case: Case) -> dict[str, np.ndarray]:
    """out, lse and gradients of this rank's rows; those of the sinks from its own queries."""
    mesh, layout = groups()[case.ranks], case.options.get("layout", "zigzag")
    *whole, sinks = (x.to(device()) for x in case.tensors())
    q, k, v, dout, dlse = (shard_sequence(x, mesh, layout=layout) for x in whole)
    if case.documents:
        q, k, v, dout, dlse = (x[0] for x in (q, k, v, dout, dlse))
    wanted = [x.requires_grad_(case.with_gradient) for x in (q, k, v)]
    options = dict(case.options)
    if case.has_sinks:
        wanted.append(sinks.requires_grad_(case.with_gradient))
        options["sinks"] = sinks
    out, lse = context_parallel_attention(q, k, v, mesh, method=case.method, return_lse=True, **options)
    found = {"out": out.detach(), "lse": lse.detach().mT}
    if case.with_gradient:
        of_lse = torch.where(lse.isfinite(), lse, 0.0).mT
        loss = (out.float() * dout.float()).sum() + (of_lse * dlse).sum()
        grads = torch.autograd.grad(loss, wanted)
        found |= dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))
    return {name: x.float().cpu().numpy() for name, x in found.items()}


def attend_with_kernels(case: Case, schedule: Schedule | None = None) -> tuple[dict[str, np.ndarray], int]:
    """``attend`` with stand-ins for the kernels of the backward pass, and how often these were launched."""
    from tests.python.summing_kernels import kernels_on_a_cpu

    with kernels_on_a_cpu() as kernels:
        found = attend_by(case, schedule) if schedule else attend(case)
        return found, len(kernels.passes)


def attend_by(case: Case, schedule: Schedule) -> dict[str, np.ndarray]:
    """``attend`` with a schedule of the ring for both passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "fp8_parts", lambda *sizes: schedule.parts)
        patch.setattr(ring, "forward_schedule", lambda *sizes: schedule)
        patch.setattr(ring_backward, "backward_schedule", lambda *sizes: schedule)
        # Short shards too have some of their own work beside a call.
        patch.setattr(schedules, "FULL_ROWS", 16)
        return attend(case)


def writes_to_files(ranks: Ranks, folder: str, nbytes: int = bytes_for(1 << 14)) -> PushedExchange:
    return PushedExchange(
        ranks, FileMemory(ranks, folder, nbytes), lambda larger: FileMemory(ranks, folder, larger)
    )


def attend_by_peer_memory(
    case: Case, folder: str, in_parts: bool = False, division: Division | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """``attend`` where heads are written to files, perhaps by a ``division``, and how often ranks met."""
    made: dict[str, PushedExchange] = {}
    turns = []

    def find(group: dist.ProcessGroup, ranks: Ranks, device: torch.device) -> PushedExchange:
        return made.setdefault(group.group_name, writes_to_files(ranks, folder))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ulysses, "_pushes_between", find)
        if in_parts:
            case = replace(case, options=case.options | {"memory": "least"})
            patch.setattr(copies, "find", copies_by_torch)
            patch.setattr(copies, "current_device", lambda: 0)
        if division:
            patch.setattr(ulysses, "divide", lambda kv_heads: division)
        meet = FileMemory.meet
        patch.setattr(FileMemory, "meet", lambda memory: (turns.append(1), meet(memory)))
        return attend(case), len(turns)


def rows_like(kind: str) -> list[Tensor]:
    """q, k and v of some rows, of two ranks, and a gradient of the output, of new values."""
    dtype = torch.bfloat16 if kind == "dtype" else DTYPE
    shape = 1, 8 if kind == "shape" else 4, 4, 16
    q, k, v, dout = (torch.randn(shape).to(dtype) for _ in range(4))
    if kind == "strides":
        q = torch.stack([q, q], 2)[:, :, 1]
    if kind == "misaligned":
        q = torch.cat([torch.zeros(1, dtype=dtype), q.flatten()])[1:].view(shape)
    return [*(x.requires_grad_(kind != "no gradient") for x in (q, k, v)), dout]


def call_again(kind: str, folder: str) -> list[tuple[int, int, int]]:
    """Of a call like those before, and of one of another kind: requests, plans of an exchange, and views that it made.

    Raises where its results are not those of messages.
    """
    counts = {"make_request": 0, "_sending": 0, "as_strided": 0}
    exchanges: dict[str, PushedExchange] = {}

    def count(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*given: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*given, **options)

        patch.setattr(owner, name, counted)

    def find(group: dist.ProcessGroup, ranks: Ranks, device: torch.device) -> PushedExchange:
        return exchanges.setdefault(
            group.group_name, writes_to_files(ranks, f"{folder}/{len(exchanges)}", 1 << 14)
        )

    def call(kind: str, tensors: list[Tensor]) -> list[Tensor]:
        *qkv, dout = tensors
        group = other if kind == "group" else groups()[2]
        options = {"causal": kind != "options", "layout": "contiguous" if kind == "layout" else "zigzag"}
        out = context_parallel_attention(*qkv, group, method="ulysses", **options)
        return [out.detach(), *(torch.autograd.grad(out, qkv, dout) if out.requires_grad else ())]

    other = dist.new_group([0, 1], use_local_synchronization=True)
    for n in range(2):
        Path(folder, str(n)).mkdir(exist_ok=True)
    found = []
    for kind_now in (*["like"] * 4, kind):
        tensors = rows_like(kind_now)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ulysses, "_pushes_between", find)
            patch.setattr(copies, "find", copies_by_torch)
            patch.setattr(copies, "current_device", lambda: 0)
            for owner, name in ((api, "make_request"), (PushedExchange, "_sending"), (Tensor, "as_strided")):
                count(patch, owner, name)
            before = list(counts.values())
            results = call(kind_now, tensors)
        found.append(tuple(b - a for a, b in zip(before, counts.values(), strict=True)))
        # By messages.
        assert all(map(torch.equal, results, call(kind_now, tensors)))
    return found[-2:]


def layers_by_peer_memory(folder: str, in_parts: bool = False) -> bool:
    """Whether layers whose forward passes come before their backward passes, of two groups in turns and with a pass
    without gradients between them, have the bits of messages."""
    exchanges: dict[str, PushedExchange] = {}
    groups_of_layers = groups()[2], dist.new_group([0, 1], use_local_synchronization=True)
    Path(folder).mkdir(exist_ok=True)

    def find(group: dist.ProcessGroup, ranks: Ranks, device: torch.device) -> PushedExchange:
        of_group = Path(folder, str(len(exchanges)))
        of_group.mkdir(exist_ok=True)
        return exchanges.setdefault(group.group_name, writes_to_files(ranks, str(of_group), 1 << 13))

    def run(tensors: list[Tensor]) -> list[Tensor]:
        *leaves, dout = tensors
        options = {"method": "ulysses", "memory": "least" if in_parts else "auto"}
        x, outs = leaves[0], []
        for number in range(4):
            of_layer = groups_of_layers[number % 2]
            outs.append(context_parallel_attention(x, *leaves[1:], of_layer, causal=True, **options))
            x = x + outs[-1]
            with torch.no_grad():
                outs.append(context_parallel_attention(x, x, x, of_layer, **options))
        return [*outs, *torch.autograd.grad(x, leaves, dout, retain_graph=True)]

    is_right = []
    for kind in ("like", "shape", "like"):
        tensors = rows_like(kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ulysses, "_pushes_between", find)
            found = run(tensors)
        is_right += map(torch.equal, found, run(tensors))
    return all(is_right)


def there_and_back(exchange: HeadExchange, rows: list[Tensor], layout: str) -> list[Tensor]:
    """What comes of rows as heads, and of these as rows."""
    of_heads = exchange.to_heads(rows, layout)
    return of_heads + exchange.to_rows(of_heads, layout)


def exchange_both_ways(ranks: int, layout: str, folder: str) -> bool:
    """Whether writes to files of others give what messages give, many times over and in files that grow."""
    of_group = Ranks.of(groups()[ranks])
    by_messages, by_writes = MessageExchange(of_group), writes_to_files(of_group, folder, 1 << 11)
    g = torch.Generator().manual_seed(of_group.rank)
    for n in (1, 1, 2, 2, 3, 1, 1, 4, 4):
        rows = [torch.randn(2, 2 * n, 2 * ranks, d, generator=g).to(DTYPE) for d in (8, 4)]
        # As of a tensor with heads before rows.
        rows.append(torch.randn(1, 2 * ranks, 2 * n, 1, generator=g).transpose(1, 2))
        wanted, found = (there_and_back(x, rows, layout) for x in (by_messages, by_writes))
        assert all(map(torch.equal, wanted, found)) and all(x.is_contiguous() for x in found)
        lent = by_writes.lend_heads(rows, layout).tensors
        assert all(map(torch.equal, wanted, lent))
        offered = by_writes.offer(lent, layout)
        # What was lent is still there.
        for target, x in zip(offered.tensors, lent, strict=True):
            target.copy_(x)
        assert all(map(torch.equal, rows, by_writes.take_rows(offered)))
    return True


def exchange_between_gpus(layout: str) -> str:
    """What carries heads between all GPUs; raises where copies do not bring what messages bring.

    Exchanges follow each other without a wait of the host, on two streams, in buffers that grow.
    """
    ranks = Ranks.of(groups()[dist.get_world_size()])
    by_messages, by_writes = MessageExchange(ranks), ulysses.exchange_for(ranks, 1 << 20, device())
    if by_writes.name == by_messages.name:
        return str(ulysses._pushes_between(ranks.group, ranks, device()))
    torch.manual_seed(ranks.rank)
    pairs = []
    for number, n in enumerate((64, 64, 2048, 64, 2048, 128, 8192, 8192, 64, 64)):
        shapes = (1 + number % 2, 2 * n, 2 * ranks.size, 128), (1, 2 * n, 2 * ranks.size, 1)
        rows = [torch.randn(shape, device=device(), dtype=DTYPE) for shape in shapes]
        wanted = there_and_back(by_messages, rows, layout)
        stream = torch.cuda.Stream() if number % 3 == 0 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # A rank that is late, each time another one.
            if number % ranks.size == ranks.rank:
                torch.cuda._sleep(2_000_000)
            found = there_and_back(by_writes, rows, layout)
            lent = by_writes.lend_heads(rows, layout).tensors
            offered = by_writes.offer(lent, layout)
            for target, x in zip(offered.tensors, lent, strict=True):
                target.copy_(x)
            found += by_writes.take_rows(offered)
        torch.cuda.current_stream().wait_stream(stream)
        pairs += zip([*wanted, *rows], found, strict=True)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in pairs)
    return by_writes.name


def attend_again_on_gpus(calls: int, how: str) -> tuple[bool, int]:
    """Whether calls that are alike, of new values and without a wait of the host, have the bits of messages; and how
    many exchanges were planned, or parts of them. Heads come "at once", in "parts" of both passes, or in "waves". dQ of
    a part may differ by its rounding: a backward pass of fewer heads adds its float32 parts in another order."""
    group, shape = groups()[2], (1, 512, 8, 64)
    torch.manual_seed(dist.get_rank())
    plans, plan = [], PushedExchange._sending

    def call(tensors: list[Tensor], timeout: float) -> list[Tensor]:
        *qkv, dout = tensors
        options = {"causal": True, "deterministic": True, "timeout": timeout}
        options["memory"] = "least" if how == "parts" else "auto"
        out = context_parallel_attention(*qkv, group, method="ulysses", **options)
        return [out.detach(), *torch.autograd.grad(out, qkv, dout)]

    given = [[torch.randn(shape, device=device(), dtype=DTYPE) for _ in range(4)] for _ in range(calls)]
    for q, k, v, _ in given:
        for x in (q, k, v):
            x.requires_grad_()
    found = []
    plan_part = PartedExchange._plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartedExchange, "_plan", lambda *of_call: (plans.append(1), plan_part(*of_call))[1])
        patch.setattr(PushedExchange, "_sending", lambda *of_call: (plans.append(1), plan(*of_call))[1])
        patch.setattr(over_peers, "LEAST_IN_WAVES", 0 if how == "waves" else 1 << 40)
        for number, tensors in enumerate(given):
            # A rank that is late, each time the other one.
            if number % 2 == dist.get_rank():
                torch.cuda._sleep(2_000_000)
            found.append(call(tensors, 0.0))
    wanted = [call(tensors, 30.0) for tensors in given]
    is_right = True
    for (out, dq, *dkv), (wanted_out, wanted_dq, *wanted_dkv) in zip(found, wanted, strict=True):
        is_right &= all(map(torch.equal, (out, *dkv), (wanted_out, *wanted_dkv)))
        if how == "parts":
            is_right &= torch.allclose(dq, wanted_dq, rtol=torch.finfo(DTYPE).eps, atol=1e-6)
            is_right &= (dq != wanted_dq).double().mean().item() < 0.01
        else:
            is_right &= torch.equal(dq, wanted_dq)
    return is_right, len(plans)


def share_memory(what: str) -> str:
    """What ranks agree on where rank 1 cannot."""
    ranks, odd = Ranks.of(groups()[2]), dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        if what == "cannot":
            patch.setattr(peers_module, "why_not", lambda device: "no luck" if odd else "")
        elif what == "elsewhere":
            patch.setattr(peers_module, "why_not", lambda device: "")
            patch.setattr(peers_module, "_place", lambda: str(odd))
        elif what == "fails":

            def make(*arguments: Any) -> Any:
                if odd:
                    raise RuntimeError("CUDA driver error")
                return "made"

            patch.setattr(peers_module, "why_not", lambda device: "")
            patch.setattr(peers_module, "SymmetricMemory", make)
        found = peers_module.share_memory(ranks, torch.device("cpu"), 1 << 20)
    assert isinstance(found, str)
    return found


def attend_twice(case: Case) -> bool:
    """Whether two runs have the same bits."""
    first, second = attend(case), attend(case)
    return all(np.array_equal(first[name], second[name], equal_nan=True) for name in first)


def attend_under_autocast() -> bool:
    """Whether calls with keys in float32, which autocast casts, have the same bits however often they are made."""
    g = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, 4, 2, 16, generator=g) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        outs = [context_parallel_attention(q.bfloat16(), k, v, groups()[2], method="ring") for _ in range(4)]
    return all(torch.equal(out, outs[0]) for out in outs)


def of_dtensors(ranks: int | str) -> dict[str, np.ndarray]:
    """Attention of DTensors, contiguous on a mesh: what comes out of it as a whole, and the gradient of q."""
    *whole, _ = Case(ranks, "auto").tensors()
    given = groups()[ranks]
    mesh = given if isinstance(given, DeviceMesh) else DeviceMesh.from_group(given, "cpu")
    placements = [Shard(1)] * mesh.ndim
    q, k, v, dout = (distribute_tensor(x, mesh, placements) for x in whole[:4])
    q.requires_grad_()
    out = context_parallel_attention(q, k, v, causal=True, layout="contiguous")
    assert isinstance(out, DTensor) and out.placements == tuple(placements)
    (dq,) = torch.autograd.grad((out * dout).sum(), [q])
    return {"out": out.full_tensor().detach().float().numpy(), "dq": dq.full_tensor().float().numpy()}


def of_dtensors_sharded_elsewhere() -> str:
    mesh = DeviceMesh.from_group(groups()[2], "cpu")
    x = distribute_tensor(torch.zeros(2, 8, 4, 16, dtype=DTYPE), mesh, [Shard(2)])
    return error_of(lambda: context_parallel_attention(x, x, x))


def differentiated_twice(method: str) -> str:
    """What a second derivative is told."""
    mesh = groups()[2]
    x = torch.randn(1, 4, 2, 16).to(DTYPE).requires_grad_()
    out = context_parallel_attention(x, x, x, mesh, method=method)
    (dx,) = torch.autograd.grad(out.float().square().sum(), [x], create_graph=True)
    return error_of(lambda: dx.float().sum().backward())


def compiled(case: Case) -> bool:
    """Whether a compiled call, which breaks its graph, gives the same bits."""
    mesh = groups()[case.ranks]
    q, k, v = (shard_sequence(x, mesh) for x in case.tensors()[:3])

    def call(q: Tensor) -> Tensor:
        return context_parallel_attention(q + 0, k, v, mesh, method=case.method, **case.options) * 1

    return torch.equal(torch.compile(call, backend="eager")(q), call(q))


class Layer:
    """What Transformers hands on of a layer."""

    is_causal = True


def of_a_model(case: Case) -> dict[str, np.ndarray]:
    """Attention as a layer of Transformers calls it: heads before rows, and a window by its number of keys."""
    mesh = groups()[case.ranks]
    *whole, sinks = case.tensors()
    q, k, v = (shard_sequence(x, mesh).transpose(1, 2) for x in whole[:3])
    attend = attention_interface(mesh, method="ring")
    window, _ = case.options["window_size"]
    options = {"scaling": case.options["softmax_scale"], "sliding_window": window + 1, "s_aux": sinks}
    out, _ = attend(Layer(), q, k, v, None, **options)
    return {"out": out.float().numpy()}


def of_a_model_with_padding() -> str:
    x = torch.zeros(1, 4, 8, 16, dtype=DTYPE)
    attend = attention_interface(groups()[2])
    return error_of(lambda: attend(Layer(), x, x, x, torch.ones(1, 1, 8, 8)))


def round_trip(ranks: int | str, layout: str) -> bool:
    mesh, x = groups()[ranks], torch.randn(2, 48, 3, generator=torch.Generator().manual_seed(1))
    part = shard_sequence(x, mesh, layout=layout)
    positions = sequence_positions(48, mesh, layout=layout)
    return torch.equal(unshard_sequence(part, mesh, layout=layout), x) and torch.equal(part, x[:, positions])


def error_of(call: Callable[[], Any]) -> str:
    """The type and message of what it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def serve(rank: int, world: int, backend: str, store: str, connection: Connection) -> None:
    """A process of the pool: calls functions of this file until there is no more."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    groups()
    while (task := connection.recv()) is not None:
        name, arguments = task
        try:
            *module, function = name.rpartition(".")
            found = import_module(f"tests.python.{module[0]}") if module[0] else sys.modules[__name__]
            connection.send((True, getattr(found, function)(*arguments)))
        except Exception as error:
            connection.send((False, repr(error)))


class Pool:
    """Processes that were forked from one that has torch imported already."""

    def __init__(self, folder: Path, world: int = WORLD, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        pairs = [context.Pipe() for _ in range(world)]
        self.connections = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(
                target=serve, args=(rank, world, backend, str(folder / "store"), theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, count: int, name: str, *arguments: Any) -> list[Any]:
        """What the first ``count`` ranks return from a function of this file, called in all at once; with the name of
        another file of this folder before its own, of that."""
        for connection in self.connections[:count]:
            connection.send((name, arguments))
        answers = []
        for rank, connection in enumerate(self.connections[:count]):
            if not connection.poll(ANSWER_S):
                raise TimeoutError(f"rank {rank} does not answer in {name}{arguments}")
            answers.append(connection.recv())
        wrong = [answer for is_right, answer in answers if not is_right]
        assert not wrong, (name, arguments, wrong)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
