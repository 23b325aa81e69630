"""The C library selects as Python does, and refuses what it must. On the GPU: tests/gpu/test_c_library.py."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.plan.config import plan_words
from cute_kernels.problem import DTYPES
from hopper.decode.config import PARTS_PER_CTA
from hopper.forward.fp8.tilings import scores_fit_half
from hopper.forward.tilings import NATIVE_HEAD_DIMS
from hopper_attention import _kernels, c_library, c_tables
from hopper_attention.backends import Target
from hopper_attention.checks import DTYPE_NAMES, TensorSpec
from hopper_attention.decode_rules import ctas_of_pieces, select_decode, why_not_decode
from hopper_attention.forward_rules import packed_problem_of, select_config, select_for
from hopper_attention.fp8_rules import Fp8Problem, block_of
from hopper_attention.fp8_rules import select_config as select_fp8_config
from hopper_attention.fp8_training import with_blocks_of_the_tile
from hopper_attention.kvcache_call import CacheExtras, CacheOptions, read_call
from hopper_attention.kvcache_checks import CacheCall, CacheTensors
from hopper_attention.launch.quantize import select_quantize_config
from hopper_attention.masks import MaskSpec
from hopper_attention.quantized import Fp8Quantization, padded_keys
from hopper_attention.rotation import rotation_signs
from tests import c_library as c
from tests.c_library import DecodeParams, ForwardParams, Library, VarlenParams

pytestmark = pytest.mark.skipif(not c.COMPILER, reason="there is no C compiler here")

HOPPER = 9, 0
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PROBLEMS = 10_000
LENGTHS = (1, 63, 512, 768, 769, 1280, 1281, 1536, 1537, 2000, 2500, 4096, 6144, 6145, 16_384, 2**31 - 512)
HEAD = 4 * len(c_tables.workspace_head())
"""Bytes that a workspace begins with."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Without kernels, which selection and errors do not need."""
    folder = tmp_path_factory.mktemp("c_library")
    c_library.write_sources(folder, ())
    return Library(c.link_library(folder))


def draw_problem(rng: random.Random) -> dict[str, Any]:
    """Sizes and a mask; a fifth of them near the bounds of tilings."""
    heads = rng.choice((1, 2, 8))
    length = rng.choice(LENGTHS) if rng.random() < 0.2 else int(2 ** rng.uniform(0, 18))
    sides = [rng.choice((-1, -1, -1, 0, 1, 100, 700, 1000, 2000, 3000, 10_000)) for _ in range(2)]
    return {
        "dtype": rng.choice(DTYPES),
        "batch": rng.choice((1, 3)),
        "lengths": (rng.choice((length, int(2 ** rng.uniform(0, 18)))), length),
        "heads": (heads * rng.choice((1, 4)), heads),
        "head_dims": (8 * rng.randint(1, 32), 8 * rng.randint(1, 32)),
        "causal": rng.random() < 0.5,
        "sides": sides,
    }


