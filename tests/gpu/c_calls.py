"""Calls of the C library on a GPU, with memory of torch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import c_library, c_tables
from tests import c_library as c
from tests.c_library import ForwardParams, Library, TensorArgument

DTYPES = {torch.float16: c.FLOAT16, torch.bfloat16: c.BFLOAT16}
FP8 = "hopper_fwd_e4m3_bf16_d128"
SHORT = "m128n128s2_r240_24"

KERNELS = ",".join(
    (
        "hopper_fwd_*_d128_*_24",
        f"hopper_fwd_*_d128_causal_{SHORT}_nopingpong",
        "hopper_fwd_fp16_d64_causal_m64n64*_x3",
        f"hopper_fwd_bf16_d128_full_{SHORT}_varlen",
        f"hopper_fwd_bf16_d128_causal_{SHORT}_nopingpong_varlen",
        f"hopper_fwd_bf16_d128_full_{SHORT}_window",
        f"hopper_fwd_bf16_d128_causal_{SHORT}_nopingpong_window",
        "hopper_quantize_bf16_d128_*",
        f"{FP8}_causal_m128n128s4_r240_24_nopingpong_late_eager_poly3",
        f"{FP8}_causal_m128n128s4_r240_24_nopingpong_late_window_eager_poly3",
        f"{FP8}_full_m128n128s4_r240_24_nopingpong_late_eager_poly3",
        f"{FP8}_full_m192n128s4_r160_32_nopingpong_late_half_poly5",
        f"{FP8}_full_m128n128s4_r240_24_poly2_twolevel",
        "hopper_decode_bf16_d128_*_m32n128s2b64_paged",
        "hopper_decode_bf16_d128_full_m32n128s2b128",
        "hopper_decode_bf16_d128_full_m4n128s6b128_e4m3cache0",
        "hopper_decode_bf16_d128_causal_m16n128s6b64_paged_e4m3cache0",
        "hopper_decode_bf16_d128_causal_m32n128s2b128_e4m3cache2",
        "hopper_decode_bf16_d256_causal_m8n64*b64_paged_e4m3cache0",
        f"hopper_fwd_bf16_d128_causal_{SHORT}_nopingpong_softcap_alibi_sinks",
        f"hopper_fwd_bf16_d128_full_{SHORT}_softcap",
        f"hopper_fwd_bf16_d128_causal_{SHORT}_nopingpong_window_chunk_sinks",
        f"hopper_fwd_bf16_d128_causal_{SHORT}_nopingpong_varlen_alibi_sinks",
        f"{FP8}_causal_m128n128s4_r240_24_nopingpong_late_varlen_eager_poly3",
        f"{FP8}_full_m128n128s4_r240_24_nopingpong_late_window_varlen_eager_poly3",
        "hopper_decode_bf16_d128_full_m32n128s2b64_paged_window_softcap_sinks",
        "hopper_decode_bf16_d128_full_m32n128s2b128_leftpad",
        "hopper_fwd_bf16_d128_causal_m128n128s3_r240_24_nopingpong_varlen_pages64",
        "hopper_fwd_bf16_d128_causal_m128n128s3_r240_24_nopingpong_varlen_alibi_sinks_pages64",
        "append_sm_90a_bf16_bf16*",
        "append_sm_90a_bf16_e4m3",
        "combine_sm_90a_bf16*",
        "combine_sm_90a_fp32*",
        "merge_sm_90a_bf16",
    )
)
"""Those that the tests need; a library with others is used as it is, and what it lacks is skipped."""

BUILT = c.ROOT / "build"
"""Where CMake puts a library."""


def open_library(folder: Path) -> Library:
    """The library that CMake built in ``build``, or one with KERNELS that is linked in a folder."""
    built = sorted(BUILT.glob("libhopper_attention.so.*.*.*"))
    if built:
        library = Library(built[-1])
        # One of another state of the sources would have other kernels, and other bits.
        names = {config.name for config in c_tables.library_kernels()}
        if names <= set(library.kernels()):
            return library
        pytest.skip(f"{built[-1]} is not of these sources; run cmake --build build, or remove it")
    if not c.COMPILER:
        pytest.skip("there is neither build/libhopper_attention.so nor a C compiler to link one")
    configs = c_library.chosen_kernels(KERNELS)
    c_library.write_sources(folder, configs)
    assert c_library.write_objects(folder, configs, jobs=8) == []
    return Library(c.link_library(folder, [folder / f"{config.name}.o" for config in configs]))


def require(library: Library, kernel: str) -> None:
    """Skip a test whose kernel was left out of a library that CMake built; the one that is linked here has them all."""
    if not library.kernels().get(kernel, False):
        leave = pytest.skip if Path(library.c._name).is_relative_to(BUILT) else pytest.fail
        leave(f"the library was built without {kernel}")


def argument(x: Tensor) -> TensorArgument:
    *strides, last = x.stride()
    assert last == 1
    return TensorArgument(x.data_ptr(), *((0,) * (3 - len(strides))), *strides)


class Call:
    """A problem of the C library whose outputs and workspace are filled with NaN; ``kind`` may be "_fp8"."""

    def __init__(
        self,
        library: Library,
        params: ctypes.Structure,
        out: Tensor,
        lse_shape: tuple[int, ...],
        kind: str = "",
    ) -> None:
        self.library, self.params, self.kind = library, params, kind
        require(library, library.kernel_of(params, kind))
        self.out = out.fill_(float("nan"))
        self.lse = torch.full(lse_shape, float("nan"), dtype=torch.float32, device=out.device)
        size = library.workspace_size_of(params, kind)
        self.workspace = torch.full((size,), 255, dtype=torch.uint8, device=out.device)
        params.out, params.lse = argument(out), self.lse.data_ptr()
        params.workspace, params.workspace_size = self.workspace.data_ptr(), size
        params.stream = torch.cuda.current_stream().cuda_stream
        assert library.c.ha_workspace_init(params.workspace, size, params.stream) == c.SUCCESS

    def run(self, function: str = "") -> None:
        status = self.library.run(self.params, self.kind + function)
        assert status == c.SUCCESS, self.library.message


def dense_call(library: Library, q: Tensor, k: Tensor, v: Tensor, kind: str = "", **options: Any) -> Call:
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, kv_heads, head_dim_v = v.shape
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads}
    sizes |= {"kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": head_dim_v}
    tensors = {"q": argument(q), "k": argument(k), "v": argument(v)}
    params = ForwardParams(dtype=DTYPES[q.dtype], **sizes, **tensors, **options)
    out = torch.empty(batch, seqlen_q, heads, head_dim_v, dtype=q.dtype, device=q.device)
    return Call(library, params, out, (batch, heads, seqlen_q), kind)


def assert_same(found: Tensor, expected: Tensor, what: str = "out") -> None:
    """That two tensors have the same bits; else say of how many elements, and which is the first, they have not."""
    if torch.equal(found, expected):
        return
    assert found.shape == expected.shape, (
        f"{what} has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    )
    differs = (found != expected).nonzero()
    first = tuple(differs[0].tolist())
    pytest.fail(
        f"{what} differs in {len(differs)} of {found.numel()} elements, first at {first}: {found[first].item()} for "
        f"{expected[first].item()}; NaN in {found.isnan().sum()} and in {expected.isnan().sum()} of them"
    )
