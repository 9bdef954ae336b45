# SPDX-License-Identifier: Apache-2.0
"""Preview: the output of ``shardwise train --dry-run`` about a run that is not started."""

from __future__ import annotations

import dataclasses

import torch

from shardwise.report.plan import plan
from shardwise.train.build import precision_of, weights_on, with_vocabulary
from shardwise.train.config import GROUPS, TrainConfig
from shardwise.train.corpus import named_files
from shardwise.train.fit import fit, plan_inputs
from shardwise.train.metrics import peak_flops
from shardwise.train.own_model import flops_per_token
from shardwise.train.sources import sources_of, vocabulary_of
from shardwise.train.world import World
from shardwise.words import seconds_text

USUAL_MFU = 0.4  # a typical value for such models: the expected time is a guess
LONG = 3600.0  # seconds; a longer run on CPU ranks gets a warning before it begins


def preview(config: TrainConfig, ranks: int) -> str:
    """The configuration without "auto", the plan of a step, and a guess of the time, for a run on
    ``ranks`` devices like the first device of this machine. Reads nothing of the data but headers
    of token files, and raises if the data do not exist."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    world = World(rank=0, size=ranks, local_rank=0, num_nodes=1, device=device)
    for source in sources_of(config.data):
        named_files(source)
    config = with_vocabulary(config, vocabulary_of(config.data, config.tokenizer))
    precision = precision_of(config, world)
    config, decision = fit(config, precision, world)
    model, mesh, options = plan_inputs(config, precision, world)
    plan_of_step = plan(model, mesh, config.placements, **options)
    lines = [*_configuration(config), "", str(plan_of_step), ""]
    if decision is not None:
        lines.append(f"note     {decision}")
    if config.unreached:
        lines.append(f"warning  {config.unreached}")
    each = flops_per_token(config, model.parameters())
    return "\n".join([*lines, f"time     {_time(config, each, device, ranks)[1]}"])


def without_gpus(config: TrainConfig, ranks: int) -> str | None:
    """A warning if a run that is about to start on CPU ranks would take very long there."""
    if torch.cuda.is_available() or config.module is not None:
        return None
    each, cpu = flops_per_token(config), torch.device("cpu")
    seconds, text = _time(config, each, cpu, ranks)
    if seconds < LONG:
        return None
    warning = f"torch sees no GPU, and {ranks} CPU ranks take {text}"
    if weights_on(cpu, config) != "fp32":
        in_fp32 = dataclasses.replace(config, precision="fp32", final_bf16=0.0)
        other = seconds_text(_time(in_fp32, each, cpu, ranks)[0])
        warning += f". Its products are in bf16; with --precision fp32 it is about {other}"
    return warning


def _time(
    config: TrainConfig, flops_per_token: float, device: torch.device, ranks: int
) -> tuple[float, str]:
    """The expected seconds of a run, and a text with the numbers that they follow from."""
    tokens = config.batch * config.model.context
    flops = flops_per_token * tokens * config.steps
    # A device without fp8 products decodes fp8 weights to bf16.
    dtype = torch.float32 if weights_on(device, config) == "fp32" else torch.bfloat16
    peak = peak_flops(device, dtype) * ranks
    seconds = flops / (USUAL_MFU * peak)
    return seconds, (
        f"about {seconds_text(seconds)}, if {100 * USUAL_MFU:.0f} % of {peak / 1e12:.3g} TFLOP/s "
        f"are reached: {config.steps:,} steps of {tokens:,} tokens, {flops:.2g} FLOPs"
    )


def _configuration(config: TrainConfig) -> list[str]:
    lines = ["model"]
    for name, value in vars(config.model).items():
        if value is not None:
            lines.append(f"  {name:24}{value}")
    for name, value in vars(config).items():
        if name in GROUPS:
            lines += ["", GROUPS[name].replace("_", " ")]
        if name != "model":
            lines.append(f"  {name:24}{value}")
    return lines
