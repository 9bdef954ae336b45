# SPDX-License-Identifier: Apache-2.0
"""Token files and codecs: what is written is read, and what is damaged is refused by name."""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import os
import re
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.train import tokenise
from shardwise.train import tokens as module
from shardwise.train.cache import shared_cache
from shardwise.train.codecs import (
    FILE,
    Bytes,
    Pieces,
    codec_named,
    require,
    saved_codec,
    write_codec,
)
from shardwise.train.sources import load_corpus
from shardwise.train.tokens import (
    HEADER_BYTES,
    MAGIC,
    DataError,
    MissingExtraError,
    TokenWriter,
    open_tokens,
    read_header,
    write_tokens,
)


def written(tmp_path: Path, vocab_size: int = 300, count: int = 1000) -> Path:
    path = tmp_path / "some.bin"
    tokens = np.random.default_rng(1).integers(0, vocab_size, count)
    tokens[5] = vocab_size - 1
    write_tokens(path, tokens, vocab_size, num_bytes=3 * count)
    return path


@pytest.mark.parametrize("vocab_size", [2, 1 << 16, (1 << 16) + 1, 1 << 32])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int) -> None:
    tokens = np.random.default_rng(0).integers(0, vocab_size, 1000)
    path = tmp_path / "tokens.bin"
    header = write_tokens(path, tokens, vocab_size, num_bytes=77, tokenizer="bytes")
    found, read = open_tokens(path)
    assert isinstance(found, np.memmap)
    assert np.array_equal(found, tokens) and read == header
    assert found.dtype.itemsize == (2 if vocab_size <= 1 << 16 else 4)
    assert (read.count, read.num_bytes, read.tokenizer) == (1000, 77, "bytes")
    assert path.stat().st_size == HEADER_BYTES + 1000 * found.dtype.itemsize
    assert [one.name for one in tmp_path.iterdir()] == ["tokens.bin"]


def test_parts_written_one_by_one_are_one_file(tmp_path: Path) -> None:
    parts = [np.arange(10), np.arange(0), np.arange(7)]
    whole = write_tokens(tmp_path / "whole.bin", np.concatenate(parts), 10)
    assert write_tokens(tmp_path / "parts.bin", iter(parts), 10) == whole
    assert (tmp_path / "parts.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(DataError, match="token 1003 is 10, outside 0 to 9"):
        write_tokens(path, iter([np.zeros(1000, int), np.array([1, 2, 3, 10])]), 10)
    with pytest.raises(DataError, match="token 1 is -1"):
        write_tokens(path, np.array([0, -1]), 10)
    with pytest.raises(ValueError, match="vocab_size=0"):
        write_tokens(path, np.array([0]), 0)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["some.bin"]


def rewrite(path: Path, change: Callable[[bytearray], bytearray | bytes]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def poke(at: int, value: bytes) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[at : at + len(value)] = value
        return data

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (poke(0, b"notmagic"), r"no token file .*notmagic.*shardwise data"),
        (poke(8, b"\x09"), "format version 9, and this shardwise reads version 2: write it again"),
        (poke(16, b"{]"), "damaged header"),
        (lambda data: data[:-1], "truncated: 1000 tokens take 6096 bytes, and it has 6095"),
        (lambda data: data[:100], "damaged header|truncated"),
        (lambda data: data[:3], "no token file"),
        (lambda data: data + b"\0\0", "longer than its header says"),
        (lambda data: b"", "no token file"),
        (poke(HEADER_BYTES + 20, b"\x2c\x01"), "token 10 is 300, outside 0 to 299"),
        (poke(HEADER_BYTES + 10, b"\x00\x00"), "other contents than were written"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, change: Callable[[bytearray], bytearray], message: str
) -> None:
    path = written(tmp_path)
    rewrite(path, change)
    with pytest.raises(DataError, match=message) as caught:
        open_tokens(path)
    assert str(path) in str(caught.value)


def rewrite_header(path: Path, text: bytes, version: int = 2) -> None:
    """Another header, with a checksum of its own."""
    start = MAGIC + version.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text
    start = start.ljust(HEADER_BYTES - 32)
    digest = b" " * 32 if version == 1 else hashlib.sha256(start).digest()
    rewrite(path, poke(0, start + digest))


def header_values(path: Path) -> dict[str, object]:
    length = int.from_bytes(path.read_bytes()[12:16], "little")
    values: dict[str, object] = json.loads(path.read_bytes()[16 : 16 + length])
    return values


@pytest.mark.parametrize(
    "field",
    [
        *({"dtype": "int8"}, {"dtype": "uint32"}, {"dtype": []}, {"surprise": 1}),
        *({"count": -1}, {"count": True}, {"count": 1000.0}, {"count": 10**30}, {"count": None}),
        *({"vocab_size": "many"}, {"vocab_size": 0}, {"vocab_size": 1 << 40}),
        *({"num_bytes": -1}, {"num_bytes": "3"}, {"tokenizer": 5}),
        *({"sha256": None}, {"sha256": "0"}, {"sha256": "G" * 64}),
    ],
)
def test_a_header_of_other_types_is_damage(tmp_path: Path, field: dict[str, object]) -> None:
    path = written(tmp_path)
    rewrite_header(path, json.dumps(header_values(path) | field).encode())
    with pytest.raises(DataError, match=r"damaged header|truncated") as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"[" * 4000, b"{}", b"[]", b"5", b"null", b'{"dtype": 1e999}', b"\xff\xfe", b""]
)
def test_a_header_that_is_something_else_is_damage(tmp_path: Path, text: bytes) -> None:
    path = written(tmp_path)
    rewrite_header(path, text)
    with pytest.raises(DataError, match=r"some\.bin has a damaged header"):
        open_tokens(path)


