# SPDX-License-Identifier: Apache-2.0
"""Fit: choose ``microbatches`` and ``recompute`` for "auto", by planned memory; the bare model.

    the plan of one microbatch --> the most sequences that fit --> the fewest microbatches

Compiled blocks recompute norms and gated products: gpt_1b takes 16 % less memory for at most 1.6 %
more time on an H200. Whole blocks are recomputed only if a microbatch would otherwise have fewer
than ``ENOUGH`` tokens, which keep a GPU busy. All ranks plan with the memory of the rank that has
least, so they all decide the same.

Other microbatches sum in another order. So a resumed run takes what was decided before, if ranks,
device, its memory, and the settings that the plan depends on are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.placements import REPLICATE, Placements
from shardwise.models.gpt import GPT, Block
from shardwise.models.gpt_config import GPTConfig
from shardwise.models.hugging_face import config_from_hf
from shardwise.moe import mixtures_of
from shardwise.planning import compiled
from shardwise.planning.figures import Plan
from shardwise.planning.plan import plan
from shardwise.precision import Precision
from shardwise.train.config import TrainConfig
from shardwise.train.hub import begin_from, json_object
from shardwise.train.launch import World
from shardwise.train.recipes import named_function
from shardwise.train.tokenise import vocabulary_of
from shardwise.words import parse_size, size_text

ENOUGH = 8192  # tokens of a microbatch
HEADROOM = 0.93  # of the free memory at the start: the rest is for fragments and libraries


def fit(
    config: TrainConfig, world: World, saved: Mapping[str, Any] | None = None
) -> tuple[TrainConfig, dict[str, Any] | None, str | None]:
    """The configuration without "auto", a record of the decision, and a line about it (collective).

    ``saved``: the record of the run that is resumed.
    """
    if "auto" not in (config.microbatches, config.model.recompute):
        return config, None, None
    memory = free_memory(world)
    if memory is None or config.module is not None:
        text = f"activations are not planned with model={config.module!r}: set --microbatches"
        said = None if memory is None else text
        return decided(config, config.num_microbatches, "none"), None, said
    settings = _settings(config, world)
    if saved is not None and saved.get("settings") == settings:
        config = decided(config, int(saved["microbatches"]), str(saved["recompute"]))
        return config, dict(saved), f"{described(config, world)}: as before"
    config = sized(config, world, memory)
    record = {"microbatches": config.num_microbatches, "recompute": config.model.recompute}
    text = f"{described(config, world)}: fits {size_text(memory)}"
    return config, {**record, "settings": settings}, text


def _settings(config: TrainConfig, world: World) -> dict[str, Any]:
    """What the decision depends on, as values for JSON."""
    names = ("batch", "microbatches", "strategy", "replicas", "ep", "optimizer", "precision")
    properties = torch.cuda.get_device_properties(world.device)
    settings = {name: getattr(config, name) for name in (*names, "compile")}
    settings["model"] = {n: v for n, v in dataclasses.asdict(config.model).items() if v is not None}
    device = {"device": properties.name, "memory": properties.total_memory}
    return {"ranks": world.size, **device, **settings}


def described(config: TrainConfig, world: World) -> str:
    recomputed = {
        "none": "nothing is recomputed",
        "pointwise": "norms and gated products are recomputed in backward",
        "block": "blocks are recomputed in backward",
    }
    return (
        f"{config.num_microbatches} microbatches of {config.share(world.size)} x "
        f"{config.model.context} tokens on each rank, {recomputed[config.model.recompute]}"
    )


def sized(config: TrainConfig, world: World, memory: int) -> TrainConfig:
    """The fewest microbatches, and the least recomputation with which a microbatch is large."""
    recompute = config.model.recompute
    least = "pointwise" if config.compiles(world.device.type) else "none"
    each = config.share(world.size) * config.num_microbatches  # sequences of a step on a rank
    counts = [config.num_microbatches] if config.microbatches != "auto" else divisors(each)
    best = decided(config, counts[-1], recompute)
    fitting = 0  # the most sequences of a microbatch
    for choice in (least, "block") if recompute == "auto" else (recompute,):

        def fits(count: int, choice: str = choice) -> bool:  # the memory falls with the count
            return bytes_held(decided(config, count, choice), world) <= memory

        at = bisect_left(counts, True, key=fits)
        if at < len(counts) and each // counts[at] > fitting:
            fitting, best = each // counts[at], decided(config, counts[at], choice)
        if fitting * config.model.context >= ENOUGH or fitting == each:
            break
    if not fitting:
        raise ValueError(
            f"a microbatch of {each // counts[-1]} x {config.model.context} tokens does not fit "
            f"the {size_text(memory)} of a rank (recompute={recompute!r}): use more ranks, a "
            f"strategy that shards more, a shorter context or a smaller model ('shardwise plan' "
            f"shows what each takes)"
        )
    return best


def decided(config: TrainConfig, microbatches: int, recompute: str) -> TrainConfig:
    """The configuration with these values in the place of "auto"."""
    values: dict[str, Any] = {"microbatches": microbatches}
    if config.model.recompute == "auto":
        values["recompute"] = recompute
        if config.module is not None:  # its own function decides
            model = dataclasses.replace(config.model, recompute="none")
            values = {"microbatches": microbatches, "model": model}
    return dataclasses.replace(config, **values)


def free_memory(world: World) -> int | None:
    """The bytes that every rank can use; None on a CPU (collective)."""
    if world.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(world.device)
    free = int(min(comm.agree(free, world.axis)))
    # The last rank of a GPU to look has seen what the contexts of all its ranks take.
    return math.floor(free * HEADROOM) // world.ranks_per_gpu


def divisors(count: int) -> list[int]:
    return [number for number in range(1, count + 1) if count % number == 0]


# ------------------------------------------------------------------------------ the model


def make_model(config: TrainConfig) -> nn.Module:
    """The bare model on the default device. A GPT on the meta device has no values; the user's
    module gets its values while it is built, the same on every rank."""
    if config.module is None:
        return GPT(config.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = named_function(config.module, "config")(config)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--model {config.module}: it returned a {type(model).__name__}, and must return a "
            f"torch.nn.Module"
        )
    return model.train()


def flops_per_token(config: TrainConfig, parameters: Iterable[Tensor] = ()) -> float:
    """FLOPs of forward and backward for a token; for a module of the user, 6 per parameter."""
    if config.module is None:
        return float(config.model.flops_per_token())
    return 6.0 * sum(parameter.numel() for parameter in parameters)


def with_vocabulary(config: TrainConfig, size: int) -> TrainConfig:
    """The configuration with the vocabulary of the data; pretrained weights keep their own."""
    if config.init_from is not None:
        if config.model.vocab_size < size:
            raise ValueError(
                f"the data have {size} different tokens, and the embedding of "
                f"{config.init_from!r} has {config.model.vocab_size}: use the tokenizer of that "
                f"model (--tokenizer {config.init_from})"
            )
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def precision_of(config: TrainConfig, world: World) -> Precision:
    weights = config.precision
    if weights == "auto":
        weights = "bf16" if world.device.type == "cuda" else "fp32"
    return named_precision(weights, experts=config.model.num_experts > 0)


def named_precision(weights: str, *, experts: bool) -> Precision:
    """The precision of this name; gradients are reduced and main weights are stored in fp32."""
    precision = Precision(weights=weights, reduce="fp32")
    if precision.format is None or not experts:
        return precision
    # A router in fp8 would send tokens to other experts, because of the rounding.
    return dataclasses.replace(precision, exclude=("*router*",))


def placements_of(config: TrainConfig, world: World) -> Placements:
    """The placements of a run. The only rank of a GPU gathers nothing: it keeps its compute weights
    between their uses, as with ``zero2``, which saves a cast at each use."""
    chosen = config.placements
    if world.size > 1 or world.device.type != "cuda":
        return chosen
    return dataclasses.replace(chosen, compute=(REPLICATE,) * chosen.num_axes)


# ------------------------------------------------------------------------------ plans


def planned(
    name: str, config: TrainConfig, ranks: int, memory: str | None
) -> tuple[Plan, list[str]]:
    """The plan of a run on GPUs, and lines about it: for a recipe with its flags, or for the
    Hugging Face config.json ``name``. With ``memory``, "auto" is decided as for a run."""
    world = World(rank=0, size=ranks, local_rank=0, num_nodes=1, device=torch.device("cuda"))
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if path.suffix == ".json":
        config = dataclasses.replace(config, model=config_from_hf(json_object(path)), batch=ranks)
    elif config.init_from is not None:
        config = begin_from(config)
    else:
        config = with_vocabulary(config, vocabulary_of(config.tokenizer))
    if config.batch < ranks:  # the least that keeps every rank busy
        config = dataclasses.replace(config, batch=ranks * config.num_microbatches)
    available, lines = None if memory is None else parse_size(memory), []
    if available is not None and config.module is None:
        try:
            config = sized(config, world, math.floor(HEADROOM * available))
            lines = [f"train would take {described(config, world)}"]
        except ValueError as error:
            lines = [str(error)]
            if config.microbatches == "auto":
                config = decided(config, config.share(ranks), "block")
    if config.model.recompute == "auto":
        config = decided(config, config.num_microbatches, "none")
    bare, mesh, options = plan_inputs(config, precision_of(config, world), world)
    return plan(bare, mesh, placements_of(config, world), memory=available, **options), lines


def bytes_held(config: TrainConfig, world: World) -> int:
    """The planned peak memory of a step."""
    bare, mesh, options = plan_inputs(config, precision_of(config, world), world, forward=True)
    # More than two microbatches take no more memory.
    options |= {"microbatches": min(config.num_microbatches, 2), "tokens": None}
    return plan(bare, mesh, placements_of(config, world), **options).total


def plan_inputs(
    config: TrainConfig, precision: Precision, world: World, *, forward: bool = False
) -> tuple[nn.Module, dict[str, int], dict[str, Any]]:
    """The arguments of ``sw.plan`` for a run: the bare model, the mesh and the options.

    The plan runs forward on meta tensors. With ep, values decide which rows are sent: ``forward``
    takes a model with the experts of one rank alone instead, which computes as many rows.
    """
    model, spread = config.model, config.ep > 1 and not forward
    if config.ep > 1 and forward:
        own = model.num_experts // config.ep
        chosen = min(own, model.experts_per_token)
        model = dataclasses.replace(model, num_experts=own, experts_per_token=chosen)
    with torch.device("meta"):
        bare = make_model(dataclasses.replace(config, model=model, ep=1, recompute=None))
        for layer in mixtures_of(bare) if spread else ():
            layer.keep_share(config.ep)
    batch = (config.share(world.size), config.model.context)
    options: dict[str, Any] = {
        "precision": precision,
        "optimizer": config.optimizer,
        "microbatches": config.num_microbatches,
        "device": world.device.type,
        "tokens": math.prod(batch),
        "batch": None if spread or config.module is not None else batch,
    }
    compiles = world.device.type == "cuda" and config.compiles("cuda")
    if compiles and options["batch"] is not None and precision.format is None:
        bare.softmax = compiled.softmax  # type: ignore[assignment]
        dense = [block for block in bare.blocks if not mixtures_of(block)]  # type: ignore[union-attr]
        dtype = precision.compute_dtype(torch.float32)
        options["compiled"] = dict.fromkeys(dense, _kept(config.model, dtype)) if dense else {}
    return bare, config.mesh_shape(world.size, world.num_nodes), options


@functools.cache
def _kept(model: GPTConfig, dtype: torch.dtype) -> compiled.Kept:
    """What a compiled dense block of this model keeps."""
    with torch.device("meta"):
        dense = dataclasses.replace(model, num_experts=0, num_dense_layers=0, shared_hidden_dim=0)
        block = Block(dense, 0)
    shapes = (compiled.SEQUENCES, model.context, model.dim), (2, model.context, 1, model.head_width)
    return compiled.kept_by(block, shapes, dtype)
