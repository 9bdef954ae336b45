# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.train``: the trainer on one GPU, beside a loop in torch alone.

Each system of each row runs in a process of its own: the trainer as a user starts it (data, clip,
events), and a tight loop over the same model (the peer). *bare* is the same compiled model without
sharding and optimizer, forward and backward alone, and stands beside the trainer's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks import report
from benchmarks.measure import GIB, device_use
from benchmarks.systems import BF16_COMPUTE, SYSTEMS
from shardwise.models.gpt import GPT
from shardwise.moe import FullPrecision, GroupedMLP, MixtureOfExperts
from shardwise.optim.optimizers import Muon
from shardwise.optim.routing import routes_of
from shardwise.train.config import TrainConfig
from shardwise.train.launch import World, join
from shardwise.train.loop import Trainer
from shardwise.train.recipes import load_recipe
from shardwise.train.tokens import write_tokens

GEMM = 803e12  # FLOP/s of a large bf16 product on an H200, as measured
WARMUPS, STEPS = 4, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe with its microbatches, and who runs it."""

    row: str
    recipe: str
    optimizer: str
    system: str  # trainer, fsdp2, zero3, loop, bare
    microbatches: int
    sequences: int  # of a microbatch
    tiny: bool = False

    def config(self) -> TrainConfig:
        made = load_recipe(self.recipe)
        model: dict[str, Any] = {"recompute": "none", "vocab_size": 8192}
        if self.tiny:
            model |= {"num_layers": 2, "dim": 64, "num_heads": 2, "num_kv_heads": None}
            model |= {"hidden_dim": 128, "context": 32, "vocab_size": 97}
        return dataclasses.replace(
            made,
            model=dataclasses.replace(made.model, **model),
            data=noise(model["vocab_size"]),
            tokenizer="bytes",
            batch=self.sequences * self.microbatches,
            microbatches=self.microbatches,
            optimizer=self.optimizer,
            precision="bf16",
            steps=WARMUPS + STEPS,
            eval_every=0,
            save_every=10**6,
            sample=0,
            profile_step=0,
        )


def cases(*, tiny: bool) -> list[Case]:
    """Every row of the table with its peers."""
    listed = (
        ("gpt_1b adamw", "gpt_1b", "adamw", ("trainer", "fsdp2", "zero3", "bare"), 1, 8),
        ("gpt_1b muon", "gpt_1b", "muon", ("trainer", "fsdp2"), 1, 8),
        ("gpt_124m muon", "gpt_124m", "muon", ("trainer", "loop", "bare"), 4, 64),
        ("moe_1b muon", "moe_1b", "muon", ("trainer", "loop"), 2, 16),
    )
    return [
        Case(row=row, recipe=recipe, optimizer=optimizer, system=system, microbatches=count,
             sequences=sequences if not tiny else 2, tiny=tiny)
        for row, recipe, optimizer, systems, count, sequences in listed
        for system in systems
    ]  # fmt: skip


# ------------------------------------------------------------------------------ the systems


def noise(vocab_size: int) -> str:
    """The path of a folder of random numbers, to measure speed with."""
    path = Path(tempfile.gettempdir()) / f"shardwise-noise-{vocab_size}"
    if not path.is_dir():
        tokens = np.random.default_rng(0).integers(0, vocab_size, 1 << 22, dtype=np.uint32)
        write_tokens(path, tokens, vocab_size)
    return str(path)


def join_alone() -> World:
    """The world of this process alone, which no launcher started."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    return join(60.0)


def measure(case: Case) -> dict[str, Any]:
    """The median step of one system in this process, its peak and its first step."""
    world, config = join_alone(), case.config()
    began = time.perf_counter()
    step, compute = (_trainer if case.system == "trainer" else _loop)(case, config, world)
    cuda = world.device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None

    def timed(function: Callable[[], Any]) -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            function()
        wait()
        return (time.perf_counter() - started) / STEPS

    for number in range(WARMUPS):
        loss = step()
        wait()
        if number == 0:
            first = time.perf_counter() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(step)
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else None
    computing = timed(compute) if compute else None
    # The last of all: torch's profiler slows the host's launches, and does so when it is off again.
    use = device_use(step) if cuda and case.system == "trainer" else {}
    return {
        "seconds": seconds,
        "first_step": first,
        "peak": peak,
        "idle": use.get("idle"),
        "kernels": use.get("kernels"),
        "loss": float(loss),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "flops": config.model.flops_per_token() * config.batch * config.model.context,
        "compute": computing,
    }


