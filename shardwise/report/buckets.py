# SPDX-License-Identifier: Apache-2.0
"""A plan of ``data_parallel``: the model as one unit whose groups are its buckets.

    backward meets    head  block 2  block 1  block 0  embedding
    bucket            0 | 1       | 2               | 3        |     filled in this order,
    reduced             0         1                 2          3     each with its last gradient

The buckets are planned by the function that ``data_parallel`` calls. Experts that are spread over
ranks lie in buckets of their own, over the ranks that hold the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardwise.moe import mixtures_of
from shardwise.optim.muon import muon
from shardwise.optim.routing import Routed
from shardwise.report.footprint import Footprint
from shardwise.report.planned import Options
from shardwise.report.simulate import SimulatedUnit, Step
from shardwise.report.units import Owner, PlannedGroup, facts_of, owners, planned_group
from shardwise.shard.data_parallel import planned_buckets
from shardwise.shard.formats import stored_as


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The gradient of one parameter."""

    bucket: tuple[Owner, int]  # whose bucket, and which of its
    by_kernel: bool  # written where it is summed, not brought by autograd


def whole_model(model: nn.Module, ignored: set[nn.Parameter]) -> Owner:
    """One owner of everything, and one inside it of all experts that are spread over ranks."""
    spread = [layer.experts for layer in mixtures_of(model) if layer.experts.ep > 1]
    root = owners(model, spread, ignored)
    experts = [
        replace(one, name=f"{owner.name}.{one.name}") for owner in root.inner for one in owner.found
    ]
    if experts:
        root.inner = [Owner("experts", experts, ep=root.inner[0].ep)]
    return root


def lay_out_buckets(
    root: Owner, routes: Sequence[Routed], options: Options
) -> tuple[dict[Owner, tuple[PlannedGroup, ...]], list[Arrival]]:
    """The groups of every owner, and all gradients in the order of backward."""
    assert options.bucket_mb is not None
    placements, precision = options.placements, options.precision
    position = {id(one.parameter): number for number, one in enumerate(routes)}
    found = sorted(
        ((one, owner) for owner in root.tree() for one in owner.found),
        key=lambda pair: position[id(pair[0].parameter)],
    )
    everyone = [one for one, _ in found]
    matrices = {id(one.parameter) for one in routes if one.route.kind == "matrix"}
    meshes = {owner: options.mesh.without(owner.ep) for owner in root.tree()}
    groups: dict[Owner, list[PlannedGroup]] = {owner: [] for owner in root.tree()}
    arrivals: dict[int, Arrival] = {}
    for home, members, bucket in planned_buckets(
        everyone,
        {id(one.parameter): one.route for one in routes},
        [owner for _, owner in found],
        [stored_as(one, precision).format for one in everyone],
        {owner: mesh.num_shards(placements.main) for owner, mesh in meshes.items()},
        muon(),
        options.bucket_mb,
        options.measured,
    ):
        facts = [facts_of(everyone[member], precision, matrices) for member in members]
        format = stored_as(everyone[members[0]], precision).format
        for member, fact in zip(members, facts, strict=True):
            arrivals[member] = Arrival(bucket=(home, len(groups[home])), by_kernel=fact.by_kernel)
        groups[home].append(
            planned_group(
                facts,
                bucket.layout,
                format,
                meshes[home],
                placements,
                precision,
                divided=home.ep > 1,
            )
        )
    in_order = [arrivals[member] for member in reversed(range(len(everyone)))]
    return {owner: tuple(made) for owner, made in groups.items()}, in_order


class SimulatedBuckets(SimulatedUnit):
    """As ``shard/bucketed.py``: weights stay whole, and a bucket does not wait for the others."""

    def __init__(
        self,
        name: str,
        step: Step,
        sizes: Mapping[Owner, Sequence[Footprint]],
        arrivals: Sequence[Arrival],
    ) -> None:
        filled = {one.bucket: last for last, one in enumerate(arrivals)}  # by its last gradient
        order = sorted(filled, key=filled.__getitem__)
        super().__init__(
            name,
            step,
            [sizes[owner][index] for owner, index in order],
            releases_after_forward=False,
            completes_first=True,
            trains_last=0,
        )
        place = {bucket: number for number, bucket in enumerate(order)}
        self._arrivals = [(place[one.bucket], one.by_kernel) for one in arrivals]

    def _complete(self) -> None:
        self._in_backward = False
        if any(group.size.trainable for group in self.groups):
            self.step.order.ready(self)

    def reduce(self) -> None:
        """Each bucket with its last gradient. What a kernel writes waits for the next gradient
        that autograd brings: the kernel may still read the weight."""
        missing, following = Counter(number for number, _ in self._arrivals), 0
        for position, (number, by_kernel) in enumerate(self._arrivals, 1):
            missing[number] -= 1
            if by_kernel and self.groups[number].size.trainable:
                self.groups[number].open(self._last)
                if position < len(self._arrivals):
                    continue
            while following < len(self.groups) and not missing[following]:
                if self.groups[following].size.trainable:
                    self.groups[following].reduce(self._last)
                following += 1
