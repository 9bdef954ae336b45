# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run dry, so that a change of what they call is seen; nothing is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import muon, padding, replicas
from benchmarks.train import PeerExperts


def tables_of(folder: Path) -> list[dict[str, object]]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())["tables"]  # type: ignore[no-any-return]


def test_figures_by_arithmetic(tmp_path: Path) -> None:
    replicas.main(["--largest", "2", "--results", str(tmp_path / "replicas")])
    for table in tables_of(tmp_path / "replicas"):
        assert all(0 < row["sent_ratio"] < replicas.BAR for row in table["rows"])  # type: ignore[attr-defined]
    evenly = replicas.row_of(
        "data_parallel, zero(0)", 128
    )  # owners balance, whatever a bucket keeps
    assert evenly["rule"] == "evenly" and evenly["received_ratio"] < 1.02  # type: ignore[operator]
    padding.main(["--largest", "16", "--results", str(tmp_path / "padding")])
    (table,) = tables_of(tmp_path / "padding")
    assert len(table["rows"]) > 4 and all(row["padding"] < 3 for row in table["rows"])  # type: ignore[arg-type, attr-defined]


def test_muon_beside_its_peers(tmp_path: Path) -> None:
    cases = "fsdp2-adamw,fsdp2-muon,fsdp2-dion,fsdp2-gather,fsdp2-ours,zero3-adamw,zero3-muon"
    muon.main(["peers", "--tiny", "--cases", cases, "--results", str(tmp_path)])
    (table,) = tables_of(tmp_path)
    rows = {row["case"]: row for row in table["rows"]}  # type: ignore[attr-defined]
    assert rows["shardwise zero(3), Muon"]["ratio"] > 0, "and dion is not installed: a row says so"
    assert any(str(name).startswith("torch FSDP2, Muon of dion: ") for name in rows)
    sent = {name: row.get("sent_matrices", 0) for name, row in rows.items()}
    assert sent["torch FSDP2, every matrix on every rank"] == 2 * 47104 * 2 * 7 / 8 / 2**20
    assert 0 < sent["torch FSDP2, sw.Muon"] < 0.6 * sent["torch FSDP2, every matrix on every rank"]


def test_experts_and_their_peer_learn_the_same() -> None:
    import torch
    from torch.nn.functional import silu

    from shardwise.models.gpt import GPT, GPTConfig
    from shardwise.moe import MixtureOfExperts

    def activate(z: torch.Tensor, p: torch.Tensor, width: int) -> torch.Tensor:
        return silu(z[:, :width]) * z[:, width:] * p[:, None].to(z.dtype)

    config = GPTConfig(
        dim=64, num_layers=2, num_heads=2, hidden_dim=64, context=32, num_experts=4,
        expert_hidden_dim=32, vocab_size=97,
    )  # fmt: skip
    tokens, losses = torch.randint(97, (2, 32)), []
    for peer in (False, True):
        model = GPT(config).bfloat16()
        model.init_weights(0)
        for layer in model.modules():
            if peer and isinstance(layer, MixtureOfExperts):
                layer.experts = PeerExperts(  # type: ignore[assignment]
                    layer.experts,
                    lambda z, p, n: silu(z[:, :n]) * z[:, n:] * p[:, None].to(z.dtype),
                )
        losses.append(model(tokens, tokens).item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_the_grouped_mlp_and_its_peer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import grouped_mlp

    # Compiled for the host it would need a C++ compiler.
    monkeypatch.setattr(grouped_mlp, "compiled_activation", grouped_mlp.activation)
    plain, main = grouped_mlp.run(grouped_mlp.TINY, 1, "cpu")
    assert len(plain.rows) == 6 and len(main.rows) == 4
