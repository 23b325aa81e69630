"""Two launches side by side on a GPU, the second where the first has no more work for an SM."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from hopper_attention.distributed.exchange import give_head_start


@lru_cache(maxsize=64)
def _other_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


def launch_beside(device: torch.device, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Launch both. CTAs of ``second`` take the SMs that ``first`` leaves when it runs out of tiles.

    ``second`` is on another stream, ``first`` on the current one, which goes on when both are done. So nothing that
    they read or write may be freed or given to another stream by either.
    """
    current, other = torch.cuda.current_stream(device), _other_stream(device.index)
    other.wait_stream(current)
    first()
    with torch.cuda.stream(other):
        give_head_start(device)
        second()
    current.wait_stream(other)
