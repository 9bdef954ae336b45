# SPDX-License-Identifier: Apache-2.0
"""Build: makes the parts of a run from its configuration, on all ranks together.

The sharding is a few lines of :func:`build_model`. The model itself contains nothing about it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from shardwise.core import comm
from shardwise.kernels import has_triton, missing_compiler
from shardwise.models.gpt import GPT
from shardwise.moe import mixtures_of
from shardwise.optim.elementwise import adamw
from shardwise.optim.functions import ANY
from shardwise.optim.muon import muon
from shardwise.optim.optimizers import ShardedOptimizer, optimizer
from shardwise.optim.rules import Rule
from shardwise.precision.policy import sides_in
from shardwise.shard.formats import precision_report
from shardwise.shard.fully_shard import fully_shard
from shardwise.shard.wrap import wrap_units
from shardwise.train.config import TrainConfig
from shardwise.train.data import Batches, Corpus, HeldOut, Sampler, load_corpus
from shardwise.train.fit import fit, make_model, placements_of, precision_of, with_vocabulary
from shardwise.train.launch import World

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Parts:
    """The parts of a run. ``config`` has the vocabulary size of the data, and values for "auto"."""

    config: TrainConfig
    fitted: dict[str, Any] | None  # what replaced "auto", for a resumed run
    decision: str | None  # a line about it
    corpus: Corpus
    model: nn.Module
    optimizer: ShardedOptimizer
    scheduler: LambdaLR
    sampler: Sampler
    batches: Batches
    held_out: HeldOut


def use_deterministic_algorithms() -> None:
    """Make torch use kernels that always sum in the same order. cuBLAS needs an environment
    variable for this, and torch.compile must not choose kernels by measured time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    from torch._inductor import config

    if hasattr(config, "deterministic"):  # torch 2.9 and later
        config.deterministic = True


def build(config: TrainConfig, world: World, fitted: dict[str, Any] | None = None) -> Parts:
    """All parts; an error on any rank is raised on all ranks. ``fitted``: see :mod:`fit`."""

    def check() -> None:
        config.expert_mesh_shape(world.size, world.num_nodes)
        config.share(world.size)
        check_compiler(config, world)

    world.together(check)
    corpus = read_corpus(config, world)
    config = world.together(lambda: with_vocabulary(config, corpus.info.vocab_size))
    config, fitted, decision = fit(config, world, fitted)
    options: dict[str, int] = {
        "context": config.model.context,
        "rank": world.rank,
        "world_size": world.size,
    }

    def sample() -> tuple[Sampler, HeldOut]:
        share, max_windows = config.share(world.size), config.eval_windows
        return (
            Sampler(corpus, global_batch=config.batch, seed=config.seed, **options),
            HeldOut(corpus, batch_size=share, max_windows=max_windows, **options),
        )

    sampler, held_out = world.together(sample)
    model = build_model(config, world)
    if isinstance(model, GPT):
        model.document_end = world.together(lambda: document_end(config, corpus))
    optimizer = build_optimizer(config, model)
    return Parts(
        config=config,
        fitted=fitted,
        decision=decision,
        corpus=corpus,
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        sampler=sampler,
        batches=Batches(sampler, world.device),
        held_out=held_out,
    )


def document_end(config: TrainConfig, corpus: Corpus) -> int | None:
    """The token that ends a document, if attention does not cross documents; else None."""
    end = corpus.info.end_token
    if config.documents == "apart" and end is None:
        raise ValueError(
            f"documents='apart': the description of {corpus.name!r} has no end_token, so the end "
            f"of a document is unknown: write it into tokens.json"
        )
    return None if config.documents == "joined" else end


