"""The C library from Python: builds it with the C compiler alone, and its structs for ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "hopper" / "c" / "src"
INCLUDE = ROOT / "hopper" / "c" / "include"

COMPILER = shutil.which("cc") or ""

SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_BUILT, NO_DRIVER, NO_DEVICE, CUDA = range(7)
FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT32 = range(4)
NO_ROTARY, INTERLEAVED, HALVES = range(3)


def link_library(folder: Path, objects: Sequence[Path] = ()) -> Path:
    """Compile the C sources with what was generated into ``folder``, and link them with objects of kernels."""
    library = folder / "libhopper_attention.so"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared"]
    flags += [f"-I{INCLUDE}", f"-I{SOURCES}", f"-I{folder}"]
    flags += [f"-Wl,--version-script={SOURCES / 'exports.map'}", "-Wl,--no-undefined", "-Wl,-z,nodelete"]
    sources = [*sorted(SOURCES.glob("*.c")), folder / "kernel_table.c", *objects]
    command = [COMPILER, *flags, "-o", str(library), *map(str, sources), "-ldl", "-lpthread", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


class TensorArgument(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride_batch", "stride_row", "stride_head")),
    ]


def _sizes(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _tensors(*names: str) -> list[tuple[str, type]]:
    return [(name, TensorArgument) for name in names]


class Scores(ctypes.Structure):
    """``ha_scores``."""

    _fields_ = [
        ("softcap", ctypes.c_double),
        ("alibi_slopes", ctypes.c_void_p),
        ("alibi_stride_batch", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    ]


OPERANDS = [(name, TensorArgument) for name in ("q", "k", "v", "out")]
LAST = [
    ("softmax_scale", ctypes.c_double),
    ("causal", ctypes.c_int),
    *_sizes("window_left", "window_right"),
    ("sm_margin", ctypes.c_int),
    ("workspace", ctypes.c_void_p),
    ("workspace_size", ctypes.c_size_t),
    ("stream", ctypes.c_void_p),
]
HEADS = _sizes("heads", "kv_heads", "head_dim", "head_dim_v")
ADDED = [*_sizes("attention_chunk"), ("scores", Scores)]
"""What came to a struct after its first version."""


class _Sized(ctypes.Structure):
    """One whose macro sets its size and nothing else."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**{"struct_size": ctypes.sizeof(self)} | fields)