@pytest.mark.parametrize("size", [*range(8, 33), 4063, 4064, 4095])
def test_a_file_shorter_than_its_header_is_truncated(tmp_path: Path, size: int) -> None:
    path = written(tmp_path)
    rewrite(path, lambda data: data[:size])
    with pytest.raises(DataError, match=rf"some\.bin is truncated: it has {size} bytes"):
        open_tokens(path)


def test_any_flipped_bit_of_a_header_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, count=10)
    monkeypatch.setattr(module, "CHECKED_BYTES", -1)  # as in a large file: no token is hashed
    good = path.read_bytes()
    assert read_header(path).count == 10
    for at in range(HEADER_BYTES):
        bits = range(8) if at < 280 or at >= HEADER_BYTES - 32 else (at % 8,) * (at % 9 == 0)
        for bit in bits:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            with pytest.raises(DataError, match=r"some\.bin"):
                open_tokens(path)


def test_files_of_another_version_are_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path)
    rewrite_header(path, json.dumps(header_values(path)).encode(), version=1)
    with pytest.raises(DataError, match=r"some\.bin has format version 1.*write it again"):
        open_tokens(path)


def test_large_files_are_checked_at_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKED_BYTES", 100)
    monkeypatch.setattr(module, "CHUNK", 10)
    path = written(tmp_path)
    rewrite(path, poke(HEADER_BYTES + 2 * 500, b"\xff\xff"))
    open_tokens(path)  # the middle of a large file is not read
    rewrite(path, poke(HEADER_BYTES + 2 * 999, b"\xff\xff"))
    with pytest.raises(DataError, match="token 999 is 65535"):
        open_tokens(path)


# ------------------------------------------------------------------------------------------- codecs

documents = st.lists(st.binary(max_size=30), min_size=1, max_size=5)


def text_of(symbols: np.ndarray) -> list[bytes]:
    parts = np.split(symbols, np.flatnonzero(symbols == 256) + 1)
    assert len(parts[-1]) == 0 and all(part[-1] == 256 for part in parts[:-1])
    return [part[:-1].astype(np.uint8).tobytes() for part in parts[:-1]]


@given(documents)
def test_bytes_come_back(texts: list[bytes]) -> None:
    codec = Bytes()
    tokens = codec.encode(texts)
    assert tokens.dtype == np.uint16 and len(tokens) == sum(map(len, texts)) + len(texts)
    assert text_of(codec.symbols(tokens)) == texts


TRAINING = [b"the cat sat on the mat\n" * 20, b"def cat(self, mat):\n    return self.sat\n" * 20]


@pytest.fixture(scope="module")
def byte_pairs() -> Pieces:
    pytest.importorskip("tokenizers")
    return Pieces.train(TRAINING, 300)


def test_byte_pairs_come_back(byte_pairs: Pieces, caplog: pytest.LogCaptureFixture) -> None:
    byte_pairs.encode(TRAINING)
    assert not caplog.records
    byte_pairs.encode(["déjà vu".encode("latin-1")])
    assert r"text is not UTF-8 (b'd\xe9j\xe0 vu')" in caplog.text

    @settings(max_examples=50)
    @given(documents)
    def check(texts: list[bytes]) -> None:
        tokens = byte_pairs.encode(texts)
        assert len(tokens) == 0 or tokens.max() < byte_pairs.vocab_size
        # What is not UTF-8 is read as U+FFFD; lengths are counted after that.
        expected = [text.decode("utf-8", "replace").encode() for text in texts]
        assert text_of(byte_pairs.symbols(tokens)) == expected

    check()
    found = byte_pairs.encode(TRAINING)
    assert len(found) < sum(map(len, TRAINING)) / 3, "pieces are longer than a byte"
    assert text_of(byte_pairs.symbols(found)) == TRAINING
    assert len(byte_pairs.symbols(np.empty(0, np.uint16))) == 0


