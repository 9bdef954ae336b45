# SPDX-License-Identifier: Apache-2.0
"""Whole: a parameter as forward and its kernels see it. A tile of tensor parallelism is a
WholeDTensor, any other parameter a WholeParameter."""

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
AUTOGRADS: Any = torch.Tensor.grad  # the gradient that autograd brought and that is not packed yet
LOST = (
    "gathered weights are copies that every gather makes from the main weights, so a write to them "
    "(inside forward, between a forward and its backward, after unshard()) is lost. Write to the "
    "parameter before forward or after backward, under torch.no_grad(); reshard() ends an unshard()"
)


class Whole(Tensor):
    """A parameter as forward sees it: a view of gathered memory.

    A kernel that computes a weight gradient adds it to ``main_grad``, which is zero before the
    first contribution, and then sets ``grad_added_to_main_grad = True``. To save the zeroing, a
    kernel that can overwrite calls ``fresh_main_grad()``. In both cases the kernel may return any
    gradient or none for a parameter that is an input of its node. A hook of autograd reports when
    the last use of the parameter is done.
    """

    # Whether the gradient is delayed. Set by a forward whose backward will call ``delay()``: the
    # parameter is no input of a node, so no graph shows that a gradient will come.
    delayed: bool = False
    _gradients: ref[Gradients] | None = None
    _index = 0
    _added = False  # whether a kernel has added the gradient to ``main_grad``
    # Whether that kernel returned no gradient, so that the gradient of autograd is of other uses.
    others_count = False
    # The tensors that ``.data`` returned since forward began. The version of the parameter does not
    # count writes to them.
    _lent: tuple[Tensor, ...] = ()
    _counted = 0  # the version at the last ``was_written`` or ``outdate``
    loans = 0  # how often ``.data`` of any parameter was read

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
        """The gradient that autograd brought, else the gradient of the parameter at rest. (Not in
        torch.compile, which would trace the second.)"""
        with torch._C.DisableTorchFunctionSubclass():
            brought = AUTOGRADS.__get__(self)
        if brought is not None or TracingContext.try_get() is not None:
            return brought
        rest = self._at_rest
        return None if rest is None else rest.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        rest = self._at_rest
        if value is not None and torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{self.name_here}.grad = ... inside a backward: it is the gradient of this rank "
                f"alone and would not be reduced. Return it from the autograd function's backward, "
                f"or add it to weight.main_grad and set weight.grad_added_to_main_grad = True"
            )
        if rest is not None:
            rest.grad = value
        with torch._C.DisableTorchFunctionSubclass():
            AUTOGRADS.__set__(self, value if rest is None else None)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register the hook on the parameter at rest, whose gradient the hook will read."""
        owner: Any = super() if self._at_rest is None else self._at_rest
        return owner.register_post_accumulate_grad_hook(hook)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor of the values: hooks of saved tensors may use torch.save."""
        return self.detach().as_subclass(Tensor).clone().__reduce_ex__(protocol)

    @property
    def _at_rest(self) -> Tensor | None:
        """The parameter at rest; None if the group is gone."""
        gradients = self._gradients() if self._gradients is not None else None
        return None if gradients is None else gradients.sharded[self._index]

    def set_(self, *source: Any) -> Any:
        """Write nothing if ``source`` is this parameter: a parametrization that is registered
        inside a forward (peft's ``target_parameters``) sets a weight to itself."""
        return self if len(source) == 1 and source[0] is self else super().set_(*source)

    def show(self, memory: Tensor) -> None:
        """Make this parameter a view of gathered memory. The parameter keeps its version counter,
        so for autograd a gather is no in-place change."""
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
        if isinstance(grad, ShardedTensor):  # a sum with this rank's piece of another gradient
            raise RuntimeError(
                f"the gradient of {self.name_here} came in pieces: this weight stays gathered from "
                f"its forward to its backward, and the loss multiplies it with a tensor at rest, "
                f"such as a copy of it. Compute that part of the loss before the forward, or with "
                f"full_tensor() of the tensor at rest"
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
        """The whole main weight, of which this is a copy (collective). For scripts that call it
        whether the weights are gathered or not."""
        return self._group.sharded[self._index].full_tensor()  # type: ignore[attr-defined,no-any-return]

    def outdate(self) -> None:
        """Make autograd raise if it reads the values that it has saved, as after a write."""
        torch.autograd.graph.increment_version(self)
        self._counted = self._version

    def was_written(self) -> bool:
        """Whether the values were written since the last call."""
        lent, before, version = self._lent, self._counted, self._version
        if not lent and version == before:
            return False
        self._lent, self._counted = (), version
        return version != before or any(tensor._version for tensor in lent)

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
        """The same memory, and whether its contents are undefined and must be overwritten."""
        return self._group.destination(self._index)

    def delay(self) -> None:
        """Declare, inside a backward, that the gradient may come after the end of this backward."""
        self._group.on_delayed(self._index)

    @property
    def _group(self) -> Gradients:
        """The gradients of the parameter's group."""
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
        """Do nothing. The constructor of DTensor would import torch's compiler, and that import
        keeps the frame of the caller alive."""

    @staticmethod
    def of(tile: Tile, memory: Tensor, requires_grad: bool) -> WholeDTensor:
        """A parameter whose local tensor is ``memory``, one tile of the whole."""
        made = WholeDTensor._around(memory, tile.seen_spec(memory.dtype), requires_grad)
        made._tile, made._is_param = tile, True
        return made

    @staticmethod
    def _around(memory: Tensor, spec: Any, requires_grad: bool) -> WholeDTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            WholeDTensor,
            spec.shape,
            spec.stride,
            memory.storage_offset(),  # as DTensor does; torch.compile relies on it
            dtype=memory.dtype,
            device=memory.device,
            requires_grad=requires_grad,
        )
        made._local_tensor, made._spec = memory, spec
        return made  # type: ignore[no-any-return]

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> WholeDTensor:
        """Make a tensor of this class for torch.compile, whose graphs expect the traced class."""
        plain: Any = DTensor.__tensor_unflatten__(inner, context, size, stride)
        return WholeDTensor._around(plain._local_tensor, plain._spec, plain.requires_grad)

    def show(self, memory: Tensor) -> None:
        place = memory.dtype, memory.device, memory.storage_offset()
        if place != (self.dtype, self.device, self.storage_offset()):
            fresh = WholeDTensor.of(self._tile, memory, False)
            _DATA.__set__(self, fresh)
            self._spec = fresh._spec
        # ``.data`` has a separate version counter: a graph may save the local tensor.
        self._local_tensor = memory.data

    def show_gone(self, nothing: Tensor) -> None:
        self._local_tensor = nothing

    @property
    def memory(self) -> Tensor:
        return self._local_tensor

    def local_gradient(self, grad: Tensor) -> Tensor:
        return self._tile.local_gradient(super().local_gradient(grad))


def carry_attributes(source: Tensor, target: Tensor) -> None:
    """Copy the attributes that users and frameworks set on a parameter (``_no_decay``, marks of
    tensor parallelism, ...) to another tensor that stands for the parameter."""
    for name, value in vars(source).items():
        if name not in vars(target) and name not in ("_local_tensor", "_spec", "cut", "version"):
            setattr(target, name, value)


def _refuse_whole(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise for an optimizer that was built while weights were gathered: it would train copies."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, Whole):
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds {parameter.name_here} as gathered for a "
                    f"forward: its updates would be lost. It was built while weights were "
                    f"unsharded; call reshard() on the modules, then build it again"
                )


register_optimizer_step_pre_hook(_refuse_whole)
