# SPDX-License-Identifier: Apache-2.0
"""Expert weights in memory: one tensor for all experts, or one tensor for each, evenly spaced.

    grouped    weight [experts, out, in]                        one Parameter
    indexed    weight0 | weight1 | weight2 | ...                a Parameter each

Products need one tensor [experts, out, in]. Indexed weights are created one after another in one
storage, and a sharded group packs its weights in the same way: then the one tensor is a view. Where
the weights lie in different storages, the one tensor is a copy that each use makes anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.compat import plain_attributes, will_run
from shardwise.precision.fp8 import Reads
from shardwise.precision.fp8_weight import Coded


def as_one(parts: Sequence[Tensor]) -> Tensor:
    """One tensor [experts, ...]: a view where the parts are evenly spaced, else a copy."""
    view = evenly_spaced(parts)
    return torch.stack(list(parts)) if view is None else view


def evenly_spaced(parts: Sequence[Tensor]) -> Tensor | None:
    """A view [experts, ...] of the parts if they are evenly spaced in one storage, else None."""
    first = parts[0].detach()
    if len(parts) == 1:
        return first.unsqueeze(0)
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    distance = parts[1].storage_offset() - offset
    if distance < first.numel() or not storage:
        return None
    for index, part in enumerate(parts):
        alike = part.shape == first.shape and part.dtype == first.dtype and part.is_contiguous()
        placed = part.storage_offset() == offset + index * distance
        if not (alike and placed and part.untyped_storage().data_ptr() == storage):
            return None
    strides = (distance, *first.stride())
    return first.as_strided((len(parts), *first.shape), strides, offset)


def as_neighbours(parts: Sequence[nn.Parameter]) -> None:
    """Move the values of several parameters into one storage, expert after expert."""
    if len(parts) < 2 or any(type(part) is not nn.Parameter for part in parts):
        return
    if evenly_spaced(parts) is not None or len({part.device for part in parts}) > 1:
        return
    together = torch.stack([part.data for part in parts])
    for part, value in zip(parts, together, strict=True):
        part.data = value


class ExpertShare(Tensor):
    """A tensor in the state dict of spread experts. It refuses ``torch.distributed.checkpoint``.

    ``torch.distributed.checkpoint`` treats tensors with the same name on different ranks as copies,
    and would keep one rank's experts for all. The two methods that it calls raise an error. They
    are attributes of the tensor, because an asynchronous save copies attributes but not the type.
    """

    @classmethod
    def of(cls, value: Any) -> Any:
        """``value`` as an ExpertShare (a DTensor: its local tensor); other values unchanged."""
        from torch.distributed.tensor import DTensor

        if type(value) is DTensor:
            value._local_tensor = cls.of(value._local_tensor)
        if type(value) is not Tensor:
            return value
        share: Any = value.as_subclass(cls)
        share.__create_write_items__, share.__create_chunk_list__ = _refuse_write, _refuse_read
        return share

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_attributes():
            result = func(*args, **(kwargs or {}))
        return cls.of(result) if func in _COPIES else result

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # files hold plain tensors


_COPIES = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.clone, Tensor.detach, Tensor.contiguous}
_COPIES |= {Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type, torch.clone}
_COPIES |= {Tensor.pin_memory, torch.empty_like, torch.zeros_like}  # destinations of a load


def _refuse_write(name: str, value: Tensor) -> None:
    raise NotImplementedError(
        f"'{name}' holds some experts, and other ranks hold other experts under the same name: "
        f"torch.distributed.checkpoint would keep one rank's experts for all. Use sw.save and "
        f"sw.load, or sw.full_state_dict for one plain file"
    )


def _refuse_read() -> None:
    raise NotImplementedError(
        "this state dict holds the experts of this rank, and other ranks hold other experts under "
        "the same names: torch.distributed.checkpoint would load the same experts on every rank. "
        "Use sw.load, or sw.load_full_state_dict with the experts of all ranks"
    )


def declare_matrices(parameter: Tensor, blocks: tuple[int, ...]) -> None:
    """Declare to matrix optimizers which rows of a parameter form a matrix. ``blocks`` are sizes of
    blocks of rows, which repeat over the parameter; the blocks of one entry form one matrix.
    (): the parameter is no matrix."""
    parameter.matrix_blocks = blocks  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ gradients

# ``write(None, False)`` returns a new gradient [experts, ...]; ``write(out, add)`` writes the
# gradient to ``out``, or adds it to ``out``.
WriteGradient = Callable[[Tensor | None, bool], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertTensor:
    """All experts' weights (or biases) of one linear: the Parameter objects themselves."""

    parameters: tuple[Tensor, ...]
    grouped: bool  # one parameter with a dimension for experts; else one parameter for each expert

    def value(self, dtype: torch.dtype, phase: Reads = "forward") -> Tensor:
        """The current values [experts, ...] as the products of ``phase`` read them."""
        parts = [_read(parameter, phase) for parameter in self.parameters]
        return (parts[0] if self.grouped else as_one(parts)).to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def in_graphs(self) -> bool:
        """Whether a graph of torch.compile may return gradients. It may not where the user has set
        a ``main_grad``: then ``.grad`` must stay None. Experts in fp8 run between graphs."""
        return not any(
            isinstance(parameter, Coded)
            or (not _is_sharded(parameter) and hasattr(parameter, "main_grad"))
            for parameter in self.parameters
        )

    @property
    def has_main_grad(self) -> bool:
        """Whether every trained parameter has a ``main_grad`` to add gradients to."""
        return all(map(_offers_main_grad, self._trained))

    def gradients(self, write: WriteGradient) -> list[Tensor | None]:
        """The gradients for autograd, one per parameter. None: the parameter is frozen, or its
        gradient is in ``main_grad``, or the caller of ``torch.autograd.grad`` does not want it."""
        if not any(map(is_wanted, self._trained)):
            return [None] * len(self.parameters)
        if self.has_main_grad:
            self.write_main_grads(write, set())
            for parameter in self._trained:
                parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
                parameter.others_count = True  # type: ignore[attr-defined]
            return [None] * len(self.parameters)
        return self._fresh(write)

    def _fresh(self, write: WriteGradient) -> list[Tensor | None]:
        value = write(None, False)
        # Detached: autograd must not treat an in-place change of one expert's gradient as a change
        # of a view.
        parts = [value] if self.grouped else [part.detach() for part in value]
        return [
            part if parameter.requires_grad else None
            for parameter, part in zip(self.parameters, parts, strict=True)
        ]

    def accumulate(self, write: WriteGradient, seen: set[int]) -> None:
        """Add gradients to ``main_grad`` or ``.grad`` after a backward, as autograd does inside."""
        if not self._trained:
            return
        if self.has_main_grad:
            self.write_main_grads(write, seen)
            return
        for parameter, gradient in zip(self.parameters, self._fresh(write), strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def write_main_grads(self, write: WriteGradient, seen: set[int]) -> None:
        """Write gradients to ``main_grad``, or add them. ``seen``: ids of the parameters that were
        written since the last completion; gradients are added to the contents of their memory."""
        places = [_main_grad(p, seen) if p.requires_grad else None for p in self.parameters]
        seen.update(map(id, self._trained))
        if self.grouped:
            assert places[0] is not None
            write(*places[0])
            return
        if None not in places and len({place[1] for place in places if place}) == 1:
            together = evenly_spaced([place[0] for place in places if place])
            if together is not None:
                write(together, places[0][1])  # type: ignore[index]
                return
        like = next(place[0] for place in places if place is not None)
        shape = (len(places), *like.shape)
        value = write(like.new_empty(shape), False)  # in the dtype of main_grad: no sum is rounded
        for place, part in zip(places, value, strict=True):
            if place is not None:
                target, add = place
                target.add_(part) if add else target.copy_(part)

    def delay(self) -> None:
        """Declare to the units of the parameters that the gradients come after this backward."""
        for parameter in self._trained:
            if hasattr(type(parameter), "delay"):
                parameter.delay()  # type: ignore[attr-defined]

    def complete(self) -> None:
        """Call the hooks of the parameters once each: their delayed gradients are complete."""
        for parameter in self._trained:
            if _offers_main_grad(parameter):
                parameter.others_count = True  # type: ignore[attr-defined]
                parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
                if _is_sharded(parameter):
                    continue  # the assignment has notified its unit
            hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            for hook in list(hooks.values()) if hooks else ():
                hook(parameter)

    @property
    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters if parameter.requires_grad]


