# SPDX-License-Identifier: Apache-2.0
"""Streaming: a dataset whose rows are read while a run trains on them.

    rows --tokens-->  volume 0 | volume 1 | volume 2 | ...    files of equal length in the cache
    epochs of a run   0        | 1        | 2        | ...    the windows of each are shuffled

A run begins when volume 0 is complete. One process of a machine, the first that locks the folder,
writes the other volumes ahead of the run, in a thread. A rank that needs a volume waits until it is
complete. Rows are chosen to be held out by a hash of their number. Those among the rows of volume 0
are the held-out text; later ones are left out. Volumes stay in the cache, and a resumed run
continues to read after the last volume. At the end of the dataset, the complete volumes are drawn
again from the first on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from shardwise.notices import warn_once
from shardwise.train.codecs import (
    Codec,
    Pieces,
    codec_named,
    encode_each,
    num_bytes,
    open_codec,
    saved_codec,
    write_codec,
)
from shardwise.train.corpus import Document, dataset_documents
from shardwise.train.tokens import (
    DataError,
    Tokens,
    TokenWriter,
    open_tokens,
    read_header,
    write_whole,
)

logger = logging.getLogger(__name__)

VOLUME = 1 << 24  # tokens
_BATCH = 1 << 20  # bytes of text to tokenise at a time, with a thread for each core
_NONE = np.zeros(0, np.uint16)
_ENDED, _LOCK = "ended", ".lock"  # files beside the volumes


@dataclass(kw_only=True)
class Stream:
    """The volumes of one dataset in a folder of the cache."""

    spec: str
    folder: Path
    codec: Codec
    held_out: float
    length: int | None = None  # tokens of a volume; None: all rows are one volume
    count: int = 1  # volumes that the run needs
    _mapped: dict[int, Tokens] = field(default_factory=dict)  # the last two
    _failed: str | None = None  # the reason why this process could not continue to write

    def path(self, volume: int) -> Path:
        return self.folder / (f"train-{volume}.bin" if volume else "train.bin")

    def volume(self, number: int) -> Tokens:
        """The tokens of a volume; waits until it is written."""
        num_volumes = int((self.folder / _ENDED).read_text()) if self._has_ended else None
        if num_volumes is not None and number >= num_volumes:
            text = "%s has rows for %d volumes only: they are drawn again from the first on"
            warn_once(logger, text, self.spec, num_volumes)
        if number >= self.count and not self.path(number).is_file():
            number %= self.count  # for the batch prepared after the last step, which nobody reads
        if num_volumes is not None:
            number %= num_volumes
        if number not in self._mapped:
            began = time.monotonic()
            while not self.path(number).is_file():
                if self._failed is not None:
                    raise DataError(self._failed)
                if self._has_ended:
                    return self.volume(number)
                if time.monotonic() - began > 5:
                    warn_once(logger, "training waits for rows of %s: steps are faster", self.spec)
                self._write_alone()  # another writer may have ended, or needed fewer volumes
                time.sleep(0.05)
            self._mapped = dict([*self._mapped.items()][-1:])
            self._mapped[number] = open_tokens(self.path(number))[0]
        return self._mapped[number]

    # ------------------------------------------------------------------------------ writing

    def _write_alone(self) -> None:
        """Write volume 0 if it does not exist, and in a thread the other volumes that the run
        needs. Do nothing if another process of this machine writes them."""
        lock = (self.folder / _LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return
        for partial in self.folder.glob("*.partial"):
            partial.unlink(missing_ok=True)  # of a writer that was killed
        written = self._write()
        if not self.path(0).is_file():
            next(written, None)
        thread = threading.Thread(target=self._write_on, args=(written, lock), daemon=True)
        thread.start()

    def _write_on(self, written: Iterator[int], lock: IO[str]) -> None:
        try:
            for _ in written:
                pass
        except Exception as error:  # other ranks try to write when they need the next volume
            problem = f"rows of {self.spec!r} could not be read ({type(error).__name__}: {error})"
            self._failed = f"{problem}: resume the run when they can"
        lock.close()

    def _write(self) -> Iterator[int]:
        """Write the missing volumes in order; yield the number of each."""
        volume = 0
        while self.path(volume).is_file():
            volume += 1
        if volume >= self.count or self._has_ended:
            return
        # The first row to read, and its first token that is in no volume yet.
        first, begin = json.loads(self._mark(volume - 1).read_text()) if volume else (0, 0)
        train = TokenWriter(self.path(volume), self.codec.vocab_size)
        held = None  # held-out rows are written together with volume 0
        if volume == 0:
            held = TokenWriter(self.folder / "held_out.bin", self.codec.vocab_size)
        try:
            for row, is_held, tokens in self._rows(first):
                if is_held:
                    if held is not None:
                        self._add(tokens, held)
                    continue
                while self.length is not None and train.count + len(tokens) - begin > self.length:
                    end = begin + self.length - train.count
                    self._add(tokens[begin:end], train)
                    begin = end
                    if held is not None:
                        if held.count < 2:  # no row so far was held out: take the next such row
                            later = (tokens for _, is_held, tokens in self._rows(row) if is_held)
                            self._add(next(later, _NONE), held)
                        held.close()
                        held = None
                    write_whole(self._mark(volume), json.dumps([row, begin]).encode())
                    train.close()
                    yield volume
                    volume += 1
                    if volume >= self.count:
                        return
                    train = TokenWriter(self.path(volume), self.codec.vocab_size)
                self._add(tokens[begin:], train)
                begin = 0
            write_whole(self.folder / _ENDED, str(max(1, volume)).encode())
            if held is not None:  # the dataset is shorter than a volume
                held.close()
                held = None
                train.close()
                yield volume
        finally:
            for writer in (train, held):
                if writer is not None:
                    writer.discard()

    def _add(self, tokens: Tokens, file: TokenWriter) -> None:
        file.num_bytes = (file.num_bytes or 0) + num_bytes(self.codec, tokens)
        file.add(tokens)

    @property
    def _has_ended(self) -> bool:
        """Whether all rows are written. (A short dataset gets ``ended`` before volume 0.)"""
        return (self.folder / _ENDED).is_file() and self.path(0).is_file()

    def _mark(self, volume: int) -> Path:
        """The file with the end of a volume: a row, and the number of its tokens inside."""
        return self.folder / f"mark-{volume}.json"

    def _rows(self, first: int) -> Iterator[tuple[int, bool, Tokens]]:
        """(number, whether it is held out, tokens) of each row from ``first`` on."""
        batch: list[Document] = []
        size = 0
        for document in dataset_documents(self.spec, first):
            batch.append(document)
            size += len(document.data)
            if size >= _BATCH:
                yield from self._encoded(batch)
                batch, size = [], 0
        yield from self._encoded(batch)

    def _encoded(self, documents: list[Document]) -> Iterator[tuple[int, bool, Tokens]]:
        encoded = encode_each(self.codec, [document.data for document in documents])
        for document, tokens in zip(documents, encoded, strict=True):
            draw = int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8], "big")
            number = int(document.name.rpartition("/")[2])
            yield number, draw < self.held_out * 2**64, tokens


def open_stream(
    spec: str, tokenizer: str, held_out: float, cache: Path, needed: int | None
) -> Stream:
    """The stream of a dataset for a run that needs this number of tokens, with volume 0 written."""
    key = hashlib.sha256(f"{spec}\0{tokenizer}\0{held_out}".encode()).hexdigest()[:16]
    folder = cache / f"dataset-{key}"
    codec = open_codec(tokenizer)
    if codec is None:
        codec = saved_codec(folder) if folder.is_dir() else None
    if codec is None:
        texts = (document.data for document in dataset_documents(spec))
        codec = Pieces.train(texts, codec_named(tokenizer)[1])
        folder.mkdir(parents=True, exist_ok=True)
        write_codec(folder, codec)
    stream = Stream(spec=spec, folder=folder, codec=codec, held_out=held_out)
    if stream.path(0).is_file():
        stream.length = read_header(stream.path(0)).count
    elif needed is not None:
        stream.length = min(VOLUME, needed + 1)
    if stream.length is not None and needed is not None and needed > stream.length:
        stream.count = -(-needed // stream.length) + 1  # windows leave out the end of each volume
    folder.mkdir(parents=True, exist_ok=True)
    stream._write_alone()
    stream.volume(0)
    return stream
