"""Counts in global memory by which CTAs wait for each other, for sums in a fixed order."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait_for_count(place: cute.Pointer, count: Int32):
    """Wait until an int32 in global memory has a value, and see what was written before it got it."""
    seen = Int32(-1)
    while seen != count:
        seen = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[place.toint()],
        )


@cute.jit
def wait_for_turn(place: cute.Pointer, count: Int32):
    """``wait_for_count`` for a warp that may ask long before its turn comes: it pauses for some 100 ns between two
    questions, each of which empties the L1 cache of the SM."""
    seen = _read(place)
    while seen != count:
        cute.arch.inline_ptx("nanosleep.u32 100;")
        seen = _read(place)


def _read(place: cute.Pointer) -> Int32:
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place.toint()]
    )


@cute.jit
def count_up(place: cute.Pointer, count: Int32):
    """Set the int32 to one more than ``count``, behind what this thread has written or seen written."""
    cute.arch.inline_ptx(
        "st.release.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[place.toint(), count + 1]
    )


@cute.jit
def count_up_for_all(place: cute.Pointer, count: Int32):
    """``count_up`` behind what other threads have written and this one knows, by a barrier, to be written: the fence
    and the plain store behind it release all of that together."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.inline_ptx(
        "st.relaxed.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[place.toint(), count + 1]
    )
