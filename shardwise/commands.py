# SPDX-License-Identifier: Apache-2.0
"""Commands: the arguments of each ``shardwise`` command. tyro makes flags of the fields.

This file needs no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from tyro.conf import FlagConversionOff, FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from shardwise.train.recipes import RECIPES

LoggerName = Literal["tensorboard", "wandb"]
Switch = Annotated[bool, FlagCreatePairsOff]
# The fields of a TrainConfig that `shardwise plan` takes as flags.
PLANNED = ("strategy", "replicas", "ep", "tp", "optimizer", "precision", "microbatches")

# The examples at the end of `shardwise COMMAND --help`; "" stands for `shardwise --help`.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("shardwise train", "train a small GPT with Muon on two CPU ranks: a minute or two"),
        ("shardwise plan gpt_1b --ranks 64 --memory 80GiB", "see whether a model fits 64 GPUs"),
        ("shardwise train --help", "show every flag, and more examples"),
    ),
    "train": (
        ("shardwise train smoke", "run 20 steps, to see that everything works"),
        ("shardwise train --steps 50 --optimizer adamw", "the default recipe with other values"),
        ("shardwise train gpt_124m --data tokens/ --dry-run", "show the plan and the time only"),
        ("shardwise train --resume --nproc 4 --strategy hsdp", "resume the run on 4 ranks"),
        ("torchrun --nproc-per-node 8 -m shardwise.cli train gpt_1b", "use your own launcher"),
    ),
    "data": (
        ('shardwise data "texts/*.txt" --out tokens/ --tokenizer bpe:32768', "learn a tokenizer"),
        ("shardwise data corpus.jsonl --column body --out more.bin", "every byte is a token"),
        ("shardwise train gpt_124m --data tokens/:0.7,more.bin:0.3", "train on a mixture"),
    ),
    "generate": (
        ('shardwise generate runs/default --prompt "def "', "use the newest checkpoint of a run"),
        ("shardwise generate hub/ --temperature 0 --tokens 50", "take the most likely tokens"),
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
        ("shardwise verify runs/default", "check every checkpoint of a run"),
        ("shardwise verify runs/default/checkpoints/step-000300", "check one checkpoint"),
    ),
    "export": (
        ("shardwise export runs/default hub/ --dtype bf16", "write weights, config, tokenizer"),
        ('shardwise generate hub/ --prompt "def "', "generate text with the exported model"),
    ),
    "bench": (
        ("shardwise bench fsdp gloo fake", "compare with DDP and FSDP2, on two cores"),
        ("shardwise bench replicas", "what Muon sends, planned for 2 to 4096 replicas"),
        ("shardwise bench muon --help", "show the flags of one benchmark"),
    ),
}


def examples(command: str) -> str:
    """The examples in the help of a command, or of ``shardwise`` for an unknown command."""
    lines = [f"  {words}\n      {note}" for words, note in EXAMPLES.get(command, EXAMPLES[""])]
    return "\n".join(["examples:", *lines])


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model. Without torchrun, this starts one rank per GPU, or two ranks on CPU.

    A flag that you leave out takes its value from the recipe or, with --resume, from the resumed
    run. The help shows the values of the recipe "default" in parentheses.
    """

    recipe: Annotated[
        Positional[str], arg(help=f"{', '.join(RECIPES)}, or file.py:function.", metavar="RECIPE")
    ] = "default"
    recipe_list: Switch = False
    """Print the recipes and exit."""
    dry_run: Switch = False
    """Print the configuration, the plan and the expected time, and exit."""
    nproc: int | None = None
    """Number of ranks to start on this machine (not under torchrun). More ranks than GPUs share the
    GPUs, slowly: a rehearsal of a large job."""
    out: str | None = None
    """Folder of the run. Default: runs/RECIPE, or the next free name."""
    resume: str | None = None
    """The checkpoint or run to resume from. latest, or --resume alone: the newest checkpoint."""
    max_restarts: int = 0
    """How often to restart failed ranks from the newest checkpoint (not under torchrun)."""
    # Not --log: torchrun's parser takes that for an abbreviation of one of its flags.
    loggers: tuple[LoggerName, ...] = ()
    """Loggers to use besides events.jsonl, which is always written."""
    configuration: Annotated[Any, arg(name="")] = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """Turn text, JSON lines (.jsonl, .jsonl.gz) and parquet files into a token file, on all cores.

    `shardwise train --data OUT` trains on it. The file is memory-mapped, so it may be larger than
    memory.
    """

    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="FILE")]
    """Files, directories, or quoted patterns such as "texts/*.txt"."""
    out: Path
    """A file (.bin) to write, or a directory to write tokens.bin to."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (learned from the text), or a tokenizer.json or its directory."""
    column: str | None = None
    """The key of JSON lines, or the column of parquet files, that holds the text. Default: text."""
    workers: int | None = None
    """Number of processes. Default: one per core."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate text with a model, on this machine's first GPU or on CPU."""

    path: Positional[str]
    """A run, a checkpoint or an exported folder."""
    prompt: str = "def "
    """The text to continue."""
    tokens: int = 200
    """The largest number of tokens to generate. The end of a document ends the text earlier."""
    temperature: float = 0.8
    """0 takes the most likely token, 1 draws from the probabilities of the model."""
    top_k: int | None = None
    """Draw from this many of the most likely tokens."""
    top_p: float | None = None
    """Draw from the fewest tokens whose probabilities sum to this."""
    seed: int = 0
    """The same seed draws the same text."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Show the bytes per rank, padding, collectives and Newton-Schulz work of one step.

    The numbers of bytes are exact. A flag that you leave out takes its value from the recipe.
    """

    model: Positional[str] = "default"
    """A recipe, a Hugging Face config.json (or its folder), or module:factory."""
    ranks: int = 8
    """Number of ranks of the run, over all nodes."""
    bucket_mb: float | None = None
    """Plan data_parallel (the whole model in buckets of this size) instead of fully_shard."""
    sequences: int | None = None
    """Sequences per microbatch on one rank, to plan activations. Default: the recipe's share."""
    memory: str | None = None
    """Memory of one rank, such as 80GiB: a plan that does not fit comes with suggestions."""
    dry_run: Switch = False
    """Run the model's own forward on meta tensors, as one rank."""
    rank: int | None = None
    """The rank that --dry-run takes the place of. Default: 0."""
    svg: Path | None = None
    """Write the shard map to this file."""
    configuration: Annotated[Any, arg(name="")] = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Draw report.html and loss.svg from a run's events.jsonl, or one page about several runs."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
    """The folder of a run, or several folders to compare."""
    out: Path | None = None
    """The page that compares several runs. Default: comparison.html."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check a checkpoint: manifest, sizes, every sha256, every tensor."""

    path: Positional[Path]
    """A checkpoint, or the folder of a run, to check all of its checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint's weights as safetensors that transformers loads."""

    path: Positional[Path]
    """A checkpoint, or the folder of a run, to export its newest checkpoint."""
    out: Positional[Path]
    """A directory that does not exist yet."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The dtype of the exported weights."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Run a benchmark. The words after its name go to the benchmark (try --help there)."""

    name: Positional[str] = ""
    """fsdp, muon, muon-vs-adamw, grouped-mlp, ..."""


