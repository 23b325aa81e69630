"""Every example runs on a CPU, and finds that it is right."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hopper_attention.experiments.models.pages import render_training
from hopper_attention.experiments.reports import load_figures

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SERVING = "serve_llama"
TRAINING = "train_gpt"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("common", SERVING, TRAINING))

FEW = dict(layers=2, hidden=128, heads=4, kv_heads=2, feed_forward=128, vocabulary=256, requests=6)
TIGHT = dict(prompt=40, answer=8, gap=0.5, page_size=8, pages=15, batch=3, chunk=16)
"""Room for two long requests, so that others wait, and chunks that end within prompts."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert re.fullmatch(r".+ out \d.+ dq \d.+ dk \d.+ dv \d.+\n", capsys.readouterr().out)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 5


def test_training_by_any_way_goes_the_same_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    training = importlib.import_module(TRAINING)
    files = tmp_path / "train.json", tmp_path / "train.png"
    options = ["--tiny", "--fp8", "--steps=3", "--device=cpu", f"--json={files[0]}", f"--plot={files[1]}"]
    found = training.main(options)
    report = load_figures(files[0].read_text(), "training")
    assert files[1].stat().st_size > 10_000
    assert all(f"way {way}" in report for way in ("sdpa", "16 bits", "fp8"))
    losses = {way: torch.tensor(of_way["losses"]) for way, of_way in found.items()}
    assert torch.allclose(
        losses["sdpa"][0], torch.tensor(5.545), atol=0.1
    )  # ln 256: nothing is known at first
    # The same weights and batches, rounded differently, if at all.
    assert float((losses["16 bits"] - losses["sdpa"]).abs().max()) < 1e-3
    assert 0 < float((losses["fp8"] - losses["sdpa"]).abs().max()) < 1e-2
    assert report["differences"]["fp8"]["largest"] == pytest.approx(
        float((losses["fp8"] - losses["sdpa"]).abs().max()), rel=1e-3
    )
    assert "held out" in capsys.readouterr().out
    text = render_training(report, files[1].name)
    assert re.search(
        r"\| fp8 \| [\d,]+ \| \d\.\d\d \| – \| 5\.\d{4} \| [+-]0\.\d{4} \| 5\.\d{4} \| [+-]0", text
    )


def test_a_model_that_a_cpu_cannot_train_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit):
        importlib.import_module(TRAINING).main(["--device=cpu"])
    assert "--device is cpu, allowed there: --tiny" in capsys.readouterr().err


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example that serves, on the CPU."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.inference_mode():
        yield importlib.import_module(SERVING)


def served(serving: ModuleType, **changes: Any) -> tuple[Any, list[Any]]:
    """An engine that has served requests, and these."""
    options = serving.Options(**FEW | TIGHT | changes)
    options.check()
    engine = serving.Engine(options, torch.bfloat16, "cpu")
    # Rows that nobody wrote may hold anything.
    for cache in (engine.parts.cache.k, engine.parts.cache.v):
        cache.fill_(torch.nan)
    return engine, serving.serve(engine, serving.draw_requests(options))


def test_serving_prints_what_it_measured(serving: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (FEW | TIGHT).items()]
    serving.main([*options, "--check"])
    out = capsys.readouterr().out
    for name in ("tokens a second", "mean batch", "cache in use", "share of attention"):
        assert re.search(rf"{name}.*\d", out), name
    assert re.search(r"requests +│ 6 ", out)
    assert re.search(r"checked: \d+ of (\d+) tokens", out)


@pytest.mark.parametrize("changes", [{}, dict(seed=1, batch=5, chunk=7, page_size=3, pages=40, kv_heads=4)])
def test_served_tokens_are_those_of_each_request_alone(serving: ModuleType, changes: dict[str, int]) -> None:
    engine, done = served(serving, **changes)
    serving.check(engine, done)
    asked = serving.draw_requests(engine.options)
    assert sorted(x.request.prompt for x in done) == sorted(x.prompt for x in asked)
    assert all(len(x.tokens) == len(x.request.prompt) + x.request.answer for x in done)
    assert sorted(engine.parts.cache.free) == list(range(engine.options.pages))
    assert engine.numbers.answer_tokens == sum(x.answer for x in asked)
    assert max(engine.numbers.batches) > 1


def test_the_check_finds_a_wrong_rotation(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = serving.flash_attn_with_kvcache

    def attend_wrongly(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return attend(*tensors, **options | {"rotary_interleaved": True})

    monkeypatch.setattr(serving, "flash_attn_with_kvcache", attend_wrongly)
    engine, done = served(serving)
    with pytest.raises(AssertionError, match=r"tokens are float32's own, the others .+ allowed: 0\.25"):
        serving.check(engine, done)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(pages=5), r"pages is 5, allowed: 6 or more"),
        (dict(kv_heads=3), r"kv_heads 3, allowed: .+ a multiple of kv_heads"),
        (dict(hidden=96), r"hidden is 96, heads 4 .+ multiple of 16"),
        (dict(chunk=0), r"chunk is 0, allowed: above 0"),
    ],
)
def test_what_cannot_be_served_says_so(serving: ModuleType, changes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        serving.Options(**FEW | TIGHT | changes).check()
