# SPDX-License-Identifier: Apache-2.0
"""A parameter as forward and its kernels see it: WholeParameter, or WholeDTensor where it is a tile
of tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.tensor import ShardedTensor
from shardwise.tile import Tile

if TYPE_CHECKING:
    from shardwise.shard.gradient import Gradients

_DATA: Any = torch.Tensor.data
AUTOGRADS: Any = torch.Tensor.grad  # what autograd brought and nobody has packed yet
LOST = (
    "gathered weights are copies that every gather makes from the main weights, so a write to them "
    "(inside forward, between a forward and its backward, after unshard()) is lost. Write to the "
    "parameter before forward or after backward, under torch.no_grad(); reshard() ends an unshard()"
)


class Whole(Tensor):
    """A parameter as forward sees it: a view of gathered memory.

    A kernel that computes its own weight gradient adds it to ``main_grad`` (zero where this is the
    first contribution) and then sets ``grad_added_to_main_grad = True``. One that can overwrite
    asks ``fresh_main_grad()`` and saves the zeroing. Either way it may return any gradient or none,
    for a parameter that is an input of its node: autograd tells when the last use is done.
    """

    # Set by a forward that gives autograd something else to bring it to its backward, where it will
    # say ``delay()``: no graph tells that a gradient comes.
    delayed: bool = False
    _gradients: ref[Gradients] | None = None
    _index = 0
    _added = False
    # Whether the kernel that added it brought autograd nothing: what autograd brings is of others.
    others_count = False
    # What ``.data`` gave since forward began: a write to it is not counted by the parameter.
    _lent: tuple[Tensor, ...] = ()
    _counted = 0  # the version up to which writes are known
    loans = 0  # how often ``.data`` of any parameter was asked for

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        lent: Tensor = _DATA.__get__(self)
        self._lent += (lent,)
        Whole.loans += 1
        return lent

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(f"{self.name_here}.data = ...: {LOST}")

    @property  # type: ignore[override]
    def grad(self) -> Any:
        """The gradient of the parameter at rest: weights that stay gathered after a forward hold no
        other. (Not for torch.compile, which would trace it.)"""
        with torch._C.DisableTorchFunctionSubclass():
            brought = AUTOGRADS.__get__(self)
        rest = self._at_rest if brought is None and TracingContext.try_get() is None else None
        return brought if rest is None else rest.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        rest = self._at_rest
        if value is not None and torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{self.name_here}.grad = ... inside a backward: this rank's own gradient, which "
                f"nobody would reduce. Return it from the autograd function's backward, or add it "
                f"to weight.main_grad and set weight.grad_added_to_main_grad = True"
            )
        if rest is not None:
            rest.grad = value
        with torch._C.DisableTorchFunctionSubclass():
            AUTOGRADS.__set__(self, value if rest is None else None)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """On the parameter at rest, whose gradient the hook will ask for."""
        owner: Any = super() if self._at_rest is None else self._at_rest
        return owner.register_post_accumulate_grad_hook(hook)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor of the values: so torch.save writes what hooks of saved tensors keep."""
        return self.detach().as_subclass(Tensor).clone().__reduce_ex__(protocol)

    @property
    def _at_rest(self) -> Tensor | None:
        gradients = self._gradients() if self._gradients is not None else None
        return None if gradients is None else gradients.sharded[self._index]

    def show(self, memory: Tensor) -> None:
        """Make this parameter a view of gathered memory. Its version counter stays its own, so a
        gather is no in-place change to autograd."""
        _DATA.__set__(self, memory)

    def show_gone(self, nothing: Tensor) -> None:
        """Make this parameter a view of ``nothing``, until the memory is gathered again."""
        self.show(nothing)

    @property
    def memory(self) -> Tensor:
        """The values as a plain tensor."""
        return self

    def local_gradient(self, grad: Tensor) -> Tensor:
        """The gradient that autograd brought, as a plain tensor like ``memory``."""
        if isinstance(grad, ShardedTensor):  # summed with pieces: of other ranks nothing is there
            raise RuntimeError(
                f"the gradient of {self.name_here} came in pieces: this weight stays gathered from "
                f"its forward to its backward, and the loss multiplies it with a tensor at rest, "
                f"such as a copy of it. Compute that part of the loss before the forward, or with "
                f"full_tensor() of what is at rest"
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True): the gradient of {self.name_here} is reduced over "
                f"ranks, where its graph would be lost. A penalty on gradients of inputs "
                f"(torch.autograd.grad for these alone) is right"
            )
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {self.name_here} came sparse: gradients are summed over ranks in "
                f"dense buffers; pass sparse=False to the function that reads it"
            )
        return grad

    def full_tensor(self) -> Tensor:
        """The whole main weight, of which this is a copy (collective): for scripts that ask without
        looking whether the weights are gathered just now."""
        return self._group.sharded[self._index].full_tensor()  # type: ignore[attr-defined,no-any-return]

    def outdate(self) -> None:
        """Let autograd take the values that it saved for those of before a write."""
        torch.autograd.graph.increment_version(self)
        self._counted = self._version

    def was_written(self) -> bool:
        """Whether somebody wrote to the values since this was last asked."""
        lent, known, version = self._lent, self._counted, self._version
        if not lent and version == known:
            return False
        self._lent, self._counted = (), version
        return version != known or any(one._version for one in lent)

    @property
    def name_here(self) -> str:
        """The parameter's name in its group, for errors."""
        return f"'{self._group.layout.items[self._index].name}'"

    @property
    def main_grad(self) -> Tensor:
        """The memory in which this microbatch's gradient is summed, ready to be added to."""
        view, fresh = self.fresh_main_grad()
        if fresh:
            view.zero_()
            self._group.mark_written(self._index)
        return view

    def fresh_main_grad(self) -> tuple[Tensor, bool]:
        """The same memory, and whether its contents are undefined and to be overwritten."""
        return self._group.destination(self._index)

    def delay(self) -> None:
        """Say inside a backward that the gradient comes later than this backward ends."""
        self._group.on_delayed(self._index)

    @property
    def _group(self) -> Gradients:
        gradients = self._gradients() if self._gradients is not None else None
        if gradients is None:
            raise RuntimeError("this parameter's group is gone; the model was deleted or rebuilt")
        return gradients

    @property
    def grad_added_to_main_grad(self) -> bool:
        return self._added

    @grad_added_to_main_grad.setter
    def grad_added_to_main_grad(self, value: bool) -> None:
        self._added = bool(value) and not self._group.unwanted
        if self._added:
            self._group.mark_written(self._index)
            self._group.on_written(self._index)


