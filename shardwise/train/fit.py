# SPDX-License-Identifier: Apache-2.0
"""Fit: choose ``microbatches``, ``recompute`` and ``keep_weights`` for "auto", by planned memory.

    the plan of one microbatch --> the most sequences that fit --> the fewest microbatches

Compiled blocks recompute norms and gated products: gpt_1b takes 16 % less memory for at most 1.6 %
more time on an H200. Whole blocks are recomputed only if a microbatch would otherwise have fewer
than ``ENOUGH`` tokens, which keep a GPU busy. The plan is of an uncompiled model, which takes more
memory than a compiled one. All ranks plan with the memory of the rank that has least, so they all
decide the same.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core import comm
from shardwise.moe import mixtures_of
from shardwise.precision import Precision
from shardwise.report.plan import plan
from shardwise.train.config import Choice, TrainConfig
from shardwise.train.own_model import make_model
from shardwise.train.world import World
from shardwise.words import size_text

ENOUGH = 8192  # tokens of a microbatch
HEADROOM = 0.93  # of the free memory at the start: the rest is for fragments and libraries


def fit(config: TrainConfig, precision: Precision, world: World) -> tuple[TrainConfig, str | None]:
    """The configuration without "auto", and a line about the decision (collective)."""
    sizes_are_auto = "auto" in (config.microbatches, config.model.recompute)
    if not sizes_are_auto and config.keep_weights != "auto":
        return config, None
    memory = free_memory(world)
    if memory is None or config.module is not None:
        result = decided(config, microbatches=config.num_microbatches, recompute="none")
        if memory is None or not sizes_are_auto:
            return result, None
        return result, (
            f"activations are not planned with module={config.module!r}: microbatches "
            f"{result.microbatches}, recompute {result.model.recompute}; set both if they do not "
            f"fit"
        )
    result = _sized(config, precision, world, memory) if sizes_are_auto else config
    sequences, recompute = result.share(world.size), result.model.recompute
    kept = decided(result, keep_weights="on")
    # A single rank gathers nothing: if it keeps its compute weights, it saves a cast at each use.
    if kept != result and config.data_ranks(world.size) == 1:
        count = result.num_microbatches
        if bytes_held(kept, recompute, precision, world, sequences, count) <= memory:
            result = kept
    result = decided(result)
    if not sizes_are_auto:
        return result, None
    recomputed = {
        "none": "nothing is recomputed",
        "pointwise": "norms and gated products are recomputed in backward",
        "block": "blocks are recomputed in backward",
    }[recompute]
    return result, (
        f"{result.num_microbatches} microbatches of {sequences} x {config.model.context} tokens on "
        f"each rank, {recomputed}{', weights are kept' * (result.keep_weights == 'on')}: fits "
        f"{size_text(memory)}"
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
    return decided(config, microbatches=each // fitting[best], recompute=best, keep_weights="auto")


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
        flags.append("--model.recompute block")
    fix = "use a larger device, or more ranks"
    if flags:
        fix = f"resume with {', or with '.join(flags)}"
    return torch.OutOfMemoryError(
        f"step {step} does not fit this device with microbatches of {config.share(ranks)} x "
        f"{config.model.context} tokens: {fix}. {error}"
    )


def decided(
    config: TrainConfig,
    *,
    microbatches: int | None = None,
    recompute: str | None = None,
    keep_weights: Choice = "off",
) -> TrainConfig:
    """The configuration with these values in the place of "auto"."""
    values: dict[str, Any] = {}
    if recompute is not None and config.model.recompute == "auto":
        values["model"] = dataclasses.replace(config.model, recompute=recompute)  # type: ignore[arg-type]
    if microbatches is not None:
        values["microbatches"] = microbatches
    if config.keep_weights == "auto":
        values["keep_weights"] = keep_weights
    return dataclasses.replace(config, **values)


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
    alone = dataclasses.replace(config, model=model, ep=1)
    bare, mesh, options = plan_inputs(alone, precision, world)
    # More than two microbatches take no more memory.
    options |= {"microbatches": min(microbatches, 2), "batch": (sequences, model.context)}
    return plan(bare, mesh, config.placements, **options | {"tokens": None}).total


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
    return bare, config.mesh_shape(world.size, world.num_nodes) | {"tp": config.tp}, options


def free_memory(world: World) -> int | None:
    """The bytes that every rank can use; None on a CPU (collective)."""
    if world.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(world.device)
    if dist.is_initialized():  # else this is a preview, and all ranks are like this device
        free = min(comm.agree(free, world.axis))
    # The last rank of a GPU to look has seen what the contexts of all its ranks take.
    return math.floor(free * HEADROOM) // world.ranks_per_gpu


def divisors(count: int) -> list[int]:
    return [number for number in range(1, count + 1) if count % number == 0]