def test_byte_pairs_are_learned_the_same_way_each_time(byte_pairs: Pieces, tmp_path: Path) -> None:
    names: list[str] = []  # this thread waits for the one that learns: Ctrl-C can interrupt it

    def texts() -> Iterator[bytes]:
        names.extend(thread.name for thread in threading.enumerate())
        yield from TRAINING

    again = Pieces.train(texts(), 300)
    assert any("learn" in name for name in names)
    assert again.tokenizer.to_str() == byte_pairs.tokenizer.to_str()
    byte_pairs.save(tmp_path / "t.json")
    loaded = Pieces.load(tmp_path / "t.json", 300)
    assert np.array_equal(loaded.encode(TRAINING), byte_pairs.encode(TRAINING))
    assert loaded.vocab_size == byte_pairs.vocab_size <= 300 and loaded.name == "bpe:300"


def test_the_end_of_a_document_cannot_be_written_in_one(byte_pairs: Pieces) -> None:
    for text in (b"<|endoftext|>", b"<document>", b"[SEP]", b"\xc4\xa0"):
        tokens = byte_pairs.encode([text])
        assert np.count_nonzero(tokens == byte_pairs.end) == 1 and tokens[-1] == byte_pairs.end


def test_codecs_are_named_and_missing_packages_explained() -> None:
    assert codec_named("bytes") == ("bytes", 257) and codec_named("bpe:4096") == ("bpe", 4096)
    for name in ("bpe", "bpe:", "bpe:x", "bytes:3", "words"):
        with pytest.raises(
            DataError, match=r"use bytes, bpe:SIZE .*, or the path of a tokenizer\.json"
        ):
            codec_named(name)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardwise\[extra\]'"):
        require("a_package_that_does_not_exist", "extra")


def test_too_few_byte_pairs_are_refused() -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match="bpe:100: 256 bytes"):
        Pieces.train(TRAINING, 100)


# ------------------------------------------------------------------------------ shardwise data


