# SPDX-License-Identifier: Apache-2.0
"""Errors that all ranks raise together, and agreement on what they are about to do.

    rank 0   problems: none       --\
    rank 1   problems: "'w' ..."  --->  exchanged over an axis  -->  every rank raises "'w' ..."

A rank that raises alone leaves the others waiting in their next collective. ``together`` is for
work that may fail on any rank; ``raise_together`` is for problems that were found already, and for
ranks that are about to do different things, of which none is wrong by itself. ``differ`` and
``any_rank_in_step`` compare facts in every step, a bit each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import Any, TypeVar

import numpy
import torch.distributed as dist

from shardwise import comm
from shardwise.lockstep import Journal

T = TypeVar("T")
UNSUPPORTED = "not supported: "  # problems that begin so raise NotImplementedError
_MAX_TEXT = 20_000  # characters of one rank's problem
JointError = Callable[[set[str], str], Exception]


def all_ranks() -> comm.Axis:
    """The axis of all ranks of the job, or of this process alone without a process group."""
    if dist.is_available() and dist.is_initialized():
        return comm.as_axis(dist.group.WORLD, "world")  # type: ignore[arg-type]
    return comm.Axis("world", None, 1, 0, {}, (0,), Journal(None, 0, 1))


def together(
    work: Callable[[], T],
    axis: comm.Axis,
    *,
    facts: Callable[[T], Any] = lambda made: None,
    error: JointError = lambda kinds, text: ValueError(text),
) -> tuple[T, list[Any]]:
    """Run ``work`` on every rank; return its value and every rank's ``facts`` of the value.

    There is one exchange, whether ``work`` raises or not. If any rank raises, all ranks raise
    ``error(names of the exceptions' classes, text)``; the text says which rank found what.
    """
    failed: tuple[str, str] | None = None
    found: Any = None
    cause: Exception | None = None
    try:
        made = work()
        found = facts(made)
    except Exception as problem:
        cause = problem
        name = type(problem).__name__
        failed = name, (str(problem) or name)[:_MAX_TEXT]
    everyone = comm.agree((failed, found), axis)
    problems = {rank: one for rank, (one, _) in enumerate(everyone) if one is not None}
    if not problems:
        return made, [fact for _, fact in everyone]
    raise error({name for name, _ in problems.values()}, _message(problems, axis.size)) from cause


def _message(problems: dict[int, tuple[str, str]], num_ranks: int) -> str:
    """Each text once, behind the ranks that found it unless all ranks did."""
    ranks: dict[str, list[int]] = {}
    for rank, (_, text) in problems.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(problems) == num_ranks:
        return next(iter(ranks))
    return "\n".join(
        f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}: {text}"
        for text, some in ranks.items()
    )


def raise_together(
    what: str,
    problems: Sequence[str],
    mine: Sequence[str],
    axes: Iterable[comm.Axis],
    *,
    same: str,
    facts: Any = None,
) -> bool:
    """Raise the problems of any rank on every rank, or that ``mine`` differs between ranks. Returns
    whether ``facts``, which may differ, are equal on all ranks of all axes.

    Every rank goes through every axis, whatever it finds: a rank that left early would make the
    others wait. There is one exchange over each; lines follow where they differ.

    Args:
        what: the beginning of the message.
        mine: what this rank is about to do, in lines that must be equal on all ranks.
        same: ``mine`` in a few words, "wrap the same module".
    """
    known, alike = list(problems), True
    digests = [sha256(repr(one).encode()).digest() for one in (list(mine), facts)]
    for axis in axes:
        everyone = comm.agree((known, alike, *digests), axis)
        known = list(dict.fromkeys(problem for theirs, *_ in everyone for problem in theirs))
        # Ranks of the axes before are heard of through those that they told.
        alike = all(one[1] and one[3] == digests[1] for one in everyone)
        texts = [theirs[2] for theirs in everyone]
        other = next((rank for rank, theirs in enumerate(texts) if theirs != texts[0]), 0)
        if other and not known:
            lines = comm.agree(list(mine), axis)
            pairs = zip_longest(lines[0], lines[other], fillvalue="nothing")
            differs = [f"{one} / {two}" for one, two in pairs if one != two][:4]
            known.append(
                f"the ranks do not {same}: rank 0 / rank {other} of axis '{axis.name}': "
                f"{'; '.join(differs)}. Do the same on every rank, with the same options"
            )
    if known:
        kind = NotImplementedError if known[0].startswith(UNSUPPORTED) else ValueError
        raise kind(f"{what}: " + "; ".join(known))
    return alike


def differ(value: int, axis: comm.Axis) -> bool:
    """Whether a number of 32 bits is not the same on all ranks of the axis."""
    bits = numpy.unpackbits(numpy.frombuffer(value.to_bytes(4, "big"), numpy.uint8)) > 0
    first, second = numpy.split(comm.any_rank(numpy.concatenate([bits, ~bits]), axis), 2)
    return bool((first & second).any())


def any_rank_in_step(facts: comm.Facts, axes: Iterable[comm.Axis]) -> comm.Facts:
    """Whether each fact holds on any rank, where ranks have issued the same collectives over the
    axes so far; else all of them raise, and say which. Every rank goes through every axis: a rank
    that sees no difference hears of it from one that does."""
    problems: list[str] = []
    apart = False
    for axis in axes:
        trail, told = axis.journal.trail(), numpy.array([apart])
        found = comm.any_rank(numpy.concatenate([facts, told, trail, ~trail]), axis)
        facts, told, first, second = numpy.split(
            found, [len(facts), len(facts) + 1, len(found) - len(trail)]
        )
        if (first & second).any():  # a bit that is set on one rank and not on another
            problems.append(axis.journal.first_difference())
        apart = apart or bool(problems) or bool(told.any())
    if apart:
        heard = "other ranks are out of step, and say in what: load a checkpoint, or end this run"
        raise RuntimeError(problems[0] if problems else heard)
    return facts
