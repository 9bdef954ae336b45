# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint is whole and harmless, without a model, a process group or its memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.checkpoint import metadata
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import check_bytes
from shardwise.checkpoint.manifest import NAME, Manifest, rank_file
from shardwise.checkpoint.reading import Checkpoint


@dataclass
class Report:
    """What ``verify`` found; ``problems`` is empty where all is well."""

    path: Path
    manifest: Manifest | None = None
    num_tensors: int = 0
    num_elements: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"{self.path}: {'sound' if self.ok else 'NOT SOUND'}"]
        if self.manifest is not None:
            made = self.manifest
            step = "" if made.step is None else f"step {made.step}, "
            lines.append(
                f"  {step}{made.created}, {made.world_size} ranks, torch {made.versions['torch']}"
            )
            lines.append(
                f"  {self.num_tensors} tensors, {self.num_elements} elements, "
                f"{len(made.files)} files, {made.num_bytes} bytes"
            )
            lines += [f"  {text}" for text in made.placements]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def verify(path: str | os.PathLike[str]) -> Report:
    """Check sizes, every sha256, the index, and every tensor in the files; all problems at once.

    The pieces must tile each tensor exactly: nothing missing, nothing twice.
    """
    report = Report(Path(os.path.abspath(path)))
    try:
        report.manifest = Manifest.read(report.path)
    except CheckpointError as error:
        report.problems.append(str(error))
        return report
    for file in report.manifest.files:
        try:
            check_bytes(report.path, file)
        except CheckpointError as error:
            report.problems.append(str(error))
    listed = {file.name for file in report.manifest.files} | {NAME}
    for entry in sorted(report.path.iterdir()):
        if entry.name not in listed:
            report.problems.append(f"{entry} is not in the manifest")
    try:
        checkpoint = Checkpoint.open(report.path)
        for rank in range(report.manifest.world_size):
            report.manifest.read_json(report.path, rank_file(rank))
    except CheckpointError as error:
        _add(report, error)
        return report
    report.num_tensors = len(checkpoint.index)
    report.num_elements = sum(math.prod(entry.shape) for entry in checkpoint.index.values())
    _check_tensors(report, checkpoint)
    return report


def _check_tensors(report: Report, checkpoint: Checkpoint) -> None:
    index, made = checkpoint.index, checkpoint.manifest
    if len(index) != made.num_tensors:
        report.problems.append(f"{len(index)} tensors in the index, {made.num_tensors} were saved")
    chunks: list[metadata.Chunk] = []
    for key, entry in index.items():
        if (problem := entry.problem()) is not None:
            report.problems.append(f"'{key}': {problem}")
        chunks += entry.chunks
    try:
        checkpoint.inspect(chunks)
    except CheckpointError as error:
        _add(report, error)


def _add(report: Report, error: CheckpointError) -> None:
    if str(error) not in report.problems:
        report.problems.append(str(error))
