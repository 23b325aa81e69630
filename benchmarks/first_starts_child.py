"""Run an example statement by statement, in a process that ``first_starts.py`` starts, and write what each one took.

    python benchmarks/first_starts_child.py EXAMPLE.py OUT.json

Nothing is imported that the example could have to import itself, but for what Python has loaded by then anyway.
"""

import time

BEGIN = time.perf_counter()

# What the clock is to count comes behind its start, the imports of this file among it.
import ast
import json
import os
import sys
from types import CodeType
from typing import Any

CACHE = "hopper_attention.compile_cache"
"""The module that gives compiled kernels as functions."""


def timed(code: CodeType, space: dict[str, Any]) -> float:
    start = time.perf_counter()
    exec(code, space)
    return round(time.perf_counter() - start, 4)


def watch_loads(seconds: dict[str, float]) -> None:
    """Note what it takes until each kernel is there for the first time."""
    cache: Any = sys.modules[CACHE].CompileCache
    get = cache.get

    def watched(self: Any, config: Any) -> Any:
        start = time.perf_counter()
        kernel = get(self, config)
        seconds.setdefault(config.name, time.perf_counter() - start)
        return kernel

    cache.get = watched


def wait() -> None:
    """For the GPU, where PyTorch has used one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def run(page: str) -> dict[str, Any]:
    """The example's times: of its statements, once and once more, and of the kernels' loading."""
    with open(page, encoding="utf-8") as file:
        nodes = ast.parse(file.read()).body
    space: dict[str, Any] = {"__name__": "example"}
    parts: list[list[Any]] = []
    statements: list[CodeType] = []
    loads: dict[str, float] = {}
    is_watched = False
    for node in nodes:
        code = compile(ast.Module([node], []), page, "exec")
        name = ast.unparse(node).splitlines()[0][:90]
        parts.append([name, timed(code, space)])
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            statements.append(code)
        if CACHE in sys.modules and not is_watched:
            is_watched = True
            watch_loads(loads)
        if name == "import torch" and sys.modules["torch"].cuda.is_available():
            parts.append(
                ["(CUDA context)", timed(compile("torch.zeros(1, device='cuda')", page, "exec"), space)]
            )
    start = time.perf_counter()
    wait()
    end = time.perf_counter()
    parts.append(["(until the GPU is done)", round(end - start, 4)])
    first_loads = len(loads), round(sum(loads.values()), 4)
    again = [timed(code, space) for code in statements]
    wait()
    return {
        "parts": parts,
        "again_s": round(sum(again), 4),
        "after_s": time.perf_counter() - end,
        "own_s": round(end - BEGIN, 4),
        "loads": first_loads,
    }


def paths_of_modules() -> list[tuple[str, str]]:
    """The file of each module, and where its bytecode is kept, if it has any; some objects among them have neither."""
    found = []
    for module in list(sys.modules.values()):
        source, bytecode = (vars(module).get(name) for name in ("__file__", "__cached__"))
        if isinstance(source, str):
            found.append((source, bytecode if isinstance(bytecode, str) else ""))
    return found


def files_of_process() -> list[str]:
    """Sources of modules, their bytecode, and what is mapped."""
    found = {path for source, bytecode in paths_of_modules() for path in (source, bytecode)}
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found |= {line.split(None, 5)[5].strip() for line in maps if line.count(" /")}
    return sorted(path for path in found if os.path.isfile(path))


def count_bytecode() -> dict[str, Any]:
    """Of the modules that came from a source, how many have bytecode on the disk now."""
    bytecode = [cached for source, cached in paths_of_modules() if source.endswith(".py") and cached]
    return {
        "modules": len(bytecode),
        "with_bytecode": sum(map(os.path.exists, bytecode)),
        "writes_bytecode": not sys.dont_write_bytecode,
    }


def main() -> None:
    page, out = sys.argv[1:]
    found = run(page)
    start = time.perf_counter()
    found |= count_bytecode() | {"files": files_of_process()}
    found["after_s"] += time.perf_counter() - start
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
