# SPDX-License-Identifier: Apache-2.0
"""The trainer on a GPU: the loss in chunks, and a few steps of each recipe, compiled and not.

    python -m tests.device_train [recipe ...] [--steps 12] [--json FILE]

Every run takes its microbatches by itself; a line tells its speed, its peak and its first step.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.models.loss import linear_cross_entropy, softmax_and_gradient
from shardwise.train.loop import Trainer
from shardwise.train.recipes import load_recipe
from shardwise.train.world import World, join


def check_loss() -> str:
    """bf16 chunks against whole logits."""
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(4096, 512, device="cuda", generator=generator).bfloat16()
    head = (torch.randn(8192, 512, device="cuda", generator=generator) / 23).bfloat16()
    targets = torch.randint(0, 8192, (4096,), device="cuda", generator=generator)
    targets[:100] = -100
    found = []
    compiled = torch.compile(softmax_and_gradient, dynamic=False)
    for chunk, softmax in ((1 << 40, None), (1 << 23, None), (1 << 23, compiled)):
        inputs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        loss = linear_cross_entropy(*inputs, targets, chunk=chunk, softmax=softmax)
        found.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    errors = []
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            errors.append(float((one - two).float().norm() / one.float().norm()))
    assert max(errors) < 1e-2 and errors[0] < 1e-5, errors
    return f"loss in chunks: {', '.join(f'{error:.1e}' for error in errors)}"


class Kept:
    """Keeps the events of a run."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def log(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def run(recipe: str, world: World, steps: int, **changes: Any) -> dict[str, Any]:
    config = dataclasses.replace(
        load_recipe(recipe), data="random:50304", tokenizer="bytes", steps=steps, eval_every=0,
        save_every=10**6, sample=0, profile_step=0, **changes,
    )  # fmt: skip
    kept = Kept()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, world, Path(folder), sinks=[kept])
        built = time.perf_counter() - began
        trainer.save = lambda: None  # type: ignore[method-assign]
        trainer.run()
    times = [event["seconds"] for event in kept.events if event["kind"] == "step"]
    later = statistics.median(times[3:])
    last = [event for event in kept.events if event["kind"] == "step"][-1]
    made = trainer.config
    tokens = made.batch * made.model.context
    return {
        "recipe": recipe,
        "compile": made.compile,
        "microbatches": made.microbatches,
        "recompute": made.model.recompute,
        "tokens_per_second": round(tokens / later),
        "mfu": round(trainer.speed.ideal / later, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "build_s": round(built, 1),
        "first_steps_s": [round(one, 1) for one in times[:3]],
        "loss": last["loss"],
    }


def main() -> None:
    recipes = [name for name in sys.argv[1:] if not name.startswith("--")] or ["gpt_124m"]
    world = join(60.0)
    print(check_loss(), flush=True)
    found = []
    for recipe in recipes:
        name, _, choice = recipe.partition(":")
        found.append(run(name, world, 12, compile=choice or "auto", batch=256))
        print(json.dumps(found[-1]), flush=True)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
