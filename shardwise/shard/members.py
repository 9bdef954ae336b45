# SPDX-License-Identifier: Apache-2.0
"""Members: checks that a wrapped model can be trained as it is; errors name the parameters.

first forward    all units (``check_first_forward`` and the warnings)
every forward    the modules hold the parameters that were wrapped (``Members``)
every backward   it reads the same weights as its forward (``refuse_written`` and others)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from math import prod
from operator import is_
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import numpy
import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.parallel import DistributedDataParallel

from shardwise import comm
from shardwise.notices import warn_once
from shardwise.optim.routing import names_head
from shardwise.precision import Precision
from shardwise.precision.policy import HEAD, TILED, Stored, stores_nothing
from shardwise.shard.group import Group
from shardwise.words import quoted

if TYPE_CHECKING:
    from shardwise.shard.unit import Unit

logger = logging.getLogger(__name__)


def check_first_forward(root: nn.Module, units: Sequence[Unit], names: Sequence[str]) -> None:
    """Raise for problems of the whole model. ``names``: the names of the units."""
    without_values = [
        f"{name}.{item.name}" if name else item.name
        for name, unit in zip(names, units, strict=True)
        for group in unit.groups
        if group.main.flat.is_meta and group.device.type != "meta"  # the device of a plan is meta
        for item, parameter in zip(group.items, group.sharded, strict=True)
        if parameter._local_tensor.is_meta  # type: ignore[attr-defined]
    ]
    if without_values:
        raise RuntimeError(
            f"parameters {without_values} are on the meta device and have no values yet: call "
            f"model.to_empty(device=...) and initialise or load them before the first forward"
        )
    planned = any(group.device.type == "meta" for unit in units for group in unit.groups)
    empty = [] if planned else [name for name, buffer in root.named_buffers() if buffer.is_meta]
    if empty:
        raise RuntimeError(
            f"buffers {empty} are on the meta device and have no values yet: call "
            f"model.to_empty(device=...) and compute them again before the first forward (a state "
            f"dict has no buffers with persistent=False)"
        )
    for precision in dict.fromkeys(unit.precision for unit in units):
        _check_patterns(precision, [unit for unit in units if unit.precision == precision])
    quantised = [unit for unit in units if unit.precision.format is not None]
    stored = [how for unit in quantised for how in unit.stored.values()]
    for problem in stores_nothing(quantised[0].precision.format, stored) if quantised else ():
        raise ValueError(problem)
    tiled = [how.name for how in stored if how.why == TILED]
    if tiled:
        logger.warning(
            "'%s' and %d more are DTensors of tensor parallelism and are not stored in fp8 "
            "(sw.precision_report lists all)",
            tiled[0],
            len(tiled) - 1,
        )
    devices = {group.device for unit in units for group in unit.groups}
    if len(devices) > 1:
        raise RuntimeError(
            f"the units of one model are on several devices: {sorted(map(str, devices))}"
        )
    _warn_of_smaller_meshes(units, names)
    _warn_of_heads(root, units)
    _warn_of_empty(root, units)


def _warn_of_smaller_meshes(units: Sequence[Unit], names: Sequence[str]) -> None:
    """Warn of a unit on fewer ranks than others: copies on the remaining ranks would drift."""
    groups = [
        (prod(group.ranks.sizes), name, group)
        for name, unit in zip(names, units, strict=True)
        for group in unit.groups
    ]
    most = max((size for size, *_ in groups), default=0)
    for size, name, group in groups:
        spread = group.ranks.others is not None or any(tile is not None for tile in group.tiles)
        if size < most and not spread and any(p.requires_grad for p in group.sharded):
            warn_once(
                logger,
                "unit '%s' is on %d ranks and others of this model on %d: its gradients are "
                "averaged over these %d alone. If other ranks hold copies of it, wrap it on the "
                "mesh of the others, or the copies drift apart (right for experts that differ)",
                name,
                size,
                most,
                size,
                about="smaller mesh",
                first=not any(group.ranks.coordinate),
            )
            return


def _check_patterns(precision: Precision, units: Sequence[Unit]) -> None:
    """Warn of patterns that match nothing: they may be meant for units that run on other ranks.
    Raise if nothing is left in MXFP8."""
    stored = [how for unit in units for how in unit.stored.values()]
    problems = precision.unmatched([how.name for how in stored])
    if not problems:
        return
    text = (
        f"{'; '.join(problems)} of this model. fully_shard knows parameters by their names in the "
        f"module that is wrapped, without the name of that module itself"
    )
    if not any(how.format for how in stored):
        raise ValueError(f"{text}. Nothing would be stored in {precision.format}")
    warn_once(logger, "%s", text)


def stored_in(
    model: nn.Module, units: Iterable[Unit]
) -> Iterator[tuple[str, nn.Module, Stored, Group]]:
    """The wrapped parameters of a model, each once: (name in the model, module that has it, how it
    is stored, group)."""
    stored: dict[tuple[int, str], tuple[Stored, Group]] = {}
    for unit in units:
        for parameters, name, number, index in unit.places:
            stored[id(parameters), name] = unit.stored[number, index], unit.groups[number]
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            key = (id(module._parameters), name)
            if parameter is not None and key in stored and id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{path}.{name}" if path else name, module, *stored[key])


def _warn_of_heads(model: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of weights whose name in the wrapped module misleads: an output head in fp8 with the
    name of another layer, and a weight in bf16 that only has the name of a head."""
    kept = [unit for unit in units if unit.precision.keeps_head("")]
    heads: list[str] = []
    others: list[str] = []
    for name, _, stored, group in stored_in(model, kept) if kept else ():
        is_head = names_head(name)
        if group.precision.keeps_head(stored.name) and is_head != names_head(stored.name):
            heads += [name] if is_head and stored.format else []
            others += [name] if stored.why.startswith(HEAD) else []
    if heads:
        warn_once(
            logger,
            "%s makes the model's logits and is stored in fp8, whose products round them: its name "
            "in the module that was wrapped is not that of an output head. Wrap it with "
            "exclude=('*',) or in bf16, or name it in include",
            quoted(heads),
        )
    if others:
        warn_once(
            logger,
            "%s stays in bf16: its name in the module that was wrapped is that of an output head. "
            "Name it in include to store it in fp8, or in exclude to say that bf16 is meant",
            quoted(others),
        )


