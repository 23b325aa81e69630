"""Pieces of tensors in one launch on the GPU, against PyTorch's copies."""

from __future__ import annotations

import pytest
import torch

from hopper_attention.launch.copies import Piece, behind_sources, find, is_in_vectors

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """One, as it is met."""


@pytest.mark.parametrize("most_ctas", [1 << 16, 3])
def test_some_heads_of_all_rows_go_where_they_belong(most_ctas: int) -> None:
    device, ranks, chunks = torch.device("cuda"), 4, 2
    shapes = (2, 2000, 32, 128), (1, 154, 8, 64), (1, 8192, 16, 128)
    sources, pieces, wanted = [], [], []
    for shape in shapes:
        batch, rows, heads, head_dim = shape
        # Every second row of a tensor with more columns, as of Q in a projection of Q, K and V.
        given = torch.randn(batch, 2 * rows, 3 * heads, head_dim, device=device, dtype=torch.bfloat16)
        x = given[:, ::2, heads : 2 * heads]
        columns, chunk = heads // ranks * head_dim, rows // chunks
        into = torch.zeros(batch, chunks, chunk, heads * head_dim, device=device, dtype=x.dtype)
        targets = into.split(columns, 3)
        of_source = [Piece(t, r * columns, chunk * x.stride(1)) for r, t in enumerate(targets)]
        assert is_in_vectors(x, of_source)
        sources.append(x)
        pieces.append(of_source)
        wanted.append((into, x.reshape(into.shape)))
    launcher = find(torch.bfloat16, len(sources), ranks, device)
    assert launcher is not None
    launcher(sources, behind_sources(pieces, most_ctas))
    assert all(torch.equal(into, x) for into, x in wanted)
