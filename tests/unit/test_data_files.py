# SPDX-License-Identifier: Apache-2.0
"""Data files that are not read: each is told with its name and the reason, or refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwise.train import tokenise
from shardwise.train.codecs import Bytes, write_codec
from shardwise.train.sources import load_corpus
from shardwise.train.tokens import DataError, write_tokens

TEXT = b"the quick brown fox jumps over the lazy dog\n" * 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    (made / "below").mkdir(parents=True)
    for name in ("a.txt", "b.md", "below/c.rst"):
        (made / name).write_bytes(TEXT + name.encode())
    return made


def write(name: str, data: bytes) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return make


SHORT = b"no zero byte"
LEFT = {
    "hidden file": (write(".notes.txt", TEXT), r"1 hidden \(\.notes\.txt\)"),
    "hidden folder": (write(".git/a.txt", TEXT), r"1 hidden \(\.git\)"),
    "empty": (write("below/e.txt", b""), r"1 empty \(below/e\.txt\)"),
    "binary": (write("p.png", b"\x89PNG\0\0"), r"1 binary \(p\.png\)"),
    "gzip": (write("t.txt.gz", gzip.compress(SHORT)), r"1 compressed \(t\.txt\.gz\)"),
    "bzip2": (write("t.txt.bz2", bz2.compress(SHORT)), r"1 compressed \(t\.txt\.bz2\)"),
    "xz": (write("t.txt.xz", lzma.compress(SHORT)), r"1 compressed \(t\.txt\.xz\)"),
    "zstd": (write("t.zst", b"\x28\xb5\x2f\xfd\x04\x61"), r"1 compressed \(t\.zst\)"),
    "UTF-16": (write("u.txt", "Wörter".encode("utf-16")), r"1 in UTF-16, not UTF-8 \(u\.txt\)"),
    "pipe": (lambda at: os.mkfifo(at / "pipe"), r"1 no regular file \(pipe\)"),
    "broken link": (lambda at: (at / "l.txt").symlink_to("gone"), r"1 no regular file \(l\.txt\)"),
    "linked folder": (
        lambda at: (at / "more").symlink_to(at.parent),
        r"1 link to a folder \(more\)",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_a_folder_of_text_holds_besides_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    expected = load_corpus(str(folder)).sha256
    assert not caplog.records, "every file is read"
    make, told = LEFT[case]
    make(folder)
    assert load_corpus(str(folder)).sha256 == expected
    assert len(caplog.records) == 1 and f"{folder}: not read: " in caplog.text
    assert re.search(told, caplog.text), caplog.text
    load_corpus(str(folder))
    assert len(caplog.records) == 1, "once"


def test_many_are_counted_and_some_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(7):
        (folder / f"e{number}.txt").touch()
    (folder / "below" / "p.png").write_bytes(b"\0")
    load_corpus(f"{folder}/*")
    assert "not read: 7 empty (" in caplog.text and "1 folder (" in caplog.text
    assert "e2.txt, ...)" in caplog.text and "e3.txt" not in caplog.text
    caplog.clear()
    load_corpus(f"{folder}/**")
    assert "7 empty (" in caplog.text and "1 binary (" in caplog.text, "folders were read"
    assert "folder (" not in caplog.text


def tokens_in(folder: Path, name: str = "t.bin") -> None:
    write_tokens(folder / name, np.arange(99), 257, tokenizer="bytes", num_bytes=99)


def test_what_a_folder_of_tokens_holds_besides_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = folder.parent / "alone"
    alone.mkdir()
    tokens_in(alone)
    write_codec(alone, Bytes())
    load_corpus(str(alone))
    assert not caplog.records, "a tokenizer belongs to its tokens"
    tokens_in(folder)
    tokens_in(folder / "below")
    (folder / "foreign.bin").write_bytes(b"other")
    load_corpus(str(folder))
    found = caplog.records[0].getMessage()
    assert "3 no token file (a.txt, b.md, foreign.bin)" in found
    assert "2 in folders below (below/c.rst, below/t.bin)" in found


def test_text_and_tokens_in_one_source_are_refused(folder: Path) -> None:
    tokens_in(folder / "below")
    for source in (f"{folder}", f"{folder}/**/*", f"{folder}/below/*"):
        with pytest.raises(DataError, match=r"holds text and a token file, .*below/t\.bin"):
            load_corpus(source)


def test_nothing_left_is_refused_with_the_reasons(tmp_path: Path) -> None:
    (tmp_path / ".hidden.txt").write_bytes(TEXT)
    (tmp_path / "e.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    reasons = r"1 empty \(e\.txt\), 1 hidden \(\.hidden\.txt\), 1 no regular file \(pipe\)"
    for read in (load_corpus, lambda source: tokenise.work_of([source], "text")):
        with pytest.raises(DataError, match=rf"no text.*\({reasons}\)"):
            read(str(tmp_path))
        with pytest.raises(DataError, match=r"no text.*\(1 empty \("):
            read(str(tmp_path / "e.txt"))
        with pytest.raises(DataError, match=r"names no data.*1 no regular file \(.*/pipe\)"):
            read(str(tmp_path / "pipe"))
    with pytest.raises(DataError, match=r"no text.*\(1 empty \("):  # named beside others
        tokenise.work_of([str(tmp_path / ".hidden.txt"), str(tmp_path / "e.txt")], "text")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_cannot_be_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def deny(function: Callable[..., object], name: str) -> Callable[..., object]:
        def call(path: object, *rest: object) -> object:
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *rest)

        return call

    if what == "file":
        monkeypatch.setattr(Path, "read_bytes", deny(Path.read_bytes, "b.md"))
    else:
        monkeypatch.setattr(os, "scandir", deny(os.scandir, "below"))
    with pytest.raises(DataError, match=r"(b\.md|below) cannot be read \(Permission denied\)"):
        load_corpus(str(folder))


def test_tokens_are_made_of_what_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".hidden.txt").write_bytes(TEXT)
    (folder / "e.txt").touch()
    rows = [{"text": "words"}, {"text": ""}, {"text": ""}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenise.tokenise([str(folder)], folder.parent / "t.bin", workers=1)
    assert "not read: 1 empty (e.txt), 1 hidden (.hidden.txt)" in caplog.text
    assert "4 documents" in (told := " ".join(capsys.readouterr().err.split()))
    assert "left out: 2 documents without text" in told
    (folder / "t.txt.bz2").write_bytes(bz2.compress(SHORT))
    with pytest.raises(DataError, match=r"t\.txt\.bz2 is compressed: name text"):
        tokenise.tokenise([str(folder / "t.txt.bz2")], folder.parent / "u.bin", workers=1)
