"""What an integration is for: that it is there, in a version that the integration knows."""

from __future__ import annotations

import importlib
import re


def need(package: str, oldest: tuple[int, int] = (0, 0)) -> None:
    """Raise ImportError unless a package can be imported and is no older; the extra of its name brings it.

    To be called before names are imported from it, which an older one may lack.
    """
    how = f"install it with: pip install 'hopper-attention[{package}]'"
    try:
        found = str(importlib.import_module(package).__version__)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"hopper_attention.integrations.{package} needs {package}, which is not installed here; {how}",
            name=package,
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and tuple(map(int, numbers.groups())) < oldest:
        wanted = ".".join(map(str, oldest))
        raise ImportError(f"{package} has version {found}, allowed: {wanted} or newer; {how}")
