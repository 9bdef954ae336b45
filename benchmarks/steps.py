# SPDX-License-Identifier: Apache-2.0
"""Whole training steps: the MLP on 2 gloo ranks, and the GPT on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.measure import GIB, StepClock, step_row, summary
from benchmarks.models import MLP, GPTConfig, gpt_and_tokens, token_loss, vector_loss
from benchmarks.report import Row, Table, add_ratios
from benchmarks.systems import BF16_COMPUTE, FULL_PRECISION, SYSTEMS, autocast_for
from benchmarks.workers import FAKE_RANKS, Options, in_processes

MLP_WARMUPS = 2
GPT_WARMUPS, GPT_STEPS = 3, 10


def mlp_worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """All systems live in the same processes and take turns, so that drift hits all alike."""
    width, batch = (64, 8) if options.tiny else (512, 192)
    generator = torch.Generator().manual_seed(rank)
    x, target = (torch.randn(batch, width, generator=generator) for _ in range(2))

    def make(system: str) -> Callable[[], float]:
        torch.manual_seed(0)
        model = SYSTEMS[system](MLP(width), mesh, FULL_PRECISION)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> float:
            optimizer.zero_grad()
            loss = vector_loss(model(x), target)
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    steps = {system: make(system) for system in options.systems}
    times: dict[str, list[float]] = {system: [] for system in steps}
    losses: dict[str, float] = {}
    for turn in range(MLP_WARMUPS + options.rounds):
        for system, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            losses[system] = step()
            if turn >= MLP_WARMUPS:
                times[system].append(1e3 * (time.perf_counter() - started))
    check_losses({system: loss for system, loss in losses.items() if system != "none"})
    result = {}
    for system, mine in times.items():
        slowest = torch.tensor(mine)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        result[system] = {"steps": slowest.tolist(), "loss": losses[system]}
    return result


def check_losses(losses: dict[str, float]) -> None:
    """A system that is fast because it trains something else must not pass unseen."""
    values = losses.values()
    if losses and not max(values) - min(values) <= 1e-4 * abs(max(values)):
        raise RuntimeError(f"systems disagree on the loss after the same steps: {losses}")


def run_gloo(options: Options) -> list[Table]:
    result = in_processes(mlp_worker, 2, "gloo", replace(options, device="cpu"))
    rows: list[Row] = [
        {"system": system, "loss": figures["loss"], **summary("step", figures["steps"])}
        for system, figures in result.items()
    ]
    add_ratios(rows, "step")
    note = (
        "8 blocks 512 -> 2048 -> 512 (16.8M parameters), batch 192 a rank, fp32, fused AdamW, one\n"
        "thread a rank. Systems take turns, one step each; a step is the slowest rank's. Spread:\n"
        "the middle half of the steps. *No wrapping* runs on both ranks and reduces nothing."
    )
    columns = {
        "system": ("system", "s"),
        "step": ("step ms", ".0f"),
        "step_ratio": ("x FSDP2", ".2f"),
        "step_spread": ("spread %", ".0f"),
        "loss": ("last loss", ".5f"),
    }
    title = "Whole step, 2 gloo ranks" + options.mark
    return [Table(title=title, note=note, columns=columns, rows=rows)]


def gpt_worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """One system alone in its process. The clock never makes the host wait for the device."""
    (system,) = options.systems
    device = torch.device(options.device)
    config = GPTConfig.tiny() if options.tiny else GPTConfig()
    bare, inputs, targets = gpt_and_tokens(config, device)
    model = SYSTEMS[system](bare, mesh, BF16_COMPUTE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clock = StepClock(device)
    for index in range(GPT_WARMUPS + GPT_STEPS):
        if index == GPT_WARMUPS and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
        clock.start()
        optimizer.zero_grad()
        with autocast_for(system, device, BF16_COMPUTE):
            loss = token_loss(model(inputs), targets)
        clock.mark()
        loss.backward()
        clock.mark()
        optimizer.step()
        clock.mark()
    parts = clock.intervals()[GPT_WARMUPS:]
    memory: dict[str, Any] = {"peak": None, "reserved": None, "allocations": None}
    if device.type == "cuda":
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        memory["peak"] = torch.cuda.max_memory_allocated() / GIB
        memory["reserved"] = torch.cuda.max_memory_reserved() / GIB
        memory["allocations"] = (after - before) / GPT_STEPS
    return {"parts": parts, **memory, "loss": loss.item()}


_FIGURES = ("peak", "reserved", "allocations", "loss")


def run_gpt(options: Options, backend: str) -> Table:
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in options.systems}
    for _ in range(1 if options.tiny else 2):
        for system, done in runs.items():
            done.append(in_processes(gpt_worker, 1, backend, replace(options, systems=(system,))))
    rows: list[Row] = []
    for system, done in runs.items():
        parts = [part for run in done for part in run["parts"]]
        row: Row = {"system": system} | {key: done[0][key] for key in _FIGURES}
        rows.append(row | step_row(parts))
    add_ratios(rows, "step", "peak")
    where = f"rank 0 of {FAKE_RANKS} (`fake`)" if backend == "fake" else f"1 {backend} rank"
    note = (
        "0.96B GPT (16 x 2048, 16 heads, SwiGLU 5632, vocab 32768 untied, 8 x 2048 tokens), bf16\n"
        "compute, fp32 main weights and grads, fused AdamW; *no wrapping* and DDP by autocast.\n"
        "Two fresh processes per system, in turns; 3 warm-up and 10 timed steps in each."
    )
    columns = {
        "system": ("system", "s"),
        "step": ("step ms", ".1f"),
        "step_ratio": ("x FSDP2", ".3f"),
        "step_spread": ("spread %", ".1f"),
        "forward": ("forward", ".1f"),
        "backward": ("backward", ".1f"),
        "optimizer": ("optimizer", ".1f"),
        "peak": ("peak GiB", ".2f"),
        "peak_ratio": ("x FSDP2", ".3f"),
        "reserved": ("reserved GiB", ".2f"),
        "allocations": ("allocations", ".0f"),
        "loss": ("last loss", ".4f"),
    }
    title = f"GPT step, {where}" + options.mark
    return Table(title=title, note=note, columns=columns, rows=rows)


def run_gpu(options: Options) -> list[Table]:
    return [run_gpt(options, "nccl" if options.device == "cuda" else "gloo")]
