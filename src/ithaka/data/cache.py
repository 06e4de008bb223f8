"""Documents -> tokens, each once in a run: a file of tokens for each shard, written by one process, mapped by all.

The files lie in the run directory and go when the run has done its last step. Their names are fingerprints of what was
read (paths, sizes, times of change) and of the tokenizer: what has changed is tokenised anew. Times of change stand for
content, because hashing it would mean reading everything before the first step.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ithaka.config import ConfigError
from ithaka.data.pack import Documents
from ithaka.data.read import RecordShard, Shard, Text, TokenShard, open_dataset
from ithaka.data.tokenizer import Tokenizer

WAIT_S = 600.0  # without any progress, on a rank that waits for the one that tokenises
POLL_S = 0.02
FORMAT = 1
BATCH_CHARS = 1 << 23  # tokenised at once, on all cores


class TokenCache:
    """Documents by shard. One process of a node `fills` it, in a thread of its own; the others wait for the files."""

    def __init__(self, directory: Path | None, tokenizer: Tokenizer | None, fills: bool = True):
        """`directory` None: a temporary one. It is made when something is written."""
        self.temporary = tempfile.TemporaryDirectory(prefix="ithaka-tokens-") if directory is None else None
        self.directory = Path(self.temporary.name) if self.temporary else Path(directory or "")
        self.tokenizer, self.fills = tokenizer, fills
        self._wanted: deque[Shard] = deque()
        self._changed = threading.Condition()
        self._errors: dict[Path, str] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        for stale in self.directory.glob("*.failed") if fills else ():
            stale.unlink(missing_ok=True)

    def load(self, shard: Shard) -> Documents:
        """Waits until the shard is tokenised; raises what reading it raised."""
        if isinstance(shard, TokenShard):
            return shard.documents()
        path = self._path(shard)
        if not path.exists():
            self._want([shard], first=True)
            self._wait(path, shard)
        return _map(path, shard.continues)

    def prepare(self, shards: Iterable[Shard]) -> None:
        """Have these tokenised in the background, after what is wanted already."""
        self._want([s for s in shards if not isinstance(s, TokenShard) and not self._path(s).exists()], first=False)

    def close(self, remove: bool = False) -> None:
        with self._changed:
            self._closed, thread = True, self._thread
        if thread is not None:
            thread.join(timeout=10)
        if self.temporary is not None:
            self.temporary.cleanup()
        elif remove and self.fills:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.directory.parent.rmdir()  # a run that was refused has nothing else in it

    def _want(self, shards: list[Shard], first: bool) -> None:
        if not self.fills or not shards:
            return
        with self._changed:
            self._wanted.extendleft(reversed(shards)) if first else self._wanted.extend(shards)
            if self._thread is None:
                self._thread = threading.Thread(target=self._fill, name="tokenise", daemon=True)
                self._thread.start()

    def _wait(self, path: Path, shard: Shard) -> None:
        progress, since = 0, time.monotonic()
        while not path.exists():
            failed = path.with_suffix(".failed")
            error = self._errors.get(path) or (failed.read_text() if not self.fills and failed.exists() else None)
            if error:
                raise ConfigError(error)
            changed = self.directory.stat().st_mtime_ns if self.directory.exists() else 0
            if changed != progress:
                progress, since = changed, time.monotonic()
            if time.monotonic() - since > WAIT_S:
                raise TimeoutError(
                    f"{shard.parts[0].path} was not tokenised: the first rank of this node wrote nothing to "
                    f"{self.directory} for {WAIT_S:.0f} s; see what it says, and that all ranks see this directory"
                )
            with self._changed:
                self._changed.wait(POLL_S)

    def _fill(self) -> None:
        while True:
            with self._changed:
                if self._closed or not self._wanted:
                    self._thread = None
                    return
                shard = self._wanted.popleft()
            path = self._path(shard)
            try:
                if not path.exists():
                    self._write(shard, path)
            except Exception as error:
                self._fail(path, error)
            with self._changed:
                self._changed.notify_all()

    def _fail(self, path: Path, error: Exception) -> None:
        text = str(error)
        if isinstance(error, OSError):
            text = f"tokens cannot be written to {self.directory} or their text not be read ({error}); make room, or "
            text += "give another train.run_dir"
        elif not isinstance(error, ConfigError):
            text = f"tokenising failed: {type(error).__name__}: {error}"
        self._errors[path] = text
        with contextlib.suppress(OSError):
            path.with_suffix(".failed").write_text(text)

    def _path(self, shard: Shard) -> Path:
        assert self.tokenizer is not None, "checked when the shards were made"
        files = [part.path for part in shard.parts]
        if isinstance(shard, RecordShard) and shard.file.kind == "arrow":
            files = [Path(each["filename"]) for each in open_dataset(shard.file).cache_files]
        stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        key = repr((FORMAT, shard.identity, stats, self.tokenizer.fingerprint))
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.tokens"

    def _write(self, shard: Shard, path: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                self._tokenise(shard, file)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _tokenise(self, shard: Shard, file: BinaryIO) -> None:
        """tokens int32 [n], starts int64 [documents], then the number of documents and of those skipped, int64."""
        tokenizer = self.tokenizer
        assert tokenizer is not None
        prefix = np.asarray(tokenizer.document_prefix, np.int32)
        suffix = np.asarray([] if tokenizer.eos_id is None else [tokenizer.eos_id], np.int32)
        starts, num_tokens, num_skipped = [], 0, 0
        for texts in _batches(shard.texts()):
            for ids, text in zip(tokenizer.encode_batch([text.text for text in texts]), texts, strict=True):
                if text.first and text.last and not len(ids):
                    num_skipped += 1
                    continue
                starts += [num_tokens] if text.first else []
                for part in (prefix if text.first else prefix[:0], ids, suffix if text.last else suffix[:0]):
                    file.write(part.tobytes())
                    num_tokens += len(part)
            os.utime(self.directory)  # the sign of life that others wait for
        file.write(np.asarray([*starts, len(starts), num_skipped], np.int64).tobytes())


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    batch, num_chars = [], 0
    for text in texts:
        batch.append(text)
        num_chars += len(text.text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    yield batch


def _map(path: Path, continues: bool) -> Documents:
    size = path.stat().st_size
    num_documents, num_skipped = (int(n) for n in np.fromfile(path, np.int64, 2, offset=size - 16))
    num_tokens = (size - 16 - 8 * num_documents) // 4
    starts = np.fromfile(path, np.int64, num_documents, offset=4 * num_tokens)
    tokens = np.memmap(path, np.int32, "r", shape=num_tokens) if num_tokens else np.empty(0, np.int32)
    return Documents(tokens, starts, continues, num_skipped)
