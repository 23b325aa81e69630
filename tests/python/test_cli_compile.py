"""``hopper-attention compile``: what it compiles, what it says of it, and how it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from cute_kernels.ampere.backward.config import shipped_ampere_backward_kernels
from cute_kernels.ampere.config import shipped_ampere_forward_configs
from cute_kernels.launches.config import LaunchesConfig
from hopper.backward.shipped import shipped_backward_kernels
from hopper.forward.fp8.tilings import (
    shipped_exact_lse_configs,
    shipped_fp8_forward_configs,
    shipped_long_fp8_forward_configs,
)
from hopper.forward.tilings import shipped_forward_configs, shipped_plain_configs
from hopper.mean.config import shipped_run_means_configs, shipped_value_mean_configs
from hopper.quantize.config import shipped_long_quantize_configs, shipped_quantize_configs
from hopper.transpose.config import shipped_transpose_configs
from hopper.widen.config import WidenConfig
from hopper_attention import cli_compile, compile_cache
from hopper_attention.cli import app
from hopper_attention.cli_compile import announcement, duration, kernels_for
from hopper_attention.compile_cache import Compilation

HERE = Path(__file__).parent
OLDER = ("sm_80", "sm_86", "sm_89", "sm_120")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compile", *map(str, arguments)])


def hopper_kernels() -> tuple[Any, ...]:
    fp8 = shipped_fp8_forward_configs() + shipped_long_fp8_forward_configs()
    fp8 += shipped_fp8_forward_configs(two_level=True)
    operands: tuple[Any, ...] = (*shipped_quantize_configs(), *shipped_long_quantize_configs())
    operands += (*shipped_value_mean_configs(), *shipped_run_means_configs())
    operands += (*shipped_transpose_configs(), WidenConfig())
    fp8 += shipped_exact_lse_configs()
    plain = shipped_forward_configs() + shipped_plain_configs()
    return (*plain, *fp8, *operands, *shipped_backward_kernels(), LaunchesConfig())


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compile cache in which the last config fails and every other is built at once from its name."""

    def build(configs: Any, jobs: int, on_progress: Any) -> Any:
        assert jobs == 3
        results = []
        for config in configs:
            path = tmp_path / f"{config.name}.entry"
            compile_cache.write_entry(path, config.name.encode())
            error = "no registers" if config == configs[-1] else ""
            results.append(Compilation(config, path, 0.5, error=error))
            on_progress(results[-1])
        return tuple(results)

    monkeypatch.setenv(compile_cache.CACHE_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compile_cache, "compile_all", build)
    return tmp_path


def compiled_for(*arguments: object) -> list[str]:
    data = json.loads(call("--jobs", 3, *arguments, "--json", "-").stdout)
    return [kernel["config"] for kernel in data["kernels"]]


def test_compile_reports_each_config_and_fails_if_one_did(cache_folder: Path) -> None:
    folder = cache_folder / "objects"
    chosen = ("--arch", "sm_90a", "--only", "fp16_d64")
    result = call("--jobs", 3, *chosen, "--objects", folder, "--json", "-")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    names = [config.name for config in hopper_kernels() if "fp16_d64" in config.name]
    built = len(names) - 1
    assert built > 0
    assert [kernel["config"] for kernel in data["kernels"]] == names
    assert [kernel["error"] for kernel in data["kernels"]] == [""] * built + ["no registers"]
    assert data["cache_dir"] == str(cache_folder)
    for text in (f"{built} compiled", "1 failed", f"{names[-1]}: no registers"):
        assert text in result.stderr
    # Objects without the checksum that the cache keeps behind them; none for the config that failed.
    assert {path.name: path.read_text() for path in folder.iterdir()} == {f"{n}.o": n for n in names[:-1]}


def test_what_cannot_be_is_said_before_anything_is_compiled(cache_folder: Path) -> None:
    file = cache_folder / "file"
    file.write_text("")
    for arguments, message in (
        (("--jobs", -3), "jobs is -3, allowed: 0 or more"),
        (("--objects", file), "file"),
    ):
        result = call(*arguments, "--arch", "sm_90a")
        assert result.exit_code != 0 and message in result.output
        assert "at a time" not in result.output


