"""A process that asks the compile cache for a kernel; the cache's tests start several at once.

``python cache_worker.py FOLDER LOG`` prints what it got. Each compilation adds a line to LOG.
"""

from __future__ import annotations

import os
import sys
import time
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
    return f"{config.name} by {os.getpid()}".encode()


def fail(config: ForwardConfig) -> bytes:
    """A compiler that gives up on causal kernels."""
    if config.causal:
        raise RuntimeError("out of registers")
    return build(config)


def main() -> None:
    folder, os.environ[LOG_VARIABLE] = sys.argv[1:]
    cache = CompileCache(Path(folder), build=build, load=lambda data, name: data.decode)
    print(cache.get(shipped_forward_configs()[0])())


if __name__ == "__main__":
    main()
