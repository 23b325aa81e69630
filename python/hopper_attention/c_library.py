"""What the C library takes from the Python source: which kernel serves a problem, limits, and the kernels themselves.

``python -m hopper_attention.c_library FOLDER`` writes ``constants.h`` and ``kernel_table.c`` there, and the objects of
the kernels that were asked for. The tables are made by asking the selection of this package, row by row, so that there
is one source of what serves what. CMake runs this; the sources that it is compiled with are in ``hopper/c``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from cute_kernels.plan.config import ENTRY, MAX_PACKED_ROWS, PLAN_HEADER, RECORD, PlanConfig
from cute_kernels.problem import DENSE, DTYPES, LAYOUTS, MAX_HEAD_DIM, MAX_SEQLEN, MAX_TILES, VARLEN
from cute_kernels.window import MAX_SEQLEN_OF_WINDOW, NO_LIMIT
from hopper.config import ForwardConfig
from hopper.forward.tilings import ANY_LENGTH, NATIVE_HEAD_DIMS, select_forward_config
from hopper_attention import _kernels, checks, compile_cache
from hopper_attention.machine import find_version
from hopper_attention.masks import UNLIMITED
from hopper_attention.problem import length_bounds

DEFAULT, ALL, NONE = "default", "all", "none"
"""Sets of kernels: those of most models; every kernel of the tables; none, for selection and errors alone."""

PLAN = PlanConfig(_kernels.ARCH)

C_DTYPES = {"float16": "HA_FLOAT16", "bfloat16": "HA_BFLOAT16"}
C_LAYOUTS = {DENSE: "LAYOUT_DENSE", VARLEN: "LAYOUT_VARLEN"}


@dataclass(frozen=True)
class ForwardRow:
    """A choice of a 16-bit forward kernel; ``config`` serves up to ``max_seqlen_k`` keys that a query sees."""

    config: ForwardConfig
    max_seqlen_k: int


def forward_rows() -> tuple[ForwardRow, ...]:
    """Every choice of ``select_forward_config``; those that differ in ``max_seqlen_k`` alone in ascending order."""
    bounds = length_bounds()
    rows: list[ForwardRow] = []
    for dtype in DTYPES:
        for layout in LAYOUTS:
            for dims in NATIVE_HEAD_DIMS:
                for causal in (False, True):
                    for window in (False, True):
                        rows += _rows_of(dtype, layout, dims, (causal, window), bounds)
    return tuple(rows)


def _rows_of(
    dtype: str, layout: str, dims: tuple[int, int], mask: tuple[bool, bool], bounds: Sequence[int]
) -> list[ForwardRow]:
    """The rows of problems that differ in length alone; one for each run of bounds with the same config."""
    causal, window = mask
    chosen = [select_forward_config(dtype, *dims, causal, bound, window, layout) for bound in bounds]
    return [
        ForwardRow(config, bound)
        for config, bound, after in zip(chosen, bounds, (*chosen[1:], None), strict=True)
        if config != after
    ]


def library_kernels() -> tuple[_kernels.KernelConfig, ...]:
    """The config of every kernel that the C library selects from, each once."""
    return PLAN, *dict.fromkeys(row.config for row in forward_rows())


def is_default(config: _kernels.KernelConfig) -> bool:
    """Whether a kernel is in the set that is built unless another is asked for: all without a window."""
    return not (isinstance(config, ForwardConfig) and config.window)


def chosen_kernels(patterns: str) -> tuple[_kernels.KernelConfig, ...]:
    """The kernels to build.

    Args:
        patterns: a set (``DEFAULT``, ``ALL`` or ``NONE``), or shell patterns of names, separated by commas. With any
            kernel of packed sequences comes the one that plans them.

    Raises:
        ValueError: a pattern fits no name.
    """
    kernels = library_kernels()
    if patterns == NONE:
        return ()
    if patterns in (DEFAULT, ALL):
        return tuple(config for config in kernels if patterns == ALL or is_default(config))
    chosen: dict[_kernels.KernelConfig, None] = {}
    for pattern in patterns.split(","):
        fitting = [config for config in kernels if fnmatch(config.name, pattern.strip())]
        if not fitting:
            raise ValueError(
                f"kernels is {pattern!r}, allowed: {DEFAULT}, {ALL}, {NONE}, or patterns of names as "
                f"{kernels[1].name!r} and 'hopper_fwd_bf16_d128_*'"
            )
        chosen |= dict.fromkeys(fitting)
    if any(isinstance(config, ForwardConfig) and config.layout == VARLEN for config in chosen):
        chosen[PLAN] = None
    return tuple(chosen)


def constants_header() -> str:
    """``constants.h``: limits and numbers that the C sources share with this package."""
    numbers = {
        "MAX_SEQLEN": MAX_SEQLEN,
        "MAX_TILES": MAX_TILES,
        "MAX_PACKED_ROWS": MAX_PACKED_ROWS,
        "MAX_WINDOW_LENGTH": MAX_SEQLEN_OF_WINDOW,
        "NO_LIMIT": NO_LIMIT,
        "UNLIMITED": UNLIMITED,
        "HEAD_DIM_STEP": checks.HEAD_DIM_STEP,
        "MAX_HEAD_DIM": MAX_HEAD_DIM,
        "SMALLEST_SCALE": checks.SMALLEST_SCALE,
        "LARGEST_SCALE": checks.LARGEST_SCALE,
        "PLAN_HEADER": PLAN_HEADER,
        "PLAN_RECORD": RECORD,
        "PLAN_ENTRY": ENTRY,
    }
    lines = [f"#define {name} ({value!r})" for name, value in numbers.items()]
    lines.append(f'#define LIBRARY_VERSION "{find_version()}"')
    return "\n".join(["/* Generated by hopper_attention.c_library. */", "#pragma once", *lines, ""])


def kernel_table(built: Iterable[_kernels.KernelConfig]) -> str:
    """``kernel_table.c``: every kernel with its entry, NULL for those not in ``built``, and which serves what."""
    kernels, names = library_kernels(), {config.name for config in built}
    index = {config.name: i for i, config in enumerate(kernels)}
    lines = ["/* Generated by hopper_attention.c_library. */", '#include "internal.h"', ""]
    lines += [f"extern ffi_function __tvm_ffi_{name};" for name in sorted(names)]
    lines += ["", "const kernel ha_kernels[] = {"]
    lines += [
        f'    {{"{config.name}", {f"__tvm_ffi_{config.name}" if config.name in names else "NULL"}}},'
        for config in kernels
    ]
    lines += ["};", f"const size_t ha_num_kernels = {len(kernels)};"]
    lines += [
        f"const int ha_plan_kernel = {index[PLAN.name]};",
        "",
        "const forward_row ha_forward_rows[] = {",
    ]
    rows = forward_rows()
    lines += [f"    {{{_c_row(row, index[row.config.name])}}}," for row in rows]
    lines += ["};", f"const size_t ha_num_forward_rows = {len(rows)};", ""]
    return "\n".join(lines)


def _c_row(row: ForwardRow, kernel: int) -> str:
    c = row.config
    longest = "INT64_MAX" if row.max_seqlen_k == ANY_LENGTH else str(row.max_seqlen_k)
    flags = (str(flag).lower() for flag in (c.causal, c.window))
    fields = C_DTYPES[c.dtype], C_LAYOUTS[c.layout], *flags, c.head_dim, c.head_dim_v
    return ", ".join(map(str, (*fields, longest, c.tile_m, c.ctas_per_sm, kernel)))


def write_sources(folder: Path, built: Iterable[_kernels.KernelConfig]) -> None:
    """Write what is generated of the C sources to ``folder``; a file that is as it should be keeps its time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("constants.h", constants_header()), ("kernel_table.c", kernel_table(built))):
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def write_objects(folder: Path, configs: Sequence[_kernels.KernelConfig], jobs: int) -> list[str]:
    """Write ``<name>.o`` of each kernel, compiled in ``jobs`` processes or taken from the compile cache.

    Returns:
        What went wrong, a line a kernel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = compile_cache.compile_all(configs, jobs, _report) if configs else ()
    for result in results:
        if not result.error:
            (folder / f"{result.config.name}.o").write_bytes(compile_cache.read_entry(result.path))
    return [f"{result.config.name}: {result.error}" for result in results if result.error]


def _report(result: compile_cache.Compilation) -> None:
    how = "cached" if result.was_cached else f"{result.seconds:.0f} s"
    print(f"  {result.config.name} ({how})", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write sources and objects, or with ``--list`` print the names of the kernels that would be built."""
    parser = argparse.ArgumentParser(prog="python -m hopper_attention.c_library", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the generated files go")
    parser.add_argument("--kernels", default=DEFAULT, help=f"{DEFAULT}, {ALL}, {NONE}, or patterns of names")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="compiler processes")
    parser.add_argument(
        "--list", action="store_true", help="print the names of the kernels, write sources only"
    )
    given = parser.parse_args(arguments)
    try:
        configs = chosen_kernels(given.kernels)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    write_sources(given.folder, configs)
    if given.list:
        print("\n".join(config.name for config in configs))
        return 0
    wrong = write_objects(given.folder, configs, given.jobs)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