class _Losses:
    """Keeps the last loss of a run."""

    value = 0.0

    def log(self, event: dict[str, Any]) -> None:
        self.value = event.get("loss", self.value)

    def close(self) -> None:
        pass


Step = Callable[[], Any]  # returns the loss


def _trainer(case: Case, config: TrainConfig, world: World) -> tuple[Step, Step]:
    """A step, and its forward and backward alone."""
    from shardwise.train.launch import Guard

    losses = _Losses()
    folder = tempfile.mkdtemp()
    trainer = Trainer(config, world, Path(folder), sinks=[losses])
    guard = Guard()

    def step() -> float:
        trainer._train_step(guard)
        return losses.value

    def compute() -> None:
        trainer._forward_backward()
        trainer.parts.optimizer.zero_grad()

    return step, compute


def _loop(case: Case, config: TrainConfig, world: World) -> tuple[Step, None]:
    device = world.device
    with torch.device("meta"):
        model = GPT(config.model)
    if case.system == "bare":
        model.to(torch.bfloat16)
    backend = "inductor" if device.type == "cuda" else "eager"  # a dry run
    for block in model.blocks:
        block.compile_forward(dynamic=False, backend=backend)  # type: ignore[operator]
    plain = torch.compile(_plain_loss, dynamic=False, backend=backend)
    wrapped: nn.Module = model
    if case.system in SYSTEMS:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
        wrapped = SYSTEMS[case.system](model, mesh, BF16_COMPUTE)
    model.to_empty(device=device)
    model.init_weights(0)
    _use_grouped_mm(model, backend)
    optimizers = [] if case.system == "bare" else _optimizers(case, config, model)
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch, config.model.context + 1)
    words = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
    pieces = words.chunk(config.num_microbatches)
    autocast = case.system == "loop"  # fp32 weights, as the trainer's main weights

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for number, piece in enumerate(pieces):
            if case.system in SYSTEMS:
                wrapped.set_requires_gradient_sync(number == len(pieces) - 1)  # type: ignore[operator]
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = plain(wrapped(piece[:, :-1]), piece[:, 1:]) / len(pieces)
            loss.backward()
            total += loss.detach()
        if optimizers:
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip, foreach=True)
            assert norm is not None
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        return total

    return step, None


