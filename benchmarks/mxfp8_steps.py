# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of the 0.96B GPT with bf16 and with MXFP8 weights, and what they gather."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.measure import GIB, StepClock, summary
from benchmarks.models import GPT, GPTConfig, token_loss
from benchmarks.report import Row, Table
from benchmarks.workers import FAKE_RANKS, Options, in_processes

WARMUPS, STEPS = 3, 10
BASE = "bf16"
FORMATS = (BASE, "mxfp8", "mxfp8_2d")


def optimizer_of(model: nn.Module) -> Callable[[], None]:
    import shardwise as sw

    made = sw.optimizer(model, matrix=sw.muon(lr=1e-3), elementwise=sw.adamw(lr=1e-4))
    return lambda: (made.step(), made.zero_grad())[1]


@torch.no_grad()
def rewrite(model: nn.Module) -> None:
    """Where ranks are pretended no gradient is worth following: the same values, written anew."""
    for parameter in model.parameters():
        parameter.mul_(1.0)
        parameter.grad = None


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """One case alone in its process. The clock never makes the host wait for the device."""
    import shardwise as sw

    (case,) = options.systems
    weights, _, stage = case.partition(" zero")
    device = torch.device(options.device)
    config = GPTConfig.tiny() if options.tiny else GPTConfig()
    torch.manual_seed(0)
    with device:
        model: nn.Module = GPT(config)
        tokens = torch.randint(config.vocab, (config.batch, config.length + 1))
    precision = sw.Precision(weights=weights, reduce="fp32")
    for module in (*model.blocks, model):  # type: ignore[misc]
        sw.fully_shard(module, mesh=mesh, placements=sw.zero(int(stage)), precision=precision)
    update = optimizer_of(model) if mesh.size() == 1 else partial(rewrite, model)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    clock = StepClock(device)
    gathered: dict[str, int] = {}
    for index in range(WARMUPS + STEPS):
        if index == WARMUPS and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        clock.start()
        with sw.comm.record() as forward:
            loss = token_loss(model(inputs), targets)
        clock.mark()
        with sw.comm.record() as backward:
            loss.backward()
        clock.mark()
        update()
        clock.mark()
        for phase, calls in (("forward", forward), ("backward", backward)):
            found = [call.nbytes for call in calls if call.operation == "all_gather"]
            gathered[phase] = sum(found)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    at_rest = {kind: n for kind, n in sw.ledger.snapshot().items() if kind == "compute"}
    return {
        "parts": clock.intervals()[WARMUPS:],
        "peak": peak,
        "loss": loss.item(),
        "kept": at_rest.get("compute", 0) / GIB,
        **gathered,
    }


def table(options: Options, backend: str, stages: Sequence[int]) -> Table:
    rows: list[Row] = []
    for stage in stages:
        base: Row | None = None
        for weights in FORMATS:
            case = f"{weights} zero{stage}"
            done = in_processes(worker, 1, backend, replace(options, systems=(case,)))
            row: Row = {"case": f"{weights}, zero({stage})", "peak": done["peak"]}
            row |= {"loss": done["loss"], "kept": done["kept"]}
            row |= summary("step", [sum(part) for part in done["parts"]])
            phases = ("forward", "backward", "optimizer")
            for name, column in zip(phases, zip(*done["parts"], strict=True), strict=True):
                row[name] = statistics.median(column)
            for phase in phases[:2]:
                row[f"{phase}_gathered"] = done[phase] / GIB
            row["gathered"] = (done["forward"] + done["backward"]) / GIB
            base = base or row
            for key in ("step", "peak", "gathered"):
                mine, theirs = row[key], base[key]
                if isinstance(mine, float) and isinstance(theirs, float) and theirs:
                    row[f"{key}_ratio"] = mine / theirs
            rows.append(row)
    alone = backend != "fake"
    note = (
        "0.96B GPT (16 x 2048, 16 heads, SwiGLU 5632, vocab 32768 untied, 8 x 2048 tokens), Muon,\n"
        "fp32 main weights and grads, bf16 products. MXFP8: linear layers; embedding and norms\n"
        "stay bf16. kept: compute weights between steps. A fresh process per row, 3 + 10 steps. "
        + ("Bytes are\ngathered by several ranks only." if alone else "No\noptimizer here.")
    )
    columns = {
        "case": ("weights", "s"),
        "step": ("step ms", ".1f"),
        "step_ratio": ("x bf16", ".3f"),
        "step_spread": ("spread %", ".1f"),
        "forward": ("forward", ".1f"),
        "backward": ("backward", ".1f"),
        "optimizer": ("optimizer", ".1f"),
        "peak": ("peak GiB", ".2f"),
        "peak_ratio": ("x bf16", ".3f"),
        "kept": ("kept GiB", ".3f"),
    }
    if not alone:
        del columns["optimizer"]
        columns |= {
            "forward_gathered": ("gathered fwd GiB", ".3f"),
            "backward_gathered": ("bwd GiB", ".3f"),
            "gathered_ratio": ("x bf16", ".3f"),
        }
    if alone:  # what pretended ranks send is no weight of theirs
        columns["loss"] = ("last loss", ".4f")
    where = f"1 {backend} rank" if alone else f"rank 0 of {FAKE_RANKS} (`fake`)"
    return Table(
        title=f"Training step, {where}" + options.mark, note=note, columns=columns, rows=rows
    )


def run(tiny: bool) -> list[Table]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(device=device, systems=(), rounds=1, tiny=tiny)
    backend = "nccl" if device == "cuda" else "gloo"
    return [table(options, backend, (3, 1)), table(options, "fake", (3,))]
