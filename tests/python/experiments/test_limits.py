"""What GPUs can do with a workload, by their names."""

from __future__ import annotations

import pytest

from hopper_attention.experiments.serving.spec import equal, in_pages
from hopper_attention.experiments.workloads.spec import limit_method, limit_us_of

H100 = "NVIDIA H100 80GB HBM3"


def test_bytes_take_longer_on_an_h100_and_operations_do_not() -> None:
    decode = equal(256, 8)
    assert decode.limit_us(H100) == pytest.approx(decode.limit_us() * 4.8 / 3.35)
    assert limit_us_of(989e12, 1.0, False, H100) == limit_us_of(989e12, 1.0, False, "NVIDIA H200") == 1e6
    assert limit_us_of(989e12, 1.0, True, H100) == 5e5


def test_a_gpu_that_is_not_known_counts_as_an_h200() -> None:
    (paged,) = in_pages(equal(1, 128))[:1]
    assert paged.limit_us("another") == paged.limit_us("NVIDIA H200") == paged.limit_us()


def test_a_report_says_the_rate_of_its_gpu() -> None:
    assert limit_method("NVIDIA H200").endswith("bytes over 4.25 TB/s")
    assert limit_method(H100).endswith("bytes over 2.97 TB/s")
