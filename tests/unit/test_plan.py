# SPDX-License-Identifier: Apache-2.0
"""Plans without ranks: against the real code on meta tensors, at any size, and for people."""

from __future__ import annotations

import json
import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.core import comm, layout
from shardwise.core.memory import Block as Memory
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.moe import mixtures_of
from shardwise.planning.plan import plan
from shardwise.planning.planned import Mesh, strategy_name
from shardwise.planning.shard_map import map_text
from shardwise.shard import fully_shard as wrapping
from shardwise.words import count_text, parse_size, size_text
from tests.models import Model
from tests.ranks import run_ranks

BF16 = sw.Precision(weights="bf16", reduce="fp32")
MESHES: dict[str, dict[str, int]] = {f"zero{stage}": {"dp": 64} for stage in range(4)}
MESHES |= {"hsdp": {"dp_outer": 4, "dp": 16}, "hfsdp": {"dp_outer": 4, "dp": 16}}


class Block(nn.Module):
    def __init__(self, width: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, keys, bias=False)
        self.wv = nn.Linear(width, keys, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)


class Llama(nn.Module):
    """Shapes only."""

    def __init__(
        self, width: int, keys: int, hidden: int, depth: int, vocabulary: int = 128256
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, keys, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)


def llama_405b() -> Llama:
    with torch.device("meta"):
        return Llama(16384, 1024, 53248, 126)


def small() -> Model:
    with torch.device("meta"):
        return Model(40, 3)


# ------------------------------------------------------------------------------ buckets, experts


def facts(made: Any) -> dict[str, Any]:
    names = ("rest", "loaded", "peak", "peak_total", "calls", "optimizer_bytes", "num_elements")
    return {name: getattr(made, name) for name in names}


def test_spread_experts_need_ranks_of_their_own() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=2, num_experts=4))
    for layer in mixtures_of(model):
        layer.keep_share(2)
    made = plan(model, {"dp": 4})
    assert made.options.ep == 2 and not made.traffic.even, "nobody said how many tokens"
    assert made.num_parameters == model.config.num_parameters
    with pytest.raises(ValueError, match="ep=2, which does not divide the 3 ranks of axis 'dp'"):
        plan(model, {"dp": 3})
    with pytest.raises(ValueError, match="reshard_after_forward=4 must divide the 2 ranks"):
        plan(model, {"dp": 4}, reshard_after_forward=4)
    with pytest.raises(ValueError, match="rows without values cannot be routed"):
        plan(model, {"dp": 4}, batch=(1, 8))
    with pytest.raises(ValueError, match="cannot be spread evenly over ep=3"):
        mixtures_of(model)[0].keep_share(3)


def test_neighbours_on_ep_stand_at_the_same_place_of_their_experts() -> None:
    """Six ranks, experts over two: three ranks share an expert, and hold different pieces of it.
    The rank that sends most is planned like one that is named."""
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=1, num_experts=10))
    for layer in mixtures_of(model):
        layer.keep_share(2)
    ranks = [plan(model, {"dp": 6}, "zero3", optimizer="muon", rank=rank) for rank in range(6)]
    sent = [{call: n for call, n in one.exchanged.items() if call.size == 3} for one in ranks]
    assert sent[0::2] == sent[1::2] and sent[0] != sent[2] and all(sent)
    total = [
        sum(n * (call.wire_bytes + call.received_bytes) for call, n in one.exchanged.items())
        for one in ranks
    ]
    most = ranks[total.index(max(total))]
    assert most.exchanged != ranks[0].exchanged, "or there would be nothing to see"
    assert vars(plan(model, {"dp": 6}, "zero3", optimizer="muon")) == vars(most)


# ------------------------------------------------------------------------------ by hand


