"""The rows of the ablation as data: what each leaves out, and which kernels of that kind may compete for the row.

A row without an optimisation is a kernel in its own right. It gets the tile, stages and registers that suit it best
among a few candidates, the shipped kernel's among them: what a row shows is then the optimisation, and not a tile that
was tuned for having it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hopper.config import THREE_CONSUMERS, TWO_CONSUMERS, WARPGROUP_ROWS, ForwardConfig, Registers
from hopper.forward.fp8.config import STALE_MAXIMUM, Fp8ForwardConfig, Softmax
from hopper_attention.experiments.bench.config_peers import why_invalid

FULL = "full"

Tile = tuple[int, int, int]
"""tile_m, tile_n, stages."""

TILES: dict[int, tuple[Tile, ...]] = {
    64: (
        (64, 128, 4), (64, 192, 3), (64, 256, 2),
        (128, 128, 4), (128, 192, 3), (128, 192, 2),
        (192, 128, 3), (192, 128, 2), (192, 160, 2),
    ),
    96: (
        (64, 128, 3), (64, 192, 2),
        (128, 128, 2), (128, 128, 3), (128, 192, 2),
        (192, 96, 3), (192, 128, 2),
    ),
    128: (
        (64, 128, 3), (64, 176, 2), (64, 192, 2),
        (128, 128, 2), (128, 128, 3), (128, 176, 2), (128, 192, 2),
        (192, 80, 2), (192, 96, 2), (192, 112, 2),
    ),
    192: (
        (64, 96, 3), (64, 112, 2), (64, 128, 2),
        (128, 96, 2), (128, 112, 2), (128, 128, 2),
        (192, 64, 2), (192, 80, 2),
    ),
    256: (
        (64, 64, 3), (64, 80, 2), (64, 96, 2),
        (128, 64, 2), (128, 80, 2),
        (192, 48, 2),
    ),
}  # fmt: skip
"""Candidates in 16 bits, by head_dim. Those that do not fit some row's rules are left out there, with the reason."""

FP8_TILES: dict[int, tuple[Tile, ...]] = {
    64: (
        (64, 128, 4), (64, 256, 2),
        (128, 128, 4), (128, 192, 3), (128, 256, 2),
        (192, 128, 4), (192, 160, 3), (192, 192, 2),
    ),
    128: (
        (64, 128, 4), (64, 192, 3), (64, 224, 2),
        (128, 128, 4), (128, 192, 2), (128, 224, 2),
        (192, 96, 3), (192, 128, 3),
    ),
    256: (
        (64, 96, 3), (64, 128, 2),
        (128, 96, 2), (128, 128, 2),
        (192, 64, 2),
    ),
}  # fmt: skip

FED_TILES: dict[int, tuple[Tile, ...]] = {
    64: ((128, 96, 5), (128, 128, 4), (128, 192, 3), (192, 128, 3), (192, 128, 4)),
    96: ((128, 96, 4), (128, 128, 3), (128, 192, 2), (192, 80, 3), (192, 96, 3)),
    128: (
        (128, 80, 4), (128, 96, 3), (128, 112, 3), (128, 128, 3), (128, 192, 2),
        (192, 80, 3), (192, 96, 2), (192, 96, 3),
    ),
    192: ((128, 64, 3), (128, 96, 2), (128, 112, 2), (192, 48, 3)),
    256: ((128, 32, 4), (128, 48, 3), (128, 64, 2), (128, 80, 2)),
}  # fmt: skip
"""Those of kernels in 16 bits that have no producer warp: their pipelines are deep, since loads are issued late."""

SHARED_TILES: dict[int, tuple[tuple[int, Tile], ...]] = {
    64: ((2, (64, 192, 2)), (2, (64, 128, 3)), (3, (64, 96, 2))),
    96: ((2, (64, 128, 2)), (2, (64, 96, 2)), (2, (128, 48, 2)), (3, (64, 64, 2))),
    128: ((2, (64, 96, 2)), (2, (64, 80, 2)), (2, (64, 64, 3)), (2, (128, 48, 2)), (3, (64, 48, 2))),
    192: ((2, (64, 64, 2)), (2, (64, 48, 2))),
    256: ((2, (64, 32, 2)),),
}
"""CTAs an SM, and the tile of each. Several CTAs overlap where warpgroups do not: that is how kernels without warp
specialization hide what they wait for, FlashAttention-2 among them."""

