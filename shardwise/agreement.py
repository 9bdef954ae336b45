# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused by every rank alike, before anybody waits in a collective.

    rank 0   problems: none       --\
    rank 1   problems: "'w' ..."  --->  exchanged over every axis  -->  every rank raises "'w' ..."

Also where ranks are about to do different things, of which none is wrong by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from shardwise import comm

UNSUPPORTED = "not supported: "  # problems that begin so raise NotImplementedError


def raise_together(
    what: str,
    problems: Sequence[str],
    mine: Sequence[str],
    axes: Iterable[comm.Axis],
    *,
    same: str,
) -> None:
    """Raise on every rank what any rank has found, or that ``mine`` is not what the others have.

    All ranks go through all axes, whatever they find: one that left early would make others wait.

    Args:
        what: begins the message.
        mine: what this rank is about to do, in lines that are the same on all of them.
        same: that in a few words, "wrap the same module".
    """
    known = list(problems)
    for axis in axes:
        everyone = comm.agree((known, list(mine)), axis)
        known = list(dict.fromkeys(problem for theirs, _ in everyone for problem in theirs))
        lines = [theirs for _, theirs in everyone]
        other = next((rank for rank, theirs in enumerate(lines) if theirs != lines[0]), 0)
        if other and not known:
            pairs = zip_longest(lines[0], lines[other], fillvalue="nothing")
            differs = [f"{one} / {two}" for one, two in pairs if one != two][:4]
            known.append(
                f"the ranks do not {same}: rank 0 / rank {other} of axis '{axis.name}': "
                f"{'; '.join(differs)}. Do the same on every rank, with the same options"
            )
    if known:
        kind = NotImplementedError if known[0].startswith(UNSUPPORTED) else ValueError
        raise kind(f"{what}: " + "; ".join(known))
