# SPDX-License-Identifier: Apache-2.0
"""Routing: which optimizer a parameter belongs to. Layouts and optimizers both ask here.

    2-D and [experts, out, in] weights                         matrix
    embeddings, by type or name; whatever is tied to one       elementwise
    the output head: by name, or the last matrix of a model    elementwise
      where it is shaped like the embedding of its vocabulary
    convolutions, norms, biases, vectors, a single row         elementwise

A convolution that ``route`` sends to the matrices is one matrix [out, rest]. A module may declare
how its parameter falls into matrices (``matrix_blocks``: gate and up of experts), or that the
parameter is no matrix (biases of experts, a row for each).

Routes depend on module types, names and global shapes, never on sharding: they are the same before
and after. ``route`` overrides them. It stores routes on the parameters, and by name on the modules
that hold them, because torch's ``fully_shard`` and ``parallelize_module`` replace parameters.
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

from shardwise.layout import Shape
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.optim.split import Split

Kind = Literal["matrix", "elementwise"]
Selector: TypeAlias = "str | nn.Module | Tensor | Callable[[str, Tensor], bool]"
ATTRIBUTE = "_shardwise_route"  # of a parameter: its Route
_BY_NAME = "_shardwise_routes"  # of a module: the routes of its own parameters, by name
_ROUTED: WeakSet[nn.Module] = WeakSet()  # the modules that have routes by name

_HEADS_ANYWHERE = {"lm_head", "unembed", "unembedding", "embed_out", "output_head", "out_head"}
_HEADS_OUTSIDE = {"head", "output", "output_layer", "classifier", "score"}  # not inside a layer
_WRAPPERS = {"model", "module", "transformer", "decoder", "_orig_mod"}
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NAMED_EMBEDDINGS = ("embedding", "embeddings")  # classes of others that hold a table
_FUSED = re.compile(
    r"(?i)qkv|c_attn|in_proj|query_key_value|kv_([ab]_)?proj|w_pack|gate_up|up_gate|w13|linear_fc1"
)
_RECURRENT = re.compile(r"(^|_)(a_log|log_a|time_decay|time_first|time_mix|decay|state)", re.I)
_POSITIONS = re.compile(r"rel(ative)?_?(pos|attention_bias)|pos(ition)?_?(bias|table|emb)", re.I)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The optimizer of a parameter, the reason, and how the parameter falls into matrices."""

    kind: Kind
    reason: str
    split: Split | None = None
    flat: bool = False  # one matrix [out, rest], whatever its dimensions: a convolution
    settings: tuple[tuple[str, Any], ...] = ()  # of its own, in place of the optimizer's

    def shape_of(self, shape: Sequence[int]) -> Shape:
        """The shape of a parameter as matrices [..., out, in]."""
        return (shape[0], math.prod(shape[1:])) if self.flat else tuple(shape)


@dataclass(frozen=True, eq=False)
class Routed:
    """A parameter with its name, its route, and warnings about the route."""

    name: str
    parameter: nn.Parameter
    route: Route
    warnings: tuple[str, ...] = ()


