# SPDX-License-Identifier: Apache-2.0
"""The writer of each piece follows by arithmetic: one small exchange per save, for any number of
tensors."""

from __future__ import annotations

import enum
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise.checkpoint import (
    CheckpointError,
    Manifest,
    MismatchError,
    Store,
    loading,
    verify,
)
from shardwise.checkpoint.pieces import Run, Tile, covering_problem, runs_of
from shardwise.checkpoint.saving import divide
from shardwise.checkpoint.state import model_state
from shardwise.checkpoint.values import decode, parse_json, to_json
from shardwise.core import comm
from tests.one_card import device_type
from tests.ranks import run_ranks
from tests.resume import helpers
from tests.resume.helpers import Net, everything, wrap

# The first test of a session starts ranks for four world sizes, which takes its time.


def count_exchanges(rank: int, world_size: int, layers: int, path: str) -> dict[str, int]:
    """Agreements and broadcasts of bytes by one save and by one load; there is nothing else."""
    torch.manual_seed(0)
    net = wrap(Net(layers=layers), "zero3", world_size)
    optimizer = torch.optim.AdamW(net.parameters())
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(comm, name)

        def call(*arguments: Any) -> Any:
            counts[f"{phase} {name}"] += 1
            return original(*arguments)

        return mock.patch.object(comm, name, call)

    with counted("agree"), counted("tell"), sw.comm.record() as calls:
        phase = "save"
        sw.save(path, net, optimizer)
        phase = "load"
        sw.load(path, net, optimizer)
    assert calls == [], "no tensor travels"
    return dict(counts)


def test_the_number_of_exchanges_does_not_depend_on_the_number_of_tensors(tmp_path: Path) -> None:
    for layers in (1, 5):
        for counts in run_ranks(count_exchanges, 2, layers, str(tmp_path / f"{layers}")):
            assert counts == {"save agree": 2, "load agree": 4, "load tell": 1}


def bytes_to_write(rank: int, world_size: int, strategy: str) -> tuple[int, int]:
    net = wrap(Net(), strategy, world_size)
    state = model_state(net)
    written = divide(state, rank, world_size)[0].values()
    return sum(piece.nbytes for piece in written), sum(h.tensor.nbytes for h in state.held)


@pytest.mark.parametrize(("strategy", "world_size"), [("zero0", 3), ("hsdp", 4), ("zero3", 2)])
def test_replicas_share_the_writing(strategy: str, world_size: int) -> None:
    results = run_ranks(bytes_to_write, world_size, strategy)
    written, whole = [one for one, _ in results], results[0][1]
    assert sum(written) == whole, "everything once"
    assert max(written) < 1.3 * whole / world_size, f"unevenly shared out: {written}"


def save_buffers(rank: int, world_size: int, path: str) -> None:
    net = Net()
    net.seen.fill_(40 + rank)
    sw.save(path, net)


def test_buffers_that_differ_are_rank_0s(tmp_path: Path) -> None:
    run_ranks(save_buffers, 3, str(tmp_path / "one"))
    net = Net()
    sw.load(tmp_path / "one", net)
    assert net.seen.item() == 40


def save_unlike(rank: int, world_size: int, root: str) -> list[str]:
    messages = []
    store = Store(root)
    sharded = wrap(Net(), "zero3", world_size)
    pieces = torch.optim.SGD(sharded.parameters())
    pieces.state[sharded.norm.bias]["pieces"] = [torch.ones(5) * rank]
    for step, net, optimizer, extra in (
        (1, Net(layers=1 + rank), None, {}),  # other tensors on each rank
        (10 + rank, Net(), None, {}),  # another step
        (3, Net(), None, {"model": Net()} if rank == 1 else {}),  # one rank's extra is no JSON
        (5, sharded, pieces, {}),  # pieces of a state in a list, which would be rank 0's
    ):
        try:
            store.save(step, net, optimizer, extra=extra)
        except CheckpointError as error:
            messages.append(str(error))
    store.save(4, Net(), extra={"fine": True})  # and nothing is left in a bad state
    path = store.wait()
    assert path is not None
    return [*messages, path.name]


