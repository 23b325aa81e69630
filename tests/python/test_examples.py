"""The examples of the texts run as they stand; those that ask for a GPU run on the CPU, on shorter sequences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)


def examples(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def on_a_cpu(example: str) -> str:
    """The example with what the CPU backend can do in no time."""
    return example.replace('device="cuda"', 'device="cpu"').replace("4096, 16, 128", "64, 2, 32")


@pytest.mark.parametrize("number", range(len(examples("docs/api.md"))))
def test_an_example_of_the_api_page_runs_by_itself(number: int) -> None:
    exec(compile(examples("docs/api.md")[number], f"docs/api.md, example {number + 1}", "exec"), {})


def test_the_examples_of_the_serving_page_run_one_after_the_other() -> None:
    found, names = examples("docs/serving.md"), dict[str, Any]()
    for number, example in enumerate(found):
        exec(compile(example, f"docs/serving.md, example {number + 1}", "exec"), names)
    assert len(found) >= 8
    assert names["lengths"].tolist() == [46, 42, 85]


@pytest.mark.parametrize(("page", "least"), [("docs/quickstart.md", 7), ("docs/faq.md", 2)])
def test_the_examples_of_a_page_run_one_after_the_other(page: str, least: int) -> None:
    found, names = examples(page), dict[str, Any]()
    for number, example in enumerate(found):
        exec(compile(example, f"{page}, example {number + 1}", "exec"), names)
    assert len(found) >= least


def test_readmes_examples_run_one_after_the_other() -> None:
    found, names = examples("README.md"), dict[str, Any]()
    for number, example in enumerate(found):
        exec(compile(on_a_cpu(example), f"README.md, example {number + 1}", "exec"), names)
    assert len(found) >= 2
    assert names["out"].shape == names["q"].shape == (2, 64, 2, 32)
    assert names["lse"].shape == (2, 2, 64)


def test_the_example_of_torchs_own_function_runs() -> None:
    (example,) = examples("docs/integrations/torch.md")
    names: dict[str, Any] = {}
    exec(compile(example, "docs/integrations/torch.md", "exec"), names)
    assert names["out"].isfinite().all() and not names["is_active"]()
