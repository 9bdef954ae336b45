# SPDX-License-Identifier: Apache-2.0
"""Token files: what is written is read, what is damaged is refused by name; texts become tokens,
once, and no byte is lost; what a run gets of them."""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.train import tokenise
from shardwise.train.data import Corpus, load_corpus
from shardwise.train.tokenise import (
    MissingExtraError,
    Tokenizer,
    byte_tokenizer,
    find_texts,
    held_out_files,
    learned_size,
    learned_tokenizer,
    make_tokens,
    open_tokenizer,
    references_of,
    require,
)
from shardwise.train.tokens import (
    INFO,
    TOKENIZER,
    TOKENS,
    DataError,
    open_tokens,
    read_info,
    token_folder,
    whole_folder,
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
    symbols = codec.symbols(tokens)
    parts = np.split(symbols, np.flatnonzero(symbols == 256) + 1)
    assert len(parts[-1]) == 0 and all(part[-1] == 256 for part in parts[:-1])
    return [part[:-1].astype(np.uint8).tobytes() for part in parts[:-1]]


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
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"dtype": "uint32"}, "dtype"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"count": 999}, "1000 bytes|has 2000 bytes"),
        ({"count": -1}, "whole numbers"),
        ({"count": 1e3}, "whole numbers"),
        ({"held_out_begins": 1001}, "held_out_begins"),
        ({"end_token": 300}, "end_token"),
        ({"sha256": "x"}, "sha256"),
        ({"sha256": "0" * 64}, "other contents"),
        ({"token_bytes": [1, 2]}, "token_bytes"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_a_description_of_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = written(tmp_path)
    values = json.loads((folder / INFO).read_bytes())
    (folder / INFO).write_text(json.dumps(values | change))
    with pytest.raises(DataError, match=words):
        open_tokens(folder)


def test_damage_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path)
    whole = (folder / TOKENS).read_bytes()
    (folder / TOKENS).write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"tokens\.bin has 1998 bytes"):
        open_tokens(folder)
    (folder / TOKENS).write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    with pytest.raises(DataError, match="other contents"):
        open_tokens(folder)
    (folder / TOKENS).unlink()
    with pytest.raises(DataError, match="missing"):
        open_tokens(folder)
    (folder / INFO).write_text("[")
    with pytest.raises(DataError, match="cannot be used"):
        open_tokens(folder)


def test_files_without_a_description_are_refused_with_the_command(tmp_path: Path) -> None:
    before, plain = tmp_path / "before.bin", tmp_path / "plain.bin"
    before.write_bytes(b"shrdtoks" + bytes(5000))
    plain.write_bytes(bytes(5000))
    with pytest.raises(DataError, match=r"version before.*shardwise data"):
        token_folder(before)
    with pytest.raises(DataError, match=r"no tokens\.json.*shardwise data"):
        load_corpus(str(plain))
    assert token_folder(texts(tmp_path / "texts")) is None


# ------------------------------------------------------------------------------ tokenizers


def test_bytes_come_back() -> None:
    codec = byte_tokenizer()

    @given(st.lists(st.binary(max_size=40), max_size=5))
    def check(documents: list[bytes]) -> None:
        tokens = codec.encode(documents)
        assert tokens.dtype == np.uint16
        assert text_of(codec, tokens) == documents
        assert codec.num_bytes(tokens) == sum(map(len, documents))

    check()
    assert codec.decode([104, 105, 256, 120]) == "hi\n\nx"
    assert codec.decode([255, 104, 300]) == "\ufffdh" and codec.decode([]) == ""


@pytest.fixture(scope="module")
def byte_pairs() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return learned_tokenizer([SENTENCE * 20, b"def cat(self, mat):\n    return self.sat\n"], 300)


