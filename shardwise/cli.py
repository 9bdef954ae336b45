# SPDX-License-Identifier: Apache-2.0
"""The ``shardwise`` command: parses the words, calls the library, prints the result.

A mistake of the user gives one line on standard error and exit code 2 (``--verbose``: and its
traceback). A run that fails gives one line for each rank that saw the failure, and exit code 1.
Parsing imports no torch, so ``--help`` is quick.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import DisallowNone, OmitArgPrefixes, Positional, arg

from shardwise import __version__, check_torch
from shardwise.train.config import OptimizerName, PrecisionName, Strategy, TrainConfig
from shardwise.train.recipes import RECIPES, find_recipe, load_recipe

# Each command, what it does, and examples of it.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": (
        "train a model; starts one rank per GPU, or two ranks on CPU",
        (
            "shardwise train",
            "shardwise train gpt_124m --data tokens/ --steps 1000",
            "shardwise train --resume --nproc 4 --strategy hsdp",
            "torchrun --nproc-per-node 8 -m shardwise.cli train gpt_1b",
        ),
    ),
    "data": (
        "make token files of text, rows and datasets",
        (
            'shardwise data "texts/*.txt" --out tokens/ --tokenizer bpe:32768',
            "shardwise data corpus.jsonl --column body --out more/ --tokenizer tokens/",
            "shardwise data hf:owner/name --out tokens/ --tokenizer gpt2/tokenizer.json",
        ),
    ),
    "plan": (
        "bytes per rank, collectives and peak memory of one step",
        (
            "shardwise plan gpt_1b --ranks 64 --strategy hsdp --replicas 8",
            "shardwise plan gpt_124m --ranks 1 --memory 139GiB",
            "shardwise plan hub/config.json --ranks 4096",
        ),
    ),
    "report": (
        "draw the page of a run again, or one page of several runs",
        (
            "shardwise report runs/default",
            "shardwise report runs/default runs/default-2 --out comparison.html",
        ),
    ),
    "verify": (
        "check every file and tensor of a checkpoint, or of all of a run",
        ("shardwise verify", "shardwise verify runs/default/checkpoints/step-000300"),
    ),
    "export": (
        "write weights, config.json and tokenizer for transformers",
        ("shardwise export runs/default hub/ --dtype bf16",),
    ),
}
HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the encoding of a stream may lack characters
            stream.reconfigure(errors="backslashreplace")
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    if "torch" in sys.modules:
        from shardwise.train.launch import leave

        leave(code)
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run a command; return its exit code. Help and unknown flags raise ``SystemExit``."""
    logging.basicConfig(
        format="%(levelname)s %(name)s: %(message)s",
        level=logging.WARNING if _speaks() else logging.ERROR,
    )
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the pipe has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        if _speaks():
            if "--verbose" in words:
                traceback.print_exc()
            print(f"error: {_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        gc.enable()


def _run(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name == "--version":
        print(f"shardwise {__version__}")
        return 0
    if name in HELP:
        print("usage: shardwise COMMAND ... (COMMAND --help shows its flags)\n")
        for command, (text, shown) in COMMANDS.items():
            print(f"  {command:8}{text}\n          {shown[0]}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ValueError(f"shardwise {name}: there is no such command; {hint}")
    options = parse(words)
    check_torch()
    if name == "train":
        return train(options, rest)
    return int(_OTHERS[name][1](options))


def parse(words: list[str]) -> Any:
    """The options in the words of a command."""
    _refuse_empty(words)
    name, rest = words[0], words[1:]
    if name == "train":
        recipe, flags = _recipe_in(rest)
        return _parse("train", Train, Train(config=load_recipe(recipe)), flags)
    return _parse(name, _OTHERS[name][0], None, rest)


def _parse(name: str, kind: type, default: Any, words: list[str]) -> Any:
    try:
        return tyro.cli(
            kind,
            prog=f"shardwise {name}",
            default=default,
            args=words,
            console_outputs=_speaks(),
            config=(DisallowNone,),
        )
    except SystemExit as stopped:
        if not stopped.code and _speaks():  # the user asked for help
            print("\n  ".join(["examples:", *COMMANDS[name][1]]))
        raise


def _refuse_empty(words: list[str]) -> None:
    """Refuse empty values, as of a shell variable that is not set. ``--data "$TEXTS"`` would read
    all text of the current folder, and ``--resume "$RUN"`` begin a new run. A prompt may be empty.
    """
    for before, word in zip(["shardwise", *words], words, strict=False):
        flag = word[:-1] if word.startswith("--") and word.endswith("=") else before
        if flag != "--prompt" and (not word or flag != before):
            raise ValueError(
                f"the value after {flag} is empty (a shell variable that is not set?): give a value"
            )


def _speaks() -> bool:
    """Whether this process prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


# ------------------------------------------------------------------------------ train


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model: shardwise train [RECIPE] [FLAGS]. RECIPE is one of --recipes, or
    file.py:function. Without torchrun, this starts one rank per GPU, or two ranks on CPU.

    A flag that you leave out takes its value from the recipe or, with --resume, from the resumed
    run. The help shows the values of the recipe.
    """

    config: OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    recipes: bool = False
    """Print the recipes and exit."""
    out: str | None = None
    """Folder of the run. Default: runs/RECIPE, or the next free name."""
    resume: str | None = None
    """The checkpoint or run to resume from. --resume alone: the newest checkpoint."""
    nproc: int | None = None
    """Number of ranks to start on this machine (not under torchrun). More ranks than GPUs share the
    GPUs, slowly: a rehearsal of a large job."""
    max_restarts: int = 0
    """How often to restart failed ranks from the newest checkpoint (not under torchrun)."""
    # Not --log: torchrun's parser takes that for an abbreviation of one of its flags.
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Loggers to use besides events.jsonl, which is always written."""
    verbose: bool = False
    """Print the traceback of errors, too."""


def train(options: Train, words: list[str]) -> int:
    """Train, if this process is a rank. Otherwise start ranks with the same words."""
    if options.recipes:
        for name, make in RECIPES.items():
            size = make().model.num_parameters / 1e6
            print(f"{name:14}{size:8,.1f}M  {' '.join((make.__doc__ or '').split())}")
        return 0
    for name, least in (("nproc", 1), ("max_restarts", 0)):
        if (count := getattr(options, name)) is not None and count < least:
            raise ValueError(f"--{name.replace('_', '-')} {count}: give {least} or more")
    if "RANK" not in os.environ:  # printed before the imports below, which take seconds
        if options.nproc is not None:
            ranks = "one rank" if options.nproc == 1 else f"{options.nproc} ranks"
        elif os.environ.get("CUDA_VISIBLE_DEVICES") != "" and glob("/dev/nvidia[0-9]*"):
            ranks = "one rank on each GPU"
        else:
            ranks = "2 ranks"
        print(f"starting {ranks}", flush=True)
    # Modules are never garbage, and a collector that looks at them adds a fifth to the time of the
    # imports. Ranks turn the collector on again once the model is built.
    gc.disable()
    from shardwise.train import run as runs
    from shardwise.train.launch import be_only_rank, default_ranks, is_rank, launch

    recipe, flags = _recipe_in(words)

    def configure(config: TrainConfig) -> TrainConfig:
        configured: TrainConfig = _parse("train", Train, Train(config=config), flags).config
        return configured

    request = runs.Request(
        recipe=recipe, out=options.out, resume=options.resume, configure=configure
    )

    def sinks(folder: Path, config: TrainConfig) -> list[Any]:
        modules = [importlib.import_module(f"shardwise.integrations.{n}") for n in options.loggers]
        return [module.Sink(folder, config.to_json()) for module in modules]

    if is_rank():
        return runs.train(request, sinks)
    nproc = options.nproc or default_ranks()
    runs.check(runs.resolve(request), nproc)
    if nproc == 1 and not options.max_restarts:
        be_only_rank()
        return runs.train(request, sinks)
    gc.enable()
    return launch(["train", *words], nproc=nproc, max_restarts=options.max_restarts)


def _recipe_in(words: list[str]) -> tuple[str, list[str]]:
    """The recipe, and the flags with ``latest`` after a ``--resume`` that stands alone."""
    flags: list[str] = []
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        flags.append(word)
        if word == "--resume" and following.startswith("-"):
            flags.append("latest")
    if flags and not flags[0].startswith("-"):
        return flags[0], flags[1:]
    return "default", flags


# ------------------------------------------------------------------------------ other commands

Runs = Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Make a folder of tokens (tokens.bin, tokens.json, tokenizer.json) for shardwise train --data.

    Tokens of the same text and tokenizer are made once: a folder that holds them already is kept.
    """

    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCE")]
    """Text, .jsonl, .jsonl.gz and .parquet files, folders, quoted patterns such as "texts/*.txt",
    stdlib, stdlib+torch, or datasets as hf:NAME[:CONFIG[:SPLIT]]."""
    out: Path
    """The folder to make."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (learned from the text), or a tokenizer.json or its folder."""
    column: str = "text"
    """The key or column of rows that holds the text."""
    held_out: float = 0.05
    """Fraction of the text that is never trained on."""
    verbose: bool = False
    """Print the traceback of errors, too."""


def data(options: Data) -> int:
    from shardwise.train.tokenise import make_tokens
    from shardwise.train.tokens import read_info

    folder = make_tokens(
        options.sources,
        options.out,
        tokenizer=options.tokenizer,
        column=options.column,
        held_out=options.held_out,
    )
    info = read_info(folder)
    print(
        f"{folder}: {info.held_out_begins:,} tokens to train on and "
        f"{info.count - info.held_out_begins:,} held out, {info.vocab_size:,} different, "
        f"{(info.train_bytes or 0) / max(1, info.held_out_begins):.2f} bytes each"
    )
    return 0


@dataclass(frozen=True, kw_only=True)
class Plan:
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
    dry_run: bool = False
    """Run the model's own forward on meta tensors, as one rank."""
    rank: int | None = None
    """The rank that --dry-run takes the place of. Default: 0."""
    strategy: Strategy | None = None
    replicas: int | None = None
    ep: int | None = None
    optimizer: OptimizerName | None = None
    precision: PrecisionName | None = None
    microbatches: int | None = None
    verbose: bool = False
    """Print the traceback of errors, too."""


def plan(options: Plan) -> int:
    """Print a plan."""
    from shardwise.moe import mixtures_of
    from shardwise.planning.plan import dry_run
    from shardwise.planning.plan import plan as make_plan
    from shardwise.train.build import named_precision
    from shardwise.words import parse_size

    for name in ("ranks", "sequences"):
        if (count := getattr(options, name)) is not None and count < 1:
            raise ValueError(f"--{name} {count}: give 1 or more")
    if not 0 <= (options.rank or 0) < options.ranks:
        raise ValueError(f"--rank {options.rank}: give one from 0 to {options.ranks - 1}")
    if (options.sequences if options.dry_run else options.rank) is not None:
        raise ValueError("--rank needs --dry-run, and --sequences has no effect with --dry-run")
    model, recipe = _model_of(options.model)
    config = recipe or TrainConfig()
    names = ("strategy", "replicas", "optimizer", "precision", "microbatches")
    asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if "strategy" in asked:  # the recipe's replicas belong to the strategy of the recipe
        asked = {"replicas": None} | asked
    ep = config.ep if options.ep is None else options.ep
    config = replace(config, **asked, ep=1)  # a TrainConfig knows the experts of a GPT only
    weights = "bf16" if config.precision == "auto" else config.precision
    settings: dict[str, Any] = {
        "precision": named_precision(weights, experts=bool(mixtures_of(model))),
        "optimizer": config.optimizer,
        "microbatches": config.num_microbatches,
        "bucket_mb": options.bucket_mb,
        "memory": None if options.memory is None else parse_size(options.memory),
        "name": options.model,
    }
    shape = config.mesh_shape(options.ranks)
    if ep < 1 or (ep > 1 and not mixtures_of(model)):
        raise ValueError(
            f"--ep {ep} cannot spread the experts of {options.model}: give 1 or more, or leave it "
            f"out if the model has no experts"
        )
    for layer in mixtures_of(model) if ep > 1 else ():
        layer.keep_share(ep)
    if options.dry_run:
        made = dry_run(model, shape, config.strategy, rank=options.rank or 0, **settings)
    else:
        context = getattr(getattr(model, "config", None), "context", None)
        share = config.batch // (options.ranks * config.num_microbatches) if recipe else 1
        if context is not None:
            sequences = options.sequences or max(1, share)
            settings["tokens"] = sequences * context
            # With ep, forward cannot be followed on meta tensors: rows to send have no values.
            settings["batch"] = (sequences, context) if ep == 1 else None
        made = make_plan(model, shape, config.strategy, **settings)
    print(made.text(shard_map=True))
    return 0 if made.fits is not False else 3


def _model_of(name: str) -> tuple[Any, TrainConfig | None]:
    """A module on the meta device, and the recipe's configuration if it was one."""
    import torch

    from shardwise.models.gpt import GPT
    from shardwise.models.hugging_face import config_from_hf
    from shardwise.train.build import with_vocabulary
    from shardwise.train.fit import make_model
    from shardwise.train.hub import begin_from, json_object
    from shardwise.train.tokenise import vocabulary_of

    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    with torch.device("meta"):
        if path.suffix == ".json":
            if not path.is_file():
                raise ValueError(f"{name}: there is no such file; give a Hugging Face config.json")
            return GPT(config_from_hf(json_object(path))), None
        made: Any = find_recipe(name)()
        if isinstance(made, TrainConfig):
            made = begin_from(made) if made.init_from is not None else made
            made = with_vocabulary(made, vocabulary_of(made.tokenizer))
            return make_model(made), made
        if isinstance(made, torch.nn.Module):
            return made, None
    raise ValueError(
        f"{name} returned a {type(made).__name__}: a recipe returns a TrainConfig, a factory a "
        f"torch.nn.Module"
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Draw report.html from a run's events.jsonl, or one page about several runs."""

    runs: Runs
    """The folder of a run, or several folders to compare."""
    out: Path | None = None
    """The page that compares several runs. Default: comparison.html."""
    verbose: bool = False
    """Print the traceback of errors, too."""


def report(options: Report) -> int:
    from shardwise.report.html import compare_runs, write_report

    if not options.runs:
        raise ValueError("shardwise report: name the folder of a run, or several to compare")
    several, out = len(options.runs) > 1, options.out or Path("comparison.html")
    if not several and options.out is not None:
        raise ValueError(
            f"--out {out} is for several runs: the page of one run is written to its folder"
        )
    if several and (not out.parent.is_dir() or out.is_dir()):
        raise ValueError(f"--out {out}: name a file, in a folder that exists")
    print(compare_runs(options.runs, out) if several else write_report(options.runs[0]))
    return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check a checkpoint: manifest, sizes, every sha256, every tensor."""

    path: Positional[Path | None] = None
    """A checkpoint, or the folder of a run, to check all of its checkpoints. Default: the newest
    run."""
    verbose: bool = False
    """Print the traceback of errors, too."""


def verify(options: Verify) -> int:
    from shardwise.checkpoint import verify as check
    from shardwise.train.run import all_checkpoints, newest_folder

    path = options.path or newest_folder()
    if path is None:
        raise ValueError("shardwise verify: there is no run under runs/: name a run or checkpoint")
    results = [check(checkpoint) for checkpoint in all_checkpoints(path)]
    print(*results, sep="\n")
    return 0 if all(result.ok for result in results) else 1


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint's weights as safetensors that transformers loads."""

    path: Positional[Path]
    """A checkpoint, or the folder of a run, to export its newest checkpoint."""
    out: Positional[Path]
    """A directory that does not exist yet."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The dtype of the exported weights."""
    verbose: bool = False
    """Print the traceback of errors, too."""


def export(options: Export) -> int:
    import torch

    from shardwise.checkpoint import export as write
    from shardwise.train.hub import tokenizer_files
    from shardwise.train.loop import TOKENIZER
    from shardwise.train.run import newest_checkpoint, saved_run
    from shardwise.train.tokenise import open_tokenizer

    checkpoint = newest_checkpoint(options.path)
    folder = checkpoint.parent.parent / TOKENIZER
    tokenizer = open_tokenizer(folder) if folder.is_dir() else None
    own = saved_run(checkpoint)[0].module is not None  # the names of its parameters stay
    files = write(
        checkpoint,
        options.out,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype],
        end_token=None if tokenizer is None else tokenizer.end,
        beside=tokenizer_files(tokenizer),
        convert=(lambda name, tensor: {name: tensor}) if own else None,
    )
    print(*files, sep="\n")
    return 0


_OTHERS: dict[str, tuple[type, Any]] = {
    "data": (Data, data),
    "plan": (Plan, plan),
    "report": (Report, report),
    "verify": (Verify, verify),
    "export": (Export, export),
}


# ------------------------------------------------------------------------------ errors


_FIXES = {
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that you may write",
    errno.ENOSPC: "free some space there, or choose another disk",
}


def _words(error: Exception) -> str:
    """An error as one line. For an error of the system: the file, the reason, and the fix."""
    if not isinstance(error, OSError) or error.strerror is None:
        return " ".join(str(error).split())
    reason = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    fix = _FIXES.get(error.errno or 0)
    return reason if fix is None else f"{reason}: {fix}"


if __name__ == "__main__":
    main()
