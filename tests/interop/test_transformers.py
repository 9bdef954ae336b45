# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: ``save_pretrained`` of wrapped models, and its Trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import shardwise as sw
from shardwise.shard.module import units_of
from tests.interop.frameworks import (
    LIBRARIES,
    VOCABULARY,
    accelerate_state,
    batch,
    launched,
    needs,
    tiny_llama,
)
from tests.ranks import run_ranks

needs("transformers")


# ------------------------------------------------------------------------------ save_pretrained


def wrapped_llama(strategy: Any, *, tied: bool) -> Any:
    model = tiny_llama(tied=tied)
    for layer in model.model.layers:
        sw.fully_shard(layer, placements=strategy)
    return sw.fully_shard(model, placements=strategy)


def check_save_pretrained(rank: int, world_size: int, folder: str) -> None:
    from transformers import LlamaForCausalLM

    for number, (tied, strategy) in enumerate(
        [(False, sw.zero(3)), (True, sw.zero(3)), (False, sw.zero(1))]
    ):
        model, plain = wrapped_llama(strategy, tied=tied), tiny_llama(tied=tied)
        for one in (model, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            one(input_ids=batch(0, 0), labels=batch(0, 0)).loss.backward()
            optimizer.step()
        path = f"{folder}/{number}"
        model.save_pretrained(path)
        dist.barrier()
        names = set(load_file(f"{path}/model.safetensors"))
        assert names == set(plain.state_dict()) - ({"lm_head.weight"} if tied else set())
        assert json.loads(Path(path, "config.json").read_text())["architectures"] == [
            "LlamaForCausalLM"
        ]
        loaded, info = LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            logits = model(batch(1, 0)).logits
            assert torch.equal(loaded(batch(1, 0)).logits, logits)
            torch.testing.assert_close(plain(batch(1, 0)).logits, logits)
        # A state dict of one's own is written as it is.
        model.save_pretrained(
            f"{path}/zeros", state_dict={name: torch.zeros(2) for name in sorted(names)}
        )
        if rank == 0:
            assert not load_file(f"{path}/zeros/model.safetensors")["model.norm.weight"].any()


def test_save_pretrained_writes_whole_weights(tmp_path: Path) -> None:
    run_ranks(check_save_pretrained, 2, str(tmp_path))


# ------------------------------------------------------------------------------ architectures

# As docs/hugging_face.md lists them, and where each keeps its layers.
ARCHITECTURES = {
    "llama": "model.layers",
    "mistral": "model.layers",
    "qwen2": "model.layers",
    "qwen3": "model.layers",
    "gemma": "model.layers",
    "gemma2": "model.layers",
    "phi3": "model.layers",
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    "olmo2": "model.layers",
    "mixtral": "model.layers",
}
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
OWN_SIZES = {
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 24},
    "mixtral": {"num_local_experts": 4},
    "gemma": {"head_dim": 12},
    "gemma2": {"head_dim": 12},
    "qwen3": {"head_dim": 12},
}


def tiny(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    none = {"attention_dropout": 0.0, "dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    none |= {"embd_pdrop": 0.0, "hidden_dropout": 0.0, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **SIZES | OWN_SIZES.get(kind, {}) | none)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def check_architecture(rank: int, world_size: int, folder: str) -> None:
    """Trained on two ranks, saved and loaded: the logits of the same training in one process."""
    from transformers import AutoModelForCausalLM

    for kind, place in ARCHITECTURES.items():
        plain, model = tiny(kind), tiny(kind)
        for layer in model.get_submodule(place):
            sw.fully_shard(layer)
        sw.fully_shard(model)
        before = plain(batch(9, 0)).logits.detach()
        mine = batch(0, rank)
        everyone = torch.cat([batch(0, other) for other in range(world_size)])
        for one, words in ((model, mine), (plain, everyone)):
            optimizer = sw.optimizer(one, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-3))
            one(input_ids=words, labels=words).loss.backward()
            optimizer.step()
        model.save_pretrained(f"{folder}/{kind}")
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/{kind}").eval()
        with torch.no_grad():
            logits = plain.eval()(batch(9, 0)).logits
            found = loaded(batch(9, 0)).logits
        assert not torch.allclose(before, logits, atol=1e-3), f"{kind} has learned nothing"
        assert torch.allclose(found, logits, atol=1e-4, rtol=1e-3), (kind, found - logits)


def test_architectures_train_sharded_and_load_again(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text()
    names = page.split("in one process: ")[1].split(".\n")[0].replace("\n", " ")
    listed = [name.lower() for name in re.split(r", | and ", names)]
    assert [re.sub(r"[^a-z\d]", "", one) for one in listed] == [
        kind.replace("_", "") for kind in ARCHITECTURES
    ]
    run_ranks(check_architecture, 2, str(tmp_path))


# ------------------------------------------------------------------------------ Trainer


class Words(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        words = batch(index, 0)[0]
        return {"input_ids": words, "labels": words}


@contextmanager
def trainer(folder: str, library: str, **more: Any) -> Iterator[Any]:
    from transformers import Trainer, TrainingArguments

    with launched():
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            fsdp=True,
            fsdp_config={"reshard_after_forward": True},
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            max_grad_norm=0.0,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **more,
        )
    with accelerate_state(**arguments.fsdp_plugin_args), LIBRARIES[library]():
        run = Trainer(tiny_llama(), arguments, train_dataset=Words(), eval_dataset=Words())
        assert run.is_fsdp_enabled
        yield run


def losses_of(run: Any) -> list[float]:
    return [each["loss"] for each in run.state.log_history if "loss" in each]


def check_trainer(rank: int, world_size: int, folder: str) -> None:
    """The same losses with both libraries; a checkpoint in the middle is taken up again."""
    losses, weights = {}, {}
    for library in LIBRARIES:
        with trainer(f"{folder}/{library}", library, save_strategy="steps", save_steps=2) as run:
            run.train()
            assert any(units_of(run.model)) == (library == "shardwise")
            losses[library] = losses_of(run) + [run.evaluate()["eval_loss"]]
            run.save_model(f"{folder}/{library}/last")
            dist.barrier()
            weights[library] = load_file(f"{folder}/{library}/last/model.safetensors")
    assert losses["shardwise"] == losses["torch"] and len(losses["torch"]) == 5
    assert len(set(losses["torch"])) == 5 and weights["torch"]
    for name, value in weights["torch"].items():
        assert torch.equal(weights["shardwise"].pop(name), value), name
    assert not weights["shardwise"]
    with trainer(f"{folder}/again", "shardwise", save_strategy="no") as run:
        run.train(resume_from_checkpoint=f"{folder}/shardwise/checkpoint-2")
        assert losses_of(run)[-2:] == losses["shardwise"][2:4]


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run_ranks(check_trainer, 2, str(tmp_path))
