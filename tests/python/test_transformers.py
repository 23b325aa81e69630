"""Transformers by name: models of random weights give what eager attention gives, in float32 to its own rounding."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="needs the transformers extra")

from transformers.masking_utils import create_causal_mask, create_masks_for_generate

import hopper_attention.integrations.transformers as integration
from hopper_attention.integrations.transformers import batches, rotary, visible

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "transformers.md"

BUDGET = 2e-5
"""Of the largest difference of logits of size 1 in float32: eager and ours sum in different orders."""

FP8_BUDGET = 0.1
"""Relative error of the attention output with e4m3, whose half step is 1/16 of a number."""

TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENCODER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", TEXT),
    "qwen3": ("Qwen3ForCausalLM", TEXT),
    "mistral": ("MistralForCausalLM", TEXT | {"sliding_window": 4}),
    "gemma2": (
        "Gemma2ForCausalLM",
        TEXT | {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        TEXT | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    # Its layers say nothing of their window, which only the mask knows.
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        TEXT
        | {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1, "num_experts": 2}
        | {"num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "bert": ("BertModel", ENCODER | {"vocab_size": 97, "max_position_embeddings": 64}),
    "vit": ("ViTModel", ENCODER | {"image_size": 16, "patch_size": 4}),
}
DECODERS = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "qwen2_moe")


def make_model(name: str, attention: str = "eager", **changes: Any) -> Any:
    """A model of random weights, large enough that attention decides on its output."""
    class_name, options = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    config = model_class.config_class(**options | changes)
    config._attn_implementation = attention
    model = model_class(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in ("q_proj", "k_proj", "query", "key", "sinks")):
                parameter.normal_(std=0.3)
    return model.eval()


def both(name: str, run: Callable[[Any], Any], **changes: Any) -> tuple[Any, Any]:
    """``run`` of the model with eager attention, and with ours."""
    model = make_model(name, **changes)
    eager = run(model)
    model.set_attn_implementation(integration.NAME)
    return eager, run(model)


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(1))


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


@torch.no_grad()
def test_logits_are_those_of_eager() -> None:
    ids, image = tokens(2, 11), torch.randn(2, 3, 16, 16)
    runs: dict[str, Callable[[Any], Tensor]] = {name: lambda m: m(ids).logits for name in DECODERS}
    runs["bert"] = lambda m: m(ids).last_hidden_state
    runs["vit"] = lambda m: m(image).last_hidden_state
    for name, run in runs.items():
        eager, ours = both(name, run)
        assert difference(eager, ours) < BUDGET, name
        assert float(eager.std()) > 0.01, name


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    mask = torch.ones(3, 11, dtype=torch.long)
    if side == "left":
        mask[1, :4], mask[2, :10] = 0, 0
    else:
        mask[1, 7:], mask[2, 1:] = 0, 0
    for name in ("llama", "mistral", "gpt_oss", "bert"):
        key = "last_hidden_state" if name == "bert" else "logits"
        eager, ours = both(name, lambda m, key=key: m(tokens(3, 11), attention_mask=mask)[key])
        assert difference(eager[mask.bool()], ours[mask.bool()]) < BUDGET, name


@torch.no_grad()
def test_a_decoder_may_attend_in_both_directions() -> None:
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    for padding in (None, mask):
        # E731: a way to run a model, in one line.
        run = lambda m, padding=padding: m(tokens(2, 11), attention_mask=padding).logits  # noqa: E731
        eager, ours = both("llama", run, is_causal=False)
        assert difference(eager[mask.bool()], ours[mask.bool()]) < BUDGET
    causal = make_model("llama")(tokens(2, 11)).logits
    assert difference(both("llama", lambda m: m(tokens(2, 11)).logits, is_causal=False)[1], causal) > 0.01


@torch.no_grad()
def test_padding_between_tokens_becomes_a_table() -> None:
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 3:5] = 0
    eager, ours = both("mistral", lambda m: m(tokens(2, 11), attention_mask=mask).logits)
    assert difference(eager[mask.bool()], ours[mask.bool()]) < BUDGET


def test_a_mask_that_kernels_have_no_name_for_becomes_a_table() -> None:
    config = make_model("llama", integration.NAME).config
    embedded = torch.zeros(2, 7, 64)
    images = torch.tensor([[-1, 0, 0, 0, -1, 1, 1]] * 2)
    table = create_causal_mask(config, embedded, None, None, block_sequence_ids=images)
    position = torch.arange(7)
    same_image = (images[0, :, None] == images[0]) & (images[0] >= 0)
    assert torch.equal(table[1, 0], (position[:, None] >= position) | same_image)
    prefix = create_causal_mask(config, embedded, None, None, or_mask_function=lambda b, h, i, j: j < 3)
    assert torch.equal(prefix[0, 0], (position[:, None] >= position) | (position < 3))


@torch.no_grad()
def test_packed_batches_are_their_sequences() -> None:
    ids, starts = tokens(1, 12), torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (5, 1, 6)])[None]
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}
    for name in ("llama", "mistral"):
        model = make_model(name)
        alone = torch.cat([model(ids[:, a:b]).logits for a, b in pairwise(starts)], 1)
        model.set_attn_implementation(integration.NAME)
        for options in ({"use_cache": False}, {}, given):
            packed = model(ids, position_ids=positions, **options).logits
            assert difference(alone, packed) < BUDGET, (name, options)


@torch.no_grad()
def test_a_users_mask_of_queries_and_keys() -> None:
    table = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.5
    table |= torch.eye(9, dtype=torch.bool)
    added = torch.where(table, 0.0, torch.finfo(torch.float32).min)
    model = make_model("llama")
    eager = model(tokens(2, 9), attention_mask=added).logits
    model.set_attn_implementation(integration.NAME)
    for mask in (table, added):
        assert difference(eager, model(tokens(2, 9), attention_mask=mask).logits) < BUDGET


def gradients(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    model.train()
    model.zero_grad()
    # What padding would predict is no matter: a token counts if the one before it is one too.
    labels = ids.masked_fill((mask == 0) | (mask.roll(1, -1) == 0), -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "checkpoints"), [("llama", True), ("gemma2", False), ("gpt_oss", False)])
def test_gradients_are_those_of_eager(name: str, checkpoints: bool) -> None:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    model = make_model(name)
    if checkpoints:
        model.activation_checkpointing_enable()
    eager = gradients(model, tokens(2, 7), mask)
    model.set_attn_implementation(integration.NAME)
    ours = gradients(model, tokens(2, 7), mask)
    assert eager.keys() == ours.keys()
    assert name != "gpt_oss" or any("sinks" in key for key in ours)
    for key, gradient in eager.items():
        assert difference(gradient, ours[key]) < 2e-5 * max(1.0, float(gradient.abs().max())), key


def test_sinks_alone_can_be_trained() -> None:
    model = make_model("gpt_oss", integration.NAME).to(torch.bfloat16)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("sinks" in key)
    found = gradients(model, tokens(2, 7), mask)
    assert len(found) == 2 and all(float(gradient.abs().min()) > 0 for gradient in found.values())


def test_dropout_is_drawn_in_training_alone() -> None:
    model = make_model("llama", integration.NAME, attention_dropout=0.5)
    ids = tokens(1, 6)
    results = [model.train(is_training)(ids).logits for is_training in (False, False, True, True)]
    assert torch.equal(results[0], results[1])
    assert difference(results[2], results[3]) > 1e-3
    torch.manual_seed(5)
    first = model(ids).logits
    torch.manual_seed(5)
    assert torch.equal(first, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_tokens_of_eager(cache: str) -> None:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    for name in DECODERS if cache == "static" else ("llama", "mistral"):
        for padding in (None, mask):
            # E731: a way to run a model, in one line.
            run = lambda m, padding=padding: m.generate(tokens(2, 6), attention_mask=padding, **options)  # noqa: E731
            eager, ours = both(name, run)
            assert torch.equal(eager, ours), (name, padding)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_16_bits_decode_on_the_functions_for_caches(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hopper_attention.integrations.transformers import attention

    calls = []

    def record(*args: Any, **options: Any) -> Tensor:
        calls.append((args[0].shape[1], options))
        return flash_attn_with_kvcache(*args, **options)

    flash_attn_with_kvcache = attention.flash_attn_with_kvcache
    monkeypatch.setattr(attention, "flash_attn_with_kvcache", record)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    options |= {"output_logits": True, "return_dict_in_generate": True}
    model = make_model("llama", integration.NAME)
    exact = model.generate(tokens(2, 6), attention_mask=mask, **options)
    model.to(torch.bfloat16)
    ours = model.generate(tokens(2, 6), attention_mask=mask, **options)
    assert difference(exact.logits[0], ours.logits[0]) < 0.05
    assert {seqlen for seqlen, _ in calls} == {6, 1}
    assert all(options["cache_leftpad"].tolist() == [0, 3] for _, options in calls)
    calls.clear()
    model.generate(tokens(2, 6), **options)
    assert {options.get("cache_leftpad") for _, options in calls} == {None}


def first_output(model: Any, attention: str, ids: Tensor) -> Tensor:
    """Of the attention of the first layer: the inputs of the next ones are not the same."""
    outputs: list[Tensor] = []
    projection = model.model.layers[0].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0].float()))
    model.set_attn_implementation(attention)
    model(ids)
    hook.remove()
    return outputs[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_continuous_batching_gives_the_tokens_of_eager(name: str) -> None:
    """Prompts of different lengths, one of them longer than a step takes tokens, share steps and pages."""
    model = make_model(name)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3, 4], list(range(20, 33))]
    model.set_attn_implementation("eager")
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert integration.prepare_batches(model) is model
    options = transformers.GenerationConfig(
        max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    sizes = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=12)
    answers = model.generate_batch(prompts, options, continuous_batching_config=sizes, progress_bar=False)
    assert [answer.generated_tokens for answer in answers.values()] == expected
    with pytest.raises(NotImplementedError, match="serves generate_batch alone; use model"):
        model(torch.tensor([[5, 6]]))
    model.set_attn_implementation(integration.NAME)
    assert model(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_a_cache_that_comes_with_the_call_gives_the_keys() -> None:
    """As up to Transformers 5.23; later ones update it before."""
    module = torch.nn.Module()
    module.layer_idx, module.config, module.is_causal = 3, make_model("llama").config, True
    query, new, old = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 2, 16), torch.randn(1, 2, 5, 16)
    offsets = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets[0], "max_length_q": 2, "max_length_k": 7}

    class Cache:
        def update(
            self, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]
        ) -> tuple[Tensor, Tensor]:
            assert layer_idx == 3 and kwargs["read_index"] == []
            kwargs["cu_seq_lens_k"] = offsets[1]
            return torch.cat([old, key], 2), torch.cat([old, value], 2)

    options = {"read_index": [], **lengths}
    found, _ = batches.attend_batches(module, query, new, new, None, cache=Cache(), **options)
    keys = torch.cat([old, new], 2)
    options = {"read_index": [], "cu_seq_lens_k": offsets[1], **lengths}
    updated_before, _ = batches.attend_batches(module, query, keys, keys, None, **options)
    assert found.shape == (1, 2, 4, 16) and torch.equal(found, updated_before)


def test_continuous_batching_needs_the_cache_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr(batches, "UPDATE", ["key_states"])
    with pytest.raises(NotImplementedError, match="updates its paged cache in another way"):
        integration.prepare_batches(model)
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda model: False)
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM has attention that does not go by name"):
        integration.prepare_batches(model)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """Rotary embedding that is fused on a CPU too, and the shape of Q in each call. What is fused is undone."""
    calls: list[torch.Size] = []
    rotate = rotary.rotate_by

    def counted(q: Tensor, k: Tensor, angles: Any) -> Any:
        calls.append(q.shape)
        return rotate(q, k, angles)

    monkeypatch.setattr(rotary, "_suits", lambda *_: True)
    monkeypatch.setattr(rotary, "rotate_by", counted)
    yield calls


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_fused_rotary_gives_the_gradients_of_eager(name: str, fused: list[torch.Size]) -> None:
    """gpt_oss has tables of half the columns."""
    model, ids = make_model(name), tokens(2, 11)
    mask = torch.ones_like(ids)
    wanted = gradients(model, ids, mask)
    assert integration.fuse_rotary(model) is model
    integration.fuse_rotary(model)  # once more changes nothing
    fused.clear()
    found = gradients(model, ids, mask)
    assert fused == [torch.Size([2, 11, 4, 16])] * 2
    assert all(
        difference(found[key], wanted[key]) <= 2e-5 * (1 + float(wanted[key].abs().max())) for key in wanted
    )
    integration.unfuse_rotary(model)
    fused.clear()
    model(ids)
    assert not fused


def test_what_no_kernel_rotates_is_left_to_the_model() -> None:
    """Here all tensors: none is on a GPU."""
    model, ids = integration.fuse_rotary(make_model("llama")), tokens(2, 11)
    found = model(ids).logits
    assert torch.equal(found, integration.unfuse_rotary(model)(ids).logits)


def test_a_model_that_rotates_otherwise_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="BertModel has no layer that calls apply_rotary_pos_emb"):
        integration.fuse_rotary(make_model("bert"))
    config = transformers.CohereConfig(**TEXT)
    with pytest.raises(NotImplementedError, match=r"modeling_cohere\.apply_rotary_pos_emb does not turn"):
        integration.fuse_rotary(transformers.CohereModel(config))


def test_fp8_is_near_eager() -> None:
    ids = tokens(1, 33)
    for name in ("llama", "mistral"):
        model = make_model(name).to(torch.bfloat16)
        eager, ours = (first_output(model, attention, ids) for attention in ("eager", integration.FP8_NAME))
        error = float((ours - eager).norm() / eager.norm())
        assert 1e-3 < error < FP8_BUDGET, (name, error)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_fp8_begins_an_answer(cache: str) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    options |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask}
    model = make_model("llama").to(torch.bfloat16)
    eager = model.generate(tokens(2, 9), **options).logits[0]
    model.set_attn_implementation(integration.FP8_NAME)
    ours = model.generate(tokens(2, 9), **options).logits[0]
    assert 1e-3 < float((ours - eager).norm() / eager.norm()) < 1.5 * FP8_BUDGET


def test_fp8_trains_with_padding() -> None:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    model = make_model("llama").to(torch.bfloat16)
    key = "model.layers.1.self_attn.v_proj.weight"
    eager = gradients(model, tokens(2, 7), mask)[key].float()
    model.set_attn_implementation(integration.FP8_NAME)
    ours = gradients(model, tokens(2, 7), mask)[key].float()
    error = float((ours - eager).norm() / eager.norm())
    assert 1e-3 < error < FP8_BUDGET, error


@torch.no_grad()
def test_what_is_not_supported_is_refused_by_name() -> None:
    ids = tokens(1, 5)
    llama, gemma = (make_model(name, integration.FP8_NAME).to(torch.bfloat16) for name in ("llama", "gemma2"))
    with pytest.raises(NotImplementedError, match="softcap; use attn_implementation='hopper_attention'"):
        gemma(ids)
    with pytest.raises(NotImplementedError, match="a mask of queries and keys"):
        llama(ids, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"dtype torch.int64, allowed: torch.bool"):
        llama(ids, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.long))
    layer, x = llama.model.layers[0].self_attn, torch.zeros(1, 4, 5, 16, dtype=torch.bfloat16)
    for name in ("position_bias", "head_mask", "output_attentions", "cache"):
        with pytest.raises(NotImplementedError, match="does not support"):
            integration.attend(layer, x, x, x, None, **{name: True})


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.3")
    # Before a module is imported that needs names which an old version lacks.
    monkeypatch.setitem(sys.modules, f"{integration.__name__}.masks", None)
    with pytest.raises(
        ImportError, match=r"transformers has version 4\.57\.3, allowed: 5\.4 or newer; install it"
    ):
        importlib.reload(integration)


@torch.no_grad()
def test_a_step_on_a_static_cache_is_one_graph_that_is_compiled_once() -> None:
    model = make_model("llama", integration.NAME).to(torch.bfloat16)
    ids, graphs = tokens(2, 10), CompileCounter()
    expected = model(ids, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :6], past_key_values=cache)
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=False)
    for at in range(6, 10):
        step, positions = ids[:, at : at + 1], torch.full((2, 1), at)
        embedded = model.get_input_embeddings()(step)
        # As generate does it, which makes masks outside of what it compiles.
        mask = create_masks_for_generate(model.config, embedded, None, cache, position_ids=positions)
        logits = compiled(step, attention_mask=mask, past_key_values=cache, position_ids=positions).logits
        assert difference(logits[:, 0], expected[:, at]) < 0.02
        assert graphs.frame_count == 1


class Operators(TorchDispatchMode):
    """Names of all that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[function.name()] += 1
        return function(*args, **(kwargs or {}))


