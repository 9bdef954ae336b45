# SPDX-License-Identifier: Apache-2.0
"""Corpora: every kind of data, what is held out, bits per byte, reference entropies, errors."""

from __future__ import annotations

import math
import shutil
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.train.codecs import (
    FILE,
    Bytes,
    Pieces,
    decode_text,
    digest_of_codec,
    encode_text,
    saved_codec,
)
from shardwise.train.corpus import (
    Corpus,
    Document,
    count_pairs,
    digest_of,
    hold_out,
    references_of,
    stdlib_documents,
)
from shardwise.train.sources import load_corpus, sources_of
from shardwise.train.tokens import (
    DataError,
    MissingExtraError,
    open_tokens,
    write_tokens,
)

SENTENCE = b"the quick brown fox jumps over the lazy dog\n"


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus("stdlib")


def texts(folder: Path, count: int = 30) -> Path:
    """Files of different lengths, in two directories."""
    for index in range(count):
        path = folder / ("a" if index % 2 else "b") / f"{index}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(f"file {index}\n".encode() + SENTENCE * (1 + index % 5))
    return folder


# -------------------------------------------------------------------------------------- holding out


@given(st.lists(st.integers(2, 400), min_size=1, max_size=60), st.sampled_from([0.05, 0.2, 0.5]))
def test_every_byte_is_in_one_part(sizes: list[int], fraction: float) -> None:
    documents = [
        Document(f"name {i}", bytes([i % 250]) * (size - 1) + b"\n") for i, size in enumerate(sizes)
    ]
    train, held = hold_out(documents, fraction)
    both = dict.fromkeys((one.name for one in documents), b"")
    for document in train + held:
        both[document.name.removesuffix(" (end)")] += document.data
    assert both == {one.name: one.data for one in documents}
    wanted, size = fraction * sum(sizes), sum(len(one.data) for one in held)
    assert 0 < size and 0.5 * wanted <= size <= 2 * wanted + 1
    assert sum(len(one.data) for one in train) > 0


def test_documents_are_held_out_whole_and_a_long_one_gives_its_end_at_a_line() -> None:
    documents = [Document(f"{i}.py", SENTENCE * 10) for i in range(200)]
    train, held = hold_out(documents, 0.05)
    assert len(held) == 10 and len(train) == 190
    more = documents + [Document("new.py", SENTENCE * 10)]
    names = {one.name for one in held}
    assert len(names & {one.name for one in hold_out(more, 0.05)[1]}) >= 9
    assert hold_out(documents[::-1], 0.05)[1] == held[::-1]  # the order of files does not matter
    document = Document("book", SENTENCE * 1000)
    (head,), (tail,) = hold_out([document], 0.05)
    assert head.data + tail.data == document.data
    assert tail.data.startswith(b"the quick") and 0.049 < len(tail.data) / 44_000 < 0.052
    for fraction in (0.0, 0.6, -1.0):
        with pytest.raises(DataError, match=r"more than 0 and at most 0\.5"):
            hold_out([document], fraction)


def test_the_digest_knows_names_lengths_and_contents() -> None:
    one = [Document("a", b"xy"), Document("b", b"z")]
    others = [
        [Document("a", b"x"), Document("b", b"yz")],
        [Document("a", b"xy"), Document("c", b"z")],
        [Document("a", b"xy"), Document("b", b"Z")],
        [Document("b", b"z"), Document("a", b"xy")],
    ]
    assert len({digest_of(documents) for documents in [one, *others]}) == 5


# ------------------------------------------------------------------------------------ the stdlib