def route(
    model: nn.Module,
    *,
    matrix: Selector | Sequence[Selector] = (),
    elementwise: Selector | Sequence[Selector] = (),
    split: Mapping[str, Split] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Route]:
    """Choose the optimizer of every parameter, before or after sharding by this library or torch,
    and before ``sw.optimizer``: one that was built keeps its routes, and warns when it steps.

    Args:
        matrix, elementwise: parameters to send there against the default: name patterns
            (``"*.router.*"``), modules, parameters, or functions ``(name, parameter) -> bool``.
            Vectors of a module that goes to ``matrix`` keep their default. A convolution there is
            one matrix, [out, everything else].
        split: how fused weights fall into matrices, by name pattern.
        settings: settings that parameters have in place of their optimizer's, by name pattern:
            ``{"*.wo.weight": {"lr_scale": 0.5}, "*norm*": {"weight_decay": 0.0}}``. ``lr_scale``
            multiplies the learning rate. A later pattern changes what an earlier one set. Each
            combination becomes a parameter group.

    Returns the routes by name. A second call starts from the default again.
    """
    places = _places(model)
    names = {name: parameter for name, parameter, _ in places}
    problems: list[str] = []
    chosen: dict[str, dict[str, str]] = {name: {} for name in names}  # kind -> selector
    for kind, selectors in (("matrix", matrix), ("elementwise", elementwise)):
        for selector in _listed(selectors):
            matching = _select(selector, names, problems)
            if kind == "matrix" and isinstance(selector, nn.Module):  # its biases are not meant
                matching = [name for name in matching if names[name].ndim > 1]
            if not matching:
                problems.append(f"{kind}={_named(selector)} matches no parameter")
            for name in matching:
                chosen[name].setdefault(kind, _named(selector))
    splits: dict[str, tuple[str, Split]] = {}
    for name, pattern, blocks in _by_pattern("split", Split, split or {}, names, problems):
        before, other = splits.setdefault(name, (pattern, blocks))
        if other != blocks:
            problems.append(f"'{name}' has two splits: {before!r} and {pattern!r}")
    own: dict[str, dict[str, Any]] = {}
    for name, _, values in _by_pattern("settings", Mapping, settings or {}, names, problems):
        own.setdefault(name, {}).update(values)
    routes: dict[str, Route] = {}
    known = _known(places)
    for name, parameter, modules in places:
        by_user = chosen[name]
        if len(by_user) == 2:
            problems.append(
                f"'{name}' is given to two optimizers: matrix={by_user['matrix']} and "
                f"elementwise={by_user['elementwise']}; narrow one of them"
            )
            continue
        if by_user:
            kind, selector = next(iter(by_user.items()))
            reason = f"chosen by {selector}"
        else:
            kind, reason = _default(name, parameter, modules, known)
        blocks = splits[name][1] if name in splits else _declared(parameter, kind)
        folded = parameter.ndim > 3 or any(isinstance(one, _CONVOLUTIONS) for one in modules)
        flat = kind == "matrix" and folded and parameter.ndim > 2
        routes[name] = Route(
            kind=kind,  # type: ignore[arg-type]
            reason=reason,
            split=blocks,
            flat=flat,
            settings=tuple(own.get(name, {}).items()),
        )
        problems += route_problems(name, tuple(parameter.shape), routes[name])
    if problems:
        raise ValueError("this routing cannot work: " + "; ".join(problems))
    for name, parameter in names.items():
        setattr(parameter, ATTRIBUTE, routes[name])
    for module in model.modules():
        held = {n: vars(p)[ATTRIBUTE] for n, p in module._parameters.items() if p is not None}
        if held:
            setattr(module, _BY_NAME, held)
            _ROUTED.add(module)
    return routes


def routes_of(model: nn.Module) -> list[Routed]:
    """Every parameter with the route that :func:`route` stored, else the default."""
    recall_routes(model.modules())
    places = _places(model)
    known = _known(places)
    found = []
    for name, parameter, modules in places:
        chosen = recorded(parameter)
        if chosen is None:
            kind, reason = _default(name, parameter, modules, known)
            chosen = Route(kind=kind, reason=reason, split=_declared(parameter, kind))
        found.append(Routed(name, parameter, chosen, _suspicions(name, parameter, chosen, known)))
    return found


