"""Rotary embedding of queries and keys: the kernel run from PTX on NumPy, its gradients, and what reaches it, against
float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.rotation.config import HEADS, THREADS, VECTOR, RotationConfig, validate_rotation_config
from hopper_attention import compile_cache
from hopper_attention.launch import rotation
from hopper_attention.launch.rotation import Angles
from hopper_attention.rotary import apply_rotary, rotate_by
from tests.compile_pool import assert_small
from tests.hopper.on_numpy import Arguments, program_of
from tests.python.fake_gpu import forget_launchers, pretend


def draw(
    dtype: torch.dtype = torch.bfloat16, tables: torch.dtype = torch.float32, half: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (2, 5, 3, 48) and k (2, 5, 2, 48), whose heads lie before their rows, and tables (2, 5, half)."""
    g = torch.Generator().manual_seed(half)
    q, k = (torch.randn(2, n, 5, 48, generator=g).to(dtype).transpose(1, 2) for n in (3, 2))
    angles = 6.0 * torch.rand(2, 5, half, generator=g)
    return q, k, angles.cos().to(tables), angles.sin().to(tables)


def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float64."""
    half = cos.shape[2]
    low, high, rest = x.double().split((half, half, x.shape[3] - 2 * half), 3)
    cos, sin = (table.double()[:, :, None] for table in (cos, sin))
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), 3)


def check(found: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Within half a unit in the last place of float64, and what float32 adds to it."""
    wanted = formula(x, cos, sin)
    bound = 0.5 * torch.finfo(found.dtype).eps * wanted.abs() + 2e-6
    assert found.dtype == x.dtype and found.is_contiguous()
    assert bool(((found.double() - wanted).abs() <= bound).all())


def on_numpy(config: RotationConfig, *tensors: Tensor, sign: float) -> None:
    q, k, *tables, new_q, new_k = tensors
    arguments = Arguments()
    for x in (q, new_q, k, new_k, *tables):
        arguments.tensor(x, tuple(x.shape), x.stride()[:-1])
    of_head = q.shape[3] // VECTOR - tables[0].shape[2] // VECTOR
    ctas = [-(-x.shape[0] * x.shape[1] * -(-x.shape[2] // HEADS) * of_head // THREADS) for x in (q, k)]
    arguments.add(sign, ctas[0])
    arguments.launch(program_of(config), (sum(ctas), 1, 1))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RotationConfig, float]]:
    """A GPU whose kernel runs on NumPy, and the config and sign of each launch."""
    found: list[tuple[RotationConfig, float]] = []

    def get(config: RotationConfig):
        def run(*arguments: Tensor | float) -> None:
            *tensors, sign = arguments
            found.append((config, sign))
            on_numpy(config, *tensors, sign=sign)

        return run

    pretend(monkeypatch, rotation)
    monkeypatch.setattr(compile_cache, "get_serving", get)
    yield found
    forget_launchers()


@pytest.mark.parametrize(
    ("dtype", "tables", "half"),
    [
        (torch.bfloat16, torch.bfloat16, 24),
        (torch.float16, torch.float32, 8),
    ],
)
def test_rows_turn_and_are_rounded_once(
    dtype: torch.dtype, tables: torch.dtype, half: int, launched: list[tuple[RotationConfig, float]]
) -> None:
    """Heads that no group of a thread fills, columns behind rotary_dim, strided rows."""
    q, k, cos, sin = draw(dtype, tables, half)
    new_q, new_k = apply_rotary(q, k, cos, sin)
    check(new_q, q, cos, sin)
    check(new_k, k, cos, sin)
    names = (str(x).removeprefix("torch.") for x in (dtype, tables))
    assert launched == [(RotationConfig("sm_90a", *names), 1.0)]


def test_gradients_turn_back_by_one_launch(launched: list[tuple[RotationConfig, float]]) -> None:
    """Also with other angles for the two columns of a pair, where the transpose is not a turn."""
    q, k, cos, sin = draw()
    angles = Angles(cos, sin, cos.flip(1), 0.5 * sin.flip(0))
    learned = [x.clone().requires_grad_() for x in (q, k)]
    grads = torch.randn(2, 5, 3, 48).bfloat16(), torch.randn(2, 5, 48, 2).bfloat16().mT
    found = torch.autograd.grad(rotate_by(*learned, angles), learned, grads)
    assert [sign for _, sign in launched] == [1.0, -1.0]
    for x, grad, grad_of_x in zip((q, k), grads, found, strict=True):
        wide = x.double().requires_grad_()
        low, high, rest = wide.split((16, 16, 16), 3)
        tables = [table.double()[:, :, None] for table in angles]
        out = torch.cat((low * tables[0] - high * tables[1], high * tables[2] + low * tables[3], rest), 3)
        (wanted,) = torch.autograd.grad(out, wide, grad.double())
        assert bool(((grad_of_x.double() - wanted).abs() <= 0.0041 * wanted.abs() + 2e-6).all())


@pytest.mark.parametrize("case", ["odd columns", "no rows", "float64"])
def test_what_the_kernel_is_not_for_is_rotated_by_torch(
    case: str, launched: list[tuple[RotationConfig, float]]
) -> None:
    q, k, cos, sin = draw(half=4 if case == "odd columns" else 16)
    if case == "no rows":
        q, k, cos, sin = (x[:, :0] for x in (q, k, cos, sin))
    if case == "float64":
        q, k = q.double(), k.double()
    for found, x in zip(apply_rotary(q, k, cos, sin), (q, k), strict=True):
        check(found, x, cos, sin)
    assert not launched


COMPILED = [RotationConfig("sm_80", "float16", "float16"), RotationConfig("sm_90a", "bfloat16", "float32")]


def test_kernels_compile_without_spills() -> None:
    assert_small(COMPILED)


def test_configs() -> None:
    assert [config.name for config in COMPILED] == [
        "rotation_sm_80_fp16_by_fp16",
        "rotation_sm_90a_bf16_by_fp32",
    ]
    with pytest.raises(ValueError, match="dtype is 'float32', allowed: 'float16', 'bfloat16'"):
        validate_rotation_config(replace(COMPILED[0], dtype="float32"))
    with pytest.raises(ValueError, match="table_dtype is 'int32', allowed: 'float16', 'bfloat16', 'float32'"):
        validate_rotation_config(replace(COMPILED[0], table_dtype="int32"))