def read_corpus(config: TrainConfig, world: World) -> Corpus:
    """The corpus, the same on every rank. One rank of each node reads first, as it may make tokens,
    which the other ranks then read."""

    def read() -> Corpus:
        return load_corpus(config.data, tokenizer=config.tokenizer, eval_data=config.eval_data)

    first = world.together(lambda: read() if world.local_rank == 0 else None)
    corpus = world.together(lambda: read() if first is None else first)
    digests = comm.agree(corpus.sha256, world.axis)
    if len(set(digests)) > 1:
        different = next(rank for rank, other in enumerate(digests) if other != digests[0])
        raise ValueError(
            f"ranks see different data: {config.data!r} has sha256 {digests[0][:16]} on rank 0 and "
            f"{digests[different][:16]} on rank {different}: give all machines the same files (for "
            f"stdlib, the same Python version)"
        )
    return corpus


def build_model(config: TrainConfig, world: World) -> nn.Module:
    """The model, wrapped. No GPU ever holds the whole model: a GPT is wrapped on the meta device,
    and a module of the user, built on the CPU, is moved to the device unit by unit."""
    shape = config.mesh_shape(world.size, world.num_nodes)
    mesh = init_device_mesh(world.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    precision = precision_of(config, world)
    options: dict[str, Any] = {"placements": placements_of(config, world), "precision": precision}
    with torch.device("meta" if config.module is None else "cpu"):
        model = make_model(config)
    meshes = spread_experts(model, config, world)
    if config.compiles(world.device.type):
        model.compile()
    for unit in wrap_units(model):
        if config.module is not None:
            unit.to(world.device)
        inside = meshes if unit is not model and mixtures_of(unit) else None
        fully_shard(unit, mesh=mesh, meshes=inside, **options)
    stored = precision_report(model)
    if precision.format and not stored.stored:
        reasons = dict.fromkeys(stored.kept.values())
        raise ValueError(
            f"precision={config.precision!r}: none of the {len(stored.rows)} parameters can be "
            f"stored in this format ({'; '.join(reasons)}): make dim and hidden_dim "
            f"{sides_in(precision.format)}, or train in bf16"
        )
    if config.module is None:
        model.to_empty(device=world.device)
        model.init_weights(config.seed)  # type: ignore[operator]
    return model


def spread_experts(model: nn.Module, config: TrainConfig, world: World) -> dict[str, Any] | None:
    """Spread the experts over ``ep``. Return the mesh of the ranks that hold the same experts, for
    ``fully_shard``: these ranks shard and reduce the experts."""
    axis = meshes = None
    if config.ep > 1:
        shape = config.expert_mesh_shape(world.size, world.num_nodes)
        names = tuple(shape)
        whole = init_device_mesh(world.device.type, tuple(shape.values()), mesh_dim_names=names)
        axis = comm.as_axis(whole.get_group("ep"), "ep")
        meshes = {"*.experts": whole[names[0] if len(names) == 2 else names[:-1]]}
    for layer in mixtures_of(model):
        layer.spread(axis, world.axis)
        # Delayed gradients are computed while rows are sent. Without ep no rows are sent.
        layer.experts.delay_weight_gradient = axis is not None and (
            config.model.delay_expert_gradients
        )
    return meshes


def check_compiler(config: TrainConfig, world: World) -> None:
    """Raise if the run needs a compiler and there is none: the error of torch takes pages."""
    device = world.device.type
    problem = missing_compiler(device) if config.compiles(device) else None
    if problem is not None:
        more = ", or train with --compile off" if device == "cpu" or not has_triton() else ""
        raise ValueError(f"{problem}{more}; compile={config.compile!r} needs it")


def build_optimizer(config: TrainConfig, model: nn.Module) -> ShardedOptimizer:
    decay = config.weight_decay
    matrices: Rule | None = None
    if config.optimizer == "muon":
        matrices = muon(lr=config.matrix_lr, weight_decay=decay)
    elif config.optimizer != "adamw":
        matrices = ANY[config.optimizer](lr=config.matrix_lr, weight_decay=decay)
    rest = adamw(lr=config.lr, betas=(0.9, 0.95), weight_decay=decay)
    return optimizer(model, matrix=matrices, elementwise=rest)


def build_scheduler(config: TrainConfig, optimizer: ShardedOptimizer, step: int = 0) -> LambdaLR:
    """The scheduler of a run after ``step`` steps; sets the learning rates of the groups."""
    return LambdaLR(optimizer, config.factor, last_epoch=step - 1)
