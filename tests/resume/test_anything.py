# SPDX-License-Identifier: Apache-2.0
"""Any checkpoint into any layout: 1 to 4 ranks, every strategy, other groups, other grains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.checkpoint import MismatchError, verify
from tests.models import mesh_of
from tests.one_card import UNTRACED
from tests.ranks import run_ranks
from tests.resume import helpers
from tests.resume.helpers import Net, assert_equal, everything, make, trained

COMPILED = pytest.param("compiled", marks=pytest.mark.cpu_only(UNTRACED))

# The first test of a session starts ranks for four world sizes, which takes its time.

SOURCES = [
    ("plain", 1, None),
    ("zero0", 2, None),
    ("zero1", 3, "element"),  # cut inside rows: several boxes to a piece
    ("zero3", 2, None),
    ("zero3", 4, None),
    ("hsdp", 4, None),
    ("hfsdp", 4, "tensor"),
]
TARGETS = [
    ("zero3", 1, None),
    ("zero3", 3, "element"),
    ("zero3", 4, "tensor"),
    ("zero0", 3, None),
    ("zero1", 2, "element"),
    ("zero2", 4, None),
    ("hsdp", 4, None),
    ("hfsdp", 4, "tensor"),
    ("plain", 2, None),
]
GRAINS = {"element": sw.ELEMENT, "tensor": sw.TENSOR}


def save(
    rank: int, world_size: int, strategy: str, path: str, optimizer: str, grain: str | None = None
) -> dict[str, Tensor]:
    options = helpers.by_grain(GRAINS[grain]) if grain is not None else {}
    net, stepper = trained(strategy, optimizer, rank, world_size, seed=1, **options)
    saved = everything(net, stepper)
    sw.save(path, net, stepper, {"step": 2, "by": strategy})
    assert_equal(everything(net, stepper), saved)  # saving changes nothing
    return saved


def load_all(
    rank: int,
    world_size: int,
    strategy: str,
    grain: str | None,
    paths: dict[str, str],
    optimizer: str,
) -> dict[str, dict[str, Tensor]]:
    """Every checkpoint into one model that was elsewhere; nothing of it may survive."""
    options = helpers.by_grain(GRAINS[grain]) if grain is not None else {}
    net, stepper = make(strategy, optimizer, world_size, 9, **options)
    helpers.train_step(net, stepper, 5, rank, world_size)
    found = {}
    for by, path in paths.items():
        extra = sw.load(path, net, stepper)
        assert extra == {"step": 2, "by": by.split()[0]}
        found[by] = everything(net, stepper)
        words = helpers.batch(0, 0, 1)
        net.eval()
        with torch.no_grad():  # what forward reads is what was loaded
            found[by]["output"] = net(words)
        net.train()
        helpers.train_step(net, stepper, 6, rank, world_size)
    return found


def output_of(values: dict[str, Tensor]) -> Tensor:
    net = Net()
    net.load_state_dict({name: value for name, value in values.items() if "/" not in name})
    return net.eval()(helpers.batch(0, 0, 1)).detach()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    """A checkpoint by every source, and its values."""
    folder = tmp_path_factory.mktemp("sources")
    paths, values = {}, {}
    for strategy, world_size, grain in SOURCES:
        by = f"{strategy} on {world_size}"
        paths[by] = str(folder / by.replace(" ", "-"))
        found = run_ranks(save, world_size, strategy, paths[by], "adamw", grain)
        for other in found[1:]:
            assert_equal(other, found[0])
        values[by] = found[0]
    return paths, values


@pytest.mark.parametrize(
    "target", TARGETS, ids=lambda target: "-".join(str(part) for part in target)
)
def test_any_checkpoint_loads_into_any_layout(
    target: tuple[str, int, str | None], sources: tuple[dict[str, str], dict[str, Any]]
) -> None:
    """Every second source into each target, in turn: every source goes into every grain."""
    strategy, world_size, grain = target
    paths = dict(list(sources[0].items())[TARGETS.index(target) % 2 :: 2])
    for found in run_ranks(load_all, world_size, strategy, grain, paths, "two_groups"):
        assert len(found) >= len(SOURCES) // 2
        for by in paths:
            output, expected = found[by].pop("output"), sources[1][by]
            torch.testing.assert_close(output, output_of(expected), rtol=0, atol=1e-5)
            assert_equal(found[by], expected)


def test_a_plain_model_without_a_process_group_loads_any(
    sources: tuple[dict[str, str], dict[str, Any]],
) -> None:
    assert not torch.distributed.is_initialized()
    paths, values = sources
    for by, path in paths.items():
        report = verify(path)
        assert report.ok, str(report)
        # 14 parameters and a buffer, and 3 states for each of 13 trainable parameters
        assert report.num_tensors == 15 + 3 * 13 == len(values[by]) - 1
        net, stepper = make("plain", "two_groups", 1, 9)
        sw.load(path, net, stepper)
        assert_equal(everything(net, stepper), values[by])
        assert stepper.param_groups[0]["lr"] == stepper.param_groups[1]["lr"] == 1e-2
        assert stepper.param_groups[0]["weight_decay"] == 0.1


def test_any_reader_of_safetensors_reads_the_pieces(
    sources: tuple[dict[str, str], dict[str, Any]],
) -> None:
    paths, values = sources
    for by, path in paths.items():
        pieces: dict[str, dict[int, Tensor]] = {}
        for file in Path(path).glob("*.safetensors"):
            for name, piece in load_file(file).items():
                key, _, first = name.partition("@")
                pieces.setdefault(key, {})[int(first or 0)] = piece.flatten()
        for key, name in (
            ("model.embedding.weight", "embedding.weight"),
            ("optimizer.state.blocks.0.up.weight.exp_avg", "blocks.0.up.weight/exp_avg"),
        ):
            whole = torch.cat([piece for _, piece in sorted(pieces[key].items())])
            assert torch.equal(whole, values[by][name].flatten())


@pytest.mark.parametrize(
    ("before", "after"),
    [(("zero3", 2), ("hsdp", 4)), (("hsdp", 4), ("zero3", 2)), (("zero1", 2), ("plain", 1))],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_states_of_other_optimizers_move_too(
    before: tuple[str, int], after: tuple[str, int], optimizer: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "one")
    saved = run_ranks(save, before[1], before[0], path, optimizer)[0]
    for found in run_ranks(load_all, after[1], after[0], None, {before[0]: path}, optimizer):
        found[before[0]].pop("output")
        assert_equal(found[before[0]], saved)


# ------------------------------------------------------------------------------ other wrappers


class Counter(nn.Module):
    """A module that keeps something beside tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": (self.count, "of them")}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"][0]

    def forward(self, x: Tensor) -> Tensor:
        return x


