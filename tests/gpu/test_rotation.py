"""The kernel of rotary embedding on the GPU, against float64, and what it leaves to torch."""

from __future__ import annotations

import pytest
import torch

from hopper_attention.rotary import apply_rotary
from tests.cute_kernels.test_rotation import check

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """No others than those that are met."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "kv_heads", "half"),
    [
        ((1, 8192, 32, 64), 8, 32),
        ((3, 131, 7, 128), 1, 64),
        ((2, 77, 5, 96), 5, 8),
        ((65, 1, 16, 256), 2, 128),
    ],
)
def test_rows_turn_back_and_forth(
    shape: tuple[int, ...], kv_heads: int, half: int, dtype: torch.dtype, device: str
) -> None:
    """The linear layers' own layout, a gradient with heads before rows, and tables of both dtypes."""
    torch.manual_seed(0)
    batch, seqlen, heads, head_dim = shape
    both = torch.randn(batch, seqlen, (heads + kv_heads) * head_dim, dtype=dtype, device=device)
    q, k = (x.unflatten(-1, (-1, head_dim)) for x in both.split((heads * head_dim, kv_heads * head_dim), -1))
    angles = torch.rand(batch, seqlen, half, device=device) * 6.28
    tables = [x.to(dtype if heads > kv_heads else torch.float32) for x in (angles.cos(), angles.sin())]
    learned = [x.detach().requires_grad_() for x in (q, k)]
    found = apply_rotary(*learned, *tables)
    grads = [torch.randn_like(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in found]
    back = torch.autograd.grad(found, learned, grads)
    for result, grad_of_x, x, grad in zip(found, back, (q, k), grads, strict=True):
        check(result.detach(), x, *tables)
        check(grad_of_x, grad, tables[0], -tables[1])
