"""The backward kernels above head_dim 128 on packed sequences, run from their PTX without a GPU, against float64."""

from __future__ import annotations

import pytest

from tests.hopper.test_backward_packed import UNEVEN, UNSEEN, USED, check


@pytest.mark.parametrize(
    "dtype,head_dim,causal,sequences,heads,sides,ordered",
    [
        ("bfloat16", 192, False, USED, (1, 1), (50, 200), True),
        ("bfloat16", 136, False, UNEVEN, (2, 1), (40, 20), True),
        ("bfloat16", 192, True, UNSEEN, (2, 1), None, True),
    ],
)
def test_gradients_of_packed_sequences(dtype, head_dim, causal, sequences, heads, sides, ordered) -> None:
    check(dtype, head_dim, causal, *sequences, heads, ordered, sides)
