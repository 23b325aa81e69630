"""What the Hopper forward kernel is put together from, and what only some of its kernels are called with."""

from dataclasses import dataclass

from cute_kernels.invariant import LoopInvariant
from cute_kernels.problem import VARLEN
from hopper.config import ForwardConfig
from hopper.forward.batch import DenseBatch, PackedBatch
from hopper.forward.grouped import GroupedBatch, GroupedPackedBatch
from hopper.forward.kv_source import DenseTma, PackedTma
from hopper.forward.paged import PagedTma
from hopper.forward.precision import SixteenBits
from hopper.forward.split import SplitBatch, SplitPackedBatch


@dataclass(frozen=True)
class KernelParts:
    """What a forward kernel is put together from; the rest of it is the same for all.

    ``precision`` has what the dtype of the inputs decides, ``kv_source`` how a key block reaches shared memory,
    ``batch`` how its sequences lie.
    """

    precision: SixteenBits
    kv_source: DenseTma
    batch: DenseBatch

    @staticmethod
    def of_16_bits(config: ForwardConfig) -> "KernelParts":
        """For inputs in 16 bits."""
        kv_source = DenseTma(config)
        if config.layout == VARLEN:
            kv_source = PagedTma(config) if config.page_box else PackedTma(config)
        return KernelParts(SixteenBits(config), kv_source, batch_of(config))


def batch_of(config: ForwardConfig) -> DenseBatch:
    """How sequences lie, and what the rows of a tile are."""
    if config.layout == VARLEN:
        packed = GroupedPackedBatch if config.group > 1 else PackedBatch
        return (SplitPackedBatch if config.split else packed)(config)
    dense = GroupedBatch if config.group > 1 else DenseBatch
    return (SplitBatch if config.split else dense)(config)


@dataclass(frozen=True)
class LaunchOptions(LoopInvariant):
    """Arguments that only some kernels take; each is empty where the config has no use for it.

    ``extras`` are for the kernel's ``precision``; ``plan`` is the plan and its number of sequences, for
    ``PackedBatch``; ``window`` the two sides, and then the chunk if there is one; ``softcap`` the cap; ``slopes`` those
    of ALiBi; ``dropout`` the arguments of ``Dropout.of``; ``captured`` the tensors that a user's functions read;
    ``lists`` the tensor of lists of blocks (``Work``); ``pages`` the table and the left pads of ``Pages``.
    """

    extras: tuple = ()
    plan: tuple = ()
    window: tuple = ()
    softcap: tuple = ()
    slopes: tuple = ()
    dropout: tuple = ()
    captured: tuple = ()
    lists: tuple = ()
    pages: tuple = ()
