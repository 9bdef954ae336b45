# SPDX-License-Identifier: Apache-2.0
"""Cases of FSDP2's contract: tensor parallelism, torch.compile, pipelines, and what else people put
around or beside a module."""

from __future__ import annotations

import copy
import pickle
import tempfile
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import shardwise as sw
from tests.contract.helpers import assert_close, full, raised
from tests.interop.fsdp2_contract import (
    LIBRARIES,
    Net,
    Tail,
    assert_same,
    both,
    case,
    shard_net,
    step,
)
from tests.one_card import device_type
from tests.tensor_parallel import Net as TiledNet
from tests.tensor_parallel import grid, loss_of, tiled

DataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", None)  # torch 2.11 has none

# ------------------------------------------------------------------------------ 1, 2: tp


def cut(shard: Any, sizes: tuple[int, ...] = (2, 2)) -> tuple[Any, Any]:
    """A model under tensor parallelism and sharded over dp, and the same in one process."""
    mesh = grid(*sizes)
    data, model = mesh[mesh.mesh_dim_names[:-1]], tiled(mesh)
    for block in model.blocks:
        shard(block, mesh=data)
    return shard(model, mesh=data), TiledNet()


def trains_cut(shard: Any, make: Any, sizes: tuple[int, ...] = (2, 2)) -> None:
    (model, plain), batches = cut(shard, sizes), range(4 // sizes[-1])
    mine = dist.get_rank() // sizes[-1]
    optimizers = [make(one) for one in (model, plain)]
    for _ in range(2):
        loss_of(model, mine).backward()
        torch.stack([loss_of(plain, which) for which in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain, 1e-4)


for _name, _sizes in {"dp 2 x tp 2": (2, 2), "dp_outer 2 x dp 1 x tp 2": (2, 1, 2)}.items():
    case(f"1 parallelize_module, then sharded, {_name}", ranks=4)(
        lambda shard, sizes=_sizes: trains_cut(
            shard, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), sizes
        )
    )


@case("1 SPMD: DTensors replicated over dp of one mesh, dp_mesh_dims", ranks=4)
def spmd(shard: Any) -> None:
    mesh, plain = grid(2, 2), nn.Linear(6, 8)
    model = copy.deepcopy(plain)
    for name, parameter in list(plain.named_parameters()):
        placed = distribute_tensor(parameter.detach(), mesh, (Replicate(), Shard(0)))
        setattr(model, name, nn.Parameter(placed))
    shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    rows = torch.randn(4, 6)
    made = model(distribute_tensor(rows, mesh, (Shard(0), Replicate())))
    here = made.redistribute(placements=(Shard(0), Replicate())).to_local()
    here.square().mean().backward()  # of this rank's rows; the ranks' gradients are averaged
    plain(rows).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert_close(full(model.get_parameter(name).grad), parameter.grad, name)


@case("1 a checkpoint (DCP) of dp 2 x tp 2, read on dp 4", ranks=4)
def other_sizes(shard: Any) -> None:
    model, plain = cut(shard)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    other = TiledNet()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    shard(other)
    values = get_model_state_dict(other)
    dcp.load(values, checkpoint_id=folder[0])
    set_model_state_dict(other, values)
    assert_same(other, plain, 0.0)


@case("11 a DCP checkpoint, read by the other library")
def read_by_the_other(shard: Any) -> None:
    model, plain = both(shard)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    other = shard_net(next(one for one in LIBRARIES.values() if one is not shard), Net())
    values = get_model_state_dict(other)
    dcp.load(values, checkpoint_id=folder[0])
    set_model_state_dict(other, values)
    assert_same(other, plain, 0.0)


@case("1 clip_grad_norm_ and whole state dicts under tensor parallelism", ranks=4)
def clipped(shard: Any) -> None:
    model, plain = cut(shard)
    loss_of(model, 0).backward()
    loss_of(plain, 0).backward()
    norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, plain)]
    assert_close(norms[0].full_tensor(), norms[1], "norm", 1e-4)
    for name, parameter in plain.named_parameters():
        assert_close(full(model.get_parameter(name).grad), parameter.grad, name)
    values = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in values.items():
        assert torch.equal(value, plain.state_dict()[name]), name


@case(
    "2 Muon under tensor parallelism", ranks=4, torch_fails="differs by|sharding strategy|got mixed"
)
def muon_cut(shard: Any) -> None:
    """Each library's own, against itself in one process."""
    ours = shard is sw.fully_shard
    make: Any = partial(sw.Muon if ours else torch.optim.Muon, lr=0.05)
    trains_cut(shard, lambda model: make(p for p in model.blocks.parameters() if p.ndim == 2))


# ------------------------------------------------------------------------------ 9: torch.compile


