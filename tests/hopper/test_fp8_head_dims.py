"""FP8 kernels of any head_dim: which tiles serve it, and products that leave out columns of zeros, on simulated machine
code."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels.problem import DENSE, VARLEN
from hopper.config import SMEM_BYTES, TWO_CONSUMERS_OF_WIDE_ROWS, validate_forward_config
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.tilings import (
    select_fp8_few_queries_config,
    select_fp8_forward_config,
    with_lone_scales,
    with_runs,
)
from hopper_attention.packed_quantization import quantize_packed_by_torch
from hopper_attention.quantization import Fp8Quantization, QuantizedQKV, quantize_qkv
from hopper_attention.quantized import E4M3
from hopper_attention.quantizers import from_descales
from hopper_attention.reference import attention_naive
from tests.compile_pool import usage_of_each
from tests.cute_kernels.packing import Packing
from tests.hopper import test_fp8_packed
from tests.hopper.fp8_errors import lse_rounding
from tests.hopper.on_numpy import fp8_forward_on_numpy
from tests.hopper.test_lagging_softmax import LATE, relative
from tests.hopper.test_partial_sums import assert_means_come_back
from tests.hopper.test_partial_sums import config_of as in_runs

Dims = tuple[int, int]
EXACT, EAGER, HALF = Softmax.EXACT, Softmax.EAGER, Softmax.HALF_SCORES
FEW, MANY = 200, 20_000
"""Keys."""

SIZES: dict[Dims, tuple[Dims, Dims]] = {
    # head_dim and head_dim_v of a problem: those of the kernel, and columns that it multiplies, 0 for all
    (32, 32): ((64, 64), (32, 32)),
    (80, 80): ((128, 128), (96, 96)),
    (96, 96): ((128, 128), (96, 96)),
    (128, 128): ((128, 128), (0, 0)),
    (160, 96): ((192, 128), (160, 96)),
    (192, 128): ((192, 128), (0, 0)),
    (160, 160): ((192, 192), (160, 160)),
    (192, 192): ((192, 192), (0, 0)),
    (64, 192): ((192, 192), (64, 192)),
    (224, 224): ((256, 256), (224, 224)),
    (256, 64): ((256, 256), (256, 64)),
    (256, 256): ((256, 256), (0, 0)),
}
OF_256: dict[Dims, Dims] = {(160, 160): (160, 160), (192, 192): (192, 192), (64, 192): (64, 192)}
"""Columns that kernels of head_dim 256 multiply, for problems that have other kernels where less is asked for."""
OF_WIDE_VALUES: dict[Dims, Dims] = OF_256 | {(192, 128): (192, 128), (160, 96): (160, 96)}


class Kind(NamedTuple):
    """What is asked for beside the sizes."""

    v_rows: bool
    lse: bool
    keys: int


class Tiles(NamedTuple):
    tile_m: int
    tile_n: int
    stages: int
    polynomial_pairs: int
    softmax: Softmax
    o_from_registers: bool = False


TILES: dict[Dims, dict[Kind, Tiles]] = {
    (192, 128): {
        Kind(False, False, FEW): Tiles(128, 128, 4, 3, EAGER),
        Kind(False, True, FEW): Tiles(128, 128, 4, 3, EAGER),
        Kind(False, False, MANY): Tiles(192, 128, 3, 5, HALF),
        Kind(False, True, MANY): Tiles(192, 128, 3, 5, HALF),
        Kind(True, False, MANY): Tiles(192, 128, 2, 5, HALF),
        Kind(True, True, FEW): Tiles(128, 128, 2, 2, EXACT),
        Kind(True, True, MANY): Tiles(128, 128, 2, 2, EXACT),
    },
    (192, 192): {
        Kind(False, False, FEW): Tiles(128, 128, 3, 0, EAGER),
        Kind(False, True, FEW): Tiles(128, 128, 3, 0, EAGER),
        Kind(False, False, MANY): Tiles(128, 128, 3, 3, HALF),
        Kind(False, True, MANY): Tiles(128, 128, 3, 3, HALF),
        Kind(True, False, FEW): Tiles(128, 128, 2, 0, EXACT, o_from_registers=True),
        Kind(True, False, MANY): Tiles(128, 128, 2, 3, HALF),
        Kind(True, True, FEW): Tiles(128, 64, 2, 0, EXACT),
        Kind(True, True, MANY): Tiles(128, 64, 2, 0, EXACT),
    },
}
"""Of dense problems with either mask, by the kernel of most of them."""


def select(dims: Dims, causal: bool, keys: int, **options: Any) -> Fp8ForwardConfig:
    return select_fp8_forward_config(*dims, causal, "bfloat16", keys, **options)


def of_kind(dims: Dims, causal: bool, kind: Kind, layout: str = DENSE) -> Fp8ForwardConfig:
    """Where V comes transposed, of codes whose scores fit float16."""
    options = {"v_rows": kind.v_rows, "half_scores": not kind.v_rows, "without_lse": not kind.lse}
    return select(dims, causal, kind.keys, layout=layout, **options)


def sizes_of(config: Fp8ForwardConfig) -> tuple[Dims, Dims]:
    return (config.head_dim, config.head_dim_v), (config.used_head_dim, config.used_head_dim_v)


def whole(config: Fp8ForwardConfig) -> Fp8ForwardConfig:
    """The same with all columns."""
    return replace(config, used_head_dim=0, used_head_dim_v=0)


def tiles_of(config: Fp8ForwardConfig) -> Tiles:
    return Tiles(*(getattr(config, name) for name in Tiles._fields))


def is_in_order(config: Fp8ForwardConfig) -> bool:
    """Whether each block takes its maximum, without turns."""
    return config.softmax is EXACT and not config.ping_pong


KINDS = [Kind(*fields) for fields in product((False, True), (False, True), (FEW, MANY))]


@pytest.mark.parametrize("layout", [DENSE, VARLEN])
@pytest.mark.parametrize("dims", SIZES, ids=str)
def test_sizes_of_kernels_and_of_products(dims: Dims, layout: str) -> None:
    for causal, kind in product((False, True), KINDS):
        config = of_kind(dims, causal, kind, layout)
        validate_forward_config(config)
        in_wide_rows = kind.v_rows and is_in_order(config) and dims in OF_256
        assert sizes_of(config) == (((256, 256), OF_256[dims]) if in_wide_rows else SIZES[dims])
        assert in_wide_rows == (dims in OF_256 and layout == DENSE and kind == (True, False, FEW))
        assert config.layout == layout and config.causal == causal and config.v_rows == kind.v_rows
        assert config.lowers_queries == (kind.v_rows and config.softmax is HALF)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("native", TILES, ids=str)
def test_tiles_between_128_and_192(native: Dims, causal: bool) -> None:
    for dims, kind in product((dims for dims, (of, _) in SIZES.items() if of == native), TILES[native]):
        assert tiles_of(of_kind(dims, causal, kind)) == TILES[native][kind]


def test_few_keys_in_rows_of_narrow_values() -> None:
    """They take each maximum, unless the fewest do under a mask."""
    few, of_mask, more = (
        select((192, 128), causal, keys, v_rows=True, without_lse=True)
        for causal, keys in ((False, 512), (True, 384), (True, 1280))
    )
    assert tiles_of(few) == tiles_of(more) == Tiles(128, 128, 3, 3, EAGER)
    assert tiles_of(of_mask) == Tiles(128, 128, 2, 2, EXACT)


def test_an_lse_changes_how_many_keys_are_few() -> None:
    for dims, keys in (((192, 128), 1280), ((160, 96), 1280), ((192, 192), 768), ((160, 160), 768)):
        kinds = Kind(False, True, keys), Kind(False, False, keys), Kind(False, True, keys + 1)
        assert [of_kind(dims, False, kind).softmax for kind in kinds] == [EAGER, HALF, HALF]


@pytest.mark.parametrize("dims", [(32, 32), (80, 80), (96, 96), (224, 224), (256, 64)], ids=str)
def test_others_have_the_tiles_that_rows_are_filled_up_to(dims: Dims) -> None:
    """With registers for what transposes half of the columns."""
    size = SIZES[dims][0]
    for causal, kind, layout in product((False, True), KINDS, (DENSE, VARLEN)):
        config, full = (of_kind(which, causal, kind, layout) for which in (dims, size))
        transposes_half = dims == (256, 64) and kind.v_rows and is_in_order(config)
        assert (config.registers == TWO_CONSUMERS_OF_WIDE_ROWS != full.registers) == transposes_half
        assert replace(whole(config), registers=full.registers) == full
        assert config.name != full.name


def test_runs() -> None:
    """Of the lengths that go with the columns of V."""
    for dims, causal in product(SIZES, (False, True)):
        config = of_kind(dims, causal, Kind(False, True, MANY))
        long = with_runs(config, MANY)
        validate_forward_config(long)
        runs = (36, 6) if max(dims) <= 64 else (64, 8)
        assert (long.run_blocks, long.mean_blocks) == runs and sizes_of(long) == sizes_of(config)
        assert with_runs(config, 5120) == config


@pytest.mark.parametrize("dims", SIZES, ids=str)
def test_sums_in_float32_are_of_all_columns(dims: Dims) -> None:
    """By the tiles of 64, 128 or 256."""
    size = 256 if max(dims) > 128 else SIZES[dims][0][0]
    asked: tuple[dict[str, Any], ...] = (
        {"two_level": True},
        {"two_level": True, "v_rows": True},
        {"exact_lse": True},
    )
    for options in asked:
        for causal, layout in product((False, True), (DENSE, VARLEN)):
            wide = {"block_k": 0 if "v_rows" in options else 384, "layout": layout}
            config, full = (select(which, causal, MANY, **options, **wide) for which in (dims, (size, size)))
            assert sizes_of(config) == ((size, size), (0, 0)) and config == full


@pytest.mark.parametrize("dims", SIZES, ids=str)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", [DENSE, VARLEN])
def test_few_queries(dims: Dims, split: bool, layout: str) -> None:
    """By the tiles of 64, 128 or 256."""
    size, used = ((256, 256), OF_WIDE_VALUES[dims]) if dims in OF_WIDE_VALUES else SIZES[dims]
    for rows in (64, 128) if size[0] == 256 else (64, 192):
        options = {"group": 8, "tile_rows": rows, "split": split, "layout": layout}
        config, full = (
            select_fp8_few_queries_config(*which, True, "bfloat16", **options) for which in (dims, size)
        )
        assert sizes_of(config) == (size, used) and config.o_from_registers == full.o_from_registers
        assert replace(whole(config), registers=full.registers) == full


def test_any_blocks_of_scales_and_any_scores_have_a_kernel() -> None:
    """At (192, 128) those of 192 keys, too, and an LSE that is returned of scores that do not fit float16."""
    widths, flags = (0, 64, 128, 192, 256, 384), (False, True)
    for block_k, keys, causal, layout, (half_scores, without_lse) in product(
        widths, (FEW, 1281, 4097, MANY), flags, (DENSE, VARLEN), product(flags, flags)
    ):
        options = {"half_scores": half_scores, "without_lse": without_lse, "layout": layout}
        config = select((192, 128), causal, keys, block_k=block_k, **options)
        assert sizes_of(config) == SIZES[192, 128] and block_k % config.tile_n == 0
        assert config.smem_bytes <= SMEM_BYTES and not config.o_shares_q


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"used_head_dim": 96}, "used_head_dim is 96 and used_head_dim_v 0, allowed: both 0, or both more"),
        ({"used_head_dim_v": 96}, "used_head_dim is 0 and used_head_dim_v 96, allowed: both 0, or both"),
        ({"used_head_dim": 80, "used_head_dim_v": 96}, "used_head_dim is 80, allowed: multiples of 32 up to"),
        ({"used_head_dim": 96, "used_head_dim_v": 80}, "used_head_dim_v is 80, allowed: multiples of 32 up"),
        ({"used_head_dim": 160, "used_head_dim_v": 96}, "used_head_dim is 160, .* up to head_dim, 128"),
        ({"used_head_dim": 96, "used_head_dim_v": 160}, "used_head_dim_v is 160, .* up to head_dim_v, 128"),
        ({"used_head_dim": -32, "used_head_dim_v": 96}, "used_head_dim is -32, allowed: multiples of 32"),
    ],
)
def test_columns_that_cannot_be_left_out(changes: dict[str, int], message: str) -> None:
    config = select((128, 128), False, MANY, half_scores=True)
    validate_forward_config(replace(config, used_head_dim=96, used_head_dim_v=32))
    with pytest.raises(ValueError, match=message):
        validate_forward_config(replace(config, **changes))


@pytest.mark.parametrize("field", ["two_level", "exact_lse"])
def test_sums_in_float32_leave_out_no_columns(field: str) -> None:
    config = select((128, 128), False, MANY, **{field: True})
    message = "used_head_dim is 96, allowed with two_level and wide_codes: 0"
    with pytest.raises(ValueError, match=message):
        validate_forward_config(replace(config, used_head_dim=96, used_head_dim_v=96))


# machine code


def draw(dims: Dims, seqlens: Dims, heads: int = 2) -> list[Tensor]:
    generator, (seqlen_q, seqlen_k) = torch.Generator().manual_seed(sum(dims)), seqlens
    shapes = (1, seqlen_q, heads, dims[0]), (1, seqlen_k, 1, dims[0]), (1, seqlen_k, 1, dims[1])
    return [torch.randn(shape, generator=generator) for shape in shapes]


def quantized(dims: Dims, seqlens: Dims) -> QuantizedQKV:
    """With a mean of V, where that is worth it."""
    q, k, v = (x.bfloat16() for x in draw(dims, seqlens))
    parts = quantize_qkv(q, k, v + 2, quantization=Fp8Quantization(rotate=False, block_q=1, block_k=128))
    assert parts.mean_v.numel() > 0
    return parts


def of_codes(dims: Dims, seqlens: Dims, heads: int = 2) -> QuantizedQKV:
    """What comes as e4m3, with descales."""
    q, k, v = (x.to(E4M3) for x in draw(dims, seqlens, heads))
    of_q, of_k, of_v = (torch.full((1, 1), scale) for scale in (0.5, 2.0, 3.0))
    return from_descales(q, k, v, of_q, of_k, of_v, torch.bfloat16)


def check(config: Fp8ForwardConfig, parts: QuantizedQKV) -> tuple[Tensor, Tensor]:
    """Hold out and lse to float64, and those of products that leave out columns to the bits of whole ones, unless these
    lower queries by more."""
    scale = parts.q.shape[3] ** -0.5
    out, lse = found = fp8_forward_on_numpy(config, parts, scale, LATE)
    q, k, v = (x.dequantize() for x in (parts.q, parts.k, parts.v))
    v = v + parts.mean_v.view(1, 1, 1, -1) if parts.mean_v.numel() else v
    exact, exact_lse = attention_naive(q, k, v, causal=config.causal)
    assert relative(out, exact) < 0.03
    assert bool(((lse - exact_lse).abs() <= lse_rounding(config, exact_lse)).all())
    if config.used_head_dim and not config.lowers_queries:
        assert same(found, fp8_forward_on_numpy(whole(config), parts, scale, LATE))
    return found


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("dims", "causal", "keys", "softmax"),
    [
        ((96, 96), True, MANY, HALF),
        ((160, 96), False, MANY, HALF),
        ((80, 80), False, FEW, EAGER),
        ((160, 160), True, FEW, EAGER),
    ],
    ids=str,
)
def test_v_that_comes_transposed(dims: Dims, causal: bool, keys: int, softmax: Softmax) -> None:
    config = of_kind(dims, causal, Kind(False, True, keys))
    assert config.softmax is softmax and config.used_head_dim
    check(config, quantized(dims, (150, 330)))


@pytest.mark.parametrize(("dims", "causal"), [((192, 128), True), ((192, 192), False)], ids=str)
def test_rows_without_columns_of_zeros(dims: Dims, causal: bool) -> None:
    """To the bits of kernels with room for more columns, and as many polynomials."""
    config, parts = of_kind(dims, causal, Kind(False, True, MANY)), quantized(dims, (200, 330))
    of_256 = of_kind((256, 256), causal, Kind(False, True, MANY))
    others = replace(of_256, polynomial_pairs=config.polynomial_pairs)
    assert config.softmax is of_256.softmax is HALF and config.tile_n == of_256.tile_n
    assert same(check(config, parts), fp8_forward_on_numpy(others, parts, dims[0] ** -0.5, LATE))


@pytest.mark.parametrize(
    ("dims", "causal", "keys", "softmax"),
    [
        ((96, 96), False, FEW, EAGER),
        ((160, 160), True, FEW, EXACT),
        ((256, 64), False, FEW, EXACT),
        ((160, 96), True, MANY, HALF),
        ((64, 192), False, MANY, HALF),
        ((192, 128), False, MANY, HALF),
    ],
    ids=str,
)
def test_v_in_rows(dims: Dims, causal: bool, keys: int, softmax: Softmax) -> None:
    """Of which the producer transposes what is multiplied; scores in float16 have lowered queries."""
    config = of_kind(dims, causal, Kind(True, False, keys))
    assert config.softmax is softmax and config.lowers_queries == (softmax is HALF)
    assert config.o_from_registers == (config.head_dim == 256)
    check(config, of_codes(dims, (150, 300)))


@pytest.mark.parametrize(
    ("head_dims", "used", "causal"),
    [((128, 128), (96, 96), True), ((192, 128), (160, 96), False), ((192, 192), (0, 0), False)],
    ids=str,
)
def test_keys_in_runs(head_dims: Dims, used: Dims, causal: bool) -> None:
    """Whose means change, in fewer columns than the memory of O has."""
    fields = {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    columns = {"used_head_dim": used[0], "used_head_dim_v": used[1]}
    config = replace(in_runs(causal, blocks=8, means=4), **fields, **columns)
    validate_forward_config(config)
    assert_means_come_back(config, (71, 13 * 64 + 13))


@pytest.mark.parametrize(("dims", "rows", "causal"), [((96, 96), 64, True), ((192, 128), 128, False)])
def test_few_queries_of_a_group(dims: Dims, rows: int, causal: bool) -> None:
    config = select_fp8_few_queries_config(*dims, causal, "bfloat16", 8, rows, split=False)
    assert config.used_head_dim == dims[0] and config.group == 8
    check(config, of_codes(dims, (11, 150), heads=8))


@pytest.mark.parametrize("v_rows", [False, True])
def test_packed_sequences(v_rows: bool) -> None:
    """Of quantized tensors, and of e4m3 whose queries are lowered."""
    packing = Packing.of([(70, 200), (33, 0), (90, 150)], test_fp8_packed.TAIL)
    if v_rows:
        config = of_kind((96, 96), False, Kind(True, False, MANY), VARLEN)
        assert config.used_head_dim == 96 and config.lowers_queries
        test_fp8_packed.check(test_fp8_packed.with_descales(packing, (2, 1), 96), packing, config)
        return
    q, k, v = test_fp8_packed.draw(packing, (2, 1), 160)
    lengths, quantization = test_fp8_packed.lengths_of(packing), Fp8Quantization(rotate=False, block_k=128)
    parts = quantize_packed_by_torch(q, k, v[..., :96] + 2, lengths, quantization)
    config = select((160, 96), True, 0, block_k=128, half_scores=True, layout=VARLEN)
    assert sizes_of(config) == SIZES[160, 96] and config.softmax is HALF
    found = (test_fp8_packed.check(parts, packing, which) for which in (config, whole(config)))
    assert torch.equal(*found)


COMPILED = [
    with_runs(of_kind(dims, causal, Kind(v_rows, not v_rows, MANY)), MANY)
    for dims in ((96, 96), (160, 160), (192, 128), (192, 192))
    for causal in (False, True)
    for v_rows in (False, True)
]
COMPILED += [
    of_kind((192, 128), False, Kind(False, True, FEW)),
    of_kind((160, 160), True, Kind(False, True, FEW)),
    of_kind((192, 128), False, Kind(True, False, FEW)),
    of_kind((160, 160), True, Kind(True, False, FEW)),
    of_kind((256, 64), False, Kind(True, False, FEW)),
    of_kind((192, 128), True, Kind(False, True, MANY), VARLEN),
    of_kind((160, 160), True, Kind(False, True, MANY), VARLEN),
    of_kind((192, 128), True, Kind(True, False, MANY), VARLEN),
    of_kind((160, 160), False, Kind(True, False, MANY), VARLEN),
    with_lone_scales(select((192, 192), True, MANY, without_lse=True, layout=VARLEN)),
    select_fp8_few_queries_config(192, 128, True, "bfloat16", 8, 128, split=True),
]
"""With runs and with lowered queries, for few keys, packed, and for few queries."""


def test_kernels_compile_without_spills() -> None:
    usages = usage_of_each(COMPILED)
    assert {config.name: usage for config, usage in usages.items() if usage.local_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 27
