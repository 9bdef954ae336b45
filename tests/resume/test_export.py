# SPDX-License-Identifier: Apache-2.0
"""Weights leave as safetensors in the hub's layout; `transformers` computes the same with them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import CheckpointError
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.train import exporting
from shardwise.train.exporting import export
from tests.models import mesh_of
from tests.ranks import run_ranks
from tests.resume.helpers import Net

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "context": 16,
}
CONFIGS = {
    "llama": GPTConfig(**SMALL, num_kv_heads=2, qk_norm=False),
    "tied": GPTConfig(**SMALL, qk_norm=True, tied=True),
    "experts": GPTConfig(**SMALL, qk_norm=True, num_experts=4),
}


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def test_names_stay_where_nobody_says_otherwise(tmp_path: Path) -> None:
    net = Net()
    net.norm.register_parameter("lora_a", nn.Parameter(torch.ones(2)))  # of nobody's config
    sw.save(tmp_path / "one", net, torch.optim.AdamW(net.parameters()))
    files = export(tmp_path / "one", tmp_path / "out")
    assert [file.name for file in files] == ["model.safetensors"]
    found, expected = read(tmp_path / "out"), net.state_dict()
    del expected["head.weight"]  # tied
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_files_are_bounded_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(layers=4)
    sw.save(tmp_path / "one", net)
    bound = 3000
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", bound)
    names = [file.name for file in export(tmp_path / "one", tmp_path / "o")]
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "o" / "model.safetensors.index.json").read_text())
    expected = net.state_dict()
    del expected["head.weight"]
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    for shard in shards:
        held = [name for name, file in index["weight_map"].items() if file == shard]
        assert held and (len(held) == 1 or sum(expected[name].nbytes for name in held) <= bound)
    assert all(torch.equal(read(tmp_path / "o")[name], value) for name, value in expected.items())
    with pytest.raises(CheckpointError, match="exists already"):
        export(tmp_path / "one", tmp_path / "o")
    export(tmp_path / "one", tmp_path / "narrow", dtype=torch.bfloat16)
    narrow = read(tmp_path / "narrow")
    assert torch.equal(narrow["embedding.weight"], expected["embedding.weight"].bfloat16())
    assert narrow["seen"].dtype == torch.int64, "only floating-point tensors are converted"


def test_a_model_that_is_no_gpt_says_so(tmp_path: Path) -> None:
    sw.save(tmp_path / "one", Net(), config={"model": {"width": 10}})
    with pytest.raises(CheckpointError, match=r"no GPT.*width"):
        export(tmp_path / "one", tmp_path / "out")


def save_gpt(rank: int, world_size: int, kind: str, path: str) -> Tensor:
    torch.manual_seed(3)
    model = GPT(CONFIGS[kind])
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh_of(world_size))
    sw.fully_shard(model, mesh=mesh_of(world_size))
    config = {"model": asdict(CONFIGS[kind]), "seed": 3}
    sw.save(path, model, extra={"step": 1}, config=config)
    model.eval()
    with torch.no_grad():
        found = model(torch.arange(12).view(1, 12))
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_gives_the_same_logits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 20_000)
    transformers = pytest.importorskip("transformers")
    logits = run_ranks(save_gpt, 2, kind, str(tmp_path / "one"))[0]
    export(tmp_path / "one", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        found = theirs(torch.arange(12).view(1, 12)).logits
    assert found.shape == logits.shape and found.abs().max() > 0.01
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


def born_in_bf16(rank: int, world_size: int, folder: str) -> None:
    """Saved in fp32, as main weights are; exported as the model came; older files load too."""
    torch.manual_seed(5)
    model = GPT(CONFIGS["llama"]).to(torch.bfloat16)
    narrow = {name: value.clone() for name, value in model.state_dict().items()}
    sw.save(f"{folder}/narrow", model)
    sw.fully_shard(model, mesh=mesh_of(world_size))
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.dtype == torch.float32
            parameter.add_(1e-5)  # nothing, in bf16
    sw.save(f"{folder}/one", model, config={"model": asdict(CONFIGS["llama"])})
    wide = {name: value.full_tensor() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sw.load(f"{folder}/one", model)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor().cpu(), wide[name].cpu())
        assert not torch.equal(wide[name].cpu(), narrow[name].cpu().float()), name
    sw.load(f"{folder}/narrow", model)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor().cpu(), narrow[name].cpu().float()), name


def test_a_model_that_came_in_bf16_is_saved_in_fp32_and_leaves_in_bf16(tmp_path: Path) -> None:
    run_ranks(born_in_bf16, 2, str(tmp_path))
    export(tmp_path / "one", tmp_path / "out")
    found = read(tmp_path / "out")
    assert {value.dtype for value in found.values()} == {torch.bfloat16} and len(found) > 10
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    export(tmp_path / "one", tmp_path / "wide", dtype=torch.float32)
    for name, value in read(tmp_path / "wide").items():
        assert value.dtype == torch.float32
        assert torch.equal(value.to(torch.bfloat16), found[name])
