"""The rules by which FP8 (e4m3) inputs of attention are made, and PyTorch that follows them on any device.

Block quantization and incoherent processing of the FlashAttention-3 paper, section 3.3. The rules here are the
definition that the fused kernel follows to the bit, and its twin in PyTorch:

- A block is some rows of a head that share a scale: of Q one row, of K and V the keys of the attention kernel's tile,
  unless told otherwise.
- scale = amax * (1 / largest) of the finite values of a block, and 2^-80 or more. ``largest`` is the code that amax
  becomes: 448 in V; in K 28 up to head_dim 128 and 14 above; in blocks of Q 28 up to head_dim 64 and 14 above, in a
  row of Q by itself 16 and 8 (``hopper.quantize.config.largest_codes``). No code is larger, so the product of a row of
  Q and one of K, a sum of products of codes, fits float16, in which the attention kernel may then have it. Heads wider
  than 256, which the emulation alone attends to, have 448, and a row of Q by itself 256.
- Scales of blocks of V are rounded up to a power of 16 (:func:`scale_of_values`). e4m3 has as many digits at one power
  of two as at another, so this costs no accuracy but of values below 1/1792 of a block's largest, and neighbouring
  blocks nearly always get the same, which saves the attention kernel work.
- data = value * (1 / scale), rounded to the nearest e4m3, ties to even; value is about data * scale. V is rounded such
  that errors of neighbouring keys cancel (:func:`round_values`).
- Rows of K are rounded such that they keep their length (:func:`round_rows`), up to head_dim 256, and from 72 on.
- The scale of a row of Q by itself is then fitted to its codes, which changes it by a fraction of a percent
  (:func:`fit_of_rows`); not in heads wider than 256, whose codes are too large for the sums.
- NaN and infinities become NaN, e4m3's only non-finite code. They do not enter the scale, so they spoil no
  other value of their block; but a rotated row is a mixture, and one such element makes NaN of all of its
  Hadamard block. Where each row of Q has a scale, they change nothing of the other rows; a row without finite values
  gets the scale of zeros. They do not enter the mean of V either (``value_mean_rules``). The mean of K is one of
  every key: one such element makes NaN of its column in all rows of its head, and of no other head or batch entry.
- Each of these operations, and each sum and difference of a rotation, is rounded to float32 by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch.nn.functional import pad

from cute_kernels.problem import MAX_HEAD_DIM
from hopper.mean.config import are_sampled_in_runs
from hopper.quantize.config import (
    CARRY_KEYS,
    CHUNK,
    E4M3_MAX,
    FEEDBACK,
    FIT_SUMS,
    MIN_SCALE,
    MOST_FIT,
    MOST_OF_ELEMENT,
    MOST_SHIFT,
    PAID,
    PAID_WHERE_SAMPLED,
    PAYING_KEYS,
    RECIPROCAL,
    VALUE_OCTAVES,
    keeps_lengths,
    largest_codes,
    length_feedback,
)
from hopper_attention.checks import TensorSpec
from hopper_attention.masks import FULL_SIDES, UNLIMITED, Sides
from hopper_attention.quantized import (
    E4M3,
    Fp8Quantization,
    Means,
    QuantizedQKV,
    QuantizedTensor,
    TransposedV,
    row_scale,
    transpose_for_kernel,
)
from hopper_attention.rotation import rotate_back, rotate_head_dim
from hopper_attention.shapes import AttentionShape, attention_shape
from hopper_attention.value_mean_rules import mean_worth_subtracting

SOURCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Quantizer = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Fp8Quantization, Means],
    tuple[QuantizedTensor, QuantizedTensor, TransposedV],
]
"""(q, k, v, quantization, means) -> the three in e4m3."""


def check_sources(
    q: torch.Tensor | TensorSpec, k: torch.Tensor | TensorSpec, v: torch.Tensor | TensorSpec
) -> AttentionShape:
    """The sizes of tensors that can be quantized.

    Raises:
        ValueError: shapes or devices of q, k and v do not fit together.
        TypeError: q, k and v differ in dtype, or it is not float16, bfloat16 or float32.
    """
    shape = attention_shape(q, k, v)
    if q.dtype not in SOURCE_DTYPES:
        raise TypeError(f"q has dtype {q.dtype}, allowed: {', '.join(map(str, SOURCE_DTYPES))}")
    return shape


def with_numbers(quantization: Fp8Quantization, shape: AttentionShape) -> Fp8Quantization:
    """``quantization`` with ``block_k`` as a number."""
    block_k = quantization.keys_per_block(shape.head_dim, shape.head_dim_v, shape.seqlen_k)
    return quantization if quantization.block_k == block_k else _with_block_k(quantization, block_k)


@lru_cache(maxsize=1024)
def _with_block_k(quantization: Fp8Quantization, block_k: int) -> Fp8Quantization:
    return replace(quantization, block_k=block_k)


@torch.no_grad()
def quantize_with(
    run: Quantizer,
    find_mean_v: Callable[[torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    quantization: Fp8Quantization,
) -> QuantizedQKV:
    """What ``run`` makes of tensors that passed ``check_sources``, with its options; ``block_k`` is a number.
    ``find_mean_v`` is ``mean_worth_subtracting``, by PyTorch or by the kernel."""
    means = means_of(k, v, quantization, find_mean_v)
    nothing = torch.empty(0, dtype=torch.float32, device=q.device)
    shift = lost_scores(q, means.k) if means.k.numel() else nothing
    parts = run(q, k, v, quantization, means)
    return QuantizedQKV(*parts, quantization=quantization, dtype=q.dtype, shift=shift, mean_v=means.v)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x in e4m3: nearest, ties to even; finite values saturate at +-448, the others become NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).masked_fill(~torch.isfinite(x), math.nan).to(E4M3)


def round_values(x: torch.Tensor, pay: float = 0.0) -> torch.Tensor:
    """Values x (b, s, h, d) over their scale in e4m3, by :func:`round_runs` of each CARRY_KEYS keys."""
    runs = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CARRY_KEYS)).unflatten(1, (-1, CARRY_KEYS))
    return round_runs(runs.flatten(0, 1), pay).view(*runs.shape).flatten(1, 2)[:, : x.shape[1]]


def round_runs(runs: torch.Tensor, pay: float = 0.0) -> torch.Tensor:
    """Runs of keys (runs, CARRY_KEYS, h, d) in e4m3, rounded such that the errors of each column cancel.

    FEEDBACK times the sum of the errors so far is added to a value before it is rounded, but no more than MOST_SHIFT of
    the value, a quarter or half of a step of e4m3. So the errors of a run add up to about half a step, and not to the
    root of their number, and where its keys have like probabilities little of them is left in the output. Those of
    single values grow by some percent. Where a column has NaN or infinity in a run, its values there are rounded by
    themselves.

    Where the kernel adds up P V of thousands of keys, codes ``pay`` for what is cut off of their products. FP8 WGMMA
    cuts products off towards zero, by half of a unit of the sum whatever the product is. If a column's values lie
    evenly about 0 that cancels; but of skewed ones, less their mean, more lie on one side, and the sum is wrong by
    that. A unit over P is some 1/64 of a value's usual size where 8192 keys have scores from N(0, 1), and less of fewer
    keys or flatter scores. So a code counts as too small by half of it: by ``pay`` of that size in one key of
    PAYING_KEYS, as signs cancel or do not in a sample too. For the usual size stands that of the first value of the
    run, an estimate without a bias. No value pays more than itself.

    All in float16, whose numbers have the digits that decide how e4m3 rounds.
    """
    x = runs.half()
    bounds = torch.where(x.isfinite().all(1, keepdim=True), MOST_SHIFT, 0.0).half() * x.abs().nan_to_num()
    codes, carry = [], torch.zeros_like(x[:, 0])
    for key, (values, bound) in enumerate(zip(x.unbind(1), bounds.unbind(1), strict=True)):
        shift = torch.minimum(carry.abs().nan_to_num(math.inf), bound).copysign(carry.nan_to_num())
        codes.append(to_e4m3((values + shift).float()))
        if pay and key % PAYING_KEYS == 1:
            values = values + torch.minimum(values.abs(), pay / MOST_SHIFT * bounds[:, 0]).copysign(values)
        # In float32 the product is exact, and so nearly always the sum.
        carry = (carry.float() + FEEDBACK * (values - codes[-1].half()).float()).half()
    return torch.stack([code.view(torch.uint8) for code in codes], 1).view(E4M3)


def paid_by_values(keys: int) -> float:
    """What :func:`round_runs` takes for values that lose means of runs. A mean of a sample leaves larger sums."""
    return PAID_WHERE_SAMPLED if are_sampled_in_runs(keys) else PAID


def rounding_of_keys(head_dim: int, largest: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """How keys over their scale become e4m3."""
    return partial(round_rows, largest=largest) if keeps_lengths(head_dim) else to_e4m3


def round_rows(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Rows x (..., head_dim) over their scale, up to ``largest``, in e4m3, such that each keeps its length.

    By chance the codes c of a row are a little too long or too short for it, and with them its scores for the queries
    that like it best, which point the way that it does. A key has no scale that could be fitted (:func:`fit_of_rows`).
    So each element is changed by a share of itself before it is rounded: ``length_feedback`` times the sum of
    x (x - c) over the elements in front, but no more than MOST_OF_ELEMENT. So <x, c> comes out nearer to <x, x>, and
    single errors grow by less than a percent. Even and odd columns of four chunks have a sum each, which take in those
    of the others behind each 32 columns. A row with NaN or infinity has its other codes off by up to that share.

    All in float16, whose numbers have the digits that decide how e4m3 rounds.
    """
    head_dim = x.shape[-1]
    feedback = length_feedback(largest)
    steps = pad(x.half(), (0, -head_dim % (FIT_SUMS * CHUNK))).unflatten(-1, (-1, FIT_SUMS, CHUNK // 2, 2))
    total = steps.new_zeros(*steps.shape[:-4], 1, 1)
    codes = []
    for step in steps.unbind(-4):
        carry, pairs = total, []
        for values in step.unbind(-2):
            share = carry.abs().nan_to_num(math.inf).clamp_max(MOST_OF_ELEMENT).copysign(carry.nan_to_num())
            pairs.append(to_e4m3(multiply_add_halves(values, share, values).float()))
            carry = multiply_add_halves(feedback * values, values - pairs[-1].half(), carry)
        codes.append(torch.stack([pair.view(torch.uint8) for pair in pairs], -2))
        a, b, c, d = (carry - total).sum(-1, keepdim=True).unbind(-2)
        total = total + ((a + c) + (b + d)).unsqueeze(-2)
    return torch.stack(codes, -4).flatten(-4)[..., :head_dim].contiguous().view(E4M3)


def multiply_add_halves(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c of float16, rounded once: in float64 the numbers that occur here have exact products and sums."""
    return _to_half(torch.addcmul(c.double(), a.double(), b.double()))


def _to_half(x: torch.Tensor) -> torch.Tensor:
    """float64 in float16, rounded once. torch goes by way of float32, so that is rounded to odd: what is between two
    numbers gets the one with an odd last bit, and so stays on its side of what float16 has halfway."""
    single = x.float()
    bits = single.view(torch.int32)
    toward_zero = bits - (single.abs().double() > x.abs()).int()
    odd = torch.where(single.double() == x, bits, toward_zero | 1)
    return odd.view(torch.float32).half()


def fit_of_rows(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """What the scales of rows are to be multiplied with, for the least squared error by their codes.

    By chance codes c are a little too long or too short for their row x = c + e. Of all multiples of c that with the
    factor <x, c> / <c, c> = 1 + <c, e> / <c, c> is nearest to x. It keeps the scores of the keys that a query likes
    best, which point the way that it does. (RaBitQ, Gao and Long, SIGMOD 2024, divides by <x, c> for the same reason.)
    Sums are in float16, which is good enough for so small a share; chunks have FIT_SUMS sums in turn.

    Args:
        x: (..., head_dim) float32, over the scale of its row.
        codes: e4m3 of the same shape, up to 16.
    Returns:
        float32 (...): 1 where a row has NaN, or nothing but zeros.
    """
    code = codes.half()
    chunks = [
        pad(y, (0, -y.shape[-1] % (FIT_SUMS * CHUNK))).unflatten(-1, (-1, FIT_SUMS, CHUNK // 2, 2))
        for y in (code, x.half() - code)
    ]
    pairs = [y.movedim(-2, -3).flatten(-4, -3).unbind(-3) for y in chunks]
    of_codes = of_errors = torch.zeros_like(pairs[0][0])
    for c, error in zip(*pairs, strict=True):
        of_errors, of_codes = multiply_add_halves(c, error, of_errors), multiply_add_halves(c, c, of_codes)
    share = _join_sums(of_errors) * (RECIPROCAL - _join_sums(of_codes).view(torch.int32)).view(torch.float32)
    return torch.where(share.abs() <= MOST_FIT, 1.0 + share, 1.0)


def _join_sums(sums: torch.Tensor) -> torch.Tensor:
    """(..., FIT_SUMS, 2) float16 -> their sum, added up in float16 in the kernel's order, as float32."""
    a, b, c, d = (sums[..., 0] + sums[..., 1]).unbind(-1)
    return ((a + b) + (c + d)).float()


def mean_of_keys(x: torch.Tensor) -> torch.Tensor:
    """The mean of x (b, s, hk, d) over the keys, float32 (b, hk, d)."""
    return x.mean(1, dtype=torch.float32)


def means_of(
    k: torch.Tensor,
    v: torch.Tensor,
    quantization: Fp8Quantization,
    find_mean_v: Callable[[torch.Tensor], torch.Tensor] = mean_worth_subtracting,
) -> Means:
    """What ``quantization`` subtracts from k and v; nothing where there are no keys."""
    nothing = torch.empty(0, dtype=torch.float32, device=k.device)
    if not k.shape[1]:
        return Means(nothing, nothing)
    return Means(
        mean_of_keys(k) if quantization.smooth_k else nothing,
        find_mean_v(v) if quantization.smooth_v else nothing,
    )


def add_mean(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Add the mean (b, hk, d) of each key/value head to x (b, s, h, d) in place: in float32, rounded once."""
    x.unflatten(2, (mean.shape[1], -1)).add_(mean[:, None, :, None])
    return x


def restore_values(
    out: torch.Tensor, parts: QuantizedQKV, causal: bool, window: Sides = FULL_SIDES
) -> torch.Tensor:
    """The output (b, sq, h, dv) of attention on ``parts``, with what was done to V undone. ``out`` may be written to.

    Float32 if there was a rotation, else ``out``. A row without keys stays 0: it has no part in the mean. ``causal``
    and ``window`` are those of a ``MaskSpec``.
    """
    values = rotate_back(out, parts.quantization.seed) if parts.quantization.rotate_v else out
    if parts.mean_v.numel():
        without_keys = rows_before_keys(out.shape[1], parts.v.shape[1], causal, window)
        add_mean(values[:, without_keys:], parts.mean_v)
    return values


def rows_before_keys(seqlen_q: int, seqlen_k: int, causal: bool, window: Sides) -> int:
    """Queries so far before the first key that they see none; ``causal`` and ``window`` are those of a ``MaskSpec``."""
    _, right, chunk = window
    if causal or chunk:
        right = 0
    return 0 if right == UNLIMITED else max(seqlen_q - seqlen_k - right, 0)


def lost_scores(q: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """What every score of a query loses with the mean of K (b, hk, d): float32 (b, h, sq)."""
    of_query_head = mean.repeat_interleave(q.shape[2] // mean.shape[1], 1).unsqueeze(1)
    # Not contiguous(), which leaves the strides of a tensor without elements as they are.
    return (q.float() * of_query_head).sum(-1).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude of each row: (b, s, h, d) -> (b, h, s)."""
    return x.abs().masked_fill(~torch.isfinite(x), 0.0).amax(-1).transpose(1, 2)


def _shared_amax(rows: torch.Tensor, granularity: str, block: int, kv_heads: int) -> torch.Tensor:
    """Row maxima (b, h, s), s > 0 -> maxima over what shares a scale, (b, h, ceil(s / block))."""
    batch, heads, seqlen = rows.shape
    if granularity == "tensor":
        return rows.amax().expand(batch, heads, 1)
    if granularity == "head":
        group = rows.unflatten(1, (kv_heads, -1)).amax((2, 3))
        return group.repeat_interleave(heads // kv_heads, 1).unsqueeze(-1)
    # A block may be longer than the sequence, by as much as does not fit memory.
    block = min(block, seqlen)
    return pad(rows, (0, -seqlen % block)).unflatten(2, (-1, block)).amax(-1)


def scale_of_values(scale: torch.Tensor) -> torch.Tensor:
    """Positive normal float32 scales rounded up to powers of 16."""
    exponent = (scale.view(torch.int32) + (2**23 - 1) >> 23) - 127
    steps = torch.div(exponent + (VALUE_OCTAVES - 1), VALUE_OCTAVES, rounding_mode="floor")
    return torch.ldexp(torch.ones_like(scale), VALUE_OCTAVES * steps)


def _quantize(
    x: torch.Tensor,
    granularity: str,
    block: int,
    kv_heads: int,
    final: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous,
    largest: float = E4M3_MAX,
    rounded: Callable[[torch.Tensor], torch.Tensor] = to_e4m3,
) -> QuantizedTensor:
    """Quantize float32 x (b, s, h, d) with ``final(amax (1 / largest))`` as the scale, and ``rounded`` to e4m3."""
    batch, seqlen, heads, _ = x.shape
    if granularity != "block":
        block = max(seqlen, 1)
    if x.numel() == 0:
        blocks = math.ceil(seqlen / block)
        return QuantizedTensor(x.to(E4M3), x.new_full((batch, heads, blocks), MIN_SCALE), block, largest)
    amax = _shared_amax(_finite_amax(x), granularity, block, kv_heads)
    scale = final((amax * (1.0 / largest)).clamp_min(MIN_SCALE).contiguous())
    return QuantizedTensor(rounded(x * row_scale(scale.reciprocal(), block, seqlen)), scale, block, largest)


def _fitted(x: torch.Tensor, quantized: QuantizedTensor) -> QuantizedTensor:
    """Rows with a scale each, the scales fitted to their codes."""
    over_scale = x * row_scale(quantized.scale.reciprocal(), 1, x.shape[1])
    fit = fit_of_rows(over_scale, quantized.data).transpose(1, 2)
    return replace(quantized, scale=(quantized.scale * fit).contiguous())


def quantize_by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    quantization: Fp8Quantization,
    means: Means,
    pay: float = 0.0,
) -> tuple[QuantizedTensor, QuantizedTensor, TransposedV]:
    """The twin of the fused kernel, for every device and option. ``pay`` is what :func:`round_runs` takes for V."""
    c, kv_heads = quantization, k.shape[2]
    block_k = c.keys_per_block(k.shape[3], v.shape[3], k.shape[1])
    k, v = (
        x.float() - mean.unsqueeze(1) if mean.numel() else x for x, mean in zip((k, v), means, strict=True)
    )
    q32, k32 = (rotate_head_dim(x, c.seed) if c.rotate else x.float() for x in (q, k))
    v32 = rotate_head_dim(v, c.seed) if c.rotate_v else v.float()
    final = scale_of_values if c.granularity == "block" else torch.Tensor.contiguous
    rounded = partial(round_values, pay=pay)
    rows = _quantize(v32, c.granularity, block_k, kv_heads, final, rounded=rounded)
    largest_q, largest_k = largest_codes(q.shape[3], c.scales_rows)
    quantized_q = _quantize(q32, c.granularity, c.block_q, kv_heads, largest=largest_q)
    return (
        _fitted(q32, quantized_q) if c.scales_rows and q.shape[3] <= MAX_HEAD_DIM else quantized_q,
        _quantize(
            k32,
            c.granularity,
            block_k,
            kv_heads,
            largest=largest_k,
            rounded=rounding_of_keys(k.shape[3], largest_k),
        ),
        TransposedV(transpose_for_kernel(rows.data), rows.scale, rows.block, v.shape[1]),
    )
