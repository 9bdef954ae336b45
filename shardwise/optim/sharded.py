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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.core.compat import plain_attributes
from shardwise.core.uncompiled import uncompiled
from shardwise.optim import elementwise
from shardwise.optim.elementwise import AdamWSettings
from shardwise.optim.gradients import (
    Clip,
    divide,
    measure_clip,
    moved_state,
    place_gradients,
    widen_gradients,
)
from shardwise.optim.matrix_group import MatrixGroup, matrix_groups
from shardwise.optim.muon import MACHINE_SETTINGS, MuonSettings
from shardwise.optim.routing import as_matrix, recall_routes
from shardwise.optim.rules import MatrixParameter
from shardwise.optim.settings import changed, group_of, parameter_problems, raise_unless_same
from shardwise.optim.storage import mark_written

KINDS = ("matrix", "function", "elementwise")
# What a parameter group holds beside the settings of its rule.
_OTHER_KEYS = ("params", "kind", "function", "name", "initial_lr")


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
        problems += parameter_problems(named, matrices)
        facts = [known, [(kind, tuple(p.shape)) for _, p in named]]
        raise_unless_same("a group to add cannot work", problems, facts, (p for _, p in named))
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
                state = self.state[parameter] or elementwise.new_state(parameter, group["fused"])
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
                    stepped += elementwise.step(group, self.state, clip)
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
