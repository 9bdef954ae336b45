# SPDX-License-Identifier: Apache-2.0
"""Whether a run repeats itself bit for bit on a GPU, and a killed one after its resume:

    python -m tests.device_resume [optimizer ...]

With ``--deterministic`` and without, in a process each. A line tells the first step that differs,
and which of its gradients do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.train import join_alone, noise
from shardwise.models.gpt import GPTConfig
from shardwise.train.config import TrainConfig
from shardwise.train.launch import World
from shardwise.train.loop import CHECKPOINTS, Trainer

STEPS, SAVED, KILLED = 16, 8, 11
SMALL = GPTConfig(dim=128, num_layers=2, num_heads=2, context=64)
LARGE = GPTConfig(dim=768, num_layers=4, num_heads=6, num_kv_heads=2, context=512, tied=True)


class KilledError(Exception):
    pass


def checksum(tensor: Tensor) -> Tensor:
    """A number that any changed bit changes, but for changes that cancel each other."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach().contiguous().view(torch.int32).long().sum()


class Watched:
    """A run whose gradients are noted, step by step."""

    def __init__(self, config: TrainConfig, world: World, folder: Path, killed_at: int = 0) -> None:
        saved = sorted((folder / CHECKPOINTS).glob("*")) if folder.exists() else []
        self.trainer = Trainer(config, world, folder, resume=saved[-1] if saved else None)
        self.first, self.killed_at = self.trainer.step, killed_at
        self.seen: dict[int, dict[str, Tensor]] = {}
        optimizer = self.trainer.parts.optimizer
        self.clip = optimizer.clip_grad_norm
        optimizer.clip_grad_norm = self.note  # type: ignore[method-assign]
        try:
            self.trainer.run()
            self.seen[STEPS + 1] = {name: checksum(p) for name, p in self.parameters()}
        except KilledError:
            self.trainer.events.close()

    def parameters(self) -> list[tuple[str, Tensor]]:
        optimizer = self.trainer.parts.optimizer
        every = [p for group in optimizer.param_groups for p in group["params"]]
        return [(optimizer._name(parameter), parameter) for parameter in every]

    def note(self, *args: Any, **options: Any) -> Any:
        step = self.trainer.step + 1
        if step == self.killed_at:
            self.trainer._finish_saving()
            raise KilledError
        grads = ((name, p.grad) for name, p in self.parameters())
        self.seen[step] = {name: checksum(grad) for name, grad in grads if grad is not None}
        return self.clip(*args, **options)


def apart(one: Watched, other: Watched) -> str:
    steps = sorted(one.seen.keys() & other.seen.keys())
    for step in steps:
        mine, theirs = one.seen[step], other.seen[step]
        names = [name for name in mine if int(mine[name]) != int(theirs[name])]
        if names:
            what = "weights" if step > STEPS else "gradients"
            return f"{what} of step {step} differ, {len(names)} of {len(mine)}: {', '.join(names)}"
    return f"equal bit for bit, steps {steps[0]} to {STEPS} and the weights after them"


def compare(deterministic: bool, optimizer: str, world: World) -> bool:
    gpu = world.device.type == "cuda"
    config = TrainConfig(
        model=LARGE if gpu else SMALL, data=noise(4096), tokenizer="bytes", steps=STEPS,
        batch=32 if gpu else 4, microbatches=2, eval_every=0, save_every=SAVED, sample=0,
        profile_step=0, keep=2, deterministic=deterministic, optimizer=optimizer,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        first = Watched(config, world, folder / "first")
        again = Watched(config, world, folder / "again")
        Watched(config, world, folder / "killed", KILLED)
        resumed = Watched(config, world, folder / "killed")
    assert (resumed.first, len(first.seen)) == (SAVED, STEPS + 1)
    title = f"{optimizer}, {'deterministic' if deterministic else 'as it is'}"
    found = {"again": apart(first, again), "resumed": apart(first, resumed)}
    for what, line in found.items():
        print(f"{title}, {what}: {line}", flush=True)
    return all(line.startswith("equal") for line in found.values())


def main(words: list[str]) -> int:
    if words[:1] in (["--as-it-is"], ["--deterministic"]):
        world = join_alone()
        fine = [compare(words[0] == "--deterministic", name, world) for name in words[1:]]
        dist.destroy_process_group()
        return 0 if all(fine) or words[0] == "--as-it-is" else 1
    chosen, codes = words or ["muon"], []
    for mode in ("--deterministic", "--as-it-is"):
        command = [sys.executable, "-m", "tests.device_resume", mode, *chosen]
        codes.append(subprocess.run(command, timeout=150).returncode)
    print("a run with --deterministic " + ("repeats itself" if not any(codes) else "FAILED"))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
