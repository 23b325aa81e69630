"""What a window comes to: the keys that a query sees, and the queries that see a key.

A query i is level with key i + seqlen_k - seqlen_q (``Window``); ``level`` is the number of that key.

Plain arithmetic on integers: the same functions serve the kernels (traced) and the host tests (Python ints). A result
may be negative, or past the end of the sequence. The window must have the side that a function is about: the left one
for ``first_key`` and ``queries_end``, the right one for ``keys_end`` and ``first_query``.
"""

from typing import Any

from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import Window


def first_key(window: Window, level: Any) -> Any:
    """The first key that a query sees, which is level with key ``level``."""
    first = level - window.left
    return maximum(first, chunk_begin(window, level)) if window.has_chunk else first


def keys_end(window: Window, level_end: Any) -> Any:
    """One past the last key that a query sees, which is level with key ``level_end`` - 1."""
    end = level_end + window.right
    return minimum(end, chunk_begin(window, level_end - 1) + window.chunk) if window.has_chunk else end


def first_query(window: Window, key: Any, seqlens: SeqlenInfo) -> Any:
    """The first query that sees ``key``."""
    first = key - seqlens.seqlen_k + seqlens.seqlen_q - window.right
    if not window.has_chunk:
        return first
    return maximum(first, chunk_begin(window, key) - seqlens.seqlen_k + seqlens.seqlen_q)


def queries_end(window: Window, key: Any, seqlens: SeqlenInfo) -> Any:
    """One past the last query that sees ``key``."""
    end = key - seqlens.seqlen_k + seqlens.seqlen_q + window.left + 1
    if not window.has_chunk:
        return end
    chunk_end = chunk_begin(window, key) + window.chunk
    return minimum(end, chunk_end - seqlens.seqlen_k + seqlens.seqlen_q)


def chunk_begin(window: Window, level: Any) -> Any:
    """The first key of the chunk of key ``level``. Negative levels all count as of the last chunk before key 0, which
    holds no key either: traced division would round them up."""
    return divide(maximum(level + window.chunk, 0), window.chunk) * window.chunk - window.chunk
