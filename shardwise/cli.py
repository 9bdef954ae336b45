# SPDX-License-Identifier: Apache-2.0
"""The ``shardwise`` command: parses the words, calls the library, prints the result.

A mistake of the user gives one line on standard error and exit code 2 (``--verbose``: and its
traceback). A run that fails gives one line for each rank that saw the failure, and exit code 1.
Parsing imports no torch, so ``--help`` is quick.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import DisallowNone, OmitArgPrefixes, Positional, arg

from shardwise import __version__, check_torch
from shardwise.train.config import TrainConfig
from shardwise.train.recipes import RECIPES, load_recipe

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


def _run(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name == "--version":
        print(f"shardwise {__version__}")
        return 0
    if name in HELP:
        print("usage: shardwise COMMAND ... (COMMAND --help shows its flags)\n")
        for command, (kind, _) in COMMANDS.items():
            print(f"  {command:8}{(kind.__doc__ or '').splitlines()[0]}")
        print("\n  --verbose, for each of them, prints the traceback of errors, too")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ValueError(f"shardwise {name}: there is no such command; {hint}")
    options = parse(words)
    check_torch()
    return COMMANDS[name][1](options, rest)


def parse(words: list[str]) -> Any:
    """The options in the words of a command."""
    kind, flags, default = COMMANDS[words[0]][0], words[1:], None
    if kind in (Train, Plan):
        recipe, flags = _recipe_in(flags)
        hub = kind is Plan and (recipe.endswith(".json") or Path(recipe, "config.json").is_file())
        default = kind(config=TrainConfig() if hub else load_recipe(recipe))
    return _options(kind, default, flags)


def _options(kind: Any, default: Any, words: list[str]) -> Any:
    return tyro.cli(
        kind,
        prog=f"shardwise {kind.__name__.lower()}",
        default=default,
        args=[word for word in words if word != "--verbose"],
        console_outputs=_speaks(),
        config=(DisallowNone,),
    )


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


def _speaks() -> bool:
    """Whether this process prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


_FIXES = {
    errno.EROFS: ": choose a folder that can be written",
    errno.EACCES: ": choose a folder that you may write",
    errno.ENOSPC: ": free some space there, or choose another disk",
}


def _words(error: Exception) -> str:
    """An error as one line. For an error of the system: the file, the reason, and the fix."""
    if not isinstance(error, OSError) or error.strerror is None:
        return " ".join(str(error).split())
    reason = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return reason + _FIXES.get(error.errno or 0, "")


# ------------------------------------------------------------------------------ train


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model: shardwise train [RECIPE] [FLAGS]

    RECIPE is one of --recipes, or file.py:function. Without torchrun, this starts one rank per GPU,
    or two ranks on CPU. A flag that you leave out takes its value from the recipe or, with
    --resume, from the resumed run. The help shows the values of the recipe.

    shardwise train gpt_124m --data tokens/ --steps 1000
    shardwise train --resume --nproc 4 --strategy hsdp
    torchrun --nproc-per-node 8 -m shardwise.cli train gpt_1b
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


def train(options: Train, words: list[str]) -> int:
    """Train, if this process is a rank. Otherwise start ranks with the same words."""
    if options.recipes:
        for name, make in RECIPES.items():
            size = make().model.num_parameters / 1e6
            print(f"{name:14}{size:8,.1f}M  {' '.join((make.__doc__ or '').split())}")
        return 0
    if (options.nproc or 1) < 1 or options.nproc == 0 or options.max_restarts < 0:
        raise ValueError(
            f"--nproc {options.nproc} --max-restarts {options.max_restarts}: give 1 or more ranks, "
            f"and 0 or more restarts"
        )
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not is_rank:  # printed before the imports below, which take seconds
        print(f"starting {options.nproc or 'all'} ranks", flush=True)
    import torch

    from shardwise.train import run as runs
    from shardwise.train.launch import be_only_rank, launch

    recipe, flags = _recipe_in(words)

    def configure(config: TrainConfig) -> TrainConfig:
        configured: TrainConfig = _options(Train, Train(config=config), flags).config
        return configured

    def sinks(folder: Path, config: TrainConfig) -> list[Any]:
        modules = [importlib.import_module(f"shardwise.integrations.{n}") for n in options.loggers]
        return [module.Sink(folder, config.to_json()) for module in modules]

    request = runs.Request(
        recipe=recipe, out=options.out, resume=options.resume, configure=configure
    )
    if is_rank:
        return runs.train(request, sinks)
    nproc = options.nproc or torch.cuda.device_count() or 2
    config = runs.resolve(request).config  # the errors that can be found before any rank starts
    config.expert_mesh_shape(nproc)
    config.share(nproc)
    if nproc == 1 and not options.max_restarts:
        be_only_rank()
        return runs.train(request, sinks)
    return launch(["train", *words], nproc=nproc, max_restarts=options.max_restarts)


