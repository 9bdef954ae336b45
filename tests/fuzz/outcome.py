# SPDX-License-Identifier: Apache-2.0
"""Run a program on the ranks of a pool, and beside it as hand-averaged plain torch; compare."""

from __future__ import annotations

import re
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.program import Program, walk
from tests.fuzz.replica import Log, Piece, Replica, in_fp8
from tests.fuzz.run import Run
from tests.parity.programs import CONTEXTS
from tests.ranks import RanksFailed, run_ranks, shut_down

FINE = ("ok", "loud", "both")
MEET_SECONDS = 5.0  # how long ranks that raised wait for the others to raise


@dataclass
class Ended:
    """How a program ended: the log of each rank, and the op that raised."""

    logs: list[Log]
    error: str = ""
    number: int = -1


def on_rank(rank: int, ranks: int, program: Program, scratch: str) -> tuple[Log, str, int]:
    """The log of one rank, and the error that it and all others have raised: the ranks live on."""
    log: Log = []
    number = -1
    try:
        part = rank // 2 if program["tp"] else rank
        replica = Replica(program, part, ranks, wrapped=True)
        log, run = replica.log, Run(program, [replica], scratch)
        try:
            with CONTEXTS[program.get("planted", "nothing")]():
                run.run()
        finally:
            number = run.number
    except Exception as error:
        store = dist.distributed_c10d._get_default_store()
        store.add(scratch, 1)
        until = time.monotonic() + MEET_SECONDS
        while time.monotonic() < until:
            if store.add(scratch, 0) == ranks:
                return log, "raised\n" + "".join(traceback.format_exception(error)), number
            time.sleep(0.01)
        raise
    return log, "", number


