"""DTensors in, DTensors out; and whole sequences cut into what ranks hold, and put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hopper_attention.checks import check_count
from hopper_attention.distributed.checks import FIRST, check_agreement
from hopper_attention.distributed.exchange import Ranks, all_gather
from hopper_attention.distributed.layout import (
    CONTIGUOUS,
    ZIGZAG,
    check_layout,
    length_of,
    positions_of,
    shard,
    unshard,
)
from hopper_attention.distributed.request import Mesh, groups_of

Local = tuple[Tensor, Tensor, Tensor]


def is_dtensor(*tensors: Tensor) -> bool:
    """Whether all are; raises TypeError if only some are."""
    found = [isinstance(x, DTensor) for x in tensors]
    if any(found) and not all(found):
        raise TypeError("some of q, k and v are DTensors and some are not, allowed: all or none")
    return all(found)


def to_local(q: Tensor, k: Tensor, v: Tensor, mesh: Mesh, is_packed: bool) -> tuple[Local, DeviceMesh]:
    """The local parts, differentiable, and the mesh.

    Raises:
        ValueError: one is not sharded over all of the mesh along its sequence, or ``mesh`` is another one.
    """
    sequence = 0 if is_packed else 1
    given: list[Any] = [q, k, v]
    of_tensors: DeviceMesh = given[0].device_mesh
    for name, x in zip("qkv", given, strict=True):
        wanted = (Shard(sequence),) * of_tensors.ndim
        if tuple(x.placements) != wanted or x.device_mesh != of_tensors:
            raise ValueError(
                f"{name} has placements {tuple(x.placements)} on {x.device_mesh}, allowed: {wanted}, its sequence "
                "sharded over all of one mesh; use redistribute, or a mesh of the ranks that share the sequence"
            )
    if mesh is not None and mesh is not of_tensors and mesh != of_tensors:
        raise ValueError(f"mesh is {mesh}, allowed with DTensors: None or theirs, {of_tensors}")
    local_q, local_k, local_v = (x.to_local() for x in given)
    return (local_q, local_k, local_v), of_tensors


def to_dtensor(out: Tensor, like: Any) -> Tensor:
    """The output as a DTensor with mesh and placements of q."""
    made: Tensor = DTensor.from_local(out, like.device_mesh, like.placements, run_check=False)
    return made


def shard_sequence(x: Tensor, mesh: Mesh = None, *, layout: str = ZIGZAG, dim: int = 1) -> Tensor:
    """The rows that this rank holds of a whole tensor, whose dimension ``dim`` is the sequence.

    On a mesh of two dimensions, (ring, ulysses), the ring shares out by ``layout``, and ranks of a row of the mesh have
    equal parts, one after the other, of what falls to it. Everything that goes by position has to be cut so: tokens,
    labels, positions.

    Args:
        x: of any shape and dtype, the same on all ranks.
        mesh: as for :func:`context_parallel_attention`.
        layout: "zigzag" or "contiguous".
        dim: the dimension that is the sequence; a negative one counts from the last.

    Returns:
        x with its dimension ``dim`` over the number of ranks, contiguous.

    Raises:
        ValueError, TypeError: the length does not divide, or an argument is not allowed.
    """
    ring, *inner = groups_of(mesh, 0.0)
    part = shard(x, ring.rank, ring.size, layout, dim)
    for ranks in inner:
        part = shard(part, ranks.rank, ranks.size, CONTIGUOUS, dim)
    return part.contiguous()


def unshard_sequence(x: Tensor, mesh: Mesh = None, *, layout: str = ZIGZAG, dim: int = 1) -> Tensor:
    """The whole tensor on every rank, from the parts of all; not differentiable.

    Args:
        x: the part of this rank, as ``shard_sequence`` gives it, of one shape and dtype on all ranks.
        mesh, layout, dim: as there.

    Raises:
        ValueError, TypeError: an argument is not allowed, or the parts are none of the layout.
        DisagreementError, PeerError: ranks call with other shapes or arguments, or not at all; found at the first call
            with these.
    """
    ring, *inner = groups_of(mesh, 0.0)
    length_of(x, dim)
    check_layout(layout)
    for ranks in inner:
        x = unshard(_gather(ranks, x, dim, layout), ranks.size, CONTIGUOUS, dim)
    return unshard(_gather(ring, x, dim, layout), ring.size, layout, dim)


def _gather(ranks: Ranks, x: Tensor, dim: int, layout: str) -> Tensor:
    said: dict[str, Any] = {"call": "unshard_sequence", "shape of x": tuple(x.shape)}
    said |= {"dtype of x": str(x.dtype), "dim": dim, "layout": layout}
    check_agreement(ranks, said, FIRST, x.device, "put a sequence together")
    gathered, transfer = all_gather(ranks, x.detach().contiguous(), "a sequence")
    transfer.wait()
    return torch.cat(gathered.unbind(0), dim)


def sequence_positions(
    seqlen: int, mesh: Mesh = None, *, layout: str = ZIGZAG, device: torch.device | str = "cpu"
) -> Tensor:
    """The positions in the whole sequence of the rows that this rank holds, for rotary embeddings.

    Args:
        seqlen: rows of the whole sequence.
        mesh, layout: as for :func:`shard_sequence`.
        device: of the result.

    Returns:
        int64 (seqlen / ranks,), in the order of the rows.

    Raises:
        ValueError, TypeError: the length does not divide, or an argument is not allowed.
    """
    seqlen = check_count("seqlen", seqlen, 0)
    ring, *inner = groups_of(mesh, 0.0)
    positions = positions_of(ring.rank, ring.size, seqlen, layout, device)
    for ranks in inner:
        positions = shard(positions, ranks.rank, ranks.size, CONTIGUOUS, 0)
    return positions
