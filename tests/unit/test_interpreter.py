# SPDX-License-Identifier: Apache-2.0
"""The kernels in Triton's interpreter: four files in one process (see tests/interpreter.py)."""

from __future__ import annotations

import pytest

from tests.interpreter import INSIDE, run_inside

pytest.importorskip("triton", reason="the kernels are an extra: pip install shardwise[triton]")


@pytest.mark.skipif(INSIDE, reason="this is that process")
def test_kernels_in_the_interpreter() -> None:
    kinds = ("", "grouped_", "fp8_block_", "mxfp8_")
    run_inside(*(f"test_{kind}kernels.py" for kind in kinds))
