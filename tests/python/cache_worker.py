"""Processes that ask the compile cache for a kernel at the same time.

``python cache_worker.py FOLDER LOG NUMBER`` starts so many; each prints who it is and what it got. Each compilation
adds a line to LOG.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path

from hopper.config import ForwardConfig
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention.compile_cache import CompileCache

COMPILE_SECONDS = 0.5
LOG_VARIABLE = "CACHE_WORKER_LOG"


def build(config: ForwardConfig) -> bytes:
    """Takes a while and leaves a trace, as the compiler does; the object names the process that made it."""
    with open(os.environ[LOG_VARIABLE], "a") as log:
        log.write(f"{config.name}\n")
    time.sleep(COMPILE_SECONDS)
    return f"{config.name}/{os.getpid()}".encode()


def fail(config: ForwardConfig) -> bytes:
    """A compiler that gives up on causal kernels."""
    if config.causal:
        raise RuntimeError("out of registers")
    return build(config)


def ask(folder: str) -> None:
    cache = CompileCache(Path(folder), build=build, load=lambda data, name: data.decode)
    sys.stdout.write(f"{os.getpid()} {cache.get(shipped_forward_configs()[0])()}\n")


def main() -> None:
    folder, os.environ[LOG_VARIABLE], number = sys.argv[1:]
    # Forked, since what they import takes far longer than what they do.
    racers = [get_context("fork").Process(target=ask, args=(folder,)) for _ in range(int(number))]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    sys.exit(max(racer.exitcode or 0 for racer in racers))


if __name__ == "__main__":
    main()
