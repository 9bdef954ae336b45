# SPDX-License-Identifier: Apache-2.0
"""Routing: which optimizer a parameter belongs to. Layouts and optimizers both use it.

    2-D and [experts, out, in] weights                         matrix
    embeddings, by type or name; parameters tied to one        elementwise
    the output head: by name, or the last matrix of a model    elementwise
      if it is shaped like the embedding of its vocabulary
    convolutions, norms, biases, vectors, a single row         elementwise

A convolution that ``route`` sends to the matrices is one matrix [out, rest]. A module may declare
how its parameter is split into matrices (``matrix_blocks``: gate and up of experts), or that the
parameter is no matrix (biases of experts, a row for each expert).

Routes depend on module types, names and global shapes, never on sharding, so they are the same
before and after sharding. ``route`` overrides them. It stores routes on the parameters, and by name
on the modules that hold them, because torch's ``fully_shard`` and ``parallelize_module`` replace
parameters.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from torch import Tensor, nn

from shardwise.core.layout import Shape
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.optim.split import Split

Kind = Literal["matrix", "elementwise"]
Selector: TypeAlias = "str | nn.Module | Tensor | Callable[[str, Tensor], bool]"
ATTRIBUTE = "_shardwise_route"  # attribute of a parameter: its Route
_BY_NAME = "_shardwise_routes"  # attribute of a module: the routes of its parameters, by name
_ROUTED: WeakSet[nn.Module] = WeakSet()  # the modules that have routes by name

_HEADS_ANYWHERE = {"lm_head", "unembed", "unembedding", "embed_out", "output_head", "out_head"}
_HEADS_OUTSIDE = {"head", "output", "output_layer", "classifier", "score"}  # not inside a layer
_WRAPPERS = {"model", "module", "transformer", "decoder", "_orig_mod"}
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NAMED_EMBEDDINGS = ("embedding", "embeddings")  # ends of class names in other libraries
# Names of matrices that are probably several.
_FUSED = re.compile(
    r"(?i)qkv|c_attn|in_proj|query_key_value|kv_([ab]_)?proj|w_pack|gate_up|up_gate|w13|linear_fc1"
)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The optimizer of a parameter, the reason, and the matrices in the parameter."""

    kind: Kind
    reason: str
    split: Split | None = None
    flat: bool = False  # one matrix [out, rest], whatever its dimensions: a convolution
    settings: tuple[tuple[str, Any], ...] = ()  # in place of the optimizer's

    def shape_of(self, shape: Sequence[int]) -> Shape:
        """The shape of a parameter as matrices [..., out, in]."""
        return (shape[0], math.prod(shape[1:])) if self.flat else tuple(shape)


@dataclass(frozen=True, eq=False)
class Routed:
    """A parameter with its name and its route."""

    name: str
    parameter: nn.Parameter
    route: Route

    @property
    def looks_fused(self) -> bool:
        """Whether the name is that of a fused weight, and nobody chose the route or a split."""
        chosen = self.route.reason.startswith("chosen") or self.route.split is not None
        return self.route.kind == "matrix" and not chosen and bool(_FUSED.search(self.name))


