"""What ptxas made of every shipped kernel, recorded, so that a run of the tests need not compile them all again.

    python -m tests.shipped_usage            compile all and write the record; some 500 kernels, 5 s of a core each
    python -m tests.shipped_usage --check    exit with 1 if the record is not of these sources
    python -m tests.shipped_usage --only X   compile those whose name the regular expression X finds, and keep the rest:
                                             after a change that reaches no others (a sample of them is held to that)

The record holds for the sources that it was made from, whatever their comments and docstrings, and for one version of
the DSL and its CUDA flavour. Where it does not hold, the tests compile everything; where it does, they compile a sample
anew and hold it to the record (``tests/compile_pool.py``).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from cute_kernels.ampere.backward.config import shipped_ampere_backward_kernels
from cute_kernels.ampere.config import shipped_ampere_forward_configs
from hopper.backward.config import shipped_backward_kernels
from hopper.config import shipped_forward_configs
from hopper.fp8_config import shipped_fp8_forward_configs
from hopper.inspection import ResourceUsage, resource_usage
from hopper.quantize.config import shipped_quantize_configs
from hopper_attention import _kernels

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
UNREAD = ("ctx", "kind", "type_comment", "type_params")
"""Fields of a syntax tree that follow from others, say nothing, or are not there in every Python."""

DSL_PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base")


def every_shipped_kernel() -> tuple[Any, ...]:
    """The config of each, once."""
    return (
        *shipped_forward_configs(),
        *shipped_fp8_forward_configs(),
        *shipped_fp8_forward_configs(two_level=True),
        *shipped_quantize_configs(),
        *shipped_backward_kernels(),
        *shipped_ampere_forward_configs(),
        *shipped_ampere_backward_kernels(),
    )


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Of what decides the machine code: the kernels' source without comments and docstrings, and the toolchain."""
    digest = hashlib.sha256(_kernels.runtime_library().parent.parent.name.encode())
    for package in DSL_PACKAGES:
        digest.update(f"{package} {metadata.version(package)}\n".encode())
    for folder in ("cute_kernels", "hopper"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT).as_posix()}\n{code_of(path.read_text())}\n".encode())
    return digest.hexdigest()


def code_of(source: str) -> str:
    """A module's code, whatever its comments, docstrings and layout, and the Python that reads it."""
    return " ".join(words_of(ast.parse(source)))


def words_of(node: object) -> Iterator[str]:
    """The tree below a node. ``ast.dump`` differs between versions of Python."""
    if isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if name not in UNREAD and value is not None:
                yield name
                yield from words_of(value)
    elif isinstance(node, list):
        for value in node:
            if not is_text(value):
                yield from words_of(value)
        yield "end"
    else:
        yield repr(node)


def is_text(statement: object) -> bool:
    """Whether a statement is a string alone, which documents what it stands in or behind."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@lru_cache(maxsize=1)
def recorded() -> dict[str, ResourceUsage]:
    """By the config's name; empty if the record is not of these sources."""
    record = json.loads(RECORD.read_text())
    if record["fingerprint"] != fingerprint():
        return {}
    return {name: ResourceUsage(*values) for name, values in record["usage"].items()}


def compile_each(configs: Sequence[Any], jobs: int = 0) -> dict[Any, ResourceUsage]:
    """What ptxas reports on each; in processes, because ``cute.compile`` is not thread-safe."""
    if not configs:
        return {}
    context = multiprocessing.get_context("spawn")
    jobs = min(len(configs), jobs or os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(resource_usage, config): config for config in configs}
        done = {}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            if sys.stderr.isatty():
                print(f"\r{len(done)} of {len(configs)} kernels", end="", file=sys.stderr)
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", type=re.compile, default="", help="a regular expression")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    if options.check:
        return 0 if recorded() else 1
    every = every_shipped_kernel()
    chosen = [config for config in every if re.search(options.only, config.name)]
    kept = json.loads(RECORD.read_text())["usage"] if options.only else {}
    usage = compile_each(chosen, options.jobs)
    by_name = {config.name: kept[config.name] for config in every if config.name in kept}
    by_name |= {config.name: astuple(found) for config, found in usage.items()}
    lines = ",\n".join(f'  "{name}": {list(by_name[name])}' for name in sorted(by_name))
    options.out.write_text(f'{{"fingerprint": "{fingerprint()}", "usage": {{\n{lines}\n}}}}\n')
    spilling = sorted(config.name for config, found in usage.items() if found.spills)
    print(f"{len(by_name)} kernels, {len(spilling)} with spills {spilling}")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
