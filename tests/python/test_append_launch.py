"""What reaches the kernel that appends to a cache, seen by a stand-in that does its work in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.append.config import BY_PAGE, AppendConfig
from hopper_attention.backends import Target
from hopper_attention.kvcache_rotation import rotate_keys
from hopper_attention.launch import append as launch
from hopper_attention.launch.append import append, append_facts, why_not_append
from hopper_attention.reference.append import Rotation, append_to_cache, rotate_queries
from tests.python.fake_gpu import H200, pretend, serve_by

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class StandIn:
    """The kernel, by the reference; ``arguments`` are those of its last launch."""

    def __init__(self) -> None:
        self.configs: list[AppendConfig] = []
        self.arguments: tuple[Any, ...] = ()

    def get(self, config: AppendConfig) -> Callable[..., None]:
        self.configs.append(config)
        return self.launch

    def launch(self, *arguments: Any) -> None:
        self.arguments = arguments
        k, v, k_cache, v_cache, cache_seqlens, cu, batch_idx, table, lengths, *rest = arguments
        k_descale, v_descale, cos, sin, first, q, rotated, cu_q, step = rest
        rotation, config = None, self.configs[-1]
        if config.scales == BY_PAGE:
            k_descale, v_descale = k_descale[:, :1], v_descale[:, :1]
        if cos is not None:
            is_interleaved = self.configs[-1].rotary == "interleaved"
            rotation = Rotation(cos, sin, is_interleaved, first if len(first) else None)
        found = append_to_cache(
            *(x[0] if len(cu) else x for x in (k, v)),
            *(k_cache, v_cache, cache_seqlens),
            cu_seqlens_k_new=cu if len(cu) else None,
            cache_batch_idx=batch_idx if len(batch_idx) else None,
            page_table=table if len(table) else None,
            k_descale=k_descale,
            v_descale=v_descale,
            rotation=rotation,
            mix=rotate_keys if config.hadamard else None,
        )
        lengths.copy_(found)
        if rotation is not None and q.numel():
            options = {"cu_seqlens_q": cu_q if len(cu_q) else None, "per_query_position": bool(step)}
            given = q[0] if len(cu_q) else q
            rotated.copy_(rotate_queries(given, rotation, cache_seqlens, **options).view(rotated.shape))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield from serve_by(StandIn(), monkeypatch, launch)


def tensors(dtype: torch.dtype = BF16, cache: torch.dtype = BF16, pages: int = 4) -> tuple[Tensor, ...]:
    """k, v (2, 3, 2, 32), caches (pages, 8, 2, 32) of zeros, lengths."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 3, 2, 32, generator=generator).to(dtype) for _ in "kv")
    caches = (torch.zeros(pages, 8, 2, 32).to(cache) for _ in "kv")
    return k, v, *caches, torch.tensor([1, 4], dtype=torch.int32)


def rotation(columns: int = 32, dtype: torch.dtype = torch.float32) -> Rotation:
    angles = 2 * math.pi * torch.rand(20, columns // 2, generator=torch.Generator().manual_seed(1))
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), False)


def both(given: tuple[Tensor, ...], **options: Any) -> None:
    """Check ``append`` against the reference on the same arguments."""
    k, v, k_cache, v_cache, seqlens = given
    expected = k_cache.clone(), v_cache.clone()
    of_q = {
        name: options.pop(name) for name in ("q", "cu_seqlens_q", "per_query_position") if name in options
    }
    lengths, rotated = append(*given, **options, **of_q)
    assert torch.equal(append_to_cache(k, v, *expected, seqlens, **options), lengths)
    for found, exact in zip((k_cache, v_cache), expected, strict=True):
        assert torch.equal(found.float(), exact.float())
        assert found.float().abs().sum() > 0
    q = of_q.pop("q", None)
    if q is None:
        assert rotated is None
    else:
        assert torch.equal(rotated, rotate_queries(q, options["rotation"], seqlens, **of_q))