VIEWS = {f"aten::{name}" for name in ("transpose.int", "view", "slice.Tensor", "select.int", "detach")}


def launches_of_a_layer(run: Callable[[transformers.PreTrainedModel], Any], name: str) -> Counter[str]:
    """What a second layer adds: all but views and what the attention itself is."""
    counts = []
    for layers in (1, 2):
        model = make_model("llama", name, num_hidden_layers=layers).to(torch.bfloat16)
        with Operators() as operators:
            run(model)
        counts.append(operators.names)
    return Counter(
        {
            name: count
            for name, count in (counts[1] - counts[0]).items()
            if name not in VIEWS and "attention" not in name and "attend" not in name
        }
    )


def test_a_layer_of_training_launches_nothing_beside_attention() -> None:
    def train(model: transformers.PreTrainedModel) -> None:
        model(tokens(1, 24), labels=tokens(1, 24), use_cache=False).loss.backward()

    ours = launches_of_a_layer(train, integration.NAME) - launches_of_a_layer(train, "sdpa")
    assert {name for name in ours if not name.startswith("hopper")} == set()


@pytest.mark.parametrize("padding", [0, 2])
@torch.no_grad()
def test_a_layer_of_a_step_on_a_static_cache_launches_nothing_beside_attention(padding: int) -> None:
    layer = make_model("llama", integration.NAME).to(torch.bfloat16).model.layers[0].self_attn
    heads = torch.randn(2, 4, 1, 16, dtype=torch.bfloat16), *torch.randn(2, 2, 2, 16, 16).bfloat16()
    end = torch.tensor([[0, 7], [0, 7]] if padding else [[7], [7]])
    mask = visible.encode(end, 0, visible.CAUSAL).contiguous()  # as generate hands it on
    integration.attend(layer, *heads, mask)
    with Operators() as operators:
        integration.attend(layer, *heads, mask)
    assert operators.names == {"aten::transpose.int": 3, "hopper_attention::attend_kvcache": 1}


