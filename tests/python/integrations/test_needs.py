"""An integration says what is missing before it imports names from it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from hopper_attention.integrations.needs import need


def make(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    module = ModuleType(name)
    module.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, name, module)


def test_a_package_that_is_not_there() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"needs no_such_package.*pip install 'hopper-attention\[no_such_"
    ):
        need("no_such_package")


@pytest.mark.parametrize("version", ["0.34.9", "0.9", "0.34.0.dev0", "0.34rc1"])
def test_an_older_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    make(monkeypatch, "some_package", version)
    with pytest.raises(ImportError, match=f"^some_package has version {version}, allowed: 0.35 or newer"):
        need("some_package", (0, 35))


@pytest.mark.parametrize("version", ["0.35", "0.35.1", "0.100.dev0", "1.0rc1", "unknown"])
def test_one_that_is_new_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    make(monkeypatch, "some_package", version)
    need("some_package", (0, 35))
