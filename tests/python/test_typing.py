"""What a type checker makes of the public functions: a tensor, or a pair where the LSE is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import hopper_attention

mypy = pytest.importorskip("mypy.api", reason="mypy is not installed: pip install 'hopper-attention[dev]'")

TORCH = """
from typing import Any

class Tensor: ...
class dtype: ...
class device: ...

def __getattr__(name: str) -> Any: ...
"""
"""torch's own types take mypy half a minute to read. Only that these are classes matters here."""

CALLS = """
from typing import assert_type
from torch import Tensor
import hopper_attention as h
from hopper_attention import flash_attn_interface as fa3

Pair = tuple[Tensor, Tensor]

def check(x: Tensor, parts: h.quantization.QuantizedQKV, flag: bool) -> None:
    assert_type(h.flash_attn_func(x, x, x), Pair)  # wrong on purpose
    assert_type(h.flash_attn_func(x, x, x), Tensor)
    assert_type(h.flash_attn_func(x, x, x, 0.1, True, window_size=(None, 0), return_attn_probs=False), Tensor)
    assert_type(h.flash_attn_func(x, x, x, causal=True, return_attn_probs=True), Pair)
    assert_type(h.flash_attn_func(x, x, x, return_attn_probs=flag), Tensor | Pair)
    assert_type(fa3.flash_attn_func(x, x, x, num_splits=0, pack_gqa=True), Tensor)
    assert_type(h.flash_attn_qkvpacked_func(x), Tensor)
    assert_type(h.flash_attn_qkvpacked_func(x, return_attn_probs=True, backend="reference"), Pair)
    assert_type(h.flash_attn_qkvpacked_func(x, return_attn_probs=flag), Tensor | Pair)
    assert_type(h.flash_attn_kvpacked_func(x, x), Tensor)
    assert_type(h.flash_attn_kvpacked_func(x, x, return_attn_probs=True), Pair)
    assert_type(h.flash_attn_kvpacked_func(x, x, return_attn_probs=flag), Tensor | Pair)
    assert_type(h.flash_attn_varlen_func(x, x, x, x, x, 1, 1), Tensor)
    assert_type(fa3.flash_attn_varlen_func(x, x, x, x, x, 1, 1, x, x, return_attn_probs=True), Pair)
    assert_type(h.flash_attn_varlen_func(x, x, x, x, x, 1, 1, None, x, return_attn_probs=flag), Tensor | Pair)
    assert_type(h.flash_attn_varlen_qkvpacked_func(x, x, 1), Tensor)
    assert_type(h.flash_attn_varlen_qkvpacked_func(x, x, 1, return_attn_probs=True), Pair)
    assert_type(h.flash_attn_varlen_kvpacked_func(x, x, x, x, 1, 1, window_size=(3, None)), Tensor)
    assert_type(h.flash_attn_varlen_kvpacked_func(x, x, x, x, 1, 1, return_attn_probs=flag), Tensor | Pair)
    assert_type(h.flash_attn_with_kvcache(x, x, x, x, x, cache_seqlens=7, causal=True), Tensor)
    assert_type(fa3.flash_attn_with_kvcache(x, x, x, cache_seqlens=x, return_softmax_lse=True), Pair)
    assert_type(h.flash_attn_with_kvcache(x, x, x, out=x, return_softmax_lse=flag), Tensor | Pair)
    assert_type(h.apply_rotary(x, x, x, x), Pair)
    assert_type(h.flash_attn_combine(x, x), Pair)
    assert_type(h.flash_attn_combine(x, x, return_lse=False), Tensor)
    assert_type(h.flash_attn_combine(x, x, return_lse=flag), Tensor | Pair)
    assert_type(h.flash_attn_fp8_func(x, x, x), Tensor)
    assert_type(h.flash_attn_fp8_func(x, x, x, None, True, return_attn_probs=True), Pair)
    assert_type(h.flash_attn_fp8_func(x, x, x, None, True, True), Pair)
    assert_type(h.flash_attn_fp8_func(x, x, x, None, True, flag), Tensor | Pair)
    assert_type(h.flash_attn_quantized_func(parts, None, True), Tensor)
    assert_type(h.flash_attn_quantized_func(parts, return_attn_probs=True), Pair)
    assert_type(h.flash_attn_quantized_func(parts, None, True, True), Pair)
    assert_type(h.flash_attn_quantized_func(parts, None, True, flag), Tensor | Pair)
"""


CONFIG = """
[mypy]
mypy_path = {folder}:{library}
python_version = 3.11
follow_imports = silent
ignore_missing_imports = true

[mypy-torch]
follow_imports = silent

[mypy-torch.*,hopper.*,cute_kernels.*,filelock.*,platformdirs.*]
follow_imports = skip
"""
"""The library is read for its signatures; whether it is right inside is what ``make lint`` asks."""


def test_results_have_their_types(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    config, calls = tmp_path / "mypy.ini", tmp_path / "calls.py"
    config.write_text(CONFIG.format(folder=tmp_path, library=Path(hopper_attention.__file__).parents[1]))
    calls.write_text(CALLS)
    report, errors, _ = mypy.run(
        ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(calls)]
    )
    found = [line.partition(": ")[2] for line in report.splitlines() if ": error: " in line]
    wrong = 'error: Expression is of type "Tensor", not "tuple[Tensor, Tensor]"  [assert-type]'
    assert found == [wrong] and not errors, report + errors
