# SPDX-License-Identifier: Apache-2.0
"""Warnings that appear once in a process and on one rank. Nothing here imports torch."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

_warned: set[object] = set()


def warn_once(
    logger: logging.Logger,
    text: str,
    *values: Any,
    about: object = None,
    mesh: Any = None,
    first: bool | None = None,
) -> None:
    """Log a warning that all ranks have found: on the first rank only, and only once.

    Args:
        about: of warnings with the same ``about``, only the first appears; default: the whole text.
        mesh: the first rank of this mesh logs it, and not the first of the job: each stage of a
            pipeline has its own mesh.
        first: whether this rank logs it, for warnings that only some ranks have found.
    """
    key = (logger.name, about) if about is not None else (logger.name, text, str(values))
    if key not in _warned and (_is_first(mesh) if first is None else first):
        _warned.add(key)
        logger.warning(text, *values)


def _is_first(mesh: Any) -> bool:
    if mesh is not None:
        return not any(mesh.get_coordinate() or [1])
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"
