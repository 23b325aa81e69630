"""Several copies in one launch on the GPU, against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from hopper_attention.launch.copies import ANY_CTAS, copy_known, find

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("most_ctas", [ANY_CTAS, 3])
def test_some_heads_of_all_rows_go_where_they_belong(most_ctas: int) -> None:
    device = torch.device("cuda")
    shapes = (2, 2, 1000, 4, 8, 128), (1, 2, 77, 4, 2, 64), (1, 1, 8192, 4, 4, 128)
    targets, sources, wanted = [], [], []
    for shape in shapes:
        given = torch.randn(shape, device=device, dtype=torch.bfloat16)
        into = torch.zeros_like(given)
        batch, chunks, rows, ranks, *rest = shape
        columns = rest[0] * rest[1]
        for rank in range(ranks):
            views = (x.view(batch, chunks, rows, ranks * columns) for x in (given, into))
            source, target = (x[..., rank * columns : (rank + 1) * columns] for x in views)
            sources.append(source)
            targets.append(target)
        wanted.append((into, given))
    assert find(torch.bfloat16, len(targets), device) is not None
    copy_known(targets, sources, True, most_ctas)
    assert all(torch.equal(into, given) for into, given in wanted)
