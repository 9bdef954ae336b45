# SPDX-License-Identifier: Apache-2.0
"""FP8Tensor: printed, saved, loaded, decoded; and which weights are chosen for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise.precision.fp8 import COLUMN, ROW, SQUARE, FP8Error, Plane, decode, encode
from shardwise.precision.fp8_tensor import FORMATS, READS, Format, FP8Tensor, Matrices
from shardwise.precision.policy import Precision, format_of, ineligible

formats = pytest.mark.parametrize("format", get_args(Matrices))


def stored_in(format: Format) -> Tensor:
    return matrix(128, 256) if format == "fp8_block" else matrix()


def matrix(rows: int = 64, columns: int = 96) -> Tensor:
    """Rows and columns over many powers of two: else both planes decode to the same values."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-12, 12, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(powers)


@formats
def test_it_decodes_what_each_phase_reads(format: Format) -> None:
    x = stored_in(format)
    stored = FP8Tensor.encode(x, format)
    assert stored.format == format and stored.shape == x.shape
    for phase in ("forward", "backward"):
        (plane,) = encode(x, (READS[format][phase],))  # type: ignore[index]
        assert torch.equal(stored.dequantise(phase), decode(plane))  # type: ignore[arg-type]
    same = torch.equal(stored.dequantise("forward"), stored.dequantise("backward"))
    assert same == (format != "mxfp8_rowcol"), "one plane serves both, or two do"


@formats
def test_it_prints_its_shape_format_and_values(format: Format) -> None:
    stored = FP8Tensor.encode(stored_in(format), format)
    text = str(stored)
    shape = "128x256" if format == "fp8_block" else "64x96"
    assert shape in text and format in text and "device='cpu'" in text
    planes, each = {
        "mxfp8": ("row", "1.031"),
        "mxfp8_rowcol": ("row+column", "2.062"),
        "mxfp8_2d": ("square", "1.001"),
        "fp8_block": ("block", "1.000"),
    }[format]
    assert planes in text and f"{each} bytes an element" in text
    assert str(stored.dequantise()) in text


def test_it_prints_while_its_memory_is_released() -> None:
    stored = FP8Tensor.encode(matrix())
    for plane in stored.planes.values():
        plane.codes.untyped_storage().resize_(0)
    assert "no values in memory" in repr(stored)


def same(one: FP8Tensor, other: FP8Tensor) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


@formats
def test_torch_saves_and_loads_it_without_running_code(format: Format, tmp_path: Path) -> None:
    stored = FP8Tensor.encode(stored_in(format), format)
    torch.save({"weight": stored, "step": 3}, tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)["weight"]
    assert isinstance(loaded, FP8Tensor) and same(loaded, stored)
    assert not same(loaded, FP8Tensor.encode(stored_in(format) * 1.1, format))


def test_what_is_loaded_is_checked() -> None:
    stored = FP8Tensor.encode(matrix())
    state = stored.__getstate__()
    state["row.scales"] = state["row.scales"][:, :2].contiguous()
    with pytest.raises(FP8Error, match=r"scales of shape \(64, 2\).*expected \(64, 3\)"):
        FP8Tensor.__new__(FP8Tensor).__setstate__(state)


@formats
def test_safetensors_keep_its_planes(format: Format, tmp_path: Path) -> None:
    stored = FP8Tensor.encode(stored_in(format), format)
    tensors = stored.state_dict("layer.weight.")
    scale = torch.float32 if format == "fp8_block" else torch.uint8
    for name, tensor in tensors.items():
        assert tensor.dtype == (scale if name.endswith("scales") else torch.uint8)
    assert len(tensors) == 2 * len(FORMATS[format])
    save_file({**tensors, "layer.bias": torch.zeros(3)}, tmp_path / "file.safetensors")
    loaded = load_file(tmp_path / "file.safetensors")
    assert same(FP8Tensor.from_state_dict(loaded, "layer.weight."), stored)


def test_a_phase_without_its_plane_says_which_is_missing() -> None:
    backward_only = FP8Tensor(*encode(matrix(), (COLUMN,)))
    assert backward_only.dequantise("backward").shape == (64, 96)
    with pytest.raises(FP8Error, match=r"forward .* reads its row plane, but only column"):
        backward_only.dequantise("forward")


