"""What ptxas reports on many configs, compiled side by side."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from hopper.inspection import ResourceUsage, resource_usage


def usage_of_each(configs: Sequence[Any]) -> dict[Any, ResourceUsage]:
    """By config; in processes, because ``cute.compile`` is not thread-safe."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(configs), os.cpu_count() or 1), mp_context=context) as pool:
        return dict(zip(configs, pool.map(resource_usage, configs), strict=True))
