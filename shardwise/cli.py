# SPDX-License-Identifier: Apache-2.0
"""The ``shardwise`` command: parses the arguments, calls the library, prints the result.

A mistake of the user gives one line on standard error and exit code 2. A run that fails gives one
line for each rank that saw the failure, and exit code 1. Parsing imports no torch, so ``--help`` is
quick.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import gc
import importlib
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Union

import tyro
from tyro.conf import DisallowNone, arg, subcommand

from shardwise import __version__, check_torch
from shardwise.commands import (
    PLANNED,
    Bench,
    Data,
    Export,
    Generate,
    LoggerName,
    PlanCommand,
    Report,
    Train,
    Verify,
    examples,
    flags_of,
    given,
)
from shardwise.notices import CannotMeet
from shardwise.train.cache import keep_bytecode
from shardwise.train.config import GROUPS, TrainConfig
from shardwise.train.recipes import RECIPES, load_recipe


def _with_flags(command: type, flags: Any) -> Any:
    """The class of a command with more flags, for fields of ``TrainConfig``."""
    flag_type = Annotated[flags, arg(name="")]
    field: Any = ("configuration", flag_type, dataclasses.field(default_factory=dict))
    extended = dataclasses.make_dataclass(
        command.__name__, [field], bases=(command,), frozen=True, kw_only=True
    )
    extended.__doc__ = command.__doc__
    return extended


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    _mend_streams()
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    if "torch" in sys.modules:
        from shardwise.train.world import leave

        leave(code)
    sys.exit(code)


def _mend_streams() -> None:
    """Open closed standard streams (``>&-``) on /dev/null. Otherwise the next file that is opened
    gets the number of a standard stream, and libraries write to that number. Escape characters that
    the encoding of a stream lacks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream: Any = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            with contextlib.suppress(OSError):
                os.fstat(number)  # another file has this number already
                number = null
            if number != null:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if name != "stdin" else "r"))
        elif number and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def run(words: list[str]) -> int:
    """Run a command; return its exit code. Help, version and unknown flags raise ``SystemExit``."""
    if words[:1] == ["bench"]:  # the benchmark parses its own flags
        return _guarded(lambda: bench(words[1:]))
    if words == ["--version"]:
        print(f"shardwise {__version__}")
        sys.exit(0)
    return _guarded(lambda: _parse_and_run(words))


def _parse_and_run(words: list[str]) -> int:
    _refuse_empty(words)
    try:
        command: Any = tyro.cli(
            _commands(),
            prog="shardwise",
            description="Sharded training with whole-matrix optimizers (--version: the version).",
            args=_with_resume(words),
            console_outputs=_speaks(),
            config=(DisallowNone,),
        )
    except SystemExit as stopped:
        if not stopped.code and _speaks():  # the user asked for help
            print(examples(words[0]))
        raise
    check_torch()
    keep_bytecode()
    function: Any = next(run for kind, run in _COMMANDS.items() if isinstance(command, kind))
    return function(command, words)  # type: ignore[no-any-return]


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


def _commands() -> Any:
    train = _with_flags(Train, flags_of(TrainConfig, load_recipe(Train.recipe), GROUPS))
    plans = _with_flags(PlanCommand, flags_of(TrainConfig, None, only=PLANNED))
    kinds = {"train": train, "data": Data, "generate": Generate, "plan": plans}
    kinds |= {"report": Report, "verify": Verify, "export": Export, "bench": Bench}
    return Union[tuple(Annotated[kind, subcommand(name)] for name, kind in kinds.items())]  # noqa: UP007


