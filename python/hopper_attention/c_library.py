"""Writes what the C library is compiled from, beside the sources in ``hopper/c``: its tables, and objects of kernels.

``python -m hopper_attention.c_library FOLDER`` writes ``constants.h`` and ``kernel_table.c`` (``c_tables``) there, and
the object files of the kernels that are asked for. CMake runs this.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from cute_kernels.append.config import AppendConfig
from cute_kernels.problem import VARLEN
from hopper.config import WARPGROUP_ROWS, ForwardConfig
from hopper.decode.config import DecodeConfig
from hopper.forward.fp8.config import Fp8ForwardConfig
from hopper.mean.config import shipped_value_mean_configs
from hopper.quantize.config import QuantizeConfig
from hopper_attention import _kernels, compile_cache
from hopper_attention.c_tables import (
    PLAN,
    constants_header,
    kernel_table,
    library_kernels,
    library_variants,
)

DEFAULT, ALL, NONE = "default", "all", "none"
"""Sets of kernels: those of most models; every kernel of the tables, which has no variants; none, for selection and
errors alone."""

DEFAULT_CACHE_HEAD_DIMS = (64, 128)
DEFAULT_DECODE_BOX_ROWS = (128, 64, 16)
DEFAULT_PAGE_BOXES = (128, 64, 32, 16)


def is_default(config: _kernels.KernelConfig) -> bool:
    """Whether a kernel is in the set that is built unless another is asked for.

    Those are the forward kernels without a window and with one level of sums; of kernels that read caches, which come
    in very many kinds, those of 16 bits, head_dims of most models and pages of the usual sizes, to decode up to 32 rows
    of queries a K/V head; and what appends to such caches.
    """
    if isinstance(config, AppendConfig):
        return not config.is_scaled
    if isinstance(config, ForwardConfig) and config.page_box:
        is_usual = config.page_box in DEFAULT_PAGE_BOXES and config.head_dim == config.head_dim_v
        return is_usual and config.head_dim in DEFAULT_CACHE_HEAD_DIMS and not config.window
    if isinstance(config, DecodeConfig):
        return (
            not config.cache_dtype
            and config.tile_m < WARPGROUP_ROWS
            and config.head_dim == config.head_dim_v
            and config.head_dim in DEFAULT_CACHE_HEAD_DIMS
            and config.box_rows in DEFAULT_DECODE_BOX_ROWS
        )
    if isinstance(config, Fp8ForwardConfig) and config.two_level:
        return False
    return not (isinstance(config, ForwardConfig) and config.window)


def chosen_kernels(patterns: str) -> tuple[_kernels.KernelConfig, ...]:
    """The kernels to build.

    Args:
        patterns: sets (``DEFAULT``, ``ALL`` or ``NONE``) and shell patterns of names, separated by commas. A pattern
            that fits a kernel of the tables adds these, else those of the variants that it fits. With any kernel of
            packed sequences comes the one that plans them, with a quantizer those that find the mean of V.

    Raises:
        ValueError: a pattern fits no name.
    """
    chosen: dict[_kernels.KernelConfig, None] = {}
    for pattern in patterns.split(","):
        fitting = _fitting(pattern.strip())
        if not fitting and pattern.strip() != NONE:
            raise ValueError(
                f"kernels is {patterns!r}, allowed: {DEFAULT}, {ALL}, {NONE}, or patterns of names as "
                f"{library_kernels()[1].name!r} and 'hopper_fwd_bf16_d128_*', separated by commas"
            )
        chosen |= dict.fromkeys(fitting)
    if any(isinstance(config, ForwardConfig) and config.layout == VARLEN for config in chosen):
        chosen[PLAN] = None
    quantizers = {(config.dtype, config.layout) for config in chosen if isinstance(config, QuantizeConfig)}
    means = (config for config in shipped_value_mean_configs() if (config.dtype, config.layout) in quantizers)
    return tuple(chosen | dict.fromkeys(means))


def _fitting(pattern: str) -> list[_kernels.KernelConfig]:
    """The kernels of a set or a pattern."""
    kernels = library_kernels()
    if pattern in (DEFAULT, ALL, NONE):
        return [config for config in kernels if pattern == ALL or (pattern == DEFAULT and is_default(config))]
    fitting = [config for config in kernels if fnmatch(config.name, pattern)]
    return fitting or [each.config for name, each in library_variants().items() if fnmatch(name, pattern)]


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
