"""The C library selects as Python does, and refuses what it must. On the GPU: tests/gpu/test_c_library.py."""

from __future__ import annotations

import math
import os
import random
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.append.config import HALVES, INTERLEAVED
from cute_kernels.combine.config import OUT_DTYPES, select_combine_config
from cute_kernels.plan.config import plan_words
from cute_kernels.problem import DTYPES
from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.decode.config import PARTS_PER_CTA, DecodeConfig
from hopper.forward.fp8.tilings import scores_fit_half
from hopper.forward.tilings import NATIVE_HEAD_DIMS, select_forward_config
from hopper_attention import _kernels, c_library, c_tables, forward_rules
from hopper_attention.backends import Target
from hopper_attention.decode_rules import ctas_of_pieces, select_decode, why_not_decode
from hopper_attention.forward_rules import packed_problem_of, select_config, select_for
from hopper_attention.fp8_rules import Fp8Problem, block_of
from hopper_attention.fp8_rules import select_config as select_fp8_config
from hopper_attention.fp8_training import with_blocks_of_the_tile
from hopper_attention.kvcache_rules import select_paged, why_not_paged
from hopper_attention.launch.append import append_facts, select_append_config
from hopper_attention.launch.combine import why_not_combine
from hopper_attention.launch.quantize import select_quantize_config
from hopper_attention.lengths import Lengths
from hopper_attention.packed_fp8_plan import PackedCall, plan_packed
from hopper_attention.packed_quantized import count_units
from hopper_attention.quantized import Fp8Quantization, padded_keys
from hopper_attention.reference.append import Rotation
from hopper_attention.rotation import rotation_signs
from hopper_attention.scores import ScoreKind
from tests import c_library as c
from tests.c_library import (
    AppendParams,
    CombineParams,
    DecodeParams,
    ForwardParams,
    Library,
    MergeParams,
    PagedParams,
    VarlenParams,
)
from tests.c_problems import (
    ANYWHERE,
    TORCH_DTYPES,
    cache_call,
    common_fields,
    draw_fp8_problem,
    draw_problem,
    mask_of,
    packed_mask_of,
    specs_of,
    without_scores,
)

pytestmark = pytest.mark.skipif(not c.COMPILER, reason="there is no C compiler here")

HOPPER = 9, 0
PROBLEMS = 10_000
HEAD = 4 * len(c_tables.workspace_head())
"""Bytes that a workspace begins with."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Without kernels, which selection and errors do not need."""
    folder = tmp_path_factory.mktemp("c_library")
    c_library.write_sources(folder, ())
    return Library(c.link_library(folder))