def test_values_written_into_a_mask_count() -> None:
    mask = visible.encode(torch.tensor([[0, 7], [1, 7]]), 0, visible.CAUSAL).contiguous()
    assert [x.tolist() for x in visible.decode(mask).columns] == [[0, 1], [7, 7]]
    mask.copy_(torch.tensor([2, 8], dtype=torch.int32))
    assert [x.tolist() for x in visible.decode(mask).columns] == [[2, 2], [8, 8]]


def test_the_mask_of_a_step_takes_five_kernels_and_two_copies() -> None:
    tokens_seen = torch.ones(2, 8, dtype=torch.bool)
    tokens_seen[1, :3] = False
    offset = torch.tensor([7])  # as a static cache has it, on the device
    with Operators() as operators:
        mask = integration.make_mask(2, 1, 16, offset, 0, attention_mask=tokens_seen)
    assert mask is not None and visible.decode(mask).values.tolist() == [[0, 8], [3, 8]]
    views = {"aten::view", "aten::view.dtype", "aten::detach", "aten::t", "aten::unsqueeze", "aten::expand"}
    found = {name: count for name, count in operators.names.items() if name not in views}
    assert (
        found.pop("aten::lift_fresh") == 1
    )  # what goes to the device; the other copy is that of cat, to the host
    assert found == {"aten::argmax": 2, "aten::flip": 1, "aten::sum.dim_IntList": 1, "aten::cat": 1}


