"""A call of a packed forward kernel that was made, to be made again with tensors like its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hopper.config import ForwardConfig
from hopper_attention import device_memory
from hopper_attention.checks import TensorSpec
from hopper_attention.device_memory import Facts, Piece, Pieces
from hopper_attention.launch import at_once
from hopper_attention.launch.at_once import Given, Script, Step
from hopper_attention.launch.base import NO_PAGES, NO_SIDES, current_device
from hopper_attention.launch.packed_forward import NO_CHANGES, PackedForwardLauncher
from hopper_attention.layout import TMA_BYTES, repairs_for
from hopper_attention.lengths import Lengths
from hopper_attention.masks import FULL_SIDES, Sides, kernel_sides


@dataclass(frozen=True, slots=True)
class ReadyPackedLaunch:
    """A ``varlen.VarlenLaunch`` with the window of its call, of tensors of the same sizes and strides in every call:
    ``script`` makes the plan, in memory for ``work``, and launches the kernel. ``launcher`` serves where they
    cannot."""

    launcher: PackedForwardLauncher
    out: Facts
    lse: Facts
    no_lse: Facts
    work: Pieces
    script: Script

    @classmethod
    def of(
        cls,
        launcher: PackedForwardLauncher,
        tensors: tuple[Tensor, Tensor, Tensor],
        lengths: Lengths,
        sides: Sides = FULL_SIDES,
    ) -> ReadyPackedLaunch | None:
        """That of calls with tensors like these, and a mask of these sides; None where something is filled before the
        launch, a tensor is to be copied, or the kernel is none of Hopper's."""
        q, k, _ = tensors
        config, (total_q, heads, _), sequences = launcher.config, q.shape, lengths.cu_seqlens_q.shape[0]
        is_as_it_is = not repairs_for(*(TensorSpec.of(x.unsqueeze(0)) for x in tensors))
        if (
            not isinstance(config, ForwardConfig)
            or not launcher.num_ctas
            or config.window != (sides != FULL_SIDES)
            or lengths.seqused_q is not None
            or not is_as_it_is
        ):
            return None
        out = Piece((total_q, heads, launcher.head_dim_v), q.dtype)
        facts = out.facts, Piece((heads, total_q)).facts, Piece((heads, 0)).facts
        work = (launcher.planner.memory(total_q, sequences - 1, config.tile_queries),)
        unused = device_memory.no_lengths(q.device)
        of_q, of_k, of_v, of_out, lse, plan, counter, scale, starts_q, starts_k, used_k = map(
            Given, range(11)
        )
        of_window = kernel_sides(*sides) if config.window else NO_SIDES
        behind = *of_window, plan, sequences, *NO_PAGES, *NO_CHANGES, launcher.num_ctas
        used = unused, unused if lengths.seqused_k is None else used_k
        of_plan = total_q, k.shape[0], *launcher.planner.options(config.tile_queries, heads // config.group)
        steps = [
            Step(launcher.planner.kernel, (starts_q, starts_k, *used, plan, *of_plan)),
            Step(launcher.kernel, (of_q, of_k, of_v, of_out, lse, counter, scale, *behind)),
        ]
        return cls(launcher, *facts, work, at_once.make_script(steps))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_left: int,
        window_right: int,
        attention_chunk: int,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        index, make = self.launcher.device_index, device_memory.empty_on_gpu
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % TMA_BYTES or current_device() != index:
            lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
            window = window_left, window_right, attention_chunk
            return self.launcher(q, k, v, *lengths, softmax_scale, *window, wants_lse)
        out, lse = make(*self.out), make(*(self.lse if wants_lse else self.no_lse))
        (plan,) = device_memory.stream_memory(index, self.work).arguments
        counter = device_memory.tile_counter(index)
        starts = cu_seqlens_q, cu_seqlens_k
        self.script.run(q, k, v, out, lse, plan, counter, softmax_scale, *starts, seqused_k)
        return out, lse
