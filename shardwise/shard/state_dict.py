# SPDX-License-Identifier: Apache-2.0
"""State dicts of wrapped models: sharded as they are, or whole and plain for exchange.

``model.state_dict()`` holds DTensors over the main weights and costs nothing;
``torch.distributed.checkpoint`` saves and loads these under any layout, unless experts are spread
over ranks: it would take one rank's experts for all (``sw.save`` stores each expert by itself). The
functions here are for one plain file.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise import comm
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.moe.keys import indexed_keys
from shardwise.moe.layer import mixtures_of
from shardwise.tensor import ShardedTensor

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def clean(name: str) -> str:
    """The name that a parameter would have without wrappers inside the model (torch.compile)."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def full_state_dict(
    model: nn.Module, *, device: torch.device | str | None = "cpu", only_first_rank: bool = False
) -> dict[str, Any]:
    """The state dict with whole, plain tensors, gathered one parameter at a time. Collective.

    With ``only_first_rank`` all ranks take part, and the others return an empty dictionary. Tied
    parameters are one tensor, as in the state dict of a plain model.
    """
    keep = not only_first_rank or torch.distributed.get_rank() == 0
    spread = _spread_linears(model)
    result: dict[str, Any] = {}
    first: dict[int, str] = {}  # the first name of each piece
    for name, value in model.state_dict().items():
        sharded = isinstance(value, ShardedTensor)
        path, _, last = name.rpartition(".")
        alone = sharded and path not in spread  # else one name may become many
        if alone and (tied := first.setdefault(id(value._local_tensor), name)) != name:
            if keep:
                result[clean(name)] = result[clean(tied)]
            continue
        if isinstance(value, DTensor):  # of tensor parallelism alone, too
            value = value.full_tensor()
        values = {name: value}
        if path in spread and isinstance(value, Tensor):
            values = _gather_experts(name, last, value, *spread[path])
        for key, each in values.items() if keep else ():
            if isinstance(each, Tensor):
                # A copy, unless it is one: training goes on to change the original.
                each = each.detach().to(device or each.device, copy=not sharded)
            result[clean(key)] = each
    return result


def _spread_linears(model: nn.Module) -> dict[str, tuple[GroupedLinear, comm.Axis]]:
    """The linears whose experts are spread over ranks, by name, with the axis of the spread."""
    axes = {
        linear: mixture.axis
        for mixture in mixtures_of(model)
        for linear in (mixture.experts.fc1, mixture.experts.fc2)
    }
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, GroupedLinear) and module.is_spread:
            axis = axes.get(module)
            if axis is None:
                raise ValueError(
                    f"'{name}' has {module.num_experts} of {module.total_experts} experts, and "
                    f"the ranks that have the others are not known: spread them with "
                    f"MixtureOfExperts.spread(axis), or save with sw.save"
                )
            found[name] = module, axis
    return found


def _gather_experts(
    name: str, last: str, value: Tensor, linear: GroupedLinear, axis: comm.Axis
) -> dict[str, Tensor]:
    """One tensor of a linear with the experts of all ranks: stacked, or one entry per expert."""
    value = value.detach().contiguous()
    together = value.new_empty(axis.size, *value.shape)
    comm.all_gather(together.view(-1), value.view(-1), axis).wait()
    if last in linear.layouts:
        return {name: together.flatten(0, 1)}
    kind = last.rstrip("0123456789")
    index, stem = int(last[len(kind) :]), name[: len(name) - len(last)]
    return {
        f"{stem}{kind}{rank * linear.num_experts + index}": part
        for rank, part in enumerate(together)
    }


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load whole main weights: every rank passes all values and keeps its pieces. No communication.

    The optimizer updates the loaded weights. All keys may have one prefix more than the model's
    (``module.``, ``model.``), and experts may be in the other layout.
    """
    names = set(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, GroupedLinear):  # experts of any rank, in either layout
            stem = f"{path}." if path else ""
            for name in module.layouts:
                names |= {f"{stem}{name}", *indexed_keys(stem, name, module.total_experts)}
    own = {clean(name): name for name in names}
    state = {clean(key): value for key, value in state.items()}
    prefix = _prefix_of(state, own.keys())
    state = {key.removeprefix(prefix): value for key, value in state.items()}
    return model.load_state_dict({own.get(key, key): state[key] for key in state}, strict=strict)


def _prefix_of(state: Mapping[str, Any], names: Container[str]) -> str:
    """The prefix that every key has before a name of the model; "" where there is none or more than
    one, and loading then names the missing keys."""
    found = set()
    for key in state:
        parts = key.split(".")
        suffixes = (".".join(parts[first:]) for first in range(len(parts)))
        name = next((suffix for suffix in suffixes if suffix in names), None)
        if name is not None:
            found.add(key.removesuffix(name))
    prefix = found.pop() if len(found) == 1 else ""
    return prefix if all(key.startswith(prefix) for key in state) else ""