def test_sm_90a_is_the_kernels_of_hopper_and_another_arch_those_without_wgmma(cache_folder: Path) -> None:
    assert compiled_for("--arch", "sm_90a") == [config.name for config in hopper_kernels()]
    names = compiled_for("--arch", "sm_86")
    assert names == [
        config.name
        for config in (
            *shipped_ampere_forward_configs(("sm_86",)),
            *shipped_ampere_backward_kernels(("sm_86",)),
        )
    ]
    assert names and all("sm_86" in name for name in names)


def test_all_is_every_architecture_once(cache_folder: Path) -> None:
    names = compiled_for("--arch", "all")
    assert len(names) == len(set(names)) == sum(len(kernels_for(arch)) for arch in ("sm_90a", *OLDER))


@pytest.mark.parametrize(
    ("capabilities", "archs"),
    [
        ((), ("sm_90a",)),
        (((9, 0),), ("sm_90a",)),
        (((8, 6),), ("sm_86",)),
        (((12, 1),), ("sm_120",)),
        (((8, 0), (9, 0), (8, 0)), ("sm_80", "sm_90a")),
        (((7, 5), (8, 9)), ("sm_89",)),
    ],
)
def test_the_default_is_what_the_gpus_of_this_machine_can_use(
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Path,
    capabilities: tuple[tuple[int, int], ...],
    archs: tuple[str, ...],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    assert compiled_for() == [config.name for arch in archs for config in kernels_for(arch)]


def test_a_gpu_without_any_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    result = call()
    assert result.exit_code == 2
    assert "compute capability 7.5, which no kernel runs on" in result.stderr
    assert "name its arch" in result.stderr


def test_count_and_time_are_said_first(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    some = hopper_kernels()[:100]
    monkeypatch.setattr(cli_compile, "SECONDS_A_KERNEL", 6.0)
    monkeypatch.setattr(compile_cache, "cached_kernels", lambda: (Path(f"{some[0].name}.o"),))
    said = "100 kernels for sm_90a, 1 of them cached; 99 to compile, 3 at a time: about 3 minutes"
    assert announcement(some, ("sm_90a",), 3) == said
    assert announcement(some[:1], ("sm_90a",), 3) == "1 kernels for sm_90a, 1 of them cached"
    assert duration(12.4) == "about 12 seconds" and duration(91) == "about 2 minutes"
    output = call("--jobs", 3, "--arch", "sm_90a").output
    total = len(hopper_kernels())
    assert output.index(f"{total} kernels for sm_90a") < output.index(f"{total - 1} compiled")


def test_progress_is_shown_without_a_terminal(cache_folder: Path) -> None:
    total = len(hopper_kernels())
    lines = [line for line in call("--jobs", 3, "--arch", "sm_90a").stderr.splitlines() if " of " in line]
    assert len(lines) == 10 and lines[-1] == f"{total} of {total}"


# Ctrl-C


def start_slow_compile(folder: Path, log: Path, jobs: int) -> subprocess.Popen[str]:
    """One kernel is made at once, and each of the others takes a minute, in ``jobs`` processes. In a session of its
    own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        compile_cache.CACHE_DIR_VARIABLE: str(folder),
        "SLOW_COMPILE_LOG": str(log),
    }
    command = [sys.executable, str(HERE / "slow_compile.py"), "hopper_fwd_fp16_d", str(jobs)]
    pipe = subprocess.PIPE
    # A shell that runs the tests in the background has its processes ignore SIGINT, and theirs.
    return subprocess.Popen(
        command,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def living(session: int) -> list[str]:
    """The processes of a session that have not ended: ``/proc/<pid>/stat`` without its name and zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(its_session) == session and state != "Z":
            found.append(path.parent.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    "whole_group,jobs", [(True, 1), (False, 2)], ids=["the terminal's group", "the parent alone"]
)
def test_one_interrupt_ends_compiling_and_keeps_what_is_finished(
    tmp_path: Path, whole_group: bool, jobs: int
) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    process = start_slow_compile(folder, log, jobs)
    try:
        assert wait_for(lambda: log.exists() and len(log.read_text().split()) == jobs + 1, 120), (
            process.poll()
        )
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        output, errors = process.communicate(timeout=30)
        assert time.monotonic() - begun < 10
        assert process.returncode == 130
        last = errors.splitlines()[-1]
        assert (
            last.startswith("stopped: 1 of ") and str(folder) in last and "Traceback" not in output + errors
        )
        assert wait_for(lambda: not living(process.pid), 1), living(process.pid)
        quick = shipped_forward_configs()[0].name
        assert [path.name for path in folder.rglob("*.o")] == [f"{quick}.o"]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
