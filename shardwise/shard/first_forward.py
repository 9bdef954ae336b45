# SPDX-License-Identifier: Apache-2.0
"""Checks of all units of a model together, when a forward begins, most of them in the first."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.notices import warn_once
from shardwise.precision import Precision
from shardwise.precision.policy import TILED, stores_nothing

if TYPE_CHECKING:
    from shardwise.shard.unit import Unit

logger = logging.getLogger(__name__)


def check_first_forward(units: Sequence[Unit], names: Sequence[str]) -> None:
    """Raise for problems that no unit sees by itself; ``names`` are the units' names."""
    without_values = [
        f"{name}.{item.name}" if name else item.name
        for name, unit in zip(names, units, strict=True)
        for group in unit.groups
        if group.main.flat.is_meta
        for item, parameter in zip(group.items, group.sharded, strict=True)
        if parameter._local_tensor.is_meta  # type: ignore[attr-defined]
    ]
    if without_values:
        raise RuntimeError(
            f"parameters {without_values} are on the meta device and have no values yet: call "
            f"model.to_empty(device=...) and initialise or load them before the first forward"
        )
    for precision in dict.fromkeys(unit.precision for unit in units):
        _check_patterns(precision, [unit for unit in units if unit.precision == precision])
    quantised = [unit for unit in units if unit.precision.format is not None]
    stored = [one for unit in quantised for one in unit.stored.values()]
    for problem in stores_nothing(quantised[0].precision.format, stored) if quantised else ():
        raise ValueError(problem)
    tiled = [one.name for one in stored if one.why == TILED]
    if tiled:
        logger.warning(
            "'%s' and %d more are DTensors of tensor parallelism and are not stored in fp8 "
            "(sw.precision_report lists all)",
            tiled[0],
            len(tiled) - 1,
        )
    _refuse_old_optimizers(entry for unit in units for entry in unit.originals)
    devices = {group.device for unit in units for group in unit.groups}
    if len(devices) > 1:
        raise RuntimeError(
            f"the units of one model are on several devices: {sorted(map(str, devices))}"
        )


def _check_patterns(precision: Precision, units: Sequence[Unit]) -> None:
    """Warn of patterns that match nothing, which may be meant for units that run elsewhere; raise
    where nothing is left in MXFP8."""
    stored = [one for unit in units for one in unit.stored.values()]
    problems = precision.unmatched([one.name for one in stored])
    if not problems:
        return
    text = (
        f"{'; '.join(problems)} of this model. fully_shard knows parameters by their names in the "
        f"module that is wrapped, without the name of that module itself"
    )
    if not any(one.format for one in stored):
        raise ValueError(f"{text}. Nothing would be stored in {precision.format}")
    warn_once(logger, "%s", text)


def _refuse_old_optimizers(originals: Iterable[tuple[str, ref[Tensor]]]) -> None:
    """Raise for an optimizer that was built before wrapping: its tensors left the model."""
    alive = {
        id(parameter): name
        for name, reference in originals
        if (parameter := reference()) is not None
    }
    for thing in gc.get_objects() if alive else ():
        if issubclass(type(thing), torch.optim.Optimizer):
            held = [alive[id(p)] for g in thing.param_groups for p in g["params"] if id(p) in alive]
            if held:
                raise RuntimeError(
                    f"{type(thing).__name__} was built before fully_shard and holds the old "
                    f"parameters ({', '.join(held[:4])}{', ...' if len(held) > 4 else ''}): it "
                    f"would update nothing. Build the optimizer after wrapping"
                )


def refuse_ddp(units: Sequence[Unit]) -> None:
    """Raise inside a DistributedDataParallel that takes sharded parameters for its own: it would
    wait for their gradients and reduce none of the others."""
    around = DistributedDataParallel._active_ddp_module
    if around is None:
        return
    taken = {id(parameter) for parameter in around._module_parameters}
    named = [
        item.name
        for unit in units
        for group in unit.groups
        for item, parameter in zip(group.items, group.sharded, strict=True)
        if id(parameter) in taken and parameter.requires_grad
    ]
    if named:
        raise RuntimeError(
            f"DistributedDataParallel is around parameters that shardwise shards and reduces "
            f"({', '.join(named[:4])}{', ...' if len(named) > 4 else ''}). Leave DDP out: "
            f"fully_shard(model, placements=sw.zero(0)) replicates like DDP. Or have DDP ignore "
            f"these, before it is built: DistributedDataParallel."
            f"_set_params_and_buffers_to_ignore_for_model(model, their names in the model)"
        )


def stray_gradients(originals: list[tuple[str, ref[Tensor]]]) -> list[str]:
    """The parameters whose original from before wrapping got a gradient, which nobody will use.
    Originals that are gone are taken off the list: usually all of them."""
    originals[:] = [entry for entry in originals if entry[1]() is not None]
    found = [(name, reference()) for name, reference in originals]
    return [f"'{name}'" for name, one in found if one is not None and one.grad is not None]
