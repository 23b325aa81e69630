"""Compiled kernels: in memory, then as objects on disk, then compiled.

A folder of the cache belongs to one fingerprint: the source files that a kind of kernel is made of, the DSL, TVM FFI,
Python and the host. Whatever changes one of them gets another folder, so an entry is never out of date. An entry
is an object file followed by its SHA-256, written under another name and moved into place, so that no
process ever loads half of one. One process compiles an entry, under a lock; the others wait for it and
load the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import platformdirs

from cute_kernels.addition.config import AdditionConfig
from cute_kernels.ampere.backward.config import AmpereBackwardConfig
from cute_kernels.ampere.config import AmpereForwardConfig
from cute_kernels.append.config import AppendConfig
from cute_kernels.backward.step import BackwardStep
from cute_kernels.combine.config import CombineConfig
from cute_kernels.copies.config import CopiesConfig
from cute_kernels.dequantize.config import DequantizeConfig
from cute_kernels.launches.config import LaunchesConfig
from cute_kernels.merge.config import MergeConfig
from cute_kernels.rotation.config import RotationConfig
from hopper.backward.config import BackwardConfig
from hopper.compile import COMPILERS, module_of
from hopper.config import ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper.mean.config import RunMeansConfig, ValueMeanConfig
from hopper.mla.config import MlaConfig
from hopper.quantize.config import QuantizeConfig
from hopper.sources import sources_of
from hopper.transpose.config import TransposeConfig
from hopper.wide.config import WideForwardConfig
from hopper.widen.config import WidenConfig
from hopper_attention import _kernels
from hopper_attention._kernels import Kernel, KernelConfig
from hopper_attention.notices import warn_once

CACHE_DIR_VARIABLE = "HOPPER_ATTENTION_CACHE_DIR"
SUFFIX = ".o"
DIGEST_BYTES = hashlib.sha256().digest_size


class CorruptEntryError(Exception):
    """A file of the cache is not what was once written there."""


def cache_dir() -> Path:
    """The folder of all cached kernels: ``$HOPPER_ATTENTION_CACHE_DIR``, where ~ is the home folder, or the platform's
    cache folder."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("hopper-attention"))


@lru_cache(maxsize=16)
def fingerprint(module: str) -> str:
    """Name of the folder for the kernels that ``module`` compiles, of this source and by this toolchain."""
    digest = hashlib.sha256()
    for part in _kernels.toolchain():
        digest.update(f"{part}\n".encode())
    for name, path in (sources_of(module) | sources_of(_kernels.EXPORTER)).items():
        source = path.read_bytes()
        digest.update(f"{name} {len(source)}\n".encode())
        digest.update(source)
    return f"{module.removesuffix('.compile')}-{digest.hexdigest()[:20]}"


class CompileCache:
    """Kernels by config. Safe for many threads and many processes.

    Args:
        folder: where the entries of one fingerprint lie. Made when first needed.
        build: config -> object file.
        load: (object file, name) -> function. Raises if the object cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        build: Callable[[Any], bytes] = _kernels.build,
        load: Callable[[bytes, str], Kernel] = _kernels.load,
    ) -> None:
        self.folder = folder
        self._build = build
        self._load = load
        self._loaded: dict[str, Kernel] = {}
        self._lock = threading.RLock()

    def path(self, config: KernelConfig) -> Path:
        """Where the entry of ``config`` is or would be."""
        return self.folder / f"{config.name}{SUFFIX}"

    def contains(self, config: KernelConfig) -> bool:
        """Whether the disk holds an intact entry of ``config``."""
        try:
            read_entry(self.path(config))
        except (OSError, CorruptEntryError):
            return False
        return True

    def get(self, config: KernelConfig) -> Kernel:
        """The kernel of ``config``: from memory, from disk, or compiled now, which takes seconds."""
        # The compiler takes one thread at a time, so one lock serves every config.
        with self._lock:
            kernel = self._loaded.get(config.name)
            if kernel is None:
                kernel = self._from_disk(config) or self._compile(config)
                self._loaded[config.name] = kernel
            return kernel

    def ensure(self, config: KernelConfig) -> bool:
        """Make sure that the disk holds ``config``, without loading it. True if it had to be compiled.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._entry_lock(config):
            if self.contains(config):
                return False
            write_entry(self.path(config), self._build(config))
            return True

    def _compile(self, config: KernelConfig) -> Kernel:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._entry_lock(config))
            except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
                self._warn_unwritable(error)
                return self._load(self._build(config), config.name)
            # Another process may have compiled it while this one waited for the lock.
            kernel = self._from_disk(config)
            if kernel is not None:
                return kernel
            data = self._build(config)
            try:
                write_entry(self.path(config), data)
            except OSError as error:
                self._warn_unwritable(error)
            return self._load(data, config.name)

    def _from_disk(self, config: KernelConfig) -> Kernel | None:
        path = self.path(config)
        try:
            return self._load(read_entry(path), config.name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            # Whatever is wrong with a file of the cache, the answer is the same: move it aside, build anew.
            aside = path.with_name(f"{path.name}.unusable-{time.time_ns()}")
            with contextlib.suppress(OSError):
                os.replace(path, aside)
            warnings.warn(
                f"the cached kernel {path} cannot be used ({error}); compiling it again", stacklevel=2
            )
            return None

    @contextlib.contextmanager
    def _entry_lock(self, config: KernelConfig) -> Iterator[None]:
        # Only compiling needs it, and importing it is a tenth of what a warm first call may take.
        from filelock import FileLock

        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path(config)}.lock"):
            yield

    def _warn_unwritable(self, error: Exception) -> None:
        warn_once(
            f"the kernel cache {self.folder} cannot be written ({error}); kernels are kept in memory and "
            f"every process compiles its own. Set {CACHE_DIR_VARIABLE} to a folder that can be written"
        )


