"""Which warps of a forward kernel wait for the kernel in front, and that nobody touches global memory before."""

from __future__ import annotations

import numpy as np
import pytest

from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper.forward.tilings import select_forward_config, select_plain_config, with_parts
from hopper.group_rows import rows_of_queries
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from tests.hopper import hopper_steps, on_numpy, split_on_numpy
from tests.hopper.hopper_machine import Cta, Program, Step, Timing, Warp, parse
from tests.hopper.on_numpy import forward_on_numpy, fp8_forward_on_numpy
from tests.hopper.split_on_numpy import in_small_parts, packed_parts_on_numpy
from tests.hopper.test_kernels_on_numpy import DTYPES, draw
from tests.plans import Packed, plan_of
from tests.ptx import ptx_of

WAIT = "griddepcontrol.wait"


class Watch:
    """The warps of each CTA that have waited; what reaches global memory before is an error."""

    def __init__(self, config: object, monkeypatch: pytest.MonkeyPatch):
        self.ran: list[Cta] = []
        self.waited: dict[int, set[int]] = {}
        decode, run = hopper_steps.decode, on_numpy.run
        with monkeypatch.context() as patch:
            patch.setattr(hopper_steps, "decode", lambda name, rest: self.step_of(name, decode(name, rest)))
            program = parse(ptx_of(config))

        def run_and_keep(program: Program, *ctas: Cta) -> None:
            self.ran += ctas
            run(program, *ctas)

        for module in (on_numpy, split_on_numpy):
            monkeypatch.setattr(module, "program_of", lambda _: program)
        monkeypatch.setattr(on_numpy, "run", run_and_keep)

    def step_of(self, name: str, step: Step) -> Step:
        """``step``, which sets down a wait, or is wrong before one."""
        is_outside = ".global" in name or ".tensor" in name
        if name != WAIT and (not is_outside or "prefetch" in name):
            return step

        def watched(warp: Warp, mask: np.ndarray) -> bool | None:
            waited = self.waited.setdefault(id(warp.cta), set())
            if name == WAIT:
                waited.add(warp.number)
            assert waited, f"{name} of warp {warp.number} before the kernel in front has ended"
            return step(warp, mask)

        return watched

    @property
    def waiting(self) -> list[set[int]]:
        """By CTA. One that has no tile must wait too, since who waits for this kernel relies on it."""
        return [self.waited.get(id(cta), set()) for cta in self.ran]


@pytest.mark.parametrize("seqlens", [(130, 200), (131, 0), (260, 1)])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal", "keys"),
    [
        ("bfloat16", 128, False, 288),
        ("bfloat16", 128, False, 512),
        ("float16", 128, False, 512),
        ("bfloat16", 64, True, 300),
    ],
)
def test_nobody_reads_or_writes_before_the_kernel_in_front_has_ended(
    dtype, head_dim, causal, keys, seqlens, monkeypatch
) -> None:
    """In any order of the warps, in tiles without keys, and in CTAs without a tile."""
    config = select_plain_config(dtype, head_dim, head_dim, causal, keys)
    watch = Watch(config, monkeypatch)
    inputs = draw(DTYPES[dtype], seqlens, (1, 1), head_dim)
    tiles = -(-seqlens[0] // config.tile_m)
    for seed in range(3):
        forward_on_numpy(config, *inputs, 0.1, tiles + 1, Timing(is_late=True, seed=seed))
    waiting = {0} if config.waits_to_load else set(range(config.threads // 32))
    assert watch.waiting == [waiting] * 3 * (tiles + 1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_kernel_of_parts_reads_no_plan_before(head_dim, monkeypatch) -> None:
    """What makes the plan lets this kernel in before it has made it."""
    rows_q, rows_k = Packed.of((3, 0, 5)), Packed.of((200, 40, 330))
    plain = select_forward_config("bfloat16", head_dim, head_dim, True, 0, layout="varlen")
    config = with_parts(plain, 4, rows_of_queries(5, 4))
    watch = Watch(config, monkeypatch)
    q, k, v = draw(DTYPES["bfloat16"], (rows_q.total, rows_k.total), (8, 2), head_dim)
    plan = plan_of(rows_q, rows_k, config.tile_queries, in_parts=in_small_parts(config, 3))
    tensors = q[0], k[0], v[0]
    packed_parts_on_numpy(config, tensors, plan, 4, 0.1, 3, 2, Timing(is_late=True, seed=1))
    assert config.starts_early and watch.waiting == [set(range(config.threads // 32))] * 2


def test_fp8_with_v_in_rows_asks_before_it_waits_and_reads_nothing(monkeypatch) -> None:
    config = select_fp8_forward_config(256, 256, True, "bfloat16", 1024, v_rows=True, without_lse=True)
    watch = Watch(config, monkeypatch)
    parts = quantize_qkv(*draw(DTYPES["bfloat16"], (200, 130), (2, 1), 256), quantization=Fp8Quantization())
    fp8_forward_on_numpy(config, parts, 1 / 16, Timing(is_late=True, seed=1))
    assert config.asks_early and watch.waiting == [set(range(config.threads // 32))]
    # The first tile is the last of a head: 72 rows of Q and, of K and V, the two of the last block.
    (cta,) = watch.ran
    assert len(cta.asked) == len(set(cta.asked)) == (72 + 2 + 2) * 2
