# SPDX-License-Identifier: Apache-2.0
"""Benchmarks whose peers follow the library's own interfaces still run: dry, and nothing is timed.

The peer of ``moe_steps`` stands in for the library's experts and is called as they are.
"""

from __future__ import annotations

import pytest


def test_a_step_with_experts_and_its_peer_learn_the_same() -> None:
    from benchmarks import grouped_mlp, moe_steps  # 1.5 s: torch.compile, for a peer

    table = moe_steps.run(grouped_mlp.activation, 1, "cpu", tiny=True)
    peer, ours = table.rows
    assert ours["loss"] == pytest.approx(peer["loss"], rel=1e-4)


def test_the_grouped_mlp_and_its_peer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import grouped_mlp

    # Compiled for the host it would need a C++ compiler.
    monkeypatch.setattr(grouped_mlp, "compiled_activation", grouped_mlp.activation)
    plain, main = grouped_mlp.run(grouped_mlp.TINY, 1, "cpu")
    assert len(plain.rows) == 6 and len(main.rows) == 4
