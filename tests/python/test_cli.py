"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from hopper_attention import Fp8Quantization, _kernels, compile_cache
from hopper_attention.cli import app
from hopper_attention.experiments.rmse.run import METHODS

ON_CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="checks what a machine without a GPU says")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> Result:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result


def test_help_names_every_command() -> None:
    output = succeed("--help").output
    for command in ("info", "explain", "rmse", "compile", "bench"):
        assert command in output


def test_info_shows_machine_backends_and_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(compile_cache.CACHE_DIR_VARIABLE, str(tmp_path / "kernels"))
    output = succeed("info").output
    for fact in (torch.__version__, "hopper", "reference", str(tmp_path / "kernels"), "0 kernels"):
        assert fact in output


@ON_CPU_ONLY
def test_info_says_what_is_missing() -> None:
    data = json.loads(succeed("info", "--json", "-").stdout)
    backends = {backend["name"]: backend["available"] for backend in data["backends"]}
    assert backends == {"hopper": False, "ampere": False, "torch": True, "reference": True}
    assert data["gpus"] == []
    assert data["missing"] and all(item["what"] and item["how"] for item in data["missing"])


def test_explain_names_the_config_of_a_gpu_that_is_not_here() -> None:
    result = succeed("explain", "--capability", "9.0", "--head-dim", 104, "--causal", "--json", "-")
    data = json.loads(result.stdout)
    config = data["config"]
    assert data["backend"] == "hopper"
    assert (config["head_dim"], config["causal"], config["dtype"]) == (128, True, "bfloat16")
    assert config["name"].startswith("hopper_fwd_bf16_d128_causal_")
    assert config["name"] in result.stderr  # the table steps aside for the JSON


def test_explain_of_another_gpu_gives_the_reason() -> None:
    output = succeed("explain", "--capability", "8.0", "--head-dim-v", 64, "--kv-heads", 4).output
    assert "ampere_fwd_sm_80_bf16_" in output and "8.0" in output
    output = succeed("explain", "--capability", "7.5", "--head-dim-v", 64, "--kv-heads", 4).output
    assert "torch_sdpa" in output and "7.5" in output


def test_version_is_that_of_the_project() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    version = re.search(r'^version = "([\d.]+)"', project, re.M)
    assert version and re.fullmatch(
        rf"hopper-attention {re.escape(version[1])}.*\n", succeed("--version").output
    )


def test_version_without_an_installed_package_is_that_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "package_version", lambda name: _kernels.NOT_INSTALLED)
    assert re.fullmatch(
        r"hopper-attention \d+\.\d+\.\d+, run from its source folder\n", succeed("--version").output
    )


def test_explain_of_fp8_names_quantizer_scales_and_kernel() -> None:
    chosen = ("--fp8", "--capability", "9.0", "--head-dim", 64, "--causal")
    result = succeed("explain", *chosen, "--json", "-")
    data = json.loads(result.stdout)
    assert (data["quantizer"], data["attention"]["backend"]) == ("fused", "hopper")
    config, kernel = data["quantizer_config"], data["attention"]["config"]
    assert (config["head_dim"], config["rotate"]) == (64, True)
    assert (kernel["dtype"], kernel["head_dim"], kernel["causal"]) == ("float8_e4m3fn", 64, True)
    assert config["name"] in result.stderr and kernel["name"] in result.stderr
    assert "q: a scale for each row" in result.stderr


def test_explain_of_fp8_takes_the_options_of_a_quantization() -> None:
    options = (
        "--granularity",
        "head",
        "--no-rotate",
        "--smooth-k",
        "--smooth-v",
        "--rotate-v",
        "--two-level",
    )
    data = json.loads(succeed("explain", "--fp8", *options, "--capability", "9.0", "--json", "-").stdout)
    expected = Fp8Quantization(
        rotate=False,
        granularity="head",
        smooth_k=True,
        rotate_v=True,
        smooth_v=True,
        block_k=data["quantization"]["block_k"],
    )
    assert data["quantization"] == asdict(expected)
    assert data["quantizer"] == "torch" and "granularity is 'head'" in data["quantizer_reason"]
    assert data["attention"]["config"]["two_level"] is True
    blocks = ("--block-q", 64, "--block-k", 128)
    data = json.loads(succeed("explain", "--fp8", *blocks, "--capability", "9.0", "--json", "-").stdout)
    assert (data["quantizer_config"]["block_q"], data["quantizer_config"]["block_k"]) == (64, 128)


