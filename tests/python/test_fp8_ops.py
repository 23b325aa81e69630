"""``quantize_qkv`` and ``flash_attn_quantized_func`` under torch.compile, export and opcheck."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from hopper_attention import (
    Fp8Quantization,
    flash_attn_fp8_func,
    flash_attn_quantized_func,
    quantize_qkv,
)
from hopper_attention.fp8_ops import Options, put_together, take_apart
from hopper_attention.quantization import QuantizedQKV, from_descales

OPS = torch.ops.hopper_attention
DEFAULT = Fp8Quantization()
NO_SCHEMA_CHECK = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""What opcheck can do with FP8 inputs: its schema test multiplies them, which torch cannot do on a CPU."""

NO_GRADIENT_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor")
"""What it can do with FP8 results: its test of dispatch compares them, and takes their gradients."""

OPTIONS = {
    "default": DEFAULT,
    "blocks": Fp8Quantization(block_q=32, block_k=64, seed=5, smooth_v=True),
    "head": Fp8Quantization(granularity="head", smooth_k=True),
    "tensor": Fp8Quantization(granularity="tensor", rotate_v=True, smooth_v=True),
    "not rotated": Fp8Quantization(rotate=False, smooth_k=True, block_k=96),
}
EVERY_OPTION = pytest.mark.parametrize("c", OPTIONS.values(), ids=OPTIONS.keys())
COMPILED = "blocks", "tensor"
EVERY_OPTION_COMPILED = pytest.mark.parametrize(
    ("c", "dynamic"),
    [(DEFAULT, False), *((OPTIONS[name], True) for name in COMPILED)],
    ids=["default, static", *COMPILED],
)


def qkv(seqlen_q: int = 70, seqlen_k: int = 130) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, seqlen_q, 4, 64), (2, seqlen_k, 2, 64), (2, seqlen_k, 2, 32)
    q, k, v = (torch.randn(shape, generator=generator).half() for shape in shapes)
    return q, k, v


def in_two_steps(q: Tensor, k: Tensor, v: Tensor, c: Fp8Quantization = DEFAULT) -> Tensor:
    return flash_attn_quantized_func(quantize_qkv(q * 2, k, v, quantization=c), causal=True) + 1


def assert_same(found: QuantizedQKV, expected: QuantizedQKV) -> None:
    (tensors, *others), (expected_tensors, *expected_others) = take_apart(found), take_apart(expected)
    assert others == expected_others and found.quantization == expected.quantization
    for x, y in zip(tensors, expected_tensors, strict=True):
        assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


# opcheck


@EVERY_OPTION
@pytest.mark.parametrize("seqlen_k", [130, 0])
def test_opcheck_of_the_quantizer(c: Fp8Quantization, seqlen_k: int) -> None:
    options = Options.of(replace(c, block_k=c.keys_per_block(64, 32, seqlen_k)))
    arguments = (*qkv(seqlen_k=seqlen_k), *options, None)
    torch.library.opcheck(OPS.quantize.default, arguments, test_utils=NO_GRADIENT_CHECK)


@EVERY_OPTION
def test_opcheck_of_attention_on_its_result(c: Fp8Quantization) -> None:
    tensors, *others = take_apart(quantize_qkv(*qkv(), quantization=c))
    for two_level, wants_lse in ((False, True), (True, True), (False, False)):
        of_call = 0.2, True, None, two_level
        arguments = (*tensors, wants_lse, *(x for part in others for x in part), *of_call)
        torch.library.opcheck(OPS.forward_quantized.default, arguments, test_utils=NO_SCHEMA_CHECK)


def test_what_is_taken_apart_is_put_together() -> None:
    e4m3 = [x.to(torch.float8_e4m3fn) for x in qkv()]
    rows = from_descales(*e4m3, torch.full((2, 2), 0.5), None, None, torch.bfloat16)
    for parts in (quantize_qkv(*qkv(), quantization=Fp8Quantization(smooth_v=True, seed=3)), rows):
        tensors, layout, options = take_apart(parts)
        assert put_together(tensors, layout, options.quantization()) == parts
        assert_same(put_together(tensors, layout, options.quantization()), parts)
    assert Options.of(Fp8Quantization()).quantization() == Fp8Quantization()


def test_tensors_with_descales_are_attended_to_by_the_operator() -> None:
    e4m3 = [x.to(torch.float8_e4m3fn) for x in qkv()]
    rows = from_descales(*e4m3, torch.full((2, 2), 0.5), None, None, torch.bfloat16)
    compiled = torch.compile(flash_attn_quantized_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(rows), flash_attn_quantized_func(rows))


# torch.compile


@EVERY_OPTION_COMPILED
def test_both_steps_compile_as_one_graph(c: Fp8Quantization, dynamic: bool) -> None:
    torch._dynamo.reset()
    function = partial(in_two_steps, c=c)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert torch.equal(compiled(*qkv()), function(*qkv()))
    assert torch.equal(compiled(*qkv(33, 300)), function(*qkv(33, 300)))


@EVERY_OPTION_COMPILED
def test_quantized_tensors_go_in_and_out_of_a_graph(c: Fp8Quantization, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = partial(torch.compile, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    expected = quantize_qkv(*qkv(), quantization=c)
    assert_same(compiled(partial(quantize_qkv, quantization=c))(*qkv()), expected)
    attend = partial(flash_attn_quantized_func, causal=True, return_attn_probs=True)
    for x, y in zip(compiled(attend)(expected), attend(expected), strict=True):
        assert torch.equal(x, y)


def test_a_length_makes_no_new_graph_but_where_blocks_change() -> None:
    """A single block, of up to 128 keys, is a case of its own, and above 4096 keys blocks are wider at head_dim 64."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(in_two_steps, fullgraph=True, dynamic=True, backend=count)
    for seqlen_k in (5, 9, 64, 128, 200, 257, 300, 511, 1000, 2048, 3000, 4096):
        q, k, v = (x[:1, :, :2] for x in qkv(5, seqlen_k))
        assert torch.equal(compiled(q, k, v), in_two_steps(q, k, v))
    assert len(graphs) == 2
    q, k, v = (x[:1, :, :2] for x in qkv(5, 4100))
    assert torch.equal(compiled(q, k, v), in_two_steps(q, k, v))
    assert len(graphs) == 3


def test_a_compiled_call_that_autograd_would_record() -> None:
    """Quantization has no gradient, compiled or not."""
    q, k, v = (x.requires_grad_() for x in qkv())
    compiled = torch.compile(in_two_steps, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    assert not out.requires_grad and torch.equal(out, in_two_steps(q, k, v))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", [flash_attn_fp8_func, in_two_steps])
def test_export(function, strict: bool) -> None:
    """One program for all lengths; of two steps, for those that have the same blocks, and more than one."""

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return function(q, k, v)

    first, last = (129, 4096) if function is in_two_steps else (2, 100_000)
    queries, keys = torch.export.Dim("queries"), torch.export.Dim("keys", min=first, max=last)
    shapes = {"q": {1: queries}, "k": {1: keys}, "v": {1: keys}}
    program = torch.export.export(Attention(), qkv(), dynamic_shapes=shapes, strict=strict)
    assert torch.equal(program.module()(*qkv(9, 400)), function(*qkv(9, 400)))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    expected = {"quantize", "forward_quantized"} if function is in_two_steps else {"forward_fp8_of_16_bits"}
    assert {f"hopper_attention.{name}.default" for name in expected} <= targets
