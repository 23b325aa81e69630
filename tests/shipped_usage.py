"""What ptxas made of every shipped kernel, and of others that tests hold to have no spills, recorded, so that a run of
the tests need not compile them all again.

    python -m tests.shipped_usage            compile what the record does not hold for and record it; 3 s of a core each
    python -m tests.shipped_usage --all      compile all
    python -m tests.shipped_usage --compare  write nothing, but print whose machine code has changed
    python -m tests.shipped_usage --check    exit with 1 if the record is not of these sources
    python -m tests.shipped_usage --only X   compile only those whose name the expression X finds: after a change that
                                             reaches no others (a sample of them is held to that)

Of each kernel: registers, bytes of stack, spill stores, spill loads, shared memory, and a digest of the machine code.
So a change that should leave kernels as they are shows that it does.

The record of a kind of kernel holds for the sources that it is made of (``hopper.sources``), whatever their comments
and docstrings, and for one version of the DSL and its CUDA flavour. Where it does not hold, the tests compile all of
that kind; where it does, they compile a sample anew and hold it to the record (``tests/compile_pool.py``).
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple
from functools import cache, lru_cache
from importlib import import_module, metadata
from itertools import chain
from pathlib import Path
from typing import Any

from cute_kernels.ampere.backward.config import shipped_ampere_backward_kernels
from cute_kernels.ampere.config import shipped_ampere_forward_configs
from hopper.backward.shipped import shipped_backward_kernels
from hopper.compile import COMPILERS, module_of
from hopper.forward.fp8.tilings import (
    shipped_exact_lse_configs,
    shipped_fp8_forward_configs,
    shipped_long_fp8_forward_configs,
)
from hopper.forward.tilings import shipped_forward_configs, shipped_plain_configs
from hopper.inspection import DIGEST_LETTERS, ResourceUsage, resource_usage
from hopper.mean.config import shipped_run_means_configs, shipped_value_mean_configs
from hopper.quantize.config import shipped_long_quantize_configs, shipped_quantize_configs
from hopper.sources import sources_of
from hopper.transpose.config import shipped_transpose_configs
from hopper.widen.config import WidenConfig
from hopper_attention import _kernels

RECORD = Path(__file__).with_suffix(".json")
UNREAD = ("ctx", "kind", "type_comment", "type_params")
"""Fields of a syntax tree that follow from others, say nothing, or are not there in every Python."""

DSL_PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base")

BESIDE_SHIPPED = {
    "tests.hopper.test_grouped": ("COMPILED",),
    "tests.hopper.test_few_fp8_queries": ("COMPILED",),
    "tests.hopper.test_few_fp8_blocks": ("COMPILED",),
    "tests.hopper.test_forward_compile": ("PLAIN", "NOT_PLAIN", "ABLATED"),
    "tests.hopper.test_paged": ("COMPILED",),
    "tests.hopper.test_paged_groups": ("COMPILED",),
    "tests.hopper.test_group_rows": ("COMPILED",),
    "tests.hopper.test_fp8_paged": ("RECORDED",),
    "tests.hopper.test_fp8_packed": ("COMPILED",),
    "tests.hopper.test_fp8_head_dims": ("COMPILED",),
    "tests.hopper.test_backward_compile": ("WINDOWS_AND_PACKED", "CHANGED_SCORES", "PACKED_STEPS"),
    "tests.hopper.test_backward_divided_heads": ("COMPILED",),
    "tests.hopper.test_backward_walk": ("COMPILED",),
    "tests.hopper.test_backward_used_columns": ("COMPILED",),
    "tests.hopper.test_wide": ("COMPILED",),
    "tests.hopper.test_decode_compile": ("COMPILED",),
    "tests.hopper.test_mla": ("COMPILED",),
    "tests.hopper.test_scored_fp8": ("OF_ALL_KINDS",),
    "tests.hopper.test_quantize_compile": ("CONFIGS",),
    "tests.cute_kernels.test_append": ("COMPILED",),
    "tests.cute_kernels.test_combine": ("COMPILED",),
    "tests.cute_kernels.test_merge": ("COMPILED",),
    "tests.cute_kernels.test_backward_steps": ("COMPILED",),
    "tests.cute_kernels.ampere.test_forward_compile": ("WITH_WINDOW_OR_PACKED", "WITH_SCORES_CHANGED"),
    "tests.cute_kernels.ampere.test_backward_compile": ("WITH_WINDOW_OR_PACKED",),
}
"""Lists of other configs that are recorded, by the module of tests that they are in."""

FEW = 8
"""Kernels that are compiled here and now, sooner than processes start."""


def every_shipped_kernel() -> tuple[Any, ...]:
    """The config of each, once."""
    return (
        *shipped_forward_configs(),
        *shipped_plain_configs(),
        *shipped_fp8_forward_configs(),
        *shipped_long_fp8_forward_configs(),
        *shipped_fp8_forward_configs(two_level=True),
        *shipped_exact_lse_configs(),
        *shipped_quantize_configs(),
        *shipped_long_quantize_configs(),
        *shipped_value_mean_configs(),
        *shipped_run_means_configs(),
        *shipped_transpose_configs(),
        WidenConfig(),
        *shipped_backward_kernels(),
        *shipped_ampere_forward_configs(),
        *shipped_ampere_backward_kernels(),
    )


def every_recorded_kernel() -> dict[str, Any]:
    """By name, the shipped ones and those that tests name."""
    lists = [
        getattr(import_module(module), name) for module, names in BESIDE_SHIPPED.items() for name in names
    ]
    return {config.name: config for config in (*every_shipped_kernel(), *chain(*lists))}


@lru_cache(maxsize=16)
def fingerprint(module: str) -> str:
    """Of what decides the machine code of the kernels that ``module`` compiles: their source without comments and
    docstrings, and the toolchain."""
    digest = hashlib.sha256(_kernels.runtime_library().parent.parent.name.encode())
    for package in DSL_PACKAGES:
        digest.update(f"{package} {metadata.version(package)}\n".encode())
    for name, path in sources_of(module).items():
        digest.update(f"{name}\n{code_in(path)}\n".encode())
    return digest.hexdigest()[:DIGEST_LETTERS]


@cache
def code_in(path: Path) -> str:
    """The code of a file, which is part of many kinds of kernels."""
    return code_of(path.read_text())


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


def recorded(configs: Iterable[Any]) -> dict[str, ResourceUsage]:
    """By the config's name, of those of ``configs`` whose record is of these sources."""
    record = read_record()
    kinds = {module for module, known in record["fingerprints"].items() if known == fingerprint(module)}
    kernels = record["kernels"]
    return {
        config.name: ResourceUsage(*kernels[config.name])
        for config in configs
        if config.name in kernels and module_of(config) in kinds
    }


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def compile_each(
    configs: Sequence[Any], jobs: int = 0, compile_one: Callable[[Any], ResourceUsage] = resource_usage
) -> dict[Any, ResourceUsage]:
    """What ptxas reports on each; of more than a few in processes, because ``cute.compile`` is not thread-safe."""
    if len(configs) <= FEW:
        return {config: compile_one(config) for config in configs}
    context = multiprocessing.get_context("spawn")
    jobs = min(len(configs), jobs or os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(compile_one, config): config for config in configs}
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
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", type=re.compile, default="", help="a regular expression")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    every = every_recorded_kernel()
    holds = {} if options.all else recorded(every.values())
    missing = [config for name, config in every.items() if name not in holds]
    if options.check:
        return 1 if missing else 0
    usage = compile_each([c for c in missing if re.search(options.only, c.name)], options.jobs)
    found = {config.name: use for config, use in usage.items()}
    before = {name: ResourceUsage(*values) for name, values in read_record()["kernels"].items()}
    changed = sorted(name for name, use in found.items() if name in before and before[name] != use)
    print(f"{len(found)} kernels compiled, {len(changed)} of them changed")
    for name in changed:
        print(f"  {name}: recorded {astuple(before[name])}, compiled {astuple(found[name])}")
    if len(found) < len(missing):
        left_out = len(missing) - len(found)
        print(f"{left_out} kernels are taken to be as they were recorded: --only left them out")
    if options.compare:
        return 1 if changed else 0
    known = {name: use for name, use in (before | holds | found).items() if name in every}
    options.out.write_text(as_text(known))
    spilling = sorted(name for name, use in known.items() if use.spills)
    print(f"{len(known)} kernels recorded, {len(spilling)} with spills {spilling}")
    return 1 if spilling else 0


def as_text(usage: dict[str, ResourceUsage]) -> str:
    """The record, a kernel a line."""
    modules = sorted({module for module, _ in COMPILERS.values()})
    fingerprints = json.dumps({module: fingerprint(module) for module in modules}, indent=2)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(astuple(usage[name]))}" for name in sorted(usage))
    return f'{{"fingerprints": {fingerprints},\n"kernels": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    sys.exit(main())