# The attribute of a buffer that to_empty made: the buffer's version then, which any write changes.
EMPTY = "_shardwise_empty"


def _warn_of_empty(model: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of parameters and buffers that ``to_empty`` made and that were not written since then.
    Such parameters are NaN. Ranks have other pieces, so all ranks compare."""
    groups = [group for unit in units for group in unit.groups if group.main.version.unsynced]
    pieces = [group.main.view(i) for group in groups for i in range(len(group.items))]
    empty = numpy.array([one.numel() > 0 and bool(one.isnan().all()) for one in pieces])
    for axis in dict.fromkeys(axis for group in groups for axis in group.ranks.axes):
        empty = comm.any_rank(empty, axis)
    names = [item.name for group in groups for item in group.items]
    names = [name for name, is_empty in zip(names, empty, strict=True) if is_empty]
    names += [
        name
        for name, buffer in model.named_buffers()
        if buffer._version == getattr(buffer, EMPTY, None)
    ]
    if names:
        warn_once(
            logger,
            "%s: to_empty() made them and nothing has written them since; parameters are NaN then, "
            "and buffers whatever was in memory. Initialise or load them before the first forward "
            "(a state dict has no persistent=False buffers)",
            quoted(names),
        )


def refuse_ddp(units: Sequence[Unit]) -> None:
    """Raise inside a DistributedDataParallel that has taken sharded parameters: it would wait for
    their gradients and would not reduce the gradients of its other parameters."""
    around = DistributedDataParallel._active_ddp_module
    if around is None:
        return
    taken = {id(parameter) for parameter in around._module_parameters}
    named = [
        item.name
        for unit in units
        for group in unit.groups
        for item, parameter in zip(group.items, group.sharded, strict=True)
        if id(parameter) in taken and parameter.requires_grad
    ]
    if named:
        raise RuntimeError(
            f"DistributedDataParallel is around parameters that shardwise shards and reduces "
            f"({quoted(named)}). Leave DDP out (sw.zero(0) replicates like DDP), or have it ignore "
            f"these: DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, "
            f"their names in the model)"
        )


def stray_gradients(originals: list[tuple[str, ref[Tensor]]]) -> list[str]:
    """The parameters whose original from before wrapping got a gradient, which no optimizer will
    use. Takes originals that are gone, usually all, off the list."""
    originals[:] = [entry for entry in originals if entry[1]() is not None]
    named = [(name, reference()) for name, reference in originals]
    return [f"'{name}'" for name, one in named if one is not None and one.grad is not None]


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Members:
    """The parameters that the modules of a unit held when they were wrapped. A parameter that is
    replaced, added or removed later would not be trained, so each is refused by name.

    Refers to dictionaries of modules, not to modules, so that it keeps no model alive.
    """

    def __init__(self, unit: Unit) -> None:
        self._places = [place[0] for place in unit.places], [place[1] for place in unit.places]
        self._sharded = [unit.groups[number].sharded[index] for *_, number, index in unit.places]
        self._whole = [unit.groups[number].unsharded[index] for *_, number, index in unit.places]
        self._kinds = {*map(type, self._sharded), *map(type, self._whole)}
        self._kept: list[tuple[ref[nn.Module], str]] | None = None
        self._record(unit)

    def _record(self, unit: Unit) -> None:
        modules = [module for _, module in _below(unit)]
        self._modules = [ref(module) for module in modules]
        self._children = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        named = [(each, name) for each in self._parameters for name in each]
        empty = [(each, name) for each, name in named if each[name] is None]
        self._empty = [each for each, _ in empty], [name for _, name in empty]
        wrapped = {(id(parameters), name) for parameters, name, *_ in unit.places}
        filled = {(id(each), name) for each, name in named if each[name] is not None}
        self._ignored = filled - wrapped
        self._known = self._structure()

    def _structure(self) -> list[Any]:
        """Every module below, every name of a parameter."""
        inside = chain.from_iterable(map(dict.values, self._children))
        return [*inside, *chain.from_iterable(self._parameters)]

    # The next two run before every forward and backward, so they have no loops in Python.

    def refuse_replaced(self, unit: Unit) -> None:
        """Raise if the modules do not hold the parameters that were wrapped."""
        held = list(map(dict.get, *self._places))
        for expected in (self._sharded, self._whole):
            if all(map(is_, held, expected)) and self._kinds.issuperset(map(type, held)):
                return
        self._refuse_all(unit)  # accepts a mixture of both, which a staged forward has

    def refuse_added(self, unit: Unit) -> None:
        """Raise if the modules hold more parameters, or if there are other modules that do."""
        same = all(map(is_, map(dict.get, *self._empty), repeat(None)))
        if not same or self._structure() != self._known:
            self._refuse_all(unit)
            self._record(unit)  # the new modules have no parameters, or are units

    def side_outputs(self) -> list[Any]:
        """Tensors with a graph that the modules keep as attributes, as routers keep their loss. The
        first forward finds the names of such attributes; later forwards read these names."""
        if self._kept is None:
            held = [(module, vars(module())) for module in self._modules]
            self._kept = [
                (module, name)
                for module, values in held
                for name in values
                if name not in _OF_EVERY_MODULE
                and isinstance(values[name], Tensor)
                and values[name].grad_fn is not None
            ]
        return [getattr(module(), name, None) for module, name in self._kept]

    def _refuse_all(self, unit: Unit) -> None:
        problems = []
        lost = {
            (id(parameters), name): (unit.groups[number], index)
            for parameters, name, number, index in unit.places
        }
        for path, module in _below(unit):
            for name, held in module._parameters.items():
                key = (id(module._parameters), name)
                if key in lost and held is not None:
                    group, index = lost.pop(key)
                    if all(held is not one[index] for one in (group.sharded, group.unsharded)):
                        problems.append(
                            f"'{path}{name}' was replaced, and what replaced it would be dropped: "
                            f"write values into the parameter (with torch.no_grad(): copy_), or "
                            f"replace and tie parameters before wrapping; torch.func."
                            f"functional_call is for modules that are not wrapped"
                        )
                    elif type(held) not in self._kinds:
                        problems.append(
                            f"'{path}{name}' was swapped for a {type(held).__name__} "
                            f"(torch.utils.swap_tensors), which is neither sharded nor reduced: "
                            f"write values into the parameter instead"
                        )
                elif held is not None and key not in self._ignored and key not in lost:
                    problems.append(
                        f"'{path}{name}' was added, and is neither sharded nor reduced: add it "
                        f"before wrapping (ignored_params leaves it alone), or wrap its module "
                        f"with fully_shard"
                    )
        problems += [
            f"'{group.items[index].name}' is gone, and the optimizer would go on with it: remove "
            f"parameters before wrapping"
            for group, index in lost.values()
        ]
        if problems:
            raise RuntimeError(
                f"the parameters of unit '{unit.name}' changed after it was wrapped: "
                + "; ".join(problems)
            )


def modules_below(
    roots: Iterable[tuple[str, nn.Module]], is_apart: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """(path, module, whether it stands apart) of the modules ``roots`` and the modules below them,
    each once, in the order of registration. Leaves out what is below a module that stands apart."""
    waiting = [*roots][::-1]
    seen: set[int] = set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        apart = is_apart(module)
        yield path, module, apart
        if not apart:
            inside = module.named_children()
            waiting += [(f"{path}{name}.", child) for name, child in inside][::-1]


def _below(unit: Unit) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit, and those below that belong to no inner unit, with their paths."""
    roots = [("", root) for reference in unit.modules if (root := reference()) is not None]
    below = modules_below(roots, lambda each: vars(each).get("_shardwise_unit", unit) is not unit)
    return ((path, module) for path, module, apart in below if not apart)


def refuse(error: Exception | None) -> None:
    """Raise the error, if there is one."""
    if error is not None:
        raise error


def refuse_swapped(unit: Unit) -> None:
    """Raise if ``torch.utils.swap_tensors`` has given a parameter the pieces of another one."""
    for group in unit.groups:
        for index, (held, tile) in enumerate(zip(group.sharded, group.tiles, strict=True)):
            cut: Any = held.cut  # type: ignore[attr-defined]
            if cut.index != index or not cut.matches(group.main.cut(index, tile)):
                raise RuntimeError(
                    f"'{group.items[index].name}' of unit '{unit.name}' was swapped with "
                    f"'{cut.name}', whose pieces lie elsewhere (torch.utils.swap_tensors): "
                    f"exchange their values instead, with full_tensor() and copy_"
                )


def refuse_written(unit: Unit, seen: Sequence[Any]) -> NoReturn:
    """Raise for main weights that are no longer at the versions ``seen``, one for each group."""
    names = [
        item.name
        for group, state in zip(unit.groups, seen, strict=True)
        for item in group.items
        if group.main.state != state
    ]
    raise RuntimeError(
        f"weights of unit '{unit.name}' ({quoted(names)}) were written between a forward and its "
        f"backward: step, load or write after backward, or run forward again. "
        f"(set_unshard_in_backward(False) where backward does not read them.)"
    )


def refuse_side_way(unit: Unit) -> None:
    """Raise if backward has come to a unit, but not through an output of its forward. Such an
    output would have gathered the weights, so backward may have read memory that was released."""
    if unit.calls.outside:
        raise RuntimeError(
            f"backward() inside the forward of unit '{unit.name}' brings gradients to weights of "
            f"that unit itself: wrap each module that it goes through as a separate unit, detach "
            f"the tensor it starts from, or use torch.autograd.grad for chosen tensors"
        )
    gone = (
        group.pending or not all(memory.live for memory in group.blocks) for group in unit.groups
    )
    if not unit.shown and any(gone):
        raise RuntimeError(
            f"backward came to the weights of unit '{unit.name}' through no output of its forward, "
            f"when they were not gathered. A tensor that forward computed is kept elsewhere (in a "
            f"list, a closure, another module): return it from forward, keep it as an attribute "
            f"of the module, or wrap with reshard_after_forward=False. Or a checkpoint reads "
            f"weights that other parts of the graph read too: it needs use_reentrant=False"
        )


def refuse_transforms(unit: Unit) -> None:
    """Raise inside a transform of ``torch.func``, which cannot follow a gather of weights, and
    inside torch.export, torch.jit.trace and torch.fx, whose programs would keep the weights of this
    step."""
    if torch.compiler.is_exporting() or torch._C._is_tracing() or is_fx_symbolic_tracing():
        raise NotImplementedError(
            f"torch.export, torch.jit.trace (torch.onnx) or torch.fx of unit '{unit.name}': a "
            f"program would hold gathered copies of its weights. Trace the model before it is "
            f"wrapped, or load sw.full_state_dict(model) into one that is not, and export that one"
        )
    if torch._C._are_functorch_transforms_active():  # type: ignore[attr-defined]
        transform = torch._C._functorch.peek_interpreter_stack().key().name.lower()
        raise NotImplementedError(
            f"torch.func.{transform} around the forward of unit '{unit.name}': transforms cannot "
            f"follow the gather of weights in a wrapped module. Apply them to a module that is "
            f"not wrapped, or use torch.autograd.grad, and torch.autograd.forward_ad for a JVP"
        )


def refuse_generator(unit: Unit, output: Any) -> None:
    """Raise for a forward with ``yield`` in a unit that has weights."""
    if isinstance(output, GeneratorType) and unit.groups:
        raise TypeError(
            f"unit '{unit.name}': forward returned a generator, whose body runs later, without the "
            f"unit's weights: return a list of the items that it yields"
        )


def refuse_create_graph(unit: Unit) -> None:
    """Raise in a backward with ``create_graph=True``, if the weights will be released."""
    if any(group.comes_and_goes for group in unit.groups):
        raise RuntimeError(
            f"create_graph=True (a gradient of a gradient) in unit '{unit.name}': its second "
            f"backward would read weights that the first has released. Keep them: "
            f"reshard_after_forward=False and set_reshard_after_backward(False), or sw.zero(2)"
        )
