"""Hugging Face Transformers: attention by name. Importing this registers the names.

    import hopper_attention.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="hopper_attention")

``"hopper_attention"`` computes in the 16 bits of the model, ``"hopper_attention_fp8"`` quantizes Q, K and V to e4m3 for
prefill and training, and takes steps on a cache in 16 bits. :func:`prepare_batches` has ``generate_batch`` run on the
kernels, :func:`fuse_rotary` rotary embedding. The page ``docs/integrations/transformers.md`` says what each takes.
"""

from __future__ import annotations

from hopper_attention.integrations.needs import need

OLDEST = (5, 4)
"""Of the versions of Transformers: earlier ones describe masks in another way."""

# What is missing or too old must be said before names are imported from it.
need("transformers", OLDEST)

from transformers import AttentionInterface, AttentionMaskInterface

from hopper_attention.integrations.transformers.attention import attend, attend_fp8
from hopper_attention.integrations.transformers.batches import (
    BATCHES_NAME,
    attend_batches,
    can_prepare_batches,
    no_mask,
    prepare_batches,
)
from hopper_attention.integrations.transformers.masks import make_mask
from hopper_attention.integrations.transformers.rotary import fuse_rotary, unfuse_rotary

__all__ = [
    "BATCHES_NAME",
    "FP8_NAME",
    "NAME",
    "attend",
    "attend_batches",
    "attend_fp8",
    "can_prepare_batches",
    "fuse_rotary",
    "make_mask",
    "prepare_batches",
    "register",
    "unfuse_rotary",
]

NAME = "hopper_attention"
FP8_NAME = "hopper_attention_fp8"


def register() -> None:
    """Make the names known to Transformers, for attention and for masks. Importing this package has done so."""
    for name, function in ((NAME, attend), (FP8_NAME, attend_fp8)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    AttentionInterface.register(BATCHES_NAME, attend_batches)
    AttentionMaskInterface.register(BATCHES_NAME, no_mask)


register()
