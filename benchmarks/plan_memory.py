# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.plan_memory``: the peak that ``sw.plan`` predicts, and the one of a GPU.

Each case is the trainer's own model and optimizer on one GPU, in a process of its own: two steps as
the trainer takes them, and ``torch.cuda.max_memory_allocated`` over both. Without a GPU only the
predictions are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from benchmarks import report
from benchmarks.measure import GIB
from shardwise.models.gpt import GPT
from shardwise.train.build import build_model, build_optimizer
from shardwise.train.config import TrainConfig
from shardwise.train.fit import named_precision
from shardwise.train.launch import World, join
from shardwise.train.recipes import find_recipe

VOCABULARY = 8192  # of the recipes' tokenizer


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe with microbatches of so many sequences."""

    recipe: str
    sequences: int
    recompute: str
    microbatches: int = 1
    optimizer: str = "muon"
    layers: int | None = None  # of a dry run

    @property
    def title(self) -> str:
        return f"{self.recipe}, {self.optimizer}"

    def config(self) -> TrainConfig:
        made = find_recipe(self.recipe)()
        changes: dict[str, Any] = {"vocab_size": VOCABULARY, "recompute": self.recompute}
        if self.layers is not None:
            changes |= {"num_layers": self.layers, "dim": 64, "num_heads": 2, "num_kv_heads": None}
            changes |= {"hidden_dim": 128, "context": 32}
        return dataclasses.replace(
            made,
            model=dataclasses.replace(made.model, **changes),
            batch=self.sequences * self.microbatches,
            microbatches=self.microbatches,
            optimizer=self.optimizer,
            precision="bf16",
        )


CASES = [
    Case(recipe=recipe, sequences=sequences, recompute=recompute, microbatches=microbatches)
    for recipe, recompute, sequences, microbatches in (
        ("gpt_124m", "none", 32, 1),
        ("gpt_124m", "none", 128, 1),
        ("gpt_124m", "block", 256, 1),
        ("gpt_1b", "none", 8, 1),
        ("gpt_1b", "none", 16, 2),
        ("gpt_1b", "block", 4, 1),  # the optimizer's step is the highest moment
        ("gpt_1b", "block", 32, 2),
        ("moe_1b", "none", 8, 1),
        ("moe_1b", "none", 16, 1),
        ("moe_1b", "block", 32, 2),
    )
] + [Case(recipe="gpt_1b", sequences=16, recompute="none", optimizer="adamw")]
TINY = [Case(recipe="gpt_124m", sequences=2, recompute=r, layers=2) for r in ("none", "block")]


def predict(case: Case) -> Any:
    """The plan of a case, on the meta device."""
    config = case.config()
    with torch.device("meta"):
        model = GPT(config.model)
    return sw.plan(
        model,
        config.mesh_shape(1),
        config.strategy,
        precision=named_precision("bf16", experts=config.model.num_experts > 0),
        optimizer=config.optimizer,
        microbatches=config.microbatches,
        batch=(case.sequences, config.model.context),
    )


def measure(case: Case) -> int:
    """The peak of two steps on this process's GPU."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(environment)
    world, config = join(60.0), case.config()
    model = build_model(config, world)
    optimizer = build_optimizer(config, model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        _step(model, optimizer, config, world)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _step(model: Any, optimizer: Any, config: TrainConfig, world: World) -> None:
    shape = (config.batch, config.model.context)
    tokens = torch.randint(config.model.vocab_size, shape, device=world.device)
    count = config.microbatches
    for number, part in enumerate(tokens.chunk(count)):
        model.set_is_last_backward(number == count - 1)
        (model(part, part) / count).backward()
    optimizer.clip_grad_norm(config.clip)
    optimizer.step()
    optimizer.zero_grad()


def row_of(case: Case, measured: int | None) -> report.Row:
    made = predict(case)
    return {
        "case": case.title,
        "recompute": case.recompute,
        "batch": f"{case.microbatches} x {case.sequences} x {case.config().model.context}",
        "library": (made.peak_total + made.optimizer_bytes) / GIB,
        "activations": made.activations / GIB,
        "predicted": made.total / GIB,
        "measured": None if measured is None else measured / GIB,
        "ratio": None if measured is None else made.total / measured,
    }


def run(cases: Sequence[Case]) -> report.Table:
    rows = []
    for case in cases:
        measured = _in_a_process(case) if torch.cuda.is_available() else None
        rows.append(row_of(case, measured))
        print(json.dumps(rows[-1]), flush=True)
    return report.Table(
        title="Peak of a training step on one GPU",
        note="The trainer's model and optimizer, bf16 weights, fp32 main weights. *library*: its\n"
        "own peak and the optimizer's state; *activations*: what the model (or the optimizer's\n"
        "step) holds at the highest moment; *predicted*: `sw.plan(..., batch=...).total`;\n"
        "*measured*: `torch.cuda.max_memory_allocated` over two steps.",
        columns={
            "case": ("recipe", ""),
            "recompute": ("recompute", ""),
            "batch": ("microbatches x sequences x tokens", ""),
            "library": ("library GiB", ".2f"),
            "activations": ("activations GiB", ".2f"),
            "predicted": ("predicted GiB", ".2f"),
            "measured": ("measured GiB", ".2f"),
            "ratio": ("predicted / measured", ".4f"),
        },
        rows=rows,
    )


def _in_a_process(case: Case) -> int | None:
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--case"]
    done = subprocess.run(
        [*command, json.dumps(dataclasses.asdict(case))], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        print(f"{case} ended with {done.returncode}", file=sys.stderr)
        return None
    return int(done.stdout.splitlines()[-1])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_memory", description=__doc__)
    parser.add_argument("--case", help="measure one, given as JSON, and print its bytes")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--only", default="", help="cases whose recipe begins so")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    asked = parser.parse_args(words)
    if asked.case is not None:
        print(measure(Case(**json.loads(asked.case))))
        return
    cases = [case for case in (TINY if asked.tiny else CASES) if case.recipe.startswith(asked.only)]
    facts = report.circumstances(list(sys.argv[1:] if words is None else words), "plan_memory")
    report.publish([run(cases)], facts, "plan-memory", asked.out, tiny=asked.tiny)


if __name__ == "__main__":
    main()
