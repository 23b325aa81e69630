"""What the C library does beside plain attention, on a GPU: its outputs are those of Python bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    flash_attn_combine,
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from hopper_attention.launch.append import append
from hopper_attention.launch.merge import merge
from hopper_attention.launch.paged_forward import paged_forward
from hopper_attention.masks import MaskSpec
from hopper_attention.reference.append import Rotation
from hopper_attention.scores import Scores
from tests import c_library as c
from tests.c_library import (
    AppendParams,
    CombineParams,
    DecodeParams,
    Library,
    MergeParams,
    PagedParams,
    VarlenParams,
)
from tests.gpu.c_calls import DTYPES, Call, argument, assert_same, dense_call, require

pytestmark = pytest.mark.gpu

CODES = DTYPES | {torch.float32: c.FLOAT32, torch.float8_e4m3fn: c.FLOAT8_E4M3}

LENGTHS = (0, 300, 1, 129, 700)


def draw_scores(names: tuple[str, ...], heads: int, batch: int) -> tuple[dict[str, Any], c.Scores]:
    """Options of Python, and the same for C; slopes of each sequence."""
    options: dict[str, Any] = {}
    if "softcap" in names:
        options["softcap"] = 20.0
    if "alibi" in names:
        options["alibi_slopes"] = torch.rand(batch, heads, device="cuda") / 8
    if "sinks" in names:
        options["sinks"] = torch.randn(heads, device="cuda")
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    places = [None if x is None else x.data_ptr() for x in (slopes, sinks)]
    return options, c.Scores(options.get("softcap", 0.0), places[0], heads if places[0] else 0, places[1])


def run_single(library: Library, params: Any) -> None:
    """A call without a workspace, or a skip."""
    require(library, library.kernel_of(params))
    params.stream = torch.cuda.current_stream().cuda_stream
    assert library.run(params) == c.SUCCESS, library.message


@pytest.mark.parametrize(
    ("names", "causal", "chunk"),
    [(("softcap", "alibi", "sinks"), True, 0), (("softcap",), False, 0), (("sinks",), True, 200)],
)
def test_dense_scores(library: Library, draw, names: tuple[str, ...], causal: bool, chunk: int) -> None:
    x = draw(torch.bfloat16, 2, (700, 1000), (4, 2), 128)
    options, scores = draw_scores(names, 4, 2)
    given = {"causal": causal, "attention_chunk": chunk}
    expected, lse = flash_attn_func(
        x.q, x.k, x.v, **given, **options, backend="hopper", return_attn_probs=True
    )
    call = dense_call(library, x.q, x.k, x.v, **given, scores=scores)
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")
    plain = flash_attn_func(x.q, x.k, x.v, **given, backend="hopper")
    assert not torch.equal(call.out, plain), "the scores were changed"


def packed_call(
    library: Library, qkv: tuple[Tensor, ...], kind: str = "", **options: Any
) -> tuple[Call, Tensor]:
    """A call on sequences of LENGTHS, and their cu_seqlens."""
    q, k, v = qkv
    ends = torch.tensor((0, *LENGTHS), device=q.device).cumsum(0).int()
    sizes = {"batch": len(LENGTHS), "total_q": q.shape[0], "total_k": k.shape[0], "heads": q.shape[1]}
    sizes |= {"kv_heads": k.shape[1], "head_dim": q.shape[2], "head_dim_v": v.shape[2]}
    sizes |= {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}
    given = {"q": argument(q), "k": argument(k), "v": argument(v)}
    given |= {"cu_seqlens_q": ends.data_ptr(), "cu_seqlens_k": ends.data_ptr()}
    params = VarlenParams(dtype=DTYPES[q.dtype], **sizes, **given, **options)
    return Call(library, params, torch.empty_like(q), (q.shape[1], q.shape[0]), kind), ends


def packed_inputs(draw) -> tuple[Tensor, ...]:
    x = draw(torch.bfloat16, 1, (sum(LENGTHS), sum(LENGTHS)), (4, 2), 128)
    return x.q[0], x.k[0], x.v[0]


def test_packed_slopes_and_sinks(library: Library, draw) -> None:
    qkv = packed_inputs(draw)
    options, scores = draw_scores(("alibi", "sinks"), 4, len(LENGTHS))
    call, ends = packed_call(library, qkv, causal=True, scores=scores)
    bounds = ends, ends, max(LENGTHS), max(LENGTHS)
    given = {"causal": True, "backend": "hopper", "return_attn_probs": True}
    expected, lse = flash_attn_varlen_func(*qkv, *bounds, **given, **options)
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")


@pytest.mark.parametrize(("causal", "window_left"), [(True, -1), (False, 100)])
def test_packed_fp8(library: Library, draw, causal: bool, window_left: int) -> None:
    qkv = packed_inputs(draw)
    call, ends = packed_call(library, qkv, "_fp8", causal=causal, window_left=window_left)
    bounds = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    bounds |= {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}
    options = {"causal": causal, "window_size": (window_left, -1), "backend": "hopper", "exact_lse": False}
    expected, lse = flash_attn_fp8_func(*qkv, **bounds, **options, return_attn_probs=True)
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_decoding_step_with_a_window_and_scores_or_left_pads(
    library: Library, draw, is_paged: bool
) -> None:
    lengths, capacity = (3000, 5, 640), 3072
    x = draw(torch.bfloat16, 3, (1, capacity), (8, 2), 128)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=x.q.device)
    caches, fields = [x.k, x.v], {"batch": 3, "seqlen_q": 1, "heads": 8, "kv_heads": 2}
    fields |= {"head_dim": 128, "head_dim_v": 128, "cache_seqlens": seqlens.data_ptr()}
    options: dict[str, Any] = {"cache_seqlens": seqlens, "return_softmax_lse": True, "backend": "hopper"}
    leftpad = torch.tensor((100, 0, 639), dtype=torch.int32, device=x.q.device)
    table = torch.randperm(3 * 48, device=x.q.device).int().reshape(3, 48)
    if is_paged:
        caches = [cache.unflatten(1, (48, 64)).flatten(0, 1) for cache in caches]
        named, scores = draw_scores(("softcap", "sinks"), 8, 3)
        options |= named | {"page_table": table, "window_size": (500, -1)}
        fields |= {
            "page_table": table.data_ptr(),
            "pages_of_sequence": 48,
            "window_left": 500,
            "scores": scores,
        }
    else:
        options["cache_leftpad"] = leftpad
        fields["cache_leftpad"] = leftpad.data_ptr()
    expected, lse, *_ = flash_attn_with_kvcache(x.q, *caches, **options)
    fields |= {"pages": caches[0].shape[0], "page_size": caches[0].shape[1], "q": argument(x.q)}
    fields |= {"k_cache": argument(caches[0]), "v_cache": argument(caches[1])}
    params = DecodeParams(dtype=c.BFLOAT16, cache_dtype=c.BFLOAT16, **fields)
    call = Call(library, params, torch.empty_like(x.q), tuple(lse.shape))
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")


@pytest.mark.parametrize("names", [(), ("alibi", "sinks")])
def test_packed_queries_on_pages(library: Library, draw, names: tuple[str, ...]) -> None:
    """A prompt that is read in parts, and a sequence with all of its keys new."""
    queries, keys = (300, 129, 1), (1000, 129, 500)
    x = draw(torch.bfloat16, 3, (sum(queries), 1024), (4, 2), 128)
    q, device = x.q[0], x.q.device
    caches = [cache.unflatten(1, (16, 64)).flatten(0, 1) for cache in (x.k, x.v)]
    table = torch.randperm(48, device=device).int().reshape(3, 16)
    ends = torch.tensor((0, *queries), device=device).cumsum(0).int()
    seqlens = torch.tensor(keys, dtype=torch.int32, device=device)
    starts = torch.arange(4, dtype=torch.int32, device=device) * 1024
    options, scores = draw_scores(names, 4, 3)
    mask = MaskSpec(causal=True)
    expected, lse = paged_forward(
        q,
        *caches,
        page_table=table,
        lengths=seqlens,
        cu_seqlens_q=ends,
        mask=mask,
        scores=Scores.of(0.0, options.get("alibi_slopes"), options.get("sinks")),
        return_lse=True,
    )
    fields = {"batch": 3, "total_q": sum(queries), "max_seqlen_q": 300, "heads": 4, "kv_heads": 2}
    fields |= {"head_dim": 128, "head_dim_v": 128, "pages": 48, "page_size": 64, "pages_of_sequence": 16}
    places = {"cu_seqlens_q": ends, "cache_seqlens": seqlens, "cache_starts": starts, "page_table": table}
    fields |= {name: place.data_ptr() for name, place in places.items()}
    tensors = {"q": q, "k_cache": caches[0], "v_cache": caches[1]}
    fields |= {name: argument(tensor) for name, tensor in tensors.items()}
    params = PagedParams(dtype=c.BFLOAT16, causal=1, scores=scores, **fields)
    call = Call(library, params, torch.empty_like(q), (4, sum(queries)))
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")


APPENDS = [
    (torch.bfloat16, "", False),
    (torch.bfloat16, "halves", False),
    (torch.bfloat16, "interleaved", True),
    (torch.float8_e4m3fn, "", True),
]


@pytest.mark.parametrize(("cache_dtype", "rotary", "is_packed"), APPENDS)
def test_new_tokens(library: Library, draw, cache_dtype: torch.dtype, rotary: str, is_packed: bool) -> None:
    """The second sequence has no room for its last tokens."""
    x = draw(torch.bfloat16, 3, (2, 4), (8, 2), 128)
    device, (k, v) = x.q.device, (x.k, x.v)
    starts = torch.tensor((0, 253, 100), dtype=torch.int32, device=device)
    table = torch.randperm(12, device=device).int().reshape(3, 4)
    caches = [torch.randn(12, 64, 2, 128, device=device).to(cache_dtype) for _ in range(2)]
    lengths, turned = torch.empty_like(starts), torch.empty_like(x.q)
    fields: dict[str, Any] = {"batch": 3, "seqlen_new": 4, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128}
    fields |= {"pages": 12, "page_size": 64, "page_table": table.data_ptr(), "pages_of_sequence": 4}
    fields |= {"cache_seqlens": starts.data_ptr(), "new_seqlens": lengths.data_ptr()}
    options: dict[str, Any] = {"page_table": table}
    if is_packed:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        ends = torch.tensor((0, 5, 9, 12), dtype=torch.int32, device=device)
        options["cu_seqlens_k_new"] = ends
        fields |= {"cu_seqlens_new": ends.data_ptr(), "seqlen_new": 12}
    if cache_dtype == torch.float8_e4m3fn:
        descales = torch.rand(2, 3, 2, device=device) + 0.5
        options |= {"k_descale": descales[0], "v_descale": descales[1]}
        fields |= {"k_descale": descales[0].data_ptr(), "v_descale": descales[1].data_ptr()}
    if rotary:
        dtype = torch.float32 if rotary == "halves" else torch.bfloat16
        tables = [torch.randn(300, 32, device=device).to(dtype) for _ in range(2)]
        options |= {"rotation": Rotation(*tables, rotary == "interleaved"), "q": x.q}
        fields |= {"rotary": c.HALVES if rotary == "halves" else c.INTERLEAVED, "rotary_dtype": CODES[dtype]}
        fields |= {"rotary_dim": 64, "rotary_rows": 300, "seqlen_q": 2, "heads": 8}
        fields |= {"rotary_cos": tables[0].data_ptr(), "rotary_sin": tables[1].data_ptr()}
        fields |= {"q": argument(x.q), "q_out": argument(turned)}
    expected = [cache.clone() for cache in caches]
    wanted = append(k, v, *expected, starts, **options)
    tensors = {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1]}
    fields |= {name: argument(tensor) for name, tensor in tensors.items()}
    run_single(library, AppendParams(dtype=c.BFLOAT16, cache_dtype=CODES[cache_dtype], **fields))
    assert_same(lengths, wanted[0], "new_seqlens")
    for cache, of_python in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), of_python.view(torch.uint8))
    if rotary:
        assert_same(turned, wanted[1], "q_out")


@pytest.mark.parametrize(("dtype", "num_splits"), [(torch.bfloat16, 3), (torch.float32, 20)])
def test_parts_are_merged(library: Library, dtype: torch.dtype, num_splits: int) -> None:
    batch, seqlen, heads, columns = 2, 50, 4, 136
    parts = torch.randn(num_splits, batch, seqlen, heads, columns, device="cuda")
    lse_partial = torch.randn(num_splits, batch, heads, seqlen, device="cuda")
    lse_partial[:, 0, 0, :3] = float("-inf")
    expected, lse = flash_attn_combine(parts, lse_partial.transpose(2, 3), out_dtype=dtype)
    out = torch.full_like(expected, float("nan"))
    found = torch.full((batch, heads, seqlen), float("nan"), device="cuda")
    sizes = {
        "num_splits": num_splits,
        "batch": batch,
        "seqlen": seqlen,
        "heads": heads,
        "head_dim_v": columns,
    }
    tensors = {"out_partial": argument(parts[0]), "out": argument(out)}
    places = {"lse_partial": lse_partial.data_ptr(), "lse": found.data_ptr()}
    run_single(library, CombineParams(dtype=CODES[dtype], **sizes, **tensors, **places))
    assert_same(out, expected)
    assert_same(found.transpose(1, 2), lse, "lse")
    assert not out[0, :3, 0].any(), "where no part has a key"


def test_a_part_is_added(library: Library) -> None:
    batch, seqlen, heads, columns = 2, 50, 4, 128
    out, part = (torch.randn(batch, seqlen, heads, columns, device="cuda") for _ in range(2))
    lse, part_lse = (torch.randn(batch, heads, seqlen, device="cuda") for _ in range(2))
    part, part_lse[0, 0, :3] = part.bfloat16(), float("-inf")
    expected, expected_lse, before = out.clone(), lse.clone(), out.clone()
    assert merge(expected, expected_lse, part, part_lse)
    sizes = {"batch": batch, "seqlen": seqlen, "heads": heads, "head_dim_v": columns}
    places = {"lse": lse.data_ptr(), "part_lse": part_lse.data_ptr()}
    params = MergeParams(dtype=c.BFLOAT16, **sizes, out=argument(out), part=argument(part), **places)
    run_single(library, params)
    assert_same(out, expected)
    assert_same(lse, expected_lse, "lse")
    assert torch.equal(out[0, :3, 0], before[0, :3, 0]), "a part without keys changes nothing"
