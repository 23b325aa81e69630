"""Messages between ranks, posted and waited for; who did not answer has a name in the error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Those of a group, and this one among them.

    Attributes:
        group: of torch.distributed.
        rank: the number of this process in the group.
        size: ranks of the group.
        timeout: seconds that a wait may take, or 0 for what the group itself allows.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    timeout: float = 0.0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, timeout: float = 0.0) -> Ranks:
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise RuntimeError("no process group: call torch.distributed.init_process_group first")
        return cls(group, dist.get_rank(group), dist.get_world_size(group), timeout)

    def name(self, rank: int) -> str:
        """As an error says it: its number in the group, and in the whole world where that is another."""
        world_rank = dist.get_global_rank(self.group, rank)
        return (
            f"rank {rank}" if world_rank == rank else f"rank {rank} of the group (global rank {world_rank})"
        )


HEAD_START_CYCLES = 20_000
"""How long an attention kernel waits behind a transfer that was posted before it, in cycles of an SM: about 10 us.

The kernel takes all SMs that are free and keeps them until it ends. So what sends and receives has to get its few
first, and its way to the GPU, by way of an event between two streams, is the longer one.
"""

_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 has it under the first name, and warns of the second."""


class Message(NamedTuple):
    """Tensors that go to ``peer``, or come from it into these very ones, which are contiguous."""

    peer: int
    tensors: tuple[Tensor, ...]
    what: str


class PeerError(RuntimeError):
    """A rank did not send or take what it had to, in time or at all."""


class Transfer:
    """Messages on their way. The tensors are kept until :meth:`wait` has returned."""

    def __init__(
        self, ranks: Ranks, works: Sequence[tuple[Any, Callable[[], str]]], tensors: Sequence[Tensor]
    ) -> None:
        """``works`` are what torch.distributed gave, each with what finds the words for it in an error."""
        self.ranks = ranks
        self.works = list(works)
        self.tensors = list(tensors)

    def wait(self) -> None:
        """Return when the tensors may be used on the current stream.

        On a GPU the host does not wait, unless there is a time-out.

        Raises:
            PeerError: a work failed, or took longer than the time-out; it names the ranks.
        """
        for work, tell in self.works:
            try:
                if self.ranks.timeout:
                    work.wait(timedelta(seconds=self.ranks.timeout))
                else:
                    work.wait()
            except RuntimeError as error:
                me = self.ranks.name(self.ranks.rank)
                raise PeerError(f"{me} waited in vain to {tell()}: {error}") from error
        self.works.clear()
        self.tensors.clear()


def exchange(ranks: Ranks, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
    """Post messages, all at once. Between two ranks they arrive in the order in which they were posted."""
    operations, deeds, tensors = [], [], []
    for messages, post, verb in (
        (sends, dist.isend, "send {} to {}"),
        (receives, dist.irecv, "receive {} from {}"),
    ):
        for message in messages:
            for tensor in message.tensors:
                if tensor.numel():
                    wire = as_bytes(tensor)
                    operations.append(dist.P2POp(post, wire, group=ranks.group, group_peer=message.peer))
                    deeds.append((verb, message))
                    tensors += [tensor, wire]
    if not operations:
        return Transfer(ranks, [], [])

    def tell(*done: tuple[str, Message]) -> str:
        # Names of ranks are looked up when they are asked for: on the way to a kernel every microsecond counts.
        words = (verb.format(message.what, ranks.name(message.peer)) for verb, message in done)
        return ", ".join(dict.fromkeys(words))

    works = dist.batch_isend_irecv(operations)
    if len(works) == len(operations):
        told = [(work, partial(tell, deed)) for work, deed in zip(works, deeds, strict=True)]
    else:
        # One work for all, as NCCL makes it.
        told = [(work, partial(tell, *deeds)) for work in works]
    return Transfer(ranks, told, tensors)


def give_head_start(device: torch.device) -> None:
    """Keep what is launched next on the current stream for a moment behind the transfers that were posted."""
    if device.type == "cuda" and HEAD_START_CYCLES:
        torch.cuda._sleep(HEAD_START_CYCLES)


def all_gather(ranks: Ranks, x: Tensor, what: str) -> tuple[Tensor, Transfer]:
    """``x`` of all ranks, (size, *x.shape), once the transfer is done. x is contiguous, as is what comes."""
    gathered = x.new_empty((ranks.size, *x.shape))
    sent = as_bytes(x)
    work = _gather_into(as_bytes(gathered), sent, ranks.group, async_op=True)
    return gathered, Transfer(ranks, [(work, lambda: f"gather {what} of all ranks")], [gathered, sent])


def all_to_all(ranks: Ranks, x: Tensor, what: str) -> tuple[Tensor, Transfer]:
    """x (size, ...): entry r goes to rank r; what comes back has at entry r what rank r sent here."""
    received = torch.empty_like(x)
    sent = as_bytes(x)
    work = dist.all_to_all_single(as_bytes(received), sent, group=ranks.group, async_op=True)
    return received, Transfer(ranks, [(work, lambda: f"exchange {what} with all ranks")], [received, sent])


def as_bytes(x: Tensor) -> Tensor:
    """The same memory as bytes, in one dimension, which every backend sends whatever the dtype."""
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} is not contiguous, as those of messages are")
    # In one dimension first: the last may have one element and any stride.
    return (x.detach() if x.requires_grad else x).view(-1).view(torch.uint8)
