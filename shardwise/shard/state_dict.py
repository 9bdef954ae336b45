# SPDX-License-Identifier: Apache-2.0
"""State dicts of wrapped models: sharded as they are, or whole and plain for exchange.

``model.state_dict()`` holds DTensors over the main weights and costs nothing;
``torch.distributed.checkpoint``
saves and loads it under any layout. The functions here are for one file that anybody can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.tensor import ShardedTensor


def full_state_dict(
    model: nn.Module, *, device: torch.device | str | None = "cpu", only_first_rank: bool = False
) -> dict[str, Any]:
    """The state dict with whole, plain tensors, one parameter at a time (collective).

    With ``only_first_rank`` the other ranks take part and return an empty dictionary.
    """
    keep = not only_first_rank or torch.distributed.get_rank() == 0
    result: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            value = value.full_tensor()
        if keep:
            if isinstance(value, Tensor):
                # Never a view of what training goes on to change.
                value = value.detach().to(device or value.device, copy=True)
            result[name] = value
    return result


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load whole main weights: every rank passes them all and keeps its pieces. No communication.

    They become those that the optimizer updates: it has no others. All keys may bear one prefix
    more than the model's (``module.``, ``model.``), and experts may be in the other layout.
    """
    prefix = _prefix_of(state, set(model.state_dict()))
    if prefix:
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return model.load_state_dict(state, strict=strict)


def _prefix_of(state: Mapping[str, Any], names: set[str]) -> str:
    """What every key has before a name of the model. With several answers, or none, nothing: which
    one is meant cannot be told, and loading says what is missing."""
    found = set()
    for key in state:
        parts = key.split(".")
        suffixes = (".".join(parts[first:]) for first in range(len(parts)))
        name = next((suffix for suffix in suffixes if suffix in names), None)
        if name is not None:
            found.add(key.removesuffix(name))
    prefix = found.pop() if len(found) == 1 else ""
    return prefix if all(key.startswith(prefix) for key in state) else ""