def reference(program: Program) -> Ended:
    """The logs that ranks should have: plain torch."""
    ranks = range(program["ranks"] // 2 if program["tp"] else program["ranks"])
    ended = Ended([])
    try:
        replicas = [Replica(program, rank, 1, wrapped=False) for rank in ranks]
        ended.logs = [one.log for one in replicas for _ in range(2 if program["tp"] else 1)]
        run = Run(program, replicas, "")
        try:
            run.run()
        finally:
            ended.number = run.number
    except Exception as error:
        ended.error = "".join(traceback.format_exception(error))
    return ended


# ------------------------------------------------------------------------------ comparing


def exact(program: Program) -> bool:
    """Whether ranks must have the reference's very bits: all sums have one order. Two ranks add two
    terms; norms, penalties, compiled graphs, tensor parallelism and spread experts sum in another
    order, and so do gradients of gradients, and of a tensor that is read three times (the gates of
    a wrapped module add up its own two first)."""
    odd = set(program["odd"])
    other = odd & {"clip", "penalty", "tp", "spread", "compile", "double", "peek", "moe"}
    if program["ranks"] != 2 or other or program["optimizer"] == "muon":
        return False
    if odd >= {"grad", "nosync"}:  # autograd.grad reduces the gradients that wait
        return False
    return not any(spec.get("residual") for _, spec in walk(program["tree"]))


def tolerance(program: Program) -> float:
    if exact(program):
        return 0.0
    if in_fp8(program):  # roundings of fp8 turn out otherwise
        return 0.3
    if program["wrap"]["precision"]:
        return 0.05
    if program["optimizer"] == "muon":
        # Newton-Schulz makes much of what is nearly nothing: rows of a router's gradient sum to 0,
        # and a clip by a float32 norm moves that sum by 1e-7 of the rest.
        clipped = "clip" in program["odd"]
        return 1e-2 if program["dtype"] == "float32" else 1e-4 if clipped else 1e-5
    if program["dtype"] == "float32":
        return 1e-4
    # The norm of sw.optimizer, and so its clip, is float32.
    return 1e-6 if "clip" in program["odd"] and program["optimizer"] == "sw_adamw" else 1e-9


def difference(ours: Any, theirs: Any, bound: float, zeros: bool) -> str | None:
    """How a value of a rank differs from the reference's, in words."""
    if zeros and (ours is None or theirs is None):  # None and zeros mean the same
        ours, theirs = (torch.zeros(()) if v is None else v for v in (ours, theirs))
    if isinstance(ours, Piece) and isinstance(theirs, Tensor):
        right = theirs.reshape(-1)[ours.low : ours.high] if theirs.dim() else theirs
        ours, theirs = ours.values, right
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        same = type(ours) is type(theirs) and ours == theirs
        return None if same else f"{_word(ours)} for {_word(theirs)}"
    if ours.shape != theirs.shape and ours.dim() and theirs.dim():
        return f"{tuple(ours.shape)} for {tuple(theirs.shape)}"
    if not theirs.isfinite().all():
        return None
    if not ours.isfinite().all():
        return "not finite"
    scale = max(1.0, theirs.abs().max().item() if theirs.numel() else 0.0)  # squares may overflow
    ours, theirs = ours.double() / scale, theirs.double() / scale
    off = (ours - theirs).norm().item()
    if not bound:
        return f"other bits, off by {off:.1e}" if off else None
    relative = off / (theirs.norm().item() + 1e-2 / scale)  # gradients that cancel are noise
    return None if relative <= bound else f"other values, off by {relative:.1e}"


def _word(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else str(value)


def compare(program: Program, ours: list[Log], theirs: list[Log], whole: bool = True) -> str | None:
    """The first difference between the ranks and the reference. Not ``whole``: as far as both
    came."""
    zeros, bound = program["wrap"]["unused"] == "zeros", tolerance(program)
    for rank, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
        common = min(len(mine), len(right))
        if whole and len(mine) != len(right):
            return "other things were logged"
        for (label, value), (same, expected) in zip(mine[:common], right[:common], strict=True):
            if label != same:
                return f"other things were logged: {label}, {same}"
            words = difference(value, expected, bound, zeros)
            if words:
                return f"{label} on rank {rank}: {words}"
    return _uncovered(list(zip(*ours, strict=False)), theirs[0]) if not program["spread"] else None


def _uncovered(rows: list[tuple[Any, ...]], right: Log) -> str | None:
    """The first value of which the pieces of all ranks leave out an element."""
    for row, (label, expected) in zip(rows, right, strict=False):
        pieces = sorted((one.low, one.high) for _, one in row if isinstance(one, Piece))
        end = 0
        for low, high in pieces:
            end = max(end, high) if low <= end else end
        if pieces and isinstance(expected, Tensor) and end != expected.numel():
            return f"{label}: no rank holds its elements from {end} on"
    return None


# ------------------------------------------------------------------------------ the outcome


def outcome(program: Program, timeout: float = 40.0) -> tuple[str, str, str]:
    """(kind, words that are alike for programs with the same outcome, all that is known).

    Kinds: ok, loud (every rank raised an error by name), both (plain torch raises too); findings
    are differs, hangs, crashes, some (ranks alone raise), bare (an error that is no message of the
    library), odd (a message that this program should not get), accepted (plain torch alone raises).
    An op that is refused is left out, and the program runs once more.
    """
    first = None
    for _ in range(3):
        kind, words, full, number = once(program, timeout)
        if kind not in ("loud", "both"):
            break
        first = first or (kind, words, full)
        if not 0 <= number < len(program["ops"]):
            break
        ops = program["ops"]
        program = program | {"ops": ops[:number] + ops[number + 1 :]}
    return first if first and kind in FINE else (kind, words, full)


def once(program: Program, timeout: float) -> tuple[str, str, str, int]:
    """The outcome, and the op that was refused."""
    expected = reference(program)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        try:
            ended = run_ranks(on_rank, program["ranks"], program, scratch, timeout=timeout)
        except RanksFailed as failed:
            kind, words = classify(failed.reports, str(failed))
            if expected.error and kind in ("loud", "odd", "bare", "some"):
                return "both", words, str(failed), expected.number
            return kind, words, str(failed), -1
    logs, errors, numbers = zip(*ended, strict=True)
    raised = {rank: error for rank, error in enumerate(errors) if error}
    right = expected.logs or [[] for _ in logs]  # none: plain torch cannot even begin
    found = compare(program, logs, right, whole=not raised and not expected.error)
    if any(STUCK.search(error) for error in raised.values()):
        shut_down()
    if found is not None:
        label = re.sub(r"op \d+ | on rank \d+|, off by \S+|\S+\.\S+", "", found)
        return "differs", label, found, -1
    if raised:
        full = "\n".join(f"rank {rank}: {error}" for rank, error in raised.items())
        kind, words = classify(raised, full)
        if kind == "loud" and not expected.error and not is_expected(program, words):
            kind = "odd"
        number = numbers[0] if len(set(numbers)) == 1 else -1
        if expected.error and kind in ("loud", "odd", "bare", "some"):
            return "both", words, full, min(number, expected.number)
        return kind, words, full, number
    if expected.error:
        last = expected.error.strip().splitlines()[-1]
        return "accepted", normal(last), expected.error, -1
    return "ok", "", "", -1


def classify(reports: dict[int, str], full: str) -> tuple[str, str]:
    said = [reports[rank] for rank in sorted(reports)]
    died = [report for report in said if report.startswith("died")]
    if died:
        return "crashes", died[0].splitlines()[0]
    raised = [error_of(report) for report in said if report.startswith("raised")]
    if not raised:
        return "hangs", normal(full.splitlines()[0])
    if len(raised) < len(said) or len({words for _, words in raised}) > 1:
        return "some", " | ".join(dict.fromkeys(words for _, words in raised))
    named, words = raised[0]
    return ("loud" if named else "bare"), words


# Refusals by design, and what a program must have to get one: one word of each list.
REFUSED = {
    "this tensor is a shard of": ["alone partial peek"],
    "got mixed torch.Tensor and DTensor": ["alone partial peek"],
    "gathered weights are copies": ["unshard alone settings late", "edit average snapshot"],
    "every gather encodes it": ["unshard alone settings late", "edit average snapshot"],
    "were computed and not reduced": ["reentrant", "calls tied peek"],
    "donated_buffer=False": ["compile"],
    "and no backward has followed the last forward": [
        "freeze raise",
        "eval grad alone raise",
    ],
}


def is_expected(program: Program, words: str) -> bool:
    """Whether a program may get this message."""
    has = {op["op"] for op in program["ops"]} | set(program["odd"])
    for _, spec in walk(program["tree"]):
        has |= {spec["kind"], spec.get("checkpoint")}
    return any(
        pattern in words and all(has & set(one.split()) for one in needs)
        for pattern, needs in REFUSED.items()
    )


# A collective has failed on these ranks: their connections are no longer what they were.
STUCK = re.compile("out of step|pair closure|Connection closed|timed out")
# Errors of torch's own that name the way out, or of which a warning has named it.
KNOWN = ("got mixed torch.Tensor and DTensor", "donated_buffer=False")
BARE = re.compile(
    r"(Index|Key|Attribute|Assertion|Type|Unbound\w+|Recursion|NotImplemented)Error: *"
)


def error_of(report: str) -> tuple[bool, str]:
    """Whether the library raised an error with a message of its own, and the normalised text."""
    lines = report.splitlines()
    frames = [line for line in lines if line.startswith('  File "')]
    message = [
        i for i, line in enumerate(lines) if line and not line.startswith((" ", "Traceback"))
    ]
    text = " ".join(lines[message[-1] :])
    text = text[max(text.find("the ranks are out of step"), 0) :]  # ranks wait in different calls
    own = "/shardwise/" in frames[-1] and not BARE.match(text)
    if "NotImplementedError" in text and "/shardwise/" in frames[-1]:
        own = True
    return own or any(known in text for known in KNOWN), normal(text)


def normal(text: str) -> str:
    """A message without names and numbers."""
    text = re.sub(r", off by \S+", "", text)
    text = re.sub(r"'[\w.\[\]]*'(, '[\w.\[\]]*')*( and \d+ more)?", "'…'", text)
    return re.sub(r"(parts\.)?\d+(\.\d+)?(\.parts\.\d+)*", "#", text)[:300]