def test_the_standard_library_is_a_corpus(stdlib: Corpus) -> None:
    assert stdlib.vocab_size == 257 and stdlib.unit == "bits/byte"
    assert stdlib.train_bytes is not None and stdlib.held_out_bytes is not None
    assert 5e6 < stdlib.train_bytes < 2e7
    share = stdlib.held_out_bytes / (stdlib.train_bytes + stdlib.held_out_bytes)
    assert 0.04 < share < 0.07
    again = load_corpus("stdlib")
    assert again.sha256 == stdlib.sha256 and len(stdlib.sha256) == 64
    assert np.array_equal(again.train, stdlib.train)
    assert np.array_equal(again.held_out, stdlib.held_out)
    assert "import" in decode_text(stdlib.codec, stdlib.held_out[:20_000])
    names = {one.name for one in stdlib_documents()}
    assert "stdlib/json/decoder.py" in names
    assert not any("/test/" in name or "site-packages" in name for name in names)
    # Held out by file: the end-of-document token parts what was trained on from what was not.
    assert stdlib.held_out[-1] == stdlib.train[-1] == 256
    found = references_of(stdlib)
    assert 8 > found["unigram"] > found["bigram"] > found["zlib"] > 1
    assert found["unigram"] - found["bigram"] > 0.5


@pytest.mark.parametrize("folder", ["python311.zip", "compiled"])
def test_a_standard_library_without_sources_says_so(tmp_path: Path, folder: str) -> None:
    where = tmp_path / folder
    if where.suffix == ".zip":
        where.write_bytes(b"PK")
    else:
        (where / "__pycache__").mkdir(parents=True)
        (where / "os.pyc").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"zipped|only compiled") as caught:
        list(stdlib_documents(where))
    assert "--data" in str(caught.value) and str(where) in str(caught.value)


# -------------------------------------------------------------------------------------------- files


def test_files_directories_and_patterns(tmp_path: Path) -> None:
    folder = texts(tmp_path / "data")
    (folder / ".hidden").write_bytes(SENTENCE)
    (folder / "a" / "empty.txt").write_bytes(b"")
    (folder / "a" / "picture.png").write_bytes(b"\x89PNG\0\0" + SENTENCE)
    whole = load_corpus(str(folder))
    assert load_corpus(str(folder) + "/").sha256 == whole.sha256
    expected = sum(len(path.read_bytes()) for path in folder.rglob("*.txt"))
    assert (whole.train_bytes or 0) + (whole.held_out_bytes or 0) == expected
    assert len(whole.train) + len(whole.held_out) == expected + 30
    some = load_corpus(f"{folder}/b/*.txt")
    assert some.train_bytes is not None and some.train_bytes < expected / 1.5
    same = load_corpus(f"{folder}/**/*.txt")
    assert same.sha256 == whole.sha256 and np.array_equal(same.train, whole.train)
    moved = tmp_path / "elsewhere" / "data"
    shutil.copytree(folder, moved)
    assert load_corpus(str(moved)).sha256 == whole.sha256  # where data lie is not what they are
    assert load_corpus(f"{moved}/*/*.txt").sha256 == whole.sha256
    assert load_corpus(f"{folder}/**/**/*.txt").sha256 == whole.sha256, "each file once"
    single = load_corpus(str(folder / "a" / "9.txt"))
    assert decode_text(single.codec, single.train).startswith("file 9\nthe quick")
    assert single.held_out_bytes is not None and single.held_out_bytes >= 1


def test_text_that_is_trained_on_and_held_out_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = texts(tmp_path / "data")
    for spec in (f"{folder},{folder}/a/1.txt", f"{folder}/a/*:0.5,{folder}/*/1*.txt:0.5"):
        with pytest.raises(DataError, match=r"1\.txt is in '.*' and in '.*': name it once"):
            load_corpus(spec)
    write_tokens(tmp_path / "t.bin", np.arange(99), 257)
    with pytest.raises(DataError, match=r"t\.bin is in "):
        load_corpus(f"{tmp_path}/t.bin,{tmp_path}/*.bin")
    load_corpus(str(folder))
    assert not caplog.records
    shutil.copytree(folder, tmp_path / "data" / "copies")
    load_corpus(str(folder), held_out=0.3)
    assert "documents that are held out" in caplog.text and "are also trained on" in caplog.text


