"""Two CTAs of a cluster in ``hopper_machine``, by a small kernel in PTX in which they exchange numbers."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from tests.hopper.hopper_machine import AT_ONCE, CLUSTER_WINDOW, Cta, TensorMap, Timing, parse, run

LATE = Timing(is_late=True, seed=1)

EXCHANGE = """
.visible .entry exchange(.param .u64 exchange_param_0) .reqntid 32, 1, 1
{
    mov.u32 %r1, %cluster_ctarank;
    mov.u32 %r2, %laneid;
    xor.b32 %r3, %r1, 1;
    shl.b32 %r4, %r2, 2;
    mad.lo.s32 %r5, %r1, 100, %r2;
    setp.ne.b32 %p1, %r2, 0;
    @%p1 bra $L_ready;
    mbarrier.init.shared.b64 [0], 1;
    mbarrier.init.shared.b64 [8], 1;
$L_ready:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    st.shared.b32 [%r4+128], %r5;
    fence.proxy.async.shared::cta;
    @%p1 bra $L_sent;
    mbarrier.arrive.expect_tx.shared.b64 %rd1, [0], 128;
    mapa.shared::cluster.u32 %r6, 256, %r3;
    mapa.shared::cluster.u32 %r7, 0, %r3;
    mapa.shared::cluster.u32 %r8, 8, %r3;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r6], [128], 128, [%r7];
    mbarrier.arrive.shared::cluster.b64 _, [%r8], 1;
$L_sent:
    mbarrier.try_wait.parity.shared.b64 %p2, [0], 0;
    mbarrier.try_wait.parity.shared.b64 %p2, [8], 0;
    ld.shared.b32 %r9, [%r4+256];
    cvt.rn.f32.u32 %f1, %r9;
    ld.param.u64 %rd2, [exchange_param_0];
    and.b32 %r10, %r2, 7;
    mul.wide.u32 %rd3, %r10, 16;
    mad.wide.u32 %rd3, %r1, 128, %rd3;
    add.s64 %rd4, %rd2, %rd3;
    red.global.add.v4.f32 [%rd4], {%f1, %f1, 0f3F800000, 0f00000000};
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ret;
}
"""

MULTICAST = """
.visible .entry multicast(.param .align 64 .b8 multicast_param_0[128]) .reqntid 32, 1, 1
{
    mov.u32 %r1, %cluster_ctarank;
    shl.b32 %r2, %r1, 4;
    shl.b32 %r3, %r1, 3;
    mov.b64 %rd1, multicast_param_0;
    elect.sync %r4|%p1, -1;
    @!%p1 bra $L_ready;
    mbarrier.init.shared.b64 [0], 1;
$L_ready:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    @!%p1 bra $L_loaded;
    mbarrier.arrive.expect_tx.shared.b64 %rd2, [0], 32;
    mov.b16 %rs1, MASK;
    cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [%r2+64], [%rd1, {%r3}], [0], %rs1;
$L_loaded:
    mbarrier.try_wait.parity.shared.b64 %p2, [0], 0;
    ret;
}
"""


def pair(parameters: dict[str, Any], memory: dict[int, np.ndarray], timing: Timing) -> list[Cta]:
    return [Cta(parameters, memory, (rank, 0, 0), (2, 1, 1), timing) for rank in range(2)]


def exchange(ptx: str, timing: Timing) -> np.ndarray:
    sums = np.zeros(64, np.float32)
    memory = {1 << 40: sums.view(np.uint8)}
    run(parse(ptx), *pair({"exchange_param_0": struct.pack("<Q", 1 << 40)}, memory, timing))
    return sums.reshape(2, 8, 4)


@pytest.mark.parametrize("timing", [AT_ONCE, LATE])
def test_numbers_are_exchanged_and_added(timing: Timing) -> None:
    """Of each CTA four lanes, i, i + 8 and so on, add the number of the same lane of the other one."""
    sums = exchange(EXCHANGE, timing)
    others = 4 * np.arange(8) + 48
    for rank in range(2):
        assert np.array_equal(sums[rank, :, 0], others + 400 * (1 - rank))
    assert np.array_equal(sums[..., 1], sums[..., 0])
    assert (sums[..., 2] == 4).all() and not sums[..., 3].any()


def without(line: str, number: int) -> str:
    """The small kernel without one of the lines that hold something."""
    lines = EXCHANGE.splitlines()
    del lines[[i for i, text in enumerate(lines) if line in text][number]]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "line,number,message",
    [
        ("fence.proxy.async", 0, "without a fence"),
        ("expect_tx", 0, "every warp waits"),
        ("mbarrier.arrive.shared::cluster", 0, "every warp waits"),
        ("cp.async.bulk", 0, "every warp waits"),
    ],
)
def test_what_is_missing_is_found(line: str, number: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        exchange(without(line, number), LATE)


def test_nothing_is_sent_to_a_cta_that_has_ended() -> None:
    """Without its waits a CTA may have ended when the other one sends to it."""
    lines = [line for line in EXCHANGE.splitlines() if "try_wait" not in line]
    ends = [i for i, text in enumerate(lines) if "barrier.cluster" in text][2:]
    hasty = "\n".join(line for i, line in enumerate(lines) if i not in ends)
    with pytest.raises(AssertionError, match=r"has ended|ends with copies under way"):
        exchange(hasty, LATE)


def multicast(mask: int, timing: Timing) -> list[np.ndarray]:
    """What the shared memory of each CTA holds in the end, where 16 numbers are to come."""
    data = np.arange(16, dtype=np.uint16)
    tensor_map = TensorMap(data, (16,), (1,), (8,), 0)
    ctas = pair({"multicast_param_0": tensor_map}, {}, timing)
    run(parse(MULTICAST.replace("MASK", str(mask))), *ctas)
    return [cta.shared[64:96].view(np.uint16) for cta in ctas]


@pytest.mark.parametrize("timing", [AT_ONCE, LATE])
def test_multicast_writes_to_the_same_place_of_both(timing: Timing) -> None:
    for numbers in multicast(3, timing):
        assert np.array_equal(numbers, np.arange(16))


def test_multicast_to_one_cta_leaves_the_other_waiting() -> None:
    with pytest.raises(AssertionError, match="every warp waits"):
        multicast(1, LATE)


def test_addresses_of_a_cluster_lie_in_the_window_of_a_rank() -> None:
    first, second = ctas = pair({}, {}, AT_ONCE)
    for cta in ctas:
        cta.cluster = ctas
    assert second.locate(40)[0] is second
    assert first.locate(2 * CLUSTER_WINDOW + 40) == (second, 40)
    second.has_ended = True
    with pytest.raises(AssertionError, match="has ended"):
        first.locate(2 * CLUSTER_WINDOW)
