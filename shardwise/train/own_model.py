# SPDX-License-Identifier: Apache-2.0
"""The model of a run: the GPT, a module of the user, or a model of transformers; and LoRA.

    module=None                GPT(config.model)
    module="my.py:build"       the ``nn.Module`` that ``build(config)`` returns, from tokens [B, T]
                               to logits [B, T, V] (or to an object with ``logits``)
    module="hf:FOLDER"         the causal language model that FOLDER/config.json describes

The last two use only the vocabulary and the context of ``config.model``. Each rank builds them
whole, from the seed of the run, before they are sharded. The names of their parameters stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.gpt import GPT
from shardwise.models.loss import IGNORED
from shardwise.train.codecs import require
from shardwise.train.config import TrainConfig
from shardwise.train.recipes import named_function

HF = "hf:"


class Scored:
    """Makes ``model(tokens, targets)`` return the loss, as the loop calls it.

    This is mixed into the class of the module, so that the names of its parameters stay.
    """

    auxiliary: Tensor | None = None
    document_end: int | None = None
    context: int

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        output: Any = super().forward(tokens)  # type: ignore[misc]
        logits: Any = getattr(output, "logits", output)
        logits = logits[0] if isinstance(logits, tuple) else logits
        if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape:
            raise TypeError(
                f"{type(self).__name__} returned {_shape(logits)} for tokens {list(tokens.shape)}: "
                f"it must return logits [sequences, tokens, vocabulary]"
            )
        if targets is None:
            return logits
        rows, answers = logits.flatten(0, 1).float(), targets.flatten()
        total = F.cross_entropy(rows, answers, ignore_index=IGNORED, reduction="sum")
        return total / (answers != IGNORED).sum().clamp(min=1)


def _shape(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def make_model(config: TrainConfig) -> nn.Module:
    """The model on the default device. A GPT on the meta device has no values; other modules get
    their values while they are built."""
    if config.module is None:
        model: nn.Module = GPT(config.model)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = _of_transformers(config) if config.module.startswith(HF) else _of_user(config)
        kind = type(model)
        model.__class__ = type(kind.__name__, (Scored, kind), {"__module__": kind.__module__})
        model.context = config.model.context  # type: ignore[assignment]
        model.train()  # transformers returns models with weights in eval mode
    if config.lora_rank:
        add_lora(model, config.lora_rank, config.lora_alpha)
    return model


def _of_user(config: TrainConfig) -> nn.Module:
    assert config.module is not None
    model = named_function(config.module, "module", "config")(config)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"module={config.module!r} returned a {type(model).__name__}; it must return a "
            f"torch.nn.Module"
        )
    return model


def _of_transformers(config: TrainConfig) -> nn.Module:
    assert config.module is not None
    package = require("transformers", "hf")
    folder = config.module.removeprefix(HF)
    try:
        hf_config = package.AutoConfig.from_pretrained(folder)
        hf_config.use_cache = False  # training does not use cached keys and values
        if config.init_from is not None and torch.get_default_device().type != "meta":
            model: nn.Module = package.AutoModelForCausalLM.from_pretrained(
                config.init_from, config=hf_config, dtype=torch.float32
            )
        else:
            hf_config.vocab_size = config.model.vocab_size
            model = package.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"module={config.module!r}: transformers builds no causal language model from it "
            f"({' '.join(str(error).split())}): give a folder with the config.json of such a model"
        ) from error
    return model


def flops_per_token(config: TrainConfig, parameters: Iterable[Tensor] = ()) -> float:
    """FLOPs of forward and backward for a token. For a module of the user, 6 per parameter, or 4
    for a frozen parameter, which has no gradient."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
    trained = sum(size for size, requires_grad in sizes if requires_grad)
    if config.module is not None:
        frozen = sum(size for size, requires_grad in sizes if not requires_grad)
        return 6.0 * trained + 4.0 * frozen
    flops: float = config.model.flops_per_token()
    if config.lora_rank:
        # Subtract the gradients of the frozen weights, a third of the FLOPs without attention (-1).
        flops += 6 * trained - config.model.flops_per_token(-1) / 3
    return flops


# ------------------------------------------------------------------------------ LoRA


class LoRALinear(nn.Linear):
    """A frozen linear and a trained product of low rank: ``x W' + scale (x A') B'``."""

    lora_a: nn.Parameter  # [rank, in]
    lora_b: nn.Parameter  # [out, rank]
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + self.lora_scale * low


def add_lora(model: nn.Module, rank: int, alpha: float) -> None:
    """Freeze a model; add a product of this rank, with zeros, to every linear of its blocks."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    linears = [module for blocks in lists for module in blocks.modules()]
    linears = [module for module in linears if type(module) is nn.Linear]
    if not linears:
        raise ValueError(
            f"lora_rank={rank}: no block of this {type(model).__name__} holds an nn.Linear"
        )
    for linear in linears:
        linear.__class__ = LoRALinear
        assert isinstance(linear, LoRALinear)
        weight = linear.weight
        linear.lora_a = nn.Parameter(weight.new_zeros(rank, linear.in_features))
        linear.lora_b = nn.Parameter(weight.new_zeros(linear.out_features, rank))
        linear.lora_scale = alpha / rank


def init_lora(model: nn.Module, seed: int) -> None:
    """Draw A and set B to zero: at first the model computes the same as the frozen model."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_a"):
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]), generator=generator)
        elif name.endswith("lora_b"):
            nn.init.zeros_(parameter)
