# SPDX-License-Identifier: Apache-2.0
"""Names of expert weights in state dicts: one tensor for all experts, or one tensor for each.

    grouped    blocks.3.experts.fc1.weight      [experts, out, in]
    indexed    blocks.3.experts.fc1.weight0, .weight1, ...    [out, in] each

The functions change dictionaries in place, and return whether they did. They skip entries that have
the wanted layout already, that are incomplete or ambiguous: loading then names the missing keys.

Checkpoints of many ranks always hold one tensor per expert, numbered over all ranks, so that any
layout and any number of ranks can read them:

    rank 0 of 2, experts 0-1   weight0 | weight1 |
    rank 1 of 2, experts 2-3                     weight2 | weight3
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from shardwise.moe.activation import check_block

StateDict = MutableMapping[str, Any]


def normalise(state: StateDict, prefix: str, name: str, num_experts: int, layout: str) -> bool:
    """Convert ``prefix + name`` to ``layout`` ('grouped' or 'indexed')."""
    if layout == "grouped":
        return to_grouped(state, prefix, name, num_experts)
    return to_indexed(state, prefix, name, num_experts)


def indexed_keys(prefix: str, name: str, num_experts: int, first: int = 0) -> list[str]:
    return [f"{prefix}{name}{index}" for index in range(first, first + num_experts)]


def holds(state: StateDict, prefix: str, name: str, num_experts: int) -> bool:
    """Whether a state dict has exactly ``num_experts`` experts, in either layout."""
    value = state.get(f"{prefix}{name}")
    if value is not None:
        return bool(value.dim()) and value.shape[0] == num_experts
    members = indexed_keys(prefix, name, num_experts)
    return all(key in state for key in members) and f"{prefix}{name}{num_experts}" not in state


def num_experts(state: StateDict, prefix: str, name: str, ndim: int) -> int | None:
    """The number of experts in a state dict; None if ambiguous. ``ndim``: of an expert's tensor."""
    value = state.get(f"{prefix}{name}")
    if value is not None:
        return value.shape[0] if getattr(value, "ndim", 0) == ndim + 1 else None
    stem = f"{prefix}{name}"
    tails = [key[len(stem) :] for key in state if key.startswith(stem)]
    numbers = sorted(int(tail) for tail in tails if tail.isdecimal())
    return len(numbers) if numbers and numbers == list(range(len(numbers))) else None


def to_grouped(state: StateDict, prefix: str, name: str, num_experts: int) -> bool:
    """Stack ``weight0 .. weight{n-1}`` if the state dict has all of them and no ``weight``."""
    members, target = indexed_keys(prefix, name, num_experts), f"{prefix}{name}"
    if target in state or any(key not in state for key in members):
        return False
    if f"{prefix}{name}{num_experts}" in state:
        return False  # the model has more experts: stacking the first ones would hide that
    shapes = {tuple(state[key].shape) for key in members}
    if len(shapes) > 1:
        odd = next(key for key in members if state[key].shape != state[members[0]].shape)
        raise ValueError(
            f"'{odd}' of shape {list(state[odd].shape)} cannot be stacked into '{target}': "
            f"'{members[0]}' has shape {list(state[members[0]].shape)}, and all experts must have "
            f"the same shape"
        )
    state[target] = torch.stack([state.pop(key) for key in members])
    return True


def to_indexed(state: StateDict, prefix: str, name: str, num_experts: int) -> bool:
    """Split ``weight`` if the state dict has it and no ``weight{i}``."""
    members, source = indexed_keys(prefix, name, num_experts), f"{prefix}{name}"
    if source not in state or any(key in state for key in members):
        return False
    parts = split(state[source], num_experts, source)
    del state[source]
    state.update(zip(members, parts, strict=True))
    return True


def split(value: Any, num_experts: int, key: str) -> list[Tensor]:
    """One tensor per expert: slices of dimension 0."""
    if value.dim() and value.shape[0] == num_experts:
        return list(value.unbind(0))
    if value.dim() and value.shape[0] % num_experts == 0:
        return list(value.chunk(num_experts))
    raise ValueError(
        f"'{key}' of shape {list(value.shape)} cannot be split over {num_experts} experts: its "
        f"first dimension must be {num_experts} or a multiple of it"
    )


# ------------------------------------------------------------------------------ one by one


def from_one_by_one(
    state: StateDict, prefix: str, name: str, num_experts: int, *, first_expert: int, layout: str
) -> bool:
    """Select this rank's experts from those of all ranks, in ``layout``, for loading."""
    stored = indexed_keys(prefix, name, num_experts, first_expert)
    if any(key not in state for key in stored):
        return False
    values = [state[key] for key in stored]
    stem = f"{prefix}{name}"
    for key in [key for key in state if key.startswith(stem)]:
        if key.removeprefix(stem).isdecimal():
            del state[key]  # the experts of other ranks too
    state.update(zip(indexed_keys(prefix, name, num_experts), values, strict=True))
    if layout == "grouped":
        return to_grouped(state, prefix, name, num_experts)
    return True


def declare_gate_up(state: StateDict, prefix: str, block: int) -> None:
    """Add to a state dict the order of gate and up in a first linear that another library made (0:
    stacked)."""
    check_block(block)
    key = f"{prefix}_extra_state"
    if key in state and state[key] != {"gate_up_block": block}:
        raise ValueError(
            f"'{key}' holds {state[key]} already, which is not gate_up_block={block}: pass the "
            f"order of the tensors, or delete the key"
        )
    state[key] = {"gate_up_block": block}