def save_otherwise(rank: int, world_size: int, wrapper: str, path: str) -> dict[str, Tensor]:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5), Counter(3))
    if wrapper == "fsdp2":
        fully_shard(net, mesh=mesh_of(world_size))
        model: nn.Module = net
    elif wrapper == "ddp":
        model = DistributedDataParallel(net)
    else:
        net[0] = checkpoint_wrapper(net[0])
        model = torch.compile(net, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sw.save(path, model, optimizer)
    expected = {
        name.replace("_checkpoint_wrapped_module.", ""): helpers.whole(parameter)
        for name, parameter in net.named_parameters()
    }
    net[2].count = 0
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    sw.load(path, model, optimizer)
    for name, parameter in net.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        assert torch.equal(helpers.whole(parameter), expected[name])
    assert net[2].count == 3
    return expected


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp", COMPILED])
def test_wrappers_of_others_leave_no_trace_in_names(wrapper: str, tmp_path: Path) -> None:
    expected = run_ranks(save_otherwise, 2, wrapper, str(tmp_path / "one"))[0]
    net = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5), Counter(1))
    optimizer = torch.optim.AdamW(net.parameters())
    sw.load(tmp_path / "one", net, optimizer)
    found = dict(net.named_parameters())
    assert found.keys() == expected.keys() and net[2].count == 3
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all((state["exp_avg"] != 0).all() for state in optimizer.state.values())
    assert len(optimizer.state) == 4
    bare = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5))
    with pytest.raises(MismatchError, match=r"unexpected in it: '2\._extra_state'"):
        sw.load(tmp_path / "one", bare)


# ------------------------------------------------------------------------------ what does not fit


