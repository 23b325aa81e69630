"""``cmake -B build``: a Python that cannot compile the kernels is found out when configuring, with what to do.

What is built is tested by CTest (``tests/c``) and in ``tests/python/test_c_library.py``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed here")


def configure(python: Path, build: Path) -> subprocess.CompletedProcess[str]:
    command = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(build),
        f"-DPython_EXECUTABLE={python}",
        "-DBUILD_TESTING=OFF",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_python_without_torch_stops_the_configuration_and_says_what_to_do(tmp_path: Path) -> None:
    # Without site-packages, an interpreter has nothing but the standard library.
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = configure(bare, tmp_path / "build")
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    for part in ("torch (No module named 'torch')", "cutlass (No module named", "tvm_ffi (No module named"):
        assert part in message
    assert f"{bare} cannot compile the kernels" in message
    assert "make .venv/installed" in message and "-DPython_EXECUTABLE=" in message
    assert "Traceback" not in done.stdout + done.stderr


def test_a_python_with_all_packages_is_taken(tmp_path: Path) -> None:
    done = configure(Path(sys.executable), tmp_path / "build")
    assert done.returncode == 0, done.stderr
    assert "Configuring done" in done.stdout