def _plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PeerExperts(nn.Module):
    """What one writes with torch alone, over the weights of ``mlp``: fp32 weights, used in the
    dtype of the activations, as autocast leaves grouped_mm alone."""

    def __init__(self, mlp: GroupedMLP, activate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w1, self.w2 = mlp.fc1.weight, mlp.fc2.weight
        self.activate = activate

    def forward(
        self, x: Tensor, ends: Tensor, p: FullPrecision, *, delay: bool | None = None
    ) -> Tensor:
        x = x.bfloat16()
        z = F.grouped_mm(x, self.w1.to(x.dtype).transpose(-2, -1), offs=ends)
        h = self.activate(z, p.value, self.w2.shape[-1])
        return F.grouped_mm(h, self.w2.to(x.dtype).transpose(-2, -1), offs=ends)


def _use_grouped_mm(model: GPT, backend: str) -> None:
    def activate(z: Tensor, p: Tensor, width: int) -> Tensor:
        gate, up = z[:, :width], z[:, width:]
        return (F.silu(gate.float()) * up.float() * p.unsqueeze(1)).to(z.dtype)

    compiled = torch.compile(activate, dynamic=True, backend=backend)
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.experts = PeerExperts(layer.experts, compiled)  # type: ignore[assignment]


def _optimizers(case: Case, config: TrainConfig, model: nn.Module) -> list[Any]:
    """torch's own where there is one; without wrapping our Muon, so that only the loop differs."""
    matrices, rest = [], []
    for one in routes_of(model):
        taken = case.optimizer == "muon" and one.route.kind == "matrix"
        (matrices if taken else rest).append(one.parameter)
    made: list[Any] = [torch.optim.AdamW(rest, lr=config.lr, betas=(0.9, 0.95), fused=True)]
    if matrices and case.system == "fsdp2":
        made.append(torch.optim.Muon(matrices, lr=config.matrix_lr))
    elif matrices:
        made.append(Muon(matrices, lr=config.matrix_lr))
    return made


# ------------------------------------------------------------------------------ the table


def run(listed: Sequence[Case]) -> report.Table:
    rows: list[report.Row] = []
    for case in listed:
        found = _in_a_process(case)
        if found is None:
            rows.append({"row": case.row, "name": case.system})
            continue
        config = case.config()
        seconds = found["seconds"]
        rows.append(
            {
                "row": case.row,
                "name": case.system,
                "batch": f"{case.microbatches} x {case.sequences} x {config.model.context}",
                "step": 1e3 * seconds,
                "compute": found["compute"] and 1e3 * found["compute"],
                "tokens": config.batch * config.model.context / seconds,
                "gemm": found["flops"] / seconds / GEMM,
                "peak": found["peak"],
                "idle": found["idle"],
                "first": found["first_step"],
                "loss": found["loss"],
                "graphs": f"{found['graphs']} / {found['breaks']}",
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    for row in rows:
        ours = next(r for r in rows if r["row"] == row["row"])
        if row is not ours and row.get("step") and ours.get("step"):
            beside = "compute" if row["name"] == "bare" else "step"
            row["speed"] = row["step"] / ours[beside]  # type: ignore[operator]
            row["memory"] = ours["peak"] and row["peak"] and ours["peak"] / row["peak"]  # type: ignore[operator]
    return table_of(rows)


def table_of(rows: Sequence[report.Row]) -> report.Table:
    return report.Table(
        title="The trainer on one GPU",
        note="bf16 compute, fp32 main weights, 8,192 words, compiled blocks, nothing recomputed.\n"
        "*trainer*: as a user starts it, head and loss in chunks. *fsdp2*: torch FSDP2,\n"
        "torch.compile, fused AdamW (and `torch.optim.Muon`), plain compiled loss, a tight loop.\n"
        "*zero3*: that loop with `sw.fully_shard`. *loop*: no wrapping, autocast, `sw.Muon`;\n"
        "experts by `F.grouped_mm`. *bare*: bf16 weights, forward and backward alone.\n"
        "*trainer /*: the trainer's tokens per second over this system's, and its peak over this\n"
        "system's; beside *bare*, those of its forward and backward. *graphs / breaks*: of\n"
        "torch.compile, in the whole run. *idle*: the share of 3 profiled steps without a kernel.",
        columns={
            "row": ("row", ""),
            "name": ("system", ""),
            "batch": ("microbatches x sequences x tokens", ""),
            "step": ("step ms", ".1f"),
            "compute": ("forward, backward ms", ".1f"),
            "tokens": ("tokens/s", ",.0f"),
            "gemm": ("of 803 TFLOP/s", ".3f"),
            "peak": ("peak GiB", ".2f"),
            "idle": ("idle %", ".1f"),
            "speed": ("trainer / speed", ".3f"),
            "memory": ("trainer / peak", ".3f"),
            "first": ("to first step s", ".1f"),
            "loss": ("loss", ".4f"),
            "graphs": ("graphs / breaks", ""),
        },
        rows=rows,
    )


def _in_a_process(case: Case) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.train", "--case"]
    words = [*command, json.dumps(dataclasses.asdict(case))]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{case} ended with {done.returncode}", file=sys.stderr, flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("--case", help="measure one, given as JSON, and print its figures")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--only", default="", help="rows that begin so; several by commas")
    parser.add_argument("--without", default="", help="systems to leave out, by commas")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    asked = parser.parse_args(words)
    if asked.case is not None:
        print(json.dumps(measure(Case(**json.loads(asked.case)))))
        return
    facts = report.circumstances(list(sys.argv[1:] if words is None else words), "train")
    begins, without = tuple(asked.only.split(",")), asked.without.split(",")
    wanted = [case for case in cases(tiny=asked.tiny) if case.row.startswith(begins)]
    table = run([case for case in wanted if case.system not in without])
    report.publish([table], facts, "train", asked.out, tiny=asked.tiny)


if __name__ == "__main__":
    main()