def test_the_figures_of_a_model_one_can_count() -> None:
    """One block of 64x64 in a root without parameters: 4096 elements, no padding, 4 ranks."""
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False)])
    found = {
        strategy: plan(model, {"dp": 4}, strategy, precision=BF16, optimizer="muon")
        for strategy in ("zero0", "zero1", "zero2", "zero3")
    }
    whole = 4096
    for strategy, made in found.items():
        share = whole if strategy == "zero0" else whole // 4
        assert made.padding == 0 and made.num_elements == whole
        assert made.rest["main"] == 4 * share and made.loaded["grad"] == 4 * share
        assert made.rest.get("compute", 0) == (0 if strategy == "zero3" else 2 * whole)
        # one momentum: a quarter of it on each rank, or all of it on its owner
        assert made.optimizer_bytes == whole * (1 if strategy else 4)
        assert made.peak["grad_transient" if strategy != "zero0" else "grad"] == 4 * whole
    assert found["zero3"].calls == Counter(
        {
            sw.comm.Call("all_gather", "dp", 4, 2 * whole): 2,
            sw.comm.Call("reduce_scatter", "dp", 4, 4 * whole): 1,
        }
    )
    assert plan(model, {"dp": 4}, "zero3", precision=BF16).optimizer_bytes == 8 * whole // 4
    work = found["zero3"].matrices
    assert work is not None and work.num_matrices == 1
    assert work.balance == 0.25
    # one owner gets three quarters, and sends them back in fp16: the most that anybody sends
    assert found["zero3"].exchanged == Counter(
        {
            sw.comm.Call("all_to_all", "dp", 4, 0, 12288): 1,
            sw.comm.Call("all_to_all", "dp", 4, 6144, 0): 1,
        }
    )
    assert found["zero1"].collectives[1].operation == "all_to_all"


def test_a_plan_says_how_many_matrices_lie_whole() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(10))
    for ranks, grain, whole in ((5, None, 10), (8, None, 0), (10, None, 0), (10, "tensor", 10)):
        made = plan(model, {"dp": ranks}, "zero1", optimizer="muon", bucket_mb=1, grain=grain)
        assert made.matrices is not None and made.matrices.num_whole == whole, ranks
        assert f"{whole} of them whole" in str(made)
    for shape, strategy in (({"dp": 64}, "zero1"), ({"dp": 3}, "zero3")):  # whatever it pads
        made = plan(model, shape, strategy, optimizer="muon", grain="tensor")
        assert made.matrices is not None and made.matrices.num_whole == 10
        assert made.padding > made.num_parameters
    with pytest.raises(ValueError, match="plan: grain='whole': choose 'tensor', a Grain"):
        plan(model, {"dp": 3}, "zero3", grain="whole")


# ------------------------------------------------------------------------------ what is wrapped


def test_weights_tied_across_units_are_refused_as_fully_shard_does() -> None:
    model = small()
    model.layers[1].up.weight = model.layers[0].up.weight
    with pytest.raises(ValueError, match=r"'up.weight' belongs to another unit already"):
        plan(model, {"dp": 2})
    tied = small()
    tied.lock = threading.Lock()  # such things cannot be copied
    tied.head.weight = tied.embedding.weight  # both in the root: one parameter
    made = plan(tied, {"dp": 2})
    assert made.num_parameters == plan(small(), {"dp": 2}).num_parameters - 17 * 40


def wrapped_models(rank: int, world_size: int) -> tuple[Any, Any]:
    mesh, model = sw.init_mesh(dp=world_size), Model(40, 3)
    before = facts(plan(model, {"dp": 2}, optimizer="muon", wrap=[model.layers[0]]))
    for module in (model.layers[0], model):
        sw.fully_shard(module, mesh=mesh, reshard_after_forward=False)
    model(torch.zeros(1, 2, dtype=torch.long))  # weights that stay gathered
    after = facts(plan(model, {"dp": 2}, optimizer="muon"))
    buckets = sw.data_parallel(Model(40, 3), mesh=mesh)
    with pytest.raises(ValueError, match="plan the model before wrapping"):
        plan(buckets, {"dp": 2})
    return before, after


