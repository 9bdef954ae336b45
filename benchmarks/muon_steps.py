# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of the 0.96B GPT with Muon and with AdamW, this library's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.measure import GIB, StepClock, step_row
from benchmarks.models import GPTConfig, gpt_and_tokens, token_loss
from benchmarks.report import Row, Table
from benchmarks.systems import BF16_COMPUTE, wrap_fsdp2, wrap_zero
from benchmarks.workers import FAKE_RANKS, Options, in_processes
from shardwise.optim.presets import DEFAULT

WARMUPS, STEPS = 3, 10
Steps = Callable[[], None]


def wrap_buckets(model: nn.Module, mesh: DeviceMesh, policy: Any) -> nn.Module:
    import shardwise as sw

    precision = sw.Precision(weights=policy.param_dtype, reduce=policy.reduce_dtype)
    return sw.data_parallel(model, mesh=mesh, placements=sw.zero(1), precision=precision)


def ours(model: nn.Module, preset: str | None) -> Steps:
    import shardwise as sw

    made = sw.optimizer(
        model,
        matrix=sw.muon(lr=1e-3, preset=preset) if preset else None,
        elementwise=sw.adamw(lr=1e-4),
    )
    return lambda: (made.step(), made.zero_grad())[1]


def torchs(model: nn.Module, matrix: str | None) -> Steps:
    """torch.optim.Muon for the matrices of the blocks, fused AdamW for the rest."""
    named = list(model.named_parameters())
    whole = [p for name, p in named if matrix and p.ndim == 2 and "blocks" in name]
    chosen = {id(p) for p in whole}
    rest = [p for _, p in named if id(p) not in chosen]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-4, fused=True)]
    if whole:
        made.append(torch.optim.Muon(whole, lr=1e-3))

    def step() -> None:
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()

    return step


wrap_zero3 = partial(wrap_zero, stage=3)
# What a case is called, how the model is wrapped, whose optimizer, and Newton-Schulz's preset.
CASES: dict[str, tuple[str, Callable[..., nn.Module], Callable[..., Steps], str | None]] = {
    "fsdp2-adamw": ("torch FSDP2, AdamW", wrap_fsdp2, torchs, None),
    "fsdp2-muon": ("torch FSDP2, torch.optim.Muon", wrap_fsdp2, torchs, "keller"),
    "zero3-adamw": ("shardwise zero(3), AdamW", wrap_zero3, ours, None),
    "zero3-muon": ("shardwise zero(3), Muon", wrap_zero3, ours, DEFAULT),
    "zero3-muon-five": (
        "shardwise zero(3), Muon, polar_express",
        wrap_zero3,
        ours,
        "polar_express",
    ),
    "buckets-adamw": ("shardwise data_parallel, AdamW", wrap_buckets, ours, None),
    "buckets-muon": ("shardwise data_parallel, Muon", wrap_buckets, ours, DEFAULT),
}


def worker(rank: int, options: Options, mesh: DeviceMesh) -> dict[str, Any]:
    """One case alone in its process. The clock never makes the host wait for the device."""
    (case,) = options.systems
    _, wrap, make, preset = CASES[case]
    device = torch.device(options.device)
    config = GPTConfig.tiny() if options.tiny else GPTConfig()
    bare, inputs, targets = gpt_and_tokens(config, device)
    model = wrap(bare, mesh, BF16_COMPUTE)
    step = make(model, preset)
    clock = StepClock(device)
    for index in range(WARMUPS + STEPS):
        if index == WARMUPS and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        clock.start()
        loss = token_loss(model(inputs), targets)
        clock.mark()
        loss.backward()
        clock.mark()
        step()
        clock.mark()
    parts = clock.intervals()[WARMUPS:]
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    return {"parts": parts, "peak": peak, "loss": loss.item()}


def table(options: Options, backend: str) -> Table:
    rows: list[Row] = []
    for case in options.systems:
        done = in_processes(worker, 1, backend, replace(options, systems=(case,)))
        row: Row = {"case": CASES[case][0], "peak": done["peak"], "loss": done["loss"]}
        rows.append(row | step_row(done["parts"]))
    by_case = dict(zip(options.systems, rows, strict=True))
    for case, row in by_case.items():
        base = by_case.get(f"{case.split('-')[0]}-adamw")
        if base is not None:
            row["ratio"] = row["step"] / base["step"]  # type: ignore[operator]
    note = (
        "0.96B GPT (16 x 2048, 16 heads, SwiGLU 5632, vocab 32768 untied, 8 x 2048 tokens), bf16\n"
        "compute, fp32 main weights and grads. x AdamW: the step over that of the same wrapping\n"
        "with AdamW. Newton-Schulz: torch's takes five steps of degree 5, ours 5, 9, 5 and 9 by\n"
        "default (nonic), five of 5 as polar_express. A fresh process per row; 3\n"
        "warm-up and 10 timed steps."
    )
    columns = {
        "case": ("case", "s"),
        "step": ("step ms", ".1f"),
        "ratio": ("x AdamW", ".3f"),
        "step_spread": ("spread %", ".1f"),
        "forward": ("forward", ".1f"),
        "backward": ("backward", ".1f"),
        "optimizer": ("optimizer", ".1f"),
        "peak": ("peak GiB", ".2f"),
        "loss": ("last loss", ".4f"),
    }
    where = f"rank 0 of {FAKE_RANKS} (`fake`)" if backend == "fake" else f"1 {backend} rank"
    return Table(title=f"GPT step, {where}" + options.mark, note=note, columns=columns, rows=rows)


def run_step(tiny: bool, cases: Sequence[str]) -> list[Table]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options(device=device, systems=tuple(cases), rounds=1, tiny=tiny)
    return [table(options, "nccl" if device == "cuda" else "gloo")]