# ------------------------------------------------------------------------------ other commands


@dataclass(frozen=True, kw_only=True)
class Data:
    """Make a folder of tokens of texts: shardwise data SOURCE ... --out FOLDER

    The folder (tokens.bin, tokens.json, tokenizer.json) is for shardwise train --data. Tokens of
    the same text and tokenizer are made once: a folder that holds them already is kept.

    shardwise data "texts/*.txt" --out tokens/ --tokenizer bpe:32768
    shardwise data corpus.jsonl --column body --out more/ --tokenizer tokens/
    shardwise data hf:owner/name --out tokens/ --tokenizer gpt2/tokenizer.json
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


def data(options: Data, words: list[str]) -> int:
    from shardwise.train.tokenise import make_tokens
    from shardwise.train.tokens import open_tokens

    folder = make_tokens(
        options.sources,
        options.out,
        tokenizer=options.tokenizer,
        column=options.column,
        held_out=options.held_out,
    )
    info = open_tokens(folder)[1]
    print(
        f"{folder}: {info.held_out_begins:,} tokens to train on and "
        f"{info.count - info.held_out_begins:,} held out, {info.vocab_size:,} different, "
        f"{(info.train_bytes or 0) / max(1, info.held_out_begins):.2f} bytes each"
    )
    return 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes, collectives and peak memory of a step: shardwise plan [RECIPE] [FLAGS]

    RECIPE and flags are those of shardwise train, or RECIPE is a Hugging Face config.json or its
    folder. With --memory, the plan is what train would do on GPUs with so much memory.

    shardwise plan gpt_1b --ranks 64 --strategy hsdp --replicas 8
    shardwise plan gpt_124m --ranks 1 --memory 139GiB
    shardwise plan hub/config.json --ranks 4096
    """

    config: OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    ranks: int = 8
    """Number of ranks of the run, over all nodes."""
    memory: str | None = None
    """Memory of one rank, such as 80GiB."""


def plan(options: Plan, words: list[str]) -> int:
    """Print a plan."""
    from shardwise.train.fit import planned

    if options.ranks < 1:
        raise ValueError(f"--ranks {options.ranks}: give 1 or more")
    name = _recipe_in(words)[0]
    made, verdict = planned(name, options.config, options.ranks, options.memory)
    print(*verdict, made.text(shard_map=True), sep="\n")
    return 0 if made.fits is not False else 3


@dataclass(frozen=True, kw_only=True)
class Report:
    """Draw the page of a run again, or one page of several: shardwise report RUN ..."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
    """The folder of a run, or several folders to compare."""
    out: Path | None = None
    """The page that compares several runs. Default: comparison.html."""


def report(options: Report, words: list[str]) -> int:
    from shardwise.report.html import compare_runs, write_report

    out = options.out or Path("comparison.html")
    if not options.runs or (len(options.runs) == 1 and options.out is not None):
        raise ValueError(
            f"shardwise report {' '.join(words)}: name the folder of a run, whose page is written "
            f"there, or several to compare on the page --out"
        )
    print(
        write_report(*options.runs) if len(options.runs) == 1 else compare_runs(options.runs, out)
    )
    return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check every file and tensor of a checkpoint, or of all of a run: shardwise verify [PATH]"""

    path: Positional[Path | None] = None
    """A checkpoint, or the folder of a run, to check all of its checkpoints. Default: the newest
    run."""


def verify(options: Verify, words: list[str]) -> int:
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
    """Write weights, config.json and tokenizer for transformers: shardwise export RUN OUT"""

    path: Positional[Path]
    """A checkpoint, or the folder of a run, to export its newest checkpoint."""
    out: Positional[Path]
    """A directory that does not exist yet."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The dtype of the exported weights."""


def export(options: Export, words: list[str]) -> int:
    from shardwise.train.hub import export_checkpoint
    from shardwise.train.run import newest_checkpoint

    checkpoint = newest_checkpoint(options.path)
    print(*export_checkpoint(checkpoint, options.out, options.dtype), sep="\n")
    return 0


COMMANDS: dict[str, tuple[type, Callable[[Any, list[str]], int]]] = {
    "train": (Train, train),
    "data": (Data, data),
    "plan": (Plan, plan),
    "report": (Report, report),
    "verify": (Verify, verify),
    "export": (Export, export),
}

if __name__ == "__main__":
    main()