def common_fields(p: dict[str, Any]) -> dict[str, Any]:
    """The fields of a struct that dense and packed problems share."""
    (heads, kv_heads), (head_dim, head_dim_v) = p["heads"], p["head_dims"]
    return {
        "dtype": DTYPES.index(p["dtype"]),
        "batch": p["batch"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": p["causal"],
        "window_left": p["sides"][0],
        "window_right": p["sides"][1],
    }


def specs_of(p: dict[str, Any], *rows: tuple[int, ...]) -> list[TensorSpec]:
    """q, k and v with these sizes before the heads."""
    (heads, kv_heads), (head_dim, head_dim_v) = p["heads"], p["head_dims"]
    ends = (heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim_v)
    device, dtype = torch.device("meta"), TORCH_DTYPES[p["dtype"]]
    return [TensorSpec((*row, *end), (), dtype, device) for row, end in zip(rows, ends, strict=True)]


def test_dense_problems_get_the_kernel_that_python_selects(library: Library) -> None:
    rng, chosen = random.Random(1), set()
    for _ in range(PROBLEMS // 2):
        p = draw_problem(rng)
        seqlen_q, seqlen_k = p["lengths"]
        batch = p["batch"]
        q, k, v = specs_of(p, (batch, seqlen_q), (batch, seqlen_k), (batch, seqlen_k))
        mask = MaskSpec.canonical(p["causal"], *p["sides"], seqlen_q, seqlen_k)
        found = library.kernel_of(ForwardParams(**common_fields(p), seqlen_q=seqlen_q, seqlen_k=seqlen_k))
        if max(seqlen_q, seqlen_k) > 2**29 and mask.has_window:
            assert found.startswith(f"{c.NOT_SUPPORTED}: a window is given"), (p, found)
            continue
        expected = select_config("hopper", HOPPER, q, k, v, mask.causal, mask.sides)
        assert found == expected.name, p
        chosen.add(found)
    dense = {row.config.name for row in c_tables.forward_rows() if row.config.layout == "dense"}
    assert chosen == dense, "not every kernel was chosen once"


def test_packed_problems_get_the_kernel_that_python_selects(library: Library) -> None:
    rng, chosen = random.Random(2), set()
    for _ in range(PROBLEMS // 2):
        p = draw_problem(rng)
        longest = [min(length, 100_000) for length in p["lengths"]]
        totals = [p["batch"] * length for length in longest]
        q, _, v = specs_of(p, (totals[0],), (totals[1],), (totals[1],))
        mask = MaskSpec.canonical(p["causal"], *p["sides"], *longest)
        problem = packed_problem_of(q, v, mask.causal, (mask.has_window, False))
        expected = select_for(problem, "hopper", HOPPER)
        sizes = {"total_q": totals[0], "total_k": totals[1]}
        sizes |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
        params = VarlenParams(**common_fields(p), **sizes)
        assert library.kernel_of(params) == expected.name, p
        chosen.add(expected.name)
    assert library.workspace_size_of(params) == HEAD + 4 * plan_words(totals[0], p["batch"], expected.tile_m)
    packed = {row.config.name for row in c_tables.forward_rows() if row.config.layout == "varlen"}
    assert chosen == packed, "not every kernel was chosen once"


def cache_call(
    p: dict[str, Any], rows: tuple[int, int], pages: tuple[int, int, bool], e4m3: bool
) -> CacheCall:
    """A decoding step of ``rows`` (batch, seqlen_q); ``pages`` are their size, how many a sequence has, and whether
    there is a table."""
    (batch, seqlen_q), (page_size, count, has_table) = rows, pages
    (heads, kv_heads), (head_dim, head_dim_v) = p["heads"], p["head_dims"]
    dtype, meta = TORCH_DTYPES[p["dtype"]], {"device": "meta"}
    cache = {"dtype": torch.float8_e4m3fn if e4m3 else dtype, **meta}
    lengths = torch.empty(batch, dtype=torch.int32, **meta)
    table = torch.empty(batch, count, dtype=torch.int32, **meta) if has_table else None
    tensors = CacheTensors(
        torch.empty(batch, seqlen_q, heads, head_dim, dtype=dtype, **meta),
        torch.empty(batch * count, page_size, kv_heads, head_dim, **cache),
        torch.empty(batch * count, page_size, kv_heads, head_dim_v, **cache),
        cache_seqlens=lengths,
        page_table=table,
    )
    return read_call(tensors, CacheExtras(), CacheOptions(causal=p["causal"])).call


HOPPER_GPU = Target("a Hopper GPU", HOPPER, assume_installed=True)


def test_decoding_steps_get_the_kernel_that_python_selects(library: Library) -> None:
    rng, chosen, refused = random.Random(3), set(), 0
    for _ in range(PROBLEMS // 4):
        p, e4m3 = draw_problem(rng), rng.random() < 0.3
        if e4m3:
            p["head_dims"] = tuple(16 * -(-size // 16) for size in p["head_dims"])
        rows = rng.choice((1, 4)), rng.choice((1, 1, 2, 5, 20))
        has_table = rng.random() < 0.7
        page_size = rng.choice((8, 16, 24, 64, 96, 128, 256, 100))
        pages = page_size, rng.choice((1, 3)) if has_table else 1, has_table
        call = cache_call(p, rows, pages, e4m3)
        fields = common_fields(p) | {"batch": rows[0], "seqlen_q": rows[1]}
        fields |= {"pages": rows[0] * pages[1], "page_size": page_size, "pages_of_sequence": pages[1]}
        fields |= {
            "cache_dtype": c.FLOAT8_E4M3 if e4m3 else fields["dtype"],
            "page_table": 64 if has_table else 0,
        }
        params = DecodeParams(**{name: x for name, x in fields.items() if not name.startswith("window")})
        found = library.kernel_of(params)
        if why_not_decode(call, HOPPER_GPU, "hopper"):
            refused += 1
            assert found.startswith(f"{c.NOT_SUPPORTED}: "), (p, rows, pages, e4m3, found)
            continue
        config = select_decode(call)
        assert found == config.name, (p, rows, pages, e4m3)
        ctas = ctas_of_pieces(132, rows[0] * p["heads"][1])
        floats = PARTS_PER_CTA * ctas * config.part_floats + rows[0] * p["heads"][0] * rows[1]
        assert library.workspace_size_of(params) == HEAD + 4 * floats
        chosen.add(found)
    assert len(chosen) > PROBLEMS // 50 and refused > PROBLEMS // 200


def test_fp8_problems_get_the_kernels_that_python_selects(library: Library) -> None:
    rng, chosen = random.Random(5), set()
    for _ in range(PROBLEMS // 2):
        p = draw_problem(rng) | {"head_dims": rng.choice(NATIVE_HEAD_DIMS), "batch": rng.choice((1, 3))}
        seqlen_q, seqlen_k = (min(length, 2**18) for length in p["lengths"])
        dims, batch, (heads, kv_heads) = p["head_dims"], p["batch"], p["heads"]
        two_level = rng.random() < 0.3
        params = ForwardParams(
            **common_fields(p), seqlen_q=seqlen_q, seqlen_k=seqlen_k, fp8_two_level=two_level
        )
        mask = MaskSpec.canonical(p["causal"], *p["sides"], seqlen_q, seqlen_k)
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
        expected = select_fp8_config(problem)
        assert library.kernel_of(params, "_fp8") == expected.name, (p, seqlen_k)
        parts = [batch * heads * seqlen_q * dims[0], batch * kv_heads * seqlen_k * dims[0]]
        parts += [batch * kv_heads * dims[1] * padded_keys(seqlen_k), 4 * batch * heads * seqlen_q]
        parts += 2 * [4 * batch * kv_heads * -(-seqlen_k // block_k)]
        assert library.workspace_size_of(params, "_fp8") == HEAD + sum(-(-part // 16) * 16 for part in parts)
        chosen |= {expected.name, quantizer.name}
    assert chosen == {config.name for row in c_tables.fp8_rows() for config in (row.config, row.quantizer)}


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
    ({"struct_size": 8}, "initialise it with HA_FORWARD_PARAMS_INIT"),
]
SOUND: dict[str, Any] = {"batch": 1, "seqlen_q": 64, "seqlen_k": 64, "heads": 4, "kv_heads": 2}
SOUND |= {"head_dim": 64, "head_dim_v": 64}


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[next(iter(fields)) for fields, _ in BAD])
def test_what_is_wrong_is_named(library: Library, fields: dict[str, Any], message: str) -> None:
    assert library.run(ForwardParams(**SOUND | fields)) == c.INVALID_ARGUMENT
    assert message in library.message


def test_too_many_tiles_are_not_supported(library: Library) -> None:
    many = SOUND | {"batch": 2**31 - 1, "seqlen_q": 2**30}
    assert library.run(ForwardParams(**many)) == c.NOT_SUPPORTED
    assert "tiles of 64 queries: split the batch" in library.message


def test_an_empty_problem_succeeds_without_a_gpu(library: Library) -> None:
    assert library.run(ForwardParams(**SOUND | {"batch": 0})) == c.SUCCESS
    packed = {"batch": 0, "total_k": 1, "max_seqlen_q": 1, "max_seqlen_k": 1}
    heads = {name: SOUND[name] for name in ("heads", "kv_heads", "head_dim", "head_dim_v")}
    assert library.run(VarlenParams(**packed, **heads)) == c.SUCCESS


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
    assert names and all("window" not in name for name in names)
    packed = c_library.chosen_kernels(
        "hopper_fwd_bf16_d128_causal_*_24_varlen, hopper_fwd_fp16_d96_full_*_24"
    )
    assert [config.name for config in packed] == [
        "hopper_fwd_bf16_d128_causal_m128n128s2_r240_24_varlen",
        "hopper_fwd_fp16_d96_full_m128n192s2_r240_24",
        "plan_sm_90a",
    ]
    with pytest.raises(ValueError, match="kernels is 'h100', allowed: default, all, none"):
        c_library.chosen_kernels("h100")


def test_a_kernel_is_launched_through_the_driver(tmp_path: Path) -> None:
    """One that is linked in, on a driver without a GPU: the calls of ``tests/c/test_calls.c``."""
    (config,) = c_library.chosen_kernels("hopper_fwd_bf16_d128_causal_m128n176s2_r240_24")
    c_library.write_sources(tmp_path, [config])
    assert c_library.write_objects(tmp_path, [config], jobs=1) == []
    library = c.link_library(tmp_path, [tmp_path / f"{config.name}.o"])
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


def test_structs_are_as_large_as_those_of_c(library: Library) -> None:
    # A struct of another size is refused, so that a success says that both agree.
    for params in (ForwardParams(**SOUND), ForwardParams(**SOUND | {"batch": 0})):
        assert library.kernel_of(params).startswith("hopper_fwd_fp16_d64")
    assert library.kernel_of(ForwardParams(**SOUND | {"struct_size": 16})).startswith(
        f"{c.INVALID_ARGUMENT}: "
    )
