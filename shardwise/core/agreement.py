# SPDX-License-Identifier: Apache-2.0
"""Errors that all ranks raise together, and checks that ranks are about to do the same.

    rank 0   problems: none       --\
    rank 1   problems: "'w' ..."  --->  exchanged over an axis  -->  every rank raises "'w' ..."

A rank that raises alone leaves the others waiting in their next collective. ``together`` runs work
that may fail on any rank. ``raise_together`` raises problems that a rank has found already, and
finds ranks that are about to do different things, where none of them is wrong by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.core import comm

T = TypeVar("T")
UNSUPPORTED = "not supported: "  # problems that begin so raise NotImplementedError
_MAX_TEXT = 20_000  # characters of one rank's problem
JointError = Callable[[set[str], str], Exception]


def all_ranks() -> comm.Axis:
    """The axis of all ranks of the job, or of this process alone without a process group."""
    if dist.is_available() and dist.is_initialized():
        return comm.as_axis(dist.group.WORLD, "world")  # type: ignore[arg-type]
    return comm.Axis("world", None, 1, 0, {}, (0,))


def together(
    work: Callable[[], T],
    axis: comm.Axis,
    *,
    facts: Callable[[T], Any] = lambda value: None,
    error: JointError = lambda kinds, text: ValueError(text),
) -> tuple[T, list[Any]]:
    """Run ``work`` on every rank; return its value and every rank's ``facts`` of the value.

    There is one exchange, whether ``work`` raises or not. If any rank raises, all ranks raise
    ``error(names of the exceptions' classes, text)``; the text says which rank found what.
    """
    problem: tuple[str, str] | None = None  # the name of the exception's class, and its text
    value_facts: Any = None
    cause: Exception | None = None
    try:
        value = work()
        value_facts = facts(value)
    except Exception as exception:
        cause = exception
        name = type(exception).__name__
        problem = name, (str(exception) or name)[:_MAX_TEXT]
    answers = comm.agree((problem, value_facts), axis)
    problems = {rank: theirs for rank, (theirs, _) in enumerate(answers) if theirs is not None}
    if not problems:
        return value, [theirs for _, theirs in answers]
    raise error({name for name, _ in problems.values()}, _message(problems, axis.size)) from cause


def _message(problems: dict[int, tuple[str, str]], num_ranks: int) -> str:
    """Each text once, after the ranks that found the problem; without ranks if all found it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, text) in problems.items():
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1 and len(problems) == num_ranks:
        return next(iter(ranks_of))
    return "\n".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in ranks_of.items()
    )


def raise_together(
    what: str,
    problems: Sequence[str],
    mine: Sequence[str],
    axes: Iterable[comm.Axis],
    *,
    same: str,
) -> None:
    """Raise on every rank the problems that any rank has, or an error where ``mine`` differs
    between ranks: lines that say what this rank is about to do. ``what`` begins the message, and
    ``same`` is ``mine`` in a few words, "wrap the same module".

    Every rank goes through every axis, whatever it finds: a rank that left early would make the
    others wait. There is one exchange over each axis, and a second one where ``mine`` differs.
    """
    found, digest = list(problems), sha256(repr(list(mine)).encode()).digest()
    for axis in axes:
        answers = comm.agree((found, digest), axis)
        found = list(dict.fromkeys(problem for theirs, _ in answers for problem in theirs))
        digests = [theirs for _, theirs in answers]
        other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), 0)
        if other and not found:
            lines = comm.agree(list(mine), axis)
            pairs = zip_longest(lines[0], lines[other], fillvalue="nothing")
            differences = [f"{first} / {second}" for first, second in pairs if first != second]
            found.append(
                f"the ranks do not {same}: rank 0 / rank {other} of axis '{axis.name}': "
                f"{'; '.join(differences[:4])}. Do the same on every rank, with the same options"
            )
    if found:
        kind = NotImplementedError if found[0].startswith(UNSUPPORTED) else ValueError
        raise kind(f"{what}: " + "; ".join(found))