def test_a_contiguous_cache(kernel: StandIn) -> None:
    both(tensors())
    assert kernel.configs == [AppendConfig("sm_90a", "bfloat16", "bfloat16")]
    shapes = [tuple(x.shape) for x in kernel.arguments[:9]]
    assert shapes == [(2, 3, 2, 32)] * 2 + [(4, 8, 2, 32)] * 2 + [(2,), (0,), (0,), (0, 0), (2,)]
    assert kernel.arguments[9:] == (None,) * 9


def test_pages_and_queries(kernel: StandIn) -> None:
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    q = torch.randn(2, 3, 4, 32, generator=torch.Generator().manual_seed(2)).to(BF16)
    both(tensors(), page_table=table, cache_batch_idx=table[:, 1], rotation=rotation(), q=q)
    both(tensors(), page_table=table, rotation=rotation(16), q=q, per_query_position=False)
    assert [config.rotary for config in kernel.configs] == ["halves"], "sizes are no part of a kernel"
    both(tensors(), rotation=replace(rotation(dtype=BF16), is_interleaved=True))
    assert kernel.configs[-1] == AppendConfig(
        "sm_90a", "bfloat16", "bfloat16", "interleaved", "bfloat16", "bfloat16"
    )


def test_packed_tokens_and_queries(kernel: StandIn) -> None:
    k, v, *rest = tensors()
    offsets, of_q = (torch.tensor(x, dtype=torch.int32) for x in ((0, 1, 6), (0, 3, 4)))
    q = torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(3)).to(BF16)
    first = torch.tensor([7, 2], dtype=torch.int32)
    both(
        (k.flatten(0, 1), v.flatten(0, 1), *rest),
        cu_seqlens_k_new=offsets,
        rotation=replace(rotation(), first_positions=first),
        q=q,
        cu_seqlens_q=of_q,
    )
    assert tuple(kernel.arguments[0].shape) == (1, 6, 2, 32) and kernel.arguments[14].shape[0] == 1


def test_descales_and_none_of_them(kernel: StandIn) -> None:
    descale = torch.tensor([[2.0, 0.5]]).expand(2, 2)
    both(tensors(cache=FP8), k_descale=descale, v_descale=descale.flip(0, 1))
    both(tensors(cache=FP8))
    assert torch.equal(kernel.arguments[9], torch.ones(2, 2))
    both(tensors(FP8, FP8))
    assert kernel.arguments[9] is None and kernel.configs[-1].is_scaled is False


@pytest.mark.parametrize(("kind", "rows"), [("token", 8), ("page", 1)])
@pytest.mark.parametrize("hadamard", [False, True])
def test_scales_by_token_and_by_page(kind: str, rows: int, hadamard: bool, kernel: StandIn) -> None:
    """The kernel sees those by page as if they were by token; tokens of e4m3 have nothing to do with them."""
    given, expected = tensors(cache=FP8), tensors(cache=FP8)
    scales = [{name: torch.full((4, rows, 2), 0.5) for name in ("k_descale", "v_descale")} for _ in range(2)]
    append(*given, **scales[0], hadamard=hadamard)
    append_to_cache(*expected, **scales[1], mix=rotate_keys if hadamard else None)
    for found, wanted in zip(given[2:], expected[2:], strict=True):
        assert torch.equal(found.float(), wanted.float())
    for name in ("k_descale", "v_descale"):
        assert torch.equal(scales[0][name], scales[1][name])
        assert bool((scales[0][name] == 0.5).all()) == (kind == "page")
    config = kernel.configs[-1]
    assert (config.scales, config.hadamard) == (kind, hadamard)
    assert kernel.arguments[9].shape == kernel.arguments[10].shape == (4, 8, 2)
    append(*tensors(FP8, FP8), **scales[0])
    assert kernel.configs[-1].scales == "sequence" and kernel.arguments[9:11] == (None, None)


