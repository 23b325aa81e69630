"""Stand-ins for the kernels of packed e4m3 tensors: they ask what compiled ones ask, and attend in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from cute_kernels.combine.config import CombineConfig
from cute_kernels.plan.config import ENTRY, PLAN_HEADER, RECORD, PlanConfig, plan_words
from cute_kernels.plan.parts import parts_of_number, sequence_of_number
from hopper.compile import HOPPER_ARCH
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP, Fp8ForwardConfig
from hopper.transpose.config import TransposeConfig
from hopper.widen.config import WidenConfig
from hopper_attention import (
    compile_cache,
    descaled_again,
    device_memory,
    packed_at_once,
    packed_descaled_again,
    packed_parts_again,
    packed_scripts,
)
from hopper_attention.launch import decode, few_packed_fp8, few_packed_queries, fp8, transpose
from hopper_attention.lengths import Lengths
from hopper_attention.packed_quantization import transpose_packed
from hopper_attention.packed_quantized import ONE_PER_SEQUENCE, slot_of_key
from tests.plans import InParts, Packed, plan_of
from tests.python.fake_gpu import SMS, forget_launchers, pretend
from tests.python.test_decode_launch import DecodeKernels
from tests.python.test_split_forward import Kernels as KernelsIn16Bits
from tests.python.test_split_forward import attend_to_part

E4M3 = torch.float8_e4m3fn
LAUNCHING = fp8, few_packed_fp8, decode, transpose
"""Modules that ask which GPU there is."""


def check_as_compiled(config: Fp8ForwardConfig, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> None:
    """What ``_packed_fp8_tensors`` of ``hopper.forward.compile`` asks of shapes, strides and addresses."""
    out, lse, counter, of_q, of_k, of_v, of_out, mean = others
    (total_q, heads, _), (total_k, kv_heads, _), codes = q.shape, k.shape, (q, k, v)
    assert v.shape[: 2 if config.v_rows else 1] == ((total_k, kv_heads) if config.v_rows else (kv_heads,))
    assert all(x.dtype == (torch.float16 if config.wide_codes else E4M3) for x in (q, k)) and v.dtype == E4M3
    assert all(x.stride(2) == 1 and x.data_ptr() % 16 == 0 for x in codes)
    assert all(step * x.itemsize % 16 == 0 for x in codes for step in x.stride()[:2])
    assert out.stride(-1) == lse.stride(-1) == 1 and counter.shape == (2,)
    if config.split:
        assert out.shape[:-1] == lse.shape and lse.shape[1:] == (1, total_q, heads)
        assert out.dtype == torch.float32 and all(step % 4 == 0 for step in out.stride()[:-1])
    else:
        assert out.shape[:2] == (total_q, heads) and out.dtype == getattr(torch, config.output)
        assert lse.shape in ((heads, total_q), (heads, 0))
    scales = of_q, of_k, of_v, of_out, mean
    assert all(x.dtype == torch.float32 for x in (*scales, lse))
    # One size each, whatever it is.
    assert of_q.shape[0] == of_k.shape[0] == of_v.shape[0] and of_out.shape[0] == mean.shape[0]
    assert [x.shape[1] for x in scales] == [kv_heads if config.lone_scales else heads] + [kv_heads] * 4
    assert all(x.stride(2) == 1 for x in scales[1 if config.lone_scales else 0 :])
    assert mean.data_ptr() % 16 == 0 and all(step % 4 == 0 for step in mean.stride()[:2])
    if config.lone_scales:
        assert [x.shape[2] for x in scales[:4]] == [heads // (kv_heads * config.group), 1, 1, 1]
        # Those of V are factors of the output, which may be negative.
        assert bool((of_v == 1).all())


def factors(config: Fp8ForwardConfig, scales: tuple[Tensor, ...], sequence: int) -> list[Tensor]:
    """Of each query head, and of each head of K and of V: as the kernel reads them, 1 behind the last sequence. Heads
    of a tile share one."""
    of_q, of_k, of_v, of_out = scales
    if not config.lone_scales:
        of_q, of_k, of_v = (x[0].t()[..., None] for x in (of_q, of_k, of_v))
    q, k, v, o = (
        (x[sequence].flatten() if sequence < x.shape[0] else torch.ones(x[0].numel())).double()
        for x in (of_q, of_k, of_v, of_out)
    )
    return [q.repeat_interleave(config.group), k, v * o]


def sequences_of(
    plan: Tensor, sequences: int, total_q: int, tile: int, splits: int
) -> tuple[list[list[int]], list[int]]:
    """Where rows and keys of each lie, for which there are to be as many tiles of ``tile`` rows as it takes, and in how
    many parts its keys are, of up to ``splits``."""
    assert plan.numel() == plan_words(total_q, sequences - 1, tile, splits)
    behind = PLAN_HEADER + RECORD * sequences
    records = plan[PLAN_HEADER:behind].view(-1, RECORD).tolist()
    entries = plan[behind : behind + ENTRY * int(plan[0])].view(-1, ENTRY)[:, 0]
    in_parts, parts = splits > 1, [1] * sequences
    for number in set(entries.tolist()) if in_parts else ():
        parts[sequence_of_number(number)] = parts_of_number(number)
    tiles = [-(-rows // tile) * n for (_, rows, *_), n in zip(records, parts, strict=True)]
    own = sequence_of_number(entries) if in_parts else entries
    assert torch.bincount(own, minlength=sequences).tolist() == tiles and max(parts) <= splits
    return records, parts


def keys_of_sequence(v: Tensor, record: list[int], sequence: int, v_rows: bool) -> Tensor:
    """V in rows. Of one that is transposed, what fills the last step is zeros, whatever P is there."""
    offset, count = record[2:]
    if v_rows:
        return v[offset : offset + count]
    step = FP8_KEYS_PER_STEP
    key = torch.arange(-(-count // step) * step)
    slots = (offset // step + sequence + key // step) * step + slot_of_key(key % step)
    rows = v[:, :, slots].permute(2, 0, 1)
    assert not rows[count:].float().any()
    return rows[:count]


def packed_of(
    starts_q: Tensor, starts_k: Tensor, used_q: Tensor, used_k: Tensor, total_q: int, total_k: int
) -> tuple[Packed, Packed]:
    """Where rows of Q, and of K, lie."""
    vectors = (starts_q, used_q), (starts_k, used_k)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for pair in vectors for x in pair)
    of_q, of_k = (
        Packed(tuple(starts.tolist()), total, tuple(used.tolist()) or None)
        for (starts, used), total in zip(vectors, (total_q, total_k), strict=True)
    )
    return of_q, of_k


class Kernels:
    """``launches`` are the names of what was launched, ``calls`` what attention was given, and ``decode`` the kernels
    of few queries."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.decode = DecodeKernels()
        self._merge = KernelsIn16Bits().merge

    def load_serving(self, config: Any) -> Any:
        return self.merge if isinstance(config, CombineConfig) else self.decode.load(config)

    def load(self, config: Any) -> Any:
        if config == PlanConfig(HOPPER_ARCH, in_parts=True):
            return self.plan_in_parts
        kinds = {PlanConfig: self.plan, TransposeConfig: self.transpose, WidenConfig: self.widen}
        if type(config) in kinds:
            return kinds[type(config)]
        assert isinstance(config, Fp8ForwardConfig) and config.layout == "varlen"
        return lambda *given: self.attend(config, *given)

    def plan(self, *given: Any) -> None:
        self.launches.append("plan")
        *lengths, plan, total_q, total_k, tile, rows = given
        assert rows == 0 and plan.dtype == torch.int32
        plan.copy_(plan_of(*packed_of(*lengths, total_q, total_k), tile))

    def plan_in_parts(self, *given: Any) -> None:
        self.launches.append("plan")
        *lengths, plan, total_q, total_k, tile, tile_n, seen, heads, slots, most = given
        in_parts = InParts(tile_n, heads, slots, most, seen)
        plan.copy_(plan_of(*packed_of(*lengths, total_q, total_k), tile, in_parts=in_parts))

    def transpose(self, v: Tensor, transposed: Tensor, starts: Tensor, used: Tensor) -> None:
        self.launches.append("transpose")
        assert all(x.stride(3) == 1 and x.data_ptr() % 16 == 0 for x in (v, transposed))
        lengths = Lengths(starts, starts, None, used if used.numel() else None, 0, 0)
        transposed.copy_(transpose_packed(v[0], lengths)[None])

    def widen(self, q: Tensor, k: Tensor, wide_q: Tensor, wide_k: Tensor) -> None:
        wide_q.copy_(q.half())
        wide_k.copy_(k.half())

    @torch.no_grad()
    def attend(self, config: Fp8ForwardConfig, *given: Any) -> None:
        self.launches.append("attend")
        check_as_compiled(config, *given[:11])
        q, k, v, out, lse, _, *scales, mean = given[:11]
        rows_q, rows_k, scale, *sides, plan, sequences, ctas = given[11:]
        assert mean.shape[2] == 0 and rows_q == rows_k == ONE_PER_SEQUENCE
        assert [x is not None for x in sides] == [config.window] * 2 + [config.chunk]
        assert ctas == SMS * config.ctas_per_sm
        splits = out.shape[0] if config.split else 1
        self.calls.append({"config": config, "scale": scale, "scales": scales, "lse": lse, "splits": splits})
        self.calls[-1] |= {"sides": sides, "plan": plan.clone()}
        of_tiles = q.shape[0], config.tile_queries, splits
        for number, (record, parts) in enumerate(zip(*sequences_of(plan, sequences, *of_tiles), strict=True)):
            rows, keys = (slice(first, first + n) for first, n in (record[:2], record[2:]))
            of_q, of_k, of_v = factors(config, tuple(scales), number)
            values = keys_of_sequence(v, record, number, config.v_rows)
            whole = q[rows].double() * of_q[:, None], k[keys].double() * of_k[:, None]
            given = *whole, values.double() * of_v[:, None], scale, config.causal, None
            if config.split:
                lse[:, 0, rows] = -math.inf
            for part in range(parts):
                found, found_lse = attend_to_part(*given, (part, parts), sides)
                if config.split:
                    out[part, 0, rows], lse[part, 0, rows] = found, found_lse
                else:
                    out[rows], lse[:, rows] = found, found_lse.T[:, : lse.shape[1]]

    def merge(self, *given: Tensor) -> None:
        self.launches.append("merge")
        parts, part_lse, out, lse = given
        assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in (parts, part_lse, lse))
        assert parts.shape[:-1] == part_lse.shape and part_lse.shape[1:] == lse.shape == out.shape[:-1]
        assert parts.shape[-1] == out.shape[-1]
        for x in (parts, out):
            assert x.stride(-1) == 1 and all(step % 4 == 0 for step in x.stride()[:-1])
        self._merge(*given)


