"""What importing the package loads, and what the command line says where optional packages are absent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from hopper_attention import __main__ as command
from hopper_attention import cli_parts
from hopper_attention.cli_parts import one_line_errors

HEAVY = (
    "torch._dynamo",
    "matplotlib",
    "typer",
    "rich",
    "sympy",
    "cutlass",
    "transformers",
    "diffusers",
    "jax",
)


def test_importing_loads_nothing_heavy() -> None:
    """In a process of its own. The time is without what torch loads, and counts the work of that process alone."""
    program = f"""
import sys, time, torch, numpy
before = time.process_time()
import hopper_attention
print(time.process_time() - before)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    seconds, loaded = result.stdout.splitlines()
    # 0.3 s on a machine that does nothing else.
    assert float(seconds) < 0.9 and loaded == "[]"


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_the_command_line_says_what_it_lacks(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hopper_attention.cli")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(f"{absent}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SystemExit, match=rf"needs {absent}.*: pip install 'hopper-attention\[cli\]'"):
        command.main()


def test_another_module_that_is_absent_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hopper_attention.cli", None)
    with pytest.raises(ModuleNotFoundError, match=r"hopper_attention\.cli"):
        command.main()


def test_a_plot_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, one_line_errors():
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.axes")
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err.endswith("install it with: pip install 'hopper-attention[plot]'\n")
    with pytest.raises(typer.Exit), pytest.MonkeyPatch.context() as patch:
        # Before anything is measured.
        patch.setattr(cli_parts, "find_spec", lambda name: None)
        cli_parts.check_plot("x.png")
    assert "hopper-attention[plot]" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError), one_line_errors():
        raise ModuleNotFoundError("No module named 'x'", name="x")
