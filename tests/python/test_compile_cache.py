"""The compile cache: one compilation a key, whatever happens to the files and however many processes ask."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hopper import sources
from hopper.compile import COMPILERS
from hopper.config import ForwardConfig
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention import _kernels, compile_cache
from hopper_attention.compile_cache import CompileCache, compile_all, read_entry, write_entry

CONFIG = shipped_forward_configs()[0]
OTHER = next(c for c in shipped_forward_configs() if c.causal and c.head_dim == CONFIG.head_dim)
HERE = Path(__file__).parent


class Compiler:
    """Stands in for the DSL: counts what it builds and loads, and refuses to load what it did not build."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.loaded: list[str] = []

    def build(self, config: ForwardConfig) -> bytes:
        self.built.append(config.name)
        return f"object of {config.name}".encode()

    def load(self, data: bytes, name: str):
        if data != f"object of {name}".encode():
            raise RuntimeError("not an object file")
        self.loaded.append(name)
        return lambda: name

    def cache(self, folder: Path) -> CompileCache:
        return CompileCache(folder, build=self.build, load=self.load)


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def test_memory_then_disk_then_compiler(tmp_path: Path, compiler: Compiler) -> None:
    first = compiler.cache(tmp_path / "cache")
    kernel = first.get(CONFIG)
    assert kernel() == CONFIG.name and first.get(CONFIG) is kernel
    assert compiler.built == [CONFIG.name] and first.contains(CONFIG) and not first.contains(OTHER)
    assert first.path(CONFIG) == tmp_path / "cache" / f"{CONFIG.name}.o"
    # Another process starts with the disk alone.
    assert compiler.cache(tmp_path / "cache").get(CONFIG)() == CONFIG.name
    assert compiler.built == [CONFIG.name] and compiler.loaded == [CONFIG.name] * 2


def test_configs_do_not_share_entries(tmp_path: Path, compiler: Compiler) -> None:
    cache = compiler.cache(tmp_path)
    variant = replace(CONFIG, ping_pong=not CONFIG.ping_pong)
    assert [cache.get(c)() for c in (CONFIG, OTHER, variant)] == [CONFIG.name, OTHER.name, variant.name]
    assert len(set(compiler.built)) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
        lambda path: write_entry(path, b"intact, but no object"),
        lambda path: (path.unlink(), path.mkdir(), (path / "file").touch()),
    ],
    ids=["empty", "truncated", "flipped bit", "unloadable", "a folder"],
)
def test_a_damaged_entry_is_moved_aside_and_rebuilt(tmp_path: Path, compiler: Compiler, damage) -> None:
    path = compiler.cache(tmp_path).path(CONFIG)
    compiler.cache(tmp_path).get(CONFIG)
    damage(path)
    fresh = compiler.cache(tmp_path)
    with pytest.warns(UserWarning, match=r"cached kernel .* cannot be used .*; compiling it again"):
        assert fresh.get(CONFIG)() == CONFIG.name
    assert compiler.built == [CONFIG.name] * 2
    assert read_entry(path) == f"object of {CONFIG.name}".encode()
    assert len(list(tmp_path.glob(f"{path.name}.unusable-*"))) == 1
    compiler.cache(tmp_path).get(CONFIG)
    assert len(compiler.built) == 2


