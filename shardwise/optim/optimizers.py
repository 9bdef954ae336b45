# SPDX-License-Identifier: Apache-2.0
"""``sw.optimizer`` for a whole model, ``sw.Muon`` for given matrices, and the
``torch.optim.Optimizer`` behind both.

    opt = sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-4))
    opt = sw.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)

    kind "matrix"        Muon: lr, momentum, ...                 state: momentum_buffer
    kind "function"      a matrix optimizer: lr, its options     state: defined by the function
    kind "elementwise"   AdamW: lr, betas, ...                   state: step, exp_avg, exp_avg_sq

Plain parameters are updated in place. The matrices of sharded parameters, torch's DTensors included
(FSDP2, tensor parallelism), go to their owners and back in one exchange. States exist from the
start, on every rank, and are stored like the parameter's gradient. So a checkpoint has the same
keys on every rank, and reshards states like weights. Schedulers, hooks, closures and state dicts
work as for any torch optimizer.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.agreement import raise_together
from shardwise.core.compat import plain_attributes
from shardwise.core.tensor import ShardedTensor
from shardwise.core.uncompiled import uncompiled
from shardwise.kernels.polynomials import PRESETS, Polynomial
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.notices import warn_once
from shardwise.optim import elementwise as adamw_step
from shardwise.optim.elementwise import AdamWSettings
from shardwise.optim.gradients import (
    OTHERS_ELSEWHERE,
    Clip,
    divide,
    measure_clip,
    moved_state,
    place_gradients,
    widen_gradients,
)
from shardwise.optim.matrix_group import MatrixGroup, matrix_groups
from shardwise.optim.muon import MACHINE_SETTINGS, SCALES, MuonSettings, muon
from shardwise.optim.routing import (
    Route,
    Routed,
    as_matrix,
    recall_routes,
    route_problems,
    routes_of,
)
from shardwise.optim.rules import MatrixParameter, Rule, changed, group_of
from shardwise.optim.split import matrices_of
from shardwise.optim.storage import (
    axes_of,
    cut_along_rows,
    mark_written,
    sharding_of,
    storage_problem,
)
from shardwise.words import aligned, count_text, quoted

logger = logging.getLogger(__name__)

KINDS = ("matrix", "function", "elementwise")
# What a parameter group holds beside the settings of its rule.
_OTHER_KEYS = ("params", "kind", "function", "name", "initial_lr")


class ShardedOptimizer(torch.optim.Optimizer):
    """Parameter groups of several kinds, stepped together; see :func:`optimizer`."""

    marks_writes = True
    places_states = True  # on the owners of matrices, or divided between replicas

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: dict[int, str],
        defaults: dict[str, Any] | None = None,
    ) -> None:
        """``groups``: see ``settings.group_of``; ``names``: by id of the parameter. Collective
        where parameters are sharded."""
        self._names = names
        self._rules: dict[int, Any] = {}  # by id of a group: its settings when it was made
        self._matrix_groups: list[MatrixGroup] | None = None  # None: groups are being added
        self._clip: Clip | None = None  # for the next step
        # (name, norm of this rank's piece of the gradient, on the device) of the last clip.
        self.last_norms: list[tuple[str, Tensor]] = []
        if defaults is None and groups and all(g["kind"] == "elementwise" for g in groups):
            defaults = {"betas": groups[0]["betas"]}  # which schedulers look for
        super().__init__(groups, defaults or {})
        self._plan()

    # ------------------------------------------------------------------ construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of ``kind`` "matrix", "function" or "elementwise". The first group of that
        kind gives missing settings. Collective where parameters are sharded."""
        kind, group = param_group.get("kind"), dict(param_group)
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: a parameter group is one of {', '.join(KINDS)}")
        if "rule" not in group:
            group = self._completed(group)
        rule = group.pop("rule")
        super().add_param_group(group)
        group = self.param_groups[-1]
        self._rules[id(group)] = rule
        for parameter in group["params"] if kind == "elementwise" else ():
            divide(parameter, None)
            if group["fused"] is None:
                group["fused"] = parameter.device.type == "cuda"
        if self._matrix_groups is not None:
            self._plan()

    def _completed(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group to add, with its rule and all settings; raises before the optimizer changes."""
        kind = group["kind"]
        first = next((group for group in self.param_groups if group["kind"] == kind), {})
        default = {"matrix": MuonSettings(), "elementwise": AdamWSettings()}.get(kind)
        rule = self._rules.get(id(first), default)
        if rule is None:
            raise ValueError(f"kind={kind!r}: there is no such group to take the function from")
        filled = {key: first[key] for key in first if key not in ("params", "initial_lr")} | group
        own = {key: value for key, value in filled.items() if key not in _OTHER_KEYS}
        known = {key: own[key] for key in own if key in group_of(rule, ())}
        problems = []
        if unknown := [key for key in own if key not in known and key not in first]:
            problems.append(f"a group of kind {kind!r} does not know {', '.join(unknown)}")
        try:
            rule = changed(rule, dict(known))
        except ValueError as error:
            problems.append(str(error))
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        recall_routes()
        named = [(self._name(p), p) for p in params if isinstance(p, Tensor)]
        matrices = [(n, p, as_matrix(p, "added")) for n, p in named if kind != "elementwise"]
        facts = [known, [(kind, tuple(p.shape)) for _, p in named]]
        refuse("a group to add", problems, facts, named, matrices)
        return group_of(rule, params) | filled | {"params": params}

    def _plan(self) -> None:
        """Assign owners, and store states accordingly (collective where parameters are sharded)."""
        self._matrix_groups = matrix_groups(
            [
                MatrixParameter(
                    self._name(parameter),
                    parameter,
                    as_matrix(parameter, ""),
                    group,
                    self._rules[id(group)],
                )
                for group in self.param_groups
                for parameter in (group["params"] if group["kind"] != "elementwise" else ())
            ]
        )
        self._make_states()

    def _make_states(self) -> None:
        """Store the states of every parameter where they belong, and make missing ones, also after
        ``optimizer.state.clear()``."""
        for group in self.param_groups:
            for parameter in group["params"] if group["kind"] == "elementwise" else ():
                state = self.state[parameter] or adamw_step.new_state(parameter, group["fused"])
                self.state[parameter] = {k: moved_state(parameter, v) for k, v in state.items()}
        for matrices in self._matrix_groups or ():
            for position, member in enumerate(matrices.members):
                before = self.state[member.parameter]
                self.state[member.parameter] = matrices.state_of(position, before)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {list(parameter.shape)}")

    # ------------------------------------------------------------------ a step

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; the others keep values and states.

        The next gather refreshes compute weights. Elementwise groups are updated first, then
        matrices.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        parameters = self._parameters()
        if len(self.state) < len(parameters) or not all(self.state.values()):
            self._make_states()
        with plain_attributes(), torch._C._DisableAutocast():
            place_gradients(parameters)
            clip, changes = self._take_clip()
            if not changes:
                return loss
            if clip is None:
                widen_gradients(parameters)
            stepped: list[Tensor] = []
            for group in self.param_groups:
                if group["kind"] == "elementwise":
                    stepped += adamw_step.step(group, self.state, clip)
            for matrices in self._matrix_groups or ():
                stepped += matrices.step(self.state, clip)
        mark_written(stepped)
        return loss

    @uncompiled
    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        in_step: bool = False,
    ) -> Tensor:
        """Clip the gradients of all groups by one global norm, before anything is orthogonalised;
        returns the norm before clipping, the same on every rank.

        Args:
            in_step: the next step clips while it reads the gradients, and ``.grad`` stays
                unchanged. If the norm is not finite, that step changes nothing. On GPUs this costs
                neither a pass over the gradients nor a wait of the host.
        """
        with plain_attributes():
            clip = measure_clip(self._parameters(), max_norm, norm_type)
            if error_if_nonfinite:
                clip.refuse_nonfinite(self._name)
            self._clip = clip if in_step else None  # a later call replaces an earlier one
            if not in_step:
                clip.scale(self._parameters())
        self.last_norms = [(self._name(parameter), norm) for parameter, norm in clip.parts]
        return clip.norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and a clip that no step has used."""
        self._clip = None
        super().zero_grad(set_to_none)

    def _take_clip(self) -> tuple[Tensor | None, bool]:
        """The clip for kernels, and False if the host knows that this step changes nothing.

        If a part of the step has no kernel that clips, the host waits for the norm and clips.
        """
        clip, self._clip = self._clip, None
        if clip is None:
            return None, True
        fused = all(group.fused for group in self._matrix_groups or ())
        fused = fused and clip.norm.device.type == "cuda"
        if fused and all(group.get("fused", True) for group in self.param_groups):
            return clip.on_device(), True
        if not bool(torch.isfinite(clip.norm)):
            return None, False
        clip.scale(self._parameters())
        return None, True

    # ------------------------------------------------------------------ state dicts

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with the names of parameters."""
        state_dict: dict[str, Any] = super().state_dict()
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            saved["param_names"] = [self._name(parameter) for parameter in group["params"]]
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch's. Saved states go to the parameters of the same names, also if these are
        in another order; raises where a state has another shape than its parameter."""
        groups, states = self.param_groups, state_dict["state"]
        kinds = [group.get("function", group["kind"]) for group in groups]
        others = [group.get("function", group.get("kind")) for group in state_dict["param_groups"]]
        if kinds != others:
            raise ValueError(
                f"the state dict holds groups of kinds {others}, this optimizer {kinds}: build it "
                f"with the same matrix= and elementwise= as the one that was saved"
            )
        saved_groups, problems = [], []
        for group, saved in zip(groups, state_dict["param_groups"], strict=True):
            names, indices = [self._name(p) for p in group["params"]], saved["params"]
            index_of = dict(zip(saved.get("param_names", ()), indices, strict=False))
            if index_of.keys() == set(names):
                indices = [index_of[name] for name in names]
            own = {key: value for key, value in group.items() if key not in _OTHER_KEYS}
            saved = {key: value for key, value in saved.items() if key != "param_names"}
            saved_groups.append(own | saved | {"params": indices})
            problems += [
                f"'{name}' of shape {list(p.shape)} would get {key} of {list(value.shape)}"
                for name, p, index in zip(names, group["params"], indices, strict=False)
                for key, value in states.get(index, {}).items()
                if group["kind"] != "function" and getattr(value, "shape", ()) not in ((), p.shape)
            ]
        if problems:
            raise ValueError(
                "the state dict is of other parameters, or of these in another order; nothing was "
                "loaded: " + "; ".join(problems[:4]) + ". sw.save and sw.load go by names"
            )
        super().load_state_dict(state_dict | {"param_groups": saved_groups})
        # The groups stay the same objects, which matrix groups refer to, so nothing is planned.
        loaded_groups, self.param_groups = self.param_groups, groups
        for group, loaded, saved in zip(groups, loaded_groups, saved_groups, strict=True):
            kept = {key: group[key] for key in MACHINE_SETTINGS if key in group}
            group.clear()
            group.update(loaded | kept)
            if group["kind"] == "function":  # torch has cast states to the parameter's dtype
                for parameter, index in zip(group["params"], saved["params"], strict=True):
                    self.state[parameter] = dict(states.get(index, {}))
        self._make_states()


# ------------------------------------------------------------------------------ doors


def refuse(
    what: str,
    problems: Sequence[str],
    facts: Sequence[Any],
    named: Sequence[tuple[str, Tensor]],
    matrices: Iterable[tuple[str, Tensor, Route]],
    parameters: Sequence[Tensor] | None = None,
) -> None:
    """Raise on every rank the problems of any rank, those of the parameters included, and where
    ranks build different optimizers (collective over the axes of ``parameters``, or of all
    ``named``). ``facts``: settings, then a list."""
    *settings, last = facts
    texts = [*map(str, settings), f"{len(last)} parameters ({zlib.crc32(repr(last).encode()):08x})"]
    found = [*problems, *_parameter_problems(named, matrices)]
    axes = axes_of([p for _, p in named] if parameters is None else parameters)
    raise_together(f"{what} cannot work", found, texts, axes, same="build the same optimizer")


def _parameter_problems(
    parameters: Iterable[tuple[str, Tensor]], matrices: Iterable[tuple[str, Tensor, Route]]
) -> list[str]:
    """Why these parameters cannot be optimized, or the matrices among them orthogonalised."""
    problems = [storage_problem(name, parameter) for name, parameter in parameters]
    for name, parameter, chosen in matrices:
        shape, sharding = tuple(parameter.shape), sharding_of(parameter)
        if not parameter.is_floating_point():
            problems.append(f"'{name}' is {parameter.dtype}, which has no orthogonal form")
        if wrong_route := route_problems(name, shape, chosen):
            problems += wrong_route
            continue
        problems.append(storage_problem(name, parameter, matrix=True))
        if chosen.flat and not cut_along_rows(parameter):
            problems.append(
                f"'{name}' of shape {list(shape)} is one matrix [out, rest], and "
                f"{parameter.placements} cut another dimension than the first"  # type: ignore[attr-defined]
            )
        elif chosen.split is not None and any(sharding.blocked):
            side, count = sharding.block_dim, sharding.count(sharding.blocked)
            if chosen.split.within(shape, side, count, sharding.block) is None:
                problems.append(
                    f"'{name}' has a split {chosen.split}, and tensor parallelism cuts its "
                    f"{shape[-2 + side]} {('rows', 'columns')[side]} into {count} blocks inside "
                    f"the matrices: choose a size whose cuts fall between the matrices"
                )
    return list(dict.fromkeys(problem for problem in problems if problem))


def optimizer(
    model: nn.Module,
    *,
    matrix: Rule | None,
    elementwise: AdamWSettings | None,
) -> ShardedOptimizer:
    """One optimizer for all trainable parameters of a model, sharded or not.

    Args:
        matrix: ``sw.muon(...)``, or an optimizer of your own (:func:`matrix_optimizer`), for
            parameters that :func:`route` sends to the matrices; None: ``elementwise`` updates all.
        elementwise: ``sw.adamw(...)`` for the rest.

    Collective where parameters are sharded. All problems are raised together, here.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"sw.optimizer takes the model, not a {type(model).__name__}: it decides by modules "
            f"which parameters are matrices. sw.Muon takes parameters"
        )
    problems = []
    if matrix is not None and not isinstance(matrix, Rule):
        called = f", called: {matrix.__name__}(lr=...)" if isinstance(matrix, type) else ""
        problems.append(f"matrix={matrix!r}: use sw.muon(...), your own{called}, or None")
    if elementwise is not None and not isinstance(elementwise, AdamWSettings):
        problems.append(f"elementwise={elementwise!r}: use sw.adamw(...)")
    for module in model.modules():
        if isinstance(module, GroupedLinear) and module.total_experts > module.num_experts:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, OTHERS_ELSEWHERE, module.axis or True)
    routed = routes_of(model)
    trained = [entry for entry in routed if entry.parameter.requires_grad]
    whole = matrix is not None
    matrices = [entry for entry in trained if whole and entry.route.kind == "matrix"]
    rest = [entry for entry in trained if not whole or entry.route.kind == "elementwise"]
    if not trained:
        problems.append("the model has no trainable parameters")
    elif whole and not matrices:
        problems.append(
            "matrix=..., but the model has no matrices to orthogonalise (see sw.routing_report); "
            "pass matrix=None, or route some with sw.route"
        )
    if rest and elementwise is None:
        names = quoted([entry.name for entry in rest])
        problems.append(f"{names} belong to no optimizer: pass elementwise=sw.adamw(...)")
    groups = _groups(matrix, matrices, problems) + _groups(elementwise, rest, problems)
    kinds = [(entry.name, entry.route.kind, entry.route.settings) for entry in trained]
    refuse(
        "this optimizer",
        problems,
        [f"{matrix=}", f"{elementwise=}", kinds],
        [(entry.name, entry.parameter) for entry in trained],
        [(entry.name, entry.parameter, entry.route) for entry in matrices],
        [entry.parameter for entry in routed],
    )
    if fused := [entry.name for entry in matrices if entry.looks_fused]:
        warn_once(
            logger,
            "%s look like fused weights and have no split, so Muon would mix their parts: "
            "sw.route(model, split=...) splits them; sw.routing_report(model) lists all parameters",
            quoted(fused),
            mesh=getattr(matrices[0].parameter, "device_mesh", None),
        )
    for kind, entries in (("matrices", matrices), ("the rest", rest)):
        elements = count_text(sum(entry.parameter.numel() for entry in entries))
        logger.info("%s: %d parameters of %s elements", kind, len(entries), elements)
    return ShardedOptimizer(groups, {id(entry.parameter): entry.name for entry in trained})


def _groups(settings: Any, members: Sequence[Routed], problems: list[str]) -> list[dict[str, Any]]:
    """A parameter group for the members of each combination of settings by ``sw.route``.
    ``lr_scale`` multiplies the learning rate."""
    if not hasattr(settings, "kind"):  # a problem that is known
        return []
    members_of: dict[str, list[Routed]] = {}
    for member in members:
        members_of.setdefault(repr(sorted(member.route.settings)), []).append(member)
    groups = []
    for same in members_of.values():
        changes = dict(same[0].route.settings)
        scale = changes.pop("lr_scale", 1.0)
        try:
            if not isinstance(scale, int | float) or not scale >= 0:
                raise ValueError(f"lr_scale={scale!r} must be a number, 0 or more")
            if changes or scale != 1.0:
                changes["lr"] = changes.get("lr", settings.lr) * scale
            rule = changed(settings, changes)
        except (TypeError, ValueError) as error:
            names = quoted([member.name for member in same])
            problems.append(f"settings of {names} by sw.route: {error}")
        else:
            groups.append(group_of(rule, [member.parameter for member in same]))
    return groups


class Muon(ShardedOptimizer):
    """``torch.optim.Muon`` for sharded matrices: parameters, (name, parameter) pairs, or groups.

    The arguments have torch's names, meaning and defaults. ``eps`` has no effect on norms above it:
    matrices are scaled exactly before they are normalised. Settings of :func:`shardwise.muon` can
    be given too, as ``preset="nonic"`` in the place of ``ns_coefficients`` and ``ns_steps``, or
    ``scale="unit_rms_norm"`` in the place of ``adjust_lr_fn``.

    It cannot tell spread experts under torch's FSDP2 from other DTensors, so its ``clip_grad_norm``
    counts the experts of one rank alone. ``sw.optimizer`` knows spread experts by the model.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **settings: Any,
    ) -> None:
        entries = list(params)
        if not entries:
            raise ValueError("sw.Muon got no parameters")
        self._given = given = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        defaults = MuonSettings(**_settings_of(given, given) | settings)
        groups: list[Any] = []
        named: dict[int, tuple[str, Tensor]] = {}
        problems: list[str] = []
        given_groups = entries if isinstance(entries[0], dict) else [{"params": entries}]
        for number, group in enumerate(given_groups):
            own, members = dict(group), []
            params = own.pop("params")
            for place, entry in enumerate([params] if isinstance(params, Tensor) else params):
                pair = isinstance(entry, tuple) and len(entry) == 2
                name, parameter = entry if pair else (f"parameter {place} of group {number}", entry)
                if not isinstance(parameter, Tensor):
                    problems.append(f"{name} is a {type(parameter).__name__}, not a tensor")
                elif id(parameter) in named:
                    problems.append(f"{name} is given twice")
                else:
                    named[id(parameter)] = name, parameter
                    members.append(parameter)
            try:
                groups.append(group_of(changed(defaults, _settings_of(own, given)), members))
            except ValueError as error:
                problems.append(f"group {number}: {error}")
        recall_routes()
        matrices = [(name, p, as_matrix(p, "given to sw.Muon")) for name, p in named.values()]
        facts: list[Any] = [group | {"params": len(group["params"])} for group in groups]
        facts.append([tuple(parameter.shape) for _, parameter, _ in matrices])
        refuse("sw.Muon", problems, facts, list(named.values()), matrices)
        # torch's schedulers look for momentum among the defaults.
        filled = group_of(defaults, [])
        filled = {key: value for key, value in filled.items() if key not in ("params", "rule")}
        super().__init__(groups, {key: name for key, (name, _) in named.items()}, filled)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; the constructor's settings fill in missing ones."""
        if param_group.get("kind", "matrix") != "matrix":
            raise ValueError("sw.Muon is for matrices: sw.optimizer has groups of other kinds")
        super().add_param_group(self.defaults | _settings_of(param_group, self._given))


