# SPDX-License-Identifier: Apache-2.0
"""State dicts of wrapped models with whole, plain tensors, for one plain file.

``model.state_dict()`` itself holds DTensors over the main weights and copies nothing.
``torch.distributed.checkpoint`` saves and loads these under any layout, except for experts that are
spread over ranks: it would save one rank's experts for all (``sw.save`` stores each expert).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.core.tensor import ShardedTensor
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.moe.keys import indexed_keys
from shardwise.moe.spread import gather_experts, spread_linears

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def clean(name: str) -> str:
    """The name of a parameter without the parts that wrappers inside the model add (torch.compile,
    CheckpointWrapper)."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def full_state_dict(
    model: nn.Module, *, device: torch.device | str | None = "cpu", only_first_rank: bool = False
) -> dict[str, Any]:
    """The state dict with whole, plain tensors. All ranks must call it together.

    Parameters are gathered one at a time. With ``only_first_rank`` all other ranks return an empty
    dictionary. Tied parameters are one tensor, as in the state dict of a plain model.
    """
    keep = not only_first_rank or torch.distributed.get_rank() == 0
    spread = spread_linears(model)
    result: dict[str, Any] = {}
    first_names: dict[int, str] = {}  # by the id of the local tensor, to find tied parameters
    for name, value in model.state_dict().items():
        sharded = isinstance(value, ShardedTensor)
        path, _, last = name.rpartition(".")
        if sharded and path not in spread:  # a name of spread experts may become several names
            first = first_names.setdefault(id(value._local_tensor), name)
            if first != name:
                if keep:
                    result[clean(name)] = result[clean(first)]
                continue
        if isinstance(value, DTensor):  # also a DTensor of tensor parallelism that is not sharded
            value = value.full_tensor()
        entries = {name: value}
        if path in spread and isinstance(value, Tensor):
            entries = gather_experts(name, last, value, *spread[path])
        for key, entry in entries.items() if keep else ():
            if isinstance(entry, Tensor):
                # Copy tensors that were not gathered: training will change the original.
                entry = entry.detach().to(device or entry.device, copy=not sharded)
            result[clean(key)] = entry
    return result


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load whole main weights. Every rank passes all values and keeps its pieces, without
    communication. The optimizer continues from the loaded weights. Experts may be in the other
    layout."""
    names = set(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, GroupedLinear):  # experts of any rank, in either layout
            stem = f"{path}." if path else ""
            for name in module.layouts:
                names |= {f"{stem}{name}", *indexed_keys(stem, name, module.total_experts)}
    in_model = {clean(name): name for name in names}
    values = {in_model.get(clean(key), key): value for key, value in state.items()}
    return model.load_state_dict(values, strict=strict)
