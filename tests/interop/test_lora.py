# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of adapters on a frozen base, as torchtune and peft do it: the losses of one process,
adapters alone in state dicts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.nn.utils import parametrize

import shardwise as sw
from tests.contract.helpers import assert_close
from tests.interop.frameworks import mean_over_ranks, tiny_llama
from tests.models import STRATEGIES, Model, loss_of, make_model, mesh_for, ranks_for, tokens
from tests.ranks import on_ranks, run_ranks


class LoRALinear(nn.Module):
    """torchtune's names: a frozen weight, and two small linears beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(base.bias.detach(), requires_grad=False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)

    def initialize_parameters(self) -> None:
        nn.init.normal_(self.lora_a.weight, std=0.3)
        nn.init.normal_(self.lora_b.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        more: Tensor = self.lora_b(self.lora_a(x))
        return nn.functional.linear(x, self.weight, self.bias) + 2.0 * more


def with_adapters(model: Model) -> Model:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.layers:
        for name in ("up", "down"):
            setattr(layer, name, LoRALinear(getattr(layer, name)))
    return model


def initialized(model: Any) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.initialize_parameters()
    return model


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def shard(model: Any, strategy: sw.Placements, mesh: Any) -> Any:
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh, placements=strategy)
    return sw.fully_shard(model, mesh=mesh, placements=strategy)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "Muon": lambda ps: sw.Muon(ps, lr=1e-2),
}


def train(model: Any, make: Any, rank: int, world_size: int) -> tuple[list[float], Any]:
    optimizer = make([one for one in model.parameters() if one.requires_grad])
    losses = []
    for step in range(3):
        loss = loss_of(model, tokens(step, 0, rank, world_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses, optimizer


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [(strategy, "AdamW") for strategy in ("zero0", "zero2", "hsdp")]
    + [(strategy, "Muon") for strategy in ("zero1", "zero3", "hfsdp")],
)
@on_ranks(ranks_for)
def test_losses_are_those_of_one_process(
    rank: int, world_size: int, strategy: str, optimizer: str
) -> None:
    mesh = mesh_for(STRATEGIES[strategy], world_size)
    plain = initialized(with_adapters(make_model()))
    base = {name: value.clone() for name, value in plain.state_dict().items()}
    model = shard(initialized(with_adapters(make_model())), STRATEGIES[strategy], mesh)
    make = OPTIMIZERS[optimizer]
    expected, _ = train(plain, make, 0, 1)
    found, states = train(model, make, rank, world_size)
    assert found == pytest.approx(expected, rel=1e-5) and found[2] < found[0]
    trained = sw.full_state_dict(model)
    for name, value in trained.items():
        assert torch.equal(value, base[name]) != is_adapter(name), name
        assert_close(value, plain.state_dict()[name], name, 1e-4)
    # Adapters alone, in torch's way: without what is frozen.
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    adapters = get_model_state_dict(model, options=options)
    assert set(adapters) == {name for name in base if is_adapter(name)}
    assert all(torch.equal(value, trained[name]) for name, value in adapters.items())
    kept = get_optimizer_state_dict(model, states, options=StateDictOptions())["state"]
    assert set(kept) == set(adapters)
    second = shard(initialized(with_adapters(make_model())), STRATEGIES[strategy], mesh)
    set_model_state_dict(
        second, adapters, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    assert all(
        torch.equal(value, trained[name]) for name, value in sw.full_state_dict(second).items()
    )


@on_ranks(2)
def test_torchtune_begins_on_the_meta_device(rank: int, world_size: int) -> None:
    """Its recipe: adapters are made and drawn in place, module by module, inside wrapped blocks;
    the base comes from rank 0, and then no parameter may be on the meta device."""
    with torch.device("meta"):
        model = with_adapters(Model())
    shard(model, sw.zero(3), mesh_for(sw.zero(3), world_size))
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.to_empty(device="cpu")
            with torch.no_grad():
                module.initialize_parameters()
    plain = initialized(with_adapters(make_model()))
    values = {name: one for name, one in plain.state_dict().items() if not is_adapter(name)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, values if rank == 0 else {}, options=options)
    assert not any(one.is_meta for one in model.parameters())
    for name, value in sw.full_state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name]), name
    found, _ = train(model, OPTIMIZERS["AdamW"], rank, world_size)
    assert found == pytest.approx(train(plain, OPTIMIZERS["AdamW"], 0, 1)[0], rel=1e-5)


# ------------------------------------------------------------------------------ peft


def check_peft(rank: int, world_size: int, folder: str) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file

    def made() -> Any:
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian")
        return get_peft_model(tiny_llama(), config)

    words = tokens(0)
    plain, model = made(), made()
    for layer in model.base_model.model.model.layers:
        sw.fully_shard(layer)
    sw.fully_shard(model)
    for one in (plain, model):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(2):
            one(input_ids=words, labels=words).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    dist.barrier()
    names = set(load_file(f"{folder}/adapter_model.safetensors"))
    assert len(names) == 8 and all("lora_" in name for name in names)
    loaded = PeftModel.from_pretrained(tiny_llama(), folder)
    with torch.no_grad():
        expected, found = plain(words).logits, loaded(words).logits
        assert not torch.allclose(tiny_llama()(words).logits, expected)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model(words).logits, expected)


class Around(nn.Module):
    """An adapter as peft's ``target_parameters`` puts it around the weights of experts: a
    parametrization that is there during forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.lora = nn.Linear(6, 6)
        self.last = parametrize.register_parametrization(nn.Linear(6, 6), "weight", Cubed())

    def forward(self, x: Tensor) -> Tensor:
        more = Added(self.lora.weight)
        parametrize.register_parametrization(self.base, "weight", more)
        y = self.last(self.base(self.lora(x)))
        parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return y  # type: ignore[no-any-return]


class Added(nn.Module):
    def __init__(self, more: Tensor) -> None:
        super().__init__()
        self.more = (more,)  # no parameter of this module

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.more[0]


class Cubed(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight**3

    def right_inverse(self, value: Tensor) -> Tensor:
        return value.sign() * value.abs() ** (1 / 3)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_parametrizations_around_a_forward(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(Around(), Around())
    plain = copy.deepcopy(net)
    for block in net:
        sw.fully_shard(block, placements=STRATEGIES[strategy])
    sw.fully_shard(net, placements=STRATEGIES[strategy])
    for model in (net, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ours = dict(net.named_parameters())
    for name, value in plain.named_parameters():
        assert_close(ours[name].full_tensor(), value, name)


def test_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run_ranks(check_peft, 2, str(tmp_path))
