"""``hopper-attention explain``: which backend and which kernels a problem would run on, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hopper_attention.cli_parts import (
    NO_FILE,
    Device,
    JsonPath,
    console_for,
    one_line_errors,
    pick_device,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hopper_attention.dispatch import Plan

FP8_INPUTS = "float8_e4m3fn"
MOST_ELEMENTS = 2**60
"""Of a tensor without memory: its bytes have a number of 64 bits."""

Dtype = Literal["float16", "bfloat16", "float8_e4m3fn"]
Granularity = Literal["block", "head", "tensor"]


@dataclass(frozen=True)
class Sizes:
    """The problem to explain; -1 stands for another size, as the options say."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int

    def tensors(self, dtype: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the problem, in the mode for tensors without memory.

        Raises:
            ValueError: one has more elements than torch counts.
        """
        import torch

        keys = self.seqlen_q if self.seqlen_k < 0 else self.seqlen_k
        kv_heads = self.heads if self.kv_heads < 0 else self.kv_heads
        head_dim_v = self.head_dim if self.head_dim_v < 0 else self.head_dim_v
        shapes = (
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            (self.batch, keys, kv_heads, self.head_dim),
            (self.batch, keys, kv_heads, head_dim_v),
        )
        for name, shape in zip("qkv", shapes, strict=True):
            if prod(max(size, 1) for size in shape) > MOST_ELEMENTS:
                raise ValueError(
                    f"shape of {name} is {shape}, allowed: up to 2**60 elements, which torch counts"
                )
        q, k, v = (torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape in shapes)
        return q, k, v


def explain(
    seqlen_q: Annotated[int, typer.Option(min=0)] = 4096,
    seqlen_k: Annotated[int, typer.Option(min=-1, help="-1: as seqlen-q")] = -1,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    kv_heads: Annotated[int, typer.Option(min=-1, help="-1: as heads")] = -1,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    head_dim_v: Annotated[int, typer.Option(min=-1, help="-1: as head-dim")] = -1,
    batch: Annotated[int, typer.Option(min=0)] = 1,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the inputs; float8_e4m3fn: with a descale for each head.")
    ] = "bfloat16",
    fp8: Annotated[
        bool, typer.Option("--fp8", help="flash_attn_fp8_func, which quantizes 16-bit inputs.")
    ] = False,
    granularity: Annotated[Granularity | None, typer.Option(help="--fp8: what shares a scale.")] = None,
    block_q: Annotated[int | None, typer.Option(help="--fp8: rows of q in a block.")] = None,
    block_k: Annotated[int | None, typer.Option(help="--fp8: rows of k and v in a block.")] = None,
    rotate: Annotated[
        bool | None, typer.Option("--rotate/--no-rotate", help="--fp8: rotate q and k.")
    ] = None,
    rotate_v: Annotated[
        bool | None, typer.Option("--rotate-v/--no-rotate-v", help="--fp8: rotate v.")
    ] = None,
    smooth_k: Annotated[
        bool | None, typer.Option("--smooth-k/--no-smooth-k", help="--fp8: subtract the mean of k.")
    ] = None,
    smooth_v: Annotated[
        bool | None, typer.Option("--smooth-v/--no-smooth-v", help="--fp8: subtract the mean of v.")
    ] = None,
    two_level: Annotated[
        bool, typer.Option("--two-level", help="FP8: two-level accumulation of P V.")
    ] = False,
    device: Device = "auto",
    capability: Annotated[
        str, typer.Option(metavar="X.Y", help="Answer for a GPU of this compute capability instead, as 9.0.")
    ] = "",
    json_path: JsonPath = NO_FILE,
) -> None:
    """Which backend and which kernel config a problem would run on, and why. Computes nothing."""
    with one_line_errors():
        from torch._subclasses import FakeTensorMode

        from hopper_attention import Fp8Quantization, explain_fp8
        from hopper_attention import explain as explain_call
        from hopper_attention.cli_views import fp8_plan_view, plan_view

        chosen = {
            "granularity": granularity,
            "block_q": block_q,
            "block_k": block_k,
            "rotate": rotate,
            "rotate_v": rotate_v,
            "smooth_k": smooth_k,
            "smooth_v": smooth_v,
        }
        options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        check_fp8_options(fp8, dtype, options, two_level)
        sizes = Sizes(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v)
        where = "meta" if capability else pick_device(device)
        common: dict[str, Any] = {
            "causal": causal,
            "two_level_accumulation": two_level,
            "device_capability": parse_capability(capability) if capability else None,
        }
        console = console_for(json_path)
        with FakeTensorMode():  # tensors without memory, so that a problem may be larger than the machine
            qkv = sizes.tensors(dtype, where)
            if fp8:
                plan = explain_fp8(*qkv, quantization=Fp8Quantization(**options), **common)
                console.print(fp8_plan_view(plan))
                data = {**asdict(plan), "attention": plan_data(plan.attention)}
                if plan.quantizer_config is not None:
                    data["quantizer_config"] = config_data(plan.quantizer_config)
            else:
                attention = explain_call(*qkv, **common)
                console.print(plan_view(attention))
                data = plan_data(attention)
        write_json(data, json_path, console)


def check_fp8_options(fp8: bool, dtype: str, options: dict[str, Any], two_level: bool) -> None:
    """Refuse options that the call would not have.

    Raises:
        ValueError: one says how to quantize what is not quantized.
    """
    if fp8 and dtype == FP8_INPUTS:
        raise ValueError(f"dtype is {dtype} with --fp8, allowed: float16 or bfloat16, which it quantizes")
    if options and not fp8:
        name, value = next(iter(options.items()))
        raise ValueError(f"{name} is {value} without --fp8, allowed: with --fp8, which quantizes")
    if two_level and not fp8 and dtype != FP8_INPUTS:
        raise ValueError(
            f"two-level is given with 16-bit inputs, allowed: with --fp8 or --dtype {FP8_INPUTS}"
        )


def plan_data(plan: Plan) -> dict[str, Any]:
    return {**asdict(plan), "config": config_data(plan.config)}


def config_data(config: Any) -> dict[str, Any]:
    """A config for JSON: its name and its fields, a member of an enum by its value."""
    fields = {key: value.value if isinstance(value, Enum) else value for key, value in asdict(config).items()}
    return {"name": config.name, **fields}


def parse_capability(text: str) -> tuple[int, int]:
    """(9, 0) from "9.0".

    Raises:
        ValueError: it is anything else than two numbers with a point between them.
    """
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"capability is {text!r}, allowed: major.minor, as 9.0")
    return int(major), int(minor)
