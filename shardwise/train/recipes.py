# SPDX-License-Identifier: Apache-2.0
"""Recipes: runs as Python functions. Copy one, change it, and name it on the command line:

shardwise train gpt_124m --data tokens/
shardwise train my_recipes.py:large
shardwise train package.module:large
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

from shardwise.models.gpt_config import GPTConfig
from shardwise.train.config import TrainConfig

Recipe = Callable[[], TrainConfig]


def default() -> TrainConfig:
    """0.9M parameters on the standard library's sources: about 90 s on two cores."""
    # Joined: windows of 128 tokens contain few ends of files, and a mask costs a CPU a third more
    # time.
    model = GPTConfig(dim=128, num_layers=4, num_heads=4, context=128)
    return TrainConfig(model=model, documents="joined")


def smoke() -> TrainConfig:
    """A run of a few seconds, to see that everything works."""
    return TrainConfig(
        model=GPTConfig(dim=32, num_layers=2, num_heads=2, context=32),
        steps=20,
        batch=24,  # can be cut evenly over 1, 2, 3, 4, 6, 8 and 12 ranks
        eval_every=10,
        eval_windows=24,
        save_every=10,
        sample=32,
        warmup=2,
    )


def moe_tiny() -> TrainConfig:
    """8 experts, 2 for each token, at about the cost of ``default``."""
    model = GPTConfig(
        dim=128,
        num_layers=4,
        num_heads=4,
        context=128,
        num_experts=8,
        experts_per_token=2,
        num_dense_layers=1,
    )
    return TrainConfig(model=model, steps=200)


def moe_fused() -> TrainConfig:
    """``moe_tiny`` with every switch of the fused grouped MLP; ``--ep 2`` delays gradients, too."""
    tiny = moe_tiny()
    model = dataclasses.replace(
        tiny.model,
        expert_layout="indexed",
        gate_up_block=32,
        expert_biases=True,
        expert_activation="clamped_quick_geglu",
        delay_expert_gradients=True,
    )
    return dataclasses.replace(tiny, model=model)


def _large(model: GPTConfig, **values: Any) -> TrainConfig:
    """A run of days, on more text, with the learning rates of large models."""
    usual: dict[str, Any] = {
        "data": "stdlib+torch",
        "tokenizer": "bpe:8192",
        "batch": 512,
        "steps": 10_000,
        "warmup": 200,
        "lr": 3e-4,
        "matrix_lr": 0.02,
        "weight_decay": 0.01,
        "precision": "bf16",
        "eval_every": 500,
        "eval_windows": 512,
        "save_every": 500,
    }
    return TrainConfig(model=model, **(usual | values))


def moe_1b() -> TrainConfig:
    """1B parameters, 0.2B of them for each token: 64 experts, 6 and a shared one for each token."""
    model = GPTConfig(
        dim=1024,
        num_layers=12,
        num_heads=16,
        num_kv_heads=8,
        hidden_dim=2816,
        context=2048,
        num_experts=64,
        experts_per_token=6,
        expert_hidden_dim=448,
        shared_hidden_dim=896,
        num_dense_layers=1,
        balance_coefficient=0.001,
        z_coefficient=0.001,
        bias_rate=0.001,
        expert_score="sigmoid",
        recompute="auto",
    )
    return _large(model, batch=256)


def gpt_124m() -> TrainConfig:
    """The size of GPT-2 small: half a million tokens a step."""
    model = GPTConfig(dim=768, num_layers=12, num_heads=12, context=1024, tied=True)
    often = {"eval_every": 250, "eval_windows": 1024}
    return _large(model, steps=5000, warmup=100, lr=6e-4, precision="auto", **often)


def gpt_1b() -> TrainConfig:
    """16 x 2048, bf16 on GPUs, blocks recomputed in backward where memory is short."""
    model = GPTConfig(
        dim=2048, num_layers=16, num_heads=16, hidden_dim=5632, context=2048, recompute="auto"
    )
    return _large(model)


_SMALL: list[Recipe] = [default, smoke, moe_tiny, moe_fused]
_LARGE: list[Recipe] = [moe_1b, gpt_124m, gpt_1b]
RECIPES: dict[str, Recipe] = {recipe.__name__: recipe for recipe in [*_SMALL, *_LARGE]}


def find_recipe(name: str) -> Recipe:
    """A recipe of shardwise, or ``file.py:function``, or ``package.module:function``."""
    if name not in RECIPES and ":" not in name:
        raise ValueError(
            f"there is no recipe {name!r}: use one of {', '.join(RECIPES)}, or your own as "
            f"file.py:function or package.module:function"
        )
    return RECIPES[name] if name in RECIPES else named_function(name)


def load_recipe(name: str) -> TrainConfig:
    """The configuration that a recipe returns."""
    config = find_recipe(name)()
    if not isinstance(config, TrainConfig):
        raise ValueError(
            f"recipe {name!r} returned a {type(config).__name__}; it must return a "
            f"shardwise.train.config.TrainConfig"
        )
    return config


def named_function(name: str, *arguments: str) -> Callable[..., Any]:
    """The function ``file.py:function`` or ``package.module:function``. Raises unless it can be
    called with ``arguments`` (names)."""
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            function: Callable[..., Any] = run_path(str(Path(place).expanduser()))[attribute]
        else:
            function = getattr(importlib.import_module(place), attribute)
        inspect.signature(function).bind(*arguments)
    except (ImportError, OSError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name!r} is no function that can be called as {attribute}({', '.join(arguments)}) "
            f"({error}): write file.py:function or package.module:function"
        ) from error
    return function
