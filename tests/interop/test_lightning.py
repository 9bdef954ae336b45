# SPDX-License-Identifier: Apache-2.0
"""Lightning: Fabric and Trainer with ``ModelParallelStrategy``, whose function wraps with us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp

import shardwise as sw
from shardwise.shard.module import units_of
from tests.interop.frameworks import launched, mean_over_ranks, needs
from tests.models import loss_of, make_model, tokens
from tests.ranks import run_ranks

needs("lightning")

LIBRARIES: dict[str, Any] = {"torch": torch_fsdp.fully_shard, "shardwise": sw.fully_shard}


def strategy_of(shard: Any, where: str, **more: Any) -> Any:
    """``where``: fabric or pytorch."""
    import lightning

    def parallelize(model: Any, mesh: Any) -> Any:
        for layer in model.layers:
            shard(layer, mesh=mesh["data_parallel"])
        return shard(model, mesh=mesh["data_parallel"])

    strategies: Any = getattr(lightning, where).strategies
    return strategies.ModelParallelStrategy(
        parallelize, data_parallel_size=2, tensor_parallel_size=1, **more
    )


def check_fabric(rank: int, world_size: int, folder: str) -> None:
    from lightning.fabric import Fabric

    losses: dict[str, list[float]] = {}
    for library, shard in LIBRARIES.items():
        for distributed in (True, False):
            with launched():
                fabric = Fabric(
                    accelerator="cpu",
                    devices=2,
                    strategy=strategy_of(shard, "fabric", save_distributed_checkpoint=distributed),
                )
                fabric.launch()
                with fabric.init_module(empty_init=False):
                    model = fabric.setup_module(make_model())
                optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
                assert any(units_of(model)) == (library == "shardwise")
                found = losses[library] = []
                path = f"{folder}/{library}-{distributed}"
                for again in range(2):
                    for step in range(3):
                        with fabric.no_backward_sync(model, enabled=True):
                            fabric.backward(loss_of(model, tokens(rank)) / 2)
                        loss = loss_of(model, tokens(10 * step + rank))
                        fabric.backward(loss / 2)
                        fabric.clip_gradients(model, optimizer, max_norm=100.0)
                        optimizer.step()
                        optimizer.zero_grad()
                        found.append(mean_over_ranks(loss))
                        if step == 0 and not again:
                            fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})
                    if not again:
                        rest = fabric.load(path, {"model": model, "optimizer": optimizer})
                        assert rest["step"] == 1
                assert found[3] != found[0] and len(found) == 6
    assert losses["shardwise"] == losses["torch"]


def test_fabric(tmp_path: Path) -> None:
    run_ranks(check_fabric, 2, str(tmp_path))


def check_trainer(rank: int, world_size: int, folder: str) -> None:
    import lightning

    class Job(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if self.model is None:
                self.model = make_model()
                assert self.device_mesh is not None
                for layer in self.model.layers:
                    self.shard(layer, mesh=self.device_mesh["data_parallel"])
                self.shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            loss = loss_of(self.model, batch)
            self.log("loss", loss, sync_dist=True)
            self.losses.append(mean_over_ranks(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    losses = {}
    data = torch.utils.data.DataLoader(
        [tokens(step)[row] for step in range(4) for row in range(8)], batch_size=4
    )  # type: ignore[var-annotated]
    for library, shard in LIBRARIES.items():
        Job.shard = staticmethod(shard)  # type: ignore[attr-defined]

        def run(steps: int, resume: str | None = None) -> Any:
            strategies: Any = lightning.pytorch.strategies
            strategy = strategies.ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1
            )
            with launched():
                trainer = lightning.Trainer(
                    accelerator="cpu",
                    devices=2,
                    strategy=strategy,
                    max_steps=steps,
                    gradient_clip_val=100.0,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    default_root_dir=folder,
                    use_distributed_sampler=True,
                )
                job = Job()
                trainer.fit(job, data, ckpt_path=resume)
                return trainer, job

        trainer, job = run(2)
        path = f"{folder}/{library}.ckpt"
        trainer.save_checkpoint(path)
        assert any(units_of(job)) == (library == "shardwise")
        losses[library] = job.losses + run(4, path)[1].losses
        assert len(set(losses[library])) == 4
    assert losses["shardwise"] == losses["torch"]


def test_trainer(tmp_path: Path) -> None:
    run_ranks(check_trainer, 2, str(tmp_path))