def _speaks() -> bool:
    """Whether this process prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def _with_resume(words: list[str]) -> list[str]:
    """The words with ``latest`` after a ``--resume`` that stands alone."""
    completed: list[str] = []
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        completed.append(word)
        if word == "--resume" and following.startswith("-"):
            completed.append("latest")
    return completed


# ------------------------------------------------------------------------------ the commands


def train(command: Train, words: list[str]) -> int:
    """Train, if this process is a rank. Otherwise start ranks with the same words."""
    if command.recipe_list:
        for name, recipe in RECIPES.items():
            size = recipe().model.num_parameters / 1e6
            print(f"{name:14}{size:8,.1f}M  {' '.join((recipe.__doc__ or '').split())}")
        return 0
    for name, least in (("nproc", 1), ("max_restarts", 0)):
        if (count := getattr(command, name)) is not None and count < least:
            raise ValueError(f"--{name.replace('_', '-')} {count}: give {least} or more")
    if "RANK" not in os.environ and not command.dry_run:
        # Printed before the imports below, which take seconds.
        if command.nproc is not None:
            ranks = "one rank" if command.nproc == 1 else f"{command.nproc} ranks"
        elif os.environ.get("CUDA_VISIBLE_DEVICES") != "" and glob("/dev/nvidia[0-9]*"):
            ranks = "one rank on each GPU"
        else:
            ranks = "2 ranks"
        print(f"starting {ranks}", flush=True)
    # Modules are never garbage, and a collector that looks at them adds a fifth to the time of the
    # imports. Ranks turn the collector on again once the model is built.
    gc.disable()
    from shardwise.train import session
    from shardwise.train.launcher import be_only_rank, default_ranks, launch
    from shardwise.train.world import is_rank

    request = session.Request(
        recipe=command.recipe,
        changes=given(command.configuration, GROUPS),
        out=command.out,
        resume=command.resume,
    )

    def rank() -> int:
        return session.train(
            request, lambda folder, config: _sinks(command.loggers, folder, config)
        )

    if is_rank():
        return rank()
    resolved, count = session.resolve(request), command.nproc or default_ranks()
    session.check(resolved, count)
    from shardwise.train.preview import preview, without_gpus

    if command.dry_run:
        print(preview(resolved.config, count))
        return 0
    if warning := without_gpus(resolved.config, count):
        print(f"warning  {warning}", flush=True)
    if count == 1 and not command.max_restarts:
        be_only_rank()
        return rank()
    gc.enable()
    return launch(words, nproc=count, max_restarts=command.max_restarts)


def _sinks(names: Sequence[LoggerName], folder: Path, config: Any) -> list[Any]:
    modules = [importlib.import_module(f"shardwise.integrations.{name}") for name in names]
    return [module.Sink(folder, config.to_json()) for module in modules]


def data(command: Data, words: list[str]) -> int:
    from shardwise.train.tokenise import tokenise

    options = dataclasses.asdict(command)
    print(tokenise(options.pop("sources"), options.pop("out"), **options))
    return 0


def plan(command: PlanCommand, words: list[str]) -> int:
    """Print a plan."""
    from shardwise.moe import mixtures_of
    from shardwise.report.plan import dry_run
    from shardwise.report.plan import plan as make_plan
    from shardwise.report.shard_map import map_canvas
    from shardwise.train.build import named_precision
    from shardwise.words import parse_size

    for name in ("ranks", "sequences"):
        if (count := getattr(command, name)) is not None and count < 1:
            raise ValueError(f"--{name} {count}: give 1 or more")
    if not 0 <= (command.rank or 0) < command.ranks:
        raise ValueError(f"--rank {command.rank}: give one from 0 to {command.ranks - 1}")
    if (command.sequences if command.dry_run else command.rank) is not None:
        raise ValueError("--rank needs --dry-run, and --sequences has no effect with --dry-run")
    model, recipe = _model_of(command.model)
    config = recipe or TrainConfig()
    asked: dict[str, Any] = {"ep": config.ep, "tp": config.tp}
    asked |= given(command.configuration)
    if "strategy" in asked:  # the recipe's replicas belong to the strategy of the recipe
        asked = {"replicas": None} | asked
    # ep and tp are checked below: a TrainConfig knows the experts of a GPT only.
    ep, tp = asked.pop("ep"), asked.pop("tp")
    if tp < 1 or command.ranks % tp:
        raise ValueError(f"--tp {tp} does not divide {command.ranks} ranks: give a divisor")
    config = dataclasses.replace(config, **asked, ep=1, tp=1)
    weights = "bf16" if config.precision == "auto" else config.precision
    options: dict[str, Any] = {
        "precision": named_precision(weights, experts=bool(mixtures_of(model))),
        "optimizer": config.optimizer,
        "microbatches": config.num_microbatches,
        "bucket_mb": command.bucket_mb,
        "memory": None if command.memory is None else parse_size(command.memory),
        "name": command.model,
    }
    shape = config.mesh_shape(command.ranks // tp) | ({"tp": tp} if tp > 1 else {})
    # The trainer decides what keep_weights="auto" means: plan as if it were "off".
    kept = config.placements if config.keep_weights == "on" else config.strategy
    if ep < 1 or (ep > 1 and not mixtures_of(model)):
        raise ValueError(
            f"--ep {ep} cannot spread the experts of {command.model}: give 1 or more, or leave it "
            f"out if the model has no experts"
        )
    for layer in mixtures_of(model) if ep > 1 else ():
        layer.keep_share(ep)
    if command.dry_run:
        made = dry_run(model, shape, kept, rank=command.rank or 0, **options)
    else:
        batch = _batch_of(command, model, recipe and config, command.ranks // tp)
        options["tokens"] = math.prod(batch) if batch else None
        # With ep, forward cannot be followed on meta tensors: the rows to send have no values.
        options["batch"] = batch if ep == 1 else None
        made = make_plan(model, shape, kept, **options)
    print(made.text(shard_map=True))
    if command.svg is not None:
        command.svg.write_text(map_canvas(made.shard_map).render(), encoding="utf-8")
        print(f"written: {command.svg}", file=sys.stderr)
    return 0 if made.fits is not False else 3


def _batch_of(command: PlanCommand, model: Any, config: Any, ranks: int) -> tuple[int, int] | None:
    """The sequences of a microbatch on one rank and the tokens of each; None if the model has no
    context. ``ranks``: the number of ranks that read different sequences."""
    context = getattr(getattr(model, "config", None), "context", None)
    if context is None:
        return None
    share = config.batch // (ranks * config.num_microbatches) if config else 1
    return command.sequences or max(1, share), context


def _model_of(name: str) -> tuple[Any, Any]:
    """A module on the meta device, and the recipe's configuration if it was one."""
    import torch

    from shardwise.models.gpt import GPT
    from shardwise.models.hugging_face import config_from_hf
    from shardwise.train.build import with_vocabulary
    from shardwise.train.own_model import make_model
    from shardwise.train.pretrained import begin_from, json_object
    from shardwise.train.recipes import find_recipe
    from shardwise.train.sources import vocabulary_of
    from shardwise.train.tokens import DataError

    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    with torch.device("meta"):
        if path.suffix == ".json":
            if not path.is_file():
                raise ValueError(f"{name}: there is no such file; give a Hugging Face config.json")
            return GPT(config_from_hf(json_object(path))), None
        made = find_recipe(name)()
        if isinstance(made, TrainConfig):
            if made.init_from is not None:
                made = begin_from(made, {})
            try:
                made = with_vocabulary(made, vocabulary_of(made.data, made.tokenizer))
            except DataError as error:  # the data are not on this machine
                size = made.model.vocab_size
                logging.getLogger(__name__).warning("%s (planned with %d tokens)", error, size)
            return make_model(made), made
        if isinstance(made, torch.nn.Module):
            return made, None
    raise ValueError(
        f"{name} returned a {type(made).__name__}: a recipe returns a TrainConfig, a factory a "
        f"torch.nn.Module"
    )


