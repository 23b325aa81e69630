"""Every example runs on a CPU, and finds that it is right."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert re.fullmatch(r".+ out \d.+ dq \d.+ dk \d.+ dv \d.+\n", capsys.readouterr().out)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 5