def test_byte_pairs_come_back(byte_pairs: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    found = byte_pairs.encode([SENTENCE * 9])
    assert len(found) < 9 * len(SENTENCE) / 3, "pieces are longer than a byte"
    assert text_of(byte_pairs, found) == [SENTENCE * 9] and not caplog.records
    byte_pairs.encode(["déjà vu".encode("latin-1")])
    assert r"text is not UTF-8 (b'd\xe9j\xe0 vu')" in caplog.text

    @settings(max_examples=50)
    @given(st.lists(st.binary(max_size=40), max_size=5))
    def check(documents: list[bytes]) -> None:
        tokens = byte_pairs.encode(documents)
        assert len(tokens) == 0 or tokens.max() < byte_pairs.vocab_size
        # What is not UTF-8 is read as U+FFFD; lengths are counted after that.
        expected = [text.decode("utf-8", "replace").encode() for text in documents]
        assert text_of(byte_pairs, tokens) == expected
        assert byte_pairs.num_bytes(tokens) == sum(map(len, expected))

    check()
    for text in (b"<|endoftext|>", b"<document>", b"[SEP]", b"\xc4\xa0"):
        tokens = byte_pairs.encode([text])
        assert np.count_nonzero(tokens == byte_pairs.end) == 1 and tokens[-1] == byte_pairs.end


def test_the_files_of_a_tokenizer_make_it_again(tmp_path: Path, byte_pairs: Tokenizer) -> None:
    package = pytest.importorskip("tokenizers")
    for number, codec in enumerate((byte_tokenizer(), byte_pairs)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, contents in codec.files.items():
            (folder / name).write_bytes(contents)
        for again in (open_tokenizer(folder), open_tokenizer(folder / TOKENIZER)):
            assert (again.digest, again.end, again.vocab_size) == (
                codec.digest,
                codec.end,
                codec.vocab_size,
            )
            assert np.array_equal(again.encode([SENTENCE]), codec.encode([SENTENCE]))
        theirs = package.Tokenizer.from_file(str(folder / TOKENIZER))
        text = "déjà vu,\n  x\t\0"
        assert theirs.encode(text).ids == codec.encode([text.encode()])[:-1].tolist()
        assert theirs.token_to_id("<|endoftext|>") == codec.end
    (folder / "tokenizer_config.json").unlink()
    assert open_tokenizer(folder).end == byte_pairs.end, "by its usual spelling"
    (folder / TOKENIZER).write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        open_tokenizer(folder)


def test_tokenizers_are_named_and_missing_packages_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert learned_size("bpe:4096") == 4096 and learned_size("bytes") is None
    for name in ("bpe", "bpe:", "bpe:x", "bpe:256"):
        with pytest.raises(DataError, match="at least 257 tokens"):
            learned_size(name)
    for name in ("bytes:3", "words", "none.json"):
        with pytest.raises(DataError, match=r"use bytes, bpe:SIZE .*, or the path of"):
            open_tokenizer(name)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardwise\[extra\]'"):
        require("a_package_that_does_not_exist", "extra")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardwise\[data\]'"):
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
    os.rename(folder, tmp_path / "moved")
    assert load_corpus(str(tmp_path / "moved")).sha256 == corpus.sha256
    assert len([*cache.iterdir()]) == 1, "moved texts are the same texts"
    (tmp_path / "moved" / "3.txt").write_bytes(SENTENCE * 7)  # another length
    assert load_corpus(str(tmp_path / "moved")).sha256 != corpus.sha256
    make_tokens([str(tmp_path / "moved")], held_out=0.2)
    assert len([*cache.iterdir()]) == 3, "the part that is held out belongs to the key"
    (made / TOKENS).write_bytes(b"")
    with pytest.raises(DataError, match="copy or make it again"):
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


def test_the_standard_library_is_a_corpus() -> None:
    found = {text.name: text for text in find_texts(["stdlib"])}
    assert "stdlib/abc.py" in found and "stdlib/json/decoder.py" in found
    assert not [name for name in found if "/test/" in name or "site-packages" in name]
    assert 5e6 < sum(text.size for text in found.values()) < 2e7
    more = {text.name for text in find_texts(["stdlib+torch"])}
    assert {*found} < more and "torch/nn/modules/linear.py" in more


def test_a_python_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "abc.pyc").write_bytes(b"x")
    monkeypatch.setattr(tokenise.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no readable sources"):
        find_texts(["stdlib"])


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    folder = texts(tmp_path / "texts", 5)
    (folder / "below").mkdir()
    (folder / "below" / "5.txt").write_bytes(SENTENCE)
    (folder / ".hidden").write_bytes(SENTENCE)
    (folder / "empty.txt").write_bytes(b"")
    names = [f"{n}.txt" for n in range(5)]
    assert [text.name for text in find_texts([str(folder)])] == [*names, "below/5.txt"]
    assert [text.name for text in find_texts([f"{folder}/*.txt"])] == names
    assert len(find_texts([f"{folder}/**/*.txt"])) == 6
    with pytest.raises(DataError, match="several of the sources"):
        find_texts([str(folder), str(folder / "3.txt")])
    for nothing in (tmp_path / "none", folder / "empty.txt", f"{folder}/*.md"):
        with pytest.raises(DataError, match="names no data"):
            find_texts([str(nothing)])
    for data in (gzip.compress(SENTENCE), SENTENCE.decode().encode("utf-16"), b"a\0b"):
        (folder / "x.txt").write_bytes(data)
        with pytest.raises(DataError, match=r"x\.txt is no text in UTF-8"):
            make_tokens([str(folder)])


def test_rows_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"body": SENTENCE.decode() * (n + 1), "id": n} for n in range(60)]
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
        found = text_of(byte_tokenizer(), tokens)
        assert sorted(found) == sorted(row["body"].encode() for row in rows)
        assert 0 < info.count - info.held_out_begins < 0.5 * info.count
        digests.add(info.sha256)
        assert make_tokens([place], out, column="body", held_out=0.2) == out, "made once"
        with pytest.raises(DataError, match="holds something else"):
            make_tokens([place], out, column="body", held_out=0.3)
        with pytest.raises(DataError, match=r"no text under 'text' \(keys: body, id\)"):
            make_tokens([place], column="text")
        with pytest.raises(DataError, match=r"shardwise data .*--out"):
            load_corpus(place)
    assert len(digests) == 1, "the same rows in any container are the same tokens"
    (tmp_path / "a.jsonl").write_text("{")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:-9])
    for source in sources[:2]:
        with pytest.raises(DataError, match="cannot be read"):
            make_tokens([str(tmp_path / source)], column="body")


