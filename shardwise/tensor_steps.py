# SPDX-License-Identifier: Apache-2.0
"""All that is changed in torch so that its optimizers and its functions know our parameters.

    before a step   states that torch loaded get our pieces; other libraries' Muon is refused, and
                    parameters that nobody wrapped are told of;
                    gradients are checked, and the step is noted for the ranks to compare; gathers
                    that read the weights end; closures that decide return one loss on all ranks
    after a step    the write is counted, so that the next gather refreshes the weights
    zero_grad       drops microbatches that wait to be reduced, too, and gradients that are still
                    to be computed; that of modules alike
    clipping        refuses gradients of which microbatches wait to be reduced, and plain ones that
                    differ between ranks
    foreach         optimizers and clipping take lists of ShardedTensors, as of DTensors
    parametrize     writes values to parameters at rest; a tensor set to itself is no write
    DTensor(...)    with our placements is a ShardedTensor
    operations      on ShardedTensors are asked of them, on torch before 2.13 too

Importing this file is what changes it. An optimizer that does a part of this itself says so by an
attribute: ``compares_gradients``, ``marks_writes``, ``places_states``.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn
from torch._library.simple_registry import GenericTorchDispatchRuleHolder as RuleHolder
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types as _optimizer_foreach_types
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_types

from shardwise import comm
from shardwise.agreement import all_ranks, differ
from shardwise.cut import Cut, Rows, Version
from shardwise.lockstep import SETTINGS, STEP
from shardwise.mesh import Ranks
from shardwise.notices import warn_once
from shardwise.tensor import GRAD, UNREDUCED, ShardedTensor
from shardwise.tensor_writes import sketch, stepping
from shardwise.uncompiled import skip_frames, uncompiled
from shardwise.words import quoted

logger = logging.getLogger(__name__)
LEFT_ALONE = "_shardwise_left_alone"  # of a parameter that is meant to be plain on each rank
BEFORE_2_13 = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def _ours(optimizer: torch.optim.Optimizer) -> list[ShardedTensor]:
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) is ShardedTensor
    ]


def _versions_of(optimizer: torch.optim.Optimizer) -> list[Version]:
    """The versions of the buffers that a step may write: those of trainable parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        found = {id(p.version): p.version for p in _ours(optimizer) if p.requires_grad}
    return [version for version in found.values() if version is not None]


_known_states: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()


def _take_over_states(optimizer: torch.optim.Optimizer) -> None:
    """States that were loaded whole, in torch's own chunks, or in the pieces of another strategy,
    get the pieces of their parameter. Every load gives an optimizer another dictionary of states:
    all ranks look when it has one."""
    if _known_states.get(optimizer) is optimizer.state:
        return
    _known_states[optimizer] = optimizer.state
    _refuse_matrix_optimizers(optimizer)
    _warn_of_unwrapped(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ours = type(parameter) is ShardedTensor
            state: dict[str, Any] = optimizer.state.get(parameter, {}) if ours else {}
            for name, value in sorted(state.items()):
                foreign = isinstance(value, Tensor) and type(value) is not ShardedTensor
                if type(value) is ShardedTensor and not getattr(optimizer, "places_states", False):
                    foreign = not parameter.cut.matches(value.cut)
                if foreign and value.ndim and value.shape == parameter.shape:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _warn_of_unwrapped(optimizer: torch.optim.Optimizer) -> None:
    """Warn of trainable parameters that no unit has, beside ours in this optimizer or elsewhere in
    the process: each rank steps its own copy."""
    plain = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if not isinstance(p, DTensor) and p.requires_grad and not hasattr(p, LEFT_ALONE)
    ]
    if not plain or all_ranks().size == 1:
        return
    objects = gc.get_objects()
    ours = (one for one in objects if type(one) is ShardedTensor)
    ranks = max((one.cut.full_mesh.size() for one in ours), default=1)
    if ranks == 1:
        return
    reduced = {  # by DDP, or torch's replicate, around our units
        id(p)
        for one in objects
        if issubclass(type(one), nn.parallel.DistributedDataParallel)
        for p in one._module_parameters
    }
    names: dict[int, str] = getattr(optimizer, "_names", {})
    if alone := [p for p in plain if id(p) not in reduced]:
        warn_once(
            logger,
            "%s.step() updates %s, which no fully_shard or data_parallel has wrapped, beside "
            "sharded parameters: nothing averages their gradients over the %d ranks, and each "
            "rank's copy goes its own way. Wrap the module that holds them (the model itself, "
            "after its blocks), or pass them in ignored_params of any unit where you average them "
            "yourself or mean them to differ",
            type(optimizer).__name__,
            quoted([names.get(id(p), f"a parameter of shape {list(p.shape)}") for p in alone]),
            ranks,
        )


