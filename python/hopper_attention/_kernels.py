"""The one place where host code meets the kernels: builds their objects and loads them as functions.

Building imports the DSL. Loading does not, because that import alone takes longer than a warm first call may:
the DSL's runtime library links an object in memory through its C API, and hands out the address of the
function's TVM FFI entry (see ``hopper.object_code``, which puts it there).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

ARCH = "sm_90a"
EXPORTER = "hopper.object_code"
"""The module that makes an object of a compiled kernel."""

DSL_PACKAGE = "nvidia-cutlass-dsl"
FFI_PACKAGE = "apache-tvm-ffi"
INSTALL_DSL = "pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
NOT_INSTALLED = "not installed"

Kernel = Callable[..., Any]
"""A compiled kernel, called with torch tensors; launches on torch's current stream."""


def kept_argument(tensor: Any) -> Any:
    """What a kernel takes for a torch tensor that is kept from call to call: on a GPU a view of TVM FFI's own, which
    otherwise makes one in every launch. It keeps the memory alive.

    A launch takes torch's current stream from the first torch tensor among its arguments, so not all may be such views.
    """
    if not tensor.is_cuda:
        return tensor
    import tvm_ffi

    view = tvm_ffi.from_dlpack(tensor)
    # A torch may give dimensions of size 1 other strides on the way, and kernels want some of theirs.
    return view if tuple(view.strides) == tensor.stride() else tensor


class KernelConfig(Protocol):
    """What a kernel is built from: a frozen dataclass whose name is like no other's."""

    @property
    def name(self) -> str: ...


def build(config: Any) -> bytes:
    """The object file of the kernel of ``config``. Takes seconds; needs no GPU."""
    from hopper.compile import compile_kernel
    from hopper.object_code import export_object

    return export_object(compile_kernel(config), config.name)


def load(data: bytes, name: str) -> Kernel:
    """The function ``name`` of an object file. Needs no GPU; calling it does.

    Raises:
        RuntimeError: the object cannot be linked, or has no such function.
    """
    # The runtime library ends the process when it does not find a prefix, so look before asking it.
    if f"{name}_function_name".encode() in data and runtime_library().is_file():
        return _load_by_runtime(data, name)
    return _load_by_dsl(data, name)


def _load_by_runtime(data: bytes, name: str) -> Kernel:
    import tvm_ffi

    runtime = _open_runtime()
    libraries = [str(runtime_library()).encode(), tvm_ffi.libinfo.find_libtvm_ffi().encode()]
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    address, status = ctypes.c_void_p(), ctypes.c_int64()
    _check(
        runtime,
        runtime.CuteDSLRT_Module_Create_From_Bytes(
            ctypes.byref(module),
            data,
            ctypes.c_size_t(len(data)),
            (ctypes.c_char_p * len(libraries))(*libraries),
            ctypes.c_size_t(len(libraries)),
        ),
    )
    _check(
        runtime,
        runtime.CuteDSLRT_Module_Get_Function(ctypes.byref(function), module, ctypes.c_char_p(name.encode())),
    )
    arguments = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(status))
    _check(runtime, runtime.CuteDSLRT_Function_Run(function, arguments, ctypes.c_size_t(2)))
    if not address.value:
        raise RuntimeError(f"the object of {name} gave no address of its function")
    # The module is never destroyed: the function lives as long as the process.
    return tvm_ffi.Function.__from_extern_c__(address.value)


@lru_cache(maxsize=1)
def _open_runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(str(runtime_library()))
    runtime.CuteDSLRT_GetErrorString.restype = ctypes.c_char_p
    return runtime


def _check(runtime: ctypes.CDLL, code: int) -> None:
    if code:
        raise RuntimeError(f"the CuTe DSL runtime: {runtime.CuteDSLRT_GetErrorString(code).decode()}")


def _load_by_dsl(data: bytes, name: str) -> Kernel:
    """The documented way, for a DSL whose runtime library is not where this one's is. Imports the DSL."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(data)
        return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[name]


@lru_cache(maxsize=1)
def runtime_library() -> Path:
    """The DSL's runtime library that suits this machine's driver; a path that is no file if there is none.

    The DSL installs one flavour a CUDA version, and takes the newest that the driver can run.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    flavours = {
        int(match[1]): library
        for folder in folders
        for library in folder.glob(f"cu*/lib/{RUNTIME_LIBRARY}")
        if (match := re.fullmatch(r"cu(\d+)", library.parts[-3]))
    }
    driver = driver_cuda_version()
    usable = [major for major in flavours if not driver or major <= driver[0]]
    return flavours[max(usable)] if usable else Path(RUNTIME_LIBRARY)


@lru_cache(maxsize=1)
def driver_cuda_version() -> tuple[int, ...]:
    """(major, minor) of the newest CUDA that the NVIDIA driver runs; empty without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return ()
    except (OSError, AttributeError):
        return ()
    return version.value // 1000, version.value % 1000 // 10


@lru_cache(maxsize=1)
def missing_packages() -> tuple[str, ...]:
    """Which of the packages that Hopper kernels need cannot be imported. Imports none of them."""
    modules = {DSL_PACKAGE: ("nvidia_cutlass_dsl", "cutlass"), FFI_PACKAGE: ("tvm_ffi",)}
    return tuple(
        package
        for package, names in modules.items()
        if any(importlib.util.find_spec(name) is None for name in names)
    )


def package_version(package: str) -> str:
    """The installed version of ``package``, or NOT_INSTALLED."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def toolchain() -> tuple[str, ...]:
    """What, besides the kernels' source, decides the bytes of an object and whether it loads here."""
    return (
        f"arch {ARCH}",
        f"dsl {package_version(DSL_PACKAGE)} {runtime_library().parts[-3:-2]}",
        f"ffi {package_version(FFI_PACKAGE)}",
        f"python {sys.version_info.major}.{sys.version_info.minor}",
        f"host {sys.platform} {platform.machine()}",
    )
