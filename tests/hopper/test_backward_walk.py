"""The backward kernels whose key tiles walk back over all query heads that share their keys, run from their PTX without
a GPU, against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hopper.backward.config import BackwardConfig, select_backward_config, validate_backward_config
from hopper.backward.written_configs import select_one_tile_config
from hopper.config import SMEM_BYTES
from tests.compile_pool import usage_of_each
from tests.hopper.hopper_machine import AT_ONCE
from tests.hopper.test_backward_divided_heads import Case
from tests.hopper.test_backward_windows import LATE
from tests.hopper.wgmma_hazards import find_hazards
from tests.ptx import ptx_of

HEAD_DIMS = 64, 96, 128


def walking(dtype: str, head_dim: int, divides_heads: bool = False) -> BackwardConfig:
    config = select_backward_config(dtype, head_dim, head_dim, True)
    return replace(config, walks_back=True, divides_heads=divides_heads)


COMPILED = tuple(
    itertools.starmap(walking, itertools.product(("bfloat16", "float16"), HEAD_DIMS, (False, True)))
)


def test_no_register_is_spilled() -> None:
    usages = usage_of_each(COMPILED)
    assert {c.name: usage for c, usage in usages.items() if usage.local_bytes} == {}
    assert all(usage.shared_bytes <= SMEM_BYTES for usage in usages.values()) and len(usages) == 12


@pytest.mark.parametrize("timing", [AT_ONCE, LATE], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "seqlens", "heads", "parts", "batch"),
    [
        ("bfloat16", 64, (131, 131), (4, 1), 1, 2),
        ("float16", 64, (300, 150), (5, 1), 1, 1),
        ("bfloat16", 96, (150, 300), (8, 2), 1, 1),
        ("bfloat16", 128, (257, 257), (4, 1), 1, 1),
        ("float16", 128, (70, 200), (7, 1), 1, 2),
        ("bfloat16", 128, (200, 70), (8, 2), 1, 1),
        ("bfloat16", 72, (129, 129), (4, 1), 1, 1),
        # One head is what any kernel may be given.
        ("float16", 128, (130, 130), (2, 2), 1, 1),
        # Of divided heads each part walks back.
        ("bfloat16", 128, (130, 259), (8, 1), 2, 1),
        ("float16", 64, (129, 129), (8, 1), 2, 2),
    ],
)
def test_gradients(dtype, head_dim, seqlens, heads, parts, batch, timing) -> None:
    case = Case(dtype, seqlens, heads, head_dim, batch, True)
    native = next(size for size in HEAD_DIMS if size >= head_dim)
    case.check(case.run(walking(dtype, native, parts > 1), parts, timing))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_has_as_many_products_and_no_hazards(head_dim: int) -> None:
    config = walking("bfloat16", head_dim)
    count, hazards = find_hazards(ptx_of(config))
    assert hazards == [] and count == find_hazards(ptx_of(replace(config, walks_back=False)))[0]


def test_what_it_cannot_have_is_named() -> None:
    message = "walks_back is True in hopper_bwd_.*, allowed: causal, plain, in any order, to head_dim 128"
    for config in (
        select_backward_config("bfloat16", 128, 128, False),
        select_backward_config("bfloat16", 128, 128, True, ordered=True),
        select_backward_config("bfloat16", 128, 128, True, window=True),
        select_backward_config("bfloat16", 64, 64, True, layout="varlen"),
        select_backward_config("bfloat16", 64, 64, True, softcap=True),
        select_backward_config("bfloat16", 256, 256, True),
        select_one_tile_config("float16", 64, 64, True),
    ):
        with pytest.raises(ValueError, match=message):
            validate_backward_config(replace(config, walks_back=True))
    config = walking("bfloat16", 128, divides_heads=True)
    validate_backward_config(config)
    assert config.name.endswith("_divided_back")
    assert config.smem_bytes == select_backward_config("bfloat16", 128, 128, True).smem_bytes
