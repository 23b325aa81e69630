"""What the roles of the kernel for wide values share: operands, pipelines, and their places."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from cute_kernels.invariant import LoopInvariant
from hopper.tiles import TmaOperand

FIRST_HALF, SECOND_HALF = 0, 1
"""Of the columns of V, QV and O; also the number of the consumer warpgroup that has this half of O."""


class WideTensors(NamedTuple):
    """One thing for each tensor: its TMA atom, its coordinate tensor, its shared memory. ``qv`` is empty or of one."""

    q: Any
    k: Any
    v: Any
    o: Any
    qv: tuple

    @staticmethod
    def of_operands(atoms: "WideTensors", tensors: "WideTensors", smem: "WideTensors") -> "WideTensors":
        """``TmaOperand`` of each."""
        qv = tuple(map(TmaOperand, atoms.qv, tensors.qv, smem.qv))
        return WideTensors(*map(TmaOperand, atoms[:4], tensors[:4], smem[:4]), qv)


class WidePipelines(NamedTuple):
    """From the producer to the consumers; the docstring of ``WideForwardKernel`` has their table.

    ``v`` are those of both halves of V. K and both halves of a block have the same stage, so one state serves all
    three.
    """

    q: PipelineTmaAsync
    k: PipelineTmaAsync
    v: tuple[PipelineTmaAsync, PipelineTmaAsync]


@dataclass(frozen=True)
class Place(LoopInvariant):
    """Where a CTA is in its cluster of ``cluster`` CTAs: its ``rank``, the int 0 without a cluster."""

    cluster: int
    rank: Int32 | int

    def own(self, m_block: Int32) -> Int32:
        """The number, among blocks of 64 queries, of the CTA's own in tile ``m_block`` of the cluster."""
        return m_block * self.cluster + self.rank

    @property
    def targets(self) -> dict[str, Int16]:
        """What a copy to all CTAs of the cluster takes."""
        return {"mcast_mask": Int16(2**self.cluster - 1)} if self.cluster > 1 else {}


@dataclass(frozen=True)
class WideSmem(LoopInvariant):
    """Shared memory that no TMA fills: P, as (64, tile_n), and a factor for each row of O."""

    p: cute.Tensor
    factors: cute.Tensor


def tile_state(phase: Int32) -> PipelineState:
    """Where the pipeline of Q stands, which has one stage; a tile is a phase."""
    return PipelineState(1, Int32(0), Int32(0), phase)
