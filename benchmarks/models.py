# SPDX-License-Identifier: Apache-2.0
"""The two models under test. They know nothing of sharding: every system wraps the same module.

Both carry ``blocks``, the units that are gathered and released together, and both compute their
loss with :func:`token_loss` or :func:`vector_loss`, outside of what is wrapped, so that logits and
their fp32 copy cost every system the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The 0.96B GPT of the peers table; :meth:`tiny` is the same code at a size for a dry run."""

    num_layers: int = 16
    width: int = 2048
    num_heads: int = 16
    hidden: int = 5632
    vocab: int = 32768
    batch: int = 8
    length: int = 2048

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} over {self.num_heads} heads: rotary embedding turns pairs, so "
                f"the width of a head must be even; choose a multiple of {2 * self.num_heads}"
            )

    @classmethod
    def tiny(cls) -> GPTConfig:
        return cls(num_layers=2, width=64, num_heads=2, hidden=160, vocab=256, batch=2, length=32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of a head by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        half = config.width // config.num_heads // 2
        frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(config.length, dtype=torch.float32)[:, None] * frequency
        # Buffers of each block (1 MB of fp32), not an argument passed from block to block: wrappers
        # cast a block's floating inputs, once per block, and that cost would not be the model's.
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (  # each (batch, head, length, 128)
            project(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        cos, sin = self.cos[:length].to(query.dtype), self.sin[:length].to(query.dtype)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return cast(Tensor, self.out(mixed))


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return sw.swiglu_mlp(x, self.gate, self.up, self.down)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Decoder with RMSNorm, rotary positions, causal SDPA and SwiGLU; embeddings are untied."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


class Feedforward(nn.Module):
    """``num_pairs`` times ``x + down(relu(up(x)))``: two matrices and two biases each."""

    def __init__(self, width: int, num_pairs: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(num_pairs))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(num_pairs))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(functional.relu(up(x)))
        return x


class MLP(nn.Module):
    """``num_blocks`` feedforward blocks; all parameters are in blocks, so the root owns none."""

    def __init__(self, width: int, num_blocks: int = 8, num_pairs: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward(width, num_pairs) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gpt_and_tokens(config: GPTConfig, device: torch.device) -> tuple[GPT, Tensor, Tensor]:
    """The same model and batch in every process: (model, inputs, targets)."""
    torch.manual_seed(0)
    with device:
        model = GPT(config)
        tokens = torch.randint(config.vocab, (config.batch, config.length + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over fp32 logits, whatever dtype the system computes them in."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def vector_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)
