"""Problems without sizes: lengths that get the same tiles are one, and all others are told apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.problem import DTYPES, MAX_HEAD_DIM
from hopper.config import ForwardConfig
from hopper.forward import tilings as tilings_16_bits
from hopper.forward.fp8 import tilings as tilings_fp8
from hopper.forward.fp8.config import Fp8ForwardConfig, Softmax
from hopper.forward.fp8.row_queries import FP8_ROW_QUERIES, transposes_v
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper.forward.tilings import ANY_LENGTH, NATIVE_HEAD_DIMS, Tiling, select_forward_config
from hopper_attention.backward_rules import BackwardProblem
from hopper_attention.checks import TensorSpec
from hopper_attention.forward_rules import problem_of as problem_of_16_bits
from hopper_attention.forward_rules import select_config as select_16_bits
from hopper_attention.fp8_rules import (
    Fp8Problem,
    check_size,
    classes_of_lengths,
    packed_problem,
    queries_that_count,
    select_config,
    select_for,
)
from hopper_attention.masks import CAUSAL_MASK, NO_MASK, MaskSpec
from hopper_attention.problem import AttentionProblem, Fp8AttentionProblem, length_bounds, longest_alike
from hopper_attention.quantized import default_block_k

LENGTHS = sorted({n + d for n in (*length_bounds()[:-1], 1, 4, 100_000) for d in (-1, 0, 1)})


def tilings_in(value: object) -> Iterator[Tiling]:
    """Every tiling in a table, however deep."""
    if isinstance(value, Tiling):
        yield value
    elif isinstance(value, (dict, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tilings_in(part)


def test_every_bound_of_every_table_is_known() -> None:
    tables = [value for module in (tilings_16_bits, tilings_fp8) for value in vars(module).values()]
    bounds = {tiling.max_seqlen_k for table in tables for tiling in tilings_in(table)}
    assert len(bounds) > 4 and bounds <= set(length_bounds()) and length_bounds()[-1] == ANY_LENGTH


def test_the_longest_alike_is_the_next_bound() -> None:
    bounds = length_bounds()
    assert list(bounds) == sorted(set(bounds))
    assert longest_alike(0) == longest_alike(1) == longest_alike(bounds[0]) == bounds[0]
    assert longest_alike(bounds[0] + 1) == bounds[1] and longest_alike(10**9) == ANY_LENGTH


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", NATIVE_HEAD_DIMS, ids=str)
def test_lengths_that_are_alike_get_the_same_configs(dims: tuple[int, int], causal: bool) -> None:
    for n in LENGTHS:
        longest = longest_alike(n)
        for dtype in DTYPES:
            of_n, of_longest = (select_forward_config(dtype, *dims, causal, m) for m in (n, longest))
            assert of_n == of_longest
        for options in ((0, False, False, True), (0, True), (0, False, True), (384, False, False, True)):
            of_n, of_longest = (
                select_fp8_forward_config(*dims, causal, "bfloat16", m, *options) for m in (n, longest)
            )
            assert of_n == of_longest


@pytest.mark.parametrize("head_dim,causal,seqlen_k", [(64, True, 4096), (48, True, 1537), (64, True, 6144)])
def test_tiles_for_every_sm_decide_where_they_are_high(head_dim: int, causal: bool, seqlen_k: int) -> None:
    """Batches, heads and queries count alike, and decide on nothing else."""

    def of(
        batch: int, seqlen_q: int, heads: int, causal: bool = causal, seqlen_k: int = seqlen_k
    ) -> ForwardConfig:
        q, k = (
            TensorSpec((batch, n, heads, head_dim), (), torch.bfloat16, torch.device("meta"))
            for n in (seqlen_q, seqlen_k)
        )
        config = select_16_bits("hopper", (9, 0), q, k, k, causal)
        assert isinstance(config, ForwardConfig)
        return config

    assert of(1, 192, 132).tile_m == of(132, 1, 1).tile_m == of(3, 4096, 2).tile_m == 192
    assert of(1, 192, 131).tile_m == of(1, 4096, 5).tile_m == 64
    for other in ({"causal": False}, {"seqlen_k": 1536}, {"seqlen_k": 6145}):
        assert of(1, 64, 1, **other) == of(8, 4096, 32, **other)


def test_a_window_is_served_alike_whatever_the_tiles() -> None:
    window = (2000, -1, 0)
    specs = (TensorSpec((1, 4096, heads, 64), (), torch.bfloat16, torch.device("meta")) for heads in (1, 64))
    few, many = (problem_of_16_bits(spec, spec, spec, True, window) for spec in specs)
    assert few == many and few.has_window


def test_blocks_of_the_quantizer_follow_the_tiles() -> None:
    for n in LENGTHS:
        width = select_fp8_forward_config(64, 64, True, "bfloat16", n, half_scores=True).tile_n
        assert default_block_k(64, 64, n, causal=True) == width


def test_an_fp8_problem_says_what_decides_and_no_more() -> None:
    shapes = (2, 5, 4, 64), (2, 700, 2, 64), (2, 700, 2, 32)
    problem = Fp8Problem(*shapes, 1, 128, 128, torch.bfloat16, True, half_scores=True)
    same = problem._replace(
        q_shape=(9, 77, 8, 64), k_shape=(9, 690, 4, 64), v_shape=(9, 690, 4, 32), block_q=64
    )
    assert same.kind == problem.kind and hash(same.kind) == hash(problem.kind)
    for other in (
        problem._replace(v_shape=(2, 700, 2, 64)),
        problem._replace(causal=False),
        problem._replace(block_k=256),
        problem._replace(block_v=0),
        problem._replace(v_rows=True),
        problem._replace(two_level=True),
        problem._replace(half_scores=False),
        problem._replace(out_dtype=torch.float16),
        problem._replace(k_shape=(2, 5000, 2, 64), v_shape=(2, 5000, 2, 32)),
        problem._replace(k_shape=(2, 0, 2, 64), v_shape=(2, 0, 2, 32)),
    ):
        assert other.kind != problem.kind


def test_few_queries_have_their_v_transposed_by_the_kernel() -> None:
    shapes = (99_999, 448, 1, 128), (99_999, 900, 1, 128), (99_999, 900, 1, 128)
    rows = Fp8Problem(*shapes, 0, 0, 0, torch.bfloat16, False, v_rows=True)
    assert rows.kind.transposes and select_config(rows).v_rows
    more = rows._replace(q_shape=(99_999, 449, 1, 128))
    assert not more.kind.transposes and not select_config(more).v_rows
    # Under a causal mask a query of so many sees three quarters of the keys, or half.
    assert more._replace(causal=True).kind.transposes
    assert rows._replace(
        q_shape=(99_999, 896, 1, 128), k_shape=(99_999, 896, 1, 128), causal=True
    ).kind.transposes
    assert not rows._replace(block_k=128, block_v=128).kind.transposes


@pytest.mark.parametrize(
    ("head_dim", "queries", "causal", "softmax"),
    [
        (128, 1024, False, Softmax.HALF_SCORES),
        (128, 512, False, Softmax.EAGER),
        (128, 384, True, Softmax.EXACT),
        (128, 640, True, Softmax.EAGER),
        (128, 2048, True, Softmax.HALF_SCORES),
        (256, 1024, False, Softmax.EXACT),
        (256, 384, False, Softmax.EXACT),
        (256, 1024, True, Softmax.EXACT),
        (256, 1536, True, Softmax.EXACT),
        (256, 2560, True, Softmax.EXACT),
    ],
)
def test_more_queries_have_theirs_where_nobody_gets_the_lse(head_dim, queries, causal, softmax) -> None:
    shapes = [(99_999, queries, 1, head_dim)] * 3
    problem = Fp8Problem(*shapes, 0, 0, 0, torch.bfloat16, causal, v_rows=True, without_lse=True)
    config = select_config(problem)
    assert problem.kind.transposes and config.v_rows and config.softmax is softmax
    assert config.lowers_queries == (softmax is Softmax.HALF_SCORES)
    more = problem._replace(q_shape=(99_999, queries + 520, 2, head_dim))
    for other in (more, problem._replace(window=(100, -1, 0)), problem._replace(two_level=True)):
        assert not select_config(other).v_rows or select_config(other).softmax is Softmax.EXACT
    narrow = select_config(problem._replace(without_lse=False))
    is_widest = head_dim == MAX_HEAD_DIM
    assert narrow.v_rows == (is_widest or queries // (1 + causal) <= FP8_ROW_QUERIES[head_dim])


@pytest.mark.parametrize(("queries", "causal"), [(1024, False), (2560, True)])
def test_rows_of_256_have_theirs_with_an_lse_too(queries: int, causal: bool) -> None:
    """With the softmax that has scores in float32, unless P V is added up in two levels or the LSE is exact."""
    shapes = [(99_999, queries, 1, 256)] * 3
    problem = Fp8Problem(*shapes, 0, 0, 0, torch.bfloat16, causal, v_rows=True)
    config = select_config(problem)
    assert config.v_rows and config.awaits_v_late and config.tile_n == 128
    more = problem._replace(q_shape=(99_999, queries + 520, 1, 256))
    others = more, problem._replace(two_level=True), problem._replace(exact_lse=True)
    assert not any(select_config(other).v_rows for other in others)


@pytest.mark.parametrize(
    ("head_dim", "causal", "seqlen"), [(64, False, 4096), (128, False, 1000), (128, True, 5120)]
)
@pytest.mark.parametrize("v_rows", [False, True])
def test_few_tiles_are_low_where_nobody_gets_the_lse(head_dim, causal, seqlen, v_rows) -> None:
    """Batches, heads and queries count alike; of those that see half of the keys there may be twice as many."""
    most = 132 * (1 + causal) // -(-seqlen // 128)

    def of(batch: int, heads: int, seqlen_q: int = seqlen, **others: Any) -> Fp8ForwardConfig:
        block_k = 0 if v_rows else 128
        shapes = (batch, seqlen_q, heads, head_dim), *[(batch, seqlen, heads, head_dim)] * 2
        options = {"v_rows": v_rows, "half_scores": not v_rows, "without_lse": True, **others}
        return select_config(Fp8Problem(*shapes, 1, block_k, block_k, torch.bfloat16, causal, **options))

    few, many = of(1, most), of(1, most + 1)
    assert few.tile_m == 128 and few.softmax is Softmax.EAGER
    assert many.tile_m == 192 and many.softmax is Softmax.HALF_SCORES
    assert of(most, 1) == few and of(most + 1, 1) == many
    # Without a mask lower tiles may also take two turns, if higher ones do.
    twice = 264 * (1 + causal) // -(-seqlen // 128)
    assert of(1, twice).tile_m == (192 if causal else 128) and of(1, twice + 1) == many
    assert (
        of(1, 132, seqlen_q=100).tile_m
        == of(1, 999, seqlen_q=100).tile_m
        == of(99, 99, seqlen_q=256).tile_m
        == 128
    )
    # A returned LSE, and two levels of sums, have the tiles that they have.
    for others in ({"without_lse": False}, {"two_level": True}):
        assert of(1, most, **others) == of(1, most + 1, **others)


def test_runs_and_wider_blocks_keep_what_they_need() -> None:
    def of(heads: int, seqlen: int, block_k: int, head_dim: int = 64, **others: Any) -> Fp8ForwardConfig:
        shapes = [(1, seqlen, heads, head_dim)] * 3
        options = {"half_scores": True, "without_lse": True, **others}
        return select_config(Fp8Problem(*shapes, 1, block_k, block_k, torch.bfloat16, False, **options))

    assert of(1, 5120, 128).softmax is Softmax.EAGER and not of(1, 5120, 128).run_blocks
    for block_k, head_dim in ((192, 64), (128, 128)):
        few, many = (of(heads, 5121, block_k, head_dim) for heads in (1, 8))
        assert (few.tile_m, many.tile_m) == (128, 192) and few.tile_n == many.tile_n == block_k
        assert few.softmax is many.softmax is Softmax.HALF_SCORES
        assert few.run_blocks == many.run_blocks > 0 and few.mean_blocks == many.mean_blocks
        # Nothing is added up in runs in a window, nor of codes of any size.
        assert of(1, 9000, block_k, head_dim, window=(6000, 6000, 0)).tile_m == (
            192 if head_dim == 64 else 128
        )
        assert of(1, 9000, 0, head_dim, half_scores=False).softmax is Softmax.EAGER
    assert of(1, 5000, 192) == of(8, 5000, 192) and of(1, 5000, 384).tile_m == 128


def test_queries_that_see_half_of_the_keys_count_half() -> None:
    for sizes in ((8, 4, 16), (100, 10, 10), (5, 9, 0)):
        assert queries_that_count(*sizes, False) == sizes[0]
    assert queries_that_count(100, 10, 10, True) == 50  # A square, of which half is hidden,
    assert queries_that_count(8, 4, 16, True) == 7  # a strip of an eighth,
    assert queries_that_count(100, 900, 300, True) == 50  # queries before all keys, which count as others do,
    assert queries_that_count(8, 4, 0, True) == 8  # and no keys.


def test_classes_of_lengths_are_powers_of_two_of_queries_and_bounds_of_keys() -> None:
    queries = [classes_of_lengths(n, 1)[0] for n in (0, 1, 2, 3, 4, 5, 256, 257)]
    assert queries == [1, 1, 2, 4, 4, 8, 256, 512]
    for n in (0, *LENGTHS):
        most = classes_of_lengths(7, n)
        assert most == (8, longest_alike(n)) and classes_of_lengths(*most) == most


def packed(
    rows: int = 50_000,
    heads: tuple[int, int] = (8, 2),
    mask: MaskSpec = NO_MASK,
    lengths: tuple[int, int] = (100, 700),
    exact_lse: bool = False,
    without_lse: bool = True,
    head_dims: tuple[int, int] = (128, 128),
) -> Fp8AttentionProblem:
    q_shape, v_shape = ((rows, n, columns) for n, columns in zip(heads, head_dims, strict=True))
    return packed_problem(q_shape, v_shape, mask, lengths, exact_lse, without_lse)


@pytest.mark.parametrize("mask", [NO_MASK, CAUSAL_MASK, MaskSpec(True, 300)], ids=str)
@pytest.mark.parametrize("without_lse", [False, True])
def test_packed_lengths_of_a_class_are_one_problem(mask: MaskSpec, without_lse: bool) -> None:
    for head_dim in (64, 128, 256):
        kinds: dict[str, Any] = {"mask": mask, "without_lse": without_lse, "head_dims": (head_dim, head_dim)}
        for longest_q in (1, 3, 65, 129, 600):
            for longest_k in LENGTHS:
                lengths = longest_q, longest_k
                problem = packed(lengths=lengths, **kinds)
                assert problem == packed(lengths=classes_of_lengths(*lengths), **kinds)
                assert problem.is_packed and problem.lone_scales and problem.v_rows
                config = select_for(problem)
                assert config.lone_scales and config.layout == "varlen"
                assert config.v_rows == problem.transposes


def test_packed_tensors_with_descales_say_what_decides() -> None:
    plain = packed()
    assert plain.transposes and plain.longest_k == longest_alike(700) and not plain.few_tiles
    assert (plain.head_dim, plain.head_dim_v, plain.out_dtype) == (128, 128, torch.bfloat16)
    assert packed(rows=60_000, heads=(16, 4)) == plain == packed(lengths=(70, 690))
    exact, fast = packed(exact_lse=True, without_lse=False), packed(without_lse=False)
    assert exact.exact_lse and not exact.transposes and not select_for(exact).lone_scales
    assert select_for(exact).wide_codes and not fast.without_lse
    windowed = packed(mask=MaskSpec(False, 300, 200))
    assert (
        windowed.has_window and not windowed.has_chunk and packed(mask=MaskSpec(True, -1, -1, 64)).has_chunk
    )
    assert len({plain, exact, fast, windowed, packed(mask=CAUSAL_MASK), packed(head_dims=(128, 64))}) == 6
    # Where somebody gets the LSE, lengths say nothing but whether a kernel transposes V, of so many values that a
    # launch counts nothing.
    fast = packed(10**8, without_lse=False)
    assert fast == packed(10**8, without_lse=False, lengths=(100, 9000))
    few = packed(10**8, without_lse=False, lengths=(64, 700))
    assert few == replace(fast, transposes=True) == packed(without_lse=False, lengths=(64, 9000))


def test_a_launch_for_few_values_is_worth_more_queries() -> None:
    """Of 2 x 16 heads over 4 with 749 keys V is 1.2 MB, beside which a launch is worth five times as many queries; of
    more keys than a kernel that transposes V itself has in the time of a launch it is worth none."""
    for head_dim, keys, more in ((128, 749, 5000), (64, 1200, 2000), (256, 1000, 3000)):
        of_head = head_dim, head_dim, False
        few, many = (2 * 4 * keys * head_dim, keys), (10**9, keys)
        assert transposes_v(*of_head, more, True, 4, few) and not transposes_v(*of_head, more, True, 4, many)
        assert not transposes_v(*of_head, 20 * more, True, 4, few)
        assert not transposes_v(*of_head, more, True, 4, (few[0], 4096))
        for half in (False, True):
            most = max(n for n in range(2000) if transposes_v(*of_head, n, half, 4))
            assert transposes_v(*of_head, most, half, 4, (few[0], 4096))


def test_queries_in_a_window_count_as_the_keys_that_they_see() -> None:
    assert queries_that_count(8000, 2000, 2000, False, 500) == 2000
    assert (
        queries_that_count(8000, 2000, 2000, True, 2000) == queries_that_count(8000, 2000, 2000, True) == 4000
    )
    for window, is_few in (((127, 0, 0), True), ((4000, 0, 0), False)):
        shapes = (8, 16384, 8, 64), (8, 16384, 8, 64), (8, 16384, 8, 64)
        of_window = {"causal": True, "v_rows": True, "window": (window[0], -1, 0), "without_lse": True}
        problem = Fp8Problem(*shapes, 0, 0, 0, torch.bfloat16, **of_window)
        assert problem.kind.transposes == is_few
    assert packed(mask=MaskSpec(True, 127), lengths=(9000, 9000), heads=(2, 2)).transposes
    assert not packed(mask=MaskSpec(True, 4000), lengths=(9000, 9000), heads=(2, 2)).transposes


@pytest.mark.parametrize(
    ("head_dim", "heads", "causal", "without_lse", "most"),
    [
        (64, (1, 1), False, True, 256),
        (64, (4, 1), False, False, 64),
        (128, (2, 1), False, True, 512),
        (128, (1, 1), False, False, 256),
        (256, (1, 1), False, True, 1024),
        # Of 4096 keys a last quarter of queries sees seven eighths.
        (128, (1, 1), True, True, 1024),
        (256, (2, 1), True, True, 256),
        (256, (1, 1), True, True, 1024),
    ],
)
def test_few_packed_queries_have_their_v_transposed_by_the_kernel(
    head_dim: int, heads: tuple[int, int], causal: bool, without_lse: bool, most: int
) -> None:
    """By bounds, which are powers of two to this."""
    kinds: dict[str, Any] = {"heads": heads, "without_lse": without_lse, "head_dims": (head_dim, head_dim)}

    def of(longest: int) -> Fp8ForwardConfig:
        mask = CAUSAL_MASK if causal else NO_MASK
        return select_for(packed(mask=mask, lengths=(longest, 4096), **kinds))

    assert of(most // 2 + 1).v_rows and of(most).v_rows and not of(most + 1).v_rows


def test_few_packed_tiles_are_low_where_nobody_gets_the_lse() -> None:
    """All queries count, of whatever sequence; long ones have V transposed before."""
    for lengths, v_rows in (((100, 2000), True), ((4096, 4096), False)):
        few, many = (packed(rows, (8, 2), lengths=lengths) for rows in (2000, 50_000))
        assert few.few_tiles and not many.few_tiles and few.transposes == many.transposes == v_rows
        low, high = select_for(few), select_for(many)
        assert (low.tile_m, low.softmax) == (128, Softmax.EAGER)
        assert (high.tile_m, high.softmax) == (192, Softmax.HALF_SCORES)
        assert low.v_rows == high.v_rows == v_rows and low.lone_scales and high.lone_scales
    assert (
        not packed(2000, without_lse=False).few_tiles
        and not packed(2000, mask=MaskSpec(False, 300)).few_tiles
    )


def test_fp8_sizes_are_checked_apart_from_the_kind() -> None:
    shapes = (2**16, 300, 2**16, 64), (2**16, 9, 1, 64), (2**16, 9, 1, 64)
    many = Fp8Problem(*shapes, 0, 0, 0, torch.bfloat16, False)
    config_of_kind = select_for(many.kind)
    with pytest.raises(NotImplementedError, match=r"are 12884901888 tiles of 128 queries"):
        check_size(config_of_kind, many.q_shape, many.k_shape)
    with pytest.raises(NotImplementedError, match=r"are 12884901888 tiles of 128 queries"):
        select_config(many)


def test_gradients_depend_on_no_length() -> None:
    shapes = (2, 5, 4, 64), (2, 700, 2, 64), (2, 700, 2, 32)
    problem = BackwardProblem(*shapes, torch.float16, True)
    longer = problem._replace(k_shape=(2, 70_000, 2, 64), v_shape=(2, 70_000, 2, 32))
    assert longer.kind == problem.kind
    assert problem._replace(deterministic=True).kind != problem.kind
    assert problem._replace(has_window=True).kind == replace(problem.kind, has_window=True) != problem.kind


def test_kinds_of_problems_are_told_apart() -> None:
    plain = AttentionProblem(torch.float16, torch.float16, 64, 64, False)
    gradient = BackwardProblem(*3 * ((1, 1, 1, 64),), torch.float16, False).kind
    assert plain != gradient and replace(plain, causal=True) != plain
    windowed, packed = replace(plain, has_window=True), replace(plain, is_packed=True)
    assert len({plain, windowed, packed, replace(windowed, is_packed=True)}) == 4
