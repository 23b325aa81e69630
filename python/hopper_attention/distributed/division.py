"""How the heads of a rank go in parts over peer memory, forward and backward, and what a rank holds then: as data."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hopper_attention.distributed.pushed import bytes_for
from hopper_attention.distributed.schedule import RowBytes
from hopper_attention.distributed.waves import HeadShare

BACKWARD_PARTS = 4
"""Of a backward pass, or the next number that divides the heads."""

AUTO_PARTS = 8
"""The most of a backward pass that `method="auto"` takes: kernels on fewer heads are short, and were not measured."""

REMEMBERED = 64


class HeadParts(NamedTuple):
    """How the heads of a rank are divided.

    Attributes:
        shares: of each part, in key/value heads of a rank.
        rooms: in which the parts take turns: as many as there are, or fewer where all shares are the same.
    """

    shares: tuple[int, ...]
    rooms: int

    def part(self, number: int) -> HeadShare:
        return HeadShare(sum(self.shares[:number]), self.shares[number], sum(self.shares))

    def comes_alone(self, number: int) -> bool:
        """Whether attention waits for all of what comes of a part. Otherwise it is at another part meanwhile."""
        return self.rooms == 1 or not number

    def frees_a_room(self, number: int) -> bool:
        """Whether another part takes over the room of this one, and what comes of it waits for what goes."""
        return number + self.rooms < len(self.shares)

    def goes_alone(self, number: int) -> bool:
        """Whether attention waits for all of what goes of a part, or there is no attention left."""
        return self.rooms == 1 or self.frees_a_room(number) or number + 1 == len(self.shares)


class Division(NamedTuple):
    """How the heads of a rank go in both passes."""

    forward: HeadParts
    backward: HeadParts


@lru_cache(maxsize=REMEMBERED)
def divide(kv_heads: int) -> Division | None:
    """The parts of so many key/value heads of a rank, forward and backward; None if there are too few.

    Forward a small part comes first, which is waited for, and the others beside the attention to it. Backward parts are
    small, and two rooms hold all.
    """
    if kv_heads < 2:
        return None
    number = next(n for n in range(min(BACKWARD_PARTS, kv_heads), kv_heads + 1) if not kv_heads % n)
    forward = max(1, kv_heads // 4)
    shares = forward, kv_heads - forward
    return Division(HeadParts(shares, 2), HeadParts((kv_heads // number,) * number, 2))


def bytes_at_once(sizes: RowBytes, ranks: int, stays: bool) -> int:
    """As ``bytes_in_parts``, of all heads at once and one layer at a time, whose Q, K and V stay in the buffer if it
    ``stays``, and are copied else.

    The output is there as heads and as rows, with sums of dQ in float32 and the copy; or as rows with dQ, dK and dV.
    """
    came = sizes.out + max(1, ranks // sizes.kv_heads) * sizes.shard
    room, copy = bytes_for(came + sizes.out), 0 if stays else came
    gradients = sizes.out + sizes.shard
    return room + max(copy + 4 * sizes.out, sizes.out + gradients) - gradients


def bytes_in_parts(sizes: RowBytes, ranks: int) -> int | None:
    """What a rank holds at most in both passes, a buffer made for that and the output among it, and without dQ, dK and
    dV; None where the heads are too few for parts. LSEs are not counted."""
    parts = divide(sizes.kv_heads // ranks)
    if parts is None:
        return None
    forward, backward = parts
    q = out = sizes.out
    came = q + sizes.shard
    room = sum(forward.part(n).of(came) for n in range(forward.rooms))
    of_backward = sum(backward.part(n).of(came + 2 * out) for n in range(backward.rooms))
    # In float32, which dQ is added up in.
    sums = backward.part(0).of(2 * q)
    return bytes_for(max(room, of_backward)) + out + sums