def test_ranks_that_disagree_raise_together(tmp_path: Path) -> None:
    results = run_ranks(save_unlike, 2, str(tmp_path))
    assert results[0] == results[1]
    tensors, step, extra, pieces, path = results[0]
    assert "rank 0 saves" in tensors and "rank 1 saves" in tensors
    assert " 10," in step and " 11," in step
    assert "rank 1" in extra and "extra['model'] is a Net" in extra
    assert "'pieces' of the optimizer state of 'norm.bias' is a list with tensors" in pieces
    assert path == "step-000004"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000004"]


def test_problems_of_a_model_are_named_at_once(tmp_path: Path) -> None:
    net = Net()
    stranger = torch.nn.Parameter(torch.zeros(3))
    net.blocks[0].up = torch.nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.AdamW([net.embedding.weight, stranger])
    optimizer.state["calls"] = {"count": 3}
    with pytest.raises(CheckpointError) as caught:
        sw.save(tmp_path / "one", net, optimizer, {"lambda": print}, config={"of": object()})
    for part in ("blocks.0.up.weight'", "blocks.0.up.bias'", "meta device", "[3] that the model"):
        assert part in str(caught.value)
    for part in ("'calls'", "extra['lambda']", "config['of']"):
        assert part in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    net = Net()
    (tmp_path / "one").mkdir()  # an empty directory is no checkpoint
    sw.save(tmp_path / "one", net)
    saved = everything(net, None)
    with pytest.raises(CheckpointError, match="never overwritten"):
        sw.save(tmp_path / "one", Net())
    sw.load(tmp_path / "one", net)
    helpers.assert_equal(everything(net, None), saved)


# ------------------------------------------------------------------------------ arithmetic


def test_the_table_is_the_layout(tmp_path: Path) -> None:
    pieces = run_ranks(pieces_of, 3, str(tmp_path / "one"))
    tensors = Manifest.read(tmp_path / "one").tensors
    for name in pieces[0]:
        [tile] = tensors[name, ""].tiles
        expected = [(rank, *one[name]) for rank, one in enumerate(pieces) if any(one[name])]
        assert list(tile.pieces(0, math.prod(tensors[name, ""].shape))) == expected, name


def test_runs_of_any_pieces_give_the_pieces() -> None:
    assert runs_of(enumerate([5, 8, 8, 0, 8, 2])) == (
        Run(0, 5, 1), Run(1, 8, 2), Run(4, 8, 1), Run(5, 2, 1),
    )  # fmt: skip
    rng = random.Random(1)
    for _ in range(300):
        count = rng.randrange(1, 30)
        holders = rng.sample(range(count), count)  # replicas divide in any order
        lengths = [rng.choice((0, 1, 1, 5)) for _ in range(count)]
        pieces = list(zip(holders, lengths, strict=True))
        numel = sum(lengths)
        tile = Tile((0,), (numel,), 0, runs_of(pieces))
        whole = list(tile.pieces(0, numel))
        assert [(holder, high - low) for holder, low, high in whole] == [p for p in pieces if p[1]]
        low, high = sorted(rng.sample(range(numel + 1), 2)) if numel else (0, 0)
        some = [one for one in whole if one[1] < high and one[2] > low]
        assert list(tile.pieces(low, high)) == some


def pieces_of(rank: int, world_size: int, path: str) -> dict[str, tuple[int, int]]:
    net = wrap(Net(), "zero3", world_size, **helpers.by_grain(sw.ELEMENT))
    sw.save(path, net)
    return {name: parameter.cut.piece for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], None),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], None),
        ([((r, c), (2, n)) for r in (0, 2) for c, n in ((0, 1), (1, 2))], None),
        ([((0, 0), (2, 3))], "dimension 0"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "dimension 0"),
        ([((0, 0), (2, 3)), ((3, 0), (2, 3))], "dimension 0"),
        ([((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 0), (2, 3))], "some twice"),
        ([((0, 0), (2, 1)), ((2, 1), (2, 2)), ((0, 1), (2, 2))], "leave elements out"),
        ([((0,), (12,))], "other dimensions"),
        ([], "dimension 0"),
    ],
)
def test_tiles_cover_a_tensor_once(boxes: list[Any], problem: str | None) -> None:
    found = covering_problem((4, 3), boxes)
    assert found is None if problem is None else problem in str(found)
    assert covering_problem((4, 0), boxes) is None or boxes