def test_nothing_half_written_is_ever_in_place(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = compiler.cache(tmp_path)

    def refuse(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(UserWarning, match="cannot be written .disk full."):
        assert cache.get(CONFIG)() == CONFIG.name
    assert not cache.path(CONFIG).exists() and list(tmp_path.glob("*.partial")) == []


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, compiler: Compiler) -> None:
    # Permissions would not stop root, which tests may run as; a file in the folder's place stops everyone.
    (tmp_path / "file").touch()
    cache = compiler.cache(tmp_path / "file" / "cache")
    with pytest.warns(UserWarning) as caught:
        assert cache.get(CONFIG)() == CONFIG.name
        assert cache.get(OTHER)() == OTHER.name
        assert cache.get(CONFIG)() == CONFIG.name
    assert compiler.built == [CONFIG.name, OTHER.name]
    (warning,) = caught
    assert "kept in memory" in str(warning.message) and "HOPPER_ATTENTION_CACHE_DIR" in str(warning.message)
    with pytest.raises(OSError):
        cache.ensure(CONFIG)


def test_threads_share_one_compilation(tmp_path: Path, compiler: Compiler) -> None:
    cache = compiler.cache(tmp_path)
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait()
        cache.get(CONFIG)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.built == [CONFIG.name]


def test_racing_processes_compile_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / "cache_worker.py"), str(folder), str(log), "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    racers, answers = zip(*map(str.split, done.stdout.splitlines()), strict=True)
    assert len(set(racers)) == 2 and answers[0] == answers[1]
    name, maker = answers[0].split("/")
    assert name == CONFIG.name and maker in racers
    assert log.read_text() == f"{CONFIG.name}\n"
    # This process comes late.
    late = CompileCache(folder, build=refuse, load=lambda data, name: data.decode)
    assert late.get(CONFIG)() == answers[0]


def refuse(config: ForwardConfig) -> bytes:
    raise AssertionError(f"{config.name} is compiled again")


# the shared cache


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPPER_ATTENTION_CACHE_DIR", str(tmp_path / "mine"))
    assert compile_cache.cache_dir() == tmp_path / "mine"
    # As files of settings have it, which no shell reads.
    monkeypatch.setenv(compile_cache.CACHE_DIR_VARIABLE, "~/mine")
    assert compile_cache.cache_dir() == Path.home() / "mine"
    assert compile_cache.cached_kernels() == ()
    monkeypatch.delenv("HOPPER_ATTENTION_CACHE_DIR")
    assert compile_cache.cache_dir().name == "hopper-attention"


def test_fingerprint_follows_a_kernels_own_source_and_the_toolchain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(module: str = "hopper.mine.compile") -> str:
        compile_cache.fingerprint.cache_clear()
        sources.sources_of.cache_clear()
        return compile_cache.fingerprint(module)

    for folder in ("hopper", "hopper/mine", "hopper/other", "cute_kernels"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "hopper/mine/compile.py").write_text("from cute_kernels import (\n    mask,\n)\n")
    (tmp_path / "hopper/other/compile.py").write_text("    import hopper.mine.compile\n")
    (tmp_path / "cute_kernels/mask.py").write_text("one")
    monkeypatch.setattr(sources, "ROOTS", {name: tmp_path / name for name in sources.ROOTS})
    before, other = fingerprint(), fingerprint("hopper.other.compile")
    assert before.startswith("hopper.mine-") and fingerprint() == before
    (tmp_path / "hopper/other/compile.py").write_text("import hopper.mine.compile as theirs\n")
    assert fingerprint() == before
    (tmp_path / "cute_kernels/mask.py").write_text("two")
    after = fingerprint()
    assert after != before and fingerprint("hopper.other.compile") != other
    monkeypatch.setattr(_kernels, "toolchain", lambda: ("dsl 99",))
    assert fingerprint() not in (before, after)
    monkeypatch.undo()
    compile_cache.fingerprint.cache_clear()
    sources.sources_of.cache_clear()


def test_sources_are_what_the_syntax_tree_imports() -> None:
    """Of every kind of kernel; no kind reaches the compilation of another."""
    modules = {module for module, _ in COMPILERS.values()}
    for module in modules:
        reached = sources.sources_of(module)
        assert modules & set(reached) == {module}
        for name, path in reached.items():
            imported: set[str] = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            ours = {module for module in imported if module.partition(".")[0] in sources.ROOTS}
            assert set(sources.imported_by(path.read_text())) == ours, name


def test_compile_all_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPPER_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHE_WORKER_LOG", str(tmp_path / "log"))
    monkeypatch.syspath_prepend(str(HERE))
    import cache_worker

    seen = []
    results = compile_all([CONFIG, OTHER], 2, seen.append, build=cache_worker.fail)
    assert CONFIG.causal is False and OTHER.causal is True
    assert [(r.config, r.was_cached, r.error) for r in results] == [
        (CONFIG, False, ""),
        (OTHER, False, "RuntimeError: out of registers"),
    ]
    assert results[0].seconds >= cache_worker.COMPILE_SECONDS
    assert sorted(r.config.name for r in seen) == sorted([CONFIG.name, OTHER.name])
    assert compile_cache.cached_kernels() == (results[0].path,)
    # What is there starts no process.
    monkeypatch.delattr(compile_cache, "_worker_pool")
    (again,) = compile_all([CONFIG], 1, build=cache_worker.fail)
    assert again.was_cached and (tmp_path / "log").read_text() == f"{CONFIG.name}\n"
    with pytest.raises(ValueError, match="jobs is 0, allowed: 1 or more"):
        compile_all([CONFIG], 0)


