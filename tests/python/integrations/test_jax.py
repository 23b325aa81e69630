"""Attention for JAX without a GPU: values and gradients against float64, and JAX's transformations."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX needs Python 3.11 or newer")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cute_kernels.window import NO_LIMIT
from hopper.backward.config import BackwardConfig
from hopper_attention import compile_cache
from hopper_attention.backends import Target
from hopper_attention.integrations.jax import ffi, flash_attention, formula, kernels, script

# Before JAX looks for devices, which the first test makes it do. Unoptimized programs compile in half the time.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_disable_most_optimizations", True)

SIZES = {"seqlen_q": 5, "seqlen_k": 9, "heads": 4, "kv_heads": 2, "head_dim": 16, "head_dim_v": 8}

MASKS: dict[str, dict[str, Any]] = {
    "causal window": {"causal": True, "window_size": (3, -1), "softmax_scale": 0.7},
    "right side": {"window_size": (None, 2)},
    "chunks": {"attention_chunk": 4},
    "softcap": {"softcap": 1.5, "causal": True},
}


def draw(dtype: Any = jnp.float16, batch: int = 2, **changes: int) -> tuple[jax.Array, ...]:
    s = SIZES | changes
    shapes = (
        (batch, s["seqlen_q"], s["heads"], s["head_dim"]),
        (batch, s["seqlen_k"], s["kv_heads"], s["head_dim"]),
        (batch, s["seqlen_k"], s["kv_heads"], s["head_dim_v"]),
    )
    generator = np.random.default_rng(7)
    return tuple(jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)


class Oracle:
    """Attention in float64 NumPy, written as its definition, and its gradients."""

    def __init__(self, q: Any, k: Any, v: Any, **options: Any) -> None:
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        group = q.shape[2] // k.shape[2]
        self.q, self.group = q, group
        self.k, self.v = (np.repeat(x, group, axis=2) for x in (k, v))
        self.scale = options.get("softmax_scale") or q.shape[3] ** -0.5
        raw = self.scale * np.einsum("bqhd,bkhd->bhqk", q, self.k)
        cap = options.get("softcap", 0.0)
        self.slope = 1.0 - np.tanh(raw / cap) ** 2 if cap else 1.0
        scores = cap * np.tanh(raw / cap) if cap else raw
        scores = np.where(self.visible(q.shape[1], k.shape[1], **options), scores, -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            self.lse = np.logaddexp.reduce(scores, axis=-1)
            self.p = np.where(np.isneginf(self.lse)[..., None], 0.0, np.exp(scores - self.lse[..., None]))
        self.out = np.einsum("bhqk,bkhd->bqhd", self.p, self.v)

    @staticmethod
    def visible(seqlen_q: int, seqlen_k: int, **options: Any) -> np.ndarray:
        place = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        key = np.arange(seqlen_k)
        left, right = (-1 if x is None else x for x in options.get("window_size", (-1, -1)))
        right = 0 if options.get("causal") else right
        seen = np.ones((seqlen_q, seqlen_k), bool)
        seen &= (key >= place - left) | (left < 0)
        seen &= (key <= place + right) | (right < 0)
        chunk = options.get("attention_chunk", 0)
        return seen & (key // chunk == place // chunk) if chunk else seen

    def gradients(self, dout: Any, dlse: Any = 0.0) -> tuple[np.ndarray, ...]:
        dout = np.asarray(dout, np.float64)
        dp = np.einsum("bqhd,bkhd->bhqk", dout, self.v)
        delta = (self.p * dp).sum(-1) - np.asarray(dlse, np.float64)
        ds = self.scale * self.slope * self.p * (dp - delta[..., None])
        dk = np.einsum("bhqk,bqhd->bkhd", ds, self.q)
        dv = np.einsum("bhqk,bqhd->bkhd", self.p, dout)
        dk, dv = (x.reshape(*x.shape[:2], -1, self.group, x.shape[3]).sum(3) for x in (dk, dv))
        return np.einsum("bhqk,bkhd->bqhd", ds, self.k), dk, dv


def assert_close(actual: Any, expected: np.ndarray, dtype: Any, steps: float = 1.0) -> None:
    """Within so many roundings to ``dtype``, of the largest magnitude, and float32's; the same infinities."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite])
    largest = np.abs(expected[finite]).max(initial=0.0)
    eps = float(jnp.finfo(dtype).eps)
    error = np.abs(actual[finite] - expected[finite]).max(initial=0.0)
    assert error <= (steps * eps / 2 + 1e-5) * largest + 1e-7, (error, largest)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_values_and_gradients_are_those_of_float64(options: dict[str, Any]) -> None:
    q, k, v = draw()
    (out, lse), vjp = jax.vjp(lambda *x: flash_attention(*x, **options, return_lse=True), q, k, v)
    oracle = Oracle(q, k, v, **options)
    assert_close(out, oracle.out, q.dtype)
    assert_close(lse, oracle.lse, jnp.float32)
    generator = np.random.default_rng(8)
    dout = jnp.asarray(generator.standard_normal(out.shape), q.dtype)
    dlse = jnp.asarray(generator.standard_normal(lse.shape), jnp.float32)
    for actual, expected in zip(vjp((dout, dlse)), oracle.gradients(dout, dlse), strict=True):
        assert actual.dtype == q.dtype
        assert_close(actual, expected, q.dtype, steps=3)


