# SPDX-License-Identifier: Apache-2.0
"""Fit: choose ``microbatches`` and ``recompute`` for "auto", by planned memory; the bare model.

    the plan of one microbatch --> the most sequences that fit --> the fewest microbatches

Compiled blocks recompute norms and gated products: gpt_1b takes 16 % less memory for at most 1.6 %
more time on an H200. Whole blocks are recomputed only if a microbatch would otherwise have fewer
than ``ENOUGH`` tokens, which keep a GPU busy. The plan is of an uncompiled model, which takes more
memory than a compiled one. All ranks plan with the memory of the rank that has least, so they all
decide the same.

Other microbatches sum in another order. So a resumed run takes what was decided before, if ranks,
device, its memory, and the settings that the plan depends on are the same.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.placements import REPLICATE, Placements
from shardwise.models.gpt import GPT
from shardwise.moe import mixtures_of
from shardwise.planning.plan import plan
from shardwise.precision import Precision
from shardwise.train.config import TrainConfig
from shardwise.train.launch import World
from shardwise.train.recipes import named_function
from shardwise.words import size_text

ENOUGH = 8192  # tokens of a microbatch
HEADROOM = 0.93  # of the free memory at the start: the rest is for fragments and libraries


def fit(
    config: TrainConfig,
    precision: Precision,
    world: World,
    saved: Mapping[str, Any] | None = None,
) -> tuple[TrainConfig, dict[str, Any] | None, str | None]:
    """The configuration without "auto", a record of the decision, and a line about it (collective).

    ``saved``: the record of the run that is resumed.
    """
    if "auto" not in (config.microbatches, config.model.recompute):
        return config, None, None
    settings = _settings(config, world)
    if saved is not None and saved.get("settings") == settings:
        count, recompute = int(saved["microbatches"]), str(saved["recompute"])
        result = decided(config, microbatches=count, recompute=recompute)
        return result, dict(saved), f"{_described(result, world)}: as before"
    memory = free_memory(world)
    if memory is None or config.module is not None:
        result = decided(config, microbatches=config.num_microbatches, recompute="none")
        text = f"activations are not planned with model={config.module!r}: set --microbatches"
        return result, None, None if memory is None else text
    result = _sized(config, precision, world, memory)
    recompute = result.model.recompute
    record = {"microbatches": result.num_microbatches, "recompute": recompute}
    text = f"{_described(result, world)}: fits {size_text(memory)}"
    return result, {**record, "settings": settings}, text


def _settings(config: TrainConfig, world: World) -> dict[str, Any]:
    """What the decision depends on, as values for JSON."""
    names = ("batch", "microbatches", "strategy", "replicas", "ep", "optimizer", "precision")
    device, memory = world.device.type, 0
    if device == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        device, memory = properties.name, properties.total_memory
    settings = {name: getattr(config, name) for name in (*names, "compile")}
    settings["model"] = {n: v for n, v in dataclasses.asdict(config.model).items() if v is not None}
    return {"ranks": world.size, "device": device, "memory": memory, **settings}


def _described(config: TrainConfig, world: World) -> str:
    recomputed = {
        "none": "nothing is recomputed",
        "pointwise": "norms and gated products are recomputed in backward",
        "block": "blocks are recomputed in backward",
    }
    return (
        f"{config.num_microbatches} microbatches of {config.share(world.size)} x "
        f"{config.model.context} tokens on each rank, {recomputed[config.model.recompute]}"
    )


def _sized(config: TrainConfig, precision: Precision, world: World, memory: int) -> TrainConfig:
    """The fewest microbatches, and the least recomputation with which a microbatch is large."""
    recompute = config.model.recompute
    least = "pointwise" if config.compiles(world.device.type) else "none"
    choices = (least, "block") if recompute == "auto" else (recompute,)
    each = config.share(world.size) * config.num_microbatches  # sequences of a step on a rank
    fitting: dict[str, int] = {}  # recompute: the most sequences of a microbatch; 0: none fits
    for choice in choices:
        counts = [config.num_microbatches] if config.microbatches != "auto" else divisors(each)

        # Find the smallest count that fits, with few plans. Memory falls with the count, so this is
        # a bisection; the next guess assumes that memory is inversely proportional to the count.
        first, last, guess = 0, len(counts), 0
        while first < last:
            count = counts[guess]
            held = bytes_held(config, choice, precision, world, each // count, count)
            first, last = (first, guess) if held <= memory else (guess + 1, last)
            guess = bisect_left(counts, count * held / memory, first, max(first, last - 1))
        fitting[choice] = each // counts[first] if first < len(counts) else 0
        if fitting[choice] * config.model.context >= ENOUGH or fitting[choice] == each:
            break
    best = max(fitting, key=lambda choice: fitting[choice])
    if not fitting[best]:
        smallest = each // config.num_microbatches if config.microbatches != "auto" else 1
        raise ValueError(
            f"a microbatch of {smallest} x {config.model.context} tokens does not fit the "
            f"{size_text(memory)} of a rank, with blocks recomputed "
            f"{'too' if 'block' in fitting else 'or not'}: use more ranks, a strategy that shards "
            f"more, a shorter context or a smaller model ('shardwise plan' shows what each takes)"
        )
    return decided(config, microbatches=each // fitting[best], recompute=best)


def more_microbatches(config: TrainConfig, ranks: int) -> int | None:
    """The next number of microbatches that is at least twice the current one; None if there is
    none."""
    count = config.num_microbatches
    return next((n for n in divisors(config.share(ranks) * count) if n >= 2 * count), None)


def too_large(
    config: TrainConfig, ranks: int, step: int, error: torch.OutOfMemoryError
) -> torch.OutOfMemoryError:
    """The error of a run that ends because of memory, with the flags to resume with."""
    count, flags = more_microbatches(config, ranks), []
    if count is not None:
        flags.append(f"--microbatches {count}")
    if config.module is None and config.model.recompute != "block":
        flags.append("--recompute block")
    fix = "use a larger device, or more ranks"
    if flags:
        fix = f"resume with {', or with '.join(flags)}"
    return torch.OutOfMemoryError(
        f"step {step} does not fit this device with microbatches of {config.share(ranks)} x "
        f"{config.model.context} tokens: {fix}. {error}"
    )


def decided(config: TrainConfig, *, microbatches: int, recompute: str) -> TrainConfig:
    """The configuration with these values in the place of "auto"."""
    values: dict[str, Any] = {"microbatches": microbatches}
    if config.model.recompute == "auto":
        values["recompute"] = recompute
    return dataclasses.replace(config, **values)


def make_model(config: TrainConfig) -> nn.Module:
    """The bare model on the default device. A GPT on the meta device has no values; the user's
    module gets its values while it is built, the same on every rank."""
    if config.module is None:
        return GPT(config.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = named_function(config.module, "model", "config")(config)
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


def placements_of(config: TrainConfig, world: World) -> Placements:
    """The placements of a run. The only rank of a GPU gathers nothing: it keeps its compute weights
    between their uses, as with ``zero2``, which saves a cast at each use."""
    chosen = config.placements
    if world.size > 1 or world.device.type != "cuda":
        return chosen
    return dataclasses.replace(chosen, compute=(REPLICATE,) * chosen.num_axes)


def bytes_held(
    config: TrainConfig,
    recompute: str,
    precision: Precision,
    world: World,
    sequences: int,
    microbatches: int,
) -> int:
    """The planned peak memory of a step, with microbatches of this number of sequences."""
    model = dataclasses.replace(config.model, recompute=recompute)  # type: ignore[arg-type]
    if config.ep > 1:  # a rank computes as many rows as a model with only the rank's experts
        own = model.num_experts // config.ep
        model = dataclasses.replace(
            model, num_experts=own, experts_per_token=min(own, model.experts_per_token)
        )
    alone = dataclasses.replace(config, model=model, recompute=None, ep=1)
    bare, mesh, options = plan_inputs(alone, precision, world)
    # More than two microbatches take no more memory.
    options |= {"microbatches": min(microbatches, 2), "batch": (sequences, model.context)}
    placements = placements_of(config, world)
    return plan(bare, mesh, placements, **options | {"tokens": None}).total


def plan_inputs(
    config: TrainConfig, precision: Precision, world: World
) -> tuple[nn.Module, dict[str, int], dict[str, Any]]:
    """The arguments of ``sw.plan`` for a run: the bare model, the mesh and the options."""
    with torch.device("meta"):
        bare = make_model(config)
        for layer in mixtures_of(bare) if config.ep > 1 else ():
            layer.keep_share(config.ep)
    followed = (config.share(world.size), config.model.context)
    options: dict[str, Any] = {
        "precision": precision,
        "optimizer": config.optimizer,
        "microbatches": config.num_microbatches,
        "device": world.device.type,
        "tokens": followed[0] * followed[1],
        # The plan runs forward on meta tensors, without values. With ep, values decide which rows
        # are sent, and the forward of a user's module may read values, too.
        "batch": followed if config.ep == 1 and config.module is None else None,
    }
    return bare, config.mesh_shape(world.size, world.num_nodes), options


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