def test_rows_to_look_up_are_those_that_are_multiplied() -> None:
    stored = FP8Tensor.encode(matrix(), "mxfp8_rows")
    assert stored.format == "mxfp8" and "mxfp8, row," in repr(stored)
    assert same(FP8Tensor.from_state_dict(stored.state_dict()), FP8Tensor.encode(matrix()))


def test_planes_are_seen_not_copied() -> None:
    stored = FP8Tensor.encode(matrix())
    before = stored.dequantise()
    stored.planes[ROW].codes.zero_()
    assert not torch.equal(stored.dequantise(), before)
    assert stored.nbytes == sum(plane.nbytes for plane in stored.planes.values())


def test_types_are_told_by_class() -> None:
    """Every tensor has a `dequantize`; an attribute would call all of them quantised."""
    stored = FP8Tensor.encode(matrix())
    assert hasattr(matrix(), "dequantize") and not isinstance(matrix(), FP8Tensor)
    assert not isinstance(stored, torch.Tensor)
    with pytest.raises(TypeError):
        matrix() @ stored  # type: ignore[operator]


def _planes(rows: int) -> tuple[Plane, ...]:
    return encode(matrix(rows), (ROW, COLUMN, SQUARE))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FP8Tensor(), ["no planes"]),
        (lambda: FP8Tensor(_planes(64)[0], _planes(64)[2]), ["mxfp8 and of mxfp8_2d"]),
        (lambda: FP8Tensor(_planes(64)[0], _planes(32)[1]), ["(32, 96)", "(64, 96)"]),
        (lambda: FP8Tensor(_planes(64)[0], _planes(64)[0]), ["same blocks"]),
        (lambda: FP8Tensor.encode(matrix(), "mxfp4"), ["'mxfp4'", "mxfp8_2d"]),  # type: ignore[arg-type]
        (lambda: FP8Tensor.encode(matrix(), ["mxfp8_rowcol"]), ["['mxfp8_rowcol']", "mxfp8_2d"]),  # type: ignore[arg-type]
        (lambda: FP8Tensor.from_state_dict([matrix()]), ["a list", "a dict"]),  # type: ignore[arg-type]
        (
            lambda: FP8Tensor.from_state_dict({"row.codes": [1], "row.scales": None}),  # type: ignore[dict-item]
            ["row.codes is a list", "row.scales is a NoneType", "uint8 tensor"],
        ),
        (lambda: FP8Tensor.encode(matrix(33)), ["33 rows", "multiple of 32"]),
        (lambda: FP8Tensor.encode([[1.0]]), ["a list", "a tensor"]),  # type: ignore[arg-type]
        (
            lambda: FP8Tensor.encode(matrix()).dequantise("sideways"),  # type: ignore[arg-type]
            ["'sideways'", "forward, backward"],
        ),
        (lambda: FP8Tensor.from_state_dict({"other": matrix()}, "w."), ["'w.'", "other"]),
        (
            lambda: FP8Tensor.from_state_dict(
                {"w.row.codes": _planes(64)[0].codes, "w.bias": matrix()}, "w."
            ),
            ["w.row.scales is missing", "w.bias: no part"],
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(call: object, words: list[str]) -> None:
    assert callable(call)
    with pytest.raises(FP8Error) as caught:
        call()
    assert [word for word in words if word not in str(caught.value)] == []


# ------------------------------------------------------------------------------- the choice


SHAPES = {
    "embedding.weight": ((256, 64), (nn.Embedding,)),
    "blocks.0.attn.wq.weight": ((64, 64), (nn.Linear,)),
    "blocks.0.mlp.up.weight": ((160, 64), (nn.Linear,)),
    "blocks.0.mlp.odd.weight": ((165, 64), (nn.Linear,)),
    "blocks.0.norm.weight": ((64,), (nn.RMSNorm,)),
    "head.weight": ((256, 64), (nn.Embedding, nn.Linear)),
}


def reasons(**patterns: tuple[str, ...]) -> dict[str, str | None]:
    return {
        name: ineligible(name, shape, Precision(weights="mxfp8", **patterns), owners)
        for name, (shape, owners) in SHAPES.items()
    }


def chosen(**patterns: tuple[str, ...]) -> list[str]:
    return [name for name, reason in reasons(**patterns).items() if reason is None]


def test_linears_whose_sides_divide_are_chosen_and_the_rest_is_explained() -> None:
    assert chosen() == ["blocks.0.attn.wq.weight", "blocks.0.mlp.up.weight"]
    why = {name: str(reason) for name, reason in reasons().items()}
    assert "165 rows" in why["blocks.0.mlp.odd.weight"]
    assert "RMSNorm" in why["blocks.0.norm.weight"]
    assert "include=('*', 'embedding.weight')" in why["embedding.weight"]
    assert "include=('*', 'head.weight')" in why["head.weight"]  # tied: looked up too


def test_embeddings_are_chosen_where_they_are_named() -> None:
    both = chosen(include=("*", "embedding.weight", "head.*"))
    assert both == ["embedding.weight", *chosen(), "head.weight"]
    assert chosen(include=("*", "emb*"), exclude=("emb*",)) == chosen()
    precision = Precision(weights="mxfp8", include=("e",))
    assert "17 rows" in str(ineligible("e", (17, 64), precision, (nn.Embedding,)))
    alone, tied = (nn.Embedding,), (nn.Embedding, nn.Linear)
    for wanted in get_args(Matrices):
        rows = "fp8_block_rows" if wanted == "fp8_block" else "mxfp8_rows"
        assert format_of(alone, wanted) == rows
        assert format_of(tied, wanted) == format_of((nn.Linear,), wanted) == wanted
    strangers = (nn.Embedding, nn.EmbeddingBag)
    assert "read by EmbeddingBag" in str(ineligible("e", (32, 64), precision, strangers))


def test_exclude_wins_over_include() -> None:
    patterns = {"include": ("blocks.*",), "exclude": ("*.attn.*",)}
    assert chosen(**patterns) == ["blocks.0.mlp.up.weight"]
    why = reasons(**patterns)
    assert why["blocks.0.attn.wq.weight"] == "excluded by '*.attn.*'"
    assert "not in include" in str(why["head.weight"])


def test_one_weight_alone() -> None:
    precision, linear = Precision(weights="mxfp8"), (nn.Linear,)
    assert ineligible("w", (32, 64), precision, linear) is None
    assert "2-D" in str(ineligible("w", (2, 32, 64), precision, linear))
    assert "embedding" in str(ineligible("w", (32, 64), precision, (nn.Embedding,)))

    class Mine(nn.Linear):
        pass

    assert ineligible("w", (32, 64), precision, (Mine,)) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"include": "*.mlp.*"}, ["include='*.mlp.*'", "sequence"]),
        ({"exclude": ("",)}, ["exclude=('',)", "sequence"]),
        ({"include": None}, ["include=None", "sequence"]),
        ({"include": 5}, ["include=5", "sequence"]),
    ],
)
def test_patterns_are_a_sequence_of_them(
    options: dict[str, tuple[str, ...]], words: list[str]
) -> None:
    with pytest.raises(FP8Error) as caught:
        reasons(**options)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights", 8), ("weights", ["mxfp8_rowcol"]), ("reduce", 3), ("main", "mxfp8_rowcol")],
)
def test_what_is_no_dtype_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r": use one of fp32, .*or a torch dtype") as caught:
        Precision(**{field: value})
    assert f"{field}={value!r}" in str(caught.value)


def test_nothing_here_imports_triton() -> None:
    modules = "fp8, fp8_tensor, fp8_products, fp8_functions, policy"
    program = (
        f"import sys; import torch; before = set(sys.modules); "
        f"from shardwise.precision import {modules}; "
        f"new = set(sys.modules) - before; "
        f"assert 'shardwise.precision.fp8' in new; "
        f"sys.exit(sorted(new & {{'triton', 'safetensors', 'rich', 'tyro'}}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
