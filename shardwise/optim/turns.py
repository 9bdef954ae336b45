# SPDX-License-Identifier: Apache-2.0
"""Turns: replicas that hold the same weights work on different matrices, and on nothing else.

Under ``hsdp()`` (and ``zero(0)``) every replica could orthogonalise every matrix. Instead each
takes some, and only it needs their gradients and momenta:

    gradients   reduce-scattered between replicas, matrix by matrix     (R-1)/R P/N b
    momenta     on the replica whose turn it is: 1/R of the memory
    updates     all-gathered between replicas                           (R-1)/R P/N b

which together is what an all-reduce of gradients sends. Whose turn it is the optimizer decides
(``owners.py``), for all matrices at once; it tells the buffers (``Version.turns``), and gradients
are reduced accordingly from the next backward on. ``.grad`` of a parameter has the Cut of its
momentum then: on a rank whose turn it is not, an empty piece, not a wrong one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.cut import Cut
from shardwise.optim.storage import local_of
from shardwise.placements import Turns
from shardwise.tensor import ShardedTensor


def turns_of(parameter: Tensor) -> Turns | None:
    """What of a parameter each replica's optimizer works on; None: all of them on all of it."""
    if not isinstance(parameter, ShardedTensor) or parameter.version is None:
        return None
    return parameter.version.turns.get(parameter.cut.index)


def take_turns(parameter: Tensor, turns: Turns | None) -> None:
    """Have the gradients of a parameter reduced to where they are worked on (None: everywhere).

    A gradient that is there already, for other turns, becomes everybody's (collective then).
    """
    if not isinstance(parameter, ShardedTensor) or parameter.version is None:
        return
    version, index = parameter.version, parameter.cut.index
    if version.turns.get(index) == turns:
        return
    version.turns = {key: value for key, value in version.turns.items() if key != index}
    if turns is not None:
        version.turns[index] = turns
    grad = parameter.grad
    if isinstance(grad, ShardedTensor) and grad.cut.turns is not None:
        parameter.grad = torch.zeros_like(parameter).copy_(grad)


def state_cut(parameter: ShardedTensor) -> Cut:
    """Where the gradient and the momentum of a parameter lie."""
    turns = turns_of(parameter)
    return parameter.cut if turns is None else parameter.cut.turned(turns)


def like(parameter: Tensor) -> Tensor:
    """Zeros where the parameter's gradient lies: an optimizer state."""
    if turns_of(parameter) is not None:
        assert isinstance(parameter, ShardedTensor)
        cut = state_cut(parameter)
        return ShardedTensor(local_of(parameter).new_zeros(cut.local_shape), cut)
    with torch.no_grad():
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)


@torch.no_grad()
def conformed(parameter: Tensor, state: Tensor) -> Tensor:
    """An optimizer state where :func:`like` would put it (collective where it lies elsewhere)."""
    if not isinstance(parameter, ShardedTensor) or not isinstance(state, ShardedTensor):
        return state
    return state if state_cut(parameter).matches(state.cut) else like(parameter).copy_(state)
