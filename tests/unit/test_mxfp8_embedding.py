# SPDX-License-Identifier: Apache-2.0
"""Rows looked up in MXFP8 planes: the bits of the decoded matrix, the gradient of F.embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.precision.fp8 import COLUMN, ROW, SQUARE, Block, FP8Error, decode, encode
from shardwise.precision.fp8_functions import fp8_embedding, lookup, lookup_problem, rows_of
from shardwise.precision.fp8_tensor import Format, FP8Tensor

VOCAB, COLUMNS = 96, 64


def table() -> Tensor:
    """Rows of very different sizes, so that a scale of another row would show."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(VOCAB, COLUMNS, generator=generator)
    return rows * torch.exp2(torch.randint(-20, 20, (VOCAB, 1), generator=generator).float())


@pytest.mark.parametrize("block", [ROW, SQUARE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_what_the_whole_matrix_says(block: Block, dtype: torch.dtype) -> None:
    (plane,) = encode(table(), (block,))
    whole = decode(plane, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for shape in ((), (0,), (1,), (7, 5), (2, 3, 16), (VOCAB,)):
        for kind in (torch.int32, torch.int64):
            ids = torch.randint(VOCAB, shape, generator=generator, dtype=kind)
            found = lookup(plane, ids, dtype=dtype)
            assert found.dtype == dtype and found.shape == (*shape, COLUMNS)
            assert torch.equal(found, whole[ids.long()])
    every = torch.arange(VOCAB)
    assert rows_of(plane, every).codes.equal(plane.codes)


@pytest.mark.parametrize("format", ["mxfp8_rowcol", "mxfp8_2d", "mxfp8_rows"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": -90}])
@pytest.mark.parametrize("scale", [False, True])
def test_values_and_gradient_are_those_of_torch(
    format: Format, options: dict[str, Any], scale: bool
) -> None:
    stored = FP8Tensor.encode(table(), format)
    values = stored.dequantise().requires_grad_()
    parameter = torch.zeros(1, dtype=torch.bfloat16).expand(VOCAB, COLUMNS).requires_grad_()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(8, (4, 9), generator=generator)  # rows 3 and 6, often
    grad = torch.randn(4, 9, COLUMNS, generator=generator).to(torch.bfloat16)
    options = options | {"scale_grad_by_freq": scale}
    expected = F.embedding(ids, values, **options)
    found = fp8_embedding(ids, stored, parameter=parameter, **options)
    assert torch.equal(found, expected)
    found.backward(grad)
    expected.backward(grad)
    assert parameter.grad is not None and values.grad is not None
    assert parameter.grad.dtype == torch.bfloat16 and torch.equal(parameter.grad, values.grad)
    padded = options.get("padding_idx", 0) % VOCAB
    assert bool(parameter.grad[padded].any()) == ("padding_idx" not in options)


def test_a_frozen_weight_gets_no_gradient() -> None:
    ids = torch.tensor([1, 2])
    found = fp8_embedding(ids, FP8Tensor.encode(table()), dtype=torch.float32)
    assert not found.requires_grad and found.dtype == torch.float32


@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        (torch.tensor([1.0]), {}, ["ids of torch.float32", "int32 or int64"]),
        (torch.tensor([1], device="meta"), {}, ["ids on meta", "weight on cpu"]),
        (torch.tensor([1]), {"padding_idx": VOCAB}, ["padding_idx=96", "96 rows"]),
        (torch.tensor([1]), {"parameter": torch.zeros(3, 5)}, ["shape (3, 5)", "(96, 64)"]),
    ],
)
def test_what_cannot_be_looked_up_is_refused(
    ids: Tensor, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(FP8Error) as caught:
        fp8_embedding(ids, FP8Tensor.encode(table()), **options)
    assert [word for word in words if word not in str(caught.value)] == []


def test_rows_that_are_not_there_are_no_others() -> None:
    (plane,) = encode(table(), (ROW,))
    for wrong in (-1, VOCAB):
        with pytest.raises(IndexError):
            lookup(plane, torch.tensor([wrong]))
    (columns,) = encode(table(), (COLUMN,))
    with pytest.raises(FP8Error, match="planes of rows or squares"):
        lookup(columns, torch.tensor([0]))


def test_options_of_an_embedding() -> None:
    assert lookup_problem(max_norm=None, sparse=False) is None
    assert "max_norm=2.0" in str(lookup_problem(max_norm=2.0, sparse=False))
    assert "use sparse=False" in str(lookup_problem(max_norm=None, sparse=True))
