# SPDX-License-Identifier: Apache-2.0
"""Weights and configurations that `transformers` reads and writes: the same logits both ways."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.models.gpt import GPT, GPTConfig, RopeScaling
from shardwise.models.hugging_face import (
    config_from_hf,
    from_hf,
    hf_config,
    hf_names,
    hf_tensors,
    model_type,
    to_hf,
)
from shardwise.moe import MixtureOfExperts
from shardwise.shard.state_dict import full_state_dict
from shardwise.train.hub import HubFolder, begin_from
from shardwise.train.recipes import load_recipe
from shardwise.train.run import Request, resolve
from shardwise.train.tokenise import byte_tokenizer
from tests.ranks import run_ranks
from tests.train_runs import TINY, make_trainer, write_text

LLAMA = GPTConfig(
    vocab_size=67,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=48,
    context=64,
    qk_norm=False,
)
SCALING = RopeScaling(factor=4.0, original_context=16)
MODELS = {
    "llama": LLAMA,
    "llama tied and stretched": replace(LLAMA, tied=True, rope_scaling=SCALING, rope_theta=5e5),
    "qwen3": replace(LLAMA, qk_norm=True, norm_eps=1e-6),
    "qwen3 with wide heads": replace(LLAMA, qk_norm=True, head_dim=20, dim=36, num_heads=4),
    "qwen3 experts": replace(
        LLAMA, qk_norm=True, num_experts=4, experts_per_token=2, expert_hidden_dim=24
    ),
    "qwen3 experts behind a dense layer": replace(
        LLAMA,
        qk_norm=True,
        num_experts=4,
        expert_hidden_dim=24,
        num_dense_layers=1,
        normalise_scores=False,
    ),
    "deepseek's experts": replace(
        LLAMA,
        qk_norm=True,
        num_experts=6,
        expert_hidden_dim=24,
        num_dense_layers=1,
        shared_hidden_dim=48,
        expert_score="sigmoid",
        bias_rate=0.001,
        expert_groups=3,
        groups_per_token=2,
        expert_scale=2.5,
    ),
}
every_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)

# As published, without what no model reads.
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def random_model(config: GPTConfig) -> GPT:
    """Every parameter different from what it could be by accident, the norms too."""
    generator = torch.Generator().manual_seed(11)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def tokens_for(config: GPTConfig) -> torch.Tensor:
    return torch.randint(
        0, config.vocab_size, (2, config.context), generator=torch.Generator().manual_seed(4)
    )


def logits_agree(ours: GPT, theirs: Any) -> None:
    tokens = tokens_for(ours.config)
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = ours(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@every_model
def test_transformers_loads_what_we_write(config: GPTConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = random_model(config)
    state = {name: one.contiguous() for name, one in to_hf(ours.state_dict(), config).items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config, end_token=66)))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert type(theirs).__name__ == hf_config(config)["architectures"][0]
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.generation_config.eos_token_id == 66
    logits_agree(ours, theirs)


@every_model
def test_we_load_what_transformers_writes(config: GPTConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    values = hf_config(config)
    kind = transformers.CONFIG_MAPPING[values["model_type"]]
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(
        kind(**{k: v for k, v in values.items() if k not in ("model_type", "architectures")})
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    theirs.save_pretrained(tmp_path)
    found = config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert found.num_parameters == config.num_parameters
    assert (found.rope_theta, found.rope_scaling) == (config.rope_theta, config.rope_scaling)
    ours = GPT(found)
    ours.load_state_dict(from_hf(load_file(tmp_path / "model.safetensors"), found))
    logits_agree(ours, theirs.eval())


@every_model
def test_there_and_back_is_the_same(config: GPTConfig) -> None:
    model = random_model(config)
    state = model.state_dict()
    theirs = to_hf(state, config)
    assert len(theirs) >= len(list(model.parameters()))
    back = from_hf(theirs, config)
    assert back.keys() == state.keys()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    assert all(torch.equal(back[name], value) for name, value in tensors.items())
    # What stands beside them says in which order gate and up are.
    rest = {name: value for name, value in state.items() if name not in tensors}
    assert len(rest) == (config.num_layers - config.num_dense_layers) * (config.num_experts > 0)
    assert all(back[name] == value == {"gate_up_block": 0} for name, value in rest.items())
    again = config_from_hf(json.loads(json.dumps(hf_config(config))))
    assert again.num_parameters == config.num_parameters
    assert model_type(again) == model_type(config)
    # Bit by bit, as a large model is exported.
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts |= hf_tensors(name, tensor, config)
        assert [*hf_tensors(name, tensor, config)] == hf_names(config)[name]
    assert parts.keys() == theirs.keys()


def test_the_largest_llama_is_there_at_once_from_its_config() -> None:
    config = config_from_hf(LLAMA_405B)
    assert config.rope_scaling == RopeScaling() and config.rope_theta == 500_000
    with torch.device("meta"):
        model = GPT(config)
    assert sum(one.numel() for one in model.parameters()) == 405_853_388_800
    assert model.state_dict().keys() == from_hf(to_hf(model.state_dict(), config), config).keys()


def test_stretched_frequencies_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_from_hf(LLAMA_405B)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**LLAMA_405B)).inv_freq
    ours = GPT(replace(config, num_layers=1, dim=128, num_heads=1, num_kv_heads=1, vocab_size=2))
    found = ours.rotary._frequencies(torch.device("cpu"))
    assert theirs.shape == (64,)
    torch.testing.assert_close(found, theirs)


def test_what_cannot_be_represented_is_named_all_at_once() -> None:
    changes = {"hidden_act": "gelu", "attention_bias": True, "vocab_size": None}
    changes["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    with pytest.raises(ValueError, match=r"vocab_size.*'gelu'.*attention_bias.*'yarn'"):
        config_from_hf(LLAMA_405B | changes)
    experts = hf_config(MODELS["qwen3 experts"])
    for values, said in (
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        (experts | {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({key: value for key, value in experts.items() if key != "num_experts"}, "num_experts"),
        (LLAMA_405B | {"model_type": "mistral"}, "sliding_window=4096"),
    ):
        with pytest.raises(ValueError, match=said):
            config_from_hf(values)
    for changed in (
        {"shared_hidden_dim": 8},
        {"expert_score": "sigmoid"},
        {"bias_rate": 0.1},
        {"expert_groups": 2},
        {"expert_biases": True},
        {"qk_norm": False},
    ):
        with pytest.raises(ValueError, match=next(iter(changed))):
            hf_config(replace(MODELS["qwen3 experts"], **changed))  # type: ignore[arg-type]
    assert model_type(load_recipe("moe_1b").model) == "dots1", "every recipe has a form"
    mistral = config_from_hf(LLAMA_405B | {"model_type": "mistral", "sliding_window": None})
    assert mistral == config_from_hf(LLAMA_405B)


def test_weights_of_another_model_are_refused_by_name() -> None:
    state = GPT(LLAMA).state_dict()
    with pytest.raises(ValueError, match=r"4 missing.*blocks\.0\.attention\.k_norm\.weight"):
        to_hf(state, replace(LLAMA, qk_norm=True))
    theirs = to_hf(state, LLAMA)
    with pytest.raises(ValueError, match=r"9 not known.*model\.layers\.1\."):
        from_hf(theirs, replace(LLAMA, num_layers=1))
    assert from_hf(theirs, replace(LLAMA, tied=True)).keys() == state.keys() - {"head.weight"}


def test_the_weight_of_the_balance_loss_is_theirs() -> None:
    """Their loss: experts x the sum over experts of (choices per token x mean chance)."""
    values = hf_config(MODELS["qwen3 experts"]) | {"num_experts_per_tok": (choices := 2)}
    values |= {"num_hidden_layers": 1, "num_experts": 5, "norm_topk_prob": True}
    config = config_from_hf(values | {"router_aux_loss_coef": 0.02})
    assert hf_config(config)["router_aux_loss_coef"] == pytest.approx(0.02)
    layer = random_model(config).blocks[0].feed_forward
    assert isinstance(layer, MixtureOfExperts)
    torch.manual_seed(0)
    tokens = torch.randn(30, config.dim)
    _, routes = layer(tokens)
    weight = layer.router.weight
    chances = torch.nn.functional.linear(tokens, weight).softmax(-1)
    chosen = torch.nn.functional.one_hot(routes.experts, config.num_experts).float()
    theirs = config.num_experts * (chosen.mean(0) * chances.mean(0)).sum()  # [choices, experts]
    expected, found = (
        torch.autograd.grad(loss, weight)[0] for loss in (0.02 * theirs, routes.loss)
    )
    assert expected.abs().max() > 1e-5
    torch.testing.assert_close(found, expected)
    # An even spread costs nothing here, and choices times their coefficient there.
    torch.testing.assert_close(routes.loss, 0.02 * (theirs - choices))


# ------------------------------------------------------------------------------ to begin a run with


def write_hub(folder: Path, config: GPTConfig) -> dict[str, Any]:
    """A folder of the hub in two files; the state dict of the model in it."""
    model = random_model(config)
    state = to_hf(model.state_dict(), config)
    folder.mkdir()
    names = sorted(state)
    index = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(index.values()):
        own = {name: state[name].contiguous().clone() for name in names if index[name] == file}
        save_file(own, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    return model.state_dict()


BEGUN: dict[str, tuple[GPTConfig, dict[str, Any]]] = {
    "zero3": (replace(LLAMA, vocab_size=300), {}),
    "hsdp, tied": (replace(LLAMA, vocab_size=300, tied=True), {"strategy": "hsdp"}),
    "ep": (replace(MODELS["qwen3 experts"], vocab_size=300), {"ep": 2}),
}


def begins(
    rank: int, world_size: int, root: str, cases: dict[str, tuple[GPTConfig, dict[str, Any]]]
) -> dict[str, Any]:
    found = {}
    for name, (config, changes) in cases.items():
        hub, data = f"{root}/{name}", f"{root}/text.txt"
        changes = {"model": config, "init_from": hub, "data": data, **changes}
        trainer = make_trainer(rank, world_size, f"{hub}-run", **changes)
        found[name] = full_state_dict(trainer.parts.model), trainer.config.model.vocab_size
    return found


def test_a_run_begins_with_the_weights_of_a_folder(tmp_path: Path) -> None:
    write_text(tmp_path)
    expected = {name: write_hub(tmp_path / name, config) for name, (config, _) in BEGUN.items()}
    for found in run_ranks(begins, 2, str(tmp_path), BEGUN):
        for name, state in expected.items():
            loaded, words = found[name]
            assert words == 300, "the vocabulary is that of the weights, not of the text"
            assert loaded.keys() == state.keys()
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(loaded[key], value), (name, key)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    config = BEGUN["zero3"][0]
    write_hub(tmp_path / "hub", config)
    text = write_text(tmp_path)
    changes = {"init_from": str(tmp_path / "hub"), "data": text}
    short = replace(load_recipe("smoke"), **changes)
    short = replace(short, model=replace(short.model, context=16))
    request = Request(recipe="smoke", configure=lambda recipe: short)
    made = resolve(request).config
    assert made.model == replace(config, context=16, head_dim=8) and made.tokenizer == "bytes"
    losses = replace(TINY.model, head_z_coefficient=1e-4)
    begun = begin_from(replace(TINY, init_from=changes["init_from"], model=losses))
    assert begun.model == replace(made.model, head_z_coefficient=1e-4), "no config.json tells it"
    (tmp_path / "hub" / "tokenizer.json").write_bytes(byte_tokenizer().files["tokenizer.json"])
    assert resolve(request).config.tokenizer == changes["init_from"], "the weights bring theirs"
    (tmp_path / "hub" / "tokenizer.json").unlink()
    for model, said in (
        (replace(config, hidden_dim=32), "do not fit the model of this run"),
        (replace(config, num_layers=3), r"missing \('model\.layers\.2"),
        (replace(config, vocab_size=200), "257 different tokens, and the embedding"),
    ):
        for text in run_ranks(refused, 2, str(tmp_path / "run"), {**changes, "model": model}):
            assert re.search(said, text), text
    (tmp_path / "hub" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        resolve(request)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    write_hub(tmp_path / "hub", BEGUN["zero3"][0])
    folder = HubFolder(tmp_path / "hub")
    pipe = folder.folder / "part-0.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)  # not waited for
    with pytest.raises(ValueError, match=r"part-0\.safetensors"):
        dict(folder)
    (folder.folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(ValueError, match="weight_map"):
        HubFolder(folder.folder)


def refused(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        make_trainer(rank, world_size, folder, **changes)
    return str(caught.value)
