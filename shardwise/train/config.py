# SPDX-License-Identifier: Apache-2.0
"""TrainConfig: all settings of a run in one frozen value, which converts to JSON and back. Every
field but ``model`` is a flag of ``shardwise train``; the sizes of a model belong to recipes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from tyro.conf import Suppress, arg

from shardwise.core.placements import STRATEGIES, Placements
from shardwise.models.gpt_config import GPTConfig, Recompute
from shardwise.words import bound_problems, choice_problems, type_problems

Strategy = Literal["zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp"]
OptimizerName = Literal[
    "muon",
    "adamw",
    "normuon",
    "soap",
]
PrecisionName = Literal["auto", "fp32", "bf16", "mxfp8", "fp8_block"]

# The fields that a resumed run cannot change, and why. A change of any other field takes effect.
# Other data and another shape of the model are refused later, when they are read.
FIXED = {
    "seed": "the order of the samples and the random states continue as they were saved",
    "tokenizer": "the rows of the embedding belong to the tokens of the saved run",
    "optimizer": "the states in the checkpoint belong to the other optimizer",
    "init_from": "the run continues with the weights of the checkpoint",
    "module": "the weights of the checkpoint belong to the other model",
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a run. A recipe is a function that returns one; flags replace values.

    Args:
        model: the GPT; its ``vocab_size`` is replaced by that of the data.
        module: your own model, ``file.py:function``: a function of the TrainConfig that returns a
            module. ``forward(tokens, targets)`` gives the mean loss, ``forward(tokens)`` logits.
        init_from: folder of a Hugging Face model (config.json, safetensors): the run begins with
            its weights, sizes and tokenizer.
        data: a folder of tokens (made by ``shardwise data``), several with weights (a:0.7,b:0.3),
            stdlib, stdlib+torch, or text files, of which tokens are made first.
        eval_data: tokens to evaluate on, instead of those that the data hold out.
        tokenizer: for text: bytes, bpe:SIZE (learned from the text), or the path of a
            tokenizer.json or of its folder.
        documents: whether attention crosses the documents in a window: joined, or apart, where
            the token that ends a document is a border; auto: apart if that token is known.
        steps: optimizer steps of the whole run; a resumed run does those that are left.
        hours: save and end after this time, counted from this start.
        batch: sequences in one step, over all ranks.
        microbatches: number of pieces in which a rank computes its share of a batch; auto: as few
            as fit the GPU according to the plan, 1 on CPU.
        recompute: what backward computes again: none, pointwise (norms and gated products, in
            compiled blocks), block (everything inside of blocks); auto: as little as fits. Without
            it, as the recipe's model says.
        strategy: how parameters, gradients and optimizer states are sharded over the ranks.
        replicas: size of the outer axis of hsdp and hfsdp. Without it: one per node, or two on a
            single node.
        ep: number of neighbouring ranks over which the experts are spread (expert parallelism).
        optimizer: optimizer of the matrices, with AdamW for all other parameters; or adamw for all
            parameters.
        matrix_lr: learning rate of the optimizer of the matrices.
        lr: learning rate of AdamW.
        weight_decay: weight decay of both optimizers.
        schedule: learning rates after the warmup: wsd keeps them constant and decreases them
            linearly at the end, cosine decreases them along a cosine up to the last step.
        warmup: number of steps in which learning rates rise from 0.
        decay: fraction of the steps, at the end, in which learning rates decrease (wsd).
        final: learning rates at the last step, as a fraction of the full ones.
        clip: the largest norm of the gradient; a gradient with a larger norm is scaled down.
        precision: format of the compute weights; auto: fp32 on CPU, bf16 on GPUs. mxfp8 and
            fp8_block store the linear layers in fp8 and all else in bf16; the run prints the rest
            and why. fp8_block also multiplies in fp8. Main weights: fp32.
        compile: whether blocks and loss run through torch.compile; auto: on GPUs.
        seed: seed of the weights, of the order of the samples and of the random generators.
        eval_every: steps between evaluations of the held-out loss; 0: none.
        eval_windows: windows of held-out tokens in one evaluation.
        save_every: steps between checkpoints.
        keep: number of checkpoints to keep.
        keep_every: also keep the checkpoints of every so many steps, in kept/; 0: none.
        max_skipped: steps in a row that may be skipped because their gradient is not finite; one
            more ends the run.
        timeout: seconds after which a collective that another rank does not join is an error.
        sample: tokens of text to generate at the end, in at most 5 seconds; 0: none.
        profile_step: the step to profile for the report, counted from the first step of this start.
        deterministic: use torch's deterministic algorithms.
    """

    model: Suppress[GPTConfig] = field(default_factory=GPTConfig)
    module: Annotated[str | None, arg(name="model")] = None
    init_from: str | None = None
    data: str = "stdlib"
    eval_data: str | None = None
    tokenizer: str = "bytes"
    documents: Literal["auto", "apart", "joined"] = "auto"
    steps: int = 300
    hours: float | None = None
    batch: int = 32
    microbatches: int | Literal["auto"] = "auto"
    recompute: Recompute | None = None
    strategy: Strategy = "zero3"
    replicas: int | None = None
    ep: int = 1
    optimizer: OptimizerName = "muon"
    matrix_lr: float = 0.02
    lr: float = 3e-3
    weight_decay: float = 0.0
    schedule: Literal["wsd", "cosine"] = "wsd"
    warmup: int = 10
    decay: float = 0.5
    final: float = 0.1
    clip: float = 1.0
    precision: PrecisionName = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    seed: int = 0
    eval_every: int = 50
    eval_windows: int = 128
    save_every: int = 100
    keep: int = 2
    keep_every: int = 0
    max_skipped: int = 10
    timeout: float = 300.0
    sample: int = 200
    profile_step: int = 5
    deterministic: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, Mapping):  # as JSON gives it back
            object.__setattr__(self, "model", GPTConfig(**self.model))
        problems = type_problems(self) or self._problems()
        if problems:
            raise ValueError("this configuration cannot work: " + "; ".join(problems))
        if self.recompute not in (None, self.model.recompute):
            model = dataclasses.replace(self.model, recompute=self.recompute)  # type: ignore[arg-type]
            object.__setattr__(self, "model", model)

    def _problems(self) -> list[str]:
        ones = ("steps", "batch", "eval_windows", "save_every", "keep", "ep", "replicas")
        counts = ("warmup", "eval_every", "keep_every", "seed", "sample", "profile_step")
        positive = ("lr", "matrix_lr", "clip", "timeout", "hours")
        problems = [
            *bound_problems(self, 1, *ones, whole=True),
            *bound_problems(self, 0, *counts, "max_skipped", whole=True),
            *bound_problems(self, 0, *positive, above=True),
            *bound_problems(self, 0, "weight_decay", "decay", "final"),
            *choice_problems(self),
        ]
        module, experts = self.module is not None, self.model.num_experts
        of_the_gpt = self.ep > 1 or self.recompute or self.init_from or self.compile == "on"
        wrong = {
            f"microbatches={self.microbatches!r} must be 1 or more": self.num_microbatches < 1,
            f"seed={self.seed!r} must be less than 2**43": self.seed >= 1 << 43,  # 64 bits in all
            f"timeout={self.timeout!r}: at most 1e9 seconds": 1e9 < self.timeout < math.inf,
            f"decay={self.decay!r} is a fraction of the steps: 0 to 1": self.decay > 1,
            f"final={self.final!r} is a fraction of learning rates: 0 to 1": self.final > 1,
            "data='' names nothing (a shell variable that is not set?)": not self.data,
            f"ep={self.ep} spreads experts, and the model has {experts}: choose a divisor": (
                self.ep > 1 and not module and bool(not experts or experts % self.ep)
            ),
            f"ep, recompute, init_from, documents='apart' and compile='on' are the GPT's: leave "
            f"them out with model={self.module!r}": module
            and bool(of_the_gpt or self.documents == "apart"),
        }
        return problems + [text for text, is_wrong in wrong.items() if is_wrong]

    def check_resume(self, saved: TrainConfig) -> None:
        """Raise if this configuration cannot resume a run with the configuration ``saved``."""
        different = [
            f"{name}={getattr(self, name)!r} (saved: {getattr(saved, name)!r}; {reason})"
            for name, reason in FIXED.items()
            if getattr(self, name) != getattr(saved, name)
        ]
        if different:
            raise ValueError(
                f"a resumed run cannot change to {', '.join(different)}: keep the saved value, or "
                f"begin a new run without --resume"
            )

    @property
    def placements(self) -> Placements:
        return STRATEGIES[self.strategy]

    def compiles(self, device: str) -> bool:
        """Whether the model runs through torch.compile on this type of device."""
        if self.compile == "auto":
            return device == "cuda" and self.module is None
        return self.compile == "on"

    def factor(self, step: int) -> float:
        """The factor of both learning rates in ``step`` (counted from 0)."""
        rising = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "cosine":
            done = (step - self.warmup) / max(1, self.steps - self.warmup)
            height = (1 + math.cos(math.pi * min(1.0, max(0.0, done)))) / 2  # 1 to 0
            return rising * (self.final + (1 - self.final) * height)
        falls_for = self.decay * self.steps
        left = (self.steps - step) / falls_for if falls_for else 1.0
        return rising * max(self.final, min(1.0, left))

    @property
    def unreached(self) -> str:
        """A warning if the learning rates never come near their full values; else empty."""
        highest = max(self.factor(step) for step in range(min(self.steps, self.warmup or 1)))
        if highest >= 0.9:  # a decay over all steps begins in the warmup
            return ""
        return (
            f"learning rates rise for warmup={self.warmup} of steps={self.steps} and reach "
            f"{100 * highest:.0f} % of lr and matrix_lr: choose a shorter --warmup, or more --steps"
        )

    def mesh_shape(self, world_size: int, num_nodes: int = 1) -> dict[str, int]:
        """The axes of the mesh and their sizes, outer to inner."""
        if self.placements.num_axes == 1:
            if self.replicas is not None:
                raise ValueError(
                    f"replicas={self.replicas} works with hsdp and hfsdp only; {self.strategy} has "
                    f"no outer axis: leave it out"
                )
            return {"dp": world_size}
        replicas = self.replicas or (num_nodes if num_nodes > 1 else min(2, world_size))
        if world_size % replicas:
            raise ValueError(
                f"{world_size} ranks cannot form {replicas} replicas for {self.strategy}: use a "
                f"number of ranks that {replicas} divides, or set replicas to a divisor of "
                f"{world_size}"
            )
        return {"dp_outer": replicas, "dp": world_size // replicas}

    def expert_mesh_shape(self, world_size: int, num_nodes: int = 1) -> dict[str, int]:
        """The mesh of the experts: the same axes, with the inner axis split into ``dp`` and ``ep``.

        Ranks along ``ep`` hold different experts. Ranks along the other axes hold replicas or
        shards of the same experts.
        """
        shape = self.mesh_shape(world_size, num_nodes)
        if shape["dp"] % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide the {shape['dp']} ranks of axis dp: choose a "
                f"divisor of it, or another number of ranks"
            )
        return {**shape, "dp": shape["dp"] // self.ep, "ep": self.ep}

    @property
    def num_microbatches(self) -> int:
        """``microbatches`` as a number; 1 while it is "auto"."""
        return self.microbatches if isinstance(self.microbatches, int) else 1

    def share(self, world_size: int) -> int:
        """The number of sequences of one microbatch on one rank."""
        pieces = world_size * self.num_microbatches
        if self.batch % pieces:
            lower = self.batch // pieces * pieces
            nearest = " or ".join(str(n) for n in (lower, lower + pieces) if n)
            raise ValueError(
                f"a batch of {self.batch} sequences cannot be cut evenly over {world_size} ranks "
                f"x {self.num_microbatches} microbatches: use --batch {nearest}, or other numbers"
            )
        return self.batch // pieces

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The configuration of :meth:`to_json`; raises for fields of another version."""
        unknown = sorted(set(values) - {item.name for item in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"configuration values {unknown} are not known to this version")
        return cls(**values)
