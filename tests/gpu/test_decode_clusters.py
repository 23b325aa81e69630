"""Decoding in clusters, by the public function, against float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from hopper_attention import driver, explain_kvcache, flash_attn_with_kvcache
from hopper_attention.driver import most_clusters
from hopper_attention.reference import attention_naive
from tests.python.kvcache_cases import CacheCase

pytestmark = pytest.mark.gpu

# Queries on a cache of e4m3 are split into two terms of e4m3, whose rounding an LSE of few keys has.
of_either_cache = pytest.mark.parametrize(
    ("dtype", "lse_error"), [(torch.bfloat16, 1e-4), (torch.float8_e4m3fn, 1e-3)], ids=str
)


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Each test compiles the one kernel that it needs."""


def test_room_for_clusters_is_between_what_gpcs_and_what_sms_have() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rooms = {size: most_clusters(0, size) for size in (1, 2, 8)}
    assert rooms[1] == sms and sms * 3 // 4 <= 2 * rooms[2] <= sms and sms // 2 <= 8 * rooms[8] <= sms


@pytest.mark.parametrize(
    ("heads", "capacity", "cluster"), [((32, 8), 2048, 8), ((32, 32), 8192, 2), ((16, 8), 1024, 8)], ids=str
)
@pytest.mark.parametrize("length", [1, 77, 1000, 1024])
def test_one_sequence(heads: tuple[int, int], capacity: int, cluster: int, length: int) -> None:
    """Rows behind the last key are NaN. Twice the same bits."""
    torch.manual_seed(length)
    q = torch.randn(1, 1, heads[0], 128, device="cuda", dtype=torch.bfloat16)
    caches = [torch.randn(1, capacity, heads[1], 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for cache in caches:
        cache[:, length:] = torch.nan
    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1]}
    given["cache_seqlens"] = torch.tensor([length], dtype=torch.int32, device="cuda")
    assert explain_kvcache(**given).config.cluster == (
        cluster if most_clusters(0, cluster) >= heads[1] else 1
    )
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    keys = (x[:, :length].double() for x in caches)
    exact, exact_lse = attention_naive(q.double(), *keys)
    assert (out.double() - exact).norm() <= 4e-3 * exact.norm()
    assert (lse.double() - exact_lse).abs().max() <= 1e-4
    again = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@of_either_cache
@pytest.mark.parametrize("length", [1, 77, 1000, None])
def test_several_sequences_of_one_length(dtype: torch.dtype, lse_error: float, length: int | None) -> None:
    """An int says so, and that all rows are filled; a tensor does not. Twice the same bits."""
    torch.manual_seed(5)
    caches = [torch.randn(8, 2048, 8, 128, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)]
    q = torch.randn(8, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    keys = 2048 if length is None else length
    for cache in caches:
        cache.view(torch.uint8)[:, keys:] = 0xFF
    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": length}
    lengths = torch.full((8,), keys, dtype=torch.int32, device="cuda")
    assert explain_kvcache(**given).config.cluster == (2 if most_clusters(0, 2) >= 64 else 1)
    assert explain_kvcache(**given | {"cache_seqlens": lengths}).config.cluster == 1
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    of_tensor = flash_attn_with_kvcache(**given | {"cache_seqlens": lengths}, return_softmax_lse=True)
    exact, exact_lse = attention_naive(q.double(), *(x[:, :keys].float().double() for x in caches))
    for found, found_lse in ((out, lse), of_tensor):
        assert (found.double() - exact).norm() <= 4e-3 * exact.norm()
        assert torch.equal(found_lse.isinf(), exact_lse.isinf())
        assert (found_lse.double() - exact_lse).nan_to_num(nan=0.0).abs().max() <= lse_error
    again = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of_graph = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    graph.replay()
    assert torch.equal(out, of_graph[0]) and torch.equal(lse, of_graph[1])


PADDED = CacheCase(
    lengths=(0, 1, 130, 250),
    queries=(3, 3, 3, 3),
    capacity=256,
    page_size=256,
    heads=(16, 8),
    head_dims=(64, 40),
    leftpad=(0, 0, 7, 99),
    options={"sinks": torch.linspace(-2.0, 2.0, 16), "window_size": (100, 0)},
)
ALL_AT_ONCE = {
    "leftpads, a page a sequence": (PADDED, 2),
    "pages of 16": (replace(PADDED, page_size=16, leftpad=()), 2),
    "one sequence": (
        replace(PADDED, lengths=(1000,), queries=(3,), capacity=1024, page_size=1024, leftpad=(299,)),
        8,
    ),
    "one sequence without keys": (replace(PADDED, lengths=(0,), queries=(3,), leftpad=(0,)), 8),
}


@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_several_tokens_with_sinks_and_a_window(name: str) -> None:
    """Fewer columns than the kernel has, and NaN wherever no key is."""
    case, cluster = ALL_AT_ONCE[name]
    call = case.build(torch.bfloat16)
    given = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in call.items()}
    found = explain_kvcache(**given).config.cluster
    assert found == (cluster if most_clusters(0, cluster) >= 8 * case.batch else 1)
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    exact, exact_lse = case.expected(call)
    assert (out.cpu().double() - exact).norm() <= 4e-3 * exact.norm()
    assert (lse.cpu().double() - exact_lse).abs().max() <= 1e-4