def test_bfloat16_without_the_lse() -> None:
    q, k, v = draw(jnp.bfloat16)
    out = flash_attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    assert_close(out, Oracle(q, k, v).out, out.dtype)


def test_chunks_of_queries_and_queries_before_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(seqlen_q=7, seqlen_k=4)
    call = functools.partial(flash_attention, causal=True, return_lse=True, softmax_scale=0.31)
    monkeypatch.setattr(formula, "CHUNK_SCORES", 2 * 2 * 4 * 4)  # two rows, so that the last chunk has one
    (out, lse), vjp = jax.vjp(call, q, k, v)
    assert np.array_equal(np.isneginf(lse).any((0, 1)), [True] * 3 + [False] * 4)
    assert not np.any(out[:, :3])
    oracle = Oracle(q, k, v, causal=True, softmax_scale=0.31)
    assert_close(out, oracle.out, q.dtype)
    assert_close(lse, oracle.lse, jnp.float32)
    expected = oracle.gradients(np.ones(out.shape), np.ones(lse.shape))
    for actual, other in zip(vjp((jnp.ones_like(out), jnp.ones_like(lse))), expected, strict=True):
        assert_close(actual, other, q.dtype, steps=3)


def test_one_key_has_no_gradient_but_through_the_lse() -> None:
    q, k, v = draw(seqlen_k=1)
    total = jax.jit(jax.grad(lambda *x: flash_attention(*x).astype(jnp.float32).sum(), (0, 1, 2)))
    dq, dk, dv = total(q, k, v)
    assert not np.any(dq) and not np.any(dk)
    assert np.array_equal(dv, np.full(v.shape, 5.0 * 2))
    through_lse = jax.jit(jax.grad(lambda q: flash_attention(q, k, v, return_lse=True)[1].sum()))(q)
    assert_close(through_lse, np.repeat(np.asarray(k, np.float64), 2, 2).repeat(5, 1) / 4.0, q.dtype)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0)])
