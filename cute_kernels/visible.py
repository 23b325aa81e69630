"""What a window comes to: the keys that a query sees, and the queries that see a key.

Plain arithmetic on integers: the same functions serve the kernels (traced) and the host tests (Python ints). A result
may be negative, or past the end of the sequence. Each asks for the side of the window that it is named for.
"""

from typing import Any

from cute_kernels.integers import divide, maximum, minimum
from cute_kernels.seqlen import SeqlenInfo
from cute_kernels.window import Window


def first_key(window: Window, level: Any) -> Any:
    """That the query sees which is level with key ``level``."""
    first = level - window.left
    return maximum(first, chunk_begin(window, level)) if window.has_chunk else first


def keys_end(window: Window, level_end: Any) -> Any:
    """One past the last key that the query sees which is level with the key before ``level_end``."""
    end = level_end + window.right
    return minimum(end, chunk_begin(window, level_end - 1) + window.chunk) if window.has_chunk else end


def first_query(window: Window, key: Any, seqlens: SeqlenInfo) -> Any:
    """That sees the key."""
    first = key - seqlens.seqlen_k + seqlens.seqlen_q - window.right
    if not window.has_chunk:
        return first
    return maximum(first, chunk_begin(window, key) - seqlens.seqlen_k + seqlens.seqlen_q)


def queries_end(window: Window, key: Any, seqlens: SeqlenInfo) -> Any:
    """One past the last that sees the key."""
    end = key - seqlens.seqlen_k + seqlens.seqlen_q + window.left + 1
    if not window.has_chunk:
        return end
    chunk_end = chunk_begin(window, key) + window.chunk
    return minimum(end, chunk_end - seqlens.seqlen_k + seqlens.seqlen_q)


def chunk_begin(window: Window, level: Any) -> Any:
    """The first key of the chunk of key ``level``. Negative levels all count as of the last chunk before key 0, which
    holds no key either: traced division would round them up."""
    return divide(maximum(level + window.chunk, 0), window.chunk) * window.chunk - window.chunk
