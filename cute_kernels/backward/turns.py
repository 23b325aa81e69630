"""Counts in global memory by which CTAs wait for each other, for sums in a fixed order.

A count goes up by one with each key tile that has added, in their order. Sequences of a packed batch that overlap,
which no caller may give, share counts: with ``is_shared`` a key tile waits for its turn or any later one, and raises
the count to one more than that if it is less. So its turn has come when those before it in its own sequence have added,
whatever others do, and none waits for ever.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def wait_for_count(place: cute.Pointer, count: Int32, is_shared: cutlass.Constexpr[bool]):
    """Wait until an int32 in global memory has a value, and see what was written before it got it."""
    seen = Int32(-1)
    while _is_early(seen, count, is_shared):
        seen = _read(place)


@cute.jit
def wait_for_turn(place: cute.Pointer, count: Int32, is_shared: cutlass.Constexpr[bool]):
    """``wait_for_count`` for a warp that may ask long before its turn comes: it pauses for some 100 ns between two
    questions, each of which empties the L1 cache of the SM."""
    seen = _read(place)
    while _is_early(seen, count, is_shared):
        cute.arch.inline_ptx("nanosleep.u32 100;")
        seen = _read(place)


def _is_early(seen: Int32, count: Int32, is_shared: bool) -> Boolean:
    return seen < count if is_shared else seen != count


def _read(place: cute.Pointer) -> Int32:
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place.toint()]
    )


@cute.jit
def count_up(place: cute.Pointer, count: Int32, is_shared: cutlass.Constexpr[bool]):
    """Set the int32 to one more than ``count``, or raise it to that, behind what this thread has written or seen
    written."""
    how = "red.release.gpu.global.max" if is_shared else "st.release.gpu.global"
    cute.arch.inline_ptx(f"{how}.s32 [{{$r0}}], {{$r1}};", read_only_args=[place.toint(), count + 1])


@cute.jit
def count_up_for_all(place: cute.Pointer, count: Int32, is_shared: cutlass.Constexpr[bool]):
    """``count_up`` behind what other threads have written and this one knows, by a barrier, to be written: the fence
    and what is relaxed behind it release all of that together."""
    cute.arch.fence_acq_rel_gpu()
    how = "red.relaxed.gpu.global.max" if is_shared else "st.relaxed.gpu.global"
    cute.arch.inline_ptx(f"{how}.s32 [{{$r0}}], {{$r1}};", read_only_args=[place.toint(), count + 1])