def _settings_of(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which torch's names are replaced by those of :class:`MuonSettings`. ``defaults``:
    for the one of ``ns_coefficients`` and ``ns_steps`` that is not given."""
    own = dict(options)
    torchs = [key for key in ("ns_coefficients", "ns_steps") if key in own]
    iteration: dict[str, Any] = {key: own.pop(key) for key in torchs}
    if iteration and "preset" not in own:
        both: dict[str, Any] = {**defaults, **iteration}
        steps = (tuple(both["ns_coefficients"]),) * both["ns_steps"]
        same = [name for name, preset in PRESETS.items() if preset.coefficients == steps]
        own["preset"] = same[0] if same else Polynomial(name="ns_coefficients", coefficients=steps)
    if "adjust_lr_fn" in own:
        rule = own.pop("adjust_lr_fn")
        if rule not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn={rule!r}: one of 'original', 'match_rms_adamw'; or scale= with one "
                f"of {', '.join(SCALES)}"
            )
        own.setdefault("scale", rule or "original")
    eps = own.pop("eps", 0.0)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not eps >= 0:
        raise ValueError(f"eps={eps!r} must be 0 or more")
    return own


# ------------------------------------------------------------------------------ the report


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter."""

    name: str
    numel: int
    optimizer: str
    matrices: tuple[tuple[int, int], ...]  # shapes as orthogonalised
    scales: tuple[float, ...]
    grain: str
    why: str
    looks_fused: bool

    @property
    def cells(self) -> tuple[str, ...]:
        shapes = ", ".join(
            f"{rows}x{cols}" if count == 1 else f"{count} of {rows}x{cols}"
            for (rows, cols), count in Counter(self.matrices).items()
        )
        scales = ", ".join(f"{scale:.3g}" for scale in dict.fromkeys(self.scales))
        return self.name, self.optimizer, shapes or "-", scales or "-", self.grain, self.why


@dataclass(frozen=True)
class RoutingReport:
    """Every parameter, its optimizer, and warnings; printable, in registration order.

        parameter                optimizer  as orthogonalised   scale  grain  why
        blocks.0.wq.weight       muon       64x64               1      row    matrix
        blocks.0.w13.weight      muon       2 of 128x64         1.41   row    chosen by ...
        embedding.weight         adamw      -                   -      row    embedding

    Most reported bugs of Muon are that it did not run: a parameter went to AdamW silently, or a
    fused weight was not split. Look at this report first.
    """

    rows: tuple[Row, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        text = "looks like a fused weight and has no split"
        return tuple(f"{row.name} {text}" for row in self.rows if row.looks_fused)

    def __str__(self) -> str:
        titles = ("parameter", "optimizer", "as orthogonalised", "scale", "grain", "why")
        lines = aligned([titles, *(row.cells for row in self.rows)])
        for name, number in Counter(row.optimizer for row in self.rows).items():
            elements = sum(row.numel for row in self.rows if row.optimizer == name)
            lines.append(f"{name}: {number} parameters of {count_text(elements)} elements")
        matrices = sum(len(row.matrices) for row in self.rows)
        lines.append(f"{matrices} matrices are orthogonalised")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def routing_report(model: nn.Module, matrix: MuonSettings | None = None) -> RoutingReport:
    """What ``sw.optimizer(model, matrix=matrix, ...)`` would do with every parameter."""
    settings = matrix or muon()
    rows = []
    for entry in routes_of(model):
        parameter, route = entry.parameter, entry.route
        trained, shapes, grain = parameter.requires_grad, [], "-"
        if trained and route.kind == "matrix":
            matrices = matrices_of(route.shape_of(parameter.shape), route.split)
            shapes = [shape for matrix in matrices for shape in matrix.shapes]
        if isinstance(parameter, ShardedTensor):
            grain = str(parameter.cut.layout.items[parameter.cut.index].grain)
        rows.append(
            Row(
                name=entry.name,
                numel=parameter.numel(),
                optimizer="muon" if shapes else "adamw" if trained else "frozen",
                matrices=tuple(shapes),
                scales=tuple(SCALES[settings.scale](*shape) for shape in shapes),
                grain=grain,
                why=route.reason,
                looks_fused=trained and entry.looks_fused,
            )
        )
    return RoutingReport(tuple(rows))
