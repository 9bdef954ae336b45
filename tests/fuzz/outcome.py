# SPDX-License-Identifier: Apache-2.0
"""Run a program on the ranks of a pool, and beside it as hand-averaged plain torch; compare."""

from __future__ import annotations

import re
import tempfile
import traceback
from typing import Any

from tests.fuzz.program import Program, walk
from tests.fuzz.run import Log, Piece, Replica, Run
from tests.parity.programs import CONTEXTS
from tests.ranks import RanksFailed, run_ranks

FINE = ("ok", "void")


def on_rank(rank: int, ranks: int, program: Program, scratch: str) -> Log:
    """The log of one rank."""
    replica = Replica(program, rank, wrapped=True)
    with CONTEXTS[program.get("planted", "nothing")]():
        Run(program, [replica], scratch).run()
    return replica.log


def reference(program: Program) -> list[Log]:
    """The logs that ranks should have: plain torch."""
    replicas = [Replica(program, rank, wrapped=False) for rank in range(program["ranks"])]
    Run(program, replicas, "").run()
    return [one.log for one in replicas]


def outcome(program: Program, timeout: float = 60.0) -> tuple[str, str, str]:
    """(kind, words that are alike for programs with the same outcome, all that is known).

    ok, void (plain torch raises an error: no program), or a finding: differs, raises (no program
    that is drawn is refused), hangs (no rank raised).
    """
    try:
        right = reference(program)
    except Exception as error:
        return "void", alike(str(error)), traceback.format_exc()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        try:
            logs = run_ranks(on_rank, program["ranks"], program, scratch, timeout=timeout)
        except RanksFailed as failed:
            ended = [one for one in failed.reports.values() if one.startswith(("raised", "died"))]
            # The first line after the frames of each last traceback.
            said = {alike(re.split(r"\n(?=\w)", one.strip())[-1]) for one in ended}
            return "raises" if said else "hangs", " | ".join(sorted(said)), str(failed)
    found = compare(program, logs, right)
    if found is None:
        return "ok", "", ""
    return "differs", re.sub(r"op \d+ | on rank \d+|, off by \S+|\S+\.\S+", "", found), found


def alike(text: str) -> str:
    """A message without names and numbers."""
    text = re.sub(r"'[\w.\[\]]*'(, '[\w.\[\]]*')*( and \d+ more)?", "'…'", text)
    return re.sub(r"\d+", "#", text)[:300]


# ------------------------------------------------------------------------------ comparing


def exact(program: Program) -> bool:
    """Whether ranks must have the reference's very bits: all sums have one order. Two ranks add two
    terms; norms sum in another order, and so do the gradients of a tensor that is read three times
    (the gates of a wrapped module add up its own two first)."""
    odd = set(program["odd"])
    if program["ranks"] != 2 or odd & {"clip", "moe"} or program["optimizer"] == "muon":
        return False
    if odd >= {"grad", "nosync"}:  # autograd.grad reduces the gradients that wait
        return False
    return not any(spec.get("residual") for _, spec in walk(program["tree"]))


def tolerance(program: Program) -> float:
    if exact(program):
        return 0.0
    if program["wrap"]["precision"]:  # what nearly cancels is all rounding
        return 0.3
    if program["optimizer"] == "muon":
        # Updates of float64 weights are as near as float32 (1e-7 after one step), and Newton-Schulz
        # makes much of what is nearly nothing: the gradients after four steps are off by 3e-4.
        return 1e-2
    if program["dtype"] == "float32":
        return 1e-4
    # The norm of sw.optimizer, and so its clip, is float32.
    return 1e-6 if "clip" in program["odd"] and program["optimizer"] == "sw_adamw" else 1e-9


def compare(program: Program, ours: list[Log], theirs: list[Log]) -> str | None:
    """The first difference between the ranks and the reference, in words."""
    bound = tolerance(program)
    for rank, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
        if [label for label, _ in mine] != [label for label, _ in right]:
            return "other things were logged"
        for (label, value), (_, expected) in zip(mine, right, strict=True):
            words = difference(value, expected, bound)
            if words:
                return f"{label} on rank {rank}: {words}"
    return None


def difference(ours: Any, theirs: Any, bound: float) -> str | None:
    """How a value of a rank differs from the reference's."""
    if ours is None or theirs is None:
        given = "a value" if theirs is None else "None"
        return None if ours is theirs else f"{given} for the other"
    if isinstance(ours, Piece):
        low, high, ours = ours
        theirs = theirs.reshape(-1)[low:high]
    if ours.shape != theirs.shape:
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
