# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.fuzz --strength``: faults of the engine, old ones and plausible ones, each put
into a copy of the package; how many programs it takes until one of them finds the fault.

A fault that no program finds is a kind of program that is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.outcome import FINE

ROOT = Path(__file__).parents[2]
# Name: (file of the package, its text, the text of the fault).
FAULTS = {
    "weights that stay whole are not gathered again after a step": (
        "shard/group.py",
        "whole.made_from == self.writes and whole.live",
        "whole.made_from is not None and whole.live",
    ),
    "hfsdp: what the outer axis brought is never brought again": (
        "shard/group.py",
        "isinstance(source, Planes) and source.made_from != writes:",
        "isinstance(source, Planes) and source.made_from is None:",
    ),
    "reshard_after_forward=k: a part of before the step is gathered": (
        "shard/group.py",
        "if self._kept_from == writes:",
        "if self._kept_from is not None:",
    ),
    "weights are released while a call is open": (
        "shard/unit.py",
        "if force or not (self.open or missing):",
        "if force or not missing:",
    ),
    "hsdp: each microbatch replaces the one before": (
        "shard/gradient.py",
        "                self._waiting.add_(current)\n            else",
        "                self._waiting.copy_(current)\n            else",
    ),
    "no sync: each microbatch replaces the one before": (
        "shard/gradient.py",
        "(more if index in written else fresh).append(pair)",
        "fresh.append(pair)",
    ),
    "zeros of an unused parameter are what lay in memory": (
        "shard/gradient.py",
        "torch._foreach_zero_(quiet)",
        "pass",
    ),
    "two axes divide by the ranks of one": (
        "shard/gradient.py",
        "math.prod(self.ranks.sizes) if",
        "self.ranks.sizes[0] if",
    ),
    "requires_grad_ between steps is not followed": (
        "shard/unit.py",
        "            group.follow_trainability()\n            group.gradients.check_waiting()",
        "            group.gradients.check_waiting()",
    ),
    "zero_grad leaves what waits to be reduced": (
        "shard/module.py",
        "                group.gradients.forget()\n",
        "",
    ),
    "units that only earlier microbatches used are not reduced": (
        "shard/model.py",
        "if late or (gradients.pending and final):",
        "if late:",
    ),
    "autograd.grad for inputs counts as a backward": (
        "shard/model.py",
        "self.for_inputs = not any(group.gradients.comes for group in groups)",
        "self.for_inputs = False",
    ),
    "a bucket reduces before its last gradient": (
        "shard/unit.py",
        "not (group.comes_and_goes or gradients.missing or gradients.late)",
        "not group.comes_and_goes",
    ),
    "gradients are reduced in bf16 though fp32 is asked for": (
        "precision/policy.py",
        "return _choose(self.reduce, self.compute_dtype(parameter), parameter)",
        "return _choose(None, self.compute_dtype(parameter), parameter)",
    ),
    "post-accumulate hooks are not called": (
        "shard/gradient.py",
        "for parameter in hooked:",
        "for parameter in ():",
    ),
    "Muon moves matrices that have no gradient": (
        "optim/matrix_group.py",
        "for numbers, step in self._alike(now, spans):\n            weights = []",
        "for numbers, step in self._alike(now._replace(given=[True] * 99), spans):\n"
        "            weights = []",
    ),
    "hsdp: a norm counts every replica": (
        "optim/gradients.py",
        "axes, others = state_cut(parameter).axes,",
        "axes, others = parameter.cut.ranks.axes,",
    ),
    "experts over ranks: gradients are divided by the ranks that hold them": (
        "shard/fully_shard.py",
        "home: float(home.size() * over.others.size)",
        "home: float(home.size())",
    ),
    "a gradient that was there before is lost": (
        "shard/gradient.py",
        "grad._local_tensor.add_(piece)",
        "grad._local_tensor.copy_(piece)",
    ),
    "an optimizer steps while weights are shown": (
        "shard/unit.py",
        "if not self.calls and not (self.model is not None and self.model.in_backward):",
        "if False:",
    ),
    "a bucket is not shown before the modules that read it run": (
        "shard/unit.py",
        "                self._show(number)\n\n    def expose",
        "                pass\n\n    def expose",
    ),
    "a deep copy of a parameter is the parameter": (
        "core/tensor.py",
        "new = over_piece(self._local_tensor.clone(), self.cut",
        "new = over_piece(self._local_tensor, self.cut",
    ),
    "what an exception left in backward is not forgotten": (
        "shard/unit.py",
        "            group.gradients.forget(under_way=False)\n",
        "",
    ),
}


def seeded(name: str, folder: Path) -> None:
    """A copy of the package with one fault, beside the tests."""
    path, right, wrong = FAULTS[name]
    shutil.copytree(ROOT / "shardwise", folder / "shardwise")
    (folder / "tests").symlink_to(ROOT / "tests")
    file = folder / "shardwise" / path
    text = file.read_text()
    assert text.count(right) == 1, f"{name}: {path} has the text {text.count(right)} times"
    file.write_text(text.replace(right, wrong))


def strength(
    seeds: str, limit: int, seconds: float, jobs: int, chosen: str = ""
) -> Iterator[tuple[str, int, str]]:
    """(fault, programs until one found it, what it found) of each; 0: none of ``limit``."""
    first = int(seeds.split(":")[0])
    with ThreadPoolExecutor(jobs) as pool:
        names = [name for name in FAULTS if chosen in name]
        yield from pool.map(lambda name: _searched(name, first, limit, seconds), names)


def _searched(name: str, first: int, limit: int, seconds: float) -> tuple[str, int, str]:
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        seeded(name, Path(folder))
        command = [sys.executable, "-m", "tests.fuzz", "--until-found", "--out", "found"]
        command += ["--seeds", f"{first}:{first + limit}", "--seconds", str(seconds)]
        paths = os.pathsep.join((folder, *filter(None, [os.environ.get("PYTHONPATH")])))
        environment = os.environ | {"PYTHONPATH": paths}
        subprocess.run(command, cwd=folder, capture_output=True, env=environment)
        files = list(Path(folder, "found").glob("summary-*.json"))
        summary = json.loads(files[0].read_text()) if files else []
    total = sum(count for _, _, count, _ in summary)
    found = [f"{kind} {words}" for kind, words, _, _ in summary if kind not in FINE]
    return name, total if found else 0, found[0] if found else f"not in {total} programs"
