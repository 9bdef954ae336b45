# SPDX-License-Identifier: Apache-2.0
"""The gradients of an optimizer's parameters: where each lies, and whether all ranks have it.

    rank 0   w: gradient   b: None    --\
    rank 1   w: gradient   b: None    --->   w is updated, b left alone: as in one process
    rank 1   w: None       b: None    --->   every rank raises: 'w'

A rank that left a parameter out by itself would keep old weights (or, of a matrix, make the others
wait for its pieces), so the ranks compare notes before each step: two bits for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise import comm
from shardwise.optim.storage import Home, axes_of, home_of, local_of
from shardwise.optim.turns import state_cut, turns_of
from shardwise.tensor import ShardedTensor


class Gradients:
    """The gradients of some parameters, checked together before they are used."""

    def __init__(self, parameters: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
        self.parameters, self.name = list(parameters), name
        # By axis: the positions of the parameters that are spread over it.
        self.axes: dict[comm.Axis, list[int]] = {}
        for position, parameter in enumerate(self.parameters):
            for axis in axes_of([parameter]):
                self.axes.setdefault(axis, []).append(position)

    def settle(self) -> None:
        """Raise on every rank where only some ranks have a gradient; bring the others to where
        their parameters lie (collective)."""
        lacking = [parameter.grad is None for parameter in self.parameters]
        given = [not one for one in lacking]
        for axis, positions in self.axes.items():
            mine = [facts[position] for facts in (lacking, given) for position in positions]
            found = comm.any_rank(mine, axis)
            for number, position in enumerate(positions):
                lacking[position] = found[number]
                given[position] = found[len(positions) + number]
        names = [
            self.name(parameter)
            for parameter, *both in zip(self.parameters, lacking, given, strict=True)
            if all(both)
        ]
        wrong = bool(names)
        for axis in self.axes if len(self.axes) > 1 else ():  # those of other meshes hear of it too
            (wrong,) = comm.any_rank([wrong], axis)
        if wrong:
            raise RuntimeError(
                f"{quoted(names) or 'a parameter of other ranks'} has a gradient on some ranks and "
                f"None on others: nothing was updated. Drop gradients on every rank or on none "
                f"(zero_grad, .grad = None, a step that is skipped), and give zeros where a rank "
                f"has nothing to add"
            )
        for parameter in self.parameters:  # tensor parallelism may leave partial sums
            grad = parameter.grad
            ours = isinstance(parameter, ShardedTensor)
            if ours or not isinstance(parameter, DTensor) or not isinstance(grad, DTensor):
                continue
            if grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)


def gradient_home(parameter: Tensor) -> Home:
    """Where its gradient lies: with replicas that take turns, no two ranks hold the same of it."""
    home = home_of(parameter)
    turned = turns_of(parameter) is not None
    return Home(home.mesh, (True,) * len(home.sharded)) if turned else home


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This rank's piece of the gradient, of its turn where replicas take turns."""
    grad = parameter.grad
    if not isinstance(parameter, ShardedTensor) or not isinstance(grad, ShardedTensor):
        return None if grad is None else local_of(grad)
    return state_cut(parameter).within(grad.cut, grad._local_tensor)


def quoted(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"'{name}'" for name in names[:4]) + more