class WholeParameter(Whole, nn.Parameter):  # type: ignore[misc]
    """A plain tensor over the gathered memory."""


class WholeDTensor(Whole, DTensor):  # type: ignore[misc]
    """A DTensor as tensor parallelism placed it, whose local tensor is the gathered memory."""

    _tile: Tile
    _local_tensor: Tensor
    _is_param: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """DTensor's would import torch's compiler, whose import keeps the caller's frame alive."""

    @staticmethod
    def of(tile: Tile, memory: Tensor, requires_grad: bool) -> WholeDTensor:
        made = WholeDTensor._around(memory, tile.seen_spec(memory.dtype), requires_grad)
        made._tile, made._is_param = tile, True
        return made

    @staticmethod
    def _around(memory: Tensor, spec: Any, requires_grad: bool) -> WholeDTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            WholeDTensor,
            spec.shape,
            spec.stride,
            memory.storage_offset(),  # as DTensor's own, which torch.compile counts on
            dtype=memory.dtype,
            device=memory.device,
            requires_grad=requires_grad,
        )
        made._local_tensor, made._spec = memory, spec
        return made  # type: ignore[no-any-return]

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> WholeDTensor:
        """For torch.compile, whose graphs take tensors of the class that it has traced."""
        plain: Any = DTensor.__tensor_unflatten__(inner, context, size, stride)
        return WholeDTensor._around(plain._local_tensor, plain._spec, plain.requires_grad)

    def show(self, memory: Tensor) -> None:
        place = memory.dtype, memory.device, memory.storage_offset()
        if place != (self.dtype, self.device, self.storage_offset()):
            fresh = WholeDTensor.of(self._tile, memory, False)
            _DATA.__set__(self, fresh)
            self._spec = fresh._spec
        self._local_tensor = memory.data  # a version counter of its own too: a graph may save it

    def show_gone(self, nothing: Tensor) -> None:
        self._local_tensor = nothing

    @property
    def memory(self) -> Tensor:
        return self._local_tensor

    def local_gradient(self, grad: Tensor) -> Tensor:
        return self._tile.local_gradient(super().local_gradient(grad))


def carry_attributes(source: Tensor, target: Tensor) -> None:
    """Copy what users and frameworks hang on a parameter (``_no_decay``, tensor-parallel marks,
    ...): reaches every tensor that stands for it."""
    for name, value in vars(source).items():
        if name not in vars(target) and name not in ("_local_tensor", "_spec", "cut", "version"):
            setattr(target, name, value)


def _refuse_whole(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """An optimizer that was built while weights were gathered would train copies."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, Whole):
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds {parameter.name_here} as gathered for a "
                    f"forward: its updates would be lost. It was built while weights were "
                    f"unsharded; call reshard() on the modules, then build it again"
                )


register_optimizer_step_pre_hook(_refuse_whole)
