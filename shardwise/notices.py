# SPDX-License-Identifier: Apache-2.0
"""Warnings for people: once in a process, and from one rank; and the error that every rank tells.
Nothing here imports torch."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

_told: set[object] = set()


class CannotMeet(ValueError):  # noqa: N818  (it names what happened)
    """This rank has not reached the others, so that no other one speaks for it."""


def warn_once(
    logger: logging.Logger,
    text: str,
    *values: Any,
    about: object = None,
    mesh: Any = None,
    first: bool | None = None,
) -> None:
    """Log a warning that every rank could give, on the first rank, the first time.

    Args:
        about: warnings about the same are given once; default: warnings of the same words.
        mesh: the first rank of this mesh speaks, which may not have the first of all; a stage of a
            pipeline has a mesh of its own.
        first: whether this rank is the one to speak, where only some ranks know.
    """
    key = (logger.name, about) if about is not None else (logger.name, text, str(values))
    if key not in _told and (_is_first(mesh) if first is None else first):
        _told.add(key)
        logger.warning(text, *values)


def _is_first(mesh: Any) -> bool:
    if mesh is not None:
        return not any(mesh.get_coordinate() or [1])
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"
