"""Tokenize each document once per run, into one file per shard that every rank maps into memory. Nodes that share the
run directory share the files.

The files are in the run directory and are removed after the last step, those of streamed data as soon as they are
read. Their names hash the tokenizer and the data files' paths, sizes and modification times, so changed data is
tokenized again. Hashing contents instead would mean reading all the data before the first step. The rank that finds the
data decides the names: on other nodes, copies of the files have other times and paths.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import numpy as np

from ithaka.comm.agree import gather_objects
from ithaka.comm.rank import is_local_rank_0, is_rank_0
from ithaka.config import ConfigError, input_error
from ithaka.data.documents.images import Medium
from ithaka.data.documents.read import Shard
from ithaka.data.documents.records import Document
from ithaka.data.pack import Documents, encode_turn, join_teachers, mark_images
from ithaka.data.tokenizer import Tokenizer
from ithaka.exits import ExitCode, TransientError, is_transient

CACHE_FORMAT = 9  # increase it if other code gives other tokens
BATCH_CHARS = 1 << 23  # tokenized at once, on all cores
TIMEOUT_S = 600.0  # without progress by the rank that tokenizes
PROGRESS_S = 5.0  # at most this often, the rank that tokenizes shows that it does
POLL_S = 0.02  # between looks of a waiting rank at first; then POLL_SHARE of its wait, up to POLL_MAX_S
POLL_SHARE, POLL_MAX_S = 0.1, 2.0
CHECK_S = 5.0  # between looks for errors and progress


def decide_fills(directory: Path) -> bool:
    """Return whether this process tokenizes: rank 0, and the first rank of each node that does not see rank 0's files.
    Collective."""
    own_nodes = gather_objects(is_local_rank_0())
    if sum(own_nodes) == 1:
        return is_local_rank_0()
    folder = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    probe = folder / f".{uuid4().hex}.probe"
    if is_rank_0():
        with contextlib.suppress(OSError):  # reported when tokens are written
            probe.touch()
    sees = (folder / gather_objects(probe.name)[0]).exists()
    gather_objects(sees)  # wait until all ranks have looked
    if is_rank_0():
        probe.unlink(missing_ok=True)
    return is_rank_0() or (is_local_rank_0() and not sees)


class TokenCache:
    """The tokens of each shard. One process per directory `fills` the cache; the others wait for its files."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, fills: bool = True):
        self.directory, self.tokenizer, self.fills, self.closed = directory, tokenizer, fills, False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._futures: dict[Path, Future[None]] = {}
        for stale in self.directory.glob("*.failed") if fills else ():
            stale.unlink(missing_ok=True)

    def prepare(self, shards: Iterable[Shard]) -> None:
        """Tokenize these shards in the background."""
        for shard in shards if self.fills else ():
            path = self._path(shard)
            if path not in self._futures and not path.exists():
                self._futures[path] = self._executor.submit(self._write, shard, path)

    def load(self, shard: Shard) -> Documents:
        """Return the documents of a shard, once it is tokenized. Errors in the data are raised here, on all ranks."""
        path = self._path(shard)
        future = self._futures.pop(path, None)
        if not self.fills:
            self._wait(path, shard)
        elif future is None or future.cancel():
            self._write(shard, path)  # now, instead of behind other shards in the background
        else:
            future.result()
        return _map_file(path)

    def evict(self, shards: Iterable[Shard]) -> None:
        """Delete the tokens of these shards. They are tokenized again if another epoch needs them."""
        for path in [self._path(shard) for shard in shards] if self.fills else []:
            path.unlink(missing_ok=True)
            path.with_suffix(".npy").unlink(missing_ok=True)

    def close(self, remove: bool = False) -> None:
        self.closed = True
        self._executor.shutdown(cancel_futures=True)
        if remove and self.fills:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.directory.parent.rmdir()  # succeeds only if the run wrote nothing else

    def _wait(self, path: Path, shard: Shard) -> None:
        """Wait for another process to write `path`; raise its error if it fails."""
        start_s = time.monotonic()
        last_change, last_progress_s, checked_s = 0, start_s, -math.inf
        while not path.exists():
            now_s = time.monotonic()
            wait_s = max(POLL_S, min(POLL_SHARE * (now_s - start_s), POLL_MAX_S))
            if now_s - checked_s >= min(CHECK_S, 10 * wait_s):
                checked_s = now_s
                with contextlib.suppress(FileNotFoundError):
                    code, _, message = path.with_suffix(".failed").read_text().partition(" ")
                    raise TransientError(message) if int(code) == ExitCode.TRANSIENT else ConfigError(message)
                with contextlib.suppress(FileNotFoundError):
                    change = self.directory.stat().st_mtime_ns
                    if change != last_change:
                        last_change = change
                        last_progress_s = now_s
            if self.closed or now_s - last_progress_s > TIMEOUT_S:
                raise TransientError(
                    f"{shard.parts[0].file.path} was not tokenized: the first rank of this node (or of all) wrote "
                    f"nothing to {self.directory} for {TIMEOUT_S:.0f} s; check its log, and that "
                    "all ranks see this directory"
                )
            time.sleep(wait_s)

    def _path(self, shard: Shard) -> Path:
        stamps = [part.file.stamp for part in shard.parts]
        key = repr((CACHE_FORMAT, shard.identity, stamps, self.tokenizer.fingerprint))
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.tokens"

    def _write(self, shard: Shard, path: Path) -> None:
        if path.exists():
            return
        if self.closed:
            raise RuntimeError("the data is closed")
        part = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}.part")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                self._write_tokens(shard, file, path)
            part.replace(path)
        except Exception as error:
            if isinstance(error, OSError) or is_transient(error):
                message = (
                    f"{shard.parts[0].file.path} cannot be read, or its tokens cannot be written ({error}); restore "
                    "the file, free disk space, or set another train.run_dir"
                )
                # A missing file existed when the run started. If it is gone for good, the restart reports that.
                is_missing = isinstance(error, FileNotFoundError)
                error = TransientError(message) if is_missing else input_error(message, error)
            code = ExitCode.TRANSIENT if is_transient(error) else ExitCode.WRONG_INPUT
            with contextlib.suppress(OSError):
                part.write_text(f"{code} {error}")
                part.replace(path.with_suffix(".failed"))
            raise error

    def _write_tokens(self, shard: Shard, file: BinaryIO, path: Path) -> None:
        """Write tokens (int32), document lengths, encoded turns, starts of further samples and digests of documents
        (int64), counts of skipped documents and of notes, images (JSON), and a footer (int64): bytes of JSON, numbers
        of documents, turns and samples. A teacher's columns have a file of their own."""
        lengths, skipped, notes = [], Counter[str](), Counter[str]()
        turns: list[int] = []
        samples: list[int] = []
        images: list[Medium] = []
        num_tokens, is_new, teachers = 0, True, list[np.ndarray]()
        digests: list[Any] = []
        shown_s = -math.inf
        for part in tokenize(shard, self.tokenizer):
            if time.monotonic() - shown_s >= PROGRESS_S:
                shown_s = time.monotonic()
                os.utime(self.directory)  # shows the waiting ranks that there is progress
            is_new |= part.is_record
            if part.skip_reason:
                skipped[part.skip_reason] += 1
                continue
            tokens = part.tokens
            if part.images:
                tokens = mark_images(tokens, part.images, self.tokenizer.images.ids.values(), len(images))
                images += part.images
            file.write(tokens.tobytes())
            teachers += [] if part.teacher is None else [part.teacher]
            lengths += [0] if is_new else []
            digests += [hashlib.blake2b(digest_size=8)] if is_new else []
            digests[-1].update(part.tokens.tobytes() + repr([image.source for image in part.images]).encode())
            samples += [num_tokens] if part.is_start and not is_new else []
            lengths[-1] += len(part.tokens)
            is_new = False
            turns += [encode_turn(num_tokens + start, role) for start, role in part.turns]
            num_tokens += len(part.tokens)
            notes.update(part.notes)
        if teachers:
            np.save(path.with_suffix(".npy"), join_teachers(teachers))
        counts = json.dumps([skipped, notes, images]).encode()
        file.write(np.asarray([*lengths, *turns, *samples], np.int64).tobytes())
        file.write(b"".join(digest.digest() for digest in digests) + counts)
        file.write(np.asarray([len(counts), len(lengths), len(turns), len(samples)], np.int64).tobytes())