def parameters_of(bundles: Sequence[ExpertTensor]) -> list[Tensor]:
    return [parameter for bundle in bundles for parameter in bundle.parameters]


# Gradients that one backward has not computed yet, in the order of their computation.
Pending = list[tuple[ExpertTensor, WriteGradient]]

# The parameters that operators were given in forward, by the place of their memory.
_given: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()


def _place(value: Tensor) -> tuple[int, int]:
    return int(value.untyped_storage()._cdata), int(value.storage_offset())


def remember(parameters: Sequence[Tensor]) -> None:
    """Let :func:`originals` find these parameters by any tensor at the same place in memory."""
    for parameter in parameters:
        _given[_place(parameter)] = parameter


def originals(saved: Sequence[Tensor], trained: Sequence[bool]) -> list[Tensor]:
    """The parameters that forward was given. An activation checkpoint saves views of them, which
    have no ``main_grad`` and no codes."""
    parameters = []
    for value, trains in zip(saved, trained, strict=True):
        original = value if isinstance(value, nn.Parameter) else _given.get(_place(value))
        if original is None or _place(original) != _place(value):
            if trains and not value.requires_grad:
                raise RuntimeError(
                    f"a compiled backward was given a copy of the experts' parameter of shape "
                    f"{tuple(value.shape)}: hooks on saved tensors must not move parameters. "
                    f"Exclude parameters in the hook, or run the experts without torch.compile"
                )
            original = value
        parameters.append(original)
    return parameters


