"""Tokenize each document once per run, into one file per shard that every rank maps into memory.
Nodes that share the run directory share the files.

The files are in the run directory and are removed after the last step, those of streamed data as
soon as they are read. Their names hash the tokenizer and the data files' paths, sizes and
modification times, so changed data is tokenized again. Hashing contents instead would mean reading
all the data before the first step. The rank that finds the data decides the names: on other nodes,
copies of the files have other times and paths.
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
from typing import BinaryIO, NamedTuple
from uuid import uuid4

import numpy as np

from ithaka.comm.agree import gather_objects
from ithaka.comm.rank import is_local_rank_0, is_rank_0
from ithaka.config import ConfigError, input_error
from ithaka.data.documents.images import Medium
from ithaka.data.documents.read import Shard
from ithaka.data.documents.records import Document
from ithaka.data.pack import Documents, encode_turn, join_teachers, mark_images
from ithaka.data.stored_tokens import encode_tokens, is_trained
from ithaka.data.tokenizer import Tokenizer
from ithaka.exits import ExitCode, TransientError, is_transient

CACHE_FORMAT = 9  # increase it if other code gives other tokens
BATCH_CHARS = 1 << 23  # tokenized at once, on all cores
TIMEOUT_S = 600.0  # without progress by the rank that tokenizes
PROGRESS_S = 5.0  # at most this often, the rank that tokenizes shows that it does
# Between looks of a waiting rank: first POLL_S, then POLL_SHARE of its wait, up to POLL_MAX_S.
POLL_S = 0.02
POLL_SHARE = 0.1
POLL_MAX_S = 2.0
CHECK_S = 5.0  # between looks for errors and progress


def decide_fills(directory: Path) -> bool:
    """Return whether this process tokenizes: rank 0, and the first rank of each node that does not
    see rank 0's files. Collective."""
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
    """The tokens of each shard. One process per directory `fills` it; others wait for its files."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, fills: bool = True):
        self.directory = directory
        self.tokenizer = tokenizer
        self.fills = fills
        self.closed = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._futures: dict[Path, Future[None]] = {}
        if fills:
            for stale in self.directory.glob("*.failed"):
                stale.unlink(missing_ok=True)

    def prepare(self, shards: Iterable[Shard]) -> None:
        """Tokenize these shards in the background."""
        if not self.fills:
            return
        for shard in shards:
            path = self._path(shard)
            if path not in self._futures and not path.exists():
                self._futures[path] = self._executor.submit(self._write, shard, path)

    def load(self, shard: Shard) -> Documents:
        """Return the documents of a shard, once it is tokenized. Errors in the data are raised
        here, on all ranks."""
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
        """Delete the tokens of these shards. Another epoch tokenizes them again."""
        if not self.fills:
            return
        for path in map(self._path, shards):
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
        last_change = 0
        last_progress_s = start_s
        checked_s = -math.inf
        while not path.exists():
            now_s = time.monotonic()
            wait_s = max(POLL_S, min(POLL_SHARE * (now_s - start_s), POLL_MAX_S))
            if now_s - checked_s >= min(CHECK_S, 10 * wait_s):
                checked_s = now_s
                with contextlib.suppress(FileNotFoundError):
                    code, _, message = path.with_suffix(".failed").read_text().partition(" ")
                    if int(code) == ExitCode.TRANSIENT:
                        raise TransientError(message)
                    raise ConfigError(message)
                with contextlib.suppress(FileNotFoundError):
                    change = self.directory.stat().st_mtime_ns
                    if change != last_change:
                        last_change = change
                        last_progress_s = now_s
            if self.closed or now_s - last_progress_s > TIMEOUT_S:
                raise TransientError(
                    f"{shard.parts[0].file.path} was not tokenized: the first rank of this node "
                    f"(or of all) wrote nothing to {self.directory} for {TIMEOUT_S:.0f} s; check "
                    "its log, and that all ranks see this directory"
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
                    f"{shard.parts[0].file.path} cannot be read, or its tokens cannot be written "
                    f"({error}); restore the file, free disk space, or set another train.run_dir"
                )
                # A missing file existed when the run started. If it is gone for good, the restart
                # reports that.
                is_missing = isinstance(error, FileNotFoundError)
                error = TransientError(message) if is_missing else input_error(message, error)
            code = ExitCode.TRANSIENT if is_transient(error) else ExitCode.WRONG_INPUT
            with contextlib.suppress(OSError):
                part.write_text(f"{code} {error}")
                part.replace(path.with_suffix(".failed"))
            raise error

    def _write_tokens(self, shard: Shard, file: BinaryIO, path: Path) -> None:
        """Write tokens (int32), document lengths, encoded turns, starts of further samples and
        digests of documents (int64), counts of skipped documents and of notes, images (JSON), and a
        footer (int64): bytes of JSON, numbers of documents, turns and samples. A teacher's columns
        have a file of their own."""
        lengths: list[int] = []
        turns: list[int] = []
        samples: list[int] = []
        digests: list[hashlib.blake2b] = []
        skipped = Counter[str]()
        notes = Counter[str]()
        images: list[Medium] = []
        teachers: list[np.ndarray] = []
        num_tokens = 0
        is_new = True  # whether a document starts
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
                ids = self.tokenizer.images.ids.values()
                tokens = mark_images(tokens, part.images, ids, len(images))
                images += part.images
            file.write(tokens.tobytes())
            if part.teacher is not None:
                teachers.append(part.teacher)
            if is_new:
                lengths.append(0)
                digests.append(hashlib.blake2b(digest_size=8))
            elif part.is_start:
                samples.append(num_tokens)
            sources = repr([image.source for image in part.images])
            digests[-1].update(part.tokens.tobytes() + sources.encode())
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
        footer = [len(counts), len(lengths), len(turns), len(samples)]
        file.write(np.asarray(footer, np.int64).tobytes())


class TokenizedPart(NamedTuple):
    """A document, or a part of a long text. `tokens` are encoded as in Documents. If `skip_reason`
    is not empty, the document is only counted. `turns`: the first token and the role of each
    message. `spans`: the first token and the kind of each span."""

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
    """Yield the documents of a shard. Spans are needed only to show a document."""
    bos = np.asarray(tokenizer.document_prefix, np.int32)
    eos = np.asarray([] if tokenizer.eos_id is None else [tokenizer.eos_id], np.int32)
    eos = encode_tokens(eos, shard.reading.train_on_eos)
    none = np.empty(0, np.int32)
    for documents in _batch_documents(shard.documents(tokenizer), batch_chars or BATCH_CHARS):
        edges = [_list_edges(document, with_spans) for document in documents]
        encoded = tokenizer.encode_documents(
            [document.text for document in documents],
            [document.trained for document in documents],
            [list(map(itemgetter(0), each)) for each in edges],
        )
        for document, labels, (ids, indices) in zip(documents, edges, encoded, strict=True):
            ids = ids if document.ids is None else document.ids
            prefix = bos if document.add_bos_eos and document.is_start else none
            suffix = eos if document.add_bos_eos and document.is_end else none
            tokens = np.concatenate([prefix, ids, suffix])
            reason = document.skip_reason
            if not reason and document.is_start and document.is_end:
                if not len(ids):
                    reason = "empty"
                elif not is_trained(tokens[1:]).any():
                    reason = "with nothing to train"
            turns: list[tuple[int, str]] = []
            spans: list[tuple[int, str]] = []
            for i, edge in zip(indices, labels, strict=False):
                (spans if edge.is_span else turns).append((len(prefix) + i, edge.label))
            yield TokenizedPart(
                tokens,
                document.is_start,
                reason,
                turns,
                document.notes,
                document.is_start and document.is_record,
                spans,
                document.images,
                document.teacher,
                document.is_held_out,
            )


class TextEdge(NamedTuple):
    """Where a turn or a span starts in a text."""

    char: int
    is_span: bool
    label: str


def _list_edges(document: Document, with_spans: bool) -> list[TextEdge]:
    """Return the turns, and the spans if needed, in the order of the text."""
    edges = [TextEdge(start, False, role) for start, role in document.turns]
    if with_spans:
        edges += [TextEdge(start, True, kind) for start, kind in document.spans]
    return sorted(edges, key=itemgetter(0, 1))  # of spans that start together, the last has text


def _batch_documents(documents: Iterable[Document], batch_chars: int) -> Iterator[list[Document]]:
    batch = []
    num_chars = 0
    for document in documents:
        batch.append(document)
        num_chars += len(document.text)
        if num_chars >= batch_chars:
            yield batch
            batch = []
            num_chars = 0
    yield batch


def _map_file(path: Path) -> Documents:
    """Read what `_write_tokens` wrote; the tokens stay on disk."""
    end = path.stat().st_size - 32
    num_bytes, *counts = (int(n) for n in np.fromfile(path, np.int64, 4, offset=end))
    num_integers = sum(counts) + counts[0]  # each document has a length and a digest
    num_tokens = (end - num_bytes - 8 * num_integers) // 4
    tokens = np.empty(0, np.int32)
    if num_tokens:
        tokens = np.memmap(path, np.int32, "r", shape=num_tokens)
    integers = np.fromfile(path, np.int64, num_integers, offset=4 * num_tokens)
    lengths, turns, samples, digests = np.split(integers, np.cumsum(counts))
    text = np.fromfile(path, np.uint8, num_bytes, offset=end - num_bytes).tobytes()
    skipped, notes, images = json.loads(text)
    teacher = path.with_suffix(".npy")
    return Documents(
        tokens,
        lengths,
        skipped,
        turns,
        notes,
        samples,
        images=[Medium(*image) for image in images],
        teacher=np.load(teacher, "r") if teacher.is_file() else None,
        digests=digests,
    )
