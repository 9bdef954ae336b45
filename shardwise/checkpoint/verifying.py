# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint is whole and harmless, without a model, a process group or its memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import check_bytes
from shardwise.checkpoint.manifest import NAME, Manifest
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

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """A refusal becomes one of the problems."""
        try:
            yield
        except CheckpointError as error:
            self.problems.append(str(error))

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
    """Check a checkpoint as ``load`` does, for all ranks: what is reported here is refused there.

    Sizes and every sha256; then, if the bytes are those that were written, what they say: the
    index, every tensor in the files, the optimizer's groups, each rank's random states and extra.
    """
    report = Report(Path(os.path.abspath(path)))
    with report.collecting():
        report.manifest = Manifest.read(report.path)
    if report.manifest is None:
        return report
    for file in report.manifest.files:
        with report.collecting():
            check_bytes(report.path, file)
    sound = report.ok
    listed = {file.name for file in report.manifest.files} | {NAME}
    for entry in sorted(report.path.iterdir()):
        if entry.name not in listed:
            report.problems.append(f"{entry} is not in the manifest")
    if sound:
        with report.collecting():
            _check_contents(report, Checkpoint.open(report.path, report.manifest))
    return report


def _check_contents(report: Report, checkpoint: Checkpoint) -> None:
    report.num_tensors = len(checkpoint.index)
    report.num_elements = sum(math.prod(entry.shape) for entry in checkpoint.index.values())
    for rank in range(checkpoint.manifest.world_size):
        with report.collecting():
            checkpoint.rank_values(rank)
    with report.collecting():
        checkpoint.inspect(chunk for entry in checkpoint.index.values() for chunk in entry.chunks)
