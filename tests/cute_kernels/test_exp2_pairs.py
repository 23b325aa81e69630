"""The polynomial exponentials, by interpreting the PTX that the kernel contains."""

import re

import pytest
import torch

from cute_kernels import exp2_pairs
from cute_kernels.exp2_pairs import exp2_of_pair, is_polynomial

CELL = r"(\{\$[rw]\d\}|\w[\w.]*)"


class Ptx:
    """Runs straight-line PTX on many threads at once; a register is an int64 tensor of 32-bit patterns."""

    def __init__(self, registers: dict[str, torch.Tensor]):
        self.registers = registers

    def read(self, cell: str) -> torch.Tensor:
        if cell in self.registers:
            return self.registers[cell]
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


OPERATIONS = {
    "fma.rn.f32": lambda a, b, c: bits_of_floats(floats(a) * floats(b) + floats(c)),
    "mov.b32": lambda a: a,
    "cvt.pack.sat.s16.s32": lambda high, low: saturated(low) | saturated(high) << 16,
    "lop3.b32": lambda a, b, c, table: (a & b) | c,
    "fma.rn.f16x2": lambda a, b, c: bits_of_halves(halves(a) * halves(b) + halves(c)),
    "mul.rn.f16x2": lambda a, b: bits_of_halves(halves(a) * halves(b)),
}


@pytest.fixture
def run(monkeypatch):
    """exp2_of_pair on float32 tensors of exponents, with a scale of 1 and no offset."""
    texts = []
    monkeypatch.setattr(
        exp2_pairs.cute.arch, "inline_ptx", lambda text, **_: texts.append(text) or text, raising=True
    )

    def evaluate(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        text = exp2_of_pair(None, None, None, None)
        assert "0xea" in text
        arguments = {
            "{$r0}": bits_of_floats(low),
            "{$r1}": bits_of_floats(high),
            "{$r2}": bits_of_floats(torch.full_like(low, 1.0)),
            "{$r3}": bits_of_floats(torch.full_like(low, 0.0)),
        }
        machine = Ptx(arguments)
        machine.run(text)
        return halves(machine.registers["{$w0}"])

    return evaluate


def test_it_is_near_the_exponential_and_exact_at_integers(run):
    x = torch.linspace(-13.9, 15.99, 200_001, dtype=torch.float64).float()
    low, high = run(x, x.flip(0))
    assert torch.equal(low, high.flip(0))
    error = low / x.double().exp2() - 1
    assert error.abs().max() < 0.007 and error.square().mean().sqrt() < 0.0037 and error.mean().abs() < 2e-4
    integers = torch.arange(-14, 16, dtype=torch.float32)
    assert torch.equal(run(integers, integers)[0], integers.double().exp2())


def test_everything_below_is_zero_and_nothing_else_is_finite(run):
    below = torch.tensor([-torch.inf, -3e38, -1e9, -100.0, -47.0, -32.0, -31.0, -16.0, -15.0])
    above = torch.tensor([16.0, 16.5, 17.0, 20.0, 32.0, 47.0, 8191.0, 1e9, 3e38, torch.inf, torch.nan])
    everything = torch.cat((below, above))
    low, high = run(everything, everything.flip(0))
    assert torch.equal(low.isfinite(), high.flip(0).isfinite())
    assert not low[: len(below)].any() and not low[len(below) :].isfinite().any()


def test_pairs_are_spread_evenly():
    for polynomial_pairs in range(9):
        chosen = [is_polynomial(j, polynomial_pairs) for j in range(24)]
        assert sum(chosen) == 3 * polynomial_pairs and chosen[:8] == chosen[8:16]
    assert [j for j in range(8) if is_polynomial(j, 2)] == [0, 4]