class Other(nn.Module):
    """Shares some names with Net: one of another shape, one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 10)
        self.norm = nn.LayerNorm(10, dtype=torch.bfloat16)
        self.tail = nn.Linear(3, 3)


def load_other(rank: int, world_size: int, path: str) -> tuple[str, bool]:
    torch.manual_seed(3)
    other = sw.fully_shard(
        Other(),
        mesh=mesh_of(world_size),
        placements=sw.zero(3),
        precision=sw.Precision(main="bf16"),
    )
    before = {name: helpers.whole(value) for name, value in other.named_parameters()}
    try:
        sw.load(path, other)
    except MismatchError as error:
        after = {name: helpers.whole(value) for name, value in other.named_parameters()}
        same = all(torch.equal(before[name], after[name]) for name in before) and len(after) == 5
        return str(error), same
    raise AssertionError("a checkpoint of another model was loaded")


def test_another_model_is_refused_with_all_reasons_at_once(
    sources: tuple[dict[str, str], dict[str, Any]],
) -> None:
    results = run_ranks(load_other, 2, sources[0]["zero3 on 4"])
    assert results[0] == results[1]
    message, untouched = results[0]
    assert untouched
    for reason in (
        "missing from it: 'tail.weight' [3, 3]",
        "unexpected in it: 'blocks.0.up.weight'",
        "unexpected in it: 'head.weight'",
        "'embedding.weight' has shape [17, 10] in it, [19, 10] in this model",
        "'norm.weight' is torch.float32 in it, torch.bfloat16 here",
        "nothing was loaded",
    ):
        assert reason in message, reason


def test_another_optimizer_is_refused(sources: tuple[dict[str, str], dict[str, Any]]) -> None:
    path = sources[0]["plain on 1"]
    for name in ("sgd", "muon"):
        net, stepper = trained("plain", name, 0, 1, seed=3)
        before = everything(net, stepper)
        with pytest.raises(MismatchError, match="AdamW"):
            sw.load(path, net, stepper)
        assert_equal(everything(net, stepper), before)


def test_what_a_load_makes_of_other_classes_and_groups_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(4, 4)
    sw.save(tmp_path / "adam", net, torch.optim.Adam(net.named_parameters(), lr=0.5))
    decays = torch.optim.AdamW(
        [{"params": [net.weight], "weight_decay": 0.1}, {"params": [net.bias]}], lr=1.0
    )
    sw.load(tmp_path / "adam", net, decays)
    groups = decays.param_groups
    for key, value in (("lr", 0.5), ("weight_decay", 0)):  # all parameters had one
        assert [group[key] for group in groups] == [value, value]
    assert all(group["decoupled_weight_decay"] for group in groups), "it is AdamW"
    groups[0]["lr"] = 0.25
    sw.save(tmp_path / "two", net, decays)
    one = torch.optim.AdamW(net.parameters(), lr=7.0)
    sw.load(tmp_path / "two", net, one)
    assert one.param_groups[0]["lr"] == 7.0 and one.param_groups[0]["weight_decay"] == 0
    assert "'lr' of group 0" in caplog.text
    theirs = torch.optim.Muon([net.weight])
    net.weight.grad = torch.randn(4, 4)
    theirs.step()
    sw.save(tmp_path / "theirs", net, theirs)
    ours = sw.Muon([net.weight], lr=0.1)
    sw.load(tmp_path / "theirs", net, ours)
    momenta = [one.state[net.weight]["momentum_buffer"] for one in (theirs, ours)]
    assert torch.equal(*momenta) and momenta[0].any()


def test_a_checkpoint_without_optimizer_says_so(tmp_path: Path) -> None:
    net, stepper = trained("plain", "adamw", 0, 1, seed=3)
    sw.save(tmp_path / "weights", net)
    with pytest.raises(MismatchError, match="holds no optimizer state"):
        sw.load(tmp_path / "weights", net, stepper)
    other = Net()
    assert sw.load(tmp_path / "weights", other) == {}
    assert_equal(everything(other, None), everything(net, None))


def test_an_untied_model_reads_a_tied_one_and_not_the_reverse(tmp_path: Path) -> None:
    net, stepper = trained("plain", "adamw", 0, 1, seed=3)
    stepper.param_groups[0]["lr"] = 0.5
    sw.save(tmp_path / "tied", net, stepper)
    untied = Net(tied=False)
    other = helpers.one_group(untied)
    sw.load(tmp_path / "tied", untied, other)
    for weight in (untied.head.weight, untied.embedding.weight):  # each with the states of both
        assert torch.equal(weight, net.embedding.weight) and other.state[weight]["step"] == 2
        before = stepper.state[net.embedding.weight]["exp_avg"]
        assert torch.equal(other.state[weight]["exp_avg"], before) and before.any()
    turned = Net(tied=False)  # the same pair; the head comes first
    turned.embedding = turned._modules.pop("embedding")
    turned.embedding.weight = turned.head.weight
    other = torch.optim.AdamW([turned.head.weight])
    with pytest.raises(
        MismatchError, match=r"optimizer state of 'blocks\.0\.norm\.bias'"
    ) as caught:
        sw.load(tmp_path / "tied", turned, other)
    assert "embedding" not in str(caught.value)
    other = helpers.one_group(turned)
    sw.load(tmp_path / "tied", turned, other)
    assert other.state[turned.head.weight]["step"] == 2 and other.param_groups[0]["lr"] == 0.5
    sw.save(tmp_path / "untied", Net(tied=False))
    with pytest.raises(MismatchError, match="one tensor in this model and two in the checkpoint"):
        sw.load(tmp_path / "untied", net)
