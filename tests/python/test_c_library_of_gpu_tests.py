"""The kernels that GPU tests link into a C library are those that their calls ask for, by rules as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_attention import c_library
from tests import c_library as c
from tests.c_library import Library
from tests.gpu import c_calls
from tests.gpu.c_calls import KERNELS
from tests.gpu.test_c_library import DENSE
from tests.gpu.test_c_library_features import LENGTHS, packed_call

pytestmark = pytest.mark.skipif(not c.COMPILER, reason="there is no C compiler here")

PACKED = ("", True, -1), ("", False, -1), ("_fp8", True, -1), ("_fp8", False, 100)
"""Kinds of packed calls, whether causal, and the left side of a window."""


class KernelIsKnown(Exception):
    """Ends a call where it would go on to memory of a GPU."""


@pytest.fixture
def asked_by(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Library], Any]], str]:
    """The kernel that a call asks a library for; the library has none."""
    c_library.write_sources(tmp_path, ())
    library = Library(c.link_library(tmp_path))
    asked: list[str] = []

    def note(_: Library, kernel: str) -> None:
        asked.append(kernel)
        raise KernelIsKnown

    def find(call: Callable[[Library], Any]) -> str:
        with pytest.raises(KernelIsKnown):
            call(library)
        return asked[-1]

    monkeypatch.setattr(c_calls, "require", note)
    return find


def linked() -> set[str]:
    return {config.name for config in c_library.chosen_kernels(KERNELS)}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def test_of_dense_calls(asked_by) -> None:
    asked = set()
    for dtype, (batch, _), (rows, keys), (heads, kv_heads), head_dim, causal, (left, right) in DENSE:
        q = empty(batch, rows, heads, head_dim, dtype=dtype)
        k = empty(batch, keys, kv_heads, head_dim, dtype=dtype)
        options = {"causal": causal, "window_left": left, "window_right": right}
        asked.add(asked_by(partial(c_calls.dense_call, q=q, k=k, v=k, **options)))
    assert len(linked()) > 50 and len(asked) == 6 and asked <= linked()


@pytest.mark.parametrize(("kind", "causal", "window_left"), PACKED)
def test_of_packed_calls(asked_by, kind: str, causal: bool, window_left: int) -> None:
    tensors = empty(sum(LENGTHS), 4, 128), *(empty(sum(LENGTHS), 2, 128) for _ in "kv")
    options = {"causal": causal, "window_left": window_left}
    found = asked_by(partial(packed_call, qkv=tensors, kind=kind, **options))
    assert found in linked() and "varlen" in found and ("e4m3" in found) == bool(kind)
