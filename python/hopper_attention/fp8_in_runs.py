"""FP8 attention of 16-bit tensors with so many keys that the kernel adds them up in runs: V loses a mean for each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hopper_attention import device_memory
from hopper_attention.fp8_call import OUTPUTS, Constants, QuantizeAndAttend
from hopper_attention.launch.at_once import Given, Step
from hopper_attention.launch.quantize import Extras
from hopper_attention.launch.value_mean import RunMeansLauncher, RunShape


@dataclass(frozen=True)
class InRunsLauncher(QuantizeAndAttend):
    """``QuantizeAndAttend`` with what finds the means of V, and an FP8 kernel with ``run_blocks``.

    Behind ``Outputs`` ``pieces`` are those of ``finder`` and what the kernel notes. ``runs`` is the shape of the means.
    """

    finder: RunMeansLauncher
    runs: RunShape

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, wants_lse: bool, constants: Constants
    ) -> tuple[Tensor, Tensor]:
        pieces = device_memory.work_memory(q.device, self.device_index, self.pieces).tensors
        parts, (statistics, own, room, changes, notes) = pieces[:OUTPUTS], pieces[OUTPUTS:]
        means, of_runs, of_last, differences = self.runs.views(own, room)
        self.finder.fill(v, statistics, means, differences, changes)
        extras = Extras(*constants.extras[:3], of_runs)
        counters = (
            [device_memory.tile_counter(self.device_index)] if self.quantizer.config.claims_items else []
        )
        self.quantizer.fill(parts, q, k, v, (*extras, *counters))
        out, lse = self.results(wants_lse, constants.no_lse)
        tensors, scales = (*parts[:3], out, lse), (*parts[3:], constants.ones)
        # What the run of the first keys has lost is added to the output.
        of_call = of_last, self.rows_q, softmax_scale, self.window, (differences, changes, notes)
        self.attention.queue(tensors, scales, *of_call)
        return out, lse

    def steps(self, constants: Constants) -> list[Step]:
        q, k, v, out, lse, counter, scale, *pieces = map(Given, range(7 + len(self.pieces)))
        parts, (statistics, own, room, changes, notes) = pieces[:OUTPUTS], pieces[OUTPUTS:]
        means, of_runs, of_last, differences = self.runs.parts(own.number, room.number)
        tensors, scales = (*parts[:3], out, lse), (*parts[3:], constants.ones)
        of_call = counter, scales, of_last, self.rows_q, scale, self.window, (differences, changes, notes)
        extras = Extras(*constants.extras[:3], of_runs)
        counters = [counter] if self.quantizer.config.claims_items else []
        return [
            *self.finder.steps(v, statistics, means, differences, changes, keys=self.pieces[1].shape[1]),
            Step(self.quantizer.kernel, (q, k, v, *parts, *extras, *counters, self.quantizer.num_ctas)),
            Step(self.attention.kernel, self.attention.arguments(tensors, *of_call)),
        ]