def test_data_that_is_not_there_or_empty_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text('{"text": "words"}\n' * 99)
    load_corpus(str(tmp_path / "lines"))
    assert "a.jsonl is read as plain text, with its JSON" in caplog.text
    shutil.rmtree(tmp_path / "lines")
    with pytest.raises(DataError, match=r"names no data.*stdlib.*hf:NAME"):
        load_corpus(str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match="matches nothing"):
        load_corpus(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match=r"holds no text \(no file\)"):
        load_corpus(str(tmp_path))
    (tmp_path / "x.dat").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"\(1 binary \(x.dat\), 1 empty \(empty.txt\)\)"):
        load_corpus(str(tmp_path))
    with pytest.raises(DataError, match="no such file"):
        load_corpus(str(tmp_path / "none.bin"))
    (tmp_path / "bad.bin").write_bytes(b"nonsense" * 10)
    with pytest.raises(DataError, match="no token file"):
        load_corpus(str(tmp_path / "bad.bin"))
    (tmp_path / "short.txt").write_bytes(b"x")
    with pytest.raises(DataError, match="at least 2"):
        load_corpus(str(tmp_path / "short.txt"))
    (tmp_path / "short.txt").write_bytes(SENTENCE)  # the last token and the document's end
    with pytest.raises(DataError, match=r"2 tokens for held_out.*a larger held_out"):
        load_corpus(str(tmp_path / "short.txt"), held_out=1e-9)


# -------------------------------------------------------------------------------------- token files


def test_token_files_are_mapped_and_cut_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    tokens = np.random.default_rng(0).integers(0, 5000, 10_000)
    header = write_tokens(path, tokens, 5000, num_bytes=42_000)
    corpus = load_corpus(str(path))
    assert isinstance(corpus.train, np.memmap)
    assert np.array_equal(np.concatenate((corpus.train, corpus.held_out)), tokens)
    assert len(corpus.held_out) == 500 and corpus.vocab_size == 5000
    assert corpus.sha256 == header.sha256
    assert corpus.bytes_per_token() == pytest.approx(4.2)
    assert corpus.bits_per_byte(math.log(2) * 4.2) == pytest.approx(1.0)
    assert corpus.codec is None and references_of(corpus) == {}
    with pytest.raises(DataError, match="holds tokens already"):
        load_corpus(str(path), tokenizer="bpe:300")


def test_a_file_of_bytes_is_text_again(tmp_path: Path, stdlib: Corpus) -> None:
    path = tmp_path / "bytes"  # known by its first bytes, whatever its name
    write_tokens(path, stdlib.train[:200_000], 257, tokenizer="bytes")
    corpus = load_corpus(str(path))
    assert decode_text(corpus.codec, encode_text(corpus.codec, "déjà vu")) == "déjà vu"
    assert references_of(corpus)
    assert corpus.bytes_per_token("train") == pytest.approx(1, abs=1e-3)
    write_tokens(path, np.zeros(10, int), 300, tokenizer="bytes")
    with pytest.raises(DataError, match="vocab_size=300 and bytes have 257"):
        load_corpus(str(path))


def test_many_files_are_one_corpus_and_the_end_of_each_is_held_out(tmp_path: Path) -> None:
    for number in range(3):
        write_tokens(
            tmp_path / f"t-{number}.bin", np.arange(100) + 100 * number, 300, num_bytes=200
        )
    corpora = [load_corpus(spec) for spec in (str(tmp_path), f"{tmp_path}/t-*.bin")]
    corpora.append(load_corpus(",".join(f"{tmp_path}/t-{number}.bin" for number in range(3))))
    for corpus in corpora:
        assert len(corpus.train) == 285 and len(corpus.held_out) == 15 and not corpus.shares
        assert corpus.held_out[:].tolist() == [*range(95, 100), *range(195, 200), *range(295, 300)]
        assert corpus.train[90:100].tolist() == [90, 91, 92, 93, 94, 100, 101, 102, 103, 104]
        at = np.array([[0, 94], [95, 284]])
        assert corpus.train[at].tolist() == [[0, 94], [100, 294]]
        assert corpus.bytes_per_token() == 2
    assert corpora[0].sha256 == corpora[1].sha256
    write_tokens(tmp_path / "t-3.bin", np.arange(9), 400)
    with pytest.raises(DataError, match=r"t-3.bin has another tokenizer than .*t-0.bin"):
        load_corpus(str(tmp_path))


