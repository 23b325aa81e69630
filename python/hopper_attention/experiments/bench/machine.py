"""What the figures were measured on: names and versions, and SM clock and power during the run."""

from __future__ import annotations

import ctypes
import datetime
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

NVML_CLOCK_SM = 1


@dataclass(frozen=True)
class Reading:
    """SM clock in MHz and board power in W at ``when`` (``time.perf_counter``)."""

    when: float
    clock_mhz: float
    power_w: float


class Nvml:
    """The few calls of NVIDIA's management library that are needed, without a Python package for it.

    Raises:
        OSError: the library is not there or refuses the GPU.
    """

    def __init__(self, index: int) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
        try:
            self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid), ctypes.byref(self._device))
        except OSError:
            # Some virtual machines hand out another UUID than CUDA's; there the order is the same.
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._device))

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise OSError(f"{function} returned NVML error {code}")

    def _number(self, function: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        self._call(function, self._device, *arguments, ctypes.byref(value))
        return value.value

    def read(self) -> Reading:
        clock = self._number("nvmlDeviceGetClockInfo", ctypes.c_int(NVML_CLOCK_SM))
        return Reading(time.perf_counter(), float(clock), self._number("nvmlDeviceGetPowerUsage") / 1000)

    def describe(self) -> dict[str, Any]:
        """Driver version, power limit (W) and highest SM clock (MHz)."""
        driver = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", driver, ctypes.c_uint(len(driver)))
        return {
            "driver": driver.value.decode(),
            "power_limit_w": self._number("nvmlDeviceGetEnforcedPowerLimit") / 1000,
            "max_clock_mhz": self._number("nvmlDeviceGetMaxClockInfo", ctypes.c_int(NVML_CLOCK_SM)),
        }


class NvidiaSmi:
    """The same readings from the ``nvidia-smi`` program, for machines where the library is out of reach.

    Raises:
        OSError: the program is not there or fails.
    """

    def __init__(self, index: int) -> None:
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        program = shutil.which("nvidia-smi")
        if program is None:
            raise OSError("nvidia-smi is not on the PATH")
        self._command = [program, f"--id={uuid}", "--format=csv,noheader,nounits"]

    def _query(self, fields: str) -> list[str]:
        try:
            command = [*self._command, f"--query-gpu={fields}"]
            reply = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except subprocess.SubprocessError as error:
            raise OSError(f"nvidia-smi failed: {error}") from error
        return [field.strip() for field in reply.stdout.strip().split(",")]

    def read(self) -> Reading:
        clock, power = self._query("clocks.sm,power.draw")
        return Reading(time.perf_counter(), float(clock), float(power))

    def describe(self) -> dict[str, Any]:
        """Driver version, power limit (W) and highest SM clock (MHz)."""
        driver, limit, clock = self._query("driver_version,enforced.power.limit,clocks.max.sm")
        return {"driver": driver, "power_limit_w": float(limit), "max_clock_mhz": int(clock)}


@dataclass(frozen=True)
class NoGauge:
    """Stands where a machine has no readings; ``reason`` says why."""

    reason: str

    def describe(self) -> dict[str, Any]:
        return {"clocks": f"not read: {self.reason}"}


Gauge = Nvml | NvidiaSmi | NoGauge


def find_gauge(device: str) -> Gauge:
    """The first source of readings that works for this device."""
    where = torch.device(device)
    if where.type != "cuda":
        return NoGauge(f"the device is {where.type}")
    reasons = []
    for source in (Nvml, NvidiaSmi):
        try:
            gauge = source(where.index or 0)
            gauge.read()
        except (OSError, AttributeError, ValueError) as error:
            reasons.append(f"{source.__name__}: {error}")
        else:
            return gauge
    return NoGauge("; ".join(reasons))


class ClockSampler:
    """Reads a gauge from a background thread, every ``period_s`` seconds, while used as a context."""

    def __init__(self, gauge: Gauge, period_s: float = 0.01) -> None:
        self._read: Callable[[], Reading] | None = None if isinstance(gauge, NoGauge) else gauge.read
        self._period_s = period_s
        self._readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-sampler", daemon=True)

    def _run(self) -> None:
        assert self._read is not None
        while not self._stop.is_set():
            try:
                self._readings.append(self._read())
            except OSError:
                return  # readings already taken stay; cells after this one have none
            self._stop.wait(self._period_s)

    def __enter__(self) -> ClockSampler:
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def window(self, spans: Iterable[tuple[float, float]]) -> tuple[float | None, float | None]:
        """Median clock (MHz) and power (W) of the readings inside the spans; None, None if there are none."""
        spans = list(spans)
        inside = [r for r in list(self._readings) if any(start <= r.when <= stop for start, stop in spans)]
        if not inside:
            return None, None
        return statistics.median(r.clock_mhz for r in inside), statistics.median(r.power_w for r in inside)


def package_version(name: str) -> str:
    """Version of an installed distribution, empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def describe_machine(device: str, gauge: Gauge) -> dict[str, Any]:
    """GPU, driver and the versions of everything that took part; plain data for the report."""
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    machine: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(where) if on_gpu else f"none ({platform.machine()} CPU)",
        **gauge.describe(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or ""),
        "cudnn": str(torch.backends.cudnn.version() or "") if on_gpu else "",
        "cute_dsl": package_version("nvidia-cutlass-dsl"),
        "python": platform.python_version(),
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(where)
        machine["sms"] = properties.multi_processor_count
        machine["l2_bytes"] = properties.L2_cache_size
    return machine


def repository_root() -> Path:
    """The checkout that this package lies in."""
    return Path(__file__).resolve().parents[4]


def find_commit(root: Path) -> str:
    """The commit measured: git's (``-dirty`` with local changes), else what a file COMMIT says."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        try:
            reply = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return ""
        return reply.stdout.strip()

    commit = git("rev-parse", "HEAD") if (root / ".git").exists() else ""
    if commit:
        return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    named = root / "COMMIT"
    return named.read_text(encoding="utf-8").strip() if named.is_file() else "unknown"


def today() -> str:
    """Date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