def test_explain_of_fp8_inputs_with_descales() -> None:
    data = json.loads(
        succeed("explain", "--dtype", "float8_e4m3fn", "--capability", "9.0", "--json", "-").stdout
    )
    assert (data["backend"], data["config"]["dtype"]) == ("hopper", "float8_e4m3fn")


def test_explain_of_fp8_needs_no_memory_for_the_problem() -> None:
    output = succeed("explain", "--fp8", "--seqlen-q", 10**11, "--device", "cpu").output
    assert "reference_fp8_m128n128" in output


def test_explain_needs_no_memory_for_the_problem() -> None:
    output = succeed("explain", "--seqlen-q", 10**11, "--device", "cpu").output
    assert "torch_sdpa" in output


def test_rmse_prints_a_table_and_writes_json_and_plot(tmp_path: Path) -> None:
    json_path, plot = tmp_path / "sub" / "rmse.json", tmp_path / "rmse.svg"
    shape = ("--seqlen", 256, "--head-dim", 64, "--heads", 2, "--device", "cpu", "--causal")
    output = succeed("rmse", *shape, "--json", json_path, "--plot", plot).output
    data = json.loads(json_path.read_text())
    assert set(data) == {"experiment", "rows", "left_out", "rms_by_seed", "oracle_rms"}
    assert data["experiment"] == {
        "batch": 1,
        "seqlen": 256,
        "heads": 2,
        "head_dim": 64,
        "seeds": 3,
        "causal": True,
        "dtype": "float16",
        "device": "cpu",
        "distribution": "outliers",
        "outlier_std": 10.0,
        "queries": 0,
    }
    absent = {entry["method"] for entry in data["left_out"]}
    assert [row["method"] for row in data["rows"]] == [m.name for m in METHODS if m.name not in absent]
    errors = {row["method"]: row["rmse"] for row in data["rows"]}
    assert 1e-5 < errors["flash"] < errors["standard"] < 1e-3
    assert 1e-3 < errors["fp8-both"] < errors["fp8-per-tensor"] < 1e-1
    for row in data["rows"]:
        assert row["label"] in output and f"{row['rmse']:.2e}" in output
    assert str(json_path) in output and str(plot) in output and "2 heads" in plot.read_text()


@pytest.mark.parametrize(
    "distribution", ["token-outliers", "channel-outliers", "heavy-tails", "offset", "normal"]
)
def test_rmse_of_other_inputs(distribution: str) -> None:
    shape = ("--seqlen", 256, "--head-dim", 32, "--device", "cpu", "--dtype", "bfloat16")
    result = succeed("rmse", *shape, "--distribution", distribution, "--json", "-")
    data = json.loads(result.stdout)
    errors = {row["method"]: row["rmse"] for row in data["rows"]}
    # A bfloat16 is rounded by 2^-9 of itself at most, an e4m3 by 2^-4.
    assert 4 * errors["flash"] < errors["fp8-both"] < 0.3 * data["oracle_rms"]
    assert data["experiment"]["distribution"] == distribution


