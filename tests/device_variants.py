# SPDX-License-Identifier: Apache-2.0
"""gpt_1b with AdamW on a GPU, variant beside variant: what each saves and costs.

    python -m tests.device_variants [name ...] [--out FOLDER]

Every variant runs in a process of its own; the last lines are a table. In the folder: the kernels
of each, and the code that torch.compile made for the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

import benchmarks.train as bench
from benchmarks import measure as instruments
from shardwise.models import gpt, layers
from shardwise.models.layers import Mask
from shardwise.train import build


def only_products() -> None:
    """Gated products are computed again, norms are kept."""
    gpt.norm_again = gpt.call_once  # type: ignore[assignment]


def whole_norms() -> None:
    """Norms are computed again with their scales, as until November 2026."""
    gpt.norm_again = layers.call_again  # type: ignore[assignment]


def keys() -> None:
    """In place of the norms before attention, rotated keys are computed again."""

    def forward(
        self: gpt.Attention, hidden: Tensor, rotary: Tensor, mask: Mask | None, held: object
    ) -> Tensor:
        q, k, v = (
            linear(hidden).unflatten(-1, (-1, self.head_width))
            for linear in (self.wq, self.wk, self.wv)
        )
        scale = (k.float().square().mean(-1, keepdim=True) + self.k_norm.eps).rsqrt()
        k = layers.call_again(placed, k, scale, self.k_norm.weight, rotary)
        q = layers.rotate(self.q_norm(q), rotary)
        mixed: Tensor = self.wo(layers.attend(q, k, v, mask).flatten(2))
        return mixed

    def placed(x: Tensor, scale: Tensor, weight: Tensor, rotary: Tensor) -> Tensor:
        return layers.rotate(layers._scaled(x, scale, weight), rotary)

    def attend(
        self: gpt.Block, hidden: Tensor, rotary: Tensor, mask: Mask | None, held: object
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, mask, held)
        return hidden, layers.norm_again(self.feed_forward_norm, hidden)

    gpt.Attention.forward = forward  # type: ignore[assignment]
    gpt.Block.attend = attend  # type: ignore[assignment]


def main_gradients() -> None:
    """Gradients are copied to fp32, as until November 2026."""
    found = build.precision_of
    loop = sys.modules["shardwise.train.loop"]
    for module in (build, loop):
        module.precision_of = lambda *given: replace(found(*given), gradients="main")  # type: ignore


# name: (the system, recomputation, changes)
VARIANTS: dict[str, tuple[str, str, list[Callable[[], None]]]] = {
    "fsdp2": ("fsdp2", "none", []),
    "main": ("trainer", "pointwise", [main_gradients]),
    "pointwise": ("trainer", "pointwise", []),
    "products": ("trainer", "pointwise", [only_products]),
    "whole-norms": ("trainer", "pointwise", [whole_norms]),
    "keys": ("trainer", "pointwise", [keys]),
    "none": ("trainer", "none", []),
    "bare": ("bare", "none", []),
}


def measure(name: str, tiny: bool) -> dict[str, object]:
    system, recompute, changes = VARIANTS[name]
    for change in changes:
        change()
    bench.STEPS, instruments.TOP = 16, 50
    case = bench.Case(
        row=name, recipe="gpt_1b", optimizer="adamw", system=system, microbatches=1, sequences=8,
        tiny=tiny,
    )  # fmt: skip
    config = case.config()
    config = replace(config, model=replace(config.model, recompute=recompute))
    object.__setattr__(case, "config", lambda: config)
    return bench.measure(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    if asked.one:
        sys.stdout.write(json.dumps(measure(asked.one, asked.tiny)) + "\n")
        return
    lines, all_found = [], []
    for number, name in enumerate(asked.names):
        words = [sys.executable, "-m", "tests.device_variants", "--one", name]
        words += ["--tiny"] * asked.tiny
        logs = {}
        if asked.out and not number:
            logs = {"TORCH_LOGS": "output_code", "TORCH_LOGS_OUT": f"{asked.out}/code.txt"}
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=os.environ | logs)
        if done.returncode:
            lines.append(f"{name:12} ended with {done.returncode}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        all_found.append({"variant": name} | found)
        if asked.out:
            (asked.out / "variants.json").write_text(json.dumps(all_found, indent=1))
        seconds, peak = 1e3 * found["seconds"], found["peak"] or 0.0
        compute, idle = 1e3 * (found["compute"] or 0.0), found["idle"] or 0.0
        lines.append(
            f"{name:12} step {seconds:7.2f} ms  forward, backward {compute:7.2f} ms  idle "
            f"{idle:.1f} %  peak {peak:6.2f} GiB  first step {found['first_step']:5.1f} s  loss "
            f"{found['loss']!r}"
        )
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n".join(["", *lines, ""]))


if __name__ == "__main__":
    main()