class Chain(nn.Sequential):
    """torch compiles no frame of its own files as a whole, such as Sequential's forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def compiled_as(shard: Any, build: Any, graphs: int) -> None:
    """The bits of eager, no more graphs than that, and the names of the model."""
    torch._dynamo.reset()
    counters.clear()
    made: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    (net, plain), steps = both(lambda module, **_: module), 2
    for block in (*net.blocks, *plain.blocks):
        block.__class__ = Chain
    build(net, partial(torch.compile, backend=count))
    eager = shard_net(shard, copy.deepcopy(plain))
    for model in (net, eager):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            step(model, optimizer)
    found, expected = (get_model_state_dict(model) for model in (net, eager))
    assert found.keys() == expected.keys(), "no name of the compiler's"
    for name, value in expected.items():
        assert torch.equal(full(found[name]), full(value)), name
    assert len(made) <= graphs, f"{len(made)} graphs"


def before(shard: Any, net: Any, compiled: Any) -> None:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = compiled(block, fullgraph=True)
    shard_net(shard, net)


def after(shard: Any, net: Any, compiled: Any) -> None:
    shard_net(shard, net)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = compiled(block, fullgraph=True)


def in_place(shard: Any, net: Any, compiled: Any) -> None:
    for block in net.blocks:
        block._compiled_call_impl = compiled(block._call_impl, fullgraph=True)
    shard_net(shard, net)


def whole_model(shard: Any, net: Any, compiled: Any) -> None:
    shard_net(shard, net)
    net._compiled_call_impl = compiled(net._call_impl)


@case("9 compile(fullgraph) of blocks, then wrapped: one graph for equal blocks")
def compiled_before(shard: Any) -> None:
    compiled_as(shard, partial(before, shard), 1)


@case("9 compile(fullgraph) of wrapped blocks")
def compiled_after(shard: Any) -> None:
    compiled_as(shard, partial(after, shard), 1)


@case("9 compile(fullgraph) in place (torchtitan), then wrapped")
def compiled_in_place(shard: Any) -> None:
    compiled_as(shard, partial(in_place, shard), 1)


@case("9 compile of a whole wrapped model")
def compiled_whole(shard: Any) -> None:
    compiled_as(shard, partial(whole_model, shard), 12)


# ------------------------------------------------------------------------------ 10: and friends


@cache
def pipe() -> DeviceMesh:
    return init_device_mesh(device_type(), (2, 1), mesh_dim_names=("pp", "dp"))


@case("10 a pipeline (GPipe) of wrapped stages")
def pipeline(shard: Any) -> None:
    torch.manual_seed(2)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
    here, mesh = dist.get_rank(), pipe()
    mine = copy.deepcopy(plain[here])
    shard(mine[0], mesh=mesh["dp"])
    shard(mine, mesh=mesh["dp"])
    stage = PipelineStage(mine, here, 2, torch.device(device_type()), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    schedule.step(x) if here == 0 else schedule.step(target=y)
    F.mse_loss(plain(x), y).backward()
    for name, parameter in plain[here].named_parameters():
        assert_close(full(mine.get_parameter(name).grad), parameter.grad, name)


@case("10 DDP beside a wrapped module")
def ddp_beside(shard: Any) -> None:
    net, plain = Tail(), Tail()
    plain.load_state_dict(net.state_dict())
    shard(net.body)
    names = [f"body.{name}" for name, _ in net.body.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    DistributedDataParallel(net)(torch.ones(2, 8)).square().sum().backward()
    plain(torch.ones(2, 8)).square().sum().backward()
    for name in ("body.weight", "norm.weight"):
        assert_close(full(net.get_parameter(name).grad), plain.get_parameter(name).grad, name)


@case("10 an average of a model (AveragedModel), wrapped like it")
def averaged(shard: Any) -> None:
    _, plain = both(shard)
    models = [copy.deepcopy(plain) for _ in range(2)]
    averages = [AveragedModel(model) for model in models]
    shard_net(shard, models[0])
    shard_net(shard, averages[0].module)
    for times in (2.0, 3.0):
        for model, average in zip(models, averages, strict=True):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(times)
            average.update_parameters(model)
    assert_same(averages[0].module, averages[1].module)


@case("10 pickling and deepcopy say what to do", torch_fails="nothing was raised|not in")
def pickled(shard: Any) -> None:
    net, _ = both(shard)
    for call in (partial(pickle.dumps, net), partial(copy.deepcopy, net)):
        text = raised(call, Exception)
        assert "state_dict" in text, f"state_dict not in {text}"


@case("4 a chunked loss that keeps the head gathered (torchtitan)")
def toggled(shard: Any) -> None:
    """As torch's test_partial_group_reshard_toggle, without its look at torch's own objects."""
    net = Tail()
    plain = copy.deepcopy(net)
    shard([net.norm, net.head], reshard_after_forward=False)
    shard(net)
    made = [(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (net, plain)]
    for _ in range(2):
        for model, optimizer in made:
            hidden = model(torch.ones(4, 8))
            if model is net:
                net.head.set_reshard_after_forward(False)
                net.head.set_reshard_after_backward(False)
            chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]
            for chunk in chunks:
                model.head(chunk).square().sum().backward()
            if model is net:
                net.head.set_reshard_after_forward(True)
                net.head.set_reshard_after_backward(True)
                net.head.reshard()
                assert isinstance(net.head.weight, DTensor)
            hidden.backward(torch.cat([chunk.grad for chunk in chunks]))  # type: ignore[misc]
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert_same(net, plain)