ONE_CONSUMER = Registers(consumer=256, producer=24)
REGISTERS = {
    WARPGROUP_ROWS: ONE_CONSUMER,
    2 * WARPGROUP_ROWS: TWO_CONSUMERS,
    3 * WARPGROUP_ROWS: THREE_CONSUMERS,
}
"""Registers by role, by tile_m."""

PAIRED = (2 * WARPGROUP_ROWS, 3 * WARPGROUP_ROWS)
"""Tiles of more than one consumer warpgroup."""


def with_tile(config: ForwardConfig, tile: Tile, **changes: Any) -> ForwardConfig:
    """``config`` with another tile, the registers that go with it, and other fields; it may be invalid."""
    tile_m, tile_n, stages = tile
    changed = replace(
        config, tile_m=tile_m, tile_n=tile_n, stages=stages, registers=REGISTERS[tile_m], **changes
    )
    if changed.warp_specialized:
        return changed
    # Without a producer nothing is redistributed: every thread keeps what the launch gives it.
    return replace(changed, registers=Registers(changed.launched_registers, 0))


def tuned(
    shipped: ForwardConfig,
    tiles_m: tuple[int, ...] = PAIRED,
    table: Mapping[int, tuple[Tile, ...]] | None = None,
    **changes: Any,
) -> tuple[ForwardConfig, ...]:
    """``shipped`` with ``changes``, and the same with the other tiles of its head_dim that have ``tiles_m`` queries;
    ``table`` stands for that of its precision."""
    if table is None:
        table = FP8_TILES if isinstance(shipped, Fp8ForwardConfig) else TILES
    own = (shipped.tile_m, shipped.tile_n, shipped.stages)
    tiles = dict.fromkeys((own, *table[shipped.head_dim]))
    return tuple(with_tile(shipped, tile, **changes) for tile in tiles if tile[0] in tiles_m)


def with_maxima(shipped: ForwardConfig) -> dict[str, Any]:
    """The change to a softmax that takes a maximum in every block: one that lags needs pipelining and a producer."""
    is_stale = isinstance(shipped, Fp8ForwardConfig) and shipped.softmax in STALE_MAXIMUM
    return {"softmax": Softmax.EXACT} if is_stale else {}


def shipped_alone(shipped: ForwardConfig) -> tuple[ForwardConfig, ...]:
    return (shipped,)


def without_pipelining(shipped: ForwardConfig) -> tuple[ForwardConfig, ...]:
    return tuned(shipped, pipelined=False, **with_maxima(shipped))


def without_ping_pong(shipped: ForwardConfig) -> tuple[ForwardConfig, ...]:
    if not shipped.ping_pong:
        raise ValueError(f"the kernel that ships for head_dim {shipped.head_dim} has no ping-pong: see full")
    return tuned(shipped, ping_pong=False)


def without_both(shipped: ForwardConfig) -> tuple[ForwardConfig, ...]:
    return tuned(shipped, pipelined=False, ping_pong=False, **with_maxima(shipped))


def without_warp_specialization(shipped: ForwardConfig) -> tuple[ForwardConfig, ...]:
    """Its warpgroups may take turns or not, and several CTAs may share an SM, whichever is faster."""
    turns = (True, False) if shipped.ping_pong else (False,)
    table = None if isinstance(shipped, Fp8ForwardConfig) else FED_TILES
    whole = tuple(
        config
        for ping_pong in turns
        for config in tuned(
            shipped, table=table, warp_specialized=False, ping_pong=ping_pong, **with_maxima(shipped)
        )
    )
    return whole + shared_sms(shipped)


def shared_sms(shipped: ForwardConfig) -> tuple[ForwardConfig, ...]:
    """Kernels without a producer of which several run on an SM. Their CTAs overlap whether they take turns or not."""
    tiles = () if isinstance(shipped, Fp8ForwardConfig) else SHARED_TILES[shipped.head_dim]
    off = {"warp_specialized": False, "ping_pong": False}
    return tuple(with_tile(shipped, tile, **off, ctas_per_sm=ctas) for ctas, tile in tiles)


