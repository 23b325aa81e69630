"""Context parallelism: attention over a sequence shared out to many GPUs, on torch.distributed.

``context_parallel_attention`` and its methods take the rows of one rank and give its rows of the output, forward and
backward; ``shard_sequence`` cuts a whole sequence. Importing ``hopper_attention`` does not import this package.
"""

from hopper_attention.distributed.api import (
    all_gather_attention,
    context_parallel_attention,
    explain_context_parallel,
    ring_attention,
    ulysses_attention,
)
from hopper_attention.distributed.auto import ContextPlan, Machine
from hopper_attention.distributed.checks import DisagreementError
from hopper_attention.distributed.exchange import PeerError
from hopper_attention.distributed.layout import shard_zigzag, unshard_zigzag
from hopper_attention.distributed.models import attention_interface
from hopper_attention.distributed.tensors import sequence_positions, shard_sequence, unshard_sequence

__all__ = [
    "ContextPlan",
    "DisagreementError",
    "Machine",
    "PeerError",
    "all_gather_attention",
    "attention_interface",
    "context_parallel_attention",
    "explain_context_parallel",
    "ring_attention",
    "sequence_positions",
    "shard_sequence",
    "shard_zigzag",
    "ulysses_attention",
    "unshard_sequence",
    "unshard_zigzag",
]