AS_TYPED = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    try:
        runpy.run_module("hopper_attention", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        print(f"ended with {ended.code}")
"""
"""Commands one after the other, each as by ``python -m hopper_attention``, in a process of their own, since it is its
terminal that counts."""


def test_the_package_runs_as_a_module_and_nothing_is_cut_on_a_terminal_of_80_columns() -> None:
    wholes = {
        "--help": "Usage: hopper-attention [OPTIONS] COMMAND [ARGS]...",
        "rmse --seqlen 256 --head-dim 64": "emulation on cpu",
        "explain --fp8 --capability 9.0": "k and v: a scale for each 128 keys of a head",
        "info": "16 bits on any torch device without a kernel",
    }
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-c", AS_TYPED, *wholes, "nothing"]
    process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.DEVNULL, env=environment)
    os.close(terminal)
    *texts, rest = read_all(master).split("ended with 0")
    assert process.wait() == 0 and rest.strip() == "ended with 2"
    for text, whole in zip(texts, wholes.values(), strict=True):
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text and whole in text


def read_all(terminal: int) -> str:
    """What was written to a terminal, until its last writer has closed it."""
    parts = []
    with contextlib.suppress(OSError):  # which is how Linux says that
        while part := os.read(terminal, 65536):
            parts.append(part)
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode())


def test_bench_runs_small_shapes_anywhere(tmp_path: Path) -> None:
    shape, out = "bf16-b1-s64-h1-d64-full", tmp_path / "bench.json"
    peers = ("--peers", "ours,torch", "--device", "cpu")
    succeed("bench", "--shapes", shape, *peers, "--budget", 0.2, "--json", out)
    data = json.loads(out.read_text())
    assert len(data["cells"]) == 1
    assert set(data["peers"]) == {"ours", "torch"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rmse", "--seqlen", 0), "seqlen is 0, allowed: 1 or more"),
        (("rmse", "--head-dim", 12), "head_dim is 12, allowed: multiples of 8 from 8 to 256"),
        (("rmse", "--device", "moon"), "device is 'moon', allowed: auto, cpu, or one that is here"),
        (("explain", "--device", "meta"), "device is 'meta', allowed"),
        (("bench", "--device", "cuda:99"), "device is 'cuda:99', allowed"),
        (("explain", "--capability", "nine"), "capability is 'nine', allowed: major.minor"),
        (("explain", "--head-dim", 7, "--device", "cpu"), "7"),
        (("explain", "--head-dim", 10**20), f"shape of q is (1, 4096, 16, {10**20}), allowed: up to 2**60"),
        (
            ("explain", "--batch", 10**9, "--seqlen-k", 10**9),
            "shape of k is (1000000000, 1000000000, 16, 128)",
        ),
        (("explain", "--fp8", "--block-q", 10**20), f"block_q is {10**20}, allowed: 1 or more, below 2**63"),
        (("explain", "--granularity", "head"), "granularity is head without --fp8, allowed: with --fp8"),
        (("explain", "--no-rotate"), "rotate is False without --fp8, allowed: with --fp8"),
        (("explain", "--fp8", "--dtype", "float8_e4m3fn"), "dtype is float8_e4m3fn with --fp8, allowed"),
        (("explain", "--two-level"), "two-level is given with 16-bit inputs, allowed: with --fp8"),
        (("explain", "--fp8", "--block-k", 0, "--device", "cpu"), "block_k is 0, allowed: 1 or more"),
        (("compile", "--only", "sm_100"), "only is 'sm_100', allowed: part of a config's name"),
        (
            ("compile", "--arch", "sm_75"),
            "arch is 'sm_75', allowed: sm_80, sm_86, sm_89, sm_90a, sm_120 or all",
        ),
        (("bench", "--device", "cpu"), "device is cpu, allowed there: small ones"),
        (("bench", "--device", "cpu", "--shapes", "big"), "shape is 'big', allowed"),
        (("bench", "--device", "cpu", "--shapes", "bf16-b0-s64-h1-d64-full"), "allowed: sizes above 0"),
        (
            ("bench", "--device", "cpu", "--shapes", "bf16-b1-s64-h1-d64-full", "--budget", "nan"),
            "budget_s is nan",
        ),
        (
            ("rmse", "--seqlen", 0, "--plot", "x.txt"),
            "plot is 'x.txt', allowed: a file that ends with .png, .svg",
        ),
        (("info", "--json", "/dev/null/x.json"), "/dev/null"),
        (("rmse", "--seqlen", 0, "--json", "/dev/null/x.json"), "/dev/null is no folder: '/dev/null/x.json'"),
        (("rmse", "--seqlen", 0, "--json", "."), "a folder, allowed: a file: '.'"),
        (("rmse", "--seqlen", 0, "--plot", "/dev/null/x.svg"), "/dev/null is no folder"),
        (("rmse", "--heads", 10**20), "allowed: up to 2**40 elements"),
        (("rmse", "--lengths", "1,99999999999999999999"), "allowed: up to 2**40 elements"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple, message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert result.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    ],
)
def test_too_little_memory_is_one_line_and_exit_code_2(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_it(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("hopper_attention.experiments.rmse.run.run_rmse", raise_it)
    result = call("rmse", "--seqlen", 16, "--head-dim", 16, "--device", "cpu")
    assert result.exit_code == 2 and result.stderr.splitlines()[-1].startswith(
        "error: this needs more memory"
    )
    assert "Traceback" not in result.output
    monkeypatch.setattr("hopper_attention.experiments.rmse.run.run_rmse", lambda *given, **options: 1 / 0)
    assert isinstance(call("rmse", "--device", "cpu").exception, ZeroDivisionError)


def test_a_folder_that_cannot_be_written_to_is_said_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    result = call("rmse", "--seqlen", 0, "--json", tmp_path / "sub" / "x.json")
    assert result.exit_code == 2 and "cannot be written to" in result.stderr


@pytest.mark.parametrize("arguments", [("rmse", "--dtype", "float8"), ("rmse", "--seqlen", "x"), ("fly",)])
def test_an_unknown_word_is_exit_code_2(arguments: tuple) -> None:
    assert call(*arguments).exit_code == 2
