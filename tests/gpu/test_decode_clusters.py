"""Decoding in clusters, by the public function, against float64."""

from __future__ import annotations

import pytest
import torch

from hopper_attention import explain_kvcache, flash_attn_with_kvcache
from hopper_attention.driver import most_clusters
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu


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
