"""Signatures of the public functions, as tools read them that check types when a program runs."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import get_type_hints

import pytest

PUBLIC = (
    "hopper_attention",
    "hopper_attention.distributed",
    "hopper_attention.flash_attn_interface",
    "hopper_attention.mods",
    "hopper_attention.quantization",
    "hopper_attention.reference",
)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_annotation_is_a_type_that_can_be_found(module: str) -> None:
    public = import_module(module)
    functions = [x for x in map(public.__dict__.get, public.__all__) if inspect.isfunction(x)]
    assert functions
    for function in functions:
        hints = get_type_hints(function)
        assert (
            "return" in hints and hints.keys() - {"return"} <= inspect.signature(function).parameters.keys()
        )
        assert inspect.getdoc(function), function.__name__
