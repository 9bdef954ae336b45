# SPDX-License-Identifier: Apache-2.0
"""Token files: what is written is read, what is damaged is refused by name; texts become tokens,
once, and no byte is lost; what a run gets of them."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.train.data import load_corpus
from shardwise.train.tokenise import (
    MissingExtraError,
    Tokenizer,
    byte_tokenizer,
    find_texts,
    held_out_files,
    learned_tokenizer,
    make_tokens,
    open_tokenizer,
)
from shardwise.train.tokens import (
    INFO,
    TOKENIZER,
    TOKENS,
    DataError,
    open_tokens,
    token_folder,
    write_tokens,
)

SENTENCE = b"the quick brown fox jumps over the lazy dog.\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardwise" / "tokens"


def written(tmp_path: Path, vocab_size: int = 300, count: int = 1000) -> Path:
    tokens = np.random.default_rng(1).integers(0, vocab_size, count)
    tokens[5] = vocab_size - 1
    write_tokens(tmp_path / "made", tokens, vocab_size)
    return tmp_path / "made"


def texts(folder: Path, count: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.txt").write_bytes(SENTENCE * (number + 3))
    return folder


def text_of(codec: Tokenizer, tokens: Any) -> list[bytes]:
    """The documents in tokens, each of which ends with the end token."""
    *parts, rest = np.split(tokens, np.flatnonzero(tokens == codec.end) + 1)
    assert len(rest) == 0
    documents = [part[:-1].tolist() for part in parts]
    return [bytes(d) if codec.engine is None else codec.decode(d).encode() for d in documents]


# ------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("vocab_size", [2, 1 << 16, (1 << 16) + 1, 1 << 32])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int) -> None:
    folder = written(tmp_path, vocab_size)
    tokens, info = open_tokens(folder)
    assert isinstance(tokens, np.memmap) and tokens.max() == vocab_size - 1
    assert (info.count, info.held_out_begins, info.vocab_size) == (1000, 950, vocab_size)
    # The file is plain: numpy reads it without a word from us.
    plain = np.fromfile(folder / TOKENS, "<u2" if vocab_size <= 1 << 16 else "<u4")
    expected = np.random.default_rng(1).integers(0, vocab_size, 1000)
    expected[5] = vocab_size - 1
    assert np.array_equal(plain, tokens) and np.array_equal(tokens, expected)
    for name in (folder, folder / TOKENS, folder / INFO):
        assert token_folder(str(name)) == folder


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token 0 is 300, outside 0 to 299"):
        write_tokens(tmp_path / "made", np.full(9, 300), 300)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"dtype": "uint32"},
        {"vocab_size": 0},
        {"count": 999},
        {"count": 1e3},
        {"held_out_begins": 1001},
        {"end_token": 300},
        {"sha256": "0" * 64},
        {"token_bytes": [1, 2]},
        {"unheard": 1},
    ],
)
def test_a_description_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = written(tmp_path)
    values = json.loads((folder / INFO).read_bytes())
    (folder / INFO).write_text(json.dumps(values | change))
    with pytest.raises(DataError, match=r"tokens\.(json|bin)"):
        open_tokens(folder)


def test_damage_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert load_corpus(str(folder)).bits_per_byte(1.0) is None, "the text is not known"
    whole = (folder / TOKENS).read_bytes()
    for damaged in (whole[:-2], whole[:500] + bytes([whole[500] ^ 1]) + whole[501:], b""):
        (folder / TOKENS).write_bytes(damaged)
        with pytest.raises(DataError, match=r"tokens\.bin"):
            open_tokens(folder)
    plain = tmp_path / "plain.bin"
    plain.write_bytes(b"shrdtoks" + bytes(5000))
    with pytest.raises(DataError, match=r"tokens\.json .*shardwise data"):
        load_corpus(str(plain))
    made = make_tokens([str(texts(tmp_path / "texts"))], tmp_path / "again")
    assert load_corpus(str(made)).folder == made
    (made / TOKENIZER).write_text("{}")
    with pytest.raises(DataError, match="not the tokenizer of the tokens"):
        load_corpus(str(made))


# ------------------------------------------------------------------------------ tokenizers


@pytest.fixture(scope="module")
def byte_pairs() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return learned_tokenizer([SENTENCE * 20, b"def cat(self, mat):\n    return self.sat\n"], 300)


def test_text_comes_back(byte_pairs: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    assert len(byte_pairs.encode([SENTENCE * 9])[0]) < 9 * len(SENTENCE) / 3, "pieces, not bytes"
    assert not caplog.records
    byte_pairs.encode(["déjà vu".encode("latin-1")])
    assert "not UTF-8" in caplog.text

    @settings(max_examples=50)
    @given(st.lists(st.binary(max_size=40), max_size=5))
    def check(documents: list[bytes]) -> None:
        for codec in (byte_tokenizer(), byte_pairs):
            tokens = np.concatenate([np.empty(0, np.uint16), *codec.encode(documents)])
            assert tokens.dtype == np.uint16 and np.all(tokens < len(codec.lengths))
            expected = documents  # byte pairs: what is not UTF-8 is read as U+FFFD
            if codec is byte_pairs:
                expected = [text.decode("utf-8", "replace").encode() for text in documents]
            assert text_of(codec, tokens) == expected
            assert np.array(codec.lengths)[tokens].sum() == sum(map(len, expected))

    check()
    for text in (b"<|endoftext|>", b"<document>", b"[SEP]", b"\xc4\xa0"):
        (tokens,) = byte_pairs.encode([text])
        assert np.count_nonzero(tokens == byte_pairs.end) == 1 and tokens[-1] == byte_pairs.end
    assert byte_tokenizer().decode([255, 104, 300]) == "\ufffdh"


def test_the_files_of_a_tokenizer_make_it_again(tmp_path: Path, byte_pairs: Tokenizer) -> None:
    package = pytest.importorskip("tokenizers")
    for number, codec in enumerate((byte_tokenizer(), byte_pairs)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, contents in codec.files.items():
            (folder / name).write_bytes(contents)
        for again in (open_tokenizer(folder), open_tokenizer(folder / TOKENIZER)):
            assert (again.digest, again.end, again.lengths) == (
                codec.digest,
                codec.end,
                codec.lengths,
            )
        theirs = package.Tokenizer.from_file(str(folder / TOKENIZER))
        text = "déjà vu,\n  x\t\0"
        assert theirs.encode(text).ids == codec.encode([text.encode()])[0][:-1].tolist()
        assert theirs.token_to_id("<|endoftext|>") == codec.end


@pytest.mark.parametrize("name", ["bpe", "bpe:x", "bpe:256", "bytes:3", "words", "none.json"])
def test_what_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=name):
        make_tokens(["stdlib"], tokenizer=name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError):
        make_tokens(["hf:some/dataset"])


# ------------------------------------------------------------------------------ texts


def test_text_is_made_once_and_every_byte_is_in_one_part(tmp_path: Path, cache: Path) -> None:
    folder = texts(tmp_path / "texts")
    corpus = load_corpus(str(folder))
    (made,) = cache.iterdir()
    before = (made / TOKENS).stat().st_mtime_ns
    again = load_corpus(str(folder))
    assert (made / TOKENS).stat().st_mtime_ns == before and again.sha256 == corpus.sha256
    codec = byte_tokenizer()
    found = [*text_of(codec, corpus.parts[0].tokens), *text_of(codec, corpus.held_out)]
    assert sorted(found) == sorted(path.read_bytes() for path in folder.iterdir())
    assert 0.02 < len(corpus.held_out) / sum(map(len, found)) < 0.1
    assert corpus.info.end_token == 256 and corpus.info.token_bytes == [1] * 256 + [0]
    sizes = (corpus.info.train_bytes, corpus.info.held_out_bytes)
    assert None not in sizes and sum(map(int, sizes)) == sum(map(len, found))  # type: ignore[arg-type]
    os.rename(folder, tmp_path / "moved")
    assert load_corpus(str(tmp_path / "moved")).sha256 == corpus.sha256
    assert len([*cache.iterdir()]) == 1, "moved texts are the same texts"
    (tmp_path / "moved" / "3.txt").write_bytes(SENTENCE * 7)  # another length
    assert load_corpus(str(tmp_path / "moved")).sha256 != corpus.sha256
    make_tokens([str(tmp_path / "moved")], held_out=0.2)
    assert len([*cache.iterdir()]) == 3, "the part that is held out belongs to the key"
    (made / TOKENS).write_bytes(b"")
    with pytest.raises(DataError, match=r"tokens\.bin"):
        make_tokens([str(texts(tmp_path / "texts"))])


def test_documents_are_held_out_whole_and_a_single_long_one_gives_its_end(tmp_path: Path) -> None:
    found = find_texts([str(texts(tmp_path / "texts"))])
    held = held_out_files(found, 0.1)
    size = sum(text.size for text in found if text.name in held)
    assert 0.05 <= size / sum(text.size for text in found) <= 0.125
    more = find_texts([str(texts(tmp_path / "texts", 21))])
    assert len(held & held_out_files(more, 0.1)) >= len(held) - 1, "more text: the same choice"
    alone = tmp_path / "alone.txt"
    alone.write_bytes(SENTENCE * 100)
    corpus = load_corpus(str(alone))
    whole = np.concatenate([corpus.parts[0].tokens, corpus.held_out])
    assert text_of(byte_tokenizer(), whole) == [SENTENCE * 100]
    assert len(corpus.held_out) == round(0.05 * len(whole))
    (tmp_path / "few.txt").write_text("x")
    with pytest.raises(DataError, match="too few"):
        make_tokens([str(tmp_path / "few.txt")])


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    found = {text.name: text for text in find_texts(["stdlib"])}
    assert "stdlib/abc.py" in found and "stdlib/json/decoder.py" in found
    assert not [name for name in found if "/test/" in name or "site-packages" in name]
    assert 5e6 < sum(text.size for text in found.values()) < 2e7
    more = {text.name for text in find_texts(["stdlib+torch"])}
    assert {*found} < more and "torch/nn/modules/linear.py" in more
    folder = texts(tmp_path / "texts", 5)
    (folder / "below").mkdir()
    (folder / "below" / "5.txt").write_bytes(SENTENCE)
    (folder / ".hidden").write_bytes(SENTENCE)
    (folder / "empty.txt").write_bytes(b"")
    names = [f"{n}.txt" for n in range(5)]
    assert [text.name for text in find_texts([str(folder)])] == [*names, "below/5.txt"]
    assert [text.name for text in find_texts([f"{folder}/*.txt"])] == names
    assert len(find_texts([f"{folder}/**/*.txt"])) == 6
    for nothing in (tmp_path / "none", folder / "empty.txt", f"{folder}/*.md"):
        with pytest.raises(DataError, match="names no data"):
            find_texts([str(nothing)])
    for data in (gzip.compress(SENTENCE), SENTENCE.decode().encode("utf-16"), b"a\0b"):
        (folder / "x.txt").write_bytes(data)
        with pytest.raises(DataError, match=r"x\.txt"):
            make_tokens([str(folder)])


def test_rows_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [SENTENCE.decode() * (n + 1) for n in range(60)]
    rows = [{"body": body, "id": n} for n, body in enumerate([*bodies, *bodies[:20]])]
    lines = "".join(json.dumps(row) + "\n" for row in [*rows, {"body": ""}, {"body": None}])
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    package = ModuleType("datasets")
    builder = SimpleNamespace(hash="abc", as_streaming_dataset=lambda split: rows)
    package.load_dataset_builder = lambda name, config: builder  # type: ignore[attr-defined]
    package.load_dataset = lambda kind, **given: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    digests = set()
    sources = ("a.jsonl", "b.jsonl.gz", "c.parquet", "hf:some/rows")
    for source in sources:
        place = source if source.startswith("hf:") else str(tmp_path / source)
        out = tmp_path / f"of-{source.replace('/', '-')}"
        folder = make_tokens([place], out, column="body", held_out=0.2)
        tokens, info = open_tokens(folder)
        parts = np.split(tokens, [info.held_out_begins])
        train, held = ([*text_of(byte_tokenizer(), part)] for part in parts)
        assert sorted(train + held) == sorted(row["body"].encode() for row in rows)
        assert train and held and not {*train} & {*held}, "copies of a row are on one side"
        digests.add(info.sha256)
        assert make_tokens([place], out, column="body", held_out=0.2) == out, "made once"
        with pytest.raises(DataError, match="holds something else"):
            make_tokens([place], out, column="body", held_out=0.3)
        with pytest.raises(DataError, match=r"'text'.*--column"):
            make_tokens([place], column="text")
        with pytest.raises(DataError, match=r"shardwise data .*--out"):
            load_corpus(place)
    assert len(digests) == 1, "the same rows in any container are the same tokens"
    (tmp_path / "a.jsonl").write_text("{")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-9])
    for source in sources[:2]:
        with pytest.raises(DataError, match=source):
            make_tokens([str(tmp_path / source)], column="body")


def test_pieces_are_learned_from_what_is_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = texts(tmp_path / "texts")
    corpus, plain = load_corpus(str(folder), tokenizer="bpe:300"), load_corpus(str(folder))
    assert corpus.folder is not None and corpus.info.vocab_size <= 300
    codec = open_tokenizer(corpus.folder)
    for tokens, bytes_of in (
        (corpus.parts[0].tokens, plain.parts[0].tokens),
        (corpus.held_out, plain.held_out),
    ):
        assert text_of(codec, tokens) == text_of(byte_tokenizer(), bytes_of)
    # A loss per byte of one is a loss per byte of the other.
    scale = len(plain.held_out) / len(corpus.held_out)
    assert corpus.bits_per_byte(scale, corpus.held_out) == pytest.approx(
        plain.bits_per_byte(1.0, plain.held_out)
    )


# ------------------------------------------------------------------------------ corpora


def test_a_blend_has_weights_and_one_tokenizer(tmp_path: Path) -> None:
    for name, size, value in (("a", 2000, 1), ("b", 8000, 2)):
        write_tokens(tmp_path / name, np.full(size, value), 9, token_bytes=[0, 1, 3, *[1] * 6])
    spec = f"{tmp_path}/a:3,{tmp_path}/b:1"
    corpus = load_corpus(spec)
    assert [part.weight for part in corpus.parts] == [0.75, 0.25]
    assert [len(part.tokens) for part in corpus.parts] == [1900, 7600]
    held = np.bincount(corpus.held_out)
    assert held[1:].tolist() == [100, 33], "the loss of the mixture"
    assert corpus.bytes_per_token == pytest.approx(0.75 * 1 + 0.25 * 3)
    assert corpus.bits_per_byte(math.log(2), corpus.held_out) == pytest.approx(133 / (100 + 99))
    plain = load_corpus(f"{tmp_path}/a,{tmp_path}/b")
    assert [part.weight for part in plain.parts] == [0.2, 0.8] and plain.sha256 != corpus.sha256
    scored = load_corpus(f"{tmp_path}/a", eval_data=f"{tmp_path}/b")
    assert len(scored.held_out) == 8000 and (scored.held_out == 2).all()
    assert len(scored.parts[0].tokens) == 1900
    a, b = tmp_path / "a", tmp_path / "b"
    for spec in (f"{a}:1,{b}", f"{a}:0,{b}:1", f"{a},{a}", f"{a},", f"{a}:-1,{b}:1"):
        with pytest.raises(DataError):
            load_corpus(spec)
    write_tokens(tmp_path / "c", np.full(2000, 1), 10)
    for spec, eval_data in (
        (f"{tmp_path}/a,{tmp_path}/c", None),
        (f"{tmp_path}/a", f"{tmp_path}/c"),
    ):
        with pytest.raises(DataError, match="one tokenizer"):
            load_corpus(spec, eval_data=eval_data)
