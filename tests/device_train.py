# SPDX-License-Identifier: Apache-2.0
"""The trainer on a GPU: its parts against their definitions, and a few steps of each recipe,
compiled and not (a recipe's name, and ":off" behind it); "none": no recipe.

    python -m tests.device_train [recipe ...]

Every run takes its microbatches by itself; a line tells its speed, its peak and its first step.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from benchmarks.train import join_alone, noise
from shardwise.kernels import adamw as kernel
from shardwise.models import layers
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.loss import linear_cross_entropy, softmax_and_gradient
from shardwise.moe.router import logits_of
from shardwise.train.launch import World
from shardwise.train.loop import Trainer
from shardwise.train.recipes import load_recipe


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


def check_documents() -> str:
    """FlexAttention over blocks of documents against SDPA with the dense mask, compiled blocks and
    not, forward and backward; another batch compiles nothing anew, and the host never waits."""
    lines = []
    config = GPTConfig(dim=256, num_layers=2, num_heads=4, num_kv_heads=2, context=512)
    for compiled in (False, True):
        model = GPT(config).cuda().bfloat16()
        if compiled:
            model.compile()
        model.document_end = 0
        worst = 0.0
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, 60, (4, 513), generator=generator).cuda()
            torch.cuda.set_sync_debug_mode("error" if seed == 2 else "default")
            with torch._dynamo.config.patch(error_on_recompile=seed == 2):
                found = gradients(model, tokens)
            torch.cuda.set_sync_debug_mode("default")
            with dense_masks(), torch.compiler.set_stance("force_eager"):
                expected = gradients(model, tokens)
            pairs = zip(found, expected, strict=True)
            errors = [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]
            assert max(errors) < 3e-2 and errors[0] < 1e-3, errors
            worst = max(worst, *errors)
        lines.append(f"{'compiled' if compiled else 'eager'} {worst:.1e}")
    return f"documents apart, FlexAttention against a dense mask: {', '.join(lines)}"


def gradients(model: GPT, tokens: Tensor) -> list[Tensor]:
    loss = model(tokens[:, :-1], tokens[:, 1:])
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@contextmanager
def dense_masks() -> Iterator[None]:
    """Masks as a CPU has them."""
    block, layers.BLOCK = layers.BLOCK, 1 << 30
    try:
        yield
    finally:
        layers.BLOCK = block


def check_adamw() -> str:
    """The kernel that clips and steps against torch's fused AdamW; pieces of all lengths, and the
    time of gpt_1b's elements beside torch's."""
    generator = torch.Generator("cuda").manual_seed(1)

    def made(sizes: list[int]) -> list[list[Tensor]]:
        rows = [[torch.rand(n, device="cuda", generator=generator) for n in sizes] for _ in "pgmv"]
        return [*rows, [torch.full((), 3.0, device="cuda") for _ in sizes]]

    clip = torch.tensor([0.25, 0.0], device="cuda")
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}

    def ours(state: list[list[Tensor]]) -> None:
        kernel.step(*state, betas=(0.9, 0.95), clip=clip, **options)

    def theirs(state: list[list[Tensor]]) -> None:
        torch_adamw(
            *state[:4], [], state[4], amsgrad=False, maximize=False, fused=True, beta1=0.9,
            beta2=0.95, grad_scale=1 / clip[0], found_inf=clip[1], **options,
        )  # fmt: skip

    state = made([1, 1000, 4096, 16385, 1 << 20])
    copies = [[one.clone() for one in row] for row in state]
    ours(state)
    theirs(copies)
    for row, other in zip([state[0], *state[2:]], [copies[0], *copies[2:]], strict=True):
        torch.testing.assert_close(row, other, rtol=1e-5, atol=1e-6)
    narrow = [one.bfloat16() for one in state[1]]
    pairs = []
    for grads in (narrow, [one.float() for one in narrow]):  # as computed, and as main gradients
        again = [state[0], grads, *state[2:]]
        again = [[one.clone() for one in row] for row in again]
        ours(again)
        norms = torch._foreach_norm(grads, 2.0, dtype=torch.float64)
        pairs.append([*again[0], *again[2], *again[3], *norms])
    assert all(torch.equal(one, two) for one, two in zip(*pairs, strict=True))
    state = made([4096 * 4096] * 51 + [2048] * 50)
    state[1] = [one.bfloat16() for one in state[1]]
    times = [triton.testing.do_bench(partial(ours, state))]
    state[1] = [one.float() for one in state[1]]
    times += [triton.testing.do_bench(partial(step, state)) for step in (ours, theirs)]
    return (
        f"AdamW and clip, 0.86B elements: {times[1]:.2f} ms, {times[0]:.2f} ms with bf16 gradients "
        f"(the same bits), torch's fused {times[2]:.2f} ms"
    )


def check_logits() -> str:
    """A router's logits by matrix units against fp64."""
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randn(32768, 1024, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(64, 1024, device="cuda", generator=generator) / 32).bfloat16()
    change = torch.randn(32768, 64, device="cuda", generator=generator)
    inputs = [one.requires_grad_() for one in (tokens, weight)]
    logits = logits_of(*inputs)
    found = [logits, *torch.autograd.grad(logits, inputs, change)]
    exact = inputs[0].double() @ inputs[1].double().t()
    expected = [exact, *torch.autograd.grad(exact, inputs, change.double())]
    errors = [
        float((a - b).double().norm() / b.double().norm())
        for a, b in zip(found, expected, strict=True)
    ]
    assert errors[0] < 1e-6 and max(errors) < 4e-3, errors
    return f"router's logits and gradients: {', '.join(f'{error:.1e}' for error in errors)}"


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
        load_recipe(recipe), data=noise(50304), tokenizer="bytes", steps=steps, eval_every=0,
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
    recipes = [name for name in sys.argv[1:] if name != "none"] or ["gpt_124m"]
    recipes = [] if "none" in sys.argv else recipes
    world = join_alone()
    for check in (check_loss, check_adamw, check_logits, check_documents):
        print(check(), flush=True)
    found = []
    for recipe in recipes:
        name, _, choice = recipe.partition(":")
        found.append(run(name, world, 12, compile=choice or "auto", batch=256))
        print(json.dumps(found[-1]), flush=True)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
