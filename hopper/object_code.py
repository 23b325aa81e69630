"""A compiled kernel as the bytes of an object file that loads without the DSL.

The DSL can load its own exports, but importing it takes longer than everything else a first call does. Its
runtime library can load them too, through a documented C API (``CuteDSLRuntime.h``): it finds a function by a
prefix, whose metadata lie beside it as strings, and runs it on an array of pointers. Kernels are called
through TVM FFI instead, so the object gets one such function that hands out the address of the TVM FFI
entry.
"""

import tempfile
from pathlib import Path
from typing import Any

from cutlass._mlir import ir

OBJECT_FORMAT = "1.1"
"""Version of the metadata below that the runtime library of the pinned DSL reads."""

NO_ARGUMENTS = "e30="
"""Base64 of an empty JSON object: the address function has no typed arguments."""

ADDRESS_FUNCTION = """
  llvm.func @{local_name}(%args: !llvm.ptr) {{
    %slot = llvm.load %args : !llvm.ptr -> !llvm.ptr
    %entry = llvm.mlir.addressof @__tvm_ffi_{name} : !llvm.ptr
    llvm.store %entry, %slot : !llvm.ptr, !llvm.ptr
    %second = llvm.getelementptr %args[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %status = llvm.load %second : !llvm.ptr -> !llvm.ptr
    %success = llvm.mlir.constant(0 : i32) : i32
    llvm.store %success, %status : i32, !llvm.ptr
    llvm.return
  }}
"""
"""Takes pointers to where the address and the status go: the convention of CuteDSLRT_Function_Run."""


def export_object(compiled: Any, name: str) -> bytes:
    """The object file of ``compiled``, a result of ``cute.compile`` with TVM FFI, whose entry is ``name``.

    It defines ``__tvm_ffi_<name>``, as a plain export does, and the function that the runtime library finds
    under the prefix ``name``. ``compiled`` cannot be exported again under another name afterwards.
    """
    text = str(compiled.ir_module).rstrip()
    entry = f"@__tvm_ffi_{compiled.function_name}("
    if text.count(entry) != 1 or not text.endswith("}"):
        raise RuntimeError(f"the module of {name} does not define {entry}...) once: not a TVM FFI function?")
    text = text.replace(entry, f"@__tvm_ffi_{name}(")
    with ir.Context():
        compiled.ir_module = ir.Module.parse(text[:-1] + _address_function(name) + "}\n")
    compiled.function_name = name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(object_file_path=str(path), function_name=name)
        return path.read_bytes()


def _address_function(name: str) -> str:
    local_name = "entry_address"
    # The export prefixes every symbol of the module so; the metadata must name the function as it ends up.
    exported_name = f"__cute_internal_{name}_{local_name}"
    metadata = {
        "version": OBJECT_FORMAT,
        "function_name": exported_name,
        "args_spec": NO_ARGUMENTS,
        "kernel_info": "{}",
    }
    strings = "".join(_global_string(f"{name}_{key}", value) for key, value in metadata.items())
    return ADDRESS_FUNCTION.format(local_name=local_name, name=name) + strings


def _global_string(symbol: str, value: str) -> str:
    return (
        f'  llvm.mlir.global external @{symbol}("{value}\\00") {{addr_space = 0 : i32}}'
        f" : !llvm.array<{len(value) + 1} x i8>\n"
    )
