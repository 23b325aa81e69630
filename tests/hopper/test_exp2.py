"""The polynomial exponentials, by interpreting the PTX that the kernel contains."""

import math
import re

import pytest
import torch

from hopper.forward.fp8 import exp2 as exp2_pairs
from hopper.forward.fp8.exp2 import (
    ceiling_of_offset,
    exp2_of_halves_by_chords,
    exp2_of_pair,
    exp2_of_pair_by_chords,
    is_polynomial,
    scale_of_slope,
)

CELL = r"(\{\$[rw]\d\}|\w[\w.]*)"


class Ptx:
    """Runs straight-line PTX on many threads at once; a register is an int64 tensor of 32-bit patterns."""

    def __init__(self, registers: dict[str, torch.Tensor]):
        self.registers = registers

    def read(self, cell: str) -> torch.Tensor:
        if cell in self.registers:
            return self.registers[cell]
        if cell.isdigit():
            return torch.tensor(int(cell))
        if cell.startswith(("0x", "0f")):
            return torch.tensor(int(cell[2:], 16))
        return bits_of_floats(torch.tensor(float(cell), dtype=torch.float32))

    def run(self, text: str) -> None:
        for statement in (part.strip(" {") for part in re.split(r";", text.replace("{ .reg", ".reg"))):
            if statement in ("", "}") or statement.startswith(".reg"):
                continue
            operation, rest = statement.split(" ", 1)
            target, *sources = re.findall(CELL, rest)
            values = torch.broadcast_tensors(*(self.read(cell) for cell in sources))
            self.registers[target] = OPERATIONS[operation](*values)


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32).double()


def bits_of_floats(x: torch.Tensor) -> torch.Tensor:
    return x.float().view(torch.int32).long() & 0xFFFFFFFF


def halves(bits: torch.Tensor) -> torch.Tensor:
    both = torch.stack((bits & 0xFFFF, bits >> 16))
    return both.to(torch.uint16).view(torch.float16).double()


def bits_of_halves(x: torch.Tensor) -> torch.Tensor:
    low, high = x.half().view(torch.uint16).long()
    return low | high << 16


def saturated(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).clamp(-(2**15), 2**15 - 1).long() & 0xFFFF


def flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 2.0**-14, 0.0, x)


OPERATIONS = {
    "fma.rn.sat.f16x2": lambda a, b, c: bits_of_halves(
        (halves(a) * halves(b) + halves(c)).clamp(0.0, 1.0).nan_to_num(nan=0.0)
    ),
    "fma.rn.ftz.f16x2": lambda a, b, c: bits_of_halves(
        flushed(flushed(halves(a)) * flushed(halves(b)) + flushed(halves(c)))
    ),
    "mad.lo.s32": lambda a, b, c: (a * b + c) & 0xFFFFFFFF,
    "add.s32": lambda a, b: (a + b) & 0xFFFFFFFF,
    "fma.rn.f32": lambda a, b, c: bits_of_floats(floats(a) * floats(b) + floats(c)),
    "mov.b32": lambda a: a,
    "lop3.b32": lambda a, b, c, table: (a & b) | c,
    "cvt.pack.sat.s16.s32": lambda high, low: saturated(low) | saturated(high) << 16,
    "fma.rn.f16x2": lambda a, b, c: bits_of_halves(halves(a) * halves(b) + halves(c)),
    "fma.rn.relu.f16x2": lambda a, b, c: bits_of_halves((halves(a) * halves(b) + halves(c)).clamp(min=0.0)),
    "mul.rn.f16x2": lambda a, b: bits_of_halves(halves(a) * halves(b)),
}


@pytest.fixture
def no_gpu(monkeypatch):
    """Functions of PTX return its text."""
    monkeypatch.setattr(exp2_pairs.cute.arch, "inline_ptx", lambda text, **_: text, raising=True)


def run_on_words(text: str, *words: torch.Tensor) -> torch.Tensor:
    machine = Ptx({f"{{$r{i}}}": word for i, word in enumerate(words)})
    machine.run(text)
    return machine.registers["{$w0}"]


def both(x: torch.Tensor) -> torch.Tensor:
    return bits_of_halves(torch.stack((x, x)))