def recall_routes(modules: Iterable[nn.Module] | None = None) -> None:
    """Store routes and declarations of modules on parameters that replaced the routed ones.

    ``modules``: those of a model; None: all that were routed."""
    for module in list(_ROUTED) if modules is None else modules:
        if isinstance(module, GroupedLinear):
            module._declare()
        for name, chosen in vars(module).get(_BY_NAME, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and recorded(parameter) is None:
                setattr(parameter, ATTRIBUTE, chosen)


def recorded(parameter: Tensor) -> Route | None:
    """The route that :func:`route` stored on a parameter, or None."""
    found = getattr(parameter, ATTRIBUTE, None)
    return found if isinstance(found, Route) else None


def as_matrix(parameter: Tensor, reason: str) -> Route:
    """The route of a parameter that is given to a matrix optimizer: stored, or one matrix."""
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
    seen = chosen.shape_of(shape)
    if len(seen) not in (2, 3):
        return [
            f"'{name}' of shape {list(shape)} is no matrix [out, in] and no stack of them "
            f"[experts, out, in]; send it to the elementwise optimizer"
        ]
    if 0 in seen:
        return [f"'{name}' of shape {list(shape)} has no elements: leave it out of the matrices"]
    reason = chosen.split.problem(seen) if chosen.split is not None else None
    return [f"'{name}' of shape {list(shape)}: {reason}"] if reason else []


# ------------------------------------------------------------------------------ the default


@dataclass(frozen=True)
class _Known:
    """Facts of the whole model that the default routes depend on."""

    vocabularies: frozenset[Shape]  # of embedding tables, without tables of positions
    squares: frozenset[Shape]  # of tables as high as wide, where no other has their width
    last: int  # the id of the last parameter of two dimensions or more


def _known(places: Sequence[tuple[str, nn.Parameter, list[nn.Module]]]) -> _Known:
    tables = [
        tuple(parameter.shape)
        for _, parameter, modules in places
        if any(isinstance(module, _EMBEDDINGS) for module in modules)
    ]
    most = {width: max(rows for rows, other in tables if other == width) for _, width in tables}
    # A table as high as wide, or lower than another of its width, is one of positions or types.
    words = {(rows, width) for rows, width in tables if rows == most[width] != width}
    squares = {(rows, width) for rows, width in tables if rows == most[width] == width}
    wide = [id(parameter) for _, parameter, _ in places if parameter.ndim > 1]
    return _Known(frozenset(words), frozenset(squares), wide[-1] if wide else 0)


def _default(
    name: str, parameter: Tensor, modules: Sequence[nn.Module], known: _Known
) -> tuple[Kind, str]:
    shape = tuple(parameter.shape)
    if getattr(parameter, "matrix_blocks", None) == ():
        return "elementwise", "no matrix, its module says"
    if any(isinstance(module, _EMBEDDINGS) for module in modules):
        return "elementwise", "embedding" if len(modules) == 1 else "embedding, tied"
    holders = [type(module).__name__.lower() for module in modules]
    if "embed" in name.split(".")[-1] or any(h.endswith(_NAMED_EMBEDDINGS) for h in holders):
        return "elementwise", "embedding, by name"
    if len(shape) < 2:
        return "elementwise", "vector" if shape else "scalar"
    if any(isinstance(module, _CONVOLUTIONS) for module in modules):
        return "elementwise", "convolution"
    if any("norm" in holder for holder in holders):
        return "elementwise", "norm"
    if len(shape) > 3:
        return "elementwise", f"{len(shape)} dimensions"
    if names_head(name):
        return "elementwise", "output head, by name"
    if shape in known.vocabularies and id(parameter) == known.last:
        return "elementwise", "output head, shaped like an embedding"
    if 0 in shape or min(shape[-2:]) == 1:
        return "elementwise", "a single row or column" if parameter.numel() else "no elements"
    return "matrix", "matrix" if len(shape) == 2 else "stacked matrices"


def names_head(name: str) -> bool:
    """Whether a parameter is called as those that make logits are."""
    path = name.split(".")[:-1]
    last = path[-1] if path else name
    outside = all(part in _WRAPPERS for part in path[:-1])
    return last in _HEADS_ANYWHERE or (last in _HEADS_OUTSIDE and outside)


def _declared(parameter: Tensor, kind: str) -> Split | None:
    blocks: tuple[int, ...] | None = getattr(parameter, "matrix_blocks", None)
    return Split(sizes=blocks) if blocks and kind == "matrix" else None


def _suspicions(name: str, parameter: Tensor, chosen: Route, known: _Known) -> tuple[str, ...]:
    found = []
    shape = chosen.shape_of(parameter.shape)
    leaf = name.rpartition(".")[2]
    if chosen.kind == "matrix":
        if chosen.split is None and _FUSED.search(name):
            found.append("looks like a fused weight and has no split")
        if shape in known.vocabularies:
            found.append("is shaped like an embedding: such weights do better with AdamW")
        elif _maps_to_vocabulary(shape, id(parameter) == known.last, known):
            found.append("looks like an output head: such weights do better with AdamW")
        if _RECURRENT.search(leaf):
            found.append("looks like the state of a recurrence, which is no matrix")
        if _POSITIONS.search(name):
            found.append("looks like a table of positions, which is no matrix")
        if min(shape[-2:]) < 8:
            found.append(f"has a side of {min(shape[-2:])}: orthogonalising it means little")
    elif chosen.reason.startswith("chosen") and len(shape) == 2 and shape not in known.vocabularies:
        found.append("is a matrix that was sent to the elementwise optimizer")
    return tuple(found)


def _maps_to_vocabulary(shape: Shape, last: bool, known: _Known) -> bool:
    """Whether a matrix has a few rows more than an embedding of its width, as padded heads have;
    or stands last and has far more rows than columns, or the shape of a square table."""
    slack = 0.25 if last else 0.02
    near = any(
        shape[1:] == (width,) and rows < shape[0] <= rows * (1 + slack)
        for rows, width in known.vocabularies
    )
    tall = len(shape) == 2 and shape[0] > 8 * shape[1]
    return near or (last and (tall or shape in known.squares))


# ------------------------------------------------------------------------------ names and selectors


def _places(model: nn.Module) -> list[tuple[str, nn.Parameter, list[nn.Module]]]:
    """(first name, parameter, the modules that hold it) in registration order, tied ones once."""
    found: dict[int, tuple[str, nn.Parameter, list[nn.Module]]] = {}
    for unit in filter(None, (getattr(one, "_shardwise_unit", None) for one in model.modules())):
        unit.hide_at_rest()  # nobody trains whole weights
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{path}.{name}" if path else name
            found.setdefault(id(parameter), (full, parameter, []))[2].append(module)
    return list(found.values())


def _listed(selectors: Selector | Sequence[Selector]) -> list[Any]:
    single = isinstance(selectors, (str, nn.Module, Tensor)) or callable(selectors)
    return [selectors] if single else list(selectors)  # type: ignore[arg-type,list-item]


def _select(selector: Any, names: Mapping[str, Tensor], problems: list[str]) -> list[str]:
    if isinstance(selector, str):
        return [name for name in names if fnmatch.fnmatchcase(name, selector)]
    if isinstance(selector, nn.Module):
        inside = {id(parameter) for parameter in selector.parameters()}
        return [name for name, parameter in names.items() if id(parameter) in inside]
    if isinstance(selector, Tensor):
        return [name for name, parameter in names.items() if parameter is selector]
    if callable(selector):
        return [name for name, parameter in names.items() if selector(name, parameter)]
    problems.append(
        f"{selector!r} selects nothing: use a name pattern, a module, a parameter or a function"
    )
    return []


def _by_pattern(
    what: str,
    kind: type,
    wanted: Mapping[str, Any],
    names: Iterable[str],
    problems: list[str],
) -> Iterator[tuple[str, str, Any]]:
    """(name, pattern, value) of every parameter that a pattern of ``wanted`` names, pattern by
    pattern."""
    for pattern, value in wanted.items():
        if not isinstance(value, kind) or not value:
            expected = "dict like {'lr': 0.01}" if kind is Mapping else kind.__name__
            problems.append(f"{what} {pattern!r}: {value!r} is no {expected}")
            continue
        matching = fnmatch.filter(names, pattern)
        if not matching:
            problems.append(f"{what} {pattern!r} matches no parameter")
        yield from ((name, pattern, value) for name in matching)


def _named(selector: Any) -> str:
    if isinstance(selector, nn.Module):
        return f"a {type(selector).__name__}"
    if isinstance(selector, Tensor):
        return f"a parameter of shape {list(selector.shape)}"
    if callable(selector):
        return f"{getattr(selector, '__name__', 'a function')}()"
    return repr(selector)