def test_copies_of_a_row_are_on_one_side(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{SENTENCE.decode()}{n % 30}"}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    tokens, info = open_tokens(make_tokens([str(tmp_path / "a.jsonl")], held_out=0.2))
    train = {*text_of(byte_tokenizer(), tokens[: info.held_out_begins])}
    held = {*text_of(byte_tokenizer(), tokens[info.held_out_begins :])}
    assert held and train and not train & held and len(train | held) == 30


def test_pieces_are_learned_from_what_is_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = texts(tmp_path / "texts")
    corpus = load_corpus(str(folder), tokenizer="bpe:300")
    plain = load_corpus(str(folder))
    codec = corpus.tokenizer()
    assert codec is not None and corpus.vocab_size <= 300
    for tokens, symbols in (
        (corpus.parts[0].tokens, plain.parts[0].tokens),
        (corpus.held_out, plain.held_out),
    ):
        assert np.array_equal(codec.symbols(tokens), symbols)
    # A loss per byte of one is a loss per byte of the other.
    scale = len(plain.held_out) / len(corpus.held_out)
    assert corpus.bits_per_byte(scale, corpus.held_out) == pytest.approx(
        plain.bits_per_byte(1.0, plain.held_out)
    )
    assert corpus.info.references == plain.info.references
    (tmp_path / "few.txt").write_text("x")
    with pytest.raises(DataError, match="too few"):
        make_tokens([str(tmp_path / "few.txt")])


def test_two_writers_of_one_folder_leave_one_whole(tmp_path: Path) -> None:
    folder = written(tmp_path)
    before = (folder / TOKENS).read_bytes()
    with whole_folder(folder) as partial:
        (partial / TOKENS).write_bytes(b"another")
    assert (folder / TOKENS).read_bytes() == before and len([*tmp_path.iterdir()]) == 1
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "next") as partial:
        raise KeyboardInterrupt
    assert not (tmp_path / "next").exists() and len([*tmp_path.iterdir()]) == 1


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
    assert corpus.train_rate == pytest.approx(0.75 * 1 + 0.25 * 3)
    assert corpus.bits_per_byte(math.log(2), corpus.held_out) == pytest.approx(133 / (100 + 99))
    plain = load_corpus(f"{tmp_path}/a,{tmp_path}/b")
    assert [part.weight for part in plain.parts] == [0.2, 0.8] and plain.sha256 != corpus.sha256
    scored = load_corpus(f"{tmp_path}/a", eval_data=f"{tmp_path}/b")
    assert len(scored.held_out) == 8000 and (scored.held_out == 2).all()
    assert len(scored.parts[0].tokens) == 1900
    for spec, words in (
        (f"{tmp_path}/a:1,{tmp_path}/b", "positive weight"),
        (f"{tmp_path}/a:0,{tmp_path}/b:1", "positive weight"),
        (f"{tmp_path}/a,{tmp_path}/a", "twice"),
        (f"{tmp_path}/a,", "empty source"),
    ):
        with pytest.raises(DataError, match=words):
            load_corpus(spec)
    write_tokens(tmp_path / "c", np.full(2000, 1), 10)
    with pytest.raises(DataError, match="another tokenizer"):
        load_corpus(f"{tmp_path}/a,{tmp_path}/c")
    with pytest.raises(DataError, match="another tokenizer"):
        load_corpus(f"{tmp_path}/a", eval_data=f"{tmp_path}/c")