def generate(command: Generate, words: list[str]) -> int:
    import torch

    from shardwise.train.pretrained import open_model, text_after

    if command.tokens < 0 or not 0 <= command.seed < 1 << 63:
        raise ValueError(
            f"--tokens {command.tokens} --seed {command.seed}: give 0 or more tokens, and a seed "
            f"from 0 to 2**63 - 1"
        )
    model, codec = open_model(command.path)
    if codec is None:
        raise ValueError(
            f"{command.path} has no tokenizer, as it was trained on tokens of an unknown one: put "
            f"tokenizer.json beside the exported weights"
        )
    text = text_after(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),
        codec,
        command.prompt,
        command.tokens,
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        generator=torch.Generator().manual_seed(command.seed),
    )
    print(command.prompt + text)
    return 0


def report(command: Report, words: list[str]) -> int:
    from shardwise.report.html import compare_runs, write_report

    if not command.runs:
        raise ValueError("shardwise report: name the folder of a run, or several to compare")
    several, out = len(command.runs) > 1, command.out or Path("comparison.html")
    if not several and command.out is not None:
        raise ValueError(
            f"--out {out} is for several runs: the page of one run is written to its folder"
        )
    if several and (not out.parent.is_dir() or out.is_dir()):
        raise ValueError(f"--out {out}: name a file, in a folder that exists")
    print(compare_runs(command.runs, out) if several else write_report(command.runs[0]))
    return 0