def with_consumers(consumers: int) -> Callable[[ForwardConfig], tuple[ForwardConfig, ...]]:
    """Kernels of so many consumer warpgroups; the shipped kernel alone where it has as many."""

    def candidates(shipped: ForwardConfig) -> tuple[ForwardConfig, ...]:
        if shipped.consumers == consumers:
            return (shipped,)
        ping_pong = shipped.ping_pong and consumers > 1
        return tuned(shipped, (consumers * WARPGROUP_ROWS,), ping_pong=ping_pong)

    return candidates


@dataclass(frozen=True)
class Variant:
    """A row of the ablation.

    Attributes:
        name: on the command line and in JSON.
        title: in tables and plots.
        differs: from the full kernel, in words.
        paper_tflops: the figure of the paper's table 2, 0.0 where it has none.
        candidates: from the shipped config, the kernels that compete for the row, valid or not.
            Raises ValueError where there is nothing to compare.
    """

    name: str
    title: str
    differs: str
    paper_tflops: float
    candidates: Callable[[ForwardConfig], tuple[ForwardConfig, ...]]


VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(
            FULL,
            "full",
            "The kernel with all of them: a producer warp, two-stage pipelining, and ping-pong where it pays.",
            661.0,
            shipped_alone,
        ),
        Variant(
            "no-pipelining",
            "without GEMM-softmax pipelining",
            "A warpgroup finishes Q Kᵀ, the softmax and P V of a block before the next block begins: its tensor core "
            "work overlaps with another warpgroup's softmax only. S is live alone, so that wider tiles fit. Where the "
            "full kernel's softmax leaves maxima out, this one takes all.",
            582.0,
            without_pipelining,
        ),
        Variant(
            "no-ping-pong",
            "without ping-pong",
            "No named barriers order the warpgroups: whichever has its operands issues its GEMMs.",
            0.0,
            without_ping_pong,
        ),
        Variant(
            "neither",
            "without pipelining and ping-pong",
            "Both of the above. What overlap is left comes from warpgroups that happen to be out of step. The softmax "
            "takes all maxima.",
            0.0,
            without_both,
        ),
        Variant(
            "no-warp-specialization",
            "without warp specialization",
            "No producer warp and no redistribution of registers: the first consumer warp issues the TMA loads between "
            "the steps of its own softmax, which takes all maxima. Pipelining stays; ping-pong, or several CTAs an SM, "
            "if that helps.",
            570.0,
            without_warp_specialization,
        ),
        Variant(
            "one-consumer",
            "one consumer warpgroup",
            "A tile of 64 queries and one CTA an SM: no second warpgroup to overlap with, and more reads of K and V "
            "from L2 for each query.",
            0.0,
            with_consumers(1),
        ),
        Variant(
            "two-consumers",
            "two consumer warpgroups",
            "A tile of 128 queries; each consumer thread may hold 240 registers.",
            0.0,
            with_consumers(2),
        ),
        Variant(
            "three-consumers",
            "three consumer warpgroups",
            "A tile of 192 queries: fewer reads of K and V for a query, but 160 registers a consumer thread, "
            "which leaves room for fewer keys in a block.",
            0.0,
            with_consumers(3),
        ),
    )
}


@dataclass(frozen=True)
class Field:
    """Who competes for a row: valid configs, and by config name why others were left out.

    ``reason`` says why nobody can; empty if somebody does.
    """

    variant: Variant
    configs: tuple[ForwardConfig, ...]
    left_out: dict[str, str]
    reason: str


def gather(variant: Variant, shipped: ForwardConfig) -> Field:
    """The field of a row, for the kernel that ships."""
    try:
        candidates = variant.candidates(shipped)
    except ValueError as error:
        return Field(variant, (), {}, str(error))
    reasons = {config.name: why_invalid(config) for config in candidates}
    valid = {config.name: config for config in candidates if not reasons[config.name]}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    reason = "" if valid else f"no such kernel: {next(iter(left_out.values()))}"
    return Field(variant, tuple(valid.values()), left_out, reason)


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Comma-separated names of rows in their order, ``full`` always first; all of them if empty.

    Raises:
        ValueError: a name is not in the registry.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variants is {text!r}, allowed: comma-separated names out of {', '.join(VARIANTS)}")
    return (
        tuple(VARIANTS[name] for name in dict.fromkeys((FULL, *names))) if names else tuple(VARIANTS.values())
    )