def route(
    model: nn.Module,
    *,
    matrix: Selector | Sequence[Selector] = (),
    elementwise: Selector | Sequence[Selector] = (),
    split: Mapping[str, Split] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Route]:
    """Choose the optimizer of every parameter, before or after sharding by this library or torch.

    Call it before ``sw.optimizer``: an optimizer keeps the routes that it was built with.

    Args:
        matrix, elementwise: parameters whose default changes: name patterns (``"*.router.*"``),
            modules, parameters, or functions ``(name, parameter) -> bool``. Vectors of a module
            that goes to ``matrix`` keep their default. A convolution in ``matrix`` is one matrix,
            [out, everything else].
        split: how fused weights are split into matrices, by name pattern.
        settings: settings that parameters have in place of their optimizer's, by name pattern:
            ``{"*.wo.weight": {"lr_scale": 0.5}, "*norm*": {"weight_decay": 0.0}}``. ``lr_scale``
            multiplies the learning rate. A later pattern overrides an earlier one. Each
            combination becomes a parameter group.

    Returns the routes by name. A second call starts from the default again.
    """
    places = _places(model)
    names = {name: parameter for name, parameter, _ in places}
    problems: list[str] = []
    chosen: dict[str, dict[Kind, str]] = {name: {} for name in names}  # kind -> selector
    wanted: dict[Kind, Any] = {"matrix": matrix, "elementwise": elementwise}
    for kind, selectors in wanted.items():
        single = isinstance(selectors, (str, nn.Module, Tensor)) or callable(selectors)
        for selector in [selectors] if single else selectors:
            text, matching = _matching(selector, names, problems)
            if kind == "matrix" and isinstance(selector, nn.Module):  # without its biases
                matching = [name for name in matching if names[name].ndim > 1]
            if not matching:
                problems.append(f"{kind}={text} matches no parameter")
            for name in matching:
                chosen[name].setdefault(kind, text)
    splits = dict(_by_pattern("split", split or {}, names, problems))
    settings_of: dict[str, dict[str, Any]] = {}
    for name, values in _by_pattern("settings", settings or {}, names, problems):
        settings_of.setdefault(name, {}).update(values)
    routes: dict[str, Route] = {}
    default = _default_of(places)
    for name, parameter, modules in places:
        kind, reason = default(name, parameter, modules)
        for by_user, selector in chosen[name].items():
            kind, reason = by_user, f"chosen by {selector}"
        if len(chosen[name]) == 2:
            problems.append(f"'{name}' is given to two optimizers: {chosen[name]}; narrow one")
        convolution = parameter.ndim > 3 or _any_of(modules, _CONVOLUTIONS)
        routes[name] = Route(
            kind=kind,
            reason=reason,
            split=splits.get(name) or _declared(parameter, kind),
            flat=kind == "matrix" and convolution and parameter.ndim > 2,
            settings=tuple(settings_of.get(name, {}).items()),
        )
        problems += route_problems(name, tuple(parameter.shape), routes[name])
    if problems:
        raise ValueError("this routing cannot work: " + "; ".join(problems))
    for name, parameter in names.items():
        setattr(parameter, ATTRIBUTE, routes[name])
    for module in model.modules():
        by_name = {n: vars(p)[ATTRIBUTE] for n, p in module._parameters.items() if p is not None}
        if by_name:
            setattr(module, _BY_NAME, by_name)
            _ROUTED.add(module)
    return routes


def routes_of(model: nn.Module) -> list[Routed]:
    """Every parameter with the route that :func:`route` stored, else the default route."""
    recall_routes(model.modules())
    places = _places(model)
    default = _default_of(places)
    routed = []
    for name, parameter, modules in places:
        chosen = recorded(parameter)
        if chosen is None:
            kind, reason = default(name, parameter, modules)
            chosen = Route(kind=kind, reason=reason, split=_declared(parameter, kind))
        routed.append(Routed(name, parameter, chosen))
    return routed