def read_entry(path: Path) -> bytes:
    """The object in a file of the cache.

    Raises:
        CorruptEntryError: its digest does not fit it.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    data, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise CorruptEntryError(f"its {len(content)} bytes do not match their checksum")
    return data


def write_entry(path: Path, data: bytes) -> None:
    """Put an object and its digest under ``path``, at once or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data + hashlib.sha256(data).digest())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@lru_cache(maxsize=64)
def _cache_in(folder: Path) -> CompileCache:
    return CompileCache(folder)


def folder_of(config: Any) -> Path:
    """Where the entry of ``config`` lies, beside those of its kind."""
    return cache_dir() / fingerprint(module_of(config))


def get_forward(config: ForwardConfig | WideForwardConfig | AmpereForwardConfig) -> Kernel:
    """The forward kernel of ``config``, ready to be called; see ``hopper.compile``."""
    return _cache_in(folder_of(config)).get(config)


def get_backward(config: BackwardConfig | AmpereBackwardConfig | BackwardStep) -> Kernel:
    """The backward kernel of ``config`` or one of its steps, ready to be called; see ``hopper.compile``."""
    return _cache_in(folder_of(config)).get(config)


def get_quantize(
    config: QuantizeConfig | ValueMeanConfig | RunMeansConfig | TransposeConfig | WidenConfig,
) -> Kernel:
    """What makes FP8 operands, ready to be called: the quantizer, what finds the mean of V, transposes V, or makes
    codes wider; see ``hopper.compile``."""
    return _cache_in(folder_of(config)).get(config)


def get_serving(
    config: AdditionConfig
    | AppendConfig
    | CombineConfig
    | CopiesConfig
    | DecodeConfig
    | DequantizeConfig
    | LaunchesConfig
    | MergeConfig
    | MlaConfig
    | RotationConfig,
) -> Kernel:
    """A kernel that works beside those of attention, ready to be called; see ``hopper.compile``."""
    return _cache_in(folder_of(config)).get(config)


def cached_kernels() -> tuple[Path, ...]:
    """The cached kernels that this source and toolchain can use."""
    folders = {cache_dir() / fingerprint(module) for module, _ in COMPILERS.values()}
    return tuple(sorted(path for folder in folders for path in folder.glob(f"*{SUFFIX}")))


@dataclass(frozen=True)
class Compilation:
    """What became of one config in ``compile_all``. ``error`` is empty unless it failed."""

    config: KernelConfig
    path: Path
    seconds: float
    was_cached: bool = False
    error: str = ""


def compile_all(
    configs: Sequence[KernelConfig],
    jobs: int,
    on_progress: Callable[[Compilation], None] = lambda compilation: None,
    *,
    build: Callable[[Any], bytes] = _kernels.build,
) -> tuple[Compilation, ...]:
    """Fill the cache on disk in parallel processes, with or without a GPU.

    Args:
        configs: what to compile, for instance ``hopper.config.shipped_forward_configs()``.
        jobs: processes to use; each takes about 1.5 GB of memory.
        on_progress: called in this process with each result as it comes.
        build: config -> object file; must be importable by name.

    Returns:
        One result a config, in the order of ``configs``. A config that fails does not stop the others.

    Raises:
        ValueError: ``jobs`` is below 1.
        OSError: the cache folder cannot be written.
        BrokenProcessPool: a process died, most likely for want of memory.

    An exception, an interrupt among them, ends the processes at once. What was finished before stays in the cache.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, allowed: 1 or more")
    folders = [folder_of(config) for config in configs]
    for folder in set(folders):
        folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Compilation] = {}

    def found(result: Compilation) -> None:
        results[result.config.name] = result
        on_progress(result)

    missing = []
    for folder, config in zip(folders, configs, strict=True):
        cache = CompileCache(folder)
        if cache.contains(config):
            found(Compilation(config, cache.path(config), 0.0, was_cached=True))
        else:
            missing.append((folder, config))
    # A process takes seconds to begin.
    if missing:
        with _worker_pool(min(jobs, len(missing))) as pool:
            with _interrupts_deferred():
                pending = [pool.submit(_compile_one, folder, config, build) for folder, config in missing]
            for future in as_completed(pending):
                found(future.result())
    return tuple(results[config.name] for config in configs)


def count_cached(configs: Sequence[KernelConfig]) -> int:
    """How many of ``configs`` the cache on disk holds."""
    return sum(CompileCache(folder_of(config)).contains(config) for config in configs)


@contextlib.contextmanager
def _worker_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that finish their work at the end of the block, and are killed where an exception leaves it.

    Killing them is safe: an entry is moved into place whole, and the system frees the locks of a dead process.
    """
    others = set(active_children())
    # Fresh interpreters: a forked child would inherit torch's threads and CUDA's state in a broken form.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        yield pool
    except BaseException:
        # Without this an interrupt would wait for everything that has been submitted.
        for worker in set(active_children()) - others:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold an interrupt back until the end of the block. Processes that start in it never see one.

    Ctrl-C reaches every process of a terminal. It is for the one that waits for the others to end them; each by itself
    would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _compile_one(folder: Path, config: KernelConfig, build: Callable[[Any], bytes]) -> Compilation:
    cache = CompileCache(folder, build=build)
    start = time.perf_counter()
    try:
        compiled = cache.ensure(config)
    except Exception as error:
        seconds = time.perf_counter() - start
        return Compilation(config, cache.path(config), seconds, error=f"{type(error).__name__}: {error}")
    return Compilation(config, cache.path(config), time.perf_counter() - start, was_cached=not compiled)
