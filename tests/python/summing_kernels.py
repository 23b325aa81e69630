"""Stand-ins for the kernels of a backward pass that add dQ to its sums, as kernels do, for tests of sums over parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from hopper_attention import compile_cache
from hopper_attention.backward_rules import KernelConfig
from hopper_attention.launch import backward
from tests.python.fake_gpu import forget_launchers, pretend
from tests.python.test_backward_launch import StandIns


class SummingKernels(StandIns):
    """dQ lies in the sums row by row, in whole query tiles."""

    def kernel(self, config: KernelConfig, *arguments: Any) -> None:
        (*inputs, sums, dk, dv), of_call = arguments[:9], arguments[9:]
        k, v = inputs[1:3]
        # What is written may lie where K and V are.
        of_keys = torch.empty_like(dk), torch.empty_like(dv)
        super().kernel(config, *inputs, torch.zeros_like(sums), *of_keys, *of_call)
        rows = self.dq.transpose(1, 2)
        short = sums.shape[2] * config.tile_m - rows.shape[2]
        columns = columns_of(sums, config)
        sums += pad(rows, (0, columns - rows.shape[3], 0, short)).reshape(sums.shape)
        assert dk.shape == k.shape and dv.shape == v.shape
        dk.copy_(of_keys[0])
        dv.copy_(of_keys[1])

    def finish(self, sums: Tensor, dq: Tensor, scale: float) -> None:
        batch, rows, heads, head_dim = dq.shape
        config = self.passes[-1]
        by_row = sums.reshape(batch, heads, sums.shape[2] * config.tile_m, columns_of(sums, config))
        dq.copy_(by_row[:, :, :rows, :head_dim].transpose(1, 2) * scale)


def columns_of(sums: Tensor, config: KernelConfig) -> int:
    """Columns of dQ that sums have: without zeros, as far as kernels leave them out."""
    return math.prod(sums.shape[3:]) // config.tile_m


@contextmanager
def kernels_on_a_cpu() -> Iterator[SummingKernels]:
    """Let backward passes run on stand-ins while it lasts."""
    fake = SummingKernels()
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, backward)
        patch.setattr(compile_cache, "get_backward", fake.get)
        yield fake
    forget_launchers()