def test_the_page_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    assert len(examples) == 4
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, PAGE.name, "exec"), names)
    assert all(p.grad is not None for p in names["model"].parameters())


def test_the_benchmark_of_models_runs(tmp_path: Path) -> None:
    from benchmarks import models
    from hopper_attention.experiments.models.pages import render_models
    from hopper_attention.experiments.reports import load_figures

    out = tmp_path / "models.json"
    options = ["--tiny", "--device=cpu", "--rounds=1", "--append", f"--out={out}"]
    found = models.main([*options, "--only=train,prefill"])
    found += models.main([*options, "--only=generate_eager", f"--ways=sdpa,{integration.NAME}"])
    rows = {(row.workload, row.attention): row for row in found}
    assert len(json.loads(out.read_text())["rows"]) == len(rows) == 10
    assert not any(row.failed for row in rows.values())
    assert rows["train", integration.NAME].difference < 1e-3
    assert 0 < rows["prefill", integration.NAME].difference < 0.02
    assert rows["prefill", integration.FP8_NAME].tokens_a_second > 0
    text = render_models(load_figures(out.read_text(), "models"))
    assert all(f"| {workload} | `{attention}` | " in text for workload, attention in rows)
    assert re.search(r"train, over sdpa \| >= 1.10 \| \d\.\d\d \| (yes|no) \|", text)