def run_chords(x: torch.Tensor, offset: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    """2^x, by scores (x - offset) / scale as float16, in both halves of a word."""
    slope = both(torch.tensor(-scale / 32))
    ceiling = run_on_words(ceiling_of_offset(None), both(torch.tensor(offset)))
    scores = (x.double() - offset) / scale
    pairs = bits_of_halves(torch.stack((scores, scores.flip(0))))
    low, high = halves(run_on_words(exp2_of_halves_by_chords(None, None, None), pairs, slope, ceiling))
    assert torch.equal(low.nan_to_num(nan=-1.0), high.flip(0).nan_to_num(nan=-1.0))
    return low


@pytest.fixture(params=[exp2_of_pair, exp2_of_pair_by_chords])
def exponential(request):
    return request.param


@pytest.fixture
def run(no_gpu, exponential):
    """One of both on float32 tensors of exponents, with a scale of 1 and no offset."""

    def evaluate(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        text = exponential(None, None, None, None)
        assert ("0xea" in text) == ("lop3" in text)
        arguments = [bits_of_floats(x) for x in (low, high, torch.ones_like(low), torch.zeros_like(low))]
        return halves(run_on_words(text, *arguments))

    return evaluate


def test_it_is_near_the_exponential_and_exact_at_integers(run, exponential):
    x = torch.linspace(-12.0, 15.99, 200_001, dtype=torch.float64).float()
    low, high = run(x, x.flip(0))
    assert torch.equal(low, high.flip(0))
    error = low / x.double().exp2() - 1
    largest, rms, mean = (0.007, 0.0037, 2e-4) if exponential is exp2_of_pair else (0.0105, 0.0047, 1e-3)
    assert error.abs().max() < largest and error.square().mean().sqrt() < rms and error.mean().abs() < mean
    integers = torch.arange(-12, 16, dtype=torch.float32)
    assert torch.equal(run(integers, integers)[0], integers.double().exp2())


def test_everything_below_is_zero_and_nothing_else_is_finite(run):
    below = torch.tensor([-torch.inf, -3e38, -1e9, -100.0, -47.0, -32.0, -31.0, -16.0, -15.0])
    above = torch.tensor([16.0, 16.5, 17.0, 20.0, 32.0, 47.0, 8191.0, 1e9, 3e38, torch.inf, torch.nan])
    everything = torch.cat((below, above))
    low, high = run(everything, everything.flip(0))
    assert torch.equal(low.isfinite(), high.flip(0).isfinite())
    assert not low[: len(below)].any() and not low[len(below) :].isfinite().any()


def test_it_rises(run):
    x = torch.linspace(-16.0, 16.0, 200_001)
    assert (run(x, x)[0].diff().nan_to_num(nan=0.0) >= 0).all()


def as_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.float().to(torch.float8_e4m3fn).double()


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (8.0, 2.0**-7), (-2.0, 2.0**-9)])
def test_chords_are_near_the_exponential_and_nearer_as_e4m3(no_gpu, offset, scale):
    scores = ((torch.linspace(-5.9, 8.7, 200_001, dtype=torch.float64) - offset) / scale).half().double()
    x = scores * scale + offset
    chords, exact = run_chords(x, offset, scale), x.exp2()
    error = chords / exact - 1
    assert error.abs().max() < 0.03 and error.square().mean().sqrt() < 0.01 and error.mean().abs() < 2e-3
    by_octave = [error[x.floor() == octave].mean().abs() for octave in range(-5, 8)]
    assert max(by_octave[:3]) < 0.012 and max(by_octave[3:]) < 0.007
    rounding = (as_e4m3(exact) / exact - 1).square().mean().sqrt()
    assert (as_e4m3(chords) / exact - 1).square().mean().sqrt() < 1.04 * rounding
    assert (as_e4m3(chords) == as_e4m3(exact)).double().mean() > 0.9


def test_chords_of_everything_below_are_zero_and_of_nothing_above_small(no_gpu):
    below = torch.tensor([-torch.inf, -6e4, -1e3, -100.0, -33.0, -20.0, -16.0, -14.5])
    assert not run_chords(below).any()
    above = torch.cat((torch.linspace(9.0, 40.0, 4001), torch.tensor([100.0, 6e4, torch.inf, torch.nan])))
    result = run_chords(above)
    assert not (result <= 448).any() and not result[above >= 16.1].isfinite().any()


def test_chords_rise(no_gpu):
    x = torch.linspace(-20.0, 15.0, 100_001, dtype=torch.float64)
    assert (run_chords(x).diff() >= 0).all()


def test_chords_without_an_offset_or_of_a_score_that_is_nan_are_not_finite(no_gpu):
    assert not run_chords(torch.zeros(3), math.nan).isfinite().any()
    assert not run_chords(torch.full((3,), math.nan)).isfinite().any()


def test_the_scale_is_that_of_the_slope(no_gpu):
    slope = torch.tensor([-(2.0**-24), -3 * 2.0**-20, -0.1, -2047.0, -2048.0, -65504.0, -torch.inf])
    scale = halves(run_on_words(scale_of_slope(None), both(slope)))[0]
    assert torch.equal(scale[:4], -32.0 * slope[:4].half().double()) and scale[4:].isnan().all()


def test_pairs_are_spread_evenly():
    for polynomial_pairs in range(9):
        chosen = [is_polynomial(j, polynomial_pairs) for j in range(24)]
        assert sum(chosen) == 3 * polynomial_pairs and chosen[:8] == chosen[8:16]
    assert [j for j in range(8) if is_polynomial(j, 2)] == [0, 4]