class TokenizedPart(NamedTuple):
    """A document, or a part of a long text. `tokens` are encoded as in Documents. If `skip_reason` is not empty, the
    document is only counted. `turns`: the first token and the role of each message. `spans`: the first token and the
    kind of each span."""

    tokens: np.ndarray
    is_start: bool
    skip_reason: str
    turns: list[tuple[int, str]]
    notes: Mapping[str, int]
    is_record: bool
    spans: list[tuple[int, str]]
    images: Sequence[Medium] = ()
    teacher: np.ndarray | None = None
    is_held_out: bool = False


def tokenize(
    shard: Shard, tokenizer: Tokenizer, batch_chars: int | None = None, with_spans: bool = False
) -> Iterator[TokenizedPart]:
    """Yield the documents of a shard, tokenized in batches. Spans are needed only to show a document."""
    bos = np.asarray(tokenizer.document_prefix, np.int32)
    eos = np.asarray([] if tokenizer.eos_id is None else [tokenizer.eos_id], np.int32)
    eos = eos if shard.reading.train_on_eos else ~eos
    none = np.empty(0, np.int32)
    for documents in _batch_documents(shard.documents(tokenizer), batch_chars or BATCH_CHARS):
        edges = [  # ascending; turns have order 0, spans 1
            sorted(
                ((start, order, label) for order, each in enumerate(lists) for start, label in each),
                key=itemgetter(0, 1),  # if spans start together, all but the last are empty
            )
            for lists in ((each.turns, each.spans if with_spans else ()) for each in documents)
        ]
        starts = [[start for start, _, _ in each] for each in edges]
        encoded = tokenizer.encode_documents(
            [each.text for each in documents], [each.trained for each in documents], starts
        )
        for document, labels, (ids, indices) in zip(documents, edges, encoded, strict=True):
            ids = ids if document.ids is None else document.ids
            prefix = bos if document.add_bos_eos and document.is_start else none
            suffix = eos if document.add_bos_eos and document.is_end else none
            tokens = np.concatenate([prefix, ids, suffix])
            reason = document.skip_reason
            if not reason and document.is_start and document.is_end:
                reason = "empty" if not len(ids) else "" if (tokens[1:] >= 0).any() else "with nothing to train"
            found = [(len(prefix) + i, *label[1:]) for i, label in zip(indices, labels, strict=False)]
            turns, spans = ([(i, label) for i, order, label in found if order == which] for which in (0, 1))
            is_record = document.is_start and document.is_record
            others = turns, document.notes, is_record, spans, document.images, document.teacher, document.is_held_out
            yield TokenizedPart(tokens, document.is_start, reason, *others)


