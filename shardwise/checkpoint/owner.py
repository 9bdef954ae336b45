# SPDX-License-Identifier: Apache-2.0
"""Who made a temporary directory, told by its name, so that nobody removes a living one's.

    step-000300.tmp-1a2b3c4d-4711-8812736-9f8e7d6c
                    machine  pid  start   this save

``machine`` stands for host, boot and process namespace: only there does the number of a process
mean anything. ``start`` tells a process from a later one with the same number.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import time
from functools import cache
from pathlib import Path

_NAME = re.compile(r"(?P<final>.+)\.(?P<kind>tmp|trash)-(?P<owner>[0-9a-f]{8}-\d+-\d+)-[0-9a-f]{8}")
# A save of another machine that has not touched its files for so long has long given up.
ABANDONED_SECONDS = 24 * 3600.0


def temporary(final: Path, kind: str = "tmp") -> Path:
    """A new name beside ``final`` that says who made it."""
    owner = f"{_machine()}-{os.getpid()}-{_start(os.getpid())}"
    return final.with_name(f"{final.name}.{kind}-{owner}-{secrets.token_hex(4)}")


def is_abandoned(path: Path) -> bool:
    """Whether a temporary directory can be removed: nobody will ever finish it."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    if match["kind"] == "trash":
        return True
    machine, process, start = match["owner"].split("-")
    if machine == _machine():
        return _start(int(process)) != int(start)
    return time.time() - _last_touched(path) > ABANDONED_SECONDS


def _last_touched(path: Path) -> float:
    newest = 0.0
    with contextlib.suppress(OSError):
        newest = path.stat().st_mtime
        for entry in os.scandir(path):
            newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest


@cache
def _machine() -> str:
    parts = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            link = os.path.islink(source)
            parts.append(os.readlink(source) if link else Path(source).read_text().strip())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _start(process: int) -> int:
    """When a process started, in ticks of the kernel; 0 where it runs not at all.

    Without /proc, 1 for a process that lives: then a number used again counts as the first one.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text()
        # The name in parentheses may hold anything; fields count from the last parenthesis.
        fields = text[text.rindex(")") + 2 :].split()
        return 0 if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        if os.path.exists("/proc/self/stat"):
            return 0
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return 0
    except OSError:
        return 1
    return 1
