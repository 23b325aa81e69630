"""Transformers on a GPU: models of random weights in bfloat16, against eager attention in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs the transformers extra")

import hopper_attention.integrations.transformers as integration

pytestmark = pytest.mark.gpu

TEXT = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 100},
    "Gemma2": {"sliding_window": 100, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 64},
    "GptOss": {"sliding_window": 100, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def make_model(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    config = model_class.config_class(**TEXT | MODELS[name] | changes)
    config._attn_implementation = "eager"
    # Weights that both dtypes hold exactly.
    return model_class(config).bfloat16().float().eval().cuda()


def logits(model: Any, attention: str, ids: Tensor, mask: Tensor | None) -> Tensor:
    model.set_attn_implementation(attention)
    out: Tensor = model(ids, attention_mask=mask).logits.float()
    return out


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_16_bits_are_as_near_to_float32_as_eager(name: str) -> None:
    model, ids = make_model(name), torch.randint(2, 512, (2, 300), device="cuda")
    padding = torch.ones_like(ids)
    padding[1, :77] = 0
    for mask in (None, padding):
        exact = logits(model.float(), "eager", ids, mask)
        model.bfloat16()
        eager, ours = (logits(model, way, ids, mask) for way in ("eager", integration.NAME))
        seen = padding.bool() if mask is not None else torch.ones_like(padding).bool()
        errors = [float((x - exact)[seen].norm() / exact[seen].norm()) for x in (eager, ours)]
        assert errors[1] < 1.5 * errors[0], (name, errors)


def test_gradients_are_as_near_to_float32_as_eager() -> None:
    model, ids = make_model("Llama"), torch.randint(2, 512, (2, 300), device="cuda")
    found = {}
    for way, dtype in (
        ("eager", torch.float32),
        ("eager", torch.bfloat16),
        (integration.NAME, torch.bfloat16),
    ):
        model.to(dtype).set_attn_implementation(way)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found[way, dtype] = model.model.layers[0].self_attn.q_proj.weight.grad.float().clone()
    exact, eager, ours = found.values()
    assert float((ours - exact).norm()) < 1.5 * float((eager - exact).norm())


@torch.no_grad()
@pytest.mark.parametrize(("name", "changes"), [("Llama", {}), ("GptOss", {"num_experts_per_tok": 2})])
def test_fused_rotary_is_as_near_to_float32_as_eager(name: str, changes: dict[str, int]) -> None:
    """With all experts of all tokens: which one is chosen would be decided by any rounding."""
    model, ids = make_model(name, **changes), torch.randint(2, 512, (2, 300), device="cuda")
    exact = logits(model.float(), "eager", ids, None)
    eager = logits(model.bfloat16(), "eager", ids, None)
    integration.fuse_rotary(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ours = logits(model, integration.NAME, ids, None)
    integration.unfuse_rotary(model)
    assert sum(event.count for event in profile.key_averages() if "rotation" in event.key.lower()) == 2
    assert float((ours - exact).norm()) <= 1.5 * float((eager - exact).norm())


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_generate_compiles_on_a_static_cache(name: str) -> None:
    model, ids = make_model(name).bfloat16(), torch.randint(2, 512, (2, 150), device="cuda")
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    for cache in ("dynamic", "static"):
        model.set_attn_implementation(integration.NAME)
        found = model.generate(ids, cache_implementation=cache, **options)
        model.set_attn_implementation("eager")
        # Teacher forcing: one token that differs by a tie would make all others differ.
        forced = model(found.sequences[:, :-1]).logits[:, 149:].float()
        assert float((torch.stack(found.logits, 1) - forced).abs().max()) < 0.05, (name, cache)


@torch.no_grad()
def test_fp8_is_near_16_bits() -> None:
    model, ids = make_model("Llama").bfloat16(), torch.randint(2, 512, (1, 700), device="cuda")
    ours, fp8 = (logits(model, way, ids, None) for way in (integration.NAME, integration.FP8_NAME))
    assert 1e-5 < float((fp8 - ours).norm() / ours.norm()) < 0.1


@pytest.mark.skipif(
    not integration.can_prepare_batches(), reason="this Transformers updates its paged cache in another way"
)
@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_continuous_batching_answers_as_float32_does(name: str) -> None:
    """Each token is what float32 chooses after those before it, but where two are as good as equal."""
    model = make_model(name).bfloat16()
    prompts = [list(range(5, 5 + length)) for length in (150, 3, 40, 70)]
    answers = integration.prepare_batches(model).generate_batch(
        prompts,
        transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=128),
        progress_bar=False,
    )
    model.set_attn_implementation("eager")
    exact, agreed = model.float(), 0
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        ids = torch.tensor([prompt + answer.generated_tokens], device="cuda")
        steps = exact(ids).logits[0, len(prompt) - 1 : -1]
        chosen = steps.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # As much below the largest logit as 16 bits may confuse.
        assert (steps.amax(1) - chosen).max() < 0.2 * steps.std(1).max()
        agreed += int((steps.argmax(1) == ids[0, len(prompt) :]).sum())
    assert agreed >= 40
