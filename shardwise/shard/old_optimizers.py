# SPDX-License-Identifier: Apache-2.0
"""An optimizer built before wrapping holds tensors that no longer belong to the model."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor


def refuse_old_optimizers(forsaken: Iterable[tuple[str, ref[Tensor]]]) -> None:
    """``forsaken``: parameters as they were before wrapping, by name."""
    alive = {
        id(parameter): name
        for name, reference in forsaken
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