def _refuse_matrix_optimizers(optimizer: torch.optim.Optimizer) -> None:
    """Raise for other libraries' Muon on pieces that it cannot work with: torch's takes a piece for
    a matrix, dion's counts on the rows that torch.chunk gives; and for Adafactor with
    foreach=True."""
    kind, of_torch = type(optimizer), getattr(torch.optim, "Muon", None)
    lists = any(group.get("foreach") for group in optimizer.param_groups)
    if kind is getattr(torch.optim, "Adafactor", None) and lists and _ours(optimizer):
        raise RuntimeError(
            "torch.optim.Adafactor(foreach=True) multiplies lists of whole means by lists of "
            "pieces: build it with foreach=False, or leave foreach out"
        )
    if kind.__module__.split(".")[0] != "dion" and kind is not of_torch:
        return
    of_chunks = kind is not of_torch and kind.__name__ in ("Muon", "Dion2")
    way = " A matrix wrapped by itself, fully_shard(linear), has such rows." if of_chunks else ""
    for group in optimizer.param_groups:
        if group.get("algorithm") in ("adamw", "lion"):
            continue  # dion's names for what is done element by element
        for one in group["params"]:
            if type(one) is not ShardedTensor or not one.cut.axes:
                continue
            if not (of_chunks and _in_chunks(one.cut)):
                raise RuntimeError(
                    f"{kind.__module__}.{kind.__name__} on '{one.cut.name}': it needs whole "
                    f"matrices{', or rows as torch.chunk cuts them' if of_chunks else ''}, and "
                    f"these lie otherwise.{way} Use sw.Muon(parameters, lr=...) or sw.optimizer"
                )