def test_the_manifest_says_what_made_it(tmp_path: Path) -> None:
    net = Net()
    config = {"model": {"sizes": (1, 2)}, "rate": 0.1, "by": {3: None}}
    with Store(tmp_path, config=config) as store:
        store.save(7, net, helpers.muon(net), {"position": 5})
    manifest = Manifest.read(tmp_path / "step-000007")
    assert manifest.config == config
    assert (manifest.step, manifest.world_size, manifest.sequence) == (7, 1, 1)
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.optimizer is not None
    matrix, elementwise = manifest.optimizer.options
    assert matrix["scale"] == "original" and matrix["lr"] == 0.02
    assert elementwise["lr"] == 1e-2 and {*manifest.optimizer.parameters.values()} == {0, 1}
    assert len(manifest.tensors) > 20 and manifest.num_bytes > 10_000


def again(value: Any) -> Any:
    return decode(parse_json(to_json(value, "it")))


def test_values_come_back_as_they_were() -> None:
    generator = torch.Generator().manual_seed(4)
    value = {
        "number": 0.1 + 0.2,
        "special": [float("inf"), -0.0],
        "tuple": (1, (2, "x")),
        "keys": {30: 0.1, None: True},
        "tagged": {"$": "tuple", "v": [1]},
        "empty": [(), {}, ""],
    }
    found = again(value)
    assert found == value and repr(found) == repr(value)
    for wrong in (b"bytes", numpy.zeros(2), object(), {"deep": {1, 2}}):
        with pytest.raises(CheckpointError):
            again(wrong)
    state = again(generator.get_state())
    other = torch.Generator()
    other.set_state(state)
    assert torch.equal(torch.rand(3, generator=other), torch.rand(3, generator=generator))
    half = torch.randn(3, 2).bfloat16()
    assert torch.equal(again(half), half)
    assert torch.isnan(torch.tensor(again(float("nan"))))
    mode = enum.Enum("mode", {"WORD": "a word"}, type=str)
    assert again(mode("a word")) == "a word", "not 'mode.WORD'"


