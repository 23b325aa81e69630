"""What the kernels of every GPU have in common: the problems that they take, and how those are named."""

from __future__ import annotations

from typing import Protocol

from cute_kernels.user_functions import NO_FUNCTIONS, UserFunctions

DTYPES = ("float16", "bfloat16")
SHORT_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3"}
MAX_HEAD_DIM = 256

DENSE, VARLEN = "dense", "varlen"
LAYOUTS = (DENSE, VARLEN)
"""Of a batch: sequences of one length, each with rows of its own; or of any lengths, packed behind each other."""

SCORE_FEATURES = ("softcap", "alibi", "sinks", "dropout")
"""Fields of a config for what is done to scores and P. The config of a backward kernel has no ``sinks``: they are in
the LSE."""

HIDDEN, PARTLY_SEEN, SEEN = range(3)
"""What the queries of a tile see of a key block in a list: nothing, what a mask function says, or all of it."""

ENTRY_BITS = 2
"""The lower bits of an entry of a list, which say one of these; the number of the block is above them."""

MAX_SEQLEN = 2**31 - 512
MAX_TILES = 2**31 - 2**16
"""Tile and key numbers are 32 bits wide, with room for one tile and one grid past the end."""


def cover_head_dims(native: tuple[tuple[int, int], ...], head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Of ``native`` pairs, the one of least work that is not smaller in either."""
    fits = [pair for pair in native if pair[0] >= head_dim and pair[1] >= head_dim_v]
    if not fits:
        raise ValueError(
            f"head_dim {head_dim} and head_dim_v {head_dim_v}: both may be at most {MAX_HEAD_DIM}"
        )
    return min(fits, key=sum)


class WithLayout(Protocol):
    """What the configs of all kernels of attention have."""

    @property
    def dtype(self) -> str: ...

    @property
    def window(self) -> bool: ...

    @property
    def chunk(self) -> bool: ...

    @property
    def layout(self) -> str: ...


def check_layout(config: WithLayout) -> None:
    """Raise ValueError for a config of an unknown layout, or of a chunk without the window that it is part of."""
    if config.layout not in LAYOUTS:
        raise ValueError(f"layout is {config.layout!r}, allowed: {', '.join(LAYOUTS)}")
    if config.chunk and not config.window:
        raise ValueError("window is False, allowed with chunk=True: True")


def check_kind(config: WithLayout) -> None:
    """``check_layout``, and that the dtype is one of 16 bits."""
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype is {config.dtype!r}, allowed: {', '.join(DTYPES)}")
    check_layout(config)


def feature_names(config: WithLayout) -> list[str]:
    """Parts of a kernel's name: those for a window, a chunk, a layout, and what is done to scores and P."""
    functions: UserFunctions = getattr(config, "functions", NO_FUNCTIONS)
    names = ["window"] if config.window else []
    names += ["chunk"] if config.chunk else []
    names += [] if config.layout == DENSE else [config.layout]
    names += [name for name in SCORE_FEATURES if getattr(config, name, False)]
    names += [functions.name] if functions else []
    return names + (["listed"] if getattr(config, "block_lists", False) else [])


class WithBlockLists(WithLayout, Protocol):
    """What of a config decides on whether its kernel can go by lists of blocks."""

    @property
    def block_lists(self) -> bool: ...

    @property
    def causal(self) -> bool: ...

    @property
    def functions(self) -> UserFunctions: ...


def check_block_lists(config: WithBlockLists) -> None:
    """Raise ValueError for a config with lists of blocks beside what their kernels do not take."""
    c = config
    if c.block_lists and (c.causal or c.window or c.layout != DENSE or not c.functions.has_mask):
        raise ValueError(
            f"block_lists is True with causal={c.causal}, window={c.window} and layout {c.layout!r}, allowed: False, "
            "False and 'dense', with a mask function"
        )


def check_problem_size(kernel: str, tile_m: int, sizes: tuple[int, int], seqlens: tuple[int, int]) -> None:
    """Raise NotImplementedError for sizes that a kernel's 32-bit tile and key numbers cannot count.

    ``sizes`` are batch and heads, ``seqlens`` those of Q and K; ``kernel`` is its name in the message.
    """
    for name, seqlen in zip(("seqlen_q", "seqlen_k"), seqlens, strict=True):
        if seqlen > MAX_SEQLEN:
            raise NotImplementedError(f"{name} is {seqlen}, the {kernel} takes at most {MAX_SEQLEN}")
    batch, heads = sizes
    tiles = batch * heads * -(-seqlens[0] // tile_m)
    if tiles > MAX_TILES:
        raise NotImplementedError(
            f"batch {batch} x heads {heads} x seqlen_q {seqlens[0]} are {tiles} tiles of {tile_m} queries, the "
            f"{kernel} counts at most {MAX_TILES}: split the batch"
        )
