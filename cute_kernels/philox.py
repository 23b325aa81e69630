"""Philox4x32, a counter-based random generator (Salmon et al., SC 2011), and the mask of dropout that is made of it.

Seven rounds are the fewest that pass BigCrush. All words are of 32 bits. A launch is given ``philox``, int64 (2,): a
seed and an offset, both of two words, the lower first. The key of the mask is the first two words of Philox with the
seed as key and (offset, offset, 0, 0) as counter. So any two pairs of seed and offset give masks of their own.

Whether P of query i and key j is kept is decided by one random byte: it is if the byte is less than ``kept``, 1 to 256.
Both count from the first of their sequence. So a mask depends on nothing but seed, offset, head of Q, and the number of
the sequence in its batch: not on tiles, layout, backend or direction.

One call of Philox is for 16 elements: i of {0, 1} + {0, 8} + 2 a + 16 I and j of {0, 1} + {0, 8} + 2 b + 16 J. Its
counter is (4 J + b, 4 I + a, head, sequence). With y and x the last bits of i and j, h and l those of i // 8 and j //
8, the byte of an element is number 2 h + l, from the lowest, of word 2 (y ^ (J % 2)) + (x ^ (I % 2)).

That suits the threads of a warp, which hold accumulators as in ``fragments``. A thread has four elements of 16 of each
call, in two of its words, and needs no other bits of these, be its rows queries or keys. The lane 4 further on needs
the other two words. The two take turns over blocks, and exchange two words in each, for which one gives away the first
half of its words and the other the second: the last bits of I and J above let both keep the same.
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
    """High and low word of a product: one instruction."""
    product = cute.arch.mul_wide(a, Uint32(b))
    return Uint32(product >> 32), Uint32(product)


def mask_key(words: cute.Tensor) -> Words:
    """The key of the mask of ``words``, int64 (2,); every thread has the same."""
    given = cute.recast_tensor(words, Int32)
    seed, seed_high, offset, offset_high = (Uint32(given[i]) for i in range(4))
    key = philox((offset, offset_high, Uint32(0), Uint32(0)), (seed, seed_high))[:2]
    # In uniform registers all steps of the key find room, so that no call has to add them up.
    return tuple(Uint32(cute.arch.make_warp_uniform(word)) for word in key)