def test_sources_have_weights(tmp_path: Path) -> None:
    a, b = tmp_path / "a.bin", tmp_path / "b.bin"
    write_tokens(a, np.zeros(1000, int), 300, num_bytes=1000)
    write_tokens(b, np.ones(400, int), 300, num_bytes=1600)
    write_tokens(c := tmp_path / "c.bin", np.ones(400, int), 7)
    corpus = load_corpus(f"{a}:3,{b}:1", held_out=0.1)
    assert corpus.shares == ((900, 0.75), (360, 0.25))
    assert corpus.bytes_per_token("train") == 0.75 * 1 + 0.25 * 4, "as they are drawn"
    held = corpus.held_out[:]
    assert (np.count_nonzero(held == 0), np.count_nonzero(held == 1)) == (100, 33), "as weighted"
    other = load_corpus(f"{a}:1,{b}:1", held_out=0.1)
    assert other.sha256 != corpus.sha256, "another order of samples is other data"
    text = texts(tmp_path / "text")
    mixed = load_corpus(f"{text}:0.5,stdlib:0.5")
    assert [weight for _, weight in mixed.shares] == [0.5, 0.5]
    for spec, why in {
        f"{a}:1,{b}": "every source a positive weight",
        f"{a}:1,{b}:-1": "every source a positive weight",
        f"{a},{a}": "twice",
        f"{a},stdlib": "both tokens and text",
        f"{a},{c}": r"different tokenizers \(vocabularies of 300 in .*, 7 in .*c.bin\)",
    }.items():
        with pytest.raises(DataError, match=why):
            load_corpus(spec)
    assert [*sources_of("hf:a:b")] == ["hf:a:b"]


