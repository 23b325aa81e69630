"""Families of inputs: what is drawn, and the page of a report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import fp8_inputs
from hopper_attention.experiments.bench.spec import parse_problem
from hopper_attention.experiments.families.draws import FAMILIES, LARGE_FACTOR, draw_family, rotate
from hopper_attention.experiments.families.errors import compare, exact_rows, relative_errors
from hopper_attention.experiments.families.page import KIND, mean_of, ratio, render_families
from hopper_attention.experiments.reports import load_figures
from hopper_attention.reference import attention_naive

PROBLEM = parse_problem("bf16-b2-s768-h4-hk2-d64-causal")
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("name", BY_NAME)
def test_draws_have_shapes_and_dtype_and_repeat(name: str) -> None:
    first, again = (draw_family(BY_NAME[name], PROBLEM, 1, "cpu") for _ in range(2))
    assert first.q.shape == (2, 768, 4, 64) and first.k.shape == first.v.shape == (2, 768, 2, 64)
    for x, y in zip(vars(first).values(), vars(again).values(), strict=True):
        assert x.dtype == torch.bfloat16 and torch.equal(x, y) and bool(x.isfinite().all())


def test_families_are_what_they_say() -> None:
    draws = {name: draw_family(family, PROBLEM, 0, "cpu") for name, family in BY_NAME.items()}
    spread = {name: inputs.q.float().std().item() for name, inputs in draws.items()}
    assert abs(spread["normal"] - 1) < 0.02 and abs(spread["q8"] - 8) < 0.1
    assert 1.02 < spread["outliers"] < 1.08  # sqrt(1.1) = 1.049
    sizes = draws["tokens"].k.float().square().mean((2, 3)).sqrt()
    assert 0 < (sizes > LARGE_FACTOR / 2).sum() < 40
    sink = draws["sink"].v.float()
    assert sink[:, 0].std() < 0.02 and abs(sink[:, 1:].mean() - 0.3) < 0.02
    inputs = draws["model"]
    k = inputs.k.repeat_interleave(2, 2).float()
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs.q.float(), k) / 8
    weights = scores.softmax(-1)[..., 0].mean()
    assert 0.1 < weights < 0.99


def test_rotary_embedding_keeps_lengths_and_depends_on_distances() -> None:
    x = torch.randn(1, 1, 1, 32, dtype=torch.float64).expand(1, 20, 1, 32)
    turned = rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    products = (turned[0, :, 0] @ turned[0, :, 0].T).diagonal(3)
    torch.testing.assert_close(products, products[:1].expand_as(products), rtol=1e-5, atol=1e-5)


def test_the_script_measures_and_the_page_says_so(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    small = ["--problems", "bf16-b1-s64-h2-d64-causal", "--families", "normal,q8", "--draws", "3"]
    assert fp8_inputs.main([*small, "--device", "cpu", "--out", str(out)]) == 0
    report = load_figures(out.read_text(), KIND)
    assert [cell["family"] for cell in report["cells"]] == ["normal", "q8"]
    assert all(0.005 < cell["error"]["ours"] < 0.2 for cell in report["cells"])
    assert math.isnan(ratio(report["cells"][0], "ours"))
    for cell, fa3 in zip(report["cells"], (1.21, 1.0), strict=True):
        cell["us"]["fa3"], cell["error"]["fa3"] = fa3 * cell["us"]["ours"], 0.03
    assert math.isclose(mean_of(report["cells"], "ours"), 1.1, rel_tol=1e-9)
    for cell in report["cells"]:
        ours = cell["draws"]["ours"]
        assert [sorted(draw) for draw in ours] == 3 * [["by_row", "together"]]
        cell["draws"]["fa3_rotated"] = [
            {measure: x / factor for measure, x in draw.items()}
            for draw, factor in zip(ours, (0.9, 0.95, 1.0), strict=True)
        ]
    text = render_families(json.loads(json.dumps(report)))
    assert text.count("| `bf16-b1-s64-h2-d64-causal` | 0.949 ± 0.029 | 0.949 ± 0.029 |") == 2
    assert "Geometric mean of all: **0.949**; 0 of 2 above 1 by more than two standard errors." in text
    assert "| geometric mean | 1.21 | 1.00 |" in text
    assert "Geometric mean of all: **1.10**; 2 of 2 cells at 1.00 or more." in text
    assert "a fast LSE returned" in text
    for cell in report["cells"]:
        del cell["us"]["drop_in_lse"]
        del cell["error"]["drop_in_lse"]
    assert "the LSE returned" not in render_families(report)


def test_an_unknown_family_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fp8_inputs.main(["--families", "q9", "--device", "cpu", "--out", str(tmp_path / "x.json")])
    assert "families is q9, allowed: normal, outliers, q4, q8, model, sink, tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bf16-b2-s40-h4-hk2-d64-causal", "bf16-b1-s64-h2-d64-full"])
def test_exact_rows_are_those_of_plain_attention(name: str) -> None:
    problem = parse_problem(name)
    inputs = draw_family(BY_NAME["model"], problem, 0, "cpu")
    rows = torch.tensor([0, 7, 39])
    exact, _ = attention_naive(*(x.double() for x in (inputs.q, inputs.k, inputs.v)), causal=problem.causal)
    found = exact_rows(problem, inputs, rows)
    torch.testing.assert_close(found, exact[:, rows], rtol=1e-9, atol=1e-12)
    doubled = relative_errors(2 * found, found)
    assert doubled == pytest.approx({"together": 1.0, "by_row": 1.0})
    smaller = torch.where(torch.arange(3)[:, None, None] == 1, 0.0, found)
    assert relative_errors(smaller, found)["by_row"] == pytest.approx(3**-0.5)


def test_one_draw_is_not_compared() -> None:
    draw = {"together": 0.1, "by_row": 0.1}
    assert compare({"ours": [draw], "fa3_rotated": [draw]}, "together") is None
    assert compare({"ours": [draw, draw]}, "together") is None
    assert str(compare({"ours": 2 * [draw], "fa3_rotated": 2 * [draw]}, "by_row")) == "1.000 ± 0.000"
