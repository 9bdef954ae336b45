# SPDX-License-Identifier: Apache-2.0
"""gpt_1b with AdamW on a GPU, variant beside variant: what each saves and costs.

    python -m tests.device_variants [name ...]

Every variant runs in a process of its own; the last lines are a table.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from torch import Tensor

import benchmarks.train as bench
from shardwise.models import gpt
from shardwise.models.layers import attend, call_again, rotate
from shardwise.optim import adamw


def only_products() -> None:
    """Gated products are computed again, norms are kept."""
    made = gpt.Block.__init__

    def init(self: gpt.Block, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        self.call = gpt.call_once

    gpt.Block.__init__ = init  # type: ignore[assignment]


def rotations() -> None:
    """Rotated queries and keys are computed again too."""

    def forward(self: gpt.Attention, hidden: Tensor, rotary: Tensor, mask: object = None) -> Tensor:
        def placed(x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
            return rotate(norm(x), rotary)

        q = self.wq(hidden).unflatten(-1, (-1, self.head_width))
        k = self.wk(hidden).unflatten(-1, (-1, self.head_width))
        v = self.wv(hidden).unflatten(-1, (-1, self.head_width))
        q = call_again(partial(placed, norm=self.q_norm), q)
        k = call_again(partial(placed, norm=self.k_norm), k)
        mixed: Tensor = self.wo(attend(q, k, v, None).flatten(2))
        return mixed

    gpt.Attention.forward = forward  # type: ignore[assignment]


def torch_adamw() -> None:
    """torch's fused AdamW, which writes clipped gradients back."""
    adamw._kernel_fits = lambda *pieces: False


def small_chunks() -> None:
    """The loss in chunks of 2^26 logits."""
    gpt.linear_cross_entropy = partial(gpt.linear_cross_entropy, chunk=1 << 26)  # type: ignore[assignment]


# name: (the system, the strategy, recomputation, changes)
VARIANTS: dict[str, tuple[str, str, str, list[Callable[[], None]]]] = {
    "fsdp2": ("fsdp2", "zero3", "none", []),
    "none-torch": ("trainer", "zero3", "none", [torch_adamw]),
    "none": ("trainer", "zero3", "none", []),
    "products": ("trainer", "zero3", "pointwise", [only_products]),
    "pointwise": ("trainer", "zero3", "pointwise", []),
    "chunks": ("trainer", "zero3", "pointwise", [small_chunks]),
    "rotations": ("trainer", "zero3", "pointwise", [rotations]),
    "keep": ("trainer", "zero2", "pointwise", []),
}


def measure(name: str) -> dict[str, object]:
    system, strategy, recompute, changes = VARIANTS[name]
    for change in changes:
        change()
    bench.STEPS = 16
    case = bench.Case(
        row=name, recipe="gpt_1b", optimizer="adamw", system=system, microbatches=1, sequences=8,
        tiny="--tiny" in sys.argv,
    )  # fmt: skip
    config = case.config()
    config = dataclasses.replace(
        config, strategy=strategy, model=dataclasses.replace(config.model, recompute=recompute)
    )
    object.__setattr__(case, "config", lambda: config)
    return bench.measure(case)


def main() -> None:
    if "--one" in sys.argv:
        sys.stdout.write(json.dumps(measure(sys.argv[sys.argv.index("--one") + 1])) + "\n")
        return
    named = [name for name in sys.argv[1:] if not name.startswith("--")] or list(VARIANTS)
    lines = []
    for name in named:
        words = [sys.executable, "-m", "tests.device_variants", "--one", name]
        words += ["--tiny"] if "--tiny" in sys.argv else []
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            lines.append(f"{name:12} ended with {done.returncode}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        seconds, peak = 1e3 * found["seconds"], found["peak"] or 0.0
        compute = 1e3 * (found["compute"] or 0.0)
        lines.append(
            f"{name:12} step {seconds:7.2f} ms  forward, backward {compute:7.2f} ms  peak "
            f"{peak:6.2f} GiB  first step {found['first_step']:5.1f} s  loss {found['loss']:.4f}"
        )
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n".join(["", *lines, ""]))


if __name__ == "__main__":
    main()
