# SPDX-License-Identifier: Apache-2.0
"""Run a program on the ranks of a pool, and beside it as hand-averaged plain torch; compare."""

from __future__ import annotations

import re
import tempfile
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.program import Program
from tests.fuzz.run import Log, Replica, Run
from tests.ranks import RanksFailed, run_ranks, shut_down

MEET_SECONDS = 5.0  # how long ranks that raised wait for the others to raise


def on_rank(rank: int, ranks: int, program: Program, scratch: str) -> Log | str:
    """The log of one rank, or the error that it and all others have raised: the ranks live on."""
    try:
        part = rank // 2 if program["tp"] else rank
        replica = Replica(program, part, ranks, wrapped=True, cast=None)
        Run(program, [replica], scratch).run()
    except Exception as error:
        store = dist.distributed_c10d._get_default_store()
        store.add(scratch, 1)
        until = time.monotonic() + MEET_SECONDS
        while time.monotonic() < until:
            if store.add(scratch, 0) == ranks:
                return "raised\n" + "".join(traceback.format_exception(error))
            time.sleep(0.01)
        raise
    return replica.log


def in_fp8(program: Program) -> bool:
    return "fp8" in (program["wrap"]["precision"] or {"weights": ""})["weights"]


def reference(program: Program) -> list[Log]:
    """The log that each rank should have: plain torch, or, for weights in fp8, the library on one
    rank."""
    library = in_fp8(program)
    cast = torch.bfloat16 if program["wrap"]["precision"] and not library else None
    if library and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = range(program["ranks"] // 2 if program["tp"] else program["ranks"])
    replicas = [Replica(program, rank, 1, wrapped=library, cast=cast) for rank in ranks]
    Run(program, replicas, "").run()
    return [replica.log for replica in replicas for _ in range(2 if program["tp"] else 1)]


def tolerance(program: Program) -> float:
    if in_fp8(program):  # two terms are one sum; more, and roundings of fp8 turn out otherwise
        exact = program["ranks"] == 2 and program["wrap"]["precision"].get("reduce") == "fp32"
        return 1e-4 if exact else 0.2
    if program["wrap"]["precision"]:
        return 0.2
    if program["optimizer"] == "muon":
        return 1e-2
    return 1e-9 if program["dtype"] == "float64" else 1e-4


def difference(ours: Any, theirs: Any, bound: float, zeros: bool) -> str | None:
    """How a value of a rank differs from the reference's, in words."""
    if zeros and (ours is None or theirs is None):  # None and zeros mean the same
        ours, theirs = (torch.zeros(()) if v is None else v for v in (ours, theirs))
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        same = type(ours) is type(theirs) and ours == theirs
        return None if same else f"{_word(ours)} for {_word(theirs)}"
    if not theirs.isfinite().all():
        return None
    if not ours.isfinite().all():
        return "not finite"
    off = (ours.double() - theirs.double()).norm().item()
    relative = off / (theirs.double().norm().item() + 1e-2)  # gradients that cancel are noise
    return None if relative <= bound else f"other values, off by {relative:.1e}"


def _word(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else str(value)


def compare(program: Program, ours: list[Log], theirs: list[Log]) -> str | None:
    """The first difference between the ranks and the reference."""
    zeros = program["wrap"]["unused"] == "zeros"
    for rank, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
        if [label for label, _ in mine] != [label for label, _ in right]:
            return "other things were logged"
        for (label, value), (_, expected) in zip(mine, right, strict=True):
            words = difference(value, expected, tolerance(program), zeros)
            if words:
                return f"{label} on rank {rank}: {words}"
    return None


# ------------------------------------------------------------------------------ the outcome


def outcome(program: Program, timeout: float = 40.0) -> tuple[str, str, str]:
    """(kind, words that are alike for programs with the same outcome, all that is known).

    Kinds: ok, loud (every rank raised an error by name), both (plain torch raises too); findings
    are differs, hangs, crashes, some (ranks alone raise), bare (an error that is no message of the
    library), accepted (plain torch alone raises).
    """
    try:
        expected: Any = reference(program)
    except Exception as error:
        expected = error
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        try:
            logs: list[Any] = run_ranks(
                on_rank, program["ranks"], program, scratch, timeout=timeout
            )
            reports = {rank: log for rank, log in enumerate(logs) if isinstance(log, str)}
            if reports:
                if any(STUCK.search(report) for report in reports.values()):
                    shut_down()
                raise RanksFailed("every rank raised", reports)
        except RanksFailed as failed:
            kind, words = classify(failed)
            if isinstance(expected, Exception) and kind in ("loud", "bare", "some"):
                kind = "loud" if in_fp8(program) else "both"
            return kind, words, str(failed)
    if isinstance(expected, Exception):
        return "accepted", normal(str(expected)), "".join(traceback.format_exception(expected))
    found = compare(program, logs, expected)
    if found is None:
        return "ok", "", ""
    return "differs", re.sub(r"op \d+ | on rank \d+|, off by \S+|\S+\.\S+", "", found), found


def classify(failed: RanksFailed) -> tuple[str, str]:
    reports = [failed.reports[rank] for rank in sorted(failed.reports)]
    if any(report.startswith("died") for report in reports):
        died = next(report for report in reports if report.startswith("died"))
        return "crashes", died.splitlines()[0]
    raised = [report for report in reports if report.startswith("raised")]
    if not raised:
        return "hangs", normal(str(failed).splitlines()[0])
    said = [error_of(report) for report in raised]
    if len(raised) < len(reports) or len({words for _, words in said}) > 1:
        return "some", " | ".join(dict.fromkeys(words for _, words in said))
    named, words = said[0]
    return ("loud" if named else "bare"), words


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
    own = "/shardwise/" in frames[-1] and not BARE.match(text)
    if "NotImplementedError" in text and "/shardwise/" in frames[-1]:
        own = True
    return own or any(known in text for known in KNOWN), normal(text)


def normal(text: str) -> str:
    """A message without names and numbers."""
    text = re.sub(r", off by \S+", "", text)
    text = re.sub(r"'[\w.\[\]]*'(, '[\w.\[\]]*')*( and \d+ more)?", "'…'", text)
    return re.sub(r"(parts\.)?\d+(\.\d+)?(\.parts\.\d+)*", "#", text)[:300]