def test_tokens_of_unknown_text_have_bits_per_token(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", np.arange(1000), 1000)
    corpus = load_corpus(str(tmp_path / "a.bin"))
    assert len(corpus.train) == 950 and corpus.vocab_size == 1000
    assert corpus.unit == "bits/token" and corpus.bytes_per_token() is None
    assert corpus.field == "bits_per_token", "in events: no picture calls them bits per byte"
    assert corpus.bits_per_byte(math.log(2)) == pytest.approx(1.0)


# -------------------------------------------------------------------------------------- byte pairs


def test_byte_pairs_keep_bits_per_byte_and_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    folder, cache = texts(tmp_path / "data"), tmp_path / "cache"
    plain = load_corpus(str(folder))
    corpus = load_corpus(str(folder), tokenizer="bpe:290", cache=cache)
    assert corpus.sha256 == plain.sha256
    assert (corpus.train_bytes, corpus.held_out_bytes) == (plain.train_bytes, plain.held_out_bytes)
    assert 257 < corpus.vocab_size <= 290 and corpus.codec is not None
    assert corpus.bytes_per_token() > 1.5  # type: ignore[operator]
    assert decode_text(corpus.codec, corpus.train) == decode_text(plain.codec, plain.train)
    assert references_of(corpus) == references_of(plain)
    assert decode_text(corpus.codec, encode_text(corpus.codec, "the fox")) == "the fox"
    # Of two tokens of 1 and 3 bytes, one nat each is 2/4 nats a byte, whatever the mean length is.
    scored = np.array([*encode_text(corpus.codec, "~"), *encode_text(corpus.codec, "the")])
    assert len(scored) == 2
    assert corpus.bits_per_byte(math.log(2), scored=scored) == pytest.approx(0.5)
    assert corpus.bits_per_byte(math.log(2), scored=corpus.held_out) == pytest.approx(
        corpus.bits_per_byte(math.log(2))
    )

    made = [one.name for one in cache.iterdir()]
    assert len(made) == 1 and made[0].startswith("bpe-290-")
    monkeypatch.setattr(type(corpus.codec), "train", None)  # nobody trains again
    again = load_corpus(str(folder), tokenizer="bpe:290", cache=cache)
    assert np.array_equal(again.train, corpus.train) and isinstance(again.train, np.memmap)
    assert open_tokens(cache / made[0] / "train.bin")[1].num_bytes == corpus.train_bytes
    other_run = load_corpus(str(folder), tokenizer="bpe:290", cache=tmp_path / "other")
    assert np.array_equal(other_run.train, corpus.train)
    with pytest.raises(TypeError):  # other data need other pieces
        load_corpus(str(folder / "a"), tokenizer="bpe:290", cache=cache)


def test_text_is_made_into_pretrained_pieces_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    folder = texts(tmp_path / "data")
    learned = load_corpus(str(folder), tokenizer="bpe:290").codec
    assert isinstance(learned, Pieces)
    learned.tokenizer.add_special_tokens(["<|endoftext|>"])
    learned.save(tmp_path / "tokenizer.json")
    options = {"tokenizer": str(tmp_path / "tokenizer.json")}
    plain = load_corpus(str(folder), **options)
    first = load_corpus(str(folder), **options, cache=tmp_path / "first")
    monkeypatch.setattr(Pieces, "encode", None)  # nobody encodes again
    for cache in ("first", "second"):
        again = load_corpus(str(folder), **options, cache=tmp_path / cache)
        assert np.array_equal(again.train, plain.train) and again.sha256 == plain.sha256
    assert np.array_equal(first.held_out, plain.held_out)
    learned.tokenizer.add_tokens(["fox"])
    learned.save(tmp_path / "tokenizer.json")
    with pytest.raises(TypeError):  # another tokenizer makes other tokens
        load_corpus(str(folder), **options, cache=tmp_path / "second")


def test_without_a_cache_the_same_pieces_are_learned(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = texts(tmp_path / "data")
    corpora = [
        load_corpus(str(folder), tokenizer="bpe:280", cache=cache)
        for cache in (None, tmp_path / "cache", None)
    ]
    assert all(np.array_equal(corpora[0].train, one.train) for one in corpora)


def test_missing_packages_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokenizers", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"shardwise\[bpe\]"):
        load_corpus(str(texts(tmp_path)), tokenizer="bpe:300")
    with pytest.raises(MissingExtraError, match=r"shardwise\[datasets\]"):
        load_corpus("hf:some/dataset")


# -------------------------------------------------------------------------------------- pretrained


def test_a_pretrained_tokenizer_reads_text_and_goes_with_its_tokens(tmp_path: Path) -> None:
    package = pytest.importorskip("tokenizers")
    learned = Pieces.train([b"the fox and the dog " * 50], 270)
    given = tmp_path / "given"
    given.mkdir()
    for name, contents in learned.files().items():
        (given / name).write_bytes(contents)
    folder = texts(tmp_path / "data")
    corpus = load_corpus(str(folder), tokenizer=str(given))
    plain = load_corpus(str(folder))
    assert corpus.codec is not None and corpus.codec.end == learned.end
    assert decode_text(corpus.codec, corpus.train) == decode_text(plain.codec, plain.train)
    assert corpus.train_bytes == plain.train_bytes and corpus.sha256 != plain.sha256
    assert (
        decode_text(corpus.codec, encode_text(corpus.codec, "<|endoftext|>")) == "<|endoftext|>"
    ), "text, not an end"
    # The files of a codec make the same codec, for transformers too.
    again = package.Tokenizer.from_file(str(given / "tokenizer.json"))
    assert again.encode("the fox<|endoftext|>").ids == [
        *encode_text(corpus.codec, "the fox"),
        learned.end,
    ]
    digest = digest_of_codec(corpus.codec)
    write_tokens(given / "t.bin", corpus.train, 270, tokenizer=f"tokenizer.json:{digest}")
    opened = load_corpus(str(given / "t.bin"))
    assert decode_text(opened.codec, opened.train[:50]) == decode_text(
        corpus.codec, corpus.train[:50]
    )
    other = tmp_path / "other.json"
    other.write_bytes(Pieces.train([b"other text " * 9], 260).files()[FILE])
    with pytest.raises(DataError, match=r"other\.json .* made with another tokenizer"):
        load_corpus(str(given / "t.bin"), tokenizer=str(other))
    for number, last in enumerate((corpus.train[-1], 299)):  # nobody wrote down their tokenizer
        tokens = np.append(corpus.train[:-1], last)
        write_tokens(tmp_path / f"{number}.bin", tokens, 300)
    named = {"tokenizer": str(given / "tokenizer.json"), "held_out": 0.1}
    (tmp_path / "more").mkdir()
    for name in ("a.bin", "b.bin"):
        shutil.copy(tmp_path / "0.bin", tmp_path / "more" / name)
    one, two = (load_corpus(str(tmp_path / name), **named) for name in ("0.bin", "more"))
    assert one.train_bytes and two.train_bytes == 2 * one.train_bytes
    with pytest.raises(DataError, match=r"tokenizer.json: token \d+ is 299, outside 0"):
        load_corpus(str(tmp_path / "1.bin"), **named)
    shutil.copy(other, given / "tokenizer.json")
    with pytest.raises(DataError, match=r"is not the tokenizer that t\.bin was made with"):
        load_corpus(str(given / "t.bin"))
    (given / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        load_corpus(str(folder), tokenizer=str(given))
    with pytest.raises(DataError, match="there is no file"):
        load_corpus(str(folder), tokenizer=str(tmp_path / "none.json"))


def test_bytes_have_the_files_of_a_tokenizer_too(tmp_path: Path) -> None:
    package = pytest.importorskip("tokenizers")
    (tmp_path / FILE).write_bytes(Bytes().files()[FILE])
    made = package.Tokenizer.from_file(str(tmp_path / FILE))
    text = "déjà vu,\n  x\t\0"
    assert (
        made.encode(text).ids == list(text.encode()) and made.decode(made.encode(text).ids) == text
    )
    assert made.token_to_id("<|endoftext|>") == 256
    assert isinstance(saved_codec(tmp_path), Bytes)


# -------------------------------------------------------------------------------------- entropies


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
    monkeypatch.setattr("shardwise.train.corpus.CHUNK", 50)  # pairs across chunks count
    train, held = SENTENCE * 3 + b"some more", b"the dog jumps over a fox" * 5
    codec = Bytes()
    corpus = Corpus(
        name="tiny",
        train=codec.encode([train]),
        held_out=codec.encode([held]),
        vocab_size=257,
        sha256="",
        codec=codec,
        train_bytes=len(train),
        held_out_bytes=len(held),
    )
    found = references_of(corpus)
    expected = slow_bits(train, held)
    assert (found["unigram"], found["bigram"]) == pytest.approx(expected)
    assert found["zlib"] == 8 * len(zlib.compress(held, 9)) / len(held)
    assert count_pairs(corpus.train).sum() == len(train)


def test_text_to_show_survives_anything(stdlib: Corpus) -> None:
    assert decode_text(stdlib.codec, [104, 105, 256, 120]) == "hi\n\nx"
    assert decode_text(stdlib.codec, [255, 104, 300]) == "\ufffdh"
    assert decode_text(stdlib.codec, []) == ""
    assert encode_text(stdlib.codec, "hi") == [104, 105]