def test_lengths_of_zero(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = draw(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert out.shape == (2, seqlen_q, 4, 8) and not np.any(out)
    assert lse.shape == (2, 4, seqlen_q) and np.all(np.isneginf(lse))
    gradients = jax.jit(jax.grad(lambda *x: flash_attention(*x).sum(), (0, 1, 2)))(q, k, v)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert not any(map(np.any, gradients))


def test_jit_traces_once_for_equal_options() -> None:
    traces = []

    @jax.jit
    def call(q: Any, k: Any, v: Any) -> Any:
        traces.append(q.shape)
        return flash_attention(q, k, v, causal=True)

    inputs = draw()
    assert np.array_equal(call(*inputs), flash_attention(*inputs, causal=True))
    call(*inputs)
    assert len(traces) == 1


def test_vmap_adds_to_the_batch() -> None:
    q, k, v = draw(batch=6)
    split = q.reshape(3, 2, *q.shape[1:]), k.reshape(3, 2, *k.shape[1:]), v.reshape(3, 2, *v.shape[1:])

    def loss(*x: Any) -> Any:
        out, lse = flash_attention(*x, causal=True, return_lse=True)
        return (out.astype(jnp.float32) ** 2).sum() + lse.sum()

    gradient = jax.value_and_grad(loss, (0, 1, 2))
    values, gradients = jax.jit(jax.vmap(gradient))(*split)
    whole, expected = jax.jit(gradient)(q, k, v)
    assert np.allclose(values.sum(), whole, rtol=1e-5)
    for actual, other in zip(gradients, expected, strict=True):
        assert np.array_equal(actual.reshape(other.shape), other)


def test_vmap_over_no_samples() -> None:
    q, k, v = (x[:, None][:0] for x in draw())
    gradient = jax.grad(lambda *x: flash_attention(*x)[..., 0].sum(), (0, 1, 2))
    assert jax.vmap(flash_attention)(q, k, v).shape == (0, 1, 5, 4, 8)
    assert [x.shape for x in jax.vmap(gradient, in_axes=(0, None, None))(q, k[:0].sum(0), v[:0].sum(0))] == [
        q.shape,
        (0, *k.shape[1:]),
        (0, *v.shape[1:]),
    ]


def test_vmap_twice_of_some_arguments_at_another_axis() -> None:
    q, k, v = draw(batch=6)
    several = jnp.moveaxis(q.reshape(3, 2, 1, *q.shape[1:]), 1, 4)
    inner = jax.vmap(flash_attention, in_axes=(3, None, None))
    out = jax.vmap(inner, in_axes=(0, None, None))(several, k[:1], v[:1])
    one = [flash_attention(q[i : i + 1], k[:1], v[:1]) for i in range(6)]
    assert np.array_equal(out, jnp.stack(one).reshape(out.shape))
    outer = jax.vmap(inner, in_axes=(0, None, None))
    gradient = jax.eval_shape(jax.grad(lambda k: outer(several, k, v[:1]).sum()), k[:1])
    assert gradient.shape == (1, *k.shape[1:])


def test_shard_map_over_the_batch_of_two_devices() -> None:
    q, k, v = draw()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    assert mesh.size == 2
    call = functools.partial(flash_attention, causal=True, return_lse=True)
    parts = jax.shard_map(call, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"))

    def loss(*x: Any) -> Any:
        out, lse = parts(*x)
        return (out.astype(jnp.float32) ** 2).sum() + lse.sum()

    oracle = Oracle(q, k, v, causal=True)
    (_, lse), gradients = jax.jit(lambda *x: (parts(*x), jax.grad(loss, (0, 1, 2))(*x)))(q, k, v)
    assert len(lse.sharding.device_set) == 2
    assert_close(lse, oracle.lse, jnp.float32)
    expected = oracle.gradients(2 * oracle.out, np.ones(oracle.lse.shape))
    for actual, other in zip(gradients, expected, strict=True):
        assert_close(actual, other, q.dtype, steps=4)


def test_gradients_of_keys_that_each_device_has_whole() -> None:
    q, k, v = draw()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    specs = {"in_specs": (P(None, None, "x"), P(), P()), "out_specs": P(None, None, "x")}
    parts = jax.shard_map(functools.partial(flash_attention, causal=True), mesh=mesh, **specs)
    # Each device has its own heads of Q, and all of K and V: those heads read them from the first on.
    each = q.shape[2] // mesh.size
    oracles = [Oracle(q[:, :, i * each : (i + 1) * each], k, v, causal=True) for i in range(mesh.size)]
    gradients = jax.grad(lambda *x: parts(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)
    expected = [x.gradients(np.ones(x.out.shape), np.zeros(x.lse.shape)) for x in oracles]
    assert_close(gradients[0], np.concatenate([x[0] for x in expected], 2), q.dtype, steps=4)
    for actual, summands in zip(gradients[1:], list(zip(*expected, strict=True))[1:], strict=True):
        assert_close(actual, sum(summands), q.dtype, steps=4)


def test_a_window_that_jax_traces_is_named() -> None:
    q, k, v = draw()
    with pytest.raises(TypeError, match=r"window_size is \(.*, 0\), allowed: a pair \(left, right\) of ints"):
        jax.jit(lambda left: flash_attention(q, k, v, window_size=(left, 0)))(3)


def test_ranks_that_are_not_promoted() -> None:
    q, k, v = draw()
    options = {"window_size": (7, 2), "attention_chunk": 9, "softcap": 2.0, "return_lse": True}
    with jax.numpy_rank_promotion("raise"):
        (out, lse), vjp = jax.vjp(functools.partial(flash_attention, **options), q, k, v)
        vjp((out, lse))
    oracle = Oracle(q, k, v, **{name: x for name, x in options.items() if name != "return_lse"})
    assert_close(out, oracle.out, q.dtype)


def test_the_page_runs_as_it_stands() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "integrations" / "jax.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert_close(names["out"], Oracle(*(names[x] for x in "qkv")).out, jnp.bfloat16)


def test_gradients_are_of_first_order_and_reverse_mode() -> None:
    q, k, v = draw()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(flash_attention, (q, k, v), (q, k, v))

    def loss(q: jax.Array) -> jax.Array:
        return (flash_attention(q, k, v).astype(jnp.float32) ** 2).sum()

    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum())(q)
    # A forward pass that is made again is no derivative of one.
    assert jnp.array_equal(jax.grad(jax.checkpoint(loss))(q), jax.grad(loss)(q))


def test_a_gpu_that_is_not_there_is_said_without_what_jax_has_not() -> None:
    with pytest.raises(ValueError, match="not an NVIDIA GPU; allowed here: 'reference' or None"):
        flash_attention(*draw(), backend="hopper")


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no array": (
        {"q": np.zeros((1, 2, 2, 8), np.float16)},
        TypeError,
        "q is a ndarray, allowed: a jax.Array",
    ),
    "dtype": ({"q": jnp.zeros((1, 2, 2, 8))}, TypeError, "q has dtype float32, allowed: float16, bfloat16"),
    "mixed": (
        {"k": jnp.zeros((1, 2, 2, 8), jnp.bfloat16)},
        TypeError,
        "k has dtype bfloat16, allowed: the dtype of q, float16",
    ),
    "dimensions": ({"q": jnp.zeros((2, 2, 8), jnp.float16)}, ValueError, "q has 3 dimensions"),
    "heads": ({"q": jnp.zeros((1, 2, 3, 8), jnp.float16)}, ValueError, "q has 3 heads and k has 2"),
    "head_dim": (
        {x: jnp.zeros((1, 2, 2, 12), jnp.float16) for x in "qkv"},
        ValueError,
        "head_dim of q is 12, allowed: multiples of 8",
    ),
    "head_dim_v": ({"v": jnp.zeros((1, 2, 2, 264), jnp.float16)}, ValueError, "head_dim_v.* is 264"),
    "scale": ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0"),
    "window": ({"window_size": (-2, 0)}, ValueError, "window_size is"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
    "backend": ({"backend": "triton"}, ValueError, "backend is 'triton'"),
    "not here": ({"backend": "hopper"}, ValueError, "backend is 'hopper', but cpu is not an NVIDIA GPU"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_what_is_wrong(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = {name: jnp.zeros((1, 2, 2, 8), jnp.float16) for name in "qkv"}
    with pytest.raises(error, match=message):
        flash_attention(**inputs | changes)
    options = {name: value for name, value in changes.items() if name not in inputs}
    arrays = inputs | {name: value for name, value in changes.items() if name in inputs}
    if "q" in changes and isinstance(changes["q"], np.ndarray):
        return  # jit makes an array of it
    with pytest.raises(error, match=message):
        jax.jit(functools.partial(flash_attention, **options))(**arrays)


def test_what_was_checked_before_is_not_taken_for_what_equals_it() -> None:
    q, k, v = draw()
    flash_attention(q, k, v, softmax_scale=1.0, window_size=(1, 0), attention_chunk=1)
    for changes, error, message in (
        ({"softmax_scale": True}, TypeError, "softmax_scale"),
        ({"attention_chunk": True}, TypeError, "attention_chunk"),
        ({"window_size": [1, 0, 0]}, (TypeError, ValueError), "window_size"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    ):
        given: dict[str, Any] = {"softmax_scale": 1.0, "window_size": (1, 0), "attention_chunk": 1} | changes
        with pytest.raises(error, match=message):
            flash_attention(q, k, v, **given)
    with pytest.raises(TypeError, match="k has dtype bfloat16"):
        flash_attention(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(TypeError, match="v is a ndarray"):
        flash_attention(q, k, np.asarray(v))
    assert flash_attention(q, k, v, window_size=[1, 0]).shape == (2, 5, 4, 8)


def test_a_traced_scale_is_named() -> None:
    q, k, v = draw()
    with pytest.raises(TypeError, match=r"softmax_scale is a .*Tracer"):
        jax.jit(lambda scale: flash_attention(q, k, v, softmax_scale=scale))(0.5)


class FakeKernels:
    """Kernels of a Hopper GPU in NumPy, which XLA calls on the CPU as it calls the others on a GPU.

    They are strict about what they are given, and keep what is not a tensor.
    """

    def __init__(self) -> None:
        self.options: dict[str, tuple[Any, ...]] = {}

    def get(self, config: Any) -> Any:
        step = getattr(config, "step", "")
        name = step or ("backward" if isinstance(config, BackwardConfig) else "forward")
        return functools.partial(getattr(self, name), config)

    @staticmethod
    def views(*tensors: Any) -> list[np.ndarray]:
        """The memory of TVM FFI's tensors."""
        assert all(x.is_contiguous() for x in tensors)
        return [
            np.ctypeslib.as_array(
                ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_uint8)),
                (math.prod(x.shape) * np.dtype(str(x.dtype)).itemsize,),
            )
            .view(str(x.dtype))
            .reshape(tuple(x.shape))
            for x in tensors
        ]

    def oracle(self, q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> Oracle:
        scale, left, right, chunk, softcap = (*options, *(None,) * 5)[:5]
        kind: dict[str, Any] = {"softmax_scale": scale, "causal": self.causal, "softcap": softcap or 0.0}
        if left is not None:
            kind["window_size"] = left, (-1 if right == NO_LIMIT else right)
        return Oracle(q, k, v, **kind | {"attention_chunk": chunk or 0})

    def forward(self, config: Any, *arguments: Any) -> None:
        q, k, v, out, lse, counter = self.views(*arguments[:6])
        self.options[config.name] = arguments[6:]
        assert not counter.any()
        self.causal = config.causal
        scale, *others = arguments[6:]
        # behind the window: a plan, its sequences, pages, left pads; then the cap
        picked = (scale, *others[:3], others[7]) if len(others) > 1 else (scale,)
        oracle = self.oracle(q, k, v, picked)
        out[...], lse[...] = oracle.out, oracle.lse

    def prepare(self, config: Any, *arguments: Any) -> None:
        out, dout, lse, lse_log2, delta, sums = self.views(*arguments)
        sums[...] = 0.0
        rows = lse.shape[2]
        lse_log2[...], delta[...] = np.inf, 0.0
        lse_log2[:, :, :rows] = np.where(np.isneginf(lse), np.inf, lse / math.log(2))
        delta[:, :, :rows] = np.einsum("bqhd,bqhd->bhq", dout.astype(float), out.astype(float))

    def backward(self, config: Any, *arguments: Any) -> None:
        q, k, v, dout, lse_log2, delta, sums, dk, dv, counter = self.views(*arguments[:10])
        self.options[config.name] = arguments[10:]
        assert not counter.any() and not sums.any()
        assert lse_log2.shape[2] % config.tile_m == 0
        scale, *others = arguments[10:]
        oracle = self.oracle(q, k, v, (scale, *others[:3], others[5]) if len(others) > 1 else (scale,))
        rows = q.shape[1]
        # delta is what rowsum(dout * out) and the gradient of the LSE come to
        plain = np.einsum("bqhd,bqhd->bhq", dout.astype(float), oracle.out)
        dq, dk[...], dv[...] = oracle.gradients(dout, plain - delta[:, :, :rows])
        sums.reshape(-1)[: dq.size] = dq.reshape(-1)

    def finish(self, config: Any, *arguments: Any) -> None:
        sums, dq = self.views(*arguments[:2])
        assert arguments[2:] == (pytest.approx(0.25),)
        dq[...] = sums.reshape(-1)[: dq.size].reshape(dq.shape)


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    fake = FakeKernels()
    for name in ("get_forward", "get_backward"):
        monkeypatch.setattr(compile_cache, name, fake.get)
    monkeypatch.setattr(ffi, "PLATFORM", "cpu")
    monkeypatch.setattr(ffi, "_registered", set())
    monkeypatch.setattr(ffi, "PREFIX", f"fake{id(fake)}")
    gpu = kernels.Gpu(Target("an H200", (9, 0), assume_installed=True), 132)
    monkeypatch.setattr(kernels, "find_gpu", lambda: gpu)
    jax.clear_caches()
    return fake


KERNEL_CALLS: dict[str, tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "plain": ({"causal": True}, (0.25,), (0.25,)),
    "window and softcap": (
        {"window_size": (3, -1), "softcap": 1.5, "deterministic": True},
        (0.25, 3, NO_LIMIT, *(None,) * 5, 1.5, *(None,) * 4),
        (0.25, 3, NO_LIMIT, *(None,) * 3, 1.5, *(None,) * 3),
    ),
}


@pytest.mark.parametrize(("options", "forward", "backward"), KERNEL_CALLS.values(), ids=KERNEL_CALLS)
def test_kernels_get_what_they_take(
    options: dict[str, Any], forward: tuple[Any, ...], backward: tuple[Any, ...], fake_kernels: FakeKernels
) -> None:
    q, k, v = draw()
    call = functools.partial(flash_attention, **options, return_lse=True, backend="hopper")
    mapped = jax.vmap(call)  # over the batch, of which each has one
    (out, lse), vjp = jax.vjp(mapped, *(x[:, None] for x in (q, k, v)))
    oracle = Oracle(q, k, v, **options)
    assert_close(out[:, 0], oracle.out, q.dtype)
    assert_close(lse[:, 0], oracle.lse, jnp.float32)
    generator = np.random.default_rng(8)
    dout = jnp.asarray(generator.standard_normal(out.shape), q.dtype)
    dlse = jnp.asarray(generator.standard_normal(lse.shape), jnp.float32)
    expected = oracle.gradients(dout[:, 0], dlse[:, 0])
    for actual, other in zip(vjp((dout, dlse)), expected, strict=True):
        assert_close(actual[:, 0], other, q.dtype, steps=3)
    (got_forward,) = (x for name, x in fake_kernels.options.items() if "fwd" in name)
    (got_backward,) = (x for name, x in fake_kernels.options.items() if "bwd" in name)
    *got_forward, ctas = got_forward
    assert tuple(got_forward) == forward and ctas > 0 and ctas % 132 == 0
    assert got_backward[: len(backward)] == backward and got_backward[len(backward) :] in ((), (132,))


def test_kernels_inside_shard_map(fake_kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tile counters may be made here first; native code points to them for good.
    script._kept.append(counters := {})
    monkeypatch.setattr(script, "_counters", counters)
    q, k, v = draw()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    call = functools.partial(flash_attention, causal=True, backend="hopper")
    # K and V are whole on each device: buffers of one kind meet those of the other.
    parts = jax.shard_map(call, mesh=mesh, in_specs=(P(None, "x"), P(), P()), out_specs=P(None, "x"))
    q = q[:, :4]
    oracles = [Oracle(x, k, v, causal=True) for x in (q[:, :2], q[:, 2:])]
    assert_close(jax.jit(parts)(q, k, v), np.concatenate([x.out for x in oracles], 1), q.dtype)
    gradients = jax.grad(lambda *x: parts(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)
    ones = [x.gradients(np.ones(x.out.shape), np.zeros(x.lse.shape)) for x in oracles]
    assert_close(gradients[0], np.concatenate([x[0] for x in ones], 1), q.dtype, steps=4)
    for actual, first, second in zip(gradients[1:], *(x[1:] for x in ones), strict=True):
        assert_close(actual, first + second, q.dtype, steps=4)


def test_sizes_that_no_kernel_counts(fake_kernels: FakeKernels) -> None:
    q = jax.ShapeDtypeStruct((1, 4, 2, 16), jnp.float16)
    k = jax.ShapeDtypeStruct((1, 2**31, 2, 16), jnp.float16)
    with pytest.raises(NotImplementedError, match="seqlen_k is 2147483648"):
        jax.eval_shape(flash_attention, q, k, k)


def test_without_jax_tvm_ffi_a_gpu_is_told(
    fake_kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffi, "is_missing", lambda: True)
    q, k, v = draw()
    with pytest.warns(UserWarning, match=r"need jax-tvm-ffi, .* pip install 'hopper-attention\[jax\]'"):
        out = flash_attention(q, k, v)
    assert_close(out, Oracle(q, k, v).out, q.dtype)