def _batch_documents(documents: Iterable[Document], batch_chars: int) -> Iterator[list[Document]]:
    batch, num_chars = [], 0
    for document in documents:
        batch.append(document)
        num_chars += len(document.text)
        if num_chars >= batch_chars:
            yield batch
            batch, num_chars = [], 0
    yield batch


def _map_file(path: Path) -> Documents:
    end = path.stat().st_size - 32
    num_bytes, *counts = (int(n) for n in np.fromfile(path, np.int64, 4, offset=end))
    num_integers = sum(counts) + counts[0]  # each document has a length and a digest
    num_tokens = (end - num_bytes - 8 * num_integers) // 4
    integers = np.fromfile(path, np.int64, num_integers, offset=4 * num_tokens)
    lengths, turns, samples, digests = np.split(integers, np.cumsum(counts))
    skipped, notes, images = json.loads(np.fromfile(path, np.uint8, num_bytes, offset=end - num_bytes).tobytes())
    tokens = np.memmap(path, np.int32, "r", shape=num_tokens) if num_tokens else np.empty(0, np.int32)
    file, media = path.with_suffix(".npy"), [Medium(*each) for each in images]
    teacher = np.load(file, "r") if file.is_file() else None
    return Documents(tokens, lengths, skipped, turns, notes, samples, images=media, teacher=teacher, digests=digests)