# objects


@pytest.fixture(scope="module")
def toy_object() -> bytes:
    sys.path.insert(0, str(HERE))
    from toy_kernel import compile_scale

    from hopper.object_code import export_object

    sys.path.remove(str(HERE))
    return export_object(compile_scale(), "toy_scale")


LOAD = """
import sys, torch
from hopper_attention import _kernels
kernel = _kernels.load(open(sys.argv[1], "rb").read(), "toy_scale")
try:
    kernel(torch.zeros(3), torch.zeros(3), 2.0)
except ValueError as error:
    print("cutlass" in sys.modules, error)
"""


def test_an_object_loads_without_the_dsl(tmp_path: Path, toy_object: bytes) -> None:
    path = tmp_path / "toy.o"
    path.write_bytes(toy_object)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOAD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    imported, message = done.stdout.split(maxsplit=1)
    # The kernel's own check of its arguments answers, so it is the kernel that was loaded.
    assert imported == "False"
    assert "expected device_type=cuda" in message and "src: Tensor([n0], float32)" in message


def test_the_dsl_loads_the_same_object(toy_object: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "runtime_library", lambda: Path("no such library"))
    kernel = _kernels.load(toy_object, "toy_scale")
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        kernel(torch.zeros(3), torch.zeros(3), 2.0)


def test_an_object_without_the_function_is_refused(toy_object: bytes) -> None:
    with pytest.raises(Exception, match="another_name"):
        _kernels.load(toy_object, "another_name")


def test_export_refuses_what_is_no_ffi_function() -> None:
    from hopper.object_code import export_object

    class Plain:
        ir_module, function_name = "module {\n}", "f"

    with pytest.raises(RuntimeError, match="not a TVM FFI function"):
        export_object(Plain(), "name")


def test_ptxas_report_is_read() -> None:
    from hopper.inspection import parse_ptxas

    report = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas         .     16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers\n"
    )
    usage = parse_ptxas(report, 1024)
    assert (usage.registers, usage.stack_bytes, usage.shared_bytes) == (168, 16, 1024)
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.spills) == (24, 40, True)
    with pytest.raises(RuntimeError, match="found 0 reports"):
        parse_ptxas("", 0)


# the toolchain


def test_runtime_library_suits_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flavour in ("cu12", "cu13", "cu20"):
        library = tmp_path / flavour / "lib" / _kernels.RUNTIME_LIBRARY
        library.parent.mkdir(parents=True)
        library.touch()

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(_kernels.importlib.util, "find_spec", lambda name: Spec())
    for driver, flavour in (((), "cu20"), ((13, 2), "cu13"), ((12, 9), "cu12")):
        monkeypatch.setattr(_kernels, "driver_cuda_version", lambda driver=driver: driver)
        _kernels.runtime_library.cache_clear()
        assert _kernels.runtime_library() == tmp_path / flavour / "lib" / _kernels.RUNTIME_LIBRARY
    monkeypatch.setattr(_kernels, "driver_cuda_version", lambda: (11, 8))
    _kernels.runtime_library.cache_clear()
    assert not _kernels.runtime_library().is_file()
    monkeypatch.undo()
    _kernels.runtime_library.cache_clear()


def test_toolchain_names_everything_that_decides_an_object() -> None:
    text = " ".join(_kernels.toolchain())
    assert "sm_90a" in text and torch.__version__ not in text
    assert f"python {sys.version_info.major}.{sys.version_info.minor}" in text
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        assert _kernels.package_version(package) in text
    assert _kernels.package_version("no-such-package") == _kernels.NOT_INSTALLED
