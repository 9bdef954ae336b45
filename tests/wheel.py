# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.wheel DIST``: unpack a wheel elsewhere, and use it without the repository.

torch and the other dependencies are those of this environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def check(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        assert (site / "shardwise" / "py.typed").is_file()
        assert sorted(p.name for p in site.iterdir() if p.suffix != ".dist-info") == ["shardwise"]
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"tests/ranks.py", "docs/start.md", "benchmarks/fsdp.py", "Makefile"} <= names

        environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

        def run(*words: str) -> str:
            command = [sys.executable, "-m", "shardwise", *words]
            found = subprocess.run(
                command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=300
            )
            assert found.returncode == 0, found.stdout + found.stderr
            return found.stdout

        place = "import shardwise; print(shardwise.__file__)"
        command = [sys.executable, "-c", place]
        found = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True
        )
        assert found.stdout.strip().startswith(str(site)), found.stdout
        run("train", "smoke", "--steps", "4", "--nproc", "2", "--out", "run")
        assert (Path(scratch) / "run" / "report.html").is_file()
        run("verify", "run")
        assert "embedding" in run("plan", "smoke", "--ranks", "2")
    sys.stdout.write(f"{wheel.name} works outside of the repository\n")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
