"""What ``compile --for-model`` compiles: the kernels that calls of such a model would ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hopper.decode.config import DecodeConfig
from hopper_attention import cli_compile, decode_rules, explain, explain_varlen
from hopper_attention.cli import app
from hopper_attention.kvcache_call import CacheExtras, CacheOptions, read_call
from hopper_attention.kvcache_checks import CacheTensors
from hopper_attention.kvcache_plan import explain_kvcache
from hopper_attention.model_kernels import ModelShape, kernels_of, read_model, shape_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA_2 = LLAMA | {
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "dtype": "float16",
}
BERT = {"architectures": ["BertModel"], "hidden_size": 768, "num_attention_heads": 12}


def names(config: dict[str, Any], arch: str = "sm_90a", train: bool = False) -> set[str]:
    return {kernel.name for kernel in kernels_of(shape_of(config), arch, train)}


def test_what_a_config_says() -> None:
    bf16 = torch.bfloat16
    assert shape_of(LLAMA) == ModelShape(bf16, 32, 8, 128, 128)
    assert shape_of(GPT_OSS) == ModelShape(bf16, 64, 8, 64, 64, window=128, has_sinks=True)
    gemma = ModelShape(torch.float16, 32, 8, 256, 256, window=4096, softcap=50.0)
    assert shape_of(GEMMA_2) == shape_of({"text_config": GEMMA_2}) == gemma
    assert shape_of(BERT) == ModelShape(bf16, 12, 12, 64, 64, causal=(False,))
    assert shape_of(LLAMA | {"sliding_window": 9, "use_sliding_window": False}).window == 0
    assert shape_of(LLAMA | {"sliding_window": 9, "layer_types": ["full_attention"]}).window == 0
    assert shape_of(LLAMA | {"attention_chunk_size": 8192}).chunk == 8192
    for rotary in ({"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default"}}):
        assert names(LLAMA | rotary) - names(LLAMA) == {"rotation_sm_90a_bf16_by_bf16"}
    latent = {"num_attention_heads": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert shape_of(latent) == ModelShape(bf16, 16, 16, 192, 128, causal=(False, True))


@pytest.mark.parametrize("config", [LLAMA, GPT_OSS, GEMMA_2])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_every_call_of_the_model_finds_its_kernel(
    config: dict[str, Any], capability: tuple[int, int]
) -> None:
    model = shape_of(config)
    found = names(config, "sm_90a" if capability == (9, 0) else "sm_80")
    sinks = torch.empty(model.heads, device="meta") if model.has_sinks else None
    options: dict[str, Any] = {"softcap": model.softcap, "sinks": sinks, "device_capability": capability}

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=model.dtype, device="meta")

    for seqlen in (1, 100, 600, 5000, 70000):
        q = draw(2, seqlen, model.heads, model.head_dim)
        k = draw(2, seqlen, model.kv_heads, model.head_dim)
        for window in (-1, 127) if model.window else (-1,):
            masked = options | {"causal": True, "window_size": (window, -1)}
            assert explain(q, k, k, **masked).config.name in found
            cu = torch.empty(3, dtype=torch.int32, device="meta")
            flat = [x.flatten(0, 1) for x in (q, k, k)]
            assert explain_varlen(*flat, cu, cu, seqlen, seqlen, **masked).config.name in found
            cache = draw(2, 2 * seqlen, model.kv_heads, model.head_dim)
            lengths = torch.empty(2, dtype=torch.int32, device="meta")
            for queries in (q, q[:, :1]):
                plan = explain_kvcache(queries, cache, cache, cache_seqlens=lengths, **masked)
                assert plan.config.name in found
            for steps in (1, 4, 8):
                few = q[:, :steps]
                assert explain(few, k, k, **masked).config.name in found
                counts = steps, seqlen
                packed = few.flatten(0, 1), *flat[1:]
                assert explain_varlen(*packed, cu, cu, *counts, **masked).config.name in found


def test_kernels_with_clusters_are_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [kernel for kernel in kernels_of(shape_of(LLAMA), "sm_90a") if isinstance(kernel, DecodeConfig)]
    assert {config.cluster for config in found} == {1} | {cluster for cluster, *_ in decode_rules.CLUSTERS}
    monkeypatch.setattr(decode_rules, "most_clusters", lambda index, size: 132 // size)
    monkeypatch.setattr(decode_rules, "is_capturing", lambda device: False)
    q, cache = (
        torch.empty(8, *of, dtype=torch.bfloat16, device="meta") for of in ((1, 32, 128), (8192, 8, 128))
    )
    for batch, cluster in ((1, 8), (8, 2)):
        # The keys that one query sees need no mask.
        tensors = CacheTensors(q[:batch], cache[:batch, :2048], cache[:batch, :2048])
        call = read_call(tensors, CacheExtras(), CacheOptions(causal=True)).call
        config = decode_rules.serving_config(
            replace(call, shape=replace(call.shape, device=torch.device("cuda", 0)))
        )
        assert config.cluster == cluster and config in found


def test_training_adds_the_backward_passes() -> None:
    for arch in ("sm_90a", "sm_80"):
        more = names(LLAMA, arch, train=True) - names(LLAMA, arch)
        # And on Hopper what makes the launches of a pass one.
        of_arch = {"hopper", "launches"} if arch == "sm_90a" else {"ampere"}
        assert {name.split("_bwd_")[0] for name in more} == of_arch
        assert any("_bwd_prepare_" in name for name in more) and any(
            name.endswith("_varlen") for name in more
        )
    q = torch.empty(1, 64, 32, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    plan = explain(q, q, q, causal=True, device_capability=(9, 0))
    assert plan.notes[-1].split()[-1] in names(LLAMA, train=True)


def test_an_encoder_has_no_cache() -> None:
    assert not any("decode" in name or "append" in name or "causal" in name for name in names(BERT))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        cli_compile, "compile_and_show", lambda configs, jobs: asked.append([c.name for c in configs]) or ()
    )
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        options = ["compile", "--for-model", str(path), "--arch", "sm_90a", "--train"]
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.output
        assert set(asked[-1]) == names(LLAMA, train=True)
    assert read_model(tmp_path) == shape_of(LLAMA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "which is no JSON"),
        ("[]", "allowed: a config.json, which is a JSON object"),
        ("{}", "no num_attention_heads or n_head"),
        ('{"num_attention_heads": 4}', "no hidden_size or n_embd"),
        ('{"num_attention_heads": 4, "hidden_size": 28}', "head_dim"),
    ],
)
def test_configs_of_no_such_model(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(app, ["compile", "--for-model", str(tmp_path), "--arch", "sm_90a"])
    assert result.exit_code == 2 and message in result.output
    assert CliRunner().invoke(app, ["compile", "--train"]).exit_code == 2
    assert CliRunner().invoke(app, ["compile", "--for-model", str(tmp_path / "none")]).exit_code == 2
