"""FP8 attention of 16-bit tensors with so many keys that the kernel adds them up in runs: V loses a mean for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hopper_attention import device_memory
from hopper_attention.launch.base import Launcher, no_vectors
from hopper_attention.launch.fp8 import ALL_ROWS, Fp8HopperLauncher
from hopper_attention.launch.quantize import QuantizeLauncher, addressable, empty_outputs
from hopper_attention.launch.value_mean import RunMeansLauncher
from hopper_attention.masks import Sides
from hopper_attention.quantized import Means


@dataclass(frozen=True)
class InRunsLauncher(Launcher):
    """The quantizer, with what finds the means of V, and the FP8 kernel with ``run_blocks``.

    ``finder`` finds these means, ``seed`` is that of the rotation.
    """

    quantizer: QuantizeLauncher
    finder: RunMeansLauncher
    attention: Fp8HopperLauncher
    seed: int
    window: Sides

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted has no elements."""
        if self.device_index != torch.cuda.current_device():
            out, lse = self.call_there(q, k, v, softmax_scale, wants_lse)
            return out, lse
        q, k, v = map(addressable, (q, k, v))
        batch, seqlen_q, heads, _ = q.shape
        kv_heads, nothing = k.shape[2], device_memory.no_floats(q.device)
        # Found before the quantizer's outputs are made, and held: it starts while statistics of runs are still read,
        # and may not write where they lie.
        found = self.finder(v)
        outputs = empty_outputs(self.quantizer.config, q, k, v)
        extras = self.quantizer.extras(self.seed, Means(nothing, found.means.flatten(0, 1)), q.device)
        self.quantizer.fill(outputs, q, k, v, extras)
        attention, block_q = self.attention, self.quantizer.config.block_q
        out = attention.result.empty_out(q)
        lse = attention.result.empty_lse(q) if wants_lse else no_vectors(batch, heads, q.device)
        scales = outputs.q_scale, outputs.k_scale, outputs.v_scale
        ones = device_memory.unit_scales(batch, kv_heads, q.device)
        tensors = outputs.q8, outputs.k8, outputs.vt8, out, lse
        rows_q = block_q if block_q < seqlen_q else ALL_ROWS
        # What the run of the first keys has lost is added to the output.
        of_call = found.means[:, -1], rows_q, softmax_scale, self.window, (found.means, found.changes)
        attention.queue(tensors, (*scales, ones), *of_call)
        return out, lse