def test_what_cannot_be_read_in_vectors_is_copied(kernel: StandIn) -> None:
    _, v, *rest = tensors()
    wide = torch.randn(2, 3, 2, 33, generator=torch.Generator().manual_seed(4)).to(BF16)[..., 1:]
    both((wide, v, *rest), rotation=rotation(), q=wide)
    for i in (0, 14):
        assert kernel.arguments[i].stride()[-1] == 1 and kernel.arguments[i].stride()[-2] == 32


def test_another_current_gpu(kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = pretend(monkeypatch, launch)
    monkeypatch.setattr(launch, "index_of", lambda device: 3)
    both(tensors())
    assert entered == [3]


def test_no_sequence(kernel: StandIn) -> None:
    k, v, k_cache, v_cache, seqlens = tensors()
    lengths, rotated = append(k[:0], v[:0], k_cache, v_cache, seqlens[:0], rotation=rotation(), q=k[:0])
    assert lengths.shape == (0,) and rotated is not None and rotated.shape == (0, 3, 2, 32)
    assert kernel.arguments == ()


REFUSED = {
    "k_cache has strides .*, and the kernel needs a last stride of 1": {
        "k_cache": torch.zeros(4, 8, 32, 2).to(BF16).mT
    },
    "v_cache has 36 columns, and the kernel needs a multiple of 8": {
        "v": torch.zeros(2, 3, 2, 36).to(BF16),
        "v_cache": torch.zeros(4, 8, 2, 36).to(BF16),
    },
    "k_cache begins 2 bytes past a multiple of 16": {
        "k_cache": torch.zeros(4 * 8 * 2 * 32 + 1).to(BF16)[1:].view(4, 8, 2, 32)
    },
    "rotary_dim is 24, and the kernel needs a multiple of 16 up to head_dim, 32": {"rotation": rotation(24)},
    "rotary_dim is 48, and the kernel needs a multiple of 16 up to head_dim, 32": {"rotation": rotation(48)},
    "rotary_cos has no rows": {"rotation": Rotation(torch.zeros(0, 16), torch.zeros(0, 16), True)},
    "cache_dtype is 'float16', allowed: 'bfloat16', 'float8_e4m3fn'": {
        "k_cache": torch.zeros(4, 8, 2, 32).half(),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_kernel_does_not_do_is_refused(message: str, kernel: StandIn) -> None:
    names = ("k", "v", "k_cache", "v_cache", "cache_seqlens")
    with pytest.raises(NotImplementedError, match=f"{message}.*; append in PyTorch"):
        append(**(dict(zip(names, tensors(), strict=True)) | REFUSED[message]))
    assert kernel.arguments == ()


def test_why_not_elsewhere_and_where_sizes_are_too_large() -> None:
    k, v, k_cache, v_cache, _ = tensors(cache=FP8)
    facts = append_facts(k, v, k_cache, v_cache)
    assert why_not_append(facts, H200) == ""
    assert "is not an NVIDIA GPU" in why_not_append(facts, Target("cpu"))
    ampere = Target("fake A100", (8, 0), assume_installed=True)
    assert "arch is sm_80, which has no instructions for float8_e4m3fn" in why_not_append(facts, ampere)
    assert why_not_append(append_facts(k, v, k_cache.to(BF16), v_cache.to(BF16)), ampere) == ""
    of_v = facts.v_cache._replace(shape=(4, 8, 2, 264))
    assert why_not_append(facts._replace(v_cache=of_v), H200) == ""
    assert "v_cache has 264 columns" in why_not_append(facts._replace(v_cache=of_v, scales="token"), H200)
    long = facts._replace(table_shape=(2, 2**29))
    assert "there may be 4294967296 keys of a sequence" in why_not_append(long, H200)
    many = facts._replace(k=facts.k._replace(shape=(2**16, 2**16, 2, 32)))
    assert "there may be 4294967296 new tokens or queries" in why_not_append(many, H200)
    wide = facts._replace(k=facts.k._replace(shape=(2, 3, 2**14, 64)))
    assert "a token has 1048640 numbers" in why_not_append(wide, H200)
