"""Messages of several words from a producer warp to the consumer warps, in the mailbox of a ``TileScheduler``."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from cute_kernels.tile_scheduler import MAILBOX_STAGES, TileScheduler

WORDS_OF_A_COPY = 4
"""int32 that are read or written at once. Messages are multiples of them."""

NO_TILE = 2**31 - 1
"""The first word of a message when there are no more tiles; of others it is smaller."""


def state_of_sent(sent: Int32) -> PipelineState:
    """Of the mailbox's producer, after so many messages."""
    stage_bits = MAILBOX_STAGES.bit_length() - 1
    return PipelineState(MAILBOX_STAGES, sent, sent & (MAILBOX_STAGES - 1), ((sent >> stage_bits) & 1) ^ 1)


@cute.jit
def send(scheduler: TileScheduler, message: tuple, sent: Int32):
    """Producer warp: send the words of ``message``; ``sent`` went before."""
    state = state_of_sent(sent)
    if scheduler.lane == 0:
        words = cute.make_rmem_tensor(len(message), Int32)
        for i, word in enumerate(message):
            words[i] = word
        scheduler.pipe.producer_acquire(state)
        for part in cutlass.range_constexpr(len(message) // WORDS_OF_A_COPY):
            cute.autovec_copy(_part(words, part), _part_of_mailbox(scheduler, state, len(message), part))
        scheduler.pipe.producer_commit(state)


@cute.jit
def send_end(scheduler: TileScheduler, words: cutlass.Constexpr[int], sent: Int32):
    """Producer warp: say that there are no more tiles, in place of a message of so many words."""
    state = state_of_sent(sent)
    if scheduler.lane == 0:
        scheduler.pipe.producer_acquire(state)
        scheduler.mailbox[state.index * words] = Int32(NO_TILE)
        scheduler.pipe.producer_commit(state)


def await_first_word(scheduler: TileScheduler, words: int, state: PipelineState) -> Int32:
    """Consumer warp: wait for a message of so many words; its first one."""
    scheduler.pipe.consumer_wait(state)
    return cute.arch.make_warp_uniform(scheduler.mailbox[state.index * words])


def read(scheduler: TileScheduler, words: int, state: PipelineState) -> tuple[Int32, ...]:
    """Consumer warp: all words of the message that was awaited, whose place is free then."""
    message = look_at(scheduler, words, state)
    release(scheduler, state)
    return message


def look_at(scheduler: TileScheduler, words: int, state: PipelineState) -> tuple[Int32, ...]:
    """The same, but its place is not free before ``release``."""
    message = cute.make_rmem_tensor(words, Int32)
    for part in range(words // WORDS_OF_A_COPY):
        cute.autovec_copy(_part_of_mailbox(scheduler, state, words, part), _part(message, part))
    # The lanes read together, before the arrival that gives the place back.
    return tuple(cute.arch.make_warp_uniform(message[i]) for i in range(words))


@cute.jit
def release(scheduler: TileScheduler, state: PipelineState):
    """Consumer warp: the place of the message that was looked at is free."""
    if scheduler.lane == 0:
        scheduler.pipe.consumer_release(state)


def _part_of_mailbox(scheduler: TileScheduler, state: PipelineState, words: int, part: int) -> cute.Tensor:
    parts = words // WORDS_OF_A_COPY
    return cute.local_tile(scheduler.mailbox, (WORDS_OF_A_COPY,), (state.index * parts + part,))


def _part(words: cute.Tensor, part: int) -> cute.Tensor:
    return cute.local_tile(words, (WORDS_OF_A_COPY,), (part,))
