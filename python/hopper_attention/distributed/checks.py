"""What is wrong with a call of several ranks, found before anything is sent or launched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hopper_attention.checks import python_int
from hopper_attention.distributed.exchange import Ranks
from hopper_attention.distributed.store import tell, tell_each_other

FIRST, NEVER = "first", "never"
CHECKS = (FIRST, NEVER)

Signature = tuple[Any, ...]


class DisagreementError(ValueError):
    """Ranks called with arguments that do not fit together."""


def read_documents(cu_seqlens: Tensor | Sequence[int] | None, seqlen: int) -> tuple[int, ...]:
    """Where documents begin and the last ends, as ints; empty for none. A tensor on a GPU is waited for.

    Raises:
        TypeError: one is no whole number.
        ValueError: they do not begin at 0, fall, or end behind ``seqlen``.
    """
    if cu_seqlens is None:
        return ()
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    starts = tuple(python_int(value) for value in values)
    for value in starts:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"cu_seqlens has {value!r}, a {type(value).__name__}, allowed: ints")
    if len(starts) < 2 or starts[0] != 0:
        raise ValueError(f"cu_seqlens is {_short(starts)}, allowed: 0 and then the end of each document")
    if any(b < a for a, b in pairwise(starts)):
        raise ValueError(f"cu_seqlens is {_short(starts)}, allowed: numbers that do not fall")
    if starts[-1] > seqlen:
        raise ValueError(
            f"cu_seqlens ends with {starts[-1]}, allowed: at most {seqlen}, the rows of q of all ranks; it counts "
            "positions of the whole sequence, not those of a rank"
        )
    return starts


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"({', '.join(map(str, values[:8]))}, ...)"


class Known(NamedTuple):
    """Signatures of calls on a group.

    Attributes:
        agreed: on which all ranks have.
        told: which this rank has told the others without waiting for an answer.
    """

    agreed: set[Signature]
    told: set[Signature]


@lru_cache(maxsize=64)
def _known_to(group: dist.ProcessGroup) -> Known:
    return Known(set(), set())


def note_agreement(ranks: Ranks) -> None:
    """Note that a group still makes calls on which it has agreed, so that none of its ranks forgets them sooner."""
    _known_to(ranks.group)


def check_agreement(
    ranks: Ranks,
    said: dict[str, Any],
    check: str,
    device: torch.device,
    doing: str = "call attention with new shapes or options",
) -> None:
    """Raise unless all ranks of a group call with the same values of what ``said`` names, and with the same ``check``.
    ``doing`` is what a rank that does not come should have done, for the error.

    Ranks tell each other through the store of the group, once for each new set of values: nothing is launched, and no
    GPU is waited for. Later calls with the same values cost a look-up. A rank that is not to check tells the others
    all the same, and goes on: one that does check learns what it differs in, and does not wait for it in vain.

    Raises:
        DisagreementError: they do not; it says which rank differs in what.
        PeerError: a rank did not make the call in time; it names the ranks.
    """
    signature, known = tuple(said.values()), _known_to(ranks.group)
    if ranks.size == 1 or signature in known.agreed or (check == NEVER and signature in known.told):
        return
    said = said | {"check": check}
    if check == NEVER:
        tell(ranks, said)
        known.told.add(signature)
        return
    told = tell_each_other(ranks, said, doing)
    mine = json.loads(json.dumps(said))
    for rank, theirs in enumerate(told):
        for name in mine:
            # Who makes a call of another kind does not say this.
            other = theirs.get(name)
            if mine[name] != other:
                raise DisagreementError(
                    f"{name} is {mine[name]!r} on {ranks.name(ranks.rank)} and {other!r} on {ranks.name(rank)}, "
                    "allowed: the same on all ranks of a group"
                )
    if not known.agreed and device.type == "cuda":
        # NCCL wants all ranks in the first call on a group, and a window leaves some out.
        dist.all_reduce(torch.zeros(1, device=device), group=ranks.group)
    known.agreed.add(signature)
