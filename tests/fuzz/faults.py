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
        "if not copy.memory.live or copy.filled != state]",
        "if not copy.memory.live]",
    ),
    "a write to to_local() is not seen": (
        "buffer.py",
        "return self.version.count, self.flat._version",
        "return self.version.count, 0",
    ),
    "hfsdp: what the outer axis brought is never brought again": (
        "shard/group.py",
        "if self._compute_filled != self.main.state:",
        "if self._compute_filled is None:",
    ),
    "reshard_after_forward=k: a part of before the step is gathered": (
        "shard/group.py",
        "if part is not None and part.filled != state:",
        "if part is not None and part.filled is None:",
    ),
    "a second backward releases frozen weights too early": (
        "shard/call.py",
        "return before != self.task",
        "return before == -1",
    ),
    "hsdp: microbatches before the last are lost": (
        "shard/gradient.py",
        "inner_live = self._inner_waits",
        "inner_live = False",
    ),
    "hsdp: each microbatch replaces the one before": (
        "shard/gradient.py",
        "fresh = not self._inner.block.live",
        "fresh = True",
    ),
    "no sync: each microbatch replaces the one before": (
        "shard/gradient.py",
        "return self._partial, not self._partial.block.live",
        "return self._partial, True",
    ),
    "a parameter that the last microbatch does not use loses those before": (
        "shard/gradient.py",
        "                if self._open_fresh:\n                    views[index].zero_()",
        "                views[index].zero_()",
    ),
    "zeros of an unused parameter are what lay in memory": (
        "shard/gradient.py",
        "                if self._open_fresh:\n                    views[index].zero_()",
        "                pass",
    ),
    "two axes divide by all ranks each": (
        "shard/gradient.py",
        "return [float(self.ranks.sizes[axis]) for axis, _, _ in planned]",
        "return [float(self.ranks.sizes[0] * self.ranks.sizes[-1]) for _ in planned]",
    ),
    "a reentrant checkpoint inside a unit is not waited for": (
        "shard/call.py",
        "return any(type(node).__name__ == _REENTRANT for node in _behind([_node_now()], unit))",
        "return False",
    ),
    "frozen weights are released before inputs in a closure get gradients": (
        "shard/unit.py",
        "stays=not call.gated and reads_on(self)",
        "stays=False",
    ),
    "requires_grad_ between steps is not followed": (
        "shard/unit.py",
        "            group.follow_trainability()\n",
        "",
    ),
    "requires_grad_(False) between forward and backward is not followed": (
        "shard/unit.py",
        "            group.follow_trainability(will_come)\n",
        "            pass\n",
    ),
    "zero_grad leaves what waits to be reduced": (
        "shard/module.py",
        "group.main.version.waiting.clear()",
        "pass",
    ),
    "a first parameter without a gradient hides those of the others": (
        "shard/main_grad.py",
        "map(is_, map(read_grad, self._sharded), repeat(None))",
        "map(is_, map(read_grad, self._sharded[:1]), repeat(None))",
    ),
    "units that only earlier microbatches used are not reduced": (
        "shard/runtime.py",
        "for unit in left:\n            unit.expect_waiting()",
        "for unit in ():\n            unit.expect_waiting()",
    ),
    "gradients that somebody keeps are overwritten": (
        "shard/main_grad.py",
        "if held or not main.flat.untyped_storage().resizable():",
        "if not main.flat.untyped_storage().resizable():",
    ),
    "autograd.grad for inputs counts as a backward": (
        "shard/runtime.py",
        "self.for_inputs = is_for_inputs(leaves)",
        "self.for_inputs = False",
    ),
    "a kept graph is not expected to be walked again": (
        "shard/unit.py",
        'if self.unused == "zeros" or not graph_kept:',
        "if True:",
    ),
    "a bucket reduces before its last gradient": (
        "shard/data_parallel.py",
        "not self._missing[self._next]:",
        "self._missing[self._next] <= 1:",
    ),
    "gradients are reduced in bf16 though fp32 is asked for": (
        "precision/policy.py",
        "return _choose(self.reduce, self.compute_dtype(parameter), parameter)",
        "return _choose(None, self.compute_dtype(parameter), parameter)",
    ),
    "Muon moves matrices that have no gradient": (
        "optim/matrix_group.py",
        "for numbers in self._by_group(spans, now.given):\n            first, written",
        "for numbers in self._by_group(spans, [True] * 99):\n            first, written",
    ),
    "post-accumulate hooks are not called": (
        "shard/gradient.py",
        "for parameter in hooked:",
        "for parameter in ():",
    ),
    "hsdp: a norm counts every replica": (
        "optim/gradients.py",
        "return state_cut(parameter).axes",
        "return parameter.cut.ranks.axes",
    ),
    "experts over ranks: gradients are divided by the ranks that hold them": (
        "shard/fully_shard.py",
        "home: float(home.size() * over.others.size)",
        "home: float(home.size())",
    ),
    "a penalty on weights at rest is lost": (
        "shard/main_grad.py",
        "                _bring(Tensor.add_, own, grad)\n",
        "",
    ),
    "hfsdp: what the outer axis brought is kept for ever": (
        "shard/group.py",
        "if staged.made_from != writes:",
        "if staged.made_from is None:",
    ),
    "an optimizer steps while weights are shown": (
        "shard/wrapped.py",
        "if self.shown and not self.runtime.in_backward:",
        "if False:",
    ),
    "a bucket is not shown before the modules that read it run": (
        "shard/data_parallel.py",
        "if self.phase is not Phase.RESTING:\n            self.show_groups(numbers)",
        "pass",
    ),
    "a deep copy of a parameter is the parameter": (
        "tensor.py",
        "new = _wrap(self._local_tensor.clone(), self.cut",
        "new = _wrap(self._local_tensor, self.cut",
    ),
    "loaded optimizer states keep the pieces of another strategy": (
        "tensor_steps.py",
        "foreign = not parameter.cut.matches(value.cut)",
        "foreign = False",
    ),
    "what an exception left in backward is not forgotten": (
        "shard/unit.py",
        "            group.gradients.discard()\n",
        "            pass\n",
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
