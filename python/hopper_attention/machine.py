"""What this machine has, which backends it can run, and what is missing and how to get it."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cute_kernels.ampere.config import ARCH_OF_CAPABILITY
from hopper_attention import _kernels, compile_cache
from hopper_attention.backends import Target, choose_backend, why_not_ampere, why_not_hopper
from hopper_attention.driver import UNKNOWN, GpuFacts, gpu_facts


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``memory_bytes`` is all of its memory; ``backend`` runs 16-bit attention there by default; ``facts`` are
    the driver's."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    backend: str
    facts: GpuFacts = UNKNOWN

    @property
    def parts(self) -> str:
        """Its multiprocessors and their clock, L2 and memory, as far as they are known."""
        parts = [f"{self.multiprocessors} SMs"]
        if self.facts.clock_mhz:
            parts[0] += f" at up to {self.facts.clock_mhz} MHz"
        if self.facts.l2_bytes:
            parts.append(f"{self.facts.l2_bytes / 2**20:.0f} MiB of L2")
        return ", ".join([*parts, f"{self.memory_bytes / 2**30:.0f} GiB"])


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run here; ``reason`` says where, or why not."""

    name: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Missing:
    """Something that would let more of the library run here, and how to get it."""

    what: str
    how: str


@dataclass(frozen=True)
class Machine:
    """Result of ``describe_machine``. A version is "not installed" where there is none.

    ``driver`` is the newest CUDA version that the NVIDIA driver runs.
    """

    python: str
    torch: str
    torch_cuda: str
    hopper_attention: str
    dsl: str
    tvm_ffi: str
    driver: str
    gpus: tuple[Gpu, ...]
    backends: tuple[BackendStatus, ...]
    missing: tuple[Missing, ...]
    cache_dir: str
    cached_kernels: int

    def __str__(self) -> str:
        rows = [
            ("python", self.python),
            ("torch", f"{self.torch}, CUDA {self.torch_cuda}"),
            ("hopper-attention", self.hopper_attention),
            ("CuTe DSL", self.dsl),
            ("TVM FFI", self.tvm_ffi),
            ("driver", self.driver),
        ]
        rows += [(f"gpu {gpu.index}", _gpu_line(gpu)) for gpu in self.gpus]
        rows += [
            (f"backend {b.name}", f"{'yes' if b.available else 'no'}: {b.reason}") for b in self.backends
        ]
        rows += [("missing", f"{item.what}; {item.how}") for item in self.missing]
        rows += [("kernel cache", f"{self.cache_dir} ({self.cached_kernels} compiled kernels usable now)")]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def _gpu_line(gpu: Gpu) -> str:
    major, minor = gpu.capability
    return f"{gpu.name}, compute capability {major}.{minor}, {gpu.parts}, runs the {gpu.backend} backend"


def describe_machine() -> Machine:
    """What this machine has, which backend would run on each GPU, and what is missing. Compiles nothing."""
    driver = _kernels.driver_cuda_version()
    gpus = tuple(_describe_gpu(index) for index in range(torch.cuda.device_count()))
    return Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or _kernels.NOT_INSTALLED,
        hopper_attention=find_version(),
        dsl=_kernels.package_version(_kernels.DSL_PACKAGE),
        tvm_ffi=_kernels.package_version(_kernels.FFI_PACKAGE),
        driver=f"CUDA {driver[0]}.{driver[1]}" if driver else _kernels.NOT_INSTALLED,
        gpus=gpus,
        backends=_describe_backends(gpus),
        missing=_missing(gpus, bool(driver)),
        cache_dir=str(compile_cache.cache_dir()),
        cached_kernels=len(compile_cache.cached_kernels()),
    )


def find_version() -> str:
    """The version of this package: as it is installed, or else as the folder of its source says."""
    installed = _kernels.package_version("hopper-attention")
    if installed != _kernels.NOT_INSTALLED:
        return installed
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    found = re.search(r'^version = "([\d.]+)"', project.read_text(), re.M) if project.is_file() else None
    return f"{found[1]}, run from its source folder" if found else _kernels.NOT_INSTALLED


def archs_here() -> tuple[str, ...]:
    """What kernels for the GPUs of this machine are compiled for; without a GPU, what those for Hopper are.

    Raises:
        ValueError: none of the GPUs runs any kernel.
    """
    count = 0 if torch.version.hip else torch.cuda.device_count()
    capabilities = [torch.cuda.get_device_capability(index) for index in range(count)]
    archs = tuple(dict.fromkeys(ARCH_OF_CAPABILITY[c] for c in capabilities if c in ARCH_OF_CAPABILITY))
    if capabilities and not archs:
        found = ", ".join(f"{major}.{minor}" for major, minor in dict.fromkeys(capabilities))
        raise ValueError(
            f"the GPUs here have compute capability {found}, which no kernel runs on; to compile for another machine, "
            "name its arch"
        )
    return archs or (_kernels.ARCH,)


def _describe_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    target = Target(properties.name, () if torch.version.hip else capability)
    return Gpu(
        index=index,
        name=properties.name,
        capability=capability,
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        backend=choose_backend(target, torch.bfloat16).backend,
        facts=gpu_facts(index),
    )


def _describe_backends(gpus: tuple[Gpu, ...]) -> tuple[BackendStatus, ...]:
    return (
        _kernel_status("hopper", gpus, why_not_hopper),
        _kernel_status("ampere", gpus, why_not_ampere),
        BackendStatus("torch", True, "16 bits on any torch device without a kernel"),
        BackendStatus("reference", True, "any torch device, what 'torch' lacks; emulates FP8"),
    )


def _kernel_status(name: str, gpus: tuple[Gpu, ...], why_not: Callable[[Target], str]) -> BackendStatus:
    """Where a backend of kernels can run: by default, if asked for, or why nowhere."""
    reasons = {gpu.index: why_not(Target(gpu.name, gpu.capability)) for gpu in gpus}
    able = [index for index, reason in reasons.items() if not reason]
    by_default = [str(gpu.index) for gpu in gpus if gpu.backend == name]
    if by_default:
        return BackendStatus(name, True, f"16-bit attention and its gradients on GPU {', '.join(by_default)}")
    if able:
        places = ", ".join(map(str, able))
        return BackendStatus(
            name, True, f"16-bit attention and its gradients on GPU {places} with backend={name!r}"
        )
    return BackendStatus(name, False, "; ".join(dict.fromkeys(reasons.values())) or "torch finds no GPU")


def _missing(gpus: tuple[Gpu, ...], has_driver: bool) -> tuple[Missing, ...]:
    missing = []
    if not gpus and not has_driver:
        missing.append(
            Missing("an NVIDIA driver and GPU", "a Hopper GPU (H100, H200, GH200) runs the kernels")
        )
    elif not gpus and not torch.version.cuda:
        missing.append(Missing("CUDA in torch", "install a CUDA build of torch in place of this CPU build"))
    elif not gpus:
        missing.append(Missing("a GPU that torch can use", "check nvidia-smi and CUDA_VISIBLE_DEVICES"))
    elif all(gpu.capability not in ARCH_OF_CAPABILITY for gpu in gpus):
        missing.append(Missing("a GPU of compute capability 8.0 or newer", "9.0 (H100, H200, GH200) is best"))
    if _kernels.missing_packages():
        missing.append(Missing(" and ".join(_kernels.missing_packages()), _kernels.INSTALL_DSL))
    return tuple(missing)
