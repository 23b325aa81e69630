"""The eager softmax of the FP8 kernel gives what the other one does, on simulated machine code."""

import math
from dataclasses import replace

import pytest
import torch

from hopper.config import Registers
from hopper.forward.fp8.config import Softmax
from hopper.forward.fp8.tilings import select_fp8_forward_config
from hopper_attention.quantization import Fp8Quantization, quantize_qkv
from tests.hopper.hopper_machine import Timing
from tests.hopper.on_numpy import fp8_forward_on_numpy

LATE = Timing(is_late=True, seed=1)
BLOCKS = Fp8Quantization(rotate=False, block_q=64, block_k=64, smooth_v=False)
KEYS = 192


def pair_of_configs():
    """A small config without and with the eager softmax."""
    config = select_fp8_forward_config(64, 64, True, "bfloat16", KEYS, 64)
    small = {"tile_m": 64, "ping_pong": False, "registers": Registers(256, 24)}
    return tuple(replace(config, **small, softmax=softmax) for softmax in (Softmax.EXACT, Softmax.EAGER))


def draw(seqlen_q: int, seqlen_k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = seqlen_q, seqlen_k, seqlen_k
    return [torch.randn((1, n, 1, 64), generator=generator).to(torch.bfloat16) for n in lengths]


def signed(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v whose blocks of keys, visited from the last to the first, have scores of chosen signs."""
    q, k, v = draw(70, KEYS)
    q, k = q.abs() + 0.1, k.abs() + 0.1
    last, middle, first = slice(128, KEYS), slice(64, 128), slice(0, 64)
    if kind == "negative":
        k = -k
    elif kind == "negative, then rising":
        k[:, last] *= -1.0
        k[:, first] *= 3.0
    elif kind == "positive, then negative":
        k[:, middle] *= -1.0
        k[:, first] *= -2.0
    elif kind == "ever less negative":
        k[:, last] *= -4.0
        k[:, middle] *= -2.0
        k[:, first] *= -1.0
    elif kind == "rows of either sign":
        q[:, ::2] *= -1.0
    return q, k, v


@pytest.mark.parametrize(
    "kind",
    [
        "negative",
        "negative, then rising",
        "positive, then negative",
        "ever less negative",
        "rows of either sign",
    ],
)
def test_it_finds_the_same_maxima(kind: str) -> None:
    parts = quantize_qkv(*signed(kind), quantization=BLOCKS)
    plain, eager = (fp8_forward_on_numpy(c, parts, 0.125, LATE) for c in pair_of_configs())
    assert torch.equal(eager[0], plain[0])
    assert torch.allclose(eager[1], plain[1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("key", [3, 100, 190])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_nan_reaches_who_sees_it(key: int, sign: float) -> None:
    q, k, v = signed("negative" if sign < 0 else "positive")
    k[0, key, 0, 3] = math.nan
    parts = quantize_qkv(q, k, v, quantization=BLOCKS)
    out, _ = fp8_forward_on_numpy(pair_of_configs()[1], parts, 0.125)
    seen_from = max(key - (KEYS - q.shape[1]), 0)
    assert bool(out[0, seen_from:].isnan().all()) and bool(out[0, :seen_from].isfinite().all())


def test_rows_without_keys_are_empty() -> None:
    q, k, v = draw(70, 40)
    parts = quantize_qkv(q, k, v, quantization=BLOCKS)
    out, lse = fp8_forward_on_numpy(pair_of_configs()[1], parts, 0.125)
    assert bool((out[0, :30] == 0).all()) and bool(torch.isneginf(lse[0, 0, :30]).all())
    assert bool(lse[0, 0, 30:].isfinite().all())