def verify(command: Verify, words: list[str]) -> int:
    from shardwise.checkpoint import verify as check
    from shardwise.train.folder import all_checkpoints

    results = [check(path) for path in all_checkpoints(command.path)]
    print(*results, sep="\n")
    return 0 if all(result.ok for result in results) else 1


def export(command: Export, words: list[str]) -> int:
    import torch

    from shardwise.checkpoint import export as write
    from shardwise.train.folder import newest_checkpoint, saved_run
    from shardwise.train.pretrained import codec_of_run, export_options, tokenizer_files

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[command.dtype]
    checkpoint = newest_checkpoint(command.path)
    config = saved_run(checkpoint)
    codec = codec_of_run(checkpoint, config)
    files = write(
        checkpoint,
        command.out,
        dtype=dtype,
        end_token=None if codec is None else codec.end,
        beside=tokenizer_files(codec),
        **export_options(config, dtype),
    )
    print(*files, sep="\n")
    return 0


def bench(words: list[str]) -> int:
    """``shardwise bench NAME ...`` runs ``python -m benchmarks.NAME ...``."""
    package = Path(__file__).resolve().parent
    # A wheel holds the benchmarks inside the package (setup.py), a checkout beside it.
    root = package / "_bench" if (package / "_bench").is_dir() else package.parent
    benchmarks = {
        path.stem.replace("_", "-"): path.read_text("utf-8")
        for path in sorted((root / "benchmarks").glob("*.py"))
        if "def main(" in path.read_text("utf-8")
    }
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print("usage: shardwise bench NAME ... (NAME --help shows the flags of a benchmark)\n")
        for benchmark, text in benchmarks.items():
            line = " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())
            # The docstring begins with the command itself.
            line = re.sub("^``.*?``: ", "", line).replace("``", "")
            print(f"  {benchmark:20}{line[:1].upper()}{line[1:]}")
        print("\n" + examples("bench"))
        return 0
    if name not in benchmarks:
        raise ValueError(
            f"shardwise bench {name}: there is no such benchmark; name one of "
            f"{', '.join(benchmarks)}"
        )
    check_torch()
    sys.path.insert(0, str(root))
    importlib.import_module(f"benchmarks.{name.replace('-', '_')}").main(words[1:])
    return 0


_COMMANDS = {Train: train, Data: data, PlanCommand: plan, Report: report, Verify: verify}
_COMMANDS |= {Export: export, Generate: generate}


# ------------------------------------------------------------------------------ exits


def _guarded(function: Any) -> int:
    """The exit code of ``function``. One rank prints a mistake of the user, as one line."""
    logging.basicConfig(
        format="%(levelname)s %(name)s: %(message)s",
        level=logging.WARNING if _speaks() else logging.ERROR,
    )
    try:
        code = int(function())
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the pipe has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        logging.getLogger(__name__).debug("", exc_info=True)
        if _speaks() or isinstance(error, CannotMeet):
            print(f"error: {_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        gc.enable()


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
