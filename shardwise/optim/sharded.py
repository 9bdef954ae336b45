# SPDX-License-Identifier: Apache-2.0
"""The torch.optim.Optimizer behind ``sw.optimizer`` and ``sw.Muon``.

    kind "matrix"        Muon: lr, momentum, ...                 state: momentum_buffer
    kind "function"      a matrix optimizer: lr, its options     state: defined by the function
    kind "elementwise"   AdamW: lr, betas, ...                   state: step, exp_avg, exp_avg_sq

States exist from the start, on every rank, and are stored like the parameter's gradient. So a
checkpoint has the same keys on every rank, and reshards states like weights. Schedulers, hooks,
closures and state dicts work as for any torch optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shardwise.core.compat import plain_attributes
from shardwise.core.uncompiled import uncompiled
from shardwise.kernels.ahead import compile_ahead
from shardwise.notices import warn_once
from shardwise.optim import elementwise
from shardwise.optim.elementwise import AdamWSettings
from shardwise.optim.function_step import group_class
from shardwise.optim.gradients import (
    Clip,
    OptimizerGradients,
    divide,
    division_of,
    measure_clip,
    moved_state,
)
from shardwise.optim.matrix_function import FunctionSettings, function_of
from shardwise.optim.matrix_group import (
    MatrixGroup,
    MatrixParameter,
    matrix_groups,
    planned_settings,
)
from shardwise.optim.muon import MACHINE_SETTINGS, MuonSettings, convert_momentum
from shardwise.optim.problems import parameter_problems, raise_unless_same, summary
from shardwise.optim.routing import Route, as_matrix, recall_routes, recorded
from shardwise.optim.settings import GroupSettings, group_of
from shardwise.optim.storage import local_of, mark_written
from shardwise.words import quoted

logger = logging.getLogger(__name__)

SETTINGS: dict[str, Any] = {
    settings.kind: settings for settings in (MuonSettings, FunctionSettings, AdamWSettings)
}
# A step reads .grad of hundreds of parameters and computes on plain pieces alone. It avoids
# __torch_function__, which our DTensors have in some versions of torch.


class ShardedOptimizer(torch.optim.Optimizer):
    """Parameter groups of several kinds, stepped together; see :func:`shardwise.optimizer`."""

    marks_writes = True
    places_states = True  # on the owners of matrices, or divided between replicas

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: dict[int, str],
        defaults: dict[str, Any] | None = None,
    ) -> None:
        """``names``: by id of the parameter. Collective where parameters are sharded."""
        self._names = names
        self._settings = GroupSettings(SETTINGS)
        self.half_step: str | None = None  # the error, after a step that raised half way
        self._matrix_groups: list[MatrixGroup] | None = None
        self._clip: Clip | None = None  # for the next step
        self.frozen: list[tuple[str, Tensor]] = []  # parameters of the model without a group
        self.routes: list[tuple[str, Tensor, Route]] = []  # by which the groups were made
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
        kind = param_group.get("kind")
        if kind not in SETTINGS:
            raise ValueError(f"kind={kind!r}: a parameter group is one of {', '.join(SETTINGS)}")
        first = next((group for group in self.param_groups if group["kind"] == kind), {})
        filled = {key: value for key, value in first.items() if key not in ("params", "initial_lr")}
        group = filled | param_group
        if self._matrix_groups is not None:  # the constructor's groups were checked together
            group = self._checked(group, first)
        super().add_param_group(group)
        group = self.param_groups[-1]
        for parameter in group["params"] if kind == "elementwise" else ():
            divide(parameter, None)
            if group["fused"] is None:
                group["fused"] = parameter.device.type == "cuda"
        if self._matrix_groups is not None:
            self._plan()

    def _checked(self, group: dict[str, Any], first: Iterable[str]) -> dict[str, Any]:
        """A group to add, with all its settings; raises before the optimizer changes.
        ``first``: the keys of the first group of its kind, to which schedulers may have added."""
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        kind, problems = group["kind"], []
        settings = self._settings.own(group)
        try:
            group = group_of(SETTINGS[kind](**settings), params) | group
        except ValueError as error:
            problems.append(str(error))
        options = function_of(group).options if kind == "function" else {}
        known = {"params", "kind", "name", "initial_lr", *settings, *options, *first}
        if unknown := [key for key in group if key not in known]:
            problems.append(f"a group of kind {kind!r} does not know {', '.join(unknown)}")
        recall_routes()
        named = [(self._name(p), p) for p in params if isinstance(p, Tensor)]
        matrices = []
        if kind != "elementwise":
            matrices = [(name, p, as_matrix(p, "added")) for name, p in named]
        problems += parameter_problems(named, matrices)
        facts = [f"{settings}", summary([(kind, tuple(p.shape)) for _, p in named])]
        raise_unless_same("a group to add cannot work", problems, facts, (p for _, p in named))
        return group | {"params": params}

    def _plan(self) -> None:
        """Assign owners, and store states accordingly (collective where parameters are sharded)."""
        self._warn_of_narrow_weights()
        members = [
            MatrixParameter(self._name(parameter), parameter, as_matrix(parameter, ""), group)
            for group in self._groups_of_matrices()
            for parameter in group["params"]
        ]
        self._matrix_groups = matrix_groups(members, group_class)
        self._planned = list(map(planned_settings, self._groups_of_matrices()))
        self._make_states()
        parameters = self._parameters()
        self._divisions = [(parameter, division_of(parameter)) for parameter in parameters]
        self._gradients = OptimizerGradients(parameters)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _groups_of_matrices(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["kind"] != "elementwise"]

    def _make_states(self) -> None:
        """Store the states of every parameter where they belong, and make missing ones, also after
        ``optimizer.state.clear()``."""
        for group in self.param_groups:
            for parameter in group["params"] if group["kind"] == "elementwise" else ():
                state = self.state[parameter] or elementwise.new_state(parameter, group["fused"])
                self.state[parameter] = {k: moved_state(parameter, v) for k, v in state.items()}
        for matrices in self._matrix_groups or ():
            for member in matrices.members:
                before = self.state[member.parameter]
                self.state[member.parameter] = matrices.state_of(member, before)

    def _warn_of_narrow_weights(self) -> None:
        parameters = self._parameters()
        names = [self._name(p) for p in parameters if p.itemsize < 4 and not p.is_meta]
        if names:
            warn_once(
                logger,
                "%d parameters that an optimizer trains are stored in 16 bits (%s), which round "
                "away steps of less than 1/256 of a weight. sw.fully_shard and sw.data_parallel "
                "keep fp32 main weights of what is trainable when they wrap it; without them train "
                "model.float() under torch.autocast",
                len(names),
                quoted(names),
                mesh=getattr(parameters[0], "device_mesh", None),
            )

    def _check_plan(self) -> None:
        """Raise where the plan of this optimizer no longer fits its parameters; warn of changes of
        the model that it ignores; plan again where settings have changed (collective)."""
        lost = [self._name(p) for p, before in self._divisions if division_of(p) != before]
        if lost:
            raise RuntimeError(
                f"another optimizer was built for {quoted(lost)} after this one, and gradients are "
                f"reduced to the ranks that the other needs: step the other, or build this one "
                f"again. (Or a module was moved alone after backward: call .to() on the whole "
                f"model.)"
            )
        self._warn_of_ignored_changes()
        members = (member for matrices in self._matrix_groups or () for member in matrices.members)
        planned = {id(member.parameter): id(member.group) for member in members}
        group_of_matrix = {id(p): id(g) for g in self._groups_of_matrices() for p in g["params"]}
        checked = set(map(id, self._gradients.parameters))
        if group_of_matrix != planned or not checked.issuperset(map(id, self._parameters())):
            raise RuntimeError(
                "parameters were added to param_groups, taken out or moved by hand, and this "
                "optimizer would step those that it was built for: use add_param_group and "
                "requires_grad_(False), change the settings of a group, or build it again"
            )
        # Settings change by hand, or by a load.
        if list(map(planned_settings, self._groups_of_matrices())) != self._planned:
            self._plan()

    def _warn_of_ignored_changes(self) -> None:
        """Warn of parameters that became trainable, and of routes that changed, after this
        optimizer was built."""
        if thawed := [(name, p) for name, p in self.frozen if p.requires_grad]:
            added = set(map(id, self._parameters()))
            if names := [name for name, p in thawed if id(p) not in added]:
                warn_once(
                    logger,
                    "%s were frozen when this optimizer was built: it leaves them alone, though "
                    "they are trainable now. Use add_param_group, or build it again",
                    quoted(names),
                )
        # The reason of a route may change: it decides nothing.
        decisive = attrgetter(
            "settings", *(("kind", "split", "flat") if self._matrix_groups else ())
        )
        routes = [(name, route, recorded(p) or route) for name, p, route in self.routes]
        names = [
            name
            for name, route, current in routes
            if current is not route and decisive(current) != decisive(route)
        ]
        if names:
            warn_once(
                logger,
                "sw.route chose otherwise for %s after this optimizer was built, which keeps the "
                "routes that it was built with: build it again",
                quoted(names),
            )

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {list(parameter.shape)}")

    def compile_ahead(self) -> None:
        """Begin to compile the kernels that orthogonalise, on GPUs that have them; the first step
        waits for them."""
        for group in self._matrix_groups or ():
            if group.fused:
                compile_ahead(group.launch_ahead)

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
        if self.half_step is not None:
            raise RuntimeError(self.half_step)
        problem = self._settings.problem(self.param_groups)
        if problem is not None:
            raise ValueError(problem)
        self._check_plan()
        if len(self.state) < len(self._gradients.parameters) or not all(self.state.values()):
            self._make_states()
        with plain_attributes():
            self._gradients.place()
            clip, changes = self._take_clip()
            if clip is None:
                self._gradients.widen()
        if not changes:
            return loss
        try:
            with plain_attributes(), torch._C._DisableAutocast():
                stepped: list[Tensor] = []
                for group in self.param_groups:
                    if group["kind"] == "elementwise":
                        stepped += elementwise.step(group, self.state, clip)
                for matrices in self._matrix_groups or ():
                    stepped += matrices.step(self.state, clip)
            mark_written(stepped)
        except BaseException as error:
            self.half_step = (
                f"a step of the optimizer raised half way ({type(error).__name__}: {error}), so "
                f"some weights and states are updated and others are not. Load both: sw.load, or "
                f"load_state_dict of the model and of the optimizer"
            )
            mark_written(list(self._parameters()))  # any weight may have been written
            raise
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
            clip = measure_clip(self._gradients, max_norm, norm_type, error_if_nonfinite)
            self._clip = clip if in_step else None  # a later call replaces an earlier one
            if not in_step:
                clip.scale(self._gradients)
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
        clip.scale(self._gradients)
        return None, True

    # ------------------------------------------------------------------ state dicts

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} can be neither copied nor pickled: owners and names belong to "
            f"its parameters. Build one for the copied model, and load the state_dict() of this one"
        )

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with the names of parameters and of matrix optimizers."""
        state_dict: dict[str, Any] = super().state_dict()
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            if "function" in saved:
                saved["function"] = str(saved["function"])
            saved["param_names"] = [self._name(parameter) for parameter in group["params"]]
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch's. Momentum that was saved in the other form is converted. Saved states
        go to the parameters of the same names, also if these are in another order."""
        groups = self.param_groups
        kinds = [group.get("function", group["kind"]) for group in groups]
        others = [group.get("function", group.get("kind")) for group in state_dict["param_groups"]]
        if kinds != others:
            raise ValueError(
                f"the state dict holds groups of kinds {others}, this optimizer {kinds}: build it "
                f"with the same matrix= and elementwise= as the one that was saved"
            )
        saved_groups = self._by_name(state_dict)
        super().load_state_dict(state_dict | {"param_groups": saved_groups})
        # The groups stay the same objects, which matrix groups refer to, so nothing is planned.
        loaded_groups, self.param_groups = self.param_groups, groups
        for group, loaded, saved in zip(groups, loaded_groups, saved_groups, strict=True):
            kept = {key: group[key] for key in ("function", *MACHINE_SETTINGS) if key in group}
            group.clear()
            group.update(loaded | kept)
            if group["kind"] == "function":  # torch has cast the states to the parameter's dtype
                for parameter, index in zip(group["params"], saved["params"], strict=True):
                    self.state[parameter] = dict(state_dict["state"].get(index, {}))
        self._make_states()
        for group, loaded in zip(groups, loaded_groups, strict=True):
            for parameter in group["params"] if group["kind"] == "matrix" else ():
                buffer = local_of(self.state[parameter]["momentum_buffer"])
                forms = (loaded["momentum_form"], group["momentum_form"])
                convert_momentum(buffer, group["momentum"], *forms)
        self.half_step = None

    def _by_name(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """The groups of a state dict, with parameters in the order of this optimizer if the names
        are the same; raises where a state has another shape than its parameter."""
        saved_groups, problems, states = [], [], state_dict["state"]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            names, indices = [self._name(p) for p in group["params"]], saved["params"]
            index_of = dict(zip(saved.get("param_names", ()), indices, strict=False))
            if index_of.keys() == set(names) and len(index_of) == len(names):
                indices = [index_of[name] for name in names]
            settings = {key: group[key] for key in self._settings.names(group) if key in group}
            missing = [key for key in settings if key not in (*saved, *MACHINE_SETTINGS)]
            if missing:
                text = "the state dict lacks %s, which stay as this optimizer has them"
                warn_once(logger, text, quoted(missing))
            members = list(zip(names, group["params"], indices, strict=False))
            stateless = [name for name, p, at in members if p.requires_grad and at not in states]
            if stateless and states:  # without any states, it was saved before a step
                text = "the state dict has no states of %s, which begin again with zeros"
                warn_once(logger, text, quoted(stateless))
            saved = {key: value for key, value in saved.items() if key != "param_names"}
            saved_groups.append(settings | saved | {"params": indices})
            if group["kind"] != "function":
                problems += [
                    f"'{name}' of shape {list(p.shape)} would get {key} of {list(value.shape)}"
                    for name, p, index in members
                    for key, value in states.get(index, {}).items()
                    if isinstance(value, Tensor) and value.ndim and value.shape != p.shape
                ]
        if problems:
            raise ValueError(
                "the state dict is of other parameters, or of these in another order; nothing was "
                "loaded: " + "; ".join(problems[:4]) + ". sw.save and sw.load go by names"
            )
        return saved_groups
