"""Which of the ways to attend to a key/value cache serves a call, and why: read by the launcher and by ``explain``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hopper_attention.backends import Target
from hopper_attention.kvcache_checks import CacheCall


@dataclass(frozen=True)
class Rule:
    """A way, which ``launch/kvcache.py`` has under the same name.

    Attributes:
        path: its name.
        what: what it does, in a sentence.
        why_not: what of a call, or of a GPU, keeps it from serving; empty if nothing does.
    """

    path: str
    what: str
    why_not: Callable[[CacheCall, Target], str]


@dataclass(frozen=True)
class PathChoice:
    """The way that serves a call, what it does, and what kept each of those before it from serving."""

    path: str
    what: str
    refused: tuple[str, ...]


def nothing(call: CacheCall, target: Target) -> str:
    """Of a way that serves every call."""
    return ""


RULES = (
    Rule(
        "general",
        "keys and values become sequences of one tensor, copied from the cache where they do not lie so, and the "
        "kernels of flash_attn_varlen_func attend to them",
        nothing,
    ),
)
"""From the fastest to the one that serves all."""


def choose_path(call: CacheCall, target: Target, rules: tuple[Rule, ...] = RULES) -> PathChoice:
    """The first way that can serve a call on a GPU."""
    refused: tuple[str, ...] = ()
    for rule in rules:
        reason = rule.why_not(call, target)
        if not reason:
            return PathChoice(rule.path, rule.what, refused)
        refused += (f"{rule.path}: {reason}",)
    raise NotImplementedError(f"no way to attend to this cache: {'; '.join(refused)}")
