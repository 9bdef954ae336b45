# SPDX-License-Identifier: Apache-2.0
"""Training steps of a model with experts, beside the same model on ``F.grouped_mm``.

One GPT, bf16, AdamW; router, dispatch and everything else are the same objects' code. Only the
experts differ: ours, or two grouped products with a compiled activation between, by autograd.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import report
from benchmarks.measure import GIB, StepClock
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.moe import FullPrecision, GroupedMLP, MixtureOfExperts
from shardwise.train.recipes import moe_1b

COLUMNS = {
    "name": ("experts", ""),
    "forward": ("forward ms", ".1f"),
    "backward": ("backward ms", ".1f"),
    "step": ("whole step ms", ".1f"),
    "speed": ("speed", ".2f"),
    "peak": ("peak GiB", ".2f"),
    "loss": ("loss after", ".4f"),
}
OURS, PEER = "shardwise", "F.grouped_mm + compiled activation"
Activate = Callable[[Tensor, Tensor, int], Tensor]


class PeerExperts(nn.Module):
    """What one writes with torch alone, over the weights of ``mlp``."""

    def __init__(self, mlp: GroupedMLP, activate: Activate) -> None:
        super().__init__()
        self.w1, self.w2 = mlp.fc1.weight, mlp.fc2.weight
        self.activate = activate

    def forward(
        self, x: Tensor, ends: Tensor, p: FullPrecision, *, delay: bool | None = None
    ) -> Tensor:
        z = F.grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)
        h = self.activate(z, p.value, self.w2.shape[-1])
        return F.grouped_mm(h, self.w2.transpose(-2, -1), offs=ends)


def build(config: GPTConfig, device: str, dtype: torch.dtype, activate: Activate | None) -> GPT:
    with torch.device("meta"):
        model = GPT(config).to(dtype)
    model.to_empty(device=device)
    model.init_weights(0)
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts) and activate is not None:
            layer.experts = PeerExperts(layer.experts, activate)  # type: ignore[assignment]
    return model


def run(activate: Activate, rounds: int, device: str, *, tiny: bool) -> report.Table:
    config = dataclasses.replace(moe_1b().model, recompute="none", vocab_size=8192)
    batch, dtype = 8, torch.bfloat16
    if tiny:
        config = dataclasses.replace(
            config, dim=64, num_layers=2, num_heads=2, num_kv_heads=2, hidden_dim=64, context=32,
            num_experts=4, experts_per_token=2, expert_hidden_dim=32, shared_hidden_dim=32,
            vocab_size=97,
        )  # fmt: skip
        batch, dtype = 2, torch.float32
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, config.vocab_size, (batch, config.context + 1), generator=generator)
    tokens, targets = words[:, :-1].to(device), words[:, 1:].to(device)
    systems: dict[str, Any] = {}
    for name, used in ((PEER, activate), (OURS, None)):
        model = build(config, device, dtype, used)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
        systems[name] = model, adamw, StepClock(torch.device(device))
    rows: dict[str, report.Row] = {name: {"name": name} for name in systems}

    def once(name: str) -> None:
        model, adamw, clock = systems[name]
        clock.start()
        loss = model(tokens, targets)
        clock.mark()
        loss.backward()
        clock.mark()
        adamw.step()
        adamw.zero_grad()
        clock.mark()
        rows[name]["loss"] = loss.detach()

    for name in systems:
        for _ in range(3):
            once(name)
        if device == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            once(name)
            rows[name]["peak"] = (torch.cuda.max_memory_allocated() - before) / GIB
    skipped = {name: len(systems[name][2].intervals()) for name in systems}
    for _ in range(rounds):  # taking turns
        for name in systems:
            once(name)
    for name, (_, _, clock) in systems.items():
        intervals = clock.intervals()[skipped[name] :]
        forward, backward, _ = map(statistics.median, zip(*intervals, strict=True))
        whole = statistics.median(map(sum, intervals))
        rows[name] |= {"forward": forward, "backward": backward, "step": whole}
        rows[name]["loss"] = float(rows[name]["loss"])
    for row in rows.values():
        row["speed"] = rows[PEER]["step"] / row["step"]
    layers = config.num_layers - config.num_dense_layers
    note = (
        f"{config.num_parameters / 1e6:.0f}M parameters ({config.num_active_parameters / 1e6:.0f}M "
        f"for a token), {layers} layers of {config.num_experts} experts, {tokens.numel()} tokens, "
        f"{dtype}. Peak: above parameters and optimizer state. Speed: the peer's time over ours."
    )
    title = "A training step of a model with experts"
    return report.Table(title=title, note=note, columns=COLUMNS, rows=list(rows.values()))