def test_tokens_of_unknown_text_have_bits_per_token(tmp_path: Path) -> None:
    corpus: Corpus = load_corpus(str(written(tmp_path)))
    assert (corpus.unit, corpus.field, corpus.folder) == ("bits/token", "bits_per_token", None)
    assert corpus.bits_per_byte(math.log(2), corpus.held_out) == pytest.approx(1.0)
    assert corpus.tokenizer() is None and corpus.info.end_token is None
    write_tokens(tmp_path / "few", np.ones(3, int), 9)
    with pytest.raises(DataError, match="at least 2 are needed"):
        load_corpus(str(tmp_path / "few"))


def test_another_tokenizer_beside_tokens_is_refused(tmp_path: Path) -> None:
    folder = make_tokens([str(texts(tmp_path / "texts"))], tmp_path / "made")
    assert load_corpus(str(folder)).tokenizer() is not None
    (folder / TOKENIZER).write_text("{}")
    with pytest.raises(DataError, match="not the tokenizer of the tokens"):
        load_corpus(str(folder))
    (folder / TOKENIZER).unlink()
    assert load_corpus(str(folder)).tokenizer() is None


def slow_bits(train: bytes, held: bytes) -> tuple[float, float]:
    """Unigram and bigram scores, one symbol at a time, by definition."""
    symbols = [*train, 256]
    tested = [*held, 256]
    after: dict[int, dict[int, int]] = {}
    for a, b in pairwise(symbols):
        after.setdefault(a, {})[b] = after.get(a, {}).get(b, 0) + 1
    counts = [1.0] * 257
    for b in symbols[1:]:
        counts[b] += 1
    single = [count / sum(counts) for count in counts]
    unigram = bigram = 0.0
    for a, b in pairwise(tested):
        row = after.get(a, {})
        unigram -= math.log2(single[b])
        bigram -= math.log2((row.get(b, 0) + single[b]) / (sum(row.values()) + 1))
    return unigram / len(held), bigram / len(held)


def test_references_are_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "CHUNK", 50)  # pairs across chunks count
    train, held = SENTENCE * 3 + b"some more", b"the dog jumps over a fox" * 5
    codec = byte_tokenizer()
    found = references_of(codec, codec.encode([train]), codec.encode([held]))
    assert (found["unigram"], found["bigram"]) == pytest.approx(slow_bits(train, held))
    assert found["zlib"] == 8 * len(zlib.compress(held, 9)) / len(held)


def test_the_description_says_what_bits_per_byte_needs(tmp_path: Path) -> None:
    folder = make_tokens([str(texts(tmp_path / "texts"))], tmp_path / "made")
    tokens, info = open_tokens(folder)
    assert read_info(folder) == info and info.end_token == 256
    ends = np.count_nonzero(tokens == 256)
    assert info.train_bytes is not None and info.held_out_bytes is not None
    assert info.train_bytes + info.held_out_bytes + ends == info.count
    assert info.token_bytes == [1] * 256 + [0]
