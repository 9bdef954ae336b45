# SPDX-License-Identifier: Apache-2.0
"""Cache: files that the runs of a user share. The folder may be deleted at any time. This file does
not import torch."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path


def shared_cache() -> Path:
    """The folder: ``$XDG_CACHE_HOME/shardwise``, or ``~/.cache/shardwise``."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shardwise"
    except RuntimeError:  # a user without a home: a path that can't be made
        return Path(os.devnull) / "shardwise"


def keep_bytecode() -> None:
    """Keep the bytecode of Python in the cache, for this process and the processes that it starts,
    if torch was installed without bytecode and Python can't or may not write it beside the sources
    (a folder of another user, PYTHONDONTWRITEBYTECODE). Else every start compiles the sources of
    torch, which takes 10 s.
    """
    found = find_spec("torch")
    if sys.pycache_prefix is not None or found is None or found.origin is None:
        return
    beside = Path(cache_from_source(found.origin))
    writes = not sys.dont_write_bytecode and os.access(beside.parent.parent, os.W_OK)
    if writes or beside.exists():
        return
    folder = shared_cache() / "bytecode"
    with contextlib.suppress(OSError):  # no room, no home
        folder.mkdir(parents=True, exist_ok=True)
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
