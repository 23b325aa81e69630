"""The C library on a GPU, driven from Python: its outputs are those of Python bit for bit, and a call costs little.

It takes the library that CMake built in ``build``, or links one with the compiler of this machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from hopper_attention import (
    flash_attn_fp8_func,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests import c_library as c
from tests.c_library import DecodeParams, Library, VarlenParams
from tests.gpu.c_calls import Call, argument, assert_same, dense_call

pytestmark = pytest.mark.gpu

CALL_US = 4.0
"""What a call may cost on the host."""


def cuda(result: tuple[Any, ...]) -> Any:
    """What a function of the driver returns; fails unless it succeeded."""
    code, *values = result
    assert code == driver.CUresult.CUDA_SUCCESS, code
    return values[0] if values else None


DENSE = [
    (torch.bfloat16, (1, 300), (300, 1000), (4, 2), 128, True, (-1, -1)),
    (torch.bfloat16, (2, 259), (259, 4000), (4, 4), 128, False, (-1, -1)),
    (torch.float16, (2, 1000), (1000, 1000), (3, 1), 64, True, (-1, -1)),
    (torch.float16, (1, 2000), (2000, 2000), (2, 2), 112, True, (-1, -1)),
    (torch.bfloat16, (1, 700), (700, 700), (4, 2), 128, True, (100, 0)),
    (torch.bfloat16, (1, 700), (700, 700), (4, 2), 128, False, (50, 70)),
]


@pytest.mark.parametrize(("dtype", "rows", "lengths", "heads", "head_dim", "causal", "window"), DENSE)
def test_dense_outputs_are_those_of_python(
    library: Library, draw, dtype, rows, lengths, heads, head_dim, causal, window
) -> None:
    x = draw(dtype, rows[0], lengths, heads, head_dim)
    expected, lse = flash_attn_func(
        x.q, x.k, x.v, causal=causal, window_size=window, backend="hopper", return_attn_probs=True
    )
    sides = {"window_left": window[0], "window_right": window[1]}
    call = dense_call(library, x.q, x.k, x.v, causal=causal, **sides)
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")
    assert not call.workspace[:16].any(), "the tile counter is left as it was found"


def test_strided_inputs_and_a_scale(library: Library, draw) -> None:
    x = draw(torch.bfloat16, 2, (512, 512), (6, 6), 128)
    qkv = torch.stack((x.q, x.k, x.v), dim=2)
    q, k, v = qkv.unbind(2)
    expected = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, backend="hopper")
    call = dense_call(library, q, k, v, causal=True, softmax_scale=0.3)
    call.run()
    assert_same(call.out, expected)


FP8 = [
    ((1000, 1000), True, {}),
    ((300, 3000), False, {}),
    ((1, 100), False, {}),
    ((2000, 2000), True, {"window_left": 700}),
    ((700, 2000), False, {"fp8_two_level": 1}),
]


@pytest.mark.parametrize(("rows", "causal", "given"), FP8)
def test_fp8_outputs_are_those_of_python(
    library: Library, draw, rows: tuple[int, int], causal: bool, given: dict[str, int]
) -> None:
    x = draw(torch.bfloat16, 2, rows, (4, 2), 128)
    options = {"window_size": (given.get("window_left", -1), -1), "backend": "hopper", "exact_lse": False}
    expected, lse = flash_attn_fp8_func(
        x.q,
        x.k,
        x.v,
        causal=causal,
        two_level_accumulation="fp8_two_level" in given,
        return_attn_probs=True,
        **options,
    )
    call = dense_call(library, x.q, x.k, x.v, "_fp8", causal=causal, **given)
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")


DECODE = [
    (1, 64, False, 128),
    (3, 64, False, 128),
    (1, 0, False, 128),
    (1, 0, True, 128),
    (3, 64, True, 128),
    (5, 0, True, 128),
    (2, 64, True, 256),
]
"""A token is four rows of a K/V head: the last are tiles of 4, 16, 32 and 8 rows."""


@pytest.mark.parametrize(("seqlen_q", "page_size", "e4m3", "head_dim"), DECODE)
def test_a_decoding_step_is_that_of_python(
    library: Library, draw, seqlen_q: int, page_size: int, e4m3: bool, head_dim: int
) -> None:
    lengths, capacity = (3000, 5, 640), 3072
    x = draw(torch.bfloat16, len(lengths), (seqlen_q, capacity), (8, 2), head_dim)
    device = x.q.device
    dtype = torch.float8_e4m3fn if e4m3 else torch.bfloat16
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    caches, table = [x.k.to(dtype), x.v.to(dtype)], None
    if page_size:
        pages = capacity // page_size
        caches = [cache.unflatten(1, (pages, page_size)).flatten(0, 1) for cache in caches]
        order = torch.randperm(len(lengths) * pages, device=device)
        table = order.argsort().int().reshape(len(lengths), pages)
        caches = [cache[order] for cache in caches]
    descales = torch.rand(2, len(lengths), 2, device=device) + 0.5
    scales = {"k_descale": descales[0], "v_descale": descales[1]} if e4m3 else {}
    expected, lse, *_ = flash_attn_with_kvcache(
        x.q,
        *caches,
        cache_seqlens=seqlens,
        page_table=table,
        causal=True,
        backend="hopper",
        return_softmax_lse=True,
        **scales,
    )
    fields = {"batch": len(lengths), "seqlen_q": seqlen_q, "heads": 8, "kv_heads": 2, "head_dim": head_dim}
    fields |= {"head_dim_v": head_dim, "pages": caches[0].shape[0], "page_size": caches[0].shape[1]}
    fields |= {"pages_of_sequence": 0 if table is None else table.shape[1], "causal": 1}
    pointers = {"cache_seqlens": seqlens, "page_table": table, **scales}
    fields |= {name: 0 if x is None else x.data_ptr() for name, x in pointers.items()}
    tensors = {"q": x.q, "k_cache": caches[0], "v_cache": caches[1]}
    fields |= {name: argument(tensor) for name, tensor in tensors.items()}
    cache_dtype = c.FLOAT8_E4M3 if e4m3 else c.BFLOAT16
    params = DecodeParams(dtype=c.BFLOAT16, cache_dtype=cache_dtype, **fields)
    call = Call(library, params, torch.empty_like(x.q), tuple(lse.shape))
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")
    without = torch.empty_like(x.q)
    call.params.out, call.params.lse = argument(without), None
    call.run()
    assert_same(without, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_outputs_are_those_of_python(library: Library, draw, causal: bool) -> None:
    lengths = (0, 300, 1, 129, 700)
    x = draw(torch.bfloat16, 1, (sum(lengths), sum(lengths)), (4, 2), 128)
    q, k, v = (t[0] for t in (x.q, x.k, x.v))
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert [b - a for a, b in pairwise(ends)] == list(lengths)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=q.device)
    bounds = cu_seqlens, cu_seqlens, max(lengths), max(lengths)
    expected, lse = flash_attn_varlen_func(
        q, k, v, *bounds, causal=causal, backend="hopper", return_attn_probs=True
    )
    sizes = {
        "batch": len(lengths),
        "total_q": sum(lengths),
        "total_k": sum(lengths),
        "heads": 4,
        "kv_heads": 2,
    }
    sizes |= {"head_dim": 128, "head_dim_v": 128, "max_seqlen_q": 700, "max_seqlen_k": 700}
    pointers = {"cu_seqlens_q": cu_seqlens.data_ptr(), "cu_seqlens_k": cu_seqlens.data_ptr()}
    tensors = {"q": argument(q), "k": argument(k), "v": argument(v)}
    params = VarlenParams(dtype=c.BFLOAT16, causal=causal, **sizes, **pointers, **tensors)
    call = Call(library, params, torch.empty_like(q), (4, sum(lengths)))
    for _ in range(2):
        call.run()
    assert_same(call.out, expected)
    assert_same(call.lse, lse, "lse")


def test_a_call_is_captured_into_a_graph(library: Library, draw) -> None:
    x = draw(torch.bfloat16, 1, (512, 512), (4, 4), 128)
    call = dense_call(library, x.q, x.k, x.v, causal=True)
    call.run("_prepare")
    torch.cuda.synchronize()
    assert call.out.isnan().all(), "prepare launches nothing"
    stream = cuda(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    call.params.stream = int(stream)
    cuda(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    call.run()
    graph = cuda(driver.cuStreamEndCapture(stream))
    replay = cuda(driver.cuGraphInstantiate(graph, 0))
    for _ in range(3):
        x.q.normal_()
        expected = flash_attn_func(x.q, x.k, x.v, causal=True, backend="hopper")
        torch.cuda.synchronize()
        cuda(driver.cuGraphLaunch(replay, stream))
        cuda(driver.cuStreamSynchronize(stream))
        assert_same(call.out, expected)
    for end, handle in ((driver.cuGraphExecDestroy, replay), (driver.cuGraphDestroy, graph)):
        cuda(end(handle))
    cuda(driver.cuStreamDestroy(stream))


def test_threads_with_workspaces_of_their_own(library: Library, draw) -> None:
    x = draw(torch.float16, 2, (700, 700), (4, 2), 128)
    expected = flash_attn_func(x.q, x.k, x.v, causal=True, backend="hopper")
    streams = [torch.cuda.Stream() for _ in range(4)]
    calls = [dense_call(library, x.q, x.k, x.v, causal=True) for _ in streams]
    torch.cuda.synchronize()
    statuses: list[int] = []

    def work(call: Call, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_device(0)
        cuda(driver.cuCtxSetCurrent(cuda(driver.cuDevicePrimaryCtxRetain(0))))
        call.params.stream = stream.cuda_stream
        statuses.extend(library.run(call.params) for _ in range(50))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, streams, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert statuses == [c.SUCCESS] * 200
    assert all(torch.equal(call.out, expected) for call in calls)


def test_errors_on_a_gpu(library: Library, draw) -> None:
    x = draw(torch.bfloat16, 1, (128, 128), (2, 2), 128)
    call = dense_call(library, x.q, x.k, x.v, causal=True)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    call.params.sm_margin = count
    assert library.run(call.params) == c.INVALID_ARGUMENT
    assert library.message == f"sm_margin is {count}, allowed: 0 to {count - 1}"
    found: list[tuple[int, str]] = []
    call.params.sm_margin = 0
    thread = threading.Thread(target=lambda: found.append((library.run(call.params), library.message)))
    thread.start()
    thread.join()
    ((status, message),) = found
    assert status == c.NO_DEVICE and "no CUDA context is current on this thread" in message


def test_the_program_of_one_page_finds_its_result_right(library: Library, tmp_path: Path) -> None:
    nvcc, path = shutil.which("nvcc"), Path(library.c._name)
    if not nvcc:
        pytest.skip("no nvcc here, and the program takes memory and copies from the CUDA runtime")
    program, source = tmp_path / "attention", c.ROOT / "examples" / "cpp" / "attention.cpp"
    command = [nvcc, "-std=c++17", "-I", str(c.INCLUDE), str(source), str(path), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    found = os.environ | {"LD_LIBRARY_PATH": f"{path.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    done = subprocess.run([str(program)], env=found, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("hopper_fwd_fp16_d128_causal")


def test_host_time_of_a_call(library: Library, draw, record_property) -> None:
    """In batches that fit the queue of a stream, so that no launch waits for one before; a report of tests has it."""
    x = draw(torch.bfloat16, 1, (128, 128), (1, 1), 128)
    call = dense_call(library, x.q, x.k, x.v, causal=True)
    call.run()
    run, address = library.c.ha_forward, ctypes.byref(call.params)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            run(address)
        times.append((time.perf_counter() - start) / 200 * 1e6)
    median = statistics.median(times)
    print(f"host time of a call, ctypes included: {median:.2f} us")
    record_property("host_us_of_a_call_by_ctypes", median)
    assert median <= CALL_US
