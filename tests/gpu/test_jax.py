"""Attention for JAX on the kernels: against float64, and against PyTorch's call of the same kernels."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

# JAX would take most of the GPU's memory for itself, of which the other tests need some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")

import jax.numpy as jnp

from hopper_attention import flash_attn_func
from hopper_attention.integrations.jax import flash_attention
from hopper_attention.reference import attention_naive

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "chunks": {"attention_chunk": 64, "causal": True},
    "softcap": {"softcap": 10.0, "causal": True},
    "deterministic": {"causal": True, "deterministic": True},
}
SHAPES = {
    "d64": (2, 300, 333, 4, 2, 64, 64),
    "d128": (2, 257, 640, 4, 1, 128, 128),
    "dv": (1, 64, 200, 2, 2, 192, 128),
}


def draw(dtype: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v = shape
    generator = torch.Generator("cuda").manual_seed(3)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device="cuda", dtype=getattr(torch, dtype))

    q = normal(batch, seqlen_q, heads, head_dim)
    k, v = (normal(batch, seqlen_k, kv_heads, d) for d in (head_dim, head_dim_v))
    return q, k, v, normal(batch, seqlen_q, heads, head_dim_v)


def to_jax(*tensors: torch.Tensor) -> tuple[Any, ...]:
    torch.cuda.synchronize()
    return tuple(jax.dlpack.from_dlpack(x.detach()) for x in tensors)


def to_torch(*arrays: Any) -> tuple[torch.Tensor, ...]:
    jax.block_until_ready(arrays)
    return tuple(torch.from_dlpack(x) for x in arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_jax_gives_what_torch_gives(options: dict[str, Any], shape: tuple[int, ...], dtype: str) -> None:
    q, k, v, dout = draw(dtype, shape)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*inputs, **options, return_attn_probs=True)
    dlse = torch.linspace(-1, 1, lse.numel(), device="cuda").reshape(lse.shape)
    expected = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    call = functools.partial(flash_attention, **options, return_lse=True, backend="hopper")
    results, vjp = jax.vjp(jax.jit(call), *to_jax(q, k, v))
    gradients = jax.jit(vjp)(to_jax(dout, dlse))
    got_out, got_lse = to_torch(*results)
    assert torch.equal(got_out, out) and torch.equal(got_lse, lse)
    dq, dk, dv = to_torch(*gradients)
    # delta loses the gradient of the LSE in another order, and dQ is summed as tiles finish.
    for actual, other in zip((dq, dk, dv), expected, strict=True):
        largest = other.abs().max().item()
        assert (actual - other).abs().max().item() <= 2 * torch.finfo(other.dtype).eps * largest


def test_the_gradient_is_that_of_float64() -> None:
    q, k, v, dout = draw("bfloat16", SHAPES["d128"])
    oracle = [x.double().requires_grad_() for x in (q, k, v)]
    plain, _ = attention_naive(*oracle, causal=True)
    expected = torch.autograd.grad(plain, oracle, dout.double())
    _, vjp = jax.vjp(functools.partial(flash_attention, causal=True), *to_jax(q, k, v))
    for actual, other in zip(to_torch(*vjp(*to_jax(dout))), expected, strict=True):
        error = (actual.double() - other).pow(2).mean().sqrt() / other.pow(2).mean().sqrt()
        assert error.item() < 1e-2


def test_vmap_is_one_launch_over_a_longer_batch() -> None:
    q, k, v, _ = to_jax(*draw("bfloat16", (6, 130, 130, 4, 2, 64, 64)))
    split = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v)]
    mapped = jax.vmap(functools.partial(flash_attention, causal=True))
    assert jnp.array_equal(mapped(*split).reshape(q.shape), flash_attention(q, k, v, causal=True))
    text = jax.jit(mapped).lower(*split).as_text()
    assert text.count("custom_call @hopper_attention") == 1


def test_a_call_is_all_that_xla_launches() -> None:
    """Forward one call, and backward one more and the zeros that dQ is added to, which some XLA make by a fusion."""
    q, k, v, _ = to_jax(*draw("bfloat16", SHAPES["d64"]))

    def launched(function: Any, *arrays: Any) -> tuple[dict[str, int], str]:
        _, _, entry = jax.jit(function).lower(*arrays).compile().as_text().partition("ENTRY")
        kinds = "custom-call", "fusion", "broadcast", "copy", "call"
        return {kind: entry.count(f" {kind}(") for kind in kinds}, entry

    call = functools.partial(flash_attention, causal=True, softcap=9.0, backend="hopper")
    found, entry = launched(call, q, k, v)
    assert found == {"custom-call": 1, "fusion": 0, "broadcast": 0, "copy": 0, "call": 0}, entry

    def gradients(dout: Any, *inputs: Any) -> Any:
        return jax.vjp(call, *inputs)[1](dout)

    found, entry = launched(gradients, q, q, k, v)
    zeros = found.pop("fusion") + found.pop("broadcast")
    assert zeros == 1 and found == {"custom-call": 2, "copy": 0, "call": 0}, entry


def test_programs_in_two_threads() -> None:
    """They share a stream, and so a tile counter."""
    q, k, v, _ = to_jax(*draw("bfloat16", (2, 1024, 1024, 8, 8, 64, 64)))
    calls = [jax.jit(functools.partial(flash_attention, causal=x, backend="hopper")) for x in (True, False)]
    expected = [call(q, k, v) for call in calls]

    def repeat(number: int) -> bool:
        return all(bool(jnp.array_equal(calls[number](q, k, v), expected[number])) for _ in range(50))

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(repeat, (0, 1)))


def test_many_calls_of_one_program_keep_their_counters_apart() -> None:
    q, k, v, _ = to_jax(*draw("bfloat16", SHAPES["d64"]))

    @jax.jit
    def several(q: Any, k: Any, v: Any) -> Any:
        outs = [flash_attention(q * scale, k, v, causal=True) for scale in (1.0, 0.5, 0.25)]
        return jnp.stack(outs)

    expected = jnp.stack([flash_attention(q * s, k, v, causal=True) for s in (1.0, 0.5, 0.25)])
    for _ in range(20):
        assert jnp.array_equal(several(q, k, v), expected)


def test_the_loop_of_a_scan() -> None:
    q, k, v, _ = to_jax(*draw("bfloat16", (1, 128, 128, 2, 2, 64, 64)))

    def layer(x: Any, _: Any) -> Any:
        return flash_attention(x, k, v, causal=True), None

    last, _ = jax.jit(lambda q: jax.lax.scan(layer, q, None, length=8))(q)
    x = q
    for _ in range(8):
        x = flash_attention(x, k, v, causal=True)
    assert jnp.array_equal(last, x)


def test_the_formula_agrees() -> None:
    q, k, v, _ = to_jax(*draw("float16", SHAPES["d64"]))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    by_formula, other = flash_attention(q, k, v, causal=True, return_lse=True, backend="reference")
    assert jnp.abs(out - by_formula).max() < 2e-3
    assert jnp.abs(lse - other).max() < 2e-4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_shard_map_over_two_gpus() -> None:
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    arrays = to_jax(*draw("bfloat16", (4, 256, 256, 4, 2, 128, 128)))
    q, k, v, dout = (jnp.asarray(jax.device_get(x)) for x in arrays)
    mesh = Mesh(jax.devices()[:2], ("x",))
    call = functools.partial(flash_attention, causal=True)
    for spec in (P("x"), P(None, None, "x")):
        parts = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        out, vjp = jax.vjp(jax.jit(parts), q, k, v)
        whole, expected = jax.vjp(call, q, k, v)
        assert jnp.array_equal(jax.device_get(out), jax.device_get(whole))
        for actual, other in zip(vjp(dout), expected(dout), strict=True):
            assert jnp.abs(jax.device_get(actual) - jax.device_get(other)).max() < 2e-2
