# SPDX-License-Identifier: Apache-2.0
"""A model whose embedding is stored in MXFP8, and the same with one that is quantised at use."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.precision.fp8_tensor import Format, FP8Tensor
from tests.parity.mxfp8_helpers import Layer, QuantisedAtUse

WIDTH, WORDS, DEPTH = 64, 96, 2
NAMED = ("*", "embedding.weight")
STORED = {
    *(f"layers.{number}.{name}.weight" for number in range(DEPTH) for name in ("up", "down")),
    "embedding.weight",
}


class StraightThrough(torch.autograd.Function):
    """The weight as MXFP8 has it, whole; its gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, format: Format) -> Tensor:
        return FP8Tensor.encode(weight, format).dequantise()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class LookedUpAtUse(nn.Embedding):
    """fp8 off: the weight is whole and bf16, and is encoded where its rows are looked up."""

    format: Format = "mxfp8_rows"

    def forward(self, input: Tensor) -> Tensor:
        values = StraightThrough.apply(self.weight, self.format)
        return F.embedding(
            input, values, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )


class Words(nn.Module):
    """An embedding, layers and a head that is the embedding again where they are tied."""

    def __init__(self, on: bool, format: Format, tied: bool, **options: Any) -> None:
        super().__init__()
        linear = nn.Linear if on else type("Off", (QuantisedAtUse,), {"format": format})
        lookup = {"format": format if tied else "mxfp8_rows"}
        embedding = nn.Embedding if on else type("Off", (LookedUpAtUse,), lookup)
        self.embedding = embedding(WORDS, WIDTH, **options)
        self.layers = nn.ModuleList(Layer(linear, False) for _ in range(DEPTH))
        self.head = linear(WIDTH, WORDS, bias=False) if tied else nn.Linear(WIDTH, 17)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def make(on: bool, format: Format = "mxfp8_rowcol", tied: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Words(on, format, tied, **options)
    with torch.no_grad():  # as different from row to row as words are
        model.embedding.weight.mul_(torch.logspace(-1.5, 0.5, WORDS)[:, None])
    return model


def precision_of(on: bool, format: Format = "mxfp8_rowcol") -> sw.Precision:
    if not on:
        return sw.Precision(weights="bf16", reduce="fp32")
    return sw.Precision(weights=format, reduce="fp32", include=NAMED)