def test_dense_problems_get_the_kernel_that_python_selects(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those of ``PLAIN_TILINGS`` and those without columns of zeros, which the library has not."""

    def without_plain_tilings(*problem: Any) -> ForwardConfig:
        return select_forward_config(*problem[:-1], has_many_tiles=problem[-1])

    monkeypatch.setattr(forward_rules, "select_plain_config", without_plain_tilings)
    rng, chosen = random.Random(1), set()
    for _ in range(PROBLEMS):
        p = draw_problem(rng)
        seqlen_q, seqlen_k = p["lengths"]
        batch = p["batch"]
        q, k, v = specs_of(p, (batch, seqlen_q), (batch, seqlen_k), (batch, seqlen_k))
        found = library.kernel_of(ForwardParams(**common_fields(p), seqlen_q=seqlen_q, seqlen_k=seqlen_k))
        try:
            mask = mask_of(p, seqlen_q, seqlen_k)
        except NotImplementedError:
            assert found.startswith(f"{c.NOT_SUPPORTED}: a window or a chunk is given"), (p, found)
            continue
        kind = ScoreKind(*p["kind"])
        expected = select_config("hopper", HOPPER, q, k, v, mask.causal, mask.sides, kind)
        assert found == expected.name, p
        assert isinstance(expected, ForwardConfig)
        chosen.add(without_scores(expected))
    assert chosen == names_of_forward_rows("dense"), "not every kernel was chosen once"


def test_a_choice_that_is_remembered_serves_no_other_problem(library: Library) -> None:
    """The same problem with so many tiles as another kernel asks for, one fewer, and so many again."""
    row = next(row for row in c_tables.forward_rows() if row.min_tiles and not row.config.chunk)
    fields = {"head_dim": row.config.head_dim, "head_dim_v": row.config.head_dim_v, "seqlen_q": 1}
    fields |= {"kv_heads": 1, "causal": row.config.causal, "seqlen_k": row.max_seqlen_k, "batch": 1}
    fields |= {"dtype": DTYPES.index(row.config.dtype)}

    def kernel_with(tiles: int) -> str:
        return library.kernel_of(ForwardParams(**fields, heads=tiles))

    found = [kernel_with(row.min_tiles - fewer) for fewer in (0, 1, 0, 0, 1, 1)]
    many, few = found[:2]
    assert many == row.config.name != few and found == [many, few, many, many, few, few]


def names_of_forward_rows(layout: str, is_paged: bool = False) -> set[str]:
    rows = [row for row in c_tables.forward_rows() if row.config.layout == layout]
    return {row.config.name for row in rows if (row.page_rows > 0) == is_paged}


def test_packed_problems_get_the_kernel_that_python_selects(library: Library) -> None:
    rng, chosen = random.Random(2), set()
    for _ in range(PROBLEMS // 2):
        p = draw_problem(rng)
        longest = [min(length, 100_000) for length in p["lengths"]]
        totals = [p["batch"] * length for length in longest]
        q, _, v = specs_of(p, (totals[0],), (totals[1],), (totals[1],))
        mask = packed_mask_of(p, longest)
        window = mask.has_window, mask.attention_chunk > 0
        problem = packed_problem_of(q, v, mask.causal, window, ScoreKind(*p["kind"]))
        expected = select_for(problem, "hopper", HOPPER)
        sizes = {"total_q": totals[0], "total_k": totals[1]}
        sizes |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
        params = VarlenParams(**common_fields(p), **sizes)
        assert library.kernel_of(params) == expected.name, p
        assert isinstance(expected, ForwardConfig)
        chosen.add(without_scores(expected))
    assert library.workspace_size_of(params) == HEAD + 4 * plan_words(totals[0], p["batch"], expected.tile_m)
    assert chosen == names_of_forward_rows("varlen"), "not every kernel was chosen once"


HOPPER_GPU = Target("a Hopper GPU", HOPPER, assume_installed=True)


def test_decoding_steps_get_the_kernel_that_python_selects(library: Library) -> None:
    rng, chosen, refused = random.Random(3), set(), 0
    for _ in range(PROBLEMS):
        p, e4m3 = draw_problem(rng), rng.random() < 0.5
        if e4m3:
            p["head_dims"] = tuple(16 * -(-size // 16) for size in p["head_dims"])
        rows = rng.choice((1, 4)), rng.choice((1, 1, 2, 4, 5, 16, 20))
        has_table = rng.random() < 0.7
        page_size = rng.choice((8, 16, 24, 64, 96, 128, 256, 100))
        pages = page_size, rng.choice((1, 3)) if has_table else 1, has_table
        leftpad = rng.random() < 0.1
        call = cache_call(p, rows, pages, e4m3, leftpad)
        fields = common_fields(p) | {"batch": rows[0], "seqlen_q": rows[1]}
        fields |= {"pages": rows[0] * pages[1], "page_size": page_size, "pages_of_sequence": pages[1]}
        fields |= {
            "cache_dtype": c.FLOAT8_E4M3 if e4m3 else fields["dtype"],
            "page_table": ANYWHERE if has_table else 0,
            "cache_leftpad": ANYWHERE if leftpad else 0,
        }
        params = DecodeParams(**fields)
        found = library.kernel_of(params)
        # It has tiles of 64 rows, and one a K/V head.
        if rows[1] * p["heads"][0] // p["heads"][1] > WARPGROUP_ROWS or why_not_decode(
            call, HOPPER_GPU, "hopper"
        ):
            refused += 1
            assert found.startswith(f"{c.NOT_SUPPORTED}: "), (p, rows, pages, e4m3, found)
            continue
        config = select_decode(call)
        assert found == config.name, (p, rows, pages, e4m3)
        ctas = ctas_of_pieces(132, rows[0] * p["heads"][1], p["heads"][1])
        floats = PARTS_PER_CTA * ctas * config.part_floats + rows[0] * p["heads"][0] * rows[1]
        assert library.workspace_size_of(params) == HEAD + 4 * floats
        chosen.add(kind_of_decode(config))
    kinds = {kind_of_decode(config) for config in c_tables.decode_configs() if config is not None}
    assert chosen == kinds, "not every kind of kernel was chosen once"
    assert refused > PROBLEMS // 200


def test_decoding_steps_get_as_many_ctas_as_python_counts(library: Library) -> None:
    """As the workspace shows: each has two partial results of 32 rows of 64 columns and four sums."""
    fields = {"seqlen_q": 1, "page_size": 8, "dtype": c.FLOAT16, "cache_dtype": c.FLOAT16}
    of_part, chosen = PARTS_PER_CTA * 32 * (64 + 4), set()
    for kv_heads, batch in product(
        (1, 2, 3, 4, 5, 8, 16, 32), (*range(1, 9), *range(13, 140), 260, 262, 264)
    ):
        sizes = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "batch": batch, "pages": batch}
        params = DecodeParams(**HEADS | fields | sizes)
        ctas = ctas_of_pieces(132, batch * kv_heads, kv_heads)
        found = library.workspace_size_of(params)
        assert found == HEAD + 4 * (of_part * ctas + 2 * batch * kv_heads), sizes
        chosen.add(ctas)
    assert {120, 128, 129, 132} <= chosen


def kind_of_decode(config: DecodeConfig) -> tuple[Any, ...]:
    widest = max(config.head_dim, config.head_dim_v)
    return config.dtype, config.cache_dtype, config.tile_m, widest, config.paged


def test_fp8_problems_get_the_kernels_that_python_selects(library: Library) -> None:
    rng, chosen = random.Random(5), set()
    for _ in range(PROBLEMS):
        p = draw_fp8_problem(rng)
        seqlen_q, seqlen_k = (min(length, 2**18) for length in p["lengths"])
        dims, batch, (heads, kv_heads) = p["head_dims"], p["batch"], p["heads"]
        two_level = rng.random() < 0.3
        lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        params = ForwardParams(**common_fields(p), **lengths, fp8_two_level=two_level)
        mask = mask_of(p, seqlen_q, seqlen_k)
        c8 = with_blocks_of_the_tile(Fp8Quantization(), dims, seqlen_k, two_level, mask)
        dtype, block_k = TORCH_DTYPES[p["dtype"]], c8.keys_per_block(*dims, seqlen_k)
        quantizer = select_quantize_config(dtype, *dims, seqlen_k, c8)
        blocks = block_of(c8.block_q, seqlen_q), *2 * (block_of(block_k, seqlen_k),)
        shapes = (
            (batch, seqlen_q, heads, dims[0]),
            *((batch, seqlen_k, kv_heads, size) for size in dims),
        )
        half_scores = scores_fit_half(*quantizer.largest_codes, dims[0])
        options = {"half_scores": half_scores, "two_level": two_level, "window": mask.sides}
        problem = Fp8Problem(*shapes, *blocks, dtype, mask.causal, **options)
        # It has no memory for runs.
        expected = replace(select_fp8_config(problem), run_blocks=0, mean_blocks=0)
        assert library.kernel_of(params, "_fp8") == expected.name, (p, seqlen_k)
        parts = [batch * heads * seqlen_q * dims[0], batch * kv_heads * seqlen_k * dims[0]]
        parts += [batch * kv_heads * dims[1] * padded_keys(seqlen_k), 4 * batch * heads * seqlen_q]
        parts += 2 * [4 * batch * kv_heads * -(-seqlen_k // block_k)] + [4 * batch * kv_heads * dims[1]]
        assert library.workspace_size_of(params, "_fp8") == HEAD + sum(-(-part // 16) * 16 for part in parts)
        chosen |= {expected.name, quantizer.name}
    assert chosen == names_of_fp8_rows("dense")


def names_of_fp8_rows(layout: str) -> set[str]:
    rows = [row for row in c_tables.fp8_rows() if row.config.layout == layout]
    return {config.name for row in rows for config in (row.config, row.quantizer)}


def test_packed_fp8_problems_get_the_kernels_that_python_selects(library: Library) -> None:
    rng, chosen = random.Random(6), set()
    for _ in range(PROBLEMS // 2):
        p, two_level = draw_fp8_problem(rng), rng.random() < 0.4
        longest = [min(length, 10_000) for length in p["lengths"]]
        totals, batch = [p["batch"] * length for length in longest], p["batch"]
        lengths = torch.empty(batch + 1, dtype=torch.int32, device="meta")
        specs = specs_of(p, (totals[0],), (totals[1],), (totals[1],))
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in specs)
        mask = packed_mask_of(p, longest)
        packed = Lengths(lengths, lengths, None, None, *longest)
        call = PackedCall(two_level, mask, None)
        plan = plan_packed((q, k, v), packed, Fp8Quantization(), call, HOPPER_GPU)
        sizes = {"total_q": totals[0], "total_k": totals[1], "fp8_two_level": two_level}
        sizes |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
        params = VarlenParams(**common_fields(p), **sizes)
        config, quantizer = plan.attention.config, plan.quantizer
        assert isinstance(config, ForwardConfig) and quantizer is not None
        assert library.kernel_of(params, "_fp8") == config.name, p
        parts = packed_parts(p, totals, quantizer.block_k)
        parts.insert(0, 4 * plan_words(totals[0], batch, config.tile_m))
        assert library.workspace_size_of(params, "_fp8") == HEAD + sum(-(-part // 16) * 16 for part in parts)
        chosen |= {config.name, quantizer.name}
    assert chosen == names_of_fp8_rows("varlen")


def packed_parts(p: dict[str, Any], totals: list[int], block_k: int) -> list[int]:
    """Bytes of what the quantizer leaves."""
    (heads, kv_heads), (head_dim, head_dim_v), batch = p["heads"], p["head_dims"], p["batch"]
    steps, blocks = (count_units(totals[1], batch, rows) for rows in (32, block_k))
    codes = [
        totals[0] * heads * head_dim,
        totals[1] * kv_heads * head_dim,
        32 * steps * kv_heads * head_dim_v,
    ]
    mean = 4 * (batch + 1) * kv_heads * head_dim_v
    return [*codes, 4 * heads * count_units(totals[0], batch, 1), *2 * [4 * kv_heads * blocks], mean]


APPENDED: dict[str, Any] = {"dtype": c.BFLOAT16, "cache_dtype": c.BFLOAT16, "batch": 2, "seqlen_new": 1}
APPENDED |= {"kv_heads": 2, "head_dim": 64, "head_dim_v": 64, "pages": 2, "page_size": 16}


def test_tokens_are_appended_by_the_kernel_that_python_selects(library: Library) -> None:
    chosen, meta = set(), {"device": "meta"}
    styles = {c.NO_ROTARY: "", c.INTERLEAVED: INTERLEAVED, c.HALVES: HALVES}
    for dtype, e4m3, rotary, is_wide in product(DTYPES, (False, True), styles, (False, True)):
        of_call = TORCH_DTYPES[dtype]
        of_cache = torch.float8_e4m3fn if e4m3 else of_call
        k, q = (
            torch.empty(2, 1, 2, 64, dtype=of_call, **meta),
            torch.empty(2, 1, 8, 64, dtype=of_call, **meta),
        )
        cache = torch.empty(2, 16, 2, 64, dtype=of_cache, **meta)
        tables = [torch.empty(100, 16, dtype=torch.float32 if is_wide else of_call, **meta) for _ in range(2)]
        rotation = Rotation(*tables, rotary == c.INTERLEAVED, None) if rotary else None
        facts = append_facts(k, k, cache, cache, rotation=rotation, q=q if rotary else None)
        expected = select_append_config(facts, HOPPER_GPU)
        code = DTYPES.index(dtype)
        fields = {"dtype": code, "cache_dtype": c.FLOAT8_E4M3 if e4m3 else code, "rotary": rotary}
        fields |= {"rotary_dtype": c.FLOAT32 if is_wide else code, "rotary_dim": 32, "rotary_rows": 100}
        found = library.kernel_of(AppendParams(**APPENDED | fields, seqlen_q=1, heads=8))
        assert found == expected.name
        chosen.add(found)
    assert chosen == {config.name for config in c_tables.append_configs()}


def test_parts_are_merged_by_the_kernel_that_python_selects(library: Library) -> None:
    sizes, chosen = {"batch": 2, "seqlen": 100, "heads": 4, "head_dim_v": 128}, set()
    for name, num_splits in product(OUT_DTYPES, (1, 8, 9, 256)):
        code = OUT_DTYPES.index(name) if name in DTYPES else c.FLOAT32
        found = library.kernel_of(CombineParams(dtype=code, num_splits=num_splits, **sizes))
        assert found == select_combine_config(name, num_splits, "sm_90a").name
        chosen.add(found)
    assert chosen == {config.name for config in c_tables.combine_configs()}
    for code, config in enumerate(c_tables.merge_configs()):
        assert library.kernel_of(MergeParams(dtype=code, **sizes)) == config.name
    many = sizes | {"batch": 2**20, "seqlen": 2**20}
    assert why_not_combine((4, *many.values()), torch.float16, HOPPER_GPU)
    for params in (CombineParams(num_splits=4, **many), MergeParams(**many)):
        assert library.run(params) == c.NOT_SUPPORTED and "too many rows: split the batch" in library.message


def test_the_name_of_a_variant_is_made_of_its_features() -> None:
    variants = c_tables.library_variants()
    assert not variants.keys() & {config.name for config in c_tables.library_kernels()}
    for name, each in variants.items():
        features = [f for i, f in enumerate(c_tables.FEATURES) if each.features >> i & 1]
        head, pages, box = each.base.name.partition("_pages")
        assert name == "_".join([head, *features]) + pages + box


def test_paged_problems_get_the_kernel_that_python_selects(library: Library) -> None:
    rng, chosen = random.Random(7), set()
    for _ in range(PROBLEMS):
        p = draw_problem(rng) | {"batch": 2, "head_dims": rng.choice(NATIVE_HEAD_DIMS)}
        seqlen_q = rng.choice((1, 70, 1000))
        page_size, count = rng.choice((8, 16, 32, 64, 128, 256, 100)), rng.choice((1, *4 * (100,)))
        call = cache_call(p, (2, seqlen_q), (page_size, count, True), e4m3=False, leftpad=False)
        fields = common_fields(p) | {"total_q": 2 * seqlen_q, "max_seqlen_q": seqlen_q}
        params = PagedParams(**fields, pages=200, page_size=page_size, pages_of_sequence=count)
        found = library.kernel_of(params)
        if why_not_paged(call, HOPPER_GPU, "hopper"):
            assert found == (
                f"{c.NOT_SUPPORTED}: page_size is {page_size}, allowed where a sequence has several pages: "
                "multiples of 8"
            )
            continue
        expected = select_paged(call, HOPPER_GPU, "hopper").config
        assert found == expected.name, (p, page_size, count)
        assert isinstance(expected, ForwardConfig)
        words = plan_words(2 * seqlen_q, 2, expected.tile_m)
        assert library.workspace_size_of(params) == HEAD + 4 * words
        chosen.add(without_scores(expected))
    assert chosen == names_of_forward_rows("varlen", is_paged=True), "not every kernel was chosen once"


def test_fp8_says_what_it_does_not_take(library: Library) -> None:
    assert library.run(ForwardParams(**SOUND | {"head_dim": 32}), "_fp8") == c.NOT_SUPPORTED
    assert "head_dim is 32 and head_dim_v 64, allowed in FP8: (64, 64), (96, 96)" in library.message


def test_the_head_of_a_workspace_has_the_signs_of_the_rotation() -> None:
    words = c_tables.workspace_head()
    for head_dim in (64, 96, 256):
        at = c_tables.signs_place(head_dim)
        flips = [flip for word in words[at : at + head_dim // 2] for flip in (word >> 15 & 1, word >> 31)]
        assert flips == [int(sign < 0) for sign in rotation_signs(head_dim, 0)]
        assert at % 4 == 0


BAD = [
    ({"dtype": 7}, "dtype is 7, allowed: HA_FLOAT16 or HA_BFLOAT16"),
    ({"head_dim": 264}, "head_dim is 264, allowed: multiples of 8 from 8 to 256"),
    ({"head_dim_v": 4}, "head_dim_v is 4, allowed: multiples of 8 from 8 to 256"),
    ({"heads": 3}, "heads is 3, allowed: multiples of kv_heads, 2"),
    ({"kv_heads": 0}, "kv_heads is 0, allowed: 1 to 2147483647"),
    ({"batch": -1}, "batch is -1, allowed: 0 to 2147483647"),
    ({"seqlen_k": 0}, "seqlen_k is 0, allowed: 1 to 2147483136"),
    ({"seqlen_q": 2**31}, "seqlen_q is 2147483648, allowed: 0 to 2147483136"),
    ({"softmax_scale": 1e6}, "softmax_scale is 1e+06, allowed: 1e-37 to 100000, or 0 for head_dim^-0.5"),
    ({"window_right": -3}, "window_right is -3, allowed: -1, which hides nothing, or more"),
    ({"sm_margin": -1}, "sm_margin is -1, allowed: 0 to 2147483647"),
    ({"struct_size": 8}, "struct_size is 8, allowed: 272 to 312; initialise it with HA_FORWARD_PARAMS_INIT"),
    ({"attention_chunk": -1}, "attention_chunk is -1, allowed: 0 to "),
    ({"scores": c.Scores(softcap=-1)}, "scores.softcap is -1, allowed: 1e-30 to 1e+30, or 0 for none"),
    ({"scores": c.Scores(softcap=math.nan)}, "scores.softcap is nan"),
    ({"scores": c.Scores(alibi_stride_batch=3)}, "alibi_stride_batch is 3, allowed: heads, 4, or more, or 0"),
    ({"scores": c.Scores(sinks=2)}, "scores.sinks is 0x2, allowed: NULL, or float32 on the GPU"),
]
HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "head_dim_v": 64}
SOUND: dict[str, Any] = {"batch": 1, "seqlen_q": 64, "seqlen_k": 64} | HEADS


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[next(iter(fields)) for fields, _ in BAD])
def test_what_is_wrong_is_named(library: Library, fields: dict[str, Any], message: str) -> None:
    assert library.run(ForwardParams(**SOUND | fields)) == c.INVALID_ARGUMENT
    assert message in library.message


def test_a_struct_of_an_older_program_has_the_defaults_for_what_came_after(library: Library) -> None:
    params = ForwardParams(**SOUND, scores=c.Scores(softcap=-1), attention_chunk=-1)
    params.struct_size = ForwardParams.attention_chunk.offset
    assert library.kernel_of(params).startswith("hopper_fwd_fp16_d64_full")
    fields = {"batch": 1, "seqlen_q": 1, "pages": 1, "page_size": 100, "cache_dtype": c.FLOAT16}
    step = DecodeParams(**HEADS | fields, window_left=0)
    assert library.kernel_of(step).endswith("_window")
    step.struct_size = DecodeParams.window_left.offset
    assert library.kernel_of(step) == "hopper_decode_fp16_d64_full_m32n128s2b128"


BAD_APPENDS = [
    ({"seqlen_new": 0}, c.INVALID_ARGUMENT, "seqlen_new is 0, allowed: 1 to "),
    (
        {"cache_dtype": c.FLOAT16},
        c.INVALID_ARGUMENT,
        "cache_dtype is 0, allowed: dtype, 1, or HA_FLOAT8_E4M3",
    ),
    ({"pages": 1}, c.INVALID_ARGUMENT, "pages is 1, allowed without a page_table: batch, 2, or more"),
    ({"page_table": ANYWHERE}, c.INVALID_ARGUMENT, "pages_of_sequence is 0, allowed: 1 to "),
    ({"rotary": 3}, c.INVALID_ARGUMENT, "rotary is 3, allowed: HA_ROTARY_NONE"),
    (
        {"rotary": 1, "rotary_dim": 24},
        c.INVALID_ARGUMENT,
        "rotary_dim is 24, allowed: multiples of 16 from 16",
    ),
    (
        {"rotary": 1, "rotary_dtype": 2},
        c.INVALID_ARGUMENT,
        "rotary_dtype is 2, allowed: dtype, 1, or HA_FLOAT32",
    ),
    ({"batch": 2**30, "pages": 2**30, "seqlen_new": 2**20}, c.NOT_SUPPORTED, "at most 2147483136 new tokens"),
    ({"kv_heads": 2**20}, c.NOT_SUPPORTED, "a token has 134217728 numbers, allowed: up to 524280"),
    ({}, c.INVALID_ARGUMENT, "cache_seqlens is NULL, allowed: (batch,) int32 on the GPU"),
    (
        {"cache_seqlens": 64, "new_seqlens": 64},
        c.INVALID_ARGUMENT,
        "new_seqlens is cache_seqlens, allowed: other",
    ),
]


@pytest.mark.parametrize(("fields", "status", "message"), BAD_APPENDS)
def test_what_is_wrong_with_an_append_is_named(
    library: Library, fields: dict[str, Any], status: int, message: str
) -> None:
    assert library.run(AppendParams(**APPENDED | {"rotary_dtype": 1, "rotary_dim": 32} | fields)) == status
    assert message in library.message


WIDE: dict[str, Any] = {"dtype": c.BFLOAT16, "head_dim": 256}


def test_what_no_decode_kernel_does_is_named(library: Library) -> None:
    fields = {"batch": 1, "seqlen_q": 1, "pages": 4, "page_size": 16, "cache_dtype": c.FLOAT8_E4M3}
    for more, message in (
        (
            {"scores": c.Scores(alibi_slopes=64)},
            "scores.alibi_slopes is given, which decode kernels do not have",
        ),
        (
            {"cache_leftpad": 64, "page_table": 64, "pages_of_sequence": 2},
            "cache_leftpad is given with 2 pages a sequence, allowed: 1",
        ),
        (WIDE | {"seqlen_q": 8, "dtype": c.FLOAT16}, "head_dim is 256 and head_dim_v 64, and 16 query rows"),
        (
            WIDE | {"seqlen_q": 9},
            "allowed with a cache of e4m3: up to 192, or any head_dims with bfloat16 and up",
        ),
    ):
        assert library.run(DecodeParams(**HEADS | fields | more)) == c.NOT_SUPPORTED
        assert message in library.message
    assert library.run(DecodeParams(**HEADS | fields, dtype=c.FLOAT8_E4M3)) == c.INVALID_ARGUMENT
    assert "dtype is 2, allowed: HA_FLOAT16 or HA_BFLOAT16" in library.message


def test_fp8_has_no_sinks(library: Library) -> None:
    scores = c.Scores(sinks=64)
    packed = {"batch": 1, "total_q": 64, "total_k": 64, "max_seqlen_q": 64, "max_seqlen_k": 64}
    for params in (ForwardParams(**SOUND, scores=scores), VarlenParams(**HEADS | packed, scores=scores)):
        assert library.run(params, "_fp8") == c.NOT_SUPPORTED
        assert (
            f"scores.sinks is given, which ha_{params.name}_fp8 does not have; use 16 bits" in library.message
        )


def test_too_many_tiles_are_not_supported(library: Library) -> None:
    many = SOUND | {"batch": 2**31 - 1, "seqlen_q": 2**30}
    assert library.run(ForwardParams(**many)) == c.NOT_SUPPORTED
    assert "tiles of 64 queries: split the batch" in library.message


def test_an_empty_problem_succeeds_without_a_gpu(library: Library) -> None:
    assert library.run(ForwardParams(**SOUND | {"batch": 0})) == c.SUCCESS
    packed = {"batch": 0, "total_k": 1, "max_seqlen_q": 1, "max_seqlen_k": 1}
    assert library.run(VarlenParams(**packed, **HEADS)) == c.SUCCESS
    assert library.run(AppendParams(**APPENDED | {"batch": 0})) == c.SUCCESS
    no_rows = {"batch": 0, "seqlen": 1, "heads": 1, "head_dim_v": 64}
    assert library.run(CombineParams(num_splits=1, **no_rows)) == c.SUCCESS
    assert library.run(MergeParams(**no_rows)) == c.SUCCESS


@pytest.mark.skipif(bool(_kernels.driver_cuda_version()), reason="this machine has a driver")
def test_without_a_driver_a_launch_says_so(library: Library) -> None:
    params = ForwardParams(**SOUND, workspace=64, workspace_size=HEAD)
    for name in ("q", "k", "v", "out"):
        getattr(params, name).data = 1 << 20
    assert library.run(params) == c.NO_DRIVER
    assert "the NVIDIA driver cannot be opened: libcuda.so.1" in library.message


def test_the_kernels_are_listed_and_none_is_built(library: Library) -> None:
    listed = library.kernels()
    assert list(listed) == [config.name for config in c_tables.library_kernels()]
    assert not any(listed.values())
    assert library.c.ha_version().decode() in c_tables.constants_header()


def test_sets_of_kernels() -> None:
    names = [config.name for config in c_library.chosen_kernels("default")]
    assert names and all("window" not in name and "e4m3cache" not in name for name in names)
    packed = c_library.chosen_kernels(
        "hopper_fwd_bf16_d128_causal_*_24_nopingpong_varlen, hopper_fwd_fp16_d96_full_*_24"
    )
    assert [config.name for config in packed] == [
        "hopper_fwd_bf16_d128_causal_m128n128s2_r240_24_nopingpong_varlen",
        "hopper_fwd_fp16_d96_full_m128n192s2_r240_24",
        "plan_sm_90a",
    ]
    with pytest.raises(ValueError, match="kernels is 'h100', allowed: default, all, none"):
        c_library.chosen_kernels("h100")


def test_kernels_are_launched_through_the_driver(tmp_path: Path) -> None:
    """Those that are linked in, on a driver without a GPU: the calls of ``tests/c/test_calls.c``."""
    names = (
        "hopper_fwd_bf16_d128_causal_m128n160s2_r240_24_nopingpong",
        "hopper_decode_bf16_d128_full_m4*b128_e4m3cache0",
    )
    configs = c_library.chosen_kernels(",".join(names))
    c_library.write_sources(tmp_path, configs)
    assert c_library.write_objects(tmp_path, configs, jobs=1) == []
    library = c.link_library(tmp_path, [tmp_path / f"{config.name}.o" for config in configs])
    exported = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True).stdout
    assert all(line.split()[-1].startswith("ha_") for line in exported.splitlines())
    fake, program = tmp_path / "libcuda.so.1", tmp_path / "test_calls"
    tests = c.ROOT / "tests" / "c"
    compile_c = [c.COMPILER, "-std=c11", f"-I{c.INCLUDE}", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*compile_c, "-fPIC", "-shared", "-o", fake, tests / "fake_cuda.c"], check=True)
    link = [tests / "test_calls.c", library, f"-Wl,-rpath,{tmp_path}", "-ldl"]
    subprocess.run([*compile_c, "-o", program, *link], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "packed sequences: the kernel plan_sm_90a is not in this build: configure it with" in done.stdout
    assert "a decoding step on a cache of e4m3: launched" in done.stdout


def test_structs_are_as_large_as_those_of_c(library: Library) -> None:
    # A struct of another size is refused, so that a success says that both agree.
    for params in (ForwardParams(**SOUND), ForwardParams(**SOUND | {"batch": 0})):
        assert library.kernel_of(params).startswith("hopper_fwd_fp16_d64")
    assert library.kernel_of(ForwardParams(**SOUND | {"struct_size": 16})).startswith(
        f"{c.INVALID_ARGUMENT}: "
    )
