# SPDX-License-Identifier: Apache-2.0
"""A run as torchtitan builds it, with torch's ``fully_shard`` and with this one: meta device,
activation checkpoints, compiled blocks, lists of modules, a chunked loss, checkpoints by DCP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.shard.state_dict import clean
from tests.interop.frameworks import mean_over_ranks
from tests.models import WORDS, Layer, tokens
from tests.ranks import run_ranks

LIBRARIES: dict[str, Any] = {"torch": torch_fsdp.fully_shard, "shardwise": sw.fully_shard}
CHUNKS = 2
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
CHUNKED = pytest.mark.skipif(OLD, reason="FSDP2 of torch 2.11 reads weights that it has freed")


class Decoder(nn.Module):
    """torchtitan's names; ``skip_head``: the loss runs the head, chunk by chunk."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, width)
        self.register_buffer("scale", torch.ones(width), persistent=False)
        self.layers = nn.ModuleDict({str(index): Layer(width) for index in range(2)})
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, WORDS, bias=False)
        self.skip_head = False

    def init_weights(self) -> None:
        self.scale = torch.full_like(self.scale, 0.5)
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            layer.norm.reset_parameters()
            for linear in (layer.up, layer.down):
                nn.init.trunc_normal_(linear.weight, std=0.2)
                nn.init.zeros_(linear.bias)
        self.norm.reset_parameters()
        bound = 3 * self.output.in_features**-0.5
        nn.init.trunc_normal_(self.output.weight, std=bound / 3, a=-bound, b=bound)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.tok_embeddings(words)
        hidden = hidden * self.scale.to(hidden.dtype)
        for layer in self.layers.values():
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        return hidden if self.skip_head else self.output(hidden)


# ------------------------------------------------------------------------------ building


def parallelize(model: Any, shard: Any, mesh: Any) -> None:
    """Activation checkpoints, then compiled blocks, then units of FSDP2."""
    for name, layer in list(model.layers.named_children()):
        model.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    for layer in model.layers.children():
        layer.compile(backend="eager", fullgraph=True)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard(model.tok_embeddings, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    tail = [model.norm, model.output]
    shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for layer in model.layers.values():
        shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is a mean over all tokens
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no PREMUL_SUM


def build(shard: Any, mesh: Any, *, skip_head: bool) -> Any:
    with torch.device("meta"):
        model = Decoder()
    parallelize(model, shard, mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        model.init_weights()
    model.train()
    model.skip_head = skip_head
    spread = {clean(name): one.full_tensor().std().item() for name, one in model.named_parameters()}
    assert 0.1 < spread["layers.1.up.weight"] < 0.3 and spread["layers.1.up.bias"] == 0
    assert 0.8 < spread["tok_embeddings.weight"] < 1.2 and model.scale.eq(0.5).all()
    torch.manual_seed(2)  # libraries draw other numbers: the comparison begins from these
    plain = Decoder()
    plain.init_weights()
    set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    return model


def named(model: Any) -> list[dict[str, Any]]:
    """Groups of parameters by pattern, with names beside them."""
    pairs = [(clean(name), one) for name, one in model.named_parameters() if one.requires_grad]
    matrices = [pair for pair in pairs if pair[1].ndim == 2]
    rest = [pair for pair in pairs if pair[1].ndim != 2]
    return [
        {"params": [one for _, one in group], "param_names": [name for name, _ in group]} | more
        for group, more in ((matrices, {"weight_decay": 0.1}), (rest, {"weight_decay": 0.0}))
    ]


# ------------------------------------------------------------------------------ a step


class Backward(torch.autograd.Function):
    """The loss of a chunked head: its backward gives the decoder what the chunks added up."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0] * grads[0], None, None


def summed(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), words.flatten(), reduction="sum")


def chunked_loss(hidden: Tensor, words: Tensor, head: Any, count: int) -> Tensor:
    chunks = [one.detach().requires_grad_() for one in hidden.chunk(CHUNKS)]
    total = hidden.new_zeros((), dtype=torch.float32)
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    for index, (chunk, part) in enumerate(zip(chunks, words.chunk(CHUNKS), strict=True)):
        if index == CHUNKS - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        loss = summed(head(chunk), part) / count
        total = total + loss.detach()
        loss.backward()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()
    gradient = torch.cat([chunk.grad for chunk in chunks])  # type: ignore[misc]
    return Backward.apply(hidden, gradient, total)  # type: ignore[no-any-return]


def clip(parameters: list[Any]) -> Tensor:
    norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
    return norm  # type: ignore[no-any-return]


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        words = tokens(step, 0, dist.get_rank(), dist.get_world_size())
        count = words.numel() * dist.get_world_size()
        if model.skip_head:
            loss = chunked_loss(model(words), words, model.output, count)
        else:
            loss = summed(model(words), words) / count
        loss.backward()
        norm = clip(list(model.parameters()))
        assert math.isfinite(norm.item()) and norm.item() > 0
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean_over_ranks(loss) * dist.get_world_size())
    return found


# ------------------------------------------------------------------------------ checkpoints


def flat_state(optimizer: Any) -> dict[str, Any]:
    """Made by a step without gradients and rates where there is none yet; by parameter names."""
    if not optimizer.state:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
    values = optimizer.state_dict()
    names = {
        number: name
        for group in values["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {
        f"{names[number]}.{key}": value
        for number, state in values["state"].items()
        for key, value in state.items()
    }


def load_flat(optimizer: Any, flat: dict[str, Any]) -> None:
    values = optimizer.state_dict()
    for group in values["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            state = values["state"][number]
            values["state"][number] = {key: flat[f"{name}.{key}"] for key in state}
    optimizer.load_state_dict(values)


def check_run(rank: int, world_size: int, skip_head: bool, outer: bool, folder: str) -> None:
    names, sizes = ("dp_replicate", "fsdp"), (world_size // 2, 2)
    mesh = init_device_mesh(
        "cpu", sizes if outer else (world_size,), mesh_dim_names=names[-1 - outer :]
    )
    found = {}
    for library, shard in LIBRARIES.items():
        model = build(shard, mesh, skip_head=skip_head)
        optimizer = torch.optim.AdamW(named(model), lr=1e-2, fused=True)
        found[library] = train(model, optimizer, range(2))
        state = {"model": get_model_state_dict(model), "optimizer": flat_state(optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/{library}")
        found[library] += train(model, optimizer, range(2, 4))
        again = build(shard, mesh, skip_head=skip_head)
        fresh = torch.optim.AdamW(named(again), lr=1e-2, fused=True)
        state = {"model": get_model_state_dict(again), "optimizer": flat_state(fresh)}
        dcp.load(state, checkpoint_id=f"{folder}/{library}")
        set_model_state_dict(again, state["model"])
        load_flat(fresh, state["optimizer"])
        assert train(again, fresh, range(2, 4)) == found[library][2:]
    assert found["shardwise"] == found["torch"]
    assert len(set(found["torch"])) == 4


@pytest.mark.parametrize(
    "skip_head",
    [pytest.param(False, id="loss"), pytest.param(True, id="chunked loss", marks=CHUNKED)],
)
def test_losses_are_those_of_fsdp2(skip_head: bool, tmp_path: Path) -> None:
    run_ranks(check_run, 2, skip_head, False, str(tmp_path))


@CHUNKED
def test_the_same_on_two_axes(tmp_path: Path) -> None:
    run_ranks(check_run, 4, True, True, str(tmp_path))
