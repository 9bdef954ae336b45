# SPDX-License-Identifier: Apache-2.0
"""Commands: the words of each command of ``shardwise``, as fields; tyro makes flags of them.

Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from shardwise.train.recipes import RECIPES

LoggerName = Literal["tensorboard", "wandb"]
Switch = Annotated[bool, FlagCreatePairsOff]
# The fields of a TrainConfig that a plan takes as flags.
PLANNED = ("strategy", "replicas", "ep", "tp", "optimizer", "precision", "microbatches")

# What `shardwise COMMAND --help` ends with; "" is the help of shardwise itself.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("shardwise train", "a small GPT with Muon on two CPU ranks, a minute or two"),
        ("shardwise plan gpt_1b --ranks 64 --memory 80GiB", "whether it fits, before you rent"),
        ("shardwise train --help", "every flag, and more examples"),
    ),
    "train": (
        ("shardwise train smoke", "20 steps, to see that everything works"),
        ("shardwise train --steps 50 --optimizer adamw", "the recipe default, changed"),
        ("shardwise train gpt_124m --data tokens/ --dry-run", "the plan and the expected time"),
        ("shardwise train --resume --nproc 4 --strategy hsdp", "go on, on other ranks"),
        ("torchrun --nproc-per-node 8 -m shardwise.cli train gpt_1b", "with a launcher of yours"),
    ),
    "data": (
        ('shardwise data "texts/*.txt" --out tokens/ --tokenizer bpe:32768', "learn a tokenizer"),
        ("shardwise data corpus.jsonl --column body --out more.bin", "bytes as tokens"),
        ("shardwise train gpt_124m --data tokens/:0.7,more.bin:0.3", "train on both"),
    ),
    "generate": (
        ('shardwise generate runs/default --prompt "def "', "the newest checkpoint of a run"),
        ("shardwise generate hub/ --temperature 0 --tokens 50", "the likeliest text"),
    ),
    "plan": (
        ("shardwise plan gpt_1b --ranks 64 --strategy hsdp --replicas 8", "bytes and collectives"),
        ("shardwise plan gpt_124m --ranks 1 --memory 139GiB", "the largest microbatch that fits"),
        ("shardwise plan gpt_1b --ranks 64 --strategy zero1 --bucket-mb 256", "data_parallel"),
        ("shardwise plan hub/config.json --ranks 4096", "a Hugging Face model"),
    ),
    "report": (
        ("shardwise report runs/default", "draw report.html again"),
        ("shardwise report runs/default runs/default-2 --out comparison.html", "compare runs"),
    ),
    "verify": (
        ("shardwise verify runs/default", "the newest checkpoint"),
        ("shardwise verify runs/default/checkpoints/step-000300", "this one"),
    ),
    "export": (
        ("shardwise export runs/default hub/ --dtype bf16", "weights, config and tokenizer"),
        ('shardwise generate hub/ --prompt "def "', "what was exported"),
    ),
    "bench": (
        ("shardwise bench fsdp gloo fake", "beside DDP and FSDP2, on two cores"),
        ("shardwise bench replicas", "what Muon sends, planned for 2 to 4096 replicas"),
        ("shardwise bench muon --help", "the flags of one benchmark"),
    ),
}


def examples(command: str) -> str:
    """The examples of a command, as its help shows them; of all where there is none such."""
    lines = [f"  {words}\n      {note}" for words, note in EXAMPLES.get(command, EXAMPLES[""])]
    return "\n".join(["examples:", *lines])


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model. Without torchrun, two ranks on this machine (or one per GPU) are started.

    A value that is not given comes from the recipe, or, with --resume, from the resumed run. Values
    in parentheses are those of the recipe "default".
    """

    recipe: Annotated[
        Positional[str], arg(help=f"{', '.join(RECIPES)}, or file.py:function.", metavar="RECIPE")
    ] = "default"
    recipe_list: Switch = False
    """Print the recipes and leave."""
    dry_run: Switch = False
    """Print the configuration, the plan and the expected time, and leave."""
    nproc: int | None = None
    """Ranks to start on this machine (not under torchrun)."""
    out: str | None = None
    """Folder of the run; default: runs/RECIPE, or the next free one."""
    resume: str | None = None
    """latest (also when nothing follows), or the path of a checkpoint or a run."""
    max_restarts: int = 0
    """How often failed ranks are restarted, from the newest checkpoint (not under torchrun)."""
    # Not --log, which torchrun's parser takes for an abbreviation of its own flags.
    loggers: tuple[LoggerName, ...] = ()
    """More places to log to; events.jsonl is always written."""
    configuration: Annotated[Any, arg(name="")] = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """Make a token file of text, JSON lines (.jsonl, .jsonl.gz) and parquet files, on all cores.

    `shardwise train --data OUT` trains on it; it is mapped, so it may be larger than memory.
    """

    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="FILE")]
    """Files, directories, or "patterns"."""
    out: Path
    """A file (.bin), or a directory for one."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (learned from the text), or a tokenizer.json or its directory."""
    column: str | None = None
    """The key of JSON lines or the column of parquet files that holds the text; default: text."""
    workers: int | None = None
    """Processes; default: one for each core."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Let a model write, on this machine's first GPU or on CPU."""

    path: Positional[str]
    """A run, a checkpoint or an exported folder."""
    prompt: str = "def "
    """The text to go on from."""
    tokens: int = 200
    """Tokens to write, at the most: the end of a document ends the text."""
    temperature: float = 0.8
    """0 takes the likeliest token, 1 draws as the model says."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens."""
    top_p: float | None = None
    """Draw from the fewest tokens whose chances sum to this."""
    seed: int = 0
    """The same seed draws the same text."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Bytes per rank, padding, collectives and Newton-Schulz work of one step, to the byte.

    A value that is not given comes from the recipe.
    """

    model: Positional[str] = "default"
    """A recipe, a Hugging Face config.json (or its folder), or module:factory."""
    ranks: int = 8
    """Ranks of the run, over all nodes."""
    bucket_mb: float | None = None
    """Plan data_parallel, the whole model in buckets of this size, instead of fully_shard."""
    sequences: int | None = None
    """Sequences of a microbatch on one rank, to plan activations; default: the recipe's share."""
    memory: str | None = None
    """Memory of one rank, like 80GiB: a plan that does not fit gets suggestions."""
    dry_run: Switch = False
    """Run the model's own forward on meta tensors, as one rank."""
    rank: int | None = None
    """Which rank --dry-run poses as; default: 0."""
    svg: Path | None = None
    """Write the shard map there."""
    configuration: Annotated[Any, arg(name="")] = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Draw report.html and loss.svg from a run's events.jsonl, or one page about several runs."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
    """A run's folder, or several to compare."""
    out: Path | None = None
    """The page about several runs; default: comparison.html."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check a checkpoint: manifest, sizes, every sha256, every tensor."""

    path: Positional[Path]
    """A checkpoint, or a run's folder for all of its checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint's weights as safetensors that transformers loads."""

    path: Positional[Path]
    """A checkpoint, or a run's folder for its newest."""
    out: Positional[Path]
    """A directory that does not exist yet."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The dtype of the exported weights."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Run a benchmark; what follows its name goes to it (try --help there)."""

    name: Positional[str] = ""
    """fsdp, muon, muon-vs-adamw, grouped-mlp, ..."""
