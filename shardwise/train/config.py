# SPDX-License-Identifier: Apache-2.0
"""TrainConfig: all settings of a run in one frozen value, which converts to JSON and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

from shardwise.core.placements import REPLICATE, STRATEGIES, Placements
from shardwise.models.gpt_config import GPTConfig, tensor_parallel_problems
from shardwise.words import bound_problems, choice_problems, flattened, type_problems

T = TypeVar("T")

Strategy = Literal["zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp"]
OptimizerName = Literal[
    "muon",
    "adamw",
    "normuon",
    "soap",
]
PrecisionName = Literal["auto", "fp32", "bf16", "mxfp8", "fp8_block"]
Choice = Literal["auto", "on", "off"]
Schedule = Literal["wsd", "cosine"]
DocumentChoice = Literal["auto", "apart", "joined"]

# The title of each group of flags in the help, by the first field of the group.
GROUPS = {
    "module": "weights",
    "data": "data",
    "steps": "batch",
    "strategy": "sharding",
    "optimizer": "optimizer",
    "precision": "arithmetic",
    "eval_every": "evaluation_and_saving",
}

# The fields that a resumed run cannot change, and why. A change of any other field takes effect.
# Other data and another shape of the model are refused later, when they are read.
FIXED = {
    "seed": "the order of the samples and the random states continue as they were saved",
    "tokenizer": "the rows of the embedding belong to the tokens of the saved run",
    "held_out": "text that was trained on would be held out",
    "optimizer": "the states in the checkpoint belong to the other optimizer",
    "init_from": "the run continues with the weights of the checkpoint",
    "module": "the weights of the checkpoint belong to the other model",
    "lora_rank": "the weights of the checkpoint have another rank",
}
# field: (other field, values). The field has no effect when the other field has one of the values,
# and a flag that sets the field is refused then.
_OF_EXPERTS = (
    *("experts_per_token", "expert_hidden_dim", "expert_score", "normalise_scores", "bias_rate"),
    *("balance_coefficient", "sequence_balance_coefficient", "z_coefficient"),
    *("expert_groups", "groups_per_token", "expert_scale", "expert_activation", "expert_biases"),
    *("expert_layout", "gate_up_block"),
)
IDLE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "matrix_lr": ("optimizer", ("adamw",)),
    "decay": ("schedule", ("cosine",)),
    "lora_alpha": ("lora_rank", (0,)),
    "keep_weights": ("strategy", ("zero0", "zero1", "zero2")),  # these keep them anyway
    "model.vocab_size": ("init_from", (None,)),  # the vocabulary comes from the data
    **{f"model.{name}": ("model.num_experts", (0,)) for name in _OF_EXPERTS},
    "model.delay_expert_gradients": ("ep", (1,)),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a run. A recipe is a function that returns one; flags replace values.

    Args:
        model: the model; its ``vocab_size`` is replaced by that of the data.
        module: your own model instead of ``model``, of which the run then uses the context alone:
            ``file.py:function``, a function of the TrainConfig, or ``hf:FOLDER``, the causal
            language model of a transformers config.json; see :mod:`shardwise.train.own_model`.
        init_from: folder of a Hugging Face model (config.json, safetensors): the run begins with
            its weights, sizes and tokenizer; ``None``: new weights. A function given as ``module``
            reads the weights itself.
        lora_rank: rank of the products that are trained (LoRA) while all other weights are frozen;
            0: all weights are trained.
        lora_alpha: the products are scaled by lora_alpha / lora_rank.
        data: stdlib, stdlib+torch, a text file, directory or "glob", token files (.bin), hf:NAME,
            or several with weights, a.bin:0.7,b.bin:0.3; see :mod:`shardwise.train.sources`.
        tokenizer: for text: ``bytes``, ``bpe:SIZE`` (learned from the text), or the path of a
            pretrained tokenizer.json or of its directory.
        held_out: fraction of the data that is used for evaluation and never trained on.
        documents: whether attention crosses the documents in a window: ``joined``, or ``apart``,
            where the token that ends a document is a border; ``auto``: apart if that token is
            known.
        steps: optimizer steps of the whole run; a resumed run does those that are left.
        batch: sequences in one step, over all ranks.
        microbatches: number of pieces in which a rank computes its share of a batch; ``auto``: as
            few as fit the GPU according to the plan (see :mod:`shardwise.train.fit`), 1 on CPU.
        strategy: how parameters, gradients and optimizer states are sharded over the ranks.
        keep_weights: whether the compute weights stay in memory between their uses, as with
            ``zero2``; ``auto``: on a single rank, if the plan says that they fit the GPU. This
            saves the casts from main weights.
        replicas: size of the outer axis of ``hsdp`` and ``hfsdp``; ``None``: one per node, or two
            on a single node.
        ep: number of neighbouring ranks over which the experts are spread (expert parallelism).
        tp: number of neighbouring ranks that share the work on each sequence (tensor parallelism).
        optimizer: optimizer of the matrices, with AdamW for all other parameters; or ``adamw`` for
            all parameters.
        matrix_lr: learning rate of the optimizer of the matrices.
        lr: learning rate of AdamW.
        weight_decay: weight decay of both optimizers.
        schedule: learning rates after the warmup: ``wsd`` keeps them constant and decreases them
            linearly at the end, ``cosine`` decreases them along a cosine up to the last step.
        warmup: number of steps in which learning rates rise from 0.
        decay: fraction of the steps, at the end, in which learning rates decrease (``wsd``).
        final: learning rates at the last step, as a fraction of the full ones.
        clip: the largest norm of the gradient; a gradient with a larger norm is scaled down.
        precision: format of the compute weights; ``auto``: fp32 on CPU, bf16 on GPUs. ``mxfp8``
            and ``fp8_block`` store the linear layers in fp8 and all else in bf16; the run prints
            the rest and why. ``fp8_block`` also multiplies in fp8. Main weights: fp32.
        final_bf16: fraction of the steps, at the end of a run in fp8, that are computed in bf16.
            The run saves a checkpoint there and continues from it in bf16.
        compile: whether blocks and loss run through ``torch.compile``; ``auto``: on GPUs,
            without ``tp``.
        seed: seed of the weights, of the order of the samples and of the random generators.
        eval_every: steps between evaluations of the held-out loss; 0: none.
        eval_windows: windows of held-out tokens in one evaluation.
        save_every: steps between checkpoints.
        keep: number of checkpoints to keep.
        max_skipped: steps in a row that may be skipped because their gradient is not finite; one
            more ends the run.
        timeout: seconds after which a collective that another rank does not join is an error.
        sample: tokens of text to generate at the end, in at most 5 seconds.
        profile_step: the step to profile for the report, counted from the first step of this start.
        deterministic: use torch's deterministic algorithms.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    module: str | None = None
    init_from: str | None = None
    lora_rank: int = 0
    lora_alpha: float = 16.0
    data: str = "stdlib"
    tokenizer: str = "bytes"
    held_out: float = 0.05
    documents: DocumentChoice = "auto"
    steps: int = 300
    batch: int = 32
    microbatches: int | Literal["auto"] = "auto"
    strategy: Strategy = "zero3"
    keep_weights: Choice = "auto"
    replicas: int | None = None
    ep: int = 1
    tp: int = 1
    optimizer: OptimizerName = "muon"
    matrix_lr: float = 0.02
    lr: float = 3e-3
    weight_decay: float = 0.0
    schedule: Schedule = "wsd"
    warmup: int = 10
    decay: float = 0.5
    final: float = 0.1
    clip: float = 1.0
    precision: PrecisionName = "auto"
    final_bf16: float = 0.0
    compile: Choice = "auto"
    seed: int = 0
    eval_every: int = 50
    eval_windows: int = 128
    save_every: int = 100
    keep: int = 2
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

    def _problems(self) -> list[str]:
        problems = []
        if self.microbatches != "auto" and self.num_microbatches < 1:
            problems.append(f"microbatches={self.microbatches!r} must be 1 or more, or 'auto'")
        ones = ("steps", "batch", "eval_windows", "save_every", "keep", "ep", "tp", "replicas")
        problems += bound_problems(self, 1, *ones, whole=True)
        counts = ("warmup", "eval_every", "seed", "sample", "profile_step", "max_skipped")
        problems += bound_problems(self, 0, *counts, "lora_rank", whole=True)
        if self.seed >= 1 << 43:  # generators take 64 bits, and each rank has another seed
            problems.append(f"seed={self.seed!r} must be less than 2**43")
        if 1e9 < self.timeout < math.inf:
            problems.append(f"timeout={self.timeout!r}: at most 1e9 seconds")
        rates = ("lr", "matrix_lr", "clip", "timeout", "lora_alpha")
        problems += bound_problems(self, 0, *rates, above=True)
        problems += bound_problems(self, 0, "weight_decay")
        if not 0 <= self.decay <= 1:
            problems.append(f"decay={self.decay!r} is a fraction of the steps: 0 to 1")
        if not 0 <= self.final <= 1:
            problems.append(f"final={self.final!r} is a fraction of the learning rates: 0 to 1")
        if not 0 <= self.final_bf16 < 1:
            problems.append(f"final_bf16={self.final_bf16!r} is a fraction of the steps: 0 to 1")
        if self.final_bf16 and self.precision in ("auto", "fp32", "bf16"):
            problems.append(
                f"final_bf16={self.final_bf16!r} ends a run in fp8, and precision="
                f"{self.precision!r} is not fp8: choose a precision in fp8, or leave it out"
            )
        if not 0 < self.held_out <= 0.5:
            problems.append(f"held_out={self.held_out!r} must be more than 0 and at most 0.5")
        problems += choice_problems(self)
        if not problems and self.model.num_experts % self.ep:
            problems.append(
                f"ep={self.ep} does not divide the {self.model.num_experts} experts of the model, "
                f"and every rank holds the same number: choose a divisor"
            )
        elif not problems and self.ep > 1 and not self.model.num_experts:
            problems.append(f"ep={self.ep} spreads experts, and the model has none: leave it at 1")
        if self.module is not None:
            problems += self._module_problems()
        if self.lora_rank and self.tp > 1:
            problems.append(f"lora_rank={self.lora_rank} does not work with tp: leave tp at 1")
        return problems or tensor_parallel_problems(self.model, self.tp)

    def _module_problems(self) -> list[str]:
        """The settings that only the GPT has, and that are set beside ``module``."""
        problems = []
        if self.tp > 1 or self.ep > 1:
            problems.append(f"module={self.module!r} cannot be cut: leave tp and ep at 1")
        if self.model.recompute in ("block", "pointwise"):
            recompute = self.model.recompute
            problems.append(f"model.recompute={recompute!r} is the GPT's: leave it out with module")
        if self.documents == "apart":
            problems.append("documents='apart' is the GPT's: leave it out with module")
        if self.model.head_z_coefficient:
            problems.append("model.head_z_coefficient is the GPT's: leave it at 0 with module")
        if self.compile == "on":
            problems.append("compile='on' is the GPT's: compile a module in its own function")
        return problems

    def check_resume(self, saved: TrainConfig, step: int) -> None:
        """Raise if this configuration cannot resume a run with the configuration ``saved`` after
        ``step``."""
        different = [
            f"{name}={getattr(self, name)!r} (saved: {getattr(saved, name)!r}; {reason})"
            for name, reason in FIXED.items()
            if getattr(self, name) != getattr(saved, name)
        ]
        before = dataclasses.replace(self, warmup=saved.warmup)
        if self != before and self.factor(step) == before.factor(step):
            reason = f"saved: {saved.warmup}; the warmup ended before step {step}"
            different.append(f"warmup={self.warmup} ({reason})")
        if different:
            raise ValueError(
                f"a resumed run cannot change to {', '.join(different)}: keep the saved value, or "
                f"begin a new run without --resume"
            )

    @property
    def placements(self) -> Placements:
        chosen = STRATEGIES[self.strategy]
        if self.keep_weights != "on":
            return chosen
        return dataclasses.replace(chosen, compute=(REPLICATE,) * chosen.num_axes)

    def compiles(self, device: str) -> bool:
        """Whether the model runs through torch.compile on this type of device. ``auto`` does not
        compile a ``module`` of the user, nor with tensor parallelism, whose compiled blocks were
        tested on CPU ranks only."""
        if self.compile == "auto":
            return device == "cuda" and self.tp == 1 and self.module is None
        return self.compile == "on"

    @property
    def fp8_steps(self) -> int:
        """The number of steps with weights in fp8, where ``precision`` is such a format."""
        return self.steps - round(self.final_bf16 * self.steps)

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

    def data_ranks(self, world_size: int) -> int:
        """The number of ranks that read different sequences; ``tp`` neighbours read the same."""
        if world_size % self.tp:
            raise ValueError(
                f"tp={self.tp} does not divide {world_size} ranks: choose a divisor, or another "
                f"number of ranks"
            )
        return world_size // self.tp

    def mesh_shape(self, world_size: int, num_nodes: int = 1) -> dict[str, int]:
        """The data-parallel axes of the mesh and their sizes, outer to inner. The axis ``tp``, if
        any, is inside of them."""
        world_size = self.data_ranks(world_size)
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
        world_size = self.data_ranks(world_size)
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
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"configuration values {unknown} are not known to this version")
        return cls(**values)


def changed(config: T, changes: Mapping[str, Any]) -> T:
    """The dataclass ``config`` with some values replaced; a mapping changes a dataclass inside."""
    values = {
        name: changed(getattr(config, name), value)
        if isinstance(value, Mapping) and getattr(config, name) is not None
        else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def refuse_idle(config: TrainConfig, changes: Mapping[str, Any]) -> None:
    """Raise if one of the ``changes`` that led to ``config`` has no effect there."""
    values = flattened(config.to_json())
    hugging_face = (config.module or "").startswith("hf:")  # its config.json describes the model
    for name, value in flattened(changes).items():
        other, idle = IDLE.get(name, ("", ()))
        if hugging_face and name.startswith("model.") and name != "model.context":
            other, idle = "module", (config.module,)
        if other and values[other] in idle:
            raise ValueError(
                f"{name}={value!r} has no effect with {other}={values[other]!r}: leave it out, or "
                f"choose another {other}"
            )