def test_any_number_of_workers_makes_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "PIECE", 100)  # many pieces: lines lie across their ends
    rows = [f"row {number} " + "é" * (number % 70) for number in range(50)]
    lines = "".join(json.dumps({"body": row}, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines + "\n" + json.dumps({"body": ""}))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"body": "zipped"}))
    (tmp_path / "c.txt").write_text("plain\ntext")
    work = tokenise.work_of([str(tmp_path)], "body")
    assert len(work) > 20
    texts = [text for piece in work for text in tokenise.texts_of(piece, "body")]
    assert texts == [*(row.encode() for row in rows), b"zipped", b"plain\ntext"]
    for workers, out in ((1, tmp_path / "one.bin"), (2, tmp_path / "two")):
        path = tokenise.tokenise(
            [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.txt")],
            out,
            column="body",
            workers=workers,
        )
        tokens, header = open_tokens(path)
        assert np.array_equal(tokens, Bytes().encode(texts))
        assert header.num_bytes == sum(map(len, texts)) and header.tokenizer == "bytes"
    with pytest.raises(DataError, match=r"two exists already"):
        tokenise.tokenise([str(tmp_path)], tmp_path / "two")
    with pytest.raises(DataError, match="train --data hf:NAME reads datasets"):
        tokenise.tokenise(["hf:x"], tmp_path / "three")
    with pytest.raises(DataError, match="--column body has no effect on text files"):
        tokenise.tokenise([str(tmp_path / "c.txt")], tmp_path / "four", column="body")
    assert not (tmp_path / "four").exists()


def test_caches_that_were_cleaned_or_damaged_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of earlier runs may be removed one by one, or rot; or a user has no home for it."""
    pytest.importorskip("tokenizers")
    (tmp_path / "text").write_bytes(b"the fox and the dog, " * 99)
    options = {"spec": str(tmp_path / "text"), "tokenizer": "bpe:283"}
    first = load_corpus(**options, cache=tmp_path / "first")
    (left,) = shared_cache().glob("bpe-283-*")
    damages: list[Callable[[], object]] = [
        (left / "held_out.bin").unlink,
        partial((left / FILE).write_bytes, Pieces.train([b"other text " * 9], 260).files()[FILE]),
        partial((left / "train.bin").write_bytes, b""),
        partial(monkeypatch.delenv, "XDG_CACHE_HOME"),
    ]
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for an unknown user
    for number, damage in enumerate(damages):
        damage()
        again = load_corpus(**options, cache=tmp_path / f"{number}")
        assert np.array_equal(again.train, first.train)
        assert again.codec is not None and first.codec is not None
        assert again.codec.files() == first.codec.files()


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = tmp_path / "text"
    text.write_bytes(b"the fox and the dog, " * 99)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match="too large"):
            write_codec(tmp_path, Bytes())
        writer = TokenWriter(tmp_path / "tokens.bin", 257)
        with pytest.raises(OSError, match="too large"):
            writer.add(np.zeros(1 << 16, np.uint16))
        writer.discard()
        with pytest.raises(OSError, match=r"too large: .*bpe-281-"):
            load_corpus(str(text), tokenizer="bpe:281", cache=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [text]
    write_codec(tmp_path, Bytes())
    assert isinstance(saved_codec(tmp_path), Bytes)


class Watched(Bytes):
    """Tells the worker that it encodes in, and whether that and its parent block SIGINT; then waits
    for more signals than will come."""

    def encode(self, documents: Sequence[bytes]) -> Any:
        blocked = []
        for pid in (os.getpid(), os.getppid()):
            status = dict(re.findall(r"(\w+):\s+(\w+)", Path(f"/proc/{pid}/status").read_text()))
            blocked.append(int(status["SigBlk"], 16) >> signal.SIGINT - 1 & 1)
        Path(documents[0].decode()).write_text(json.dumps([os.getpid(), *blocked]))
        while True:
            signal.pause()


def tokenise_and_wait(text: str) -> None:
    work = tokenise.work_of([text], "text")
    list(tokenise._encoded(work, 1, (Watched(), "text")))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_workers_end_with_their_parent_and_leave_interrupts_to_it(tmp_path: Path) -> None:
    """One that Ctrl-C ended with a queue's lock in its hands let the command wait forever."""
    os.mkfifo(told := tmp_path / "told")
    (text := tmp_path / "a.txt").write_text(str(told))
    parent = multiprocessing.get_context("fork").Process(
        target=tokenise_and_wait, args=(str(text),)
    )
    parent.start()
    pid, *blocked = json.loads(told.read_text())
    worker = os.pidfd_open(pid)
    parent.kill()
    assert blocked == [1, 0] and select.select([worker], [], [], 60)[0], "its end can be read"


def test_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    work = tokenise.work_of([str(tmp_path)], "text")[0]
    with pytest.raises(DataError, match=r"a\.jsonl, byte 17: no text under 'text' \(keys: text\)"):
        list(tokenise.texts_of(work, "text"))
    for line in ("{oh\n", "[" * 100_000):
        (tmp_path / "a.jsonl").write_text(line)
        with pytest.raises(DataError, match="byte 0: this line is no JSON"):
            list(tokenise.texts_of(tokenise.work_of([str(tmp_path)], "text")[0], "text"))
    packed = gzip.compress(b'{"text": "fine"}\n' * 9)
    plain = b'{"text": "not packed"}\n'
    for damaged in (packed[:-4], packed[:15] + b"~~" + packed[17:], plain):
        (tmp_path / "b.jsonl.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"b\.jsonl\.gz cannot be read"):
            list(tokenise.texts_of(tokenise.work_of([str(tmp_path)], "text")[1], "text"))
    (tmp_path / "b.jsonl.gz").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl is in .*name it once"):
        tokenise.work_of([str(tmp_path / "a.jsonl")] * 2, "text")
    with pytest.raises(DataError, match="'nothing' names no data"):
        tokenise.work_of(["nothing"], "text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "e.txt").touch()
    with pytest.raises(DataError, match=r"no text in .*1 empty \(e.txt\)"):
        tokenise.tokenise([str(tmp_path / "empty")], tmp_path / "e.bin", workers=1)
    assert not (tmp_path / "e.bin").exists()


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    rows = ["one", None, "three", "vier"]
    parquet.write_table(arrow.table({"body": rows}), tmp_path / "a.parquet", row_group_size=2)
    work = tokenise.work_of([str(tmp_path)], "body")
    assert len(work) == 2
    found = [text for piece in work for text in tokenise.texts_of(piece, "body")]
    assert found == [b"one", b"three", b"vier"]
    with pytest.raises(DataError, match=r"has no column 'text' \(columns: body\)"):
        tokenise.work_of([str(tmp_path)], "text")
