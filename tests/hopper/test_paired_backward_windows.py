"""The backward kernels above head_dim 128 with sliding windows, run from their PTX without a GPU, against float64."""

from __future__ import annotations

import pytest

from cute_kernels.window import NO_LIMIT
from tests.hopper.test_backward_windows import (
    check,
    check_keys_that_no_query_sees,
    check_queries_that_see_no_key,
)


@pytest.mark.parametrize(
    "dtype,head_dim,causal,seqlens,heads,sides,ordered",
    [
        ("bfloat16", 256, False, (100, 150), (2, 1), (40, 20), True),
        ("bfloat16", 256, False, (130, 140), (1, 1), (90, NO_LIMIT), True),
    ],
)
def test_gradients_in_a_window(dtype, head_dim, causal, seqlens, heads, sides, ordered) -> None:
    check(dtype, head_dim, causal, seqlens, heads, sides, ordered)


@pytest.mark.parametrize("head_dim,ordered", [(256, True)])
def test_keys_that_no_query_sees_have_zero_gradients(head_dim, ordered) -> None:
    check_keys_that_no_query_sees(head_dim, ordered)


def test_queries_that_see_no_key_have_zero_gradients() -> None:
    """Nothing to the right, since queries before key 0 are in another chunk."""
    check_queries_that_see_no_key(256, right=0)