class _Windowed(_Sized):
    """One whose macro sets the sides of a window too."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**{"window_left": -1, "window_right": -1} | fields)


class ForwardParams(_Windowed):
    """``ha_forward_params``, as its macro initialises it."""

    name = "forward"
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        *_sizes("batch", "seqlen_q", "seqlen_k"),
        *HEADS,
        *OPERANDS,
        ("lse", ctypes.c_void_p),
        *LAST[:-4],
        ("fp8_two_level", ctypes.c_int),
        *LAST[-4:],
        *ADDED,
    ]


class VarlenParams(_Windowed):
    """``ha_varlen_params``, as its macro initialises it."""

    name = "varlen"
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        *_sizes("batch", "total_q", "total_k", "max_seqlen_q", "max_seqlen_k"),
        *HEADS,
        *OPERANDS,
        *((name, ctypes.c_void_p) for name in ("lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
        *LAST,
        *ADDED,
        ("fp8_two_level", ctypes.c_int),
    ]


class DecodeParams(_Windowed):
    """``ha_decode_params``, as its macro initialises it."""

    name = "decode"
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("cache_dtype", ctypes.c_int),
        *_sizes("batch", "seqlen_q"),
        *HEADS,
        *_sizes("pages", "page_size"),
        *((name, TensorArgument) for name in ("q", "k_cache", "v_cache", "out")),
        *((name, ctypes.c_void_p) for name in ("lse", "cache_seqlens", "page_table")),
        *_sizes("pages_of_sequence"),
        ("k_descale", ctypes.c_void_p),
        ("v_descale", ctypes.c_void_p),
        ("softmax_scale", ctypes.c_double),
        ("causal", ctypes.c_int),
        *LAST[-4:],
        *_sizes("window_left", "window_right"),
        *ADDED,
        ("cache_leftpad", ctypes.c_void_p),
    ]


class PagedParams(_Windowed):
    """``ha_paged_params``, as its macro initialises it."""

    name = "paged"
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        *_sizes("batch", "total_q", "max_seqlen_q"),
        *HEADS,
        *_sizes("pages", "page_size"),
        *_tensors("q", "k_cache", "v_cache", "out"),
        *_pointers("lse", "cu_seqlens_q", "cache_seqlens", "cache_starts", "page_table"),
        *_sizes("pages_of_sequence"),
        *LAST[:-4],
        *ADDED,
        *LAST[-4:],
    ]


class AppendParams(_Sized):
    """``ha_append_params``, as its macro initialises it."""

    name = "append"
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("cache_dtype", ctypes.c_int),
        *_sizes("batch", "seqlen_new", "kv_heads", "head_dim", "head_dim_v", "pages", "page_size"),
        *_tensors("k", "v", "k_cache", "v_cache"),
        *_pointers("cache_seqlens", "new_seqlens", "cu_seqlens_new", "page_table"),
        *_sizes("pages_of_sequence"),
        *_pointers("k_descale", "v_descale"),
        ("rotary", ctypes.c_int),
        ("rotary_dtype", ctypes.c_int),
        *_sizes("rotary_dim", "rotary_rows"),
        *_pointers("rotary_cos", "rotary_sin", "rotary_seqlens"),
        *_sizes("seqlen_q", "heads"),
        *_tensors("q", "q_out"),
        *_pointers("cu_seqlens_q"),
        ("same_position", ctypes.c_int),
        *_pointers("stream"),
    ]


class CombineParams(_Sized):
    """``ha_combine_params``, as its macro initialises it."""

    name = "combine"
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        *_sizes("num_splits", "batch", "seqlen", "heads", "head_dim_v"),
        *_tensors("out_partial"),
        *_sizes("out_partial_stride_split"),
        *_pointers("lse_partial"),
        *_tensors("out"),
        *_pointers("lse", "stream"),
    ]


class MergeParams(_Sized):
    """``ha_merge_params``, as its macro initialises it."""

    name = "merge"
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        *_sizes("batch", "seqlen", "heads", "head_dim_v"),
        *_tensors("out"),
        *_pointers("lse"),
        *_tensors("part"),
        *_pointers("part_lse", "stream"),
    ]


class Library:
    """The C library: its functions by the name of what they take."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        for name in ("ha_last_error_message", "ha_kernel_name", "ha_version", "ha_status_name"):
            getattr(self.c, name).restype = ctypes.c_char_p
        self.c.ha_workspace_init.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    @property
    def message(self) -> str:
        return self.c.ha_last_error_message().decode()

    def run(self, params: ctypes.Structure, function: str = "") -> int:
        """The status of ``ha_<name>``, or of the ``function`` of that name."""
        return getattr(self.c, f"ha_{params.name}{function}")(ctypes.byref(params))

    def kernel_of(self, params: ctypes.Structure, kind: str = "") -> str:
        """The name of the kernel that serves a problem, or the status and the message of an error. ``kind`` may be
        "_fp8"."""
        name = ctypes.c_char_p()
        status = getattr(self.c, f"ha_{params.name}{kind}_kernel")(ctypes.byref(params), ctypes.byref(name))
        return name.value.decode() if status == SUCCESS else f"{status}: {self.message}"

    def workspace_size_of(self, params: ctypes.Structure, kind: str = "") -> int:
        size = ctypes.c_size_t()
        status = getattr(self.c, f"ha_{params.name}{kind}_workspace_size")(
            ctypes.byref(params), ctypes.byref(size)
        )
        assert status == SUCCESS, self.message
        return size.value

    def kernels(self) -> dict[str, bool]:
        """Whether each kernel is built, by its name."""
        found: dict[str, bool] = {}
        built = ctypes.c_int()
        while name := self.c.ha_kernel_name(ctypes.c_size_t(len(found)), ctypes.byref(built)):
            found[name.decode()] = bool(built.value)
        return found
