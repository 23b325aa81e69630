"""Stand-ins for the kernels of packed 16-bit tensors in e4m3: the mean of V, the quantizer, and attention to what that
makes. They leave what is of no sequence as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import VARLEN
from hopper.forward.fp8.config import FP8_KEYS_PER_STEP, Fp8ForwardConfig
from hopper.mean.config import ValueMeanConfig
from hopper.quantize.config import QuantizeConfig
from hopper_attention import Fp8Quantization
from hopper_attention.launch import quantize
from hopper_attention.lengths import Lengths
from hopper_attention.masks import UNLIMITED
from hopper_attention.packed_quantization import packed_mean_worth_subtracting, quantize_packed_by_torch
from hopper_attention.packed_quantized import (
    PackedQuantizedTensor,
    PackedTransposedV,
    RowPlaces,
    count_units,
)
from hopper_attention.reference import attention_naive
from hopper_attention.rotation import sign_masks
from tests.python.fake_gpu import SMS
from tests.python.packed_fp8_kernels import (
    E4M3,
    LAUNCHING,
    Kernels,
    check_as_compiled,
    keys_of_sequence,
    sequences_of,
    serving,
)

SEEDS = 0, 1, 2, 3
"""Of rotations that are known by their signs."""
PARTS_LAUNCHING = *LAUNCHING, quantize


def check_sources(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What compiled kernels ask of 16-bit tensors of all sequences, as one batch."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[0] == k.shape[0] == v.shape[0] == 1 and k.shape[:3] == v.shape[:3]
    for x in (q, k, v):
        assert x.stride(3) == 1 and x.data_ptr() % 16 == 0
        assert all(step > 0 and step % 8 == 0 for step in x.stride()[:3])


def check_lengths(*lengths: Tensor) -> Lengths:
    """Where rows of sequences lie, as compiled kernels are told."""
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lengths)
    starts_q, starts_k, used_q, used_k = lengths
    assert starts_q.shape == starts_k.shape
    assert all(x.shape[0] in (0, len(starts_q) - 1) for x in (used_q, used_k))
    given_q, given_k = (x if x.numel() else None for x in (used_q, used_k))
    return Lengths(starts_q, starts_k, given_q, given_k, 0, 0)


def fill(x: Tensor, made: Tensor, dim: int, numbers: Tensor) -> None:
    """Write what was ``made`` with these numbers of a dimension into an output of the quantizer."""
    kind = torch.uint8 if made.dtype == E4M3 else made.dtype
    which = numbers.unique().long()
    x[0].view(kind).index_copy_(dim, which, made.view(kind).index_select(dim, which))


def quantization_of(config: QuantizeConfig, signs: Tensor, signs_v: Tensor) -> Fp8Quantization:
    """What a quantizer with these signs does."""
    given = (config.rotate, signs, config.head_dim), (config.rotate_v, signs_v, config.head_dim_v)
    seeds = set(SEEDS)
    for rotates, of_columns, head_dim in given:
        if rotates:
            seeds &= {x for x in SEEDS if torch.equal(of_columns, sign_masks(head_dim, x, signs.device))}
        else:
            assert of_columns.shape == (0,) and of_columns.dtype == torch.int32
    blocks, rotations = (config.block_q, config.block_k), (config.rotate, config.rotate_v)
    return Fp8Quantization(rotations[0], "block", *blocks, min(seeds), False, rotations[1], config.smooth_v)


class PartsKernels(Kernels):
    """``Kernels`` that quantize, too, and attend to blocks that share scales."""

    def load(self, config: Any) -> Any:
        if isinstance(config, QuantizeConfig):
            assert config.layout == VARLEN and not (config.smooth_k or config.wide_codes)
            return lambda *given: self.quantize(config, *given)
        if isinstance(config, ValueMeanConfig):
            assert config.layout == VARLEN and not config.of_runs
            return self.mean
        if isinstance(config, Fp8ForwardConfig):
            assert config.layout == VARLEN and not (config.lone_scales or config.v_rows or config.split)
            return lambda *given: self.attend(config, *given)
        return super().load(config)

    def mean(self, v: Tensor, mean: Tensor, starts: Tensor, used: Tensor) -> None:
        self.launches.append("mean")
        check_sources(v, v, v)
        lengths = check_lengths(starts, starts, used, used)
        assert mean.shape == (len(starts), *v.shape[2:]) and mean.dtype == torch.float32
        mean.copy_(packed_mean_worth_subtracting(v[0], lengths))

    def quantize(self, config: QuantizeConfig, *given: Any) -> None:
        self.launches.append("quantize")
        (q, k, v), outputs, (signs, signs_v, no_mean, mean) = given[:3], given[3:9], given[9:13]
        check_sources(q, k, v)
        assert q.dtype == getattr(torch, config.dtype)
        assert (k.shape[3], v.shape[3]) == (config.head_dim, config.head_dim_v)
        lengths, ctas = check_lengths(*given[13:17]), given[17]
        assert ctas == SMS * config.ctas_per_sm and no_mean.shape == (0,) and no_mean.dtype == torch.int32
        c = quantization_of(config, signs, signs_v)
        parts = quantize_packed_by_torch(q[0], k[0], v[0], lengths, c)
        if config.smooth_v:
            assert torch.equal(mean, parts.mean_v)
        else:
            assert mean.shape == (0,) and mean.dtype == torch.int32
        made = parts.q.data, parts.k.data, parts.v.data, parts.q.scale, parts.k.scale, parts.v.scale
        for x, of_torch in zip(outputs, made, strict=True):
            assert x.shape == (1, *of_torch.shape) and x.dtype == of_torch.dtype and x.is_contiguous()
            assert x.data_ptr() % (16 if x.dtype == E4M3 else 4) == 0 and x.stride(0) == of_torch.numel()
        (starts_q, starts_k), used = lengths[:2], lengths[2:4]
        places = RowPlaces.of(starts_q, used[0], q.shape[1]), RowPlaces.of(starts_k, used[1], k.shape[1])
        rows, keys = (torch.arange(len(x.row))[x.is_used] for x in places)
        units_q = places[0].units(starts_q, config.block_q)[rows]
        units_k, steps = (places[1].units(starts_k, n)[keys] for n in (config.block_k, FP8_KEYS_PER_STEP))
        slots = (steps[:, None] * FP8_KEYS_PER_STEP + torch.arange(FP8_KEYS_PER_STEP)).flatten()
        written = (0, rows), (0, keys), (2, slots), (1, units_q), (1, units_k), (1, units_k)
        for x, of_torch, (dim, numbers) in zip(outputs, made, written, strict=True):
            fill(x, of_torch, dim, numbers)

    @torch.no_grad()
    def attend(self, config: Fp8ForwardConfig, *given: Any) -> None:
        self.launches.append("attend")
        check_as_compiled(config, *given[:11])
        q, k, v, out, lse, _, of_q, of_k, of_v, of_out, mean = given[:11]
        rows_q, rows_k, scale, *sides, plan, sequences, ctas = given[11:]
        assert ctas == SMS * config.ctas_per_sm and (sides == [None] * 3) != config.window
        self.calls.append({"config": config, "scale": scale, "lse": lse, "mean": mean, "sides": sides})
        (total_q, heads, _), (total_k, kv_heads, _), batch = q.shape, k.shape, sequences - 1
        for x, total, number, rows in ((of_q, total_q, heads, rows_q), (of_k, total_k, kv_heads, rows_k)):
            assert x.shape == (1, number, count_units(total, batch, rows))
        assert of_v.shape == of_k.shape and of_out.shape == (sequences, kv_heads, 1)
        assert mean.shape in ((sequences, kv_heads, 0), (sequences, kv_heads, v.shape[1]))
        records, _ = sequences_of(plan, sequences, total_q, config.tile_queries, 1)
        starts_q, starts_k = torch.tensor(records, dtype=torch.int32).t()[::2].contiguous()
        values = PackedTransposedV(v, of_v[0], rows_k, total_k).dequantize(starts_k, torch.float64)
        whole_q, whole_k = (
            PackedQuantizedTensor(x.to(E4M3), of_x[0], rows).dequantize(starts, torch.float64)
            for x, of_x, rows, starts in ((q, of_q, rows_q, starts_q), (k, of_k, rows_k, starts_k))
        )
        left, right = (UNLIMITED if x is None or x >= total_k + total_q else x for x in sides[:2])
        of_mask = {"causal": config.causal, "window_left": left, "window_right": right}
        of_mask["attention_chunk"] = sides[2] or 0
        for number, record in enumerate(records):
            rows, keys = (slice(first, first + n) for first, n in (record[:2], record[2:]))
            keys_of_sequence(v, record, number, False)
            one = whole_q[None, rows], whole_k[None, keys], values[None, keys] * of_out[number]
            (found,), (found_lse,) = attention_naive(*one, softmax_scale=scale, **of_mask)
            if mean.shape[2]:
                added = mean[number].double().repeat_interleave(heads // kv_heads, 0)
                found = torch.where((found_lse.t() > -torch.inf)[..., None], found + added, found)
            out[rows], lse[:, rows] = found, found_lse[:, : lse.shape[1]]


def pretended_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[PartsKernels]:
    """For a fixture: those of a pretended H200. What is new is NaN."""
    yield from serving(PartsKernels(), monkeypatch, *PARTS_LAUNCHING)
