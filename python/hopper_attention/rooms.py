"""Makes sure that ``hopper`` and ``cute_kernels`` are the packages that belong to this one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOMS = ("hopper", "cute_kernels")
HERE = Path(__file__).resolve().parent
ROOTS = (HERE.parent, HERE.parent.parent)
"""Where they may lie: beside this package when installed, one folder further up in the source tree."""


def check_rooms() -> None:
    """Raise ImportError if a foreign package or folder has taken the place of one of ours."""
    for room in ROOMS:
        spec = importlib.util.find_spec(room)
        places = list(spec.submodule_search_locations or []) if spec else []
        if any(Path(place).resolve().parent in ROOTS for place in places):
            continue
        found = f"found {places[0]}" if places else "found none"
        wanted = " or ".join(str(root / room) for root in ROOTS)
        raise ImportError(
            f"hopper_attention needs its own package {room!r} and {found}, expected {wanted}. If a folder "
            f"named {room!r} is in the working directory or on PYTHONPATH, it shadows ours: run from "
            "elsewhere or rename it. Otherwise reinstall hopper-attention."
        )