Fake = TypeVar("Fake", bound=Kernels)


def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """For a fixture: those of a pretended H200. What is new is NaN."""
    yield from serving(Kernels(), monkeypatch, *LAUNCHING)


def serving(fake: Fake, monkeypatch: pytest.MonkeyPatch, *launching: ModuleType) -> Iterator[Fake]:
    """The same of these kernels, of an H200 as ``launching`` modules see it."""
    pretend(monkeypatch, *launching)
    empty, on_gpu = torch.empty, device_memory.empty_on_gpu
    monkeypatch.setattr(torch, "empty", lambda *a, **b: poisoned(empty(*a, **b)))
    monkeypatch.setattr(device_memory, "empty_on_gpu", lambda *facts: poisoned(on_gpu(*facts)))
    for name in ("get_forward", "get_quantize"):
        monkeypatch.setattr(compile_cache, name, fake.load)
    monkeypatch.setattr(compile_cache, "get_serving", fake.load_serving)
    for module in (packed_scripts, few_packed_queries):
        monkeypatch.setattr(module, "current_device", lambda: torch.cuda.current_device())
    again = packed_descaled_again, packed_parts_again, packed_at_once, few_packed_queries
    for module in (*again, descaled_again, packed_scripts):
        monkeypatch.setattr(module, "kept_argument", lambda x: x)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    yield fake
    forget_launchers()


def poisoned(x: Tensor) -> Tensor:
    return x.fill_(math.nan) if x.dtype.is_floating_point else x
