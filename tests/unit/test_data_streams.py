# SPDX-License-Identifier: Apache-2.0
"""Corpora: rows of datasets, as a whole and as a stream."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shardwise.train import streaming
from shardwise.train.codecs import (
    decode_text,
)
from shardwise.train.corpus import (
    dataset_documents,
)
from shardwise.train.sampler import Sampler
from shardwise.train.sources import load_corpus
from shardwise.train.tokens import (
    DataError,
)


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    """The rows of a streamed dataset."""
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def load_dataset(
        name: str, config: str | None, split: str, *, streaming: bool
    ) -> list[dict[str, Any]]:
        assert streaming, "a dataset may be larger than this machine"
        calls.append((name, config, split))
        if name == "none":
            raise FileNotFoundError("no such dataset\nand more")
        if name == "numbers":
            return rows(label=[1, 2])
        if name == "stories":
            return rows(id=[1, 2, 3], story=["once " * 50, "", "upon " * 50])
        return rows(text=["row " * 20] * 40, title=["t"] * 40)

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_rows_of_a_dataset_are_documents(
    datasets: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    corpus = load_corpus("hf:owner/name:config:validation")
    assert datasets == [("owner/name", "config", "validation")]
    assert np.count_nonzero(corpus.train == 256) + np.count_nonzero(corpus.held_out == 256) == 40
    assert "row row" in decode_text(corpus.codec, corpus.train[:20])
    stories = list(dataset_documents("hf:stories"))
    assert [one.name for one in stories] == ["stories/0", "stories/2"]
    assert "not read: 1 of 3 rows, which have no text in column 'story'" in caplog.text
    assert datasets[-1] == ("stories", None, "train")
    with pytest.raises(DataError, match=r"no such dataset\): check the name"):
        load_corpus("hf:none")
    with pytest.raises(DataError, match="no column 'text'"):
        load_corpus("hf:numbers")
    for spec in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(DataError, match="hf:NAME:CONFIG:SPLIT"):
            load_corpus(spec)


def test_a_stream_is_read_while_a_run_draws_from_it(
    datasets: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each volume once, in order, shuffled in itself; where reading fails, whoever comes there is
    told; a second start reads on, and the volumes are those of a run that never failed."""
    texts = [f"row {number} of a stream" * (1 + number % 5) for number in range(200)]
    monkeypatch.setattr(streaming, "VOLUME", 1500)
    monkeypatch.setattr(streaming, "_BATCH", 256)
    broken = [90]  # the row at which the network is gone

    class Rows(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for number, row in enumerate(super().__iter__()):
                if broken and number == broken[0]:
                    raise ConnectionError("the network is gone")
                yield row

    monkeypatch.setattr(
        sys.modules["datasets"], "load_dataset", lambda *args, **options: Rows(rows(text=texts))
    )
    first = load_corpus("hf:x", held_out=0.1, cache=tmp_path / "a", tokens_needed=6000)
    assert first.volumes is not None and len(first.train) == 1500 and len(first.held_out) > 1
    with pytest.raises(DataError, match=r"'hf:x' could not be read \(ConnectionError: the net"):
        first.volumes(4)
    broken.clear()
    options: dict[str, Any] = {"held_out": 0.1, "tokens_needed": 6000}
    again = load_corpus("hf:x", cache=tmp_path / "a", **options)
    whole = load_corpus("hf:x", cache=tmp_path / "b", **options)
    assert again.volumes is not None and whole.volumes is not None
    volumes = [again.volumes(number) for number in range(4)]
    for number, tokens in enumerate(volumes):
        assert np.array_equal(tokens, whole.volumes(number)) and len(tokens) == 1500
    held = {again.codec.encode([text.encode()]).tobytes() for text in texts}  # type: ignore[union-attr]
    stream = np.concatenate(volumes)
    ends = np.flatnonzero(stream == 256) + 1
    assert all(part.tobytes() in held for part in np.split(stream, ends)[1:-1]), "whole rows"
    sampler = Sampler(again, context=10, global_batch=8)
    drawn = np.concatenate([sampler.next_batch()[0].numpy() for _ in range(4 * 149 // 8)])
    for number, tokens in enumerate(volumes[:3]):
        own = sorted(map(bytes, drawn[number * 149 : (number + 1) * 149].astype(np.uint16)))
        assert own == sorted(map(bytes, tokens[:1490].reshape(149, 10))), "each window once"


def test_a_run_reads_as_many_rows_as_it_needs_and_keeps_them(
    datasets: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_corpus("hf:rows", held_out=0.2, cache=tmp_path / "whole")
    assert len(whole.train) + len(whole.held_out) == 40 * 81 and len(whole.held_out) > 0
    assert whole.volumes is not None and not caplog.records
    assert whole.volumes(1) is whole.volumes(0) and "are drawn again" in caplog.text
    part = load_corpus("hf:rows", held_out=0.2, cache=tmp_path / "part", tokens_needed=900)
    assert 900 < len(part.train) < 1100 and isinstance(part.train, np.memmap)
    assert np.array_equal(part.train, whole.train[: len(part.train)]), "the first rows"
    assert part.bytes_per_token() == pytest.approx(80 / 81)
    asked = len(datasets)
    (folder,) = (tmp_path / "part").iterdir()
    with (folder / ".lock").open("w") as writer:  # one that ends without the volumes that follow
        fcntl.flock(writer, fcntl.LOCK_EX)
        again = load_corpus("hf:rows", held_out=0.2, cache=tmp_path / "part", tokens_needed=5000)
    assert again.sha256 == part.sha256 != whole.sha256
    assert again.volumes is not None and part.volumes is not None
    second = again.volumes(1)  # a longer run reads on where the first one ended
    assert np.array_equal(second, whole.train[901:1802]) and len(datasets) == asked + 1
    # The last volume is not full: the dataset begins anew.
    assert np.array_equal(again.volumes(len(whole.train) // 901), again.train)
    # Killed when all rows were read, before the volume had its name.
    (folder,) = (tmp_path / "whole").iterdir()
    (folder / "train.bin").unlink()
    remade = load_corpus("hf:rows", held_out=0.2, cache=tmp_path / "whole")
    assert np.array_equal(remade.train, whole.train)
    with pytest.raises(DataError, match="a dataset can't be mixed"):
        load_corpus("hf:rows:0.5,stdlib:0.5", cache=tmp_path)