class Odd(nn.Module):
    """Buffers of every dtype and of shapes whose strides can be written in several ways."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in ("float64", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "uint16", "uint64"):
            data = torch.randint(0, 100, (3, 8), dtype=torch.uint8, generator=generator)
            self.register_buffer(f"as_{name}", data.view(getattr(torch, name)))
        number = torch.randn(4, 6, generator=generator)
        self.register_buffer("flags", number > 0)
        self.register_buffer("wide", torch.complex(number, number + 1).to(torch.complex128))
        self.register_buffer("conjugated", torch.complex(number, number + 1).conj())
        self.register_buffer("negated", torch.complex(number, number + 1).conj().imag)
        self.register_buffer("row", number[:, 0].clone()[:, None].t())
        self.register_buffer("transposed", number.t())
        self.register_buffer("part", number[1:3, 2:4])
        self.register_buffer("none", number[:0].clone())
        self.register_buffer("no_columns", number[:, :0].t().clone())
        self.register_buffer("count", torch.tensor(seed))


def test_every_dtype_and_stride_comes_back(tmp_path: Path) -> None:
    saved, others = Odd(1), [Odd(2), Odd(3)]
    sw.save(tmp_path / "one", saved)
    with Store(tmp_path) as store:
        store.save(1, saved)
    for name, other in zip(("one", "step-000001"), others, strict=True):
        assert verify(tmp_path / name).ok
        sw.load(tmp_path / name, other)
    buffers = dict(saved.named_buffers())
    assert len(buffers) == 16
    for name, value in (pair for other in others for pair in other.named_buffers()):
        assert value.dtype == buffers[name].dtype and value.shape == buffers[name].shape, name
        plain = [x.resolve_conj().resolve_neg().contiguous() for x in (value, buffers[name])]
        one, two = (x.reshape(-1).view(torch.uint8) for x in plain)
        assert torch.equal(one, two), name


# ------------------------------------------------------------------------------ what a load did


def report_of(rank: int, world_size: int, folder: str, way: str) -> tuple[bool, str, str]:
    """A run is saved and loaded into another one; what the report says, and what continues."""
    torch.manual_seed(1)
    strategy = "hsdp" if world_size == 4 else "zero1" if way == "strategy" else "zero3"
    net, optimizer = helpers.make(strategy, "muon" if world_size == 4 else "adamw", world_size, 2)
    helpers.train_step(net, optimizer, 0, rank, world_size)
    path = f"{folder}/one"
    if way == "save":
        sw.save(path, net, optimizer, config={"batch": 12})
        return True, "", ""
    others = {
        "grain": helpers.by_grain(sw.TENSOR),
        "format": {"precision": sw.Precision(weights="bf16")},
    }
    if way in others:
        net = wrap(Net(), "zero3", world_size, **others[way])
        optimizer = helpers.one_group(net)
    report = sw.LoadReport(config={"batch": 16 if way == "batch" else 12})
    sw.load(path, net, None if way == "weights" else optimizer, report=report)
    assert report.num_tensors and not report.kept
    assert bool(report.left_out) == (way == "weights") or report.left_out == []
    return report.continues, str(report), "; ".join(report.differences)


@pytest.mark.parametrize(
    ("way", "ranks", "word"),
    [
        ("same", 2, ""),
        ("same", 4, ""),  # momenta that replicas divide
        ("strategy", 2, "placements"),
        ("ranks", 3, "ranks: 2 then, 3 now"),
        ("grain", 2, "lay on other ranks"),
        ("format", 2, "torch.bfloat16']"),
        ("batch", 2, "batch: 12 then, 16 now"),
        ("weights", 2, "the optimizer was not loaded"),
    ],
)
def test_a_report_says_whether_a_run_continues_bit_for_bit(
    way: str, ranks: int, word: str, tmp_path: Path
) -> None:
    run_ranks(report_of, 4 if ranks == 4 else 2, str(tmp_path), "save")
    found = run_ranks(report_of, ranks, str(tmp_path), way)
    assert all(one == found[0] for one in found), "the same on all ranks"
    continues, text, differences = found[0]
    assert continues == (way == "same") and word in differences
    assert ("bit for bit" in text) == continues


def test_every_other_difference_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(4, 4)
    groups = [{"params": [net.weight], "lr": 0.5}, {"params": [net.bias], "lr": 0.25}]
    optimizer = torch.optim.Adam(groups)
    sw.save(tmp_path / "one", net, optimizer)

    def differences(stepper: Any = optimizer, **options: Any) -> str:
        report = sw.LoadReport()
        sw.load(tmp_path / "one", net, stepper, report=report, **options)
        assert report.continues == (not report.differences)
        return "; ".join(report.differences)

    assert differences() == ""
    assert "random states were not loaded" in differences(None, strict=False)
    assert "the optimizer was a 'Adam'" == differences(torch.optim.AdamW(groups))
    assert "'lr' of group 0" in differences(torch.optim.Adam(net.parameters()))
    now, here = loading.versions(), loading.facts_of(net, 1)
    monkeypatch.setattr(loading, "versions", lambda: dict.fromkeys(now, "0"))
    monkeypatch.setattr(loading, "facts_of", lambda *of: dict.fromkeys(here, "x"))
    named = [one.split(":")[0] for one in differences().split("; ")]
    assert named == [*here, *(f"version of {name}" for name in now)]
    assert {"ranks", "device", "deterministic algorithms"} <= here.keys() and "torch" in now


def test_a_part_of_a_model_takes_the_weights_that_fit(tmp_path: Path) -> None:
    """As fine-tuning begins: another head, other names, no optimizer."""
    torch.manual_seed(1)
    base = nn.ModuleDict(
        {"body": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "head": nn.Linear(3, 9)}
    )
    sw.save(tmp_path / "one", base, torch.optim.AdamW(base.parameters()))
    torch.manual_seed(2)
    tuned = nn.ModuleDict(
        {"body": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), "head": nn.Linear(3, 2)}
    )
    renamed = nn.ModuleDict(
        {"encoder": tuned["body"], "head": tuned["head"], "new": nn.Linear(1, 1)}
    )
    before, drawn = tuned["head"].weight.clone(), torch.get_rng_state()
    with pytest.raises(MismatchError):
        sw.load(tmp_path / "one", renamed)
    report = sw.LoadReport()
    sw.load(tmp_path / "one", renamed, strict=False, names={"encoder.": "body."}, report=report)
    for name, value in tuned["body"].state_dict().items():
        assert torch.equal(value, base["body"].state_dict()[name])
    assert torch.equal(tuned["head"].weight, before) and torch.equal(torch.get_rng_state(), drawn)
    assert report.kept == ["head.bias", "head.weight", "new.bias", "new.weight"]
    assert report.left_out == ["head.bias", "head.weight"] and report.num_tensors == 4
    with pytest.raises(MismatchError, match="does not fit"):
        sw.load(tmp_path / "one", nn.Linear(3, 3), strict=False)
    for wrong in (
        {"names": {"a": "b"}},
        {"strict": False, "optimizer": torch.optim.SGD(base.parameters())},
    ):
        with pytest.raises(ValueError, match="strict=False"):
            sw.load(tmp_path / "one", base, **wrong)


def save_unequal(rank: int, world_size: int, path: str) -> str:
    net = wrap(Net(), "zero1", world_size)
    optimizer = torch.optim.AdamW(net.parameters())
    sw.save(f"{path}/one", net, optimizer)
    replicated = wrap(Net(), "zero0", world_size)
    with sw.debug(replicated):
        sw.save(f"{path}/two", replicated)
    with torch.no_grad():
        replicated.norm.weight.to_local().add_(rank)
    sw.save(f"{path}/three", replicated)  # a save writes what the writing rank holds
    with sw.debug(replicated), pytest.raises(RuntimeError) as caught:
        sw.save(f"{path}/four", replicated)
    return str(caught.value)


def test_debug_finds_replicas_that_differ_at_a_save(tmp_path: Path) -> None:
    for text in run_ranks(save_unequal, 2, str(tmp_path)):
        assert "norm.weight" in text and "differ" in text
    assert not (tmp_path / "four").exists()


def tiles() -> dict[str, Tensor]:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(8, 6, generator=generator) for name in ("all", "columns", "rows")}


def save_tiles(rank: int, world_size: int, path: str) -> int:
    """Of three parameters, tensor parallelism cuts rows, columns, and nothing."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.ParameterDict(tiles())
    places = {"all": Replicate(), "columns": Shard(1), "rows": Shard(0)}
    for name, value in list(net.items()):
        net[name] = nn.Parameter(distribute_tensor(value.detach(), mesh["tp"], [places[name]]))
    model = nn.Sequential(nn.Linear(2, 2), net)
    sw.fully_shard([model], mesh=mesh, placements=sw.zero(1))
    sw.save(path, model)
    written, _ = divide(model_state(model), rank, world_size)
    return sum(name.startswith("model.1.all") for name in written)


def test_tiles_of_one_mesh_have_their_own_replicas(tmp_path: Path) -> None:
    assert sum(run_ranks(save_tiles, 4, str(tmp_path / "one"))) <= 2, "no copy is written"
    assert verify(tmp_path / "one").ok
    expected = tiles()
    names = {name: nn.Parameter(torch.zeros(8, 6)) for name in expected}
    found = nn.Sequential(nn.Linear(2, 2), nn.ParameterDict(names))
    sw.load(tmp_path / "one", found)
    for name, value in expected.items():
        assert torch.equal(found[1][name], value), name