def saved_by(ctx: Any) -> tuple[Tensor, ...]:
    """The tensors that a node saved; raises where one of them changed in place."""
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"the weights of experts, or their input rows, changed in place between forward and "
            f"backward. Step the optimizer after backward. Error of torch: {error}"
        ) from error


def _read(parameter: Tensor, phase: Reads) -> Tensor:
    """The values of a parameter; those of a weight in fp8 are decoded."""
    return parameter.decode(phase) if isinstance(parameter, Coded) else parameter.detach()


def is_wanted(leaf: Tensor) -> bool:
    """Whether the backward that runs now computes the gradient of this leaf."""
    with plain_attributes(), torch.enable_grad():
        node: Any = leaf.grad_fn or leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return will_run(node, asked_for=True)


def _is_sharded(parameter: Tensor) -> bool:
    """Whether this is a parameter of a sharded group."""
    return hasattr(type(parameter), "fresh_main_grad")


def _offers_main_grad(parameter: Tensor) -> bool:
    if _is_sharded(parameter):
        return getattr(parameter, "_gradients", None) is not None
    return isinstance(getattr(parameter, "main_grad", None), Tensor)


def _main_grad(parameter: Tensor, seen: set[int]) -> tuple[Tensor, bool]:
    """The memory of a gradient, and whether to add to its contents (else they are undefined)."""
    if _is_sharded(parameter):
        target, fresh = parameter.fresh_main_grad()  # type: ignore[attr-defined]
        return target, not fresh or id(parameter) in seen
    return parameter.main_grad, True  # type: ignore[attr-defined]
