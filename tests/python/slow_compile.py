"""``hopper-attention compile`` with a compiler that makes one kernel at once and takes a minute for any other.

``python slow_compile.py TEXT JOBS`` compiles the configs whose name contains TEXT. A line of LOG is a kernel that has
begun.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial

from hopper.config import ForwardConfig
from hopper.forward.tilings import shipped_forward_configs
from hopper_attention import cli, compile_cache

LOG_VARIABLE = "SLOW_COMPILE_LOG"
QUICK = shipped_forward_configs()[0].name


def build(config: ForwardConfig) -> bytes:
    with open(os.environ[LOG_VARIABLE], "a") as log:
        log.write(f"{config.name}\n")
    if config.name != QUICK:
        time.sleep(60)
    return config.name.encode()


if __name__ == "__main__":
    compile_cache.compile_all = partial(compile_cache.compile_all, build=build)
    cli.app(["compile", "--jobs", sys.argv[2], "--arch", "sm_90a", "--only", sys.argv[1]])