def test_lengths_that_change_under_a_graph() -> None:
    """With calls by an int between its replays, of the same kernel: the same bits as calls outside of it."""
    torch.manual_seed(8)
    q = torch.randn(4, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(4, 512, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def attend(lengths: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True)

    many = [
        torch.tensor(x, dtype=torch.int32, device="cuda")
        for x in ((512,) * 4, (512, 1, 0, 300), (7, 0, 400, 129))
    ]
    wanted = [attend(x) for x in many]
    lengths = many[1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of_graph = attend(lengths)
    for numbers, expected in zip(many, wanted, strict=True):
        lengths.copy_(numbers)
        assert all(map(torch.equal, attend(512), wanted[0]))
        graph.replay()
        assert all(map(torch.equal, of_graph, expected))


@of_either_cache
def test_a_short_cache_of_any_lengths(dtype: torch.dtype, lse_error: float) -> None:
    torch.manual_seed(6)
    caches = [torch.randn(8, 1024, 8, 128, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)]
    q = torch.randn(8, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    numbers = (1024, 1, 0, 300, 129, 1000, 128, 77)
    lengths = torch.tensor(numbers, dtype=torch.int32, device="cuda")
    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": lengths}
    assert explain_kvcache(**given).config.cluster == (2 if most_clusters(0, 2) >= 64 else 1)
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    for b, keys in enumerate(numbers):
        exact, exact_lse = attention_naive(
            q[b : b + 1].double(), *(x[b : b + 1, :keys].float().double() for x in caches)
        )
        assert (out[b : b + 1].double() - exact).norm() <= 4e-3 * exact.norm(), b
        assert torch.equal(lse[b : b + 1].isinf(), exact_lse.isinf()), b
        assert (lse[b : b + 1].double() - exact_lse).nan_to_num(nan=0.0).abs().max() <= lse_error, b


def test_a_graph_of_a_call_that_was_never_made_asks_nothing_of_the_driver() -> None:
    """The kernel without clusters is loaded; the first call outside of the graph has clusters."""
    torch.manual_seed(7)
    q = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1920, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([1900], dtype=torch.int32, device="cuda")
    longer = [x.repeat(1, 4, 1, 1) for x in (k, v)]
    flash_attn_with_kvcache(q, *longer, cache_seqlens=lengths)
    torch.cuda.synchronize()
    driver._most_clusters.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Three layers, none of which is remembered.
        of_graph = [flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths) for _ in range(3)]
    assert driver._most_clusters.cache_info().currsize == 0
    graph.replay()
    torch.cuda.synchronize()
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert driver._most_clusters.cache_info().currsize == 1
    exact, _ = attention_naive(q.double(), *(x[:, :1900].double() for x in (k, v)))
    for out in (*of_graph, found):
        assert (out.double() - exact).norm() <= 4e-3 * exact.norm()


def test_a_process_whose_first_question_is_for_clusters_gets_an_answer() -> None:
    """There is no context of the GPU yet."""
    question = "from hopper_attention.driver import most_clusters; print(most_clusters(0, 2))"
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert int(done.stdout) == most_clusters(0, 2) > 0
