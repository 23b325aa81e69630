"""Compile the function that makes several launches one function of TVM FFI. It is code for the host alone.

What a launch is given is data (``config`` has the layout), so one object serves kernels of any kind. It is written in
MLIR's LLVM dialect, as the DSL has no functions of any number of arguments.
"""

from typing import Any

import cutlass.cute as cute
from cutlass._mlir import ir

from cute_kernels.launches.config import (
    ANY_WORDS,
    COUNTER_PLACE,
    COUNTER_WORDS,
    DIMENSIONS_MASK,
    FIRST_CONSTANT,
    HEAD_WORDS,
    LAUNCH_WORDS,
    LISTED,
    MAX_ARGUMENTS,
    OBJECT_WORDS,
    PIECE,
    TENSOR_WORDS,
    LaunchesConfig,
)

MODULE = f"""
!ptr = !llvm.ptr
!any = !llvm.array<{ANY_WORDS} x i64>
!counter = !llvm.array<{COUNTER_WORDS} x i64>
!tensor = !llvm.array<{TENSOR_WORDS} x i64>
module {{
  llvm.func @TVMFFIFunctionCreate(!ptr, !ptr, !ptr, !ptr) -> i32
  llvm.func @TVMFFIFunctionCall(!ptr, !ptr, i32, !ptr) -> i32
  llvm.func @TVMFFIErrorSetRaisedFromCStr(!ptr, !ptr)
  llvm.mlir.global internal constant @kind("RuntimeError\\00")
  llvm.mlir.global internal constant @full("more streams of a GPU than there are tile counters\\00")

  // The counter of a stream: the first that has its key, or that is free and gets it. Null if there is none.
  llvm.func @find_counter(%counters: !ptr, %number: i64, %device: i64, %key: i64) -> !ptr {{
    %zero = llvm.mlir.constant(0 : i64) : i64
    %one = llvm.mlir.constant(1 : i64) : i64
    %null = llvm.mlir.zero : !ptr
    llvm.br ^look(%zero : i64)
  ^look(%i: i64):
    %is_left = llvm.icmp "slt" %i, %number : i64
    llvm.cond_br %is_left, ^compare, ^give(%null : !ptr)
  ^compare:
    %counter = llvm.getelementptr %counters[%i] : (!ptr, i64) -> !ptr, !counter
    %device_at = llvm.getelementptr %counter[1] : (!ptr) -> !ptr, i64
    %its_device = llvm.load %device_at : !ptr -> i64
    %is_there = llvm.icmp "eq" %its_device, %device : i64
    llvm.cond_br %is_there, ^claim, ^next
  ^claim:
    %swap = llvm.cmpxchg %counter, %zero, %key acq_rel acquire : !ptr, i64
    %before = llvm.extractvalue %swap[0] : !llvm.struct<(i64, i1)>
    %is_new = llvm.extractvalue %swap[1] : !llvm.struct<(i64, i1)>
    %is_known = llvm.icmp "eq" %before, %key : i64
    %is_ours = llvm.or %is_new, %is_known : i1
    %tensor = llvm.getelementptr %counter[2] : (!ptr) -> !ptr, i64
    llvm.cond_br %is_ours, ^give(%tensor : !ptr), ^next
  ^next:
    %following = llvm.add %i, %one : i64
    llvm.br ^look(%following : i64)
  ^give(%found: !ptr):
    llvm.return %found : !ptr
  }}

  // The tensor of a piece, in ``room``: as it is described, but where the one that it is cut from lies now.
  llvm.func @cut(%number: i64, %offset: i64, %kind_word: i64, %shape: i64, %strides: i64, %given: !ptr, %room: !ptr) {{
    %tensor_kind = llvm.mlir.constant(7 : i64) : i64
    %any = llvm.getelementptr %given[%number] : (!ptr, i64) -> !ptr, !any
    %kind = llvm.load %any : !ptr -> i64
    %value_at = llvm.getelementptr %any[1] : (!ptr) -> !ptr, i64
    %value = llvm.load %value_at : !ptr -> !ptr
    %is_borrowed = llvm.icmp "eq" %kind, %tensor_kind : i64
    %behind_head = llvm.getelementptr %value[{OBJECT_WORDS}] : (!ptr) -> !ptr, i64
    %whole = llvm.select %is_borrowed, %value, %behind_head : i1, !ptr
    %begin = llvm.load %whole : !ptr -> i64
    %data = llvm.add %begin, %offset : i64
    llvm.store %data, %room : i64, !ptr
    %device_at = llvm.getelementptr %whole[1] : (!ptr) -> !ptr, i64
    %device = llvm.load %device_at : !ptr -> i64
    %device_to = llvm.getelementptr %room[1] : (!ptr) -> !ptr, i64
    llvm.store %device, %device_to : i64, !ptr
    %kind_to = llvm.getelementptr %room[2] : (!ptr) -> !ptr, i64
    llvm.store %kind_word, %kind_to : i64, !ptr
    %shape_to = llvm.getelementptr %room[3] : (!ptr) -> !ptr, i64
    llvm.store %shape, %shape_to : i64, !ptr
    %strides_to = llvm.getelementptr %room[4] : (!ptr) -> !ptr, i64
    llvm.store %strides, %strides_to : i64, !ptr
    %zero = llvm.mlir.constant(0 : i64) : i64
    %bytes_to = llvm.getelementptr %room[5] : (!ptr) -> !ptr, i64
    llvm.store %zero, %bytes_to : i64, !ptr
    llvm.return
  }}

  // ``cut`` of a piece with facts of its own.
  llvm.func @cut_piece(%piece: !ptr, %given: !ptr, %room: !ptr) {{
    %number = llvm.load %piece : !ptr -> i64
    %offset_at = llvm.getelementptr %piece[1] : (!ptr) -> !ptr, i64
    %offset = llvm.load %offset_at : !ptr -> i64
    %kind_at = llvm.getelementptr %piece[2] : (!ptr) -> !ptr, i64
    %kind = llvm.load %kind_at : !ptr -> i64
    %shape_at = llvm.getelementptr %piece[3] : (!ptr) -> !ptr, i64
    %shape = llvm.load %shape_at : !ptr -> i64
    %strides_at = llvm.getelementptr %piece[4] : (!ptr) -> !ptr, i64
    %strides = llvm.load %strides_at : !ptr -> i64
    llvm.call @cut(%number, %offset, %kind, %shape, %strides, %given, %room)
        : (i64, i64, i64, i64, i64, !ptr, !ptr) -> ()
    llvm.return
  }}

  // ``cut`` of one whose facts are in the caller's list: a byte, and as many sizes and strides as it has dimensions.
  llvm.func @cut_listed(%piece: !ptr, %given: !ptr, %room: !ptr) {{
    %dimensions_mask = llvm.mlir.constant({DIMENSIONS_MASK} : i64) : i64
    %number = llvm.load %piece : !ptr -> i64
    %list_number_at = llvm.getelementptr %piece[1] : (!ptr) -> !ptr, i64
    %list_number = llvm.load %list_number_at : !ptr -> i64
    %word_at = llvm.getelementptr %piece[2] : (!ptr) -> !ptr, i64
    %word = llvm.load %word_at : !ptr -> i64
    %kind_at = llvm.getelementptr %piece[3] : (!ptr) -> !ptr, i64
    %kind = llvm.load %kind_at : !ptr -> i64
    %any = llvm.getelementptr %given[%list_number] : (!ptr, i64) -> !ptr, !any
    %list_at = llvm.getelementptr %any[1] : (!ptr) -> !ptr, i64
    %list = llvm.load %list_at : !ptr -> !ptr
    %facts = llvm.getelementptr %list[%word] : (!ptr, i64) -> !ptr, i64
    %offset = llvm.load %facts : !ptr -> i64
    %shape_at = llvm.getelementptr %facts[1] : (!ptr) -> !ptr, i64
    %shape = llvm.ptrtoint %shape_at : !ptr to i64
    %dimensions = llvm.and %kind, %dimensions_mask : i64
    %strides_at = llvm.getelementptr %shape_at[%dimensions] : (!ptr, i64) -> !ptr, i64
    %strides = llvm.ptrtoint %strides_at : !ptr to i64
    llvm.call @cut(%number, %offset, %kind, %shape, %strides, %given, %room)
        : (i64, i64, i64, i64, i64, !ptr, !ptr) -> ()
    llvm.return
  }}

  // What a caller such as XLA calls: (stream, tensors...). ``script`` is what ``bind`` was given.
  llvm.func @run(%script: !ptr, %given: !ptr, %count: i32, %result: !ptr) -> i32 {{
    %zero = llvm.mlir.constant(0 : i64) : i64
    %one = llvm.mlir.constant(1 : i64) : i64
    %head = llvm.mlir.constant({HEAD_WORDS} : i64) : i64
    %launch_head = llvm.mlir.constant({LAUNCH_WORDS} : i64) : i64
    %counter_place = llvm.mlir.constant({COUNTER_PLACE} : i64) : i64
    %first_constant = llvm.mlir.constant({FIRST_CONSTANT} : i64) : i64
    %tensor_kind = llvm.mlir.constant(7 : i64) : i64
    %piece_kind = llvm.mlir.constant({PIECE} : i64) : i64
    %listed_kind = llvm.mlir.constant({LISTED} : i64) : i64
    %success = llvm.mlir.constant(0 : i32) : i32
    %failure = llvm.mlir.constant(-1 : i32) : i32
    %single = llvm.mlir.constant(1 : i32) : i32
    %room = llvm.mlir.constant({MAX_ARGUMENTS} : i32) : i32
    %null = llvm.mlir.zero : !ptr
    %arguments = llvm.alloca %room x !any : (i32) -> !ptr
    %pieces = llvm.alloca %room x !tensor : (i32) -> !ptr
    %ignored = llvm.alloca %single x !any : (i32) -> !ptr
    %launches = llvm.load %script : !ptr -> i64
    %constants_at = llvm.getelementptr %script[1] : (!ptr) -> !ptr, i64
    %constants = llvm.load %constants_at : !ptr -> !ptr
    %counters_at = llvm.getelementptr %script[2] : (!ptr) -> !ptr, i64
    %counters = llvm.load %counters_at : !ptr -> !ptr
    %number_at = llvm.getelementptr %script[3] : (!ptr) -> !ptr, i64
    %number = llvm.load %number_at : !ptr -> i64
    %needs_counter = llvm.icmp "ne" %number, %zero : i64
    llvm.cond_br %needs_counter, ^find, ^launch(%zero, %head, %null : i64, i64, !ptr)
  ^find:
    %stream_at = llvm.getelementptr %given[1] : (!ptr) -> !ptr, i64
    %stream = llvm.load %stream_at : !ptr -> i64
    %key = llvm.add %stream, %one : i64
    %tensor_at = llvm.getelementptr %given[3] : (!ptr) -> !ptr, i64
    %tensor = llvm.load %tensor_at : !ptr -> !ptr
    %device_at = llvm.getelementptr %tensor[3] : (!ptr) -> !ptr, i32
    %device32 = llvm.load %device_at : !ptr -> i32
    %device = llvm.sext %device32 : i32 to i64
    %found = llvm.call @find_counter(%counters, %number, %device, %key) : (!ptr, i64, i64, i64) -> !ptr
    %is_full = llvm.icmp "eq" %found, %null : !ptr
    llvm.cond_br %is_full, ^refuse, ^launch(%zero, %head, %found : i64, i64, !ptr)
  ^refuse:
    %kind = llvm.mlir.addressof @kind : !ptr
    %full = llvm.mlir.addressof @full : !ptr
    llvm.call @TVMFFIErrorSetRaisedFromCStr(%kind, %full) : (!ptr, !ptr) -> ()
    llvm.return %failure : i32
  ^launch(%n: i64, %at: i64, %counter: !ptr):
    %is_left = llvm.icmp "slt" %n, %launches : i64
    llvm.cond_br %is_left, ^begin, ^end
  ^begin:
    %kernel_at = llvm.getelementptr %script[%at] : (!ptr, i64) -> !ptr, i64
    %kernel = llvm.load %kernel_at : !ptr -> !ptr
    %size_at = llvm.getelementptr %kernel_at[1] : (!ptr) -> !ptr, i64
    %size = llvm.load %size_at : !ptr -> i64
    %places = llvm.getelementptr %kernel_at[{LAUNCH_WORDS}] : (!ptr) -> !ptr, i64
    llvm.br ^argument(%zero : i64)
  ^argument(%i: i64):
    %is_missing = llvm.icmp "slt" %i, %size : i64
    llvm.cond_br %is_missing, ^choose, ^call
  ^choose:
    %place_at = llvm.getelementptr %places[%i] : (!ptr, i64) -> !ptr, i64
    %place = llvm.load %place_at : !ptr -> i64
    %slot = llvm.getelementptr %arguments[%i] : (!ptr, i64) -> !ptr, !any
    %is_given = llvm.icmp "sge" %place, %zero : i64
    llvm.cond_br %is_given, ^from_given, ^from_script
  ^from_given:
    %given_at = llvm.getelementptr %given[%place] : (!ptr, i64) -> !ptr, !any
    llvm.br ^copy(%given_at : !ptr)
  ^from_script:
    %is_counter = llvm.icmp "eq" %place, %counter_place : i64
    llvm.cond_br %is_counter, ^put(%tensor_kind, %counter : i64, !ptr), ^from_constants
  ^from_constants:
    %constant = llvm.sub %first_constant, %place : i64
    %constant_at = llvm.getelementptr %constants[%constant] : (!ptr, i64) -> !ptr, !any
    %constant_kind = llvm.load %constant_at : !ptr -> i64
    %is_piece = llvm.icmp "eq" %constant_kind, %piece_kind : i64
    %piece_at = llvm.getelementptr %constant_at[1] : (!ptr) -> !ptr, i64
    %piece = llvm.load %piece_at : !ptr -> !ptr
    %room_at = llvm.getelementptr %pieces[%i] : (!ptr, i64) -> !ptr, !tensor
    llvm.cond_br %is_piece, ^cut, ^unless_listed
  ^cut:
    llvm.call @cut_piece(%piece, %given, %room_at) : (!ptr, !ptr, !ptr) -> ()
    llvm.br ^put(%tensor_kind, %room_at : i64, !ptr)
  ^unless_listed:
    %is_listed = llvm.icmp "eq" %constant_kind, %listed_kind : i64
    llvm.cond_br %is_listed, ^cut_listed, ^copy(%constant_at : !ptr)
  ^cut_listed:
    llvm.call @cut_listed(%piece, %given, %room_at) : (!ptr, !ptr, !ptr) -> ()
    llvm.br ^put(%tensor_kind, %room_at : i64, !ptr)
  ^copy(%from: !ptr):
    %from_kind = llvm.load %from : !ptr -> i64
    %from_at = llvm.getelementptr %from[1] : (!ptr) -> !ptr, i64
    %from_value = llvm.load %from_at : !ptr -> !ptr
    llvm.br ^put(%from_kind, %from_value : i64, !ptr)
  ^put(%value_kind: i64, %value: !ptr):
    llvm.store %value_kind, %slot : i64, !ptr
    %value_at = llvm.getelementptr %slot[1] : (!ptr) -> !ptr, i64
    llvm.store %value, %value_at : !ptr, !ptr
    %following = llvm.add %i, %one : i64
    llvm.br ^argument(%following : i64)
  ^call:
    %size32 = llvm.trunc %size : i64 to i32
    llvm.store %zero, %ignored : i64, !ptr
    %status = llvm.call @TVMFFIFunctionCall(%kernel, %arguments, %size32, %ignored) : (!ptr, !ptr, i32, !ptr) -> i32
    %is_done = llvm.icmp "eq" %status, %success : i32
    llvm.cond_br %is_done, ^next, ^stop
  ^next:
    %following_launch = llvm.add %n, %one : i64
    %words = llvm.add %size, %launch_head : i64
    %following_at = llvm.add %at, %words : i64
    llvm.br ^launch(%following_launch, %following_at, %counter : i64, i64, !ptr)
  ^stop:
    llvm.return %status : i32
  ^end:
    llvm.return %success : i32
  }}

  // bind(address of a script) -> the function that runs it.
  llvm.func @__tvm_ffi_NAME(%self: !ptr, %given: !ptr, %count: i32, %result: !ptr) -> i32 {{
    %null = llvm.mlir.zero : !ptr
    %function_kind = llvm.mlir.constant(68 : i64) : i64
    %success = llvm.mlir.constant(0 : i32) : i32
    %script_at = llvm.getelementptr %given[1] : (!ptr) -> !ptr, i64
    %script = llvm.load %script_at : !ptr -> !ptr
    %run = llvm.mlir.addressof @run : !ptr
    %function_at = llvm.getelementptr %result[1] : (!ptr) -> !ptr, i64
    %status = llvm.call @TVMFFIFunctionCreate(%script, %run, %null, %function_at)
        : (!ptr, !ptr, !ptr, !ptr) -> i32
    %is_made = llvm.icmp "eq" %status, %success : i32
    llvm.cond_br %is_made, ^give, ^end
  ^give:
    llvm.store %function_kind, %result : i64, !ptr
    llvm.br ^end
  ^end:
    llvm.return %status : i32
  }}
}}
"""
"""7 and 68 are the type indices of a borrowed tensor and of a function, in TVM FFI's stable ABI. There the words of an
argument are its type index and its value; the number of a device is the fourth int32 of a tensor, of which the words
are its address, its device, its dimensions and dtype, its shape, its strides and an offset."""


@cute.jit
def _nothing() -> None:
    """Gives the compiler something to make an object of."""


def compile_launches(config: LaunchesConfig, options: str = "") -> Any:
    """Compile the function of ``config``; ``options`` go to ``cute.compile``.

    Gives ``bind(address)``, which returns the TVM FFI function that runs the script there. The script, and all that it
    points to, are to stay where they are for as long as that function lives.
    """
    compiled = cute.compile(_nothing, options=f"--enable-tvm-ffi {options}".strip())
    with ir.Context():
        compiled.ir_module = ir.Module.parse(MODULE.replace("NAME", compiled.function_name))
    return compiled