def recall_routes(modules: Iterable[nn.Module] | None = None) -> None:
    """Copy the routes and declarations of modules to parameters that replaced the routed ones.

    ``modules``: the modules of a model; None: all modules that were routed."""
    for module in list(_ROUTED) if modules is None else modules:
        if isinstance(module, GroupedLinear):
            module._declare()
        for name, chosen in vars(module).get(_BY_NAME, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and recorded(parameter) is None:
                setattr(parameter, ATTRIBUTE, chosen)


def recorded(parameter: Tensor) -> Route | None:
    """The route that :func:`route` stored on a parameter, or None."""
    chosen = getattr(parameter, ATTRIBUTE, None)
    return chosen if isinstance(chosen, Route) else None


def as_matrix(parameter: Tensor, reason: str) -> Route:
    """The route of a parameter that is given to a matrix optimizer: split as :func:`route` or its
    module chose, else as one matrix."""
    chosen = recorded(parameter)
    split = chosen.split if chosen is not None else _declared(parameter, "matrix")
    flat = parameter.ndim > 3 or (chosen is not None and chosen.flat)
    return Route(kind="matrix", reason=reason, split=split, flat=flat)


def route_problems(name: str, shape: tuple[int, ...], chosen: Route) -> list[str]:
    """Why a parameter cannot have a route."""
    if chosen.kind == "elementwise":
        if chosen.split is not None:
            return [f"'{name}' has a split {chosen.split} but goes to the elementwise optimizer"]
        return []
    matrix_shape = chosen.shape_of(shape)
    if len(matrix_shape) not in (2, 3):
        return [
            f"'{name}' of shape {list(shape)} is no matrix [out, in] and no stack of them "
            f"[experts, out, in]; send it to the elementwise optimizer"
        ]
    if 0 in matrix_shape:
        return [f"'{name}' of shape {list(shape)} has no elements: leave it out of the matrices"]
    reason = chosen.split.problem(matrix_shape) if chosen.split is not None else None
    return [f"'{name}' of shape {list(shape)}: {reason}"] if reason else []


# ------------------------------------------------------------------------------ the default


def _default_of(
    places: Sequence[tuple[str, nn.Parameter, list[nn.Module]]],
) -> Callable[[str, Tensor, Sequence[nn.Module]], tuple[Kind, str]]:
    """The function that gives each parameter of a model its default: the kind and the reason."""
    tables = [tuple(p.shape) for _, p, modules in places if _any_of(modules, _EMBEDDINGS)]
    most_rows = {width: max(r for r, w in tables if w == width) for _, width in tables}
    # A square table, or one with fewer rows than another of its width, holds positions or types.
    words = {(rows, width) for rows, width in tables if rows == most_rows[width] != width}
    matrices = [parameter for _, parameter, _ in places if parameter.ndim > 1]
    last = matrices[-1] if matrices else None

    def default(name: str, parameter: Tensor, modules: Sequence[nn.Module]) -> tuple[Kind, str]:
        shape = tuple(parameter.shape)
        holders = [type(module).__name__.lower() for module in modules]
        embeds = any(holder.endswith(_NAMED_EMBEDDINGS) for holder in holders)
        reasons = {
            "no matrix, its module says": getattr(parameter, "matrix_blocks", None) == (),
            "embedding, tied": _any_of(modules, _EMBEDDINGS) and len(modules) > 1,
            "embedding": _any_of(modules, _EMBEDDINGS),
            "embedding, by name": embeds or "embed" in name.split(".")[-1],
            "scalar": not shape,
            "vector": len(shape) < 2,
            "convolution": _any_of(modules, _CONVOLUTIONS),
            "norm": any("norm" in holder for holder in holders),
            f"{len(shape)} dimensions": len(shape) > 3,
            "output head, by name": names_head(name),
            "output head, shaped like an embedding": shape in words and parameter is last,
            "no elements": 0 in shape,
            "a single row or column": 1 in shape[-2:],
        }
        for reason, holds in reasons.items():
            if holds:
                return "elementwise", reason
        return "matrix", "matrix" if len(shape) == 2 else "stacked matrices"

    return default


def _any_of(modules: Sequence[nn.Module], kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(module, kinds) for module in modules)


def names_head(name: str) -> bool:
    """Whether the name of a parameter is that of an output head, which makes logits."""
    path = name.split(".")[:-1]
    last = path[-1] if path else name
    outside = all(part in _WRAPPERS for part in path[:-1])
    return last in _HEADS_ANYWHERE or (last in _HEADS_OUTSIDE and outside)


def _declared(parameter: Tensor, kind: str) -> Split | None:
    """The split that the module of a parameter declares."""
    blocks: tuple[int, ...] | None = getattr(parameter, "matrix_blocks", None)
    return Split(sizes=blocks) if blocks and kind == "matrix" else None


# ------------------------------------------------------------------------------ names and selectors


def _places(model: nn.Module) -> list[tuple[str, nn.Parameter, list[nn.Module]]]:
    """(first name, parameter, modules that hold it) in registration order; a tied parameter
    appears once."""
    places: dict[int, tuple[str, nn.Parameter, list[nn.Module]]] = {}
    for module in model.modules():
        unit = getattr(module, "_shardwise_unit", None)
        if unit is not None:
            unit.hide_at_rest()  # sharded weights are trained, not whole ones
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{path}.{name}" if path else name
            places.setdefault(id(parameter), (full_name, parameter, []))[2].append(module)
    return list(places.values())


def _matching(
    selector: Any, names: Mapping[str, Tensor], problems: list[str]
) -> tuple[str, list[str]]:
    """A selector in words, and the names that it selects."""
    if isinstance(selector, str):
        return repr(selector), fnmatch.filter(names, selector)
    if isinstance(selector, nn.Module):
        inside = set(map(id, selector.parameters()))
        return f"a {type(selector).__name__}", [n for n, p in names.items() if id(p) in inside]
    if isinstance(selector, Tensor):
        text = f"a parameter of shape {list(selector.shape)}"
        return text, [name for name, parameter in names.items() if parameter is selector]
    if callable(selector):
        found = [name for name, parameter in names.items() if selector(name, parameter)]
        return f"{getattr(selector, '__name__', 'a function')}()", found
    problems.append(
        f"{selector!r} selects nothing: use a name pattern, a module, a parameter or a function"
    )
    return repr(selector), []


def _by_pattern(
    argument: str, patterns: Mapping[str, Any], names: Iterable[str], problems: list[str]
) -> Iterator[tuple[str, Any]]:
    """(name, value) of every parameter that matches a pattern, pattern by pattern."""
    kind = Split if argument == "split" else Mapping
    for pattern, value in patterns.items():
        matching = fnmatch.filter(names, pattern)
        if not isinstance(value, kind) or not value:
            problems.append(f"{argument} {pattern!r}: {value!r} is no {kind.__name__}")
        elif not matching:
            problems.append(f"{argument} {pattern!r} matches no parameter")
        else:
            yield from ((name, value) for name in matching)