def _in_chunks(cut: Cut) -> bool:
    """Whether every holder has the rows that torch.chunk gives it: the same answer on all ranks."""
    size = -(-cut.shape[0] // cut.num_holders) * cut.stride[0]
    chunks = [(n * size, min((n + 1) * size, cut.numel)) for n in range(cut.num_holders)]
    held = [(mine, chunk) for mine, chunk in zip(cut.pieces, chunks, strict=True) if any(mine)]
    return cut.tile is None and all(mine == chunk for mine, chunk in held)


@uncompiled
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Gathers that still read main weights end before any optimizer writes those. A closure brings
    gradients later, so nothing is said of them then. Returns other arguments of the step, where a
    closure decides over it."""
    if "torch._dynamo" in sys.modules:
        _leave_pieces_alone()
    _take_over_states(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _check_gradients(optimizer)
    for version in _versions_of(optimizer):
        version.before_step()
        version.await_readers()
    stepping[:] = [optimizer] if closure is None else []
    if closure is not None and optimizer.param_groups[0].get("line_search_fn") is not None:
        return (args[0], _compared(closure, _ours(optimizer))), {}
    return None


def _compared(closure: Callable[[], Any], parameters: list[ShardedTensor]) -> Callable[[], Any]:
    """A closure whose loss must be the same on all ranks: it decides how far LBFGS goes."""
    meshes = {id(p.cut.full_mesh): p.cut.full_mesh for p in parameters}

    def compared() -> Any:
        loss = closure()
        value, apart = zlib.crc32(repr(float(loss)).encode()), False
        for axis in (axis for mesh in meshes.values() for axis in Ranks(mesh).axes):
            apart = differ(value, axis) or apart
            apart = bool(comm.any_rank(numpy.array([apart]), axis)[0])
        if apart:
            raise RuntimeError(
                f"LBFGS.step(closure): the closure returned {float(loss)} here and another loss on "
                f"other ranks, which would take other steps: return the mean over all ranks "
                f"(loss = loss.detach(); torch.distributed.all_reduce(loss); loss / world_size)"
            )
        return loss

    return compared


@functools.cache
def _leave_pieces_alone() -> None:
    """A compiled step calls this file's hooks before it touches a parameter: tell torch's compiler
    then that our pieces, which it would take for DTensors, are not for its graphs."""
    skip_frames(ShardedTensor.__torch_dispatch__)
    torch._dynamo.config.nontraceable_tensor_subclasses.add(ShardedTensor)


# Called with the parameters whose gradients are used, and with what uses them.
on_use: list[Callable[[list[Tensor], str], None]] = []


def refuse_unreduced(parameters: Iterable[Tensor], what: str) -> None:
    """Raise where microbatches of these parameters wait to be reduced: ``.grad`` lacks them."""
    parameters = list(parameters)
    for refuse in on_use:
        refuse(parameters, what)
    ours = [p for p in parameters if type(p) is ShardedTensor]
    waiting = [p.cut.name for p in ours if (v := p.version) and p.cut.index in v.waiting]
    if waiting:
        raise RuntimeError(
            f"{what} before the last microbatch: gradients of {waiting} still wait unreduced, and "
            f"would be left out. {UNREDUCED}, or zero_grad() to drop them"
        )


def refuse_own_gradients(plain: list[Tensor], axes: list[comm.Axis]) -> None:
    """Raise where gradients of plain parameters, beside those of sharded ones on these axes, differ
    between ranks, which would clip the shards of one weight by different norms (collective)."""
    value, apart = 0, False
    if plain and axes:
        norms = torch._foreach_norm(plain, dtype=torch.float64)
        known = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()  # one wait
        value = zlib.crc32(repr(known).encode())
    for axis in axes:
        apart = differ(value, axis) or apart
        apart = bool(comm.any_rank(numpy.array([apart]), axis)[0])
    if apart:
        shapes = ", ".join(str(list(one.shape)) for one in plain[:4])
        raise RuntimeError(
            f"gradients are clipped: those of {len(plain)} parameters that are not wrapped (of "
            f"shapes {shapes}) differ between ranks, and each rank would clip by another norm. "
            f"Wrap the module that holds them (the model itself, after its blocks), or average "
            f"their gradients over ranks before clipping"
        )


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise where microbatches wait unreduced, or forward ran and nothing has a gradient. Write
    notes of the step and of the parameters that it leaves out: ranks compare both, with their
    collectives, in the next backward."""
    with torch._C.DisableTorchFunctionSubclass():
        every = _ours(optimizer)
        ours = [p for p in every if p.requires_grad]
        gradients = [(GRAD.__get__(p), p.cut.name) for p in ours]
        lacking = [name for gradient, name in gradients if gradient is None]
        # Those on a GPU would be awaited.
        plain = [one for one, _ in gradients if type(one) is Tensor and one.device.type == "cpu"]
    buffers = {id(v): (v, p.cut.full_mesh) for p in every if (v := p.version) is not None}
    refuse_unreduced(every, "the optimizer steps")
    kind = f"{type(optimizer).__name__}.step()"
    failed = any(v.failed() for v, _ in buffers.values())
    if len(lacking) < len(ours):
        _fed.setdefault(optimizer, False)
        if failed:
            raise RuntimeError(
                f"{kind}: the last backward raised an exception, and left a part of its gradients "
                f"({len(ours) - len(lacking)} of {len(ours)} parameters have one). Drop them: call "
                f"zero_grad(), or reset_iter_state() on the root module"
            )
    elif failed:
        logger.warning("%s: the last backward raised an exception: nothing moves", kind)
    elif ours and not _fed.get(optimizer) and any(v.unanswered() for v, _ in buffers.values()):
        said = (
            f"{kind}: none of its {len(ours)} parameters has a gradient, and no backward has come "
            f"to the forward that ran since. backward(inputs=...) reaches no parameter at rest: "
            f"call backward() without inputs=, and requires_grad_(False) on what shall have no "
            f"gradient; or leave out the step"
        )
        if optimizer not in _fed:
            raise RuntimeError(said)
        logger.warning(said)  # gradients may be meant to come in some iterations only
        _fed[optimizer] = True
    if lacking and not getattr(optimizer, "compares_gradients", False):
        known = zlib.crc32(repr(lacking).encode())
        kind += f" without the gradients of {lacking[:3]} ({len(lacking)} in all, {known:08x})"
    if plain and any(mesh.size() > 1 for _, mesh in buffers.values()):
        values = functools.reduce(lambda known, one: sketch(one, known), plain, 0)
        kind += f" with plain gradients for {len(plain)} parameters (values {values:08x})"
    settings, clipped = _settings_by_mesh(optimizer), getattr(optimizer, "clipped", "")
    notes = _notes[optimizer] = []
    for mesh in {id(mesh): mesh for _, mesh in buffers.values()}.values():
        words = f"{type(optimizer).__name__}.step() with {clipped}{settings[mesh]}"
        for axis in Ranks(mesh).axes:
            notes += [(axis.journal, STEP, kind), (axis.journal, SETTINGS, words)]


def _settings_by_mesh(optimizer: torch.optim.Optimizer) -> dict[Any, str]:
    """The numbers and words that an optimizer steps with, by the mesh of the parameters: shards of
    one weight must take one step. A rank may have groups for parameters that it alone holds."""
    found: dict[Any, list[str]] = {}
    for group in optimizer.param_groups:
        numbers = [
            f"{name}={value.tolist() if isinstance(value, Tensor) else value}"
            for name, value in group.items()
            if isinstance(value, bool | int | float | str)
            or (isinstance(value, Tensor) and value.device.type == "cpu")  # a GPU would be awaited
            or (isinstance(value, tuple) and all(isinstance(one, int | float) for one in value))
        ]
        ours = (p.cut.full_mesh for p in group["params"] if type(p) is ShardedTensor)
        for mesh in dict.fromkeys(ours):
            found.setdefault(mesh, []).append(" ".join(numbers))
    return {mesh: "; ".join(dict.fromkeys(groups)) for mesh, groups in found.items()}


# Notes of the step that an optimizer takes now, added after it: a refused step has moved nothing.
_notes: WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = WeakKeyDictionary()
# Optimizers that have had a gradient in a step; whether a step without one was spoken of since.
_fed: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Whatever wrote the weights, a kernel that no version counter saw too: count it."""
    stepping.clear()
    for journal, operation, words in _notes.pop(optimizer, ()):
        journal.add(operation, words)
    if not getattr(optimizer, "marks_writes", False):
        for version in _versions_of(optimizer):
            version.count += 1


# Called with the parameters whose gradients the user drops.
on_zero_grad: list[Callable[[Iterable[Tensor]], None]] = []

_zero_grad, _zero_grad_of_module = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad


@functools.wraps(_zero_grad)
def _drop_gradients(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    _zero_grad(self, set_to_none)
    _drop_waiting([parameter for group in self.param_groups for parameter in group["params"]])


@functools.wraps(_zero_grad_of_module)
def _drop_gradients_of_module(self: nn.Module, set_to_none: bool = True) -> None:
    _zero_grad_of_module(self, set_to_none)
    _drop_waiting(list(self.parameters()))


def _drop_waiting(parameters: list[Tensor]) -> None:
    """torch passes over parameters whose ``.grad`` is None, and has no hook: drop microbatches that
    wait to be reduced, too."""
    stepping.clear()  # a step that raised has ended
    for one in parameters:
        if type(one) is ShardedTensor and one.version is not None:
            one.version.waiting.discard(one.cut.index)
    for tell in on_zero_grad:
        tell(parameters)


torch.optim.Optimizer.zero_grad = _drop_gradients  # type: ignore[method-assign]
nn.Module.zero_grad = _drop_gradients_of_module  # type: ignore[method-assign]


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


# ------------------------------------------------------------------------------ other places


def _refusing_unreduced(clip: Callable[..., Any]) -> Callable[..., Any]:
    @uncompiled
    @functools.wraps(clip)
    def clip_reduced(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        refuse_unreduced(parameters, "gradients are clipped")
        return clip(parameters, *args, **kwargs)

    return clip_reduced


# Two are called by clip_grad_norm_, which others may have imported by its name.
_CLIPS = ("_get_total_norm", "_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")
for _name in _CLIPS:
    for _place in (torch.nn.utils.clip_grad, torch.nn.utils):
        if hasattr(_place, _name):
            setattr(_place, _name, _refusing_unreduced(getattr(_place, _name)))


def _the_same_everywhere(total_norm: Callable[..., Any]) -> Callable[..., Any]:
    @uncompiled
    @functools.wraps(total_norm)
    def compared(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        meshes = dict.fromkeys(t.cut.full_mesh for t in tensors if type(t) is ShardedTensor)
        plain = [one for one in tensors if not isinstance(one, DTensor)]
        if plain and meshes:
            refuse_own_gradients(plain, [axis for one in meshes for axis in Ranks(one).axes])
        return total_norm(tensors, *args, **kwargs)

    return compared


for _name in ("_get_total_norm", "get_total_norm"):
    for _place in (torch.nn.utils.clip_grad, torch.nn.utils):
        if hasattr(_place, _name):
            setattr(_place, _name, _the_same_everywhere(getattr(_place, _name)))

# torch.optim and clip_grad_norm_ choose their foreach code by exact type.
for _types in (_optimizer_foreach_types, _foreach_types):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)  # type: ignore[arg-type]


def _set_parametrized(dest: Tensor, src: Tensor) -> None:
    """Write a value to the parameter below a parametrization, when somebody assigns to the
    parametrized name, or registers and removes it (peft does, around each forward)."""
    if type(dest) is ShardedTensor:
        dest.copy_(src)
    elif dest is not src:
        _torch_set(dest, src)


_torch_set = nn.utils.parametrize._maybe_set
nn.utils.parametrize._maybe_set = _set_parametrized


def _new_dtensor(
    cls: Any, local_tensor: Tensor, spec: Any, *args: Any, requires_grad: bool = False
) -> Any:
    """A ShardedTensor where ``distribute_tensor`` or ``from_local`` was given our placements, as
    frameworks give them that load or make something like a parameter. Torch's own DTensor would
    keep the rows and forget, in its first operation, that they are uneven."""
    rows = next((one for one in spec.placements if isinstance(one, Rows)), None)
    if rows is None or cls is not DTensor:
        return _torch_new(cls, local_tensor, spec, *args, requires_grad=requires_grad)
    return ShardedTensor(local_tensor, rows.cut, requires_grad=requires_grad)


_torch_new = DTensor.__new__
DTensor.__new__ = staticmethod(_new_dtensor)  # type: ignore[assignment]


def _find_rule(self: RuleHolder, torch_dispatch_class: type) -> Any:
    """A rule that comes before torch's own: for our class there is one, for every operation.

    Before 2.13 torch sends all DTensors, subclasses too, to its C++ rules, which take their pieces
    for torch's chunks. Only a rule for the class and a mode come earlier, and no mode is active
    while autograd runs a backward.
    """
    ours = torch_dispatch_class is ShardedTensor
    return _dispatch if ours else _torch_find_rule(self, torch_dispatch_class)


_dispatch: Any = ShardedTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
_torch_find_rule = RuleHolder.find
if BEFORE_2_13:
    RuleHolder.find = _find_rule  # type: ignore[method-assign]