# ------------------------------------------------------------------------------ flags


def flags_of(
    kind: type,
    default: Any,
    groups: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> Any:
    """A ``TypedDict`` of optional flags, one for each field of a dataclass.

        TrainConfig.steps            --steps 300
        TrainConfig.model.dim        --model.dim 512

    Types and descriptions are those of the fields. A flag that is left out changes nothing.

    Args:
        default: the help shows the values of this object.
        groups: group titles for the help, by the name of the first field of each group. The flags
            of a group are in a ``TypedDict`` inside; the group is no prefix of their names.
        only: the names of the fields that become flags; ``None``: all fields.
    """
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {}
    current = fields  # receives the next flags: the last group that has begun
    nested: dict[str, Any] = {}
    grouped: dict[str, dict[str, Any]] = {}
    for name in hints if only is None else only:
        hint, value = hints[name], getattr(default, name, None)
        if groups is not None and name in groups:
            current = grouped[groups[name]] = {}
        inner = next((i for i in (hint, *get_args(hint)) if dataclasses.is_dataclass(i)), None)
        if inner is not None:  # a dataclass inside: --model.dim
            nested[name] = flags_of(inner, value)  # type: ignore[arg-type]
            continue
        shown = arg(help_behavior_hint="" if value is None else f"({value})")
        options = (shown, FlagConversionOff) if hint is bool else (shown,)
        current[name] = Annotated[(hint, *options)]  # type: ignore[valid-type]
    for title, flags in grouped.items():
        fields[title] = Annotated[_typed_dict(kind, flags), OmitArgPrefixes, arg(help="")]
    return _typed_dict(kind, fields | nested)


def _typed_dict(kind: type, fields: dict[str, Any]) -> Any:
    flags: Any = TypedDict(f"{kind.__name__}Flags", fields, total=False)  # type: ignore[misc, operator]
    # tyro shows the docstring as plain text: without the marks of Sphinx.
    flags.__doc__ = re.sub(r":\w+:`([^`]+)`|``([^`]+)``", r"\1\2", kind.__doc__ or "")
    return flags


def given(flags: Mapping[str, Any], groups: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The flags that the user gave, by field; a dictionary for a dataclass inside."""
    titles = [] if groups is None else groups.values()
    values = {name: value for name, value in flags.items() if name not in titles}
    for title in titles:
        values |= flags.get(title, {})
    nested = {name: given(value) for name, value in values.items() if isinstance(value, Mapping)}
    return {name: value for name, value in (values | nested).items() if value != {}}
