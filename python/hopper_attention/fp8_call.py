"""What the launchers of FP8 attention to 16-bit tensors share, whose quantized form nobody asks for."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopper_attention import device_memory
from hopper_attention.device_memory import Facts, Pieces, no_floats, unit_scales
from hopper_attention.launch.at_once import Step
from hopper_attention.launch.base import Launcher, no_vectors
from hopper_attention.launch.fp8 import Fp8HopperLauncher, no_runs_of
from hopper_attention.launch.quantize import Extras, Outputs, QuantizeLauncher, addressable
from hopper_attention.masks import Sides
from hopper_attention.quantized import Means

OUTPUTS = len(Outputs._fields)


class Constants(NamedTuple):
    """What the kernels read that is the same in all calls of a launcher: extras of the quantizer, scales that are 1,
    what stands for no mean of V and for no LSE, and what an FP8 kernel takes for no means of runs, if it has runs."""

    extras: Extras
    ones: Any
    no_mean: Any
    no_lse: Any
    no_runs: tuple[Any, ...]


@dataclass(frozen=True)
class QuantizeAndAttend(Launcher):
    """The quantizer and the FP8 kernel of calls with tensors of some sizes and strides.

    ``pieces`` are what the kernels in front of the last one fill, ``Outputs`` first; ``out`` and ``lse`` what that one
    fills. ``seed`` is that of the rotation; ``rows_q`` rows of Q share a scale.
    """

    quantizer: QuantizeLauncher
    attention: Fp8HopperLauncher
    pieces: Pieces
    out: Facts
    lse: Facts
    seed: int
    rows_q: int
    window: Sides

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """out and lse; an lse that is not wanted has no elements."""
        if self.device_index != torch.cuda.current_device():
            out, lse = self.call_there(q, k, v, softmax_scale, wants_lse)
            return out, lse
        q, k, v = map(addressable, (q, k, v))
        return self.launch(q, k, v, softmax_scale, wants_lse, self.constants(q.device))

    def constants(self, device: torch.device) -> Constants:
        """What ``launch`` takes. Of a CUDA graph that is being captured they are its own, or are never freed."""
        (batch, heads, _), kv_heads, nothing = self.lse[0], self.pieces[1].shape[2], no_floats(device)
        return Constants(
            self.quantizer.extras(self.seed, Means(nothing, nothing), device),
            unit_scales(batch, kv_heads, device),
            no_vectors(batch, kv_heads, device),
            no_vectors(batch, heads, device),
            no_runs_of(self.attention, batch, device),
        )

    def results(self, wants_lse: bool, no_lse: Any) -> tuple[Tensor, Any]:
        """out and lse, to be filled."""
        make = device_memory.empty_on_gpu
        return make(*self.out), make(*self.lse) if wants_lse else no_lse

    @abstractmethod
    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool, constants: Constants
    ) -> tuple[Tensor, Tensor]:
        """The same as a call of tensors that the quantizer can address, on the current GPU, which is that of this
        launcher."""

    @abstractmethod
    def steps(self, constants: Constants) -> list[Step]:
        """The launches of a call that gives q, k, v, out, lse, a tile counter, the scale and ``pieces``."""
