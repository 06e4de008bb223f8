"""Documents -> tokens, each once in a run: a file of tokens for each shard, written by one process, mapped by all.

The files lie in the run directory and are removed after the run's last step. Their names are fingerprints of what was
read (paths, sizes, times of change) and of the tokenizer: what has changed is tokenised anew. Times of change stand for
content, because hashing it would mean reading everything before the first step.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ithaka.config import ConfigError, input_error
from ithaka.data.conversation import Document
from ithaka.data.pack import Documents
from ithaka.data.read import Shard
from ithaka.data.tokenizer import Tokenizer
from ithaka.exits import ExitCode, TransientError, is_transient

CACHE_FORMAT = 4
BATCH_CHARS = 1 << 23  # tokenised at once, on all cores
WAIT_S = 600.0  # without a sign of life from the rank that tokenises
POLL_S = 0.02


class TokenCache:
    """Documents by shard. One process of a node `fills` it, also ahead of need; the others wait for its files."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, fills: bool = True):
        """`directory` is made when something is written."""
        self.directory, self.tokenizer, self.fills, self.closed = directory, tokenizer, fills, False
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._futures: dict[Path, Future[None]] = {}
        for stale in self.directory.glob("*.failed") if fills else ():
            stale.unlink(missing_ok=True)

    def prepare(self, shards: Iterable[Shard]) -> None:
        """Have these tokenised in the background."""
        for shard in shards if self.fills else ():
            path = self._path(shard)
            if path not in self._futures and not path.exists():
                self._futures[path] = self._ahead.submit(self._write, shard, path)

    def load(self, shard: Shard) -> Documents:
        """Waits until the shard is tokenised; raises what reading it raises."""
        path = self._path(shard)
        future = self._futures.pop(path, None)
        if not self.fills:
            self._wait(path, shard)
        elif future is None or future.cancel():
            self._write(shard, path)  # now: in the background, others may come first
        else:
            future.result()
        return _map(path)

    def close(self, remove: bool = False) -> None:
        self.closed = True
        self._ahead.shutdown(cancel_futures=True)
        if remove and self.fills:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.directory.parent.rmdir()  # a run that was refused has nothing else in it

    def _wait(self, path: Path, shard: Shard) -> None:
        life, since = 0, time.monotonic()
        while not path.exists():
            with contextlib.suppress(FileNotFoundError):
                code, _, words = path.with_suffix(".failed").read_text().partition(" ")
                raise TransientError(words) if int(code) == ExitCode.TRANSIENT else ConfigError(words)
            with contextlib.suppress(FileNotFoundError):
                if self.directory.stat().st_mtime_ns != life:
                    life, since = self.directory.stat().st_mtime_ns, time.monotonic()
            if self.closed or time.monotonic() - since > WAIT_S:
                raise TransientError(
                    f"{shard.parts[0].file.path} was not tokenised: the first rank of this node wrote nothing to "
                    f"{self.directory} for {WAIT_S:.0f} s; see its messages; all ranks must see this directory"
                )
            time.sleep(POLL_S)

    def _path(self, shard: Shard) -> Path:
        stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in shard.paths]
        key = repr((CACHE_FORMAT, shard.identity, stats, self.tokenizer.fingerprint))
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
                self._tokenise(shard, file)
            part.replace(path)
        except Exception as error:
            with contextlib.suppress(OSError):
                part.unlink()
            if isinstance(error, OSError):
                words = (
                    f"{shard.parts[0].file.path} cannot be read, or its tokens cannot be written ({error}); put the "
                    "file back, make room, or give another train.run_dir"
                )
                # It was there when the run listed its data: if it is gone for good, the next start says so.
                gone = isinstance(error, FileNotFoundError)
                error = TransientError(words) if gone else input_error(words, error)
            code = ExitCode.TRANSIENT if is_transient(error) else ExitCode.WRONG_INPUT
            with contextlib.suppress(OSError):
                part.write_text(f"{code} {error}")
                part.replace(path.with_suffix(".failed"))
            raise error

    def _tokenise(self, shard: Shard, file: BinaryIO) -> None:
        """tokens int32 [n], lengths int64 [documents], the skipped as JSON, then its bytes and the documents, int64."""
        lengths, skipped = [], Counter[str]()
        for tokens, starts, reason in tokenize(shard, self.tokenizer):
            os.utime(self.directory)  # the sign of life that other ranks look for
            if reason:
                skipped[reason] += 1
                continue
            file.write(tokens.tobytes())
            lengths += [0] if starts else []
            lengths[-1] += len(tokens)
        reasons = json.dumps(skipped).encode()
        file.write(np.asarray(lengths, np.int64).tobytes() + reasons)
        file.write(np.asarray([len(reasons), len(lengths)], np.int64).tobytes())


def tokenize(shard: Shard, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool, str]]:
    """Each document, or part of one: tokens as in Documents, whether they start it, and why to leave it out, or ""."""
    prefix = np.asarray(tokenizer.document_prefix, np.int32)
    suffix = np.asarray([] if tokenizer.eos_id is None else [tokenizer.eos_id], np.int32)
    suffix = suffix if shard.reading.train_on_eos else ~suffix
    for documents in _batches(shard.documents(tokenizer)):
        encoded = tokenizer.encode_batch([each.text for each in documents], [each.trained for each in documents])
        for document, ids in zip(documents, encoded, strict=True):
            ids = ids if document.ids is None else document.ids
            before, after = (each[: len(each) * document.framed] for each in (prefix, suffix))
            tokens = np.concatenate([before[: len(before) * document.first], ids, after[: len(after) * document.last]])
            reason = document.skipped
            if not reason and document.first and document.last:
                reason = "empty" if not len(ids) else "" if (tokens[1:] >= 0).any() else "with nothing to train"
            yield tokens, document.first, reason


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, num_chars = [], 0
    for document in documents:
        batch.append(document)
        num_chars += len(document.text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    yield batch


def _map(path: Path) -> Documents:
    end = path.stat().st_size - 16
    num_bytes, num_documents = (int(n) for n in np.fromfile(path, np.int64, 2, offset=end))
    num_tokens = (end - num_bytes - 8 * num_documents) // 4
    lengths = np.fromfile(path, np.int64, num_documents, offset=4 * num_tokens)
    skipped = np.fromfile(path, np.uint8, num_bytes, offset=end - num_bytes).tobytes()
    tokens = np.memmap(path, np.int32, "r", shape=num_tokens) if num_tokens else np.empty(0, np.int32)
    return Documents(tokens, lengths, json.loads(skipped))
