# SPDX-License-Identifier: Apache-2.0
"""Fit: "auto" for ``microbatches``, ``recompute`` and ``keep_weights`` becomes what the card holds.

    the plan of one microbatch --> the most sequences that fit --> the fewest microbatches

Compiled blocks compute norms and gated products again: gpt_1b takes 16 % less memory for at most
1.6 % more time on an H200. Whole blocks are recomputed only where a microbatch without that would
be short of ``ENOUGH`` tokens, which a GPU needs to be busy. The plan counts memory without
compilation, which saves some: what it says fits does. All ranks plan with the least memory of any
rank, so they decide alike.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import comm
from shardwise.moe import mixtures_of
from shardwise.precision import Precision
from shardwise.report.plan import plan
from shardwise.train.config import Choice, TrainConfig
from shardwise.train.own_model import make_model
from shardwise.train.world import World
from shardwise.words import size_text

ENOUGH = 8192  # tokens of a microbatch
HEADROOM = 0.93  # of the memory that is free at the start: the rest is for fragments and libraries


def fit(config: TrainConfig, precision: Precision, world: World) -> tuple[TrainConfig, str | None]:
    """The configuration without "auto", and a line that says what was decided (collective)."""
    asked = "auto" in (config.microbatches, config.model.recompute)
    if not asked and config.keep_weights != "auto":
        return config, None
    memory = free_memory(world)
    if memory is None or config.module is not None:
        made = decided(config, microbatches=config.num_microbatches, recompute="none")
        return made, None if memory is None or not asked else (
            f"activations are not planned with module={config.module!r}: microbatches "
            f"{made.microbatches}, recompute {made.model.recompute}; set both if that does not fit"
        )
    made = _sized(config, precision, world, memory) if asked else config
    sequences, recompute = made.share(world.size), made.model.recompute
    kept = decided(made, keep_weights="on")
    # One rank gathers nothing: to keep what it computes with saves a cast for each use.
    if kept != made and config.data_ranks(world.size) == 1:
        count = made.num_microbatches
        if bytes_held(kept, recompute, precision, world, sequences, count) <= memory:
            made = kept
    made = decided(made)
    again = {
        "none": "nothing is recomputed",
        "pointwise": "norms and gated products are recomputed in backward",
        "block": "blocks are recomputed in backward",
    }[recompute]
    line = (
        f"{made.num_microbatches} microbatches of {sequences} x {config.model.context} tokens on "
        f"each rank, {again}{', weights are kept' * (made.keep_weights == 'on')}: fits "
        f"{size_text(memory)}"
    )
    return made, line if asked else None


def _sized(config: TrainConfig, precision: Precision, world: World, memory: int) -> TrainConfig:
    """The fewest microbatches, and the least recomputation with which a microbatch is large."""
    recompute = config.model.recompute
    least = "pointwise" if config.compiles(world.device.type) else "none"
    choices = (least, "block") if recompute == "auto" else (recompute,)
    each = config.share(world.size) * config.num_microbatches  # sequences of a step on a rank
    found: dict[str, int] = {}
    for choice in choices:
        counts = [config.num_microbatches] if config.microbatches != "auto" else divisors(each)

        # Bytes grow with the sequences, so the first count that fits is looked for from below, in
        # as few plans as can be: half the bytes are expected of twice as many microbatches.
        first, last, guess = 0, len(counts), 0
        while first < last:
            count = counts[guess]
            held = bytes_held(config, choice, precision, world, each // count, count)
            first, last = (first, guess) if held <= memory else (guess + 1, last)
            guess = bisect_left(counts, count * held / memory, first, max(first, last - 1))
        found[choice] = each // counts[first] if first < len(counts) else 0
        if found[choice] * config.model.context >= ENOUGH or found[choice] == each:
            break
    best = max(found, key=lambda choice: found[choice])
    if not found[best]:
        what = f"{each // config.num_microbatches if config.microbatches != 'auto' else 1} x "
        raise ValueError(
            f"a microbatch of {what}{config.model.context} tokens does not fit the "
            f"{size_text(memory)} of a rank, with blocks recomputed "
            f"{'too' if 'block' in found else 'or not'}: use more ranks, a strategy that shards "
            f"more, a shorter context or a smaller model ('shardwise plan' shows what each takes)"
        )
    return decided(config, microbatches=each // found[best], recompute=best, keep_weights="auto")


def more_microbatches(config: TrainConfig, ranks: int) -> int | None:
    """The next number of microbatches, twice as many or more; None: each is one sequence."""
    count = config.num_microbatches
    found = (one for one in divisors(config.share(ranks) * count) if one >= 2 * count)
    return next(found, None)


def too_large(
    config: TrainConfig, ranks: int, step: int, error: torch.OutOfMemoryError
) -> torch.OutOfMemoryError:
    """The error of a run that ends for want of memory: it says what to resume with."""
    count, ways = more_microbatches(config, ranks), []
    if count is not None:
        ways.append(f"--microbatches {count}")
    if config.module is None and config.model.recompute != "block":
        ways.append("--model.recompute block")
    way = f"resume with {', or with '.join(ways)}" if ways else "use a larger device, or more ranks"
    return torch.OutOfMemoryError(
        f"step {step} does not fit this device with microbatches of {config.share(ranks)} x "
        f"{config.model.context} tokens: {way}. {error}"
    )


def decided(
    config: TrainConfig,
    *,
    microbatches: int | None = None,
    recompute: str | None = None,
    keep_weights: Choice = "off",
) -> TrainConfig:
    """The configuration with these values where it says "auto"."""
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
    """The peak of a step on the busiest rank, with microbatches of so many sequences."""
    model = dataclasses.replace(config.model, recompute=recompute)  # type: ignore[arg-type]
    if config.ep > 1:  # a rank computes as many rows as if its own experts were all there are
        own = model.num_experts // config.ep
        model = dataclasses.replace(
            model, num_experts=own, experts_per_token=min(own, model.experts_per_token)
        )
    alone = dataclasses.replace(config, model=model, ep=1)
    bare, mesh, options = plan_inputs(alone, precision, world)
    # More than two microbatches hold no more.
    options |= {"microbatches": min(microbatches, 2), "batch": (sequences, model.context)}
    return plan(bare, mesh, config.placements, **options | {"tokens": None}).total


def plan_inputs(
    config: TrainConfig, precision: Precision, world: World
) -> tuple[nn.Module, dict[str, int], dict[str, Any]]:
    """The bare model, the mesh and the options with which ``sw.plan`` describes a run."""
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
        # Rows without values cannot be sent to other ranks; a foreign forward may read values.
        "batch": followed if config.ep == 1 and config.module is None else None,
    }
    return bare, config.mesh_shape(world.size, world.num_nodes) | {"tp": config.tp}, options


def free_memory(world: World) -> int | None:
    """The bytes that every rank can use; None where the device does not tell (collective)."""
    if world.device.type != "cuda":
        return None
    own = torch.cuda.mem_get_info(world.device)[0]
    # Without ranks (a preview of a run) this device speaks for all.
    free: list[int] = comm.agree(own, world.axis) if dist.is_initialized() else [own]
    return math.floor(min(free) * HEADROOM)


def divisors(count: int) -> list[int]:
    return [number for number in range(1, count + 1) if count % number == 0]