def test_a_wrapped_model_is_planned_as_it_is() -> None:
    for before, after in run_ranks(wrapped_models, 2):
        assert before == after


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"2 data-parallel axes.*optimizer='sgd'.*'tpu'.*1 or m"):
        plan(small(), {"dp": 2}, "hsdp", optimizer="sgd", device="tpu", microbatches=0)
    for wrong, message in (
        (lambda: plan(small(), {"dp": 0}), "dp=0"),
        (lambda: plan(small(), {"dp": 2}, "zero3", bucket_mb=1), "fully_shard"),
        (lambda: plan(small(), {"dp": 2}, "zero1", bucket_mb=0), "bucket_mb=0"),
        (lambda: plan(small(), {"dp": 2}, "zero1", bucket_mb=1, wrap=[]), "leave out bucket_mb"),
        (lambda: plan(small(), {}), "no axes"),
        (lambda: plan(small(), 8), "name each axis"),
        (lambda: plan(small(), (2, 2, 2)), "name each axis"),
        (lambda: plan(small(), {"dp": 2}, "zero4"), "zero4.*zero0, zero1"),
        (lambda: plan(small(), {"dp": 6}, reshard_after_forward=4), "must divide the 6 ranks"),
        (lambda: plan(small(), {"dp": 2}, rank=2), "rank 2 of a mesh of 2"),
        (lambda: plan(small(), {"dp": 2}, "zero1", reshard_after_forward=2), "nothing to reshard"),
        (lambda: plan(nn.Identity(), {"dp": 2}), "no parameters"),
        (lambda: plan(small(), {"dp": 2}, wrap=[nn.Linear(2, 2)]), "not part of the model"),
        (lambda: plan(nn.ModuleList([nn.Linear(2, 2)]), {"dp": 2}), "do not implement forward"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


# ------------------------------------------------------------------------------ at scale


def count_work(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], depth: int) -> Counter[str]:
    """How often a plan lays out a unit, makes a layout and moves bytes."""
    work: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            work[name] += 1
            return function(*args, **kwargs)

        return counted

    with monkeypatch.context() as patch:
        wrapping._laid_out.cache_clear()
        patch.setattr(wrapping, "plan_groups", counting("groups", wrapping.plan_groups))
        patch.setattr(wrapping, "plan", counting("layouts", wrapping.plan))
        patch.setattr(Memory, "acquire", counting("events", Memory.acquire))
        with torch.device("meta"):
            model = Llama(16384, 1024, 53248, depth)
        made = plan(model, mesh, "zero3", precision=BF16, microbatches=16)
    assert made.num_parameters > 3e9 * depth
    return work


def test_layers_that_are_alike_and_ranks_cost_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Instant at any size: work grows with the units of one pass, and with nothing else."""
    few, many = count_work(monkeypatch, {"dp": 8}, 4), count_work(monkeypatch, {"dp": 4096}, 126)
    assert few["groups"] == many["groups"] == 2, "the root, and one block for all"
    assert few["layouts"] == 2 and many["layouts"] == 3, "over 4096 a block has two buffers"
    ranks = count_work(monkeypatch, {"dp": 4096}, 4)
    # a buffer of weights, gathered twice; the root's once
    assert few["events"] == 3 * (4 * 2 + 1) and ranks["events"] == 3 * (4 * 2 * 2 + 1)
    assert many["events"] == 3 * (126 * 2 * 2 + 1), "three of sixteen microbatches are played"


def test_405_billion_parameters_over_4096_ranks() -> None:
    made = plan(llama_405b(), {"dp": 4096}, "zero3", precision=BF16, optimizer="muon")
    assert made.num_parameters == 405_853_388_800
    assert made.padding / made.num_elements < 0.03
    assert made.rest["main"] == 4 * made.num_elements // 4096
    assert layout._plan.cache_info().currsize > 0
    assert [unit.name for unit in made.units] == ["Llama", "blocks.0 and 125 alike"]
    assert "blocks.0 and 125 alike, buffer 2 of 2: " in made.text(shard_map=True)
    gathers = made.collectives[0]
    assert gathers.operation == "all_gather"
    json.dumps(made.as_dict())


# ------------------------------------------------------------------------------ for people


def test_whether_it_fits_is_known_where_the_memory_is() -> None:
    for memory, fits in ((1 << 20, True), (9, False), (None, None)):
        assert plan(small(), {"dp": 2}, memory=memory).fits is fits


def test_a_plan_reads_as_text() -> None:
    made = plan(small(), {"dp_outer": 2, "dp": 2}, "hsdp", optimizer="muon", microbatches=2)
    text = made.text(shard_map=True)
    for words in (
        "hsdp over dp_outer=2 x dp=2 (4 ranks), muon, 2 microbatches",
        "Bytes per rank",
        "all_reduce over dp_outer (2 ranks)",
        "Matrix optimizer: ",
        "layers.0 and 2 alike",
        "ranks 0, 2 | ",
    ):
        assert words in text, words
    assert str(made) in text


def test_strips_are_to_scale_and_hold_every_row_once() -> None:
    made = plan(small(), {"dp": 3}, "zero3")
    lines = map_text(made.units, made.options, width=96).splitlines()
    rows = [line for line in lines if line.startswith("rank ")]
    assert len(rows) == 3 * 2 and len({len(row) for row in rows}) == 1
    assert any("embedding.weight rows 0-" in row for row in rows)
    made = plan(small(), {"dp": 1000}, "zero3")
    many = map_text(made.units, made.options)
    assert many.count("rank") < 40 and "..." in many, "of many ranks a few are shown"


def test_names_of_strategies_and_sizes() -> None:
    assert strategy_name(sw.hfsdp()) == "hfsdp"
    assert parse_size("80GiB") == 80 << 30 and parse_size("1.5 MB") == 1_500_000
    assert parse_size(4096) == 4096 == parse_size("4096B")
    assert size_text(1536) == "1.50 KiB" and count_text(8_030_261_248) == "8.03B"
    for wrong in ("80 apples", "-4GiB", "", "GiB"):
        with pytest.raises(ValueError, match="no amount of memory"):
            parse_size(wrong)
    assert Mesh.of((2, 4)) == Mesh.of({"dp_outer": 2, "dp": 4}) and Mesh.of([4]).names == ("dp",)


# ------------------------------------------------------------------------------ its own forward

TOKENS = (torch.zeros(1, 8, dtype=torch.int64, device="meta"),)


def reference(experts: int = 0, recompute: Any = "none") -> GPT:
    with torch.device("meta"):
        config = GPTConfig(num_layers=3, num_experts=experts, tied=not experts, recompute=recompute)
        return GPT(config)


def of_32() -> Model:
    with torch.device("meta"):
        return Model(64, 3)


def nested(model: Model) -> list[nn.Module]:
    """The layer's own gradients come after those of the unit inside it."""
    return [module for layer in model.layers for module in (layer.down, layer)]


MXFP8 = sw.Precision(weights="mxfp8", reduce="fp32")
WIRE = sw.Precision(weights="bf16")
Case = tuple[Any, tuple[str, ...], dict[str, Any]]
OWN: list[Case] = [
    (small, tuple(MESHES), {"precision": WIRE, "microbatches": 3}),
    (small, ("zero3", "hfsdp"), {"reshard_after_forward": 4}),
    (partial(reference, 4), ("zero0", "zero1", "hfsdp"), {"optimizer": "muon"}),
    (partial(reference, 0, "block"), ("zero3",), {"optimizer": "muon", "precision": BF16}),
    (reference, ("zero1", "zero2"), {"bucket_mb": 0.05, "optimizer": "muon", "microbatches": 2}),
    (small, ("zero1", "zero3"), {"wrap": nested}),
    (of_32, tuple(MESHES), {"precision": MXFP8, "grain": layout.ROW, "microbatches": 3}),
]


@pytest.mark.parametrize(("make", "strategies", "options"), OWN)
def test_a_sketch_of_forward_says_what_the_models_own_says(
    make: Any, strategies: tuple[str, ...], options: dict[str, Any]
) -> None:
    """On 64 ranks, so that some shards are empty; planned as rank 5."""
    for strategy in strategies:
        made = []
        for inputs in (None, TOKENS):
            model = make()
            more = {"wrap": options["wrap"](model)} if "wrap" in options else {}
            given = options | more | {"rank": 5, "inputs": inputs}
            made.append(plan(model, MESHES[strategy], strategy, **given))
        assert facts(made[0]) == facts(made[1]), strategy
        assert made[0].followed is None and made[1].activations > 0
        assert made[0].peak_total > sum(made[0].rest.values())


def test_a_plan_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before, joined = sw.ledger.snapshot(), torch.distributed.is_initialized()
    monkeypatch.setenv("SHARDWISE_DEBUG", "1")  # compares ranks, and a plan is of one process
    assert plan(small(), {"dp": 8}, "zero3", inputs=TOKENS).rest["main"] > 0
    assert comm.observer is None
    assert sw.ledger.snapshot() == before and torch.distributed.is_initialized() == joined
    with pytest.raises(ValueError, match=r"not on the meta device.*rank 9 of a mesh of 8"):
        plan(Model(), {"dp": 8}, rank=9, inputs=TOKENS)
