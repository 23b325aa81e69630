"""Philox4x32, a counter-based random generator, and the mask of dropout that is made of it.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. By that paper seven
rounds are the fewest that pass the tests of BigCrush. All words are of 32 bits.

The key. A launch is given ``philox``, int64 (2,): a seed and an offset, each of which is two words, the lower first.
The key of the mask is the first two words of Philox with the two words of the seed as key and (lower word of the
offset, higher word of the offset, 0, 0) as counter. So another seed or another offset gives another mask, unless two
of 2^64 keys happen to be the same.

The mask. Whether P of query i and key j is kept is decided by one random byte: it is if the byte is less than ``kept``,
1 to 256. Both i and j count from the first of their sequence. So a mask depends on nothing but seed, offset, head of Q,
and the number of the sequence in its batch: not on tiles, layout, backend or direction.

The counter. One call of Philox makes four words, 16 bytes, for 16 elements: those of the queries 16 I + 2 a + {0, 1, 8,
9} with the keys 16 J + 2 b + {0, 1, 8, 9}, a and b being from 0 to 3. Its counter is (4 J + b, 4 I + a, head,
sequence). Let y = i % 2, x = j % 2, h = i // 8 % 2 and l = j // 8 % 2. The element's byte is number 2 h + l, counted
from the lowest, of word 2 (y ^ (J % 2)) + (x ^ (I % 2)).

Why so. It suits the threads of a warp, which hold accumulators as in ``fragments``: eight of the 16 elements of a call
are one thread's, whether its rows are queries or keys, and their bytes are two whole words. The other two words are for
the lane that holds the neighbouring row, 4 lanes away. Of two neighbouring blocks of columns each of these lanes makes
the call of one, and gives the other lane its two words. The terms J % 2 and I % 2 make both lanes keep the same two of
their words and give away the same two, so that no thread has to select.
"""

import cutlass.cute as cute
from cutlass import Int32, Uint32

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7

Words = tuple[Uint32, ...]


def philox(counter: Words, key: Words) -> Words:
    """Four random words of a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(ROUNDS):
        if number:
            k0, k1 = k0 + Uint32(KEY_STEPS[0]), k1 + Uint32(KEY_STEPS[1])
        (high0, low0), (high1, low1) = (_multiply(c, m) for c, m in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _multiply(a: Uint32, b: int) -> tuple[Uint32, Uint32]:
    """High and low word of a product, which is one wide multiplication."""
    product = cute.arch.mul_wide(a, Uint32(b))
    return Uint32(product >> 32), Uint32(product)


def mask_key(words: cute.Tensor) -> Words:
    """The key of the mask of ``words``, int64 (2,); every thread has the same."""
    given = cute.recast_tensor(words, Int32)
    seed, seed_high, offset, offset_high = (Uint32(given[i]) for i in range(4))
    key = philox((offset, offset_high, Uint32(0), Uint32(0)), (seed, seed_high))[:2]
    # In uniform registers all steps of the key find room, so that no call has to add them up.
    return tuple(Uint32(cute.arch.make_warp_uniform(word)) for word in key)
