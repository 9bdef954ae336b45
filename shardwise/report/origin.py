# SPDX-License-Identifier: Apache-2.0
"""Where a figure comes from: the command, the machine, the revision of the code."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent


def origin(device: torch.device, ranks: int) -> dict[str, str]:
    """The command as it was typed, the machine, and the revision, for the ``run`` event."""
    name = Path(sys.argv[0]).name
    words = ["shardwise" if name.endswith(".py") else name, *sys.argv[1:]]
    ours = f"{ranks} x {torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return {
        "command": shlex.join(words),
        "machine": f"{ours}{cpu_name()}, {cores()} cores, {platform.node()}",
        "revision": revision(),
    }


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def revision() -> str:
    """The commit of shardwise, marked where the working tree differs from it; of an installed
    package, whose version says the same, ``unknown``."""
    if not (HERE.parents[1] / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
